"""What the kernels' machine code must look like, checked by compiling for three GPUs without having one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import qgnn.kernels

from house import ROOT

_ARCHES = (80, 90, 100)

Record = dict[str, Any]


class Budget(NamedTuple):
    """The most instructions of each kind that a thread executes for an element, in code for any architecture.

    An element is what WORK in bench/sass/cases.py says. ``conversions`` are I2F and F2I, a quarter as fast as others;
    ``on_sm_80`` is what that architecture, which has no fast conversion of integers (I2FP), needs on top.
    """

    total: float
    imul: float
    conversions: float
    on_sm_80: float = 0.0


# The first line whose pattern is found in "kernel case" counts. Totals leave a tenth to the differences between
# compilers: what was counted with Triton 3.6 and 3.9 is in brackets.
_BUDGETS: dict[str, Budget] = {
    # A hash serves two values and multiplies three times, its first step being shared by rows and columns in part:
    # 1 to 1.5 a value, the rest are addresses (1.06 to 1.62). F2I: the rounding. Total: 3 for the absmax, 3 for scaling
    # and packing, 10 for random bits (15.1 to 17.2).
    r"_quantize_kernel .*fp32/F(16|100|128|256|1433)(/block|/tensor|/two_passes)?/sm": Budget(19, 1.75, 1),
    r"_quantize_kernel .*nearest": Budget(14, 1.25, 1),  # no hash; bf16 widens by a multiplication (12.0 to 12.5)
    r"_quantize_kernel .*column_major": Budget(29, 2.1, 1),  # an address and a load of 4 bytes a value (26 to 26.6)
    # Scaling and storing an output take 2, the product's operands and addresses the rest (9.4 to 12.4; 18.2 on sm_80).
    # With an epilogue: the hash of dropout and the mask's bits (25 to 28.4).
    r"_matmul_kernel .*/activation": Budget(31, 2.1, 0, on_sm_80=1),
    r"_matmul_kernel .*K(128|256)": Budget(13.5, 0.5, 0, on_sm_80=6.5),
    r"_matmul_kernel .*M47": Budget(22.5, 2.5, 0, on_sm_80=1),  # rows of 47 floats: stored one by one (15.6 to 20.6)
    # Rounding on top of the product, as in quantize (13.6 to 19.7 to nearest, 18.4 to 25.8; 31.6 on sm_80).
    r"_matmul_requantize_kernel .*nearest": Budget(20.5, 0.25, 1, on_sm_80=1.5),
    r"_matmul_requantize_kernel .*M256": Budget(27.5, 1.75, 1, on_sm_80=7.5),
    r"_matmul_requantize_kernel .*M64": Budget(31, 2, 1, on_sm_80=8.5),  # half the tile, the same scales
    # The hash of dropout comes to that of rounding: 1.5 more a value, and 4 for the mask's bits (22.7 to 31.3).
    r"_quantize_matmul_kernel .*/activation": Budget(33, 2.4, 1.1),
    # Rounding of the values, half of them here, and scaling of the outputs (10.6 to 14.7); of M47 the outputs are few
    # and stored one by one (17.3 to 20.4).
    r"_quantize_matmul_kernel .*M256": Budget(16, 0.7, 1.1),
    r"_quantize_matmul_kernel .*M47": Budget(22.5, 1.75, 1.1),
    # Every value and every output is rounded: 15 to 17, and the product's operands and addresses (17.1 to 30.3).
    r"_quantize_matmul_requantize_kernel .*K512": Budget(33, 3.4, 1, on_sm_80=1),
    r"_quantize_matmul_requantize_kernel": Budget(29.5, 1.8, 1, on_sm_80=1),
    # The quantizer, a sum (FADD), and with a mask a bit and a choice (15.8 to 17.2, 19 to 22.2); bf16 widens by a
    # multiplication.
    r"_quantize_grad_kernel .*unmasked": Budget(19, 1.35, 1),
    r"_quantize_grad_kernel .*fp32": Budget(23, 1.35, 1),
    r"_quantize_grad_kernel .*bf16": Budget(24.5, 2.4, 1),
    r"_masked_grad_kernel": Budget(12.5, 0.75, 0),  # a bit, a product, a choice, and addresses of both (11.3)
    # Codes become fp16 by bits: a PRMT, half a LOP3 and half an HADD2 (4.5 to 4.9). sm_80 transposes in registers.
    r"_matmul_dw_kernel": Budget(5.4, 0.25, 0, on_sm_80=2.9),
    # Memory-bound whatever it does: an address and an addition a result; few outputs share less (3.7 to 4.2; 50).
    r"_add_partials_kernel .*M256": Budget(4.6, 0.85, 0),
    r"_add_partials_kernel .*quantize_grad/(fp32/F128|bf16)": Budget(4.6, 0.85, 0),
    r"_add_partials_kernel": Budget(55, 14.5, 0),
    # Two codes are split by one PRMT and half an HADD2 each; the tile of weights, its exponent and 64-bit addresses are
    # shared by the columns, so narrow slices cost more (2.6 to 2.9; 3.2 to 3.4; 4.3 to 4.5). No conversions at all.
    r"_spmm_tile_kernel .*(F64|/H4)/sm": Budget(5, 0.1, 0),
    r"_spmm_tile_kernel .*F(100|128|602)": Budget(3.8, 0.1, 0),
    r"_spmm_tile_kernel": Budget(3.2, 0.02, 0),
    # Widening by a multiplication, then FFMA (3.9 to 4.4); of fp32, addresses and masks of loads twice as many (2.9 to
    # 5), and an address and a load of each head's weight (5.3 to 8.7).
    r"_spmm_rows_kernel .*bf16": Budget(4.9, 1.4, 0),
    r"_spmm_rows_kernel .*fp32/F128/H4": Budget(9.6, 0.05, 0),
    r"_spmm_rows_kernel .*fp32": Budget(5.5, 0.55, 0),
    # A byte is split off (PRMT), converted (I2FP), freed of its bias (FADD) and added (FFMA); the rest are addresses,
    # masks and the edge's factor, shared by 16 columns only (5.5 to 7.1).
    r"_spmm_rows_kernel .*int8": Budget(7.9, 0.15, 0, on_sm_80=1),
    r"_spmm_hubs_kernel": Budget(4.1, 0.3, 0),  # a load, an addition and their share of a mask (2.6 to 3.7)
    # A product, two comparisons (NaN), two choices, and the edge (10.6 to 12.5).
    r"_spmm_extremum_kernel": Budget(13.8, 0.55, 0, on_sm_80=1),
    r"_spmm_extremum_hubs_kernel": Budget(12, 0.05, 0),  # two loads in place of one (10.4 to 10.9)
    # Both bytes are split off (PRMT) and multiplied in int32, products added in a tree (4.2 to 4.9).
    r"_sddmm_kernel .*int8": Budget(5.5, 1.05, 0.1),
    r"_sddmm_kernel .*fp32": Budget(8.6, 0.05, 0),  # eight shuffles an edge of 128 values (7.2 to 7.8)
}


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


def test_sums_of_codes_with_scales_run_on_fp16_tensor_cores(records: list[Record]) -> None:
    for record in _select(records, "_matmul_dw_kernel|_spmm_tile_kernel"):
        assert _count(record, "mma_fp16") > 0, _where(record)


def test_aggregations_transpose_codes_in_hardware(records: list[Record]) -> None:
    """... as 16-bit words; bytes would be read from shared memory one by one."""
    for record in _select(records, "_spmm_tile_kernel"):
        assert record["loop"].get("ldmatrix", 0) > 0, _where(record)
        assert record["loop"]["ldmatrix"] > record["loop"].get("shared_load", 0), _where(record)


def test_rows_are_read_in_vectors_of_16_bytes(records: list[Record]) -> None:
    """No byte is loaded alone, and vectors bring every value. Exceptions are rows of 1433 floats, which start on no
    vector boundary, columns, and rows that sm_80 copies into shared memory as its products take them, 8 bytes each."""
    for record in records:
        assert _count(record, "global_load_b(8|16)") == 0, f"{_where(record)} has narrow loads"
        if not re.search("1433|column_major", record["case"]) and record["kernel"] != "_add_partials_kernel":
            assert _count(record, "global_load_b128") > 0, f"{_where(record)} has no wide loads"
    for record in _select(records, "_quantize_kernel|_matmul_dw_kernel|_spmm.*kernel|_sddmm_kernel"):
        name = record["case"]
        if not re.search("1433|column_major|matmul_dw.*sm_80", name):
            itemsize = 4 if "fp32" in name else 2 if "bf16" in name else 1
            in_vectors = 16 * record["per_element"].get("global_load_b128", 0)
            assert in_vectors >= itemsize, f"{_where(record)} loads {in_vectors} of {itemsize} bytes in vectors"


def test_codes_are_written_in_vectors(records: list[Record]) -> None:
    for record in _select(records, ".*quantize.*_kernel"):
        assert _count(record, "global_store_b(64|128)") > 0, _where(record)
        if "activation" not in record["case"]:  # the bytes of a mask, eight values each
            assert _count(record, "global_store_b(8|16)") == 0, f"{_where(record)} stores codes one by one"


def test_aggregation_has_no_slow_conversion_in_its_loop(records: list[Record]) -> None:
    """Conversions of signed integers run at a quarter of the rate of other instructions; sm_80 has no other."""
    for record in _select(records, "_spmm.*kernel"):
        if _arch(record) >= 90:
            assert "i2f" not in (record["loop"] or record["instructions"]), _where(record)


def test_instructions_stay_within_the_budgets(records: list[Record]) -> None:
    for record in records:
        name = f"{record['kernel']} {record['case']}"
        budget = next((budget for pattern, budget in _BUDGETS.items() if re.match(pattern, name)), None)
        assert budget is not None, f"{name} has no budget"
        extra = budget.on_sm_80 if _arch(record) == 80 else 0.0
        each = record["per_element"]
        conversions = each.get("i2f", 0.0) + each.get("f2i", 0.0)
        assert each["total"] <= budget.total + extra, f"{name}: {each['total']} instructions per {record['unit']}"
        assert each.get("imul", 0.0) <= budget.imul, f"{name}: {each['imul']} multiplications per {record['unit']}"
        assert conversions <= budget.conversions + min(extra, 1.0), f"{name}: {conversions} conversions"


def test_every_budget_is_some_kernels(records: list[Record]) -> None:
    names = [f"{record['kernel']} {record['case']}" for record in records]
    for pattern in _BUDGETS:
        assert any(re.match(pattern, name) for name in names), pattern
