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

_SCRIPT = Path(__file__).with_name("aot.py")
_ARCHES = (80, 90, 100)
_NUM_PROCESSES = 2


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    """One record per kernel that a case launches, for each architecture."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    processes = [
        subprocess.Popen(
            [sys.executable, _SCRIPT, "--shard", f"{shard}/{_NUM_PROCESSES}"],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for shard in range(_NUM_PROCESSES)
    ]
    results = [(*process.communicate(timeout=600), process.returncode) for process in processes]
    for _, errors, code in results:
        assert code == 0, errors
    found = [json.loads(line) for output, _, _ in results for line in output.splitlines()]
    assert {record["arch"] for record in found} == set(_ARCHES)
    sources = "".join(path.read_text() for path in Path(qgnn.kernels.__path__[0]).glob("*.py"))
    assert {record["kernel"] for record in found} == set(re.findall(r"^def (_\w+_kernel)\(", sources, re.MULTILINE))
    return found


def _where(record: dict[str, Any]) -> str:
    return f"{record['kernel']} of {record['case']} on sm_{record['arch']}"


def _select(records: list[dict[str, Any]], kernel: str) -> list[dict[str, Any]]:
    found = [record for record in records if re.fullmatch(kernel, record["kernel"])]
    assert found
    return found


def _count(record: dict[str, Any], pattern: str) -> int:
    return sum(n for name, n in record["instructions"].items() if re.fullmatch(pattern, name))


def test_no_kernel_spills_registers(records: list[dict[str, Any]]) -> None:
    for record in records:
        assert record["stack"] == 0, f"{_where(record)} keeps {record['stack']} bytes on its stack"
        assert _count(record, r"(LDL|STL)\b.*") == 0, f"{_where(record)} uses local memory"


def test_integer_products_run_on_int8_tensor_cores(records: list[dict[str, Any]]) -> None:
    for record in _select(records, r"_(quantize_)?matmul(_requantize)?_kernel"):
        assert _count(record, r"(IMMA|IGMMA|UTCIMMA)\b.*") > 0, _where(record)


def test_weight_gradients_run_on_fp16_tensor_cores(records: list[dict[str, Any]]) -> None:
    for record in _select(records, "_matmul_dw_kernel"):
        assert _count(record, r"(HMMA|HGMMA|UTCHMMA)\b.*") > 0, _where(record)


def test_rows_are_read_in_vectors_of_16_bytes(records: list[dict[str, Any]]) -> None:
    """No byte is loaded alone; all but rows of 1433 floats, which start on no vector boundary, and columns have wide
    loads."""
    for record in records:
        assert _count(record, r"(LDG|LDGSTS)\b.*\.[US](8|16)\b.*") == 0, f"{_where(record)} has narrow loads"
        if not re.search("1433|column_major", record["case"]) and record["kernel"] != "_add_partials_kernel":
            assert _count(record, r"(LDG|LDGSTS)\b.*\.128\b.*") > 0, f"{_where(record)} has no wide loads"


def test_codes_are_written_in_vectors(records: list[dict[str, Any]]) -> None:
    for record in _select(records, ".*quantize(_grad)?_kernel"):
        assert _count(record, r"STG\b.*\.(64|128)\b.*") > 0, _where(record)
        assert _count(record, r"STG\b.*\.[US](8|16)\b.*") == 0, f"{_where(record)} stores codes one by one"


def test_aggregation_converts_no_signed_integers(records: list[dict[str, Any]]) -> None:
    """Conversions of signed bytes run at a quarter of the rate of other instructions."""
    for record in _select(records, "_spmm.*kernel"):
        assert _count(record, r"I2F(P)?\b.*\.S(8|16|32)\b.*") == 0, _where(record)
