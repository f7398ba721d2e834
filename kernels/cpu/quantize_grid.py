"""Rounding to grids with shared powers of two, and to affine ones, in C.

Numerics: bit-equal to the reference. A block is read once from memory: its extrema are found and its values rounded
while it lies in the first-level cache. Those of more than 512 columns are read twice; a row that is one block is shared
by the threads if there are fewer rows than these. Half types and matrices of any strides are read as they are, a few
values at a time: no copy is made. A transposed matrix, as of blocks along the nodes, is transposed back in tiles in the
cache.

Oracle: qgnn.reference.quantize_dequantize, quantize_shared
"""

from typing import Any

import torch
from qgnn.kernels.cpu.library import FLOAT_TYPES, empty_codes, launch, stream_key
from torch import Tensor

_INTEGERS, _FLOATS, _AFFINE = 0, 2, 3  # as in quantize_grid.c


def quantize_dequantize(x: Tensor, grid: Any, *, seed: Tensor | None = None, stream: int = 0) -> Tensor:
    """The values of the grid that those of ``x`` become, in the type of ``x``."""
    y = torch.empty(x.shape, dtype=x.dtype)
    if x.numel() == 0:
        return y
    kind = _AFFINE if grid.affine else _INTEGERS if grid.is_uniform else _FLOATS
    scale = (int(grid.round_up), grid.max_exponent, grid.fraction_bits)
    elements = (grid.mantissa_bits, grid.min_exponent, float(grid.low), float(grid.high))
    launch("qgnn_quantize_grid_values", y, x, seed, stream_key(stream), *_sizes(x, grid), kind, *scale, *elements)
    return y


def quantize_shared(x: Tensor, grid: Any, *, seed: Tensor | None = None, stream: int = 0) -> tuple[Tensor, Tensor]:
    """Codes int8 ``[R, C]`` and exponents uint8, one a block, on a grid of integers."""
    R, C = x.shape
    codes = empty_codes(R, C)
    num_blocks = -(-C // grid.block_size) if grid.block_size else 1
    if x.numel() == 0:
        return codes, torch.zeros((R, num_blocks), dtype=torch.uint8)
    exponent = torch.empty((R, num_blocks), dtype=torch.uint8)
    scale = (int(grid.round_up), grid.max_exponent, grid.fraction_bits, float(grid.low), float(grid.high))
    launch("qgnn_quantize_grid_codes", codes, exponent, x, seed, stream_key(stream), *_sizes(x, grid), *scale)
    return codes, exponent


def _sizes(x: Tensor, grid: Any) -> tuple[int, ...]:
    """Sizes, strides and type of a matrix, and the columns of a block."""
    C = x.shape[1]
    return *x.shape, *x.stride(), FLOAT_TYPES[x.dtype], min(grid.block_size or C, C)
