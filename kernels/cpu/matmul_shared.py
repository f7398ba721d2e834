"""The dense product of int8 codes whose blocks of columns share a power of two, on a CPU.

    y[n, m] = sum_b dot[n, m, b] * 2**(w_exponent[m, b] - 127 - fraction_bits) * 2**(x_exponent[n, b] - 127) + bias[m]

Numerics: the dot product of a block is exact; it is multiplied by one factor after the other, and sums are made in
order of the blocks. Equal to the reference in every bit, with and without the CPU's instructions for products of bytes.

Oracle: qgnn.reference.matmul_shared
"""

from functools import cache

import torch
from qgnn.kernels.cpu.library import PARTS, empty_floats, launch, rows_of
from torch import Tensor

_TILE, _ROWS, _ALIGN = 16, 6, 4  # as in matmul_shared.c


def matmul_shared(
    x_q: Tensor,
    x_exponent: Tensor,
    w_q: Tensor,
    w_exponent: Tensor,
    bias: Tensor | None = None,
    *,
    block_size: int,
    fraction_bits: int,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``y = x w^T + bias``; the parameters are those of :func:`qgnn.reference.matmul_shared`."""
    (N, K), M = x_q.shape, w_q.shape[0]
    out = empty_floats(N, M)
    if out.numel() == 0:
        return out.to(out_dtype)
    x_q, w_q = rows_of(x_q, torch.int8), rows_of(w_q, torch.int8)
    x_exponent, w_exponent = rows_of(x_exponent, torch.uint8), rows_of(w_exponent, torch.uint8)
    bias = None if bias is None else bias.detach().float().contiguous()
    tiles, blocks, width = -(-M // _TILE), x_exponent.shape[1], -(-block_size // _ALIGN) * _ALIGN
    code_bytes, parts = _code_bytes(), min(PARTS, -(-N // _ROWS))
    packed = torch.empty((tiles, blocks, width, _TILE, code_bytes), dtype=torch.uint8)
    scratch = torch.empty((parts, blocks, _ROWS, 4 + width * code_bytes), dtype=torch.uint8)
    offset = torch.empty((tiles, blocks, _TILE), dtype=torch.int32)
    factor, last = empty_floats(tiles, blocks, _TILE), empty_floats(tiles, _TILE)
    strides = (w_q.stride(0), w_exponent.stride(0))
    sizes = (block_size, fraction_bits)
    arranged = (packed, offset, factor, last)
    launch("qgnn_matmul_shared_pack", *arranged, w_q, w_exponent, bias, M, K, *strides, *sizes)
    operands = (out, scratch, *arranged, x_q, x_exponent)
    strides = (x_q.stride(0), x_exponent.stride(0))
    launch("qgnn_matmul_shared", *operands, N, M, K, *strides, block_size, parts)
    return out.to(out_dtype)


@cache
def _code_bytes() -> int:
    """Bytes of a rearranged code, which depend on what the library was compiled for."""
    size = torch.empty(1, dtype=torch.int64)
    launch("qgnn_matmul_shared_code_bytes", size)
    return int(size)
