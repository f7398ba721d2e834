"""The calls of launchers that are compiled, by name; a kernel that none of them launches fails a test.

To add one: a line in ``CASES``, for a new kernel another one in ``WORK``, and its budget in tests/kernels/test_aot.py.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from qgnn.kernels.matmul import matmul, matmul_dw, matmul_requantize
from qgnn.kernels.memory import empty_codes
from qgnn.kernels.quantize import quantize
from qgnn.kernels.sddmm import sddmm
from qgnn.kernels.spmm import spmm, spmm_requantize

NUM_NODES = 4096
MEAN_DEGREE = 14

SEED = torch.zeros(1, dtype=torch.int64)
INDPTR = torch.empty(NUM_NODES + 1, dtype=torch.int32)
INDEX = torch.empty(NUM_NODES * MEAN_DEGREE, dtype=torch.int32)
LONG_INDEX = torch.empty(NUM_NODES * 51, dtype=torch.int32)
WEIGHT = torch.empty(NUM_NODES * MEAN_DEGREE)
SCALE = torch.empty(NUM_NODES)


def _codes(width: int, rows: int = NUM_NODES) -> torch.Tensor:
    return empty_codes(rows, width, torch.device("cpu"))


def _rows(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros((NUM_NODES, width), dtype=dtype)


def _product(function: Callable[..., Any], num_inputs: int, num_outputs: int, **kwargs: Any) -> Callable[[], Any]:
    weight = _codes(num_inputs, num_outputs)
    return lambda: function(_codes(num_inputs), SCALE, weight, torch.empty(num_outputs), **kwargs)


_int8_spmm = functools.partial(spmm, INDPTR, INDEX, weight=WEIGHT, x_scale=SCALE)

CASES: dict[str, Callable[[], Any]] = {
    "quantize/fp32/F128": lambda: quantize(_rows(128), seed=SEED),
    "quantize/fp32/F128/column_major": lambda: quantize(torch.zeros(128, NUM_NODES).t(), seed=SEED),
    "quantize/bf16/F256/nearest": lambda: quantize(_rows(256, torch.bfloat16)),
    "quantize/fp32/F16": lambda: quantize(_rows(16), seed=SEED),
    "quantize/fp32/F100": lambda: quantize(_rows(100), seed=SEED),
    "quantize/fp32/F1433/two_passes": lambda: quantize(_rows(1433), seed=SEED),
    "quantize/fp32/F256/block": lambda: quantize(_rows(256), granularity="block", seed=SEED),
    "quantize/fp32/F256/tensor": lambda: quantize(_rows(256), granularity="tensor", seed=SEED),
    "matmul/fp32/K128/M256": _product(matmul, 128, 256),
    "matmul/bf16/K256/M128/bias": _product(matmul, 256, 128, bias=torch.empty(128), out_dtype=torch.bfloat16),
    "matmul/fp32/K256/M256": _product(matmul, 256, 256),
    "matmul/fp32/K100/M47": _product(matmul, 100, 47),
    "matmul_requantize/K128/M256": _product(matmul_requantize, 128, 256, seed=SEED),
    "matmul_requantize/K128/M256/nearest": _product(matmul_requantize, 128, 256),
    "matmul_requantize/K256/M256": _product(matmul_requantize, 256, 256, seed=SEED),
    "matmul_requantize/K256/M64": _product(matmul_requantize, 256, 64, seed=SEED),
    "matmul_dw/K128/M256": lambda: matmul_dw(_codes(256), SCALE, _codes(128), SCALE),
    "matmul_dw/K256/M256": lambda: matmul_dw(_codes(256), SCALE, _codes(256), SCALE),
    "matmul_dw/K100/M47": lambda: matmul_dw(_codes(47), SCALE, _codes(100), SCALE),
    "spmm/int8/F64": lambda: _int8_spmm(_codes(64)),
    "spmm/int8/F128": lambda: _int8_spmm(_codes(128)),
    "spmm/int8/F256/epilogue": lambda: _int8_spmm(_codes(256), row_factor=SCALE, bias=torch.empty(256)),
    "spmm/int8/F100": lambda: _int8_spmm(_codes(100)),
    "spmm/int8/F602": lambda: _int8_spmm(_codes(602)),
    "spmm/int8/F128/degree51": lambda: spmm(INDPTR, LONG_INDEX, _codes(128), x_scale=SCALE),
    "spmm/fp32/F128": lambda: spmm(INDPTR, INDEX, _rows(128), weight=WEIGHT),
    "spmm/bf16/F128": lambda: spmm(INDPTR, INDEX, _rows(128, torch.bfloat16), weight=WEIGHT),
    "spmm_requantize/F256": lambda: spmm_requantize(
        INDPTR, INDEX, _codes(256), weight=WEIGHT, x_scale=SCALE, row_factor=SCALE, seed=SEED
    ),
    "spmm_requantize/F1024": lambda: spmm_requantize(INDPTR, INDEX, _codes(1024), x_scale=SCALE, seed=SEED),
    "sddmm/int8/F128": lambda: sddmm(INDPTR, INDEX, _codes(128), _codes(128), target_scale=SCALE, source_scale=SCALE),
    "sddmm/int8/F602": lambda: sddmm(INDPTR, INDEX, _codes(602), _codes(602), target_scale=SCALE, source_scale=SCALE),
    "sddmm/fp32/F128": lambda: sddmm(INDPTR, INDEX, _rows(128), _rows(128)),
}

# What most models spend their time in is compiled for every architecture, the variants of it for one.
MAIN = {
    "quantize/fp32/F128",
    "matmul/fp32/K128/M256",
    "matmul_requantize/K128/M256",
    "matmul_dw/K128/M256",
    "spmm/int8/F256/epilogue",
    "spmm_requantize/F256",
    "sddmm/int8/F128",
}


class Work(NamedTuple):
    """What instructions of a kernel are divided by.

    Args:
        unit: What an element is.
        elements: How many of them a program deals with, from the arguments of a launch; in one trip of its longest
            innermost loop if ``in_loop`` and there is one.
        in_loop: Whether the loop's instructions count, and not all.
    """

    unit: str
    elements: Callable[[dict[str, Any]], int]
    in_loop: bool = True


def _tile(*sizes: str) -> Callable[[dict[str, Any]], int]:
    return lambda launch: functools.reduce(lambda product, name: product * launch[name], sizes, 1)


_GATHERED = Work("gathered value", _tile("ROWS", "BLOCK_E", "BLOCK_F"))

WORK: dict[str, Work] = {
    "_quantize_kernel": Work("value", _tile("BLOCK_N", "BLOCK_F")),
    "_matmul_kernel": Work("output", _tile("BLOCK_N", "BLOCK_M"), in_loop=False),
    "_matmul_requantize_kernel": Work("output", _tile("BLOCK_N", "BLOCK_M"), in_loop=False),
    "_matmul_dw_kernel": Work("code", lambda launch: launch["BLOCK_N"] * (launch["BLOCK_M"] + launch["BLOCK_K"])),
    "_add_partials_kernel": Work("output", _tile("BLOCK"), in_loop=False),
    "_spmm_kernel": _GATHERED,
    "_spmm_requantize_kernel": _GATHERED,
    "_sddmm_kernel": _GATHERED,
}
