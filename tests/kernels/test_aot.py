"""What the kernels' machine code must look like, checked by compiling for three GPUs without having one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import qgnn.kernels

from house import ROOT
from machine_budgets import BUDGETS

_ARCHES = (80, 90, 100)

Record = dict[str, Any]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """One record per kernel that a case launches; the variants of the main cases for one architecture only."""
    path = tmp_path_factory.mktemp("sass") / "records.jsonl"
    isolated = ["-P"] if sys.flags.safe_path else []
    command = [sys.executable, *isolated, "-m", "bench", "sass", "--quick", "--json", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert {_arch(record) for record in found} == set(_ARCHES)
    sources = "".join(path.read_text() for path in Path(qgnn.kernels.__path__[0]).glob("*.py"))
    assert {record["kernel"] for record in found} == set(re.findall(r"^def (_\w+_kernel)\(", sources, re.MULTILINE))
    # Every kernel is in a main case: those are compiled for all architectures, and run under compute-sanitizer.
    assert {r["kernel"] for r in found if _arch(r) != 90} == {r["kernel"] for r in found}
    for record in found:
        assert record["case"] in result.stdout
    return found


def _arch(record: Record) -> int:
    return int(record["case"].rpartition("/sm_")[2])


def _where(record: Record) -> str:
    return f"{record['kernel']} of {record['case']}"


def _select(records: list[Record], kernel: str) -> list[Record]:
    found = [record for record in records if re.fullmatch(kernel, record["kernel"])]
    assert found
    return found


def _count(record: Record, kind: str) -> int:
    return sum(n for name, n in record["instructions"].items() if re.fullmatch(kind, name))


def test_records_say_what_was_compiled_and_with_what(records: list[Record]) -> None:
    for record in records:
        assert record["suite"] == "sass"
        assert 8 <= record["registers"] <= 255
        assert record["threads"] == 32 * record["tiles"]["num_warps"]
        assert record["instructions"]["total"] == sum(record["instructions"].values()) - record["instructions"]["total"]
        assert record["loop"] is None or record["loop"]["total"] < record["instructions"]["total"]
        assert {"triton", "torch", "qgnn"} <= set(record["versions"])
        assert {"commit", "dirty", "utc"} <= set(record)


def test_no_kernel_spills_registers(records: list[Record]) -> None:
    for record in records:
        assert record["stack"] == 0, f"{_where(record)} keeps {record['stack']} bytes on its stack"
        assert _count(record, "local") == 0, f"{_where(record)} uses local memory"


def test_integer_products_run_on_int8_tensor_cores(records: list[Record]) -> None:
    for record in _select(records, ".*matmul(_requantize)?_kernel"):
        assert _count(record, "mma_int8") > 0, _where(record)


def test_products_of_blocks_run_on_tensor_cores(records: list[Record]) -> None:
    """Of 16 columns in fp16, of 32 in int8."""
    for record in _select(records, "_matmul_shared_kernel"):
        kind = "mma_fp16" if "G16" in record["case"] else "mma_int8"
        assert _count(record, kind) > 0, _where(record)


def test_sums_of_codes_with_scales_run_on_fp16_tensor_cores(records: list[Record]) -> None:
    for record in _select(records, "_matmul_dw_kernel|_spmm_tile_kernel"):
        assert _count(record, "mma_fp16") > 0, _where(record)


def test_projections_run_on_tensor_cores(records: list[Record]) -> None:
    """In TF32; the listing does not tell its type of the asynchronous products of sm_90 and sm_100."""
    for record in _select(records, "_blocks_(un)?project_kernel"):
        assert _count(record, "mma_tf32|mma_fp16") > 0, _where(record)


def test_aggregations_transpose_codes_in_hardware(records: list[Record]) -> None:
    """... as 16-bit words; bytes would be read from shared memory one by one."""
    for record in _select(records, "_spmm_tile_kernel"):
        assert record["loop"].get("ldmatrix", 0) > 0, _where(record)
        assert record["loop"]["ldmatrix"] > record["loop"].get("shared_load", 0), _where(record)


_NARROW = (
    "1433|column_major|H1/|F64/H8|D8|matmul_shared.*G16|_add_partials_kernel|bf16.*projection|"
    "_blocks_un(pack|project)_kernel|_codes_(un)?pack_kernel"
)


def test_rows_are_read_in_vectors_of_16_bytes(records: list[Record]) -> None:
    """No byte is loaded alone, and vectors bring every value. Exceptions are rows of 1433 floats, which start on no
    vector boundary, columns, scores of one head, whose rows start anywhere, heads of 8 codes, which are 2 bytes a
    thread, blocks of 16 codes with an exponent, which two threads read, rows that sm_80 copies into shared memory as
    its products take them, 8 bytes each (sm_90 those of bf16 that are projected), packed blocks, which are little
    beside what is made of them, and codes by groups of eight, which are stored from any byte on."""
    for record in records:
        if "D8/" not in record["case"] and record["kernel"] != "_codes_unpack_kernel":
            assert _count(record, "global_load_b(8|16)") == 0, f"{_where(record)} has narrow loads"
        if not re.search(_NARROW, f"{record['kernel']} {record['case']}"):
            assert _count(record, "global_load_b128") > 0, f"{_where(record)} has no wide loads"
    for record in _select(
        records,
        "_(activation|spmm|sddmm|attention).*kernel|_(quantize|quantize_grid|matmul_dw|blocks_pack)_kernel",
    ):
        name = record["case"]
        # Triton 3.6 makes the loop over a hub's scalars on sm_100 longer than that over its rows.
        if not re.search("1433|column_major|F64/H8|D8|matmul_dw.*sm_80|gatv2_backward/int8/.*/sm_100", name):
            itemsize = 4 if "fp32" in name else 2 if "bf16" in name else 1
            in_vectors = 16 * record["per_element"].get("global_load_b128", 0)
            assert in_vectors >= itemsize, f"{_where(record)} loads {in_vectors} of {itemsize} bytes in vectors"


def test_codes_are_written_in_vectors(records: list[Record]) -> None:
    for record in _select(records, ".*quantize.*_kernel"):
        assert _count(record, "global_store_b(64|128)") > 0, _where(record)
        if not re.search("activation|shared", record["case"]):  # a byte of a mask or an exponent: several values each
            assert _count(record, "global_store_b(8|16)") == 0, f"{_where(record)} stores codes one by one"


def test_packed_bytes_are_not_written_one_by_one(records: list[Record]) -> None:
    for record in _select(records, "_blocks_(pack|project)_kernel"):
        assert _count(record, "global_store_b8") == 0, f"{_where(record)} stores bytes one by one"


def test_aggregation_has_no_slow_conversion_in_its_loop(records: list[Record]) -> None:
    """Conversions of signed integers run at a quarter of the rate of other instructions; sm_80 has no other."""
    for record in _select(records, "_spmm.*kernel"):
        if _arch(record) >= 90:
            assert "i2f" not in (record["loop"] or record["instructions"]), _where(record)


def test_instructions_stay_within_the_budgets(records: list[Record]) -> None:
    for record in records:
        name = f"{record['kernel']} {record['case']}"
        budget = next((budget for pattern, budget in BUDGETS.items() if re.match(pattern, name)), None)
        assert budget is not None, f"{name} has no budget"
        extra = budget.on_sm_80 if _arch(record) == 80 else 0.0
        each = record["per_element"]
        conversions = each.get("i2f", 0.0) + each.get("f2i", 0.0)
        assert each["total"] <= budget.total + extra, f"{name}: {each['total']} instructions per {record['unit']}"
        assert each.get("imul", 0.0) <= budget.imul, f"{name}: {each['imul']} multiplications per {record['unit']}"
        assert conversions <= budget.conversions + min(extra, 1.0), f"{name}: {conversions} conversions"


def test_every_budget_is_some_kernels(records: list[Record]) -> None:
    names = [f"{record['kernel']} {record['case']}" for record in records]
    for pattern in BUDGETS:
        assert any(re.match(pattern, name) for name in names), pattern
