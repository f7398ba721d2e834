"""The dense product of int8 codes whose blocks share a power of two."""

from __future__ import annotations

import torch
from torch import Tensor

from qgnn.kernels.shared_exponents import check_shared
from qgnn.reference._common import row_chunks

_NAN_BLOCK = 255
_BIAS = 127
_FLOAT64_BIAS, _FLOAT64_MANTISSA = 1023, 52


def _power_of_two(exponent: Tensor) -> Tensor:
    """Exactly ``2**exponent`` as float64: ``torch.exp2`` promises the last digit no more than other functions do."""
    return (exponent + _FLOAT64_BIAS).bitwise_left_shift(_FLOAT64_MANTISSA).view(torch.float64)


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
    """``y = x w^T + bias`` from codes in blocks of ``G`` columns with a power of two each::

        y[n, m] = sum_b 2**(x_exponent[n, b] + w_exponent[m, b] - 254 - fraction_bits) * dot[n, m, b]  + bias[m]

    The integer dot product of a block times its power of two is rounded to fp32, where that cannot hold it (results
    below ``2**-126`` lose digits, those beyond the largest number become infinite), and so are the sums, made in order
    of the blocks, and the sum with the bias; with a float64 result all is float64. A block with the exponent 255 makes
    its row or column NaN.

    Args:
        x_q: Codes of ``x``.
        x_exponent: Exponents of its blocks, biased by 127.
        w_q: Codes of ``w``.
        w_exponent: Exponents of its blocks, biased by 127.
        bias: What is added to each row.
        block_size: Columns ``G`` of a block, 1 to 128. The last one of a row may be shorter.
        fraction_bits: Bits behind the point, of both operands together.
        out_dtype: Type of the result.

    Shapes:
        - **input:** int8 ``x_q [N, K]`` and ``w_q [M, K]``, uint8 ``x_exponent [N, ceil(K / G)]`` and
          ``w_exponent [M, ceil(K / G)]``, ``bias [M]``
        - **output:** ``[N, M]`` of ``out_dtype``

    Raises:
        ValueError: If a size does not fit.
    """
    check_shared(x_q, x_exponent, w_q, w_exponent, block_size)
    (N, K), M = x_q.shape, w_q.shape[0]
    dtype = torch.float64 if out_dtype == torch.float64 else torch.float32
    out = torch.empty((N, M), dtype=out_dtype, device=x_q.device)
    for rows in row_chunks(N, max(K, M)):
        y = torch.zeros((rows.stop - rows.start, M), dtype=dtype, device=x_q.device)
        for b in range(x_exponent.shape[1]):
            block = slice(b * block_size, (b + 1) * block_size)
            dot = x_q[rows, block].double() @ w_q[:, block].double().t()
            of_x, of_w = x_exponent[rows, b, None].long(), w_exponent[:, b].long()
            factor = _power_of_two(of_x + of_w - 2 * _BIAS - fraction_bits)
            factor = factor.masked_fill((of_x == _NAN_BLOCK) | (of_w == _NAN_BLOCK), float("nan"))
            y += (dot * factor).to(dtype)
        out[rows] = y if bias is None else y + bias.to(dtype)
    return out
