"""The dense product of int8 codes whose blocks of columns share a power of two, on a CPU.

    y[n, m] = sum_b dot[n, m, b] * 2**(w_exponent[m, b] - 127 - fraction_bits) * 2**(x_exponent[n, b] - 127) + bias[m]

Numerics: the dot product of a block is exact; it is multiplied by one factor after the other, and sums are made in
order of the blocks. Equal to the reference in every bit, with and without the CPU's instructions for products of bytes.

Oracle: qgnn.reference.matmul_shared
"""

import torch
from qgnn.kernels.cpu.library import PARTS, launch, rows_of
from qgnn.kernels.shared_exponents import check_shared
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
    check_shared(x_q, x_exponent, w_q, w_exponent, block_size, fraction_bits)
    (N, K), M = x_q.shape, w_q.shape[0]
    out = torch.empty((N, M))
    if out.numel() == 0:
        return out.to(out_dtype)
    x_q, w_q = rows_of(x_q, torch.int8), rows_of(w_q, torch.int8)
    x_exponent, w_exponent = rows_of(x_exponent, torch.uint8), rows_of(w_exponent, torch.uint8)
    bias = None if bias is None else bias.detach().float().contiguous()
    tiles, blocks, width = -(-M // _TILE), x_exponent.shape[1], -(-block_size // _ALIGN) * _ALIGN
    # Words for codes that may be bytes: what the library was compiled to is not seen here.
    packed = torch.empty((tiles, blocks, width, _TILE), dtype=torch.int32)
    parts = min(PARTS, -(-N // _ROWS))
    scratch = torch.empty((parts, blocks, _ROWS, width + 2), dtype=torch.int32)
    factor, last = torch.empty((tiles, blocks, _TILE)), torch.empty((tiles, _TILE))
    strides = (w_q.stride(0), w_exponent.stride(0))
    sizes = (block_size, fraction_bits)
    launch("qgnn_matmul_shared_pack", packed, factor, last, w_q, w_exponent, bias, M, K, *strides, *sizes)
    operands = (out, scratch, packed, factor, last, x_q, x_exponent)
    strides = (x_q.stride(0), x_exponent.stride(0))
    launch("qgnn_matmul_shared", *operands, N, M, K, *strides, block_size, parts)
    return out.to(out_dtype)
