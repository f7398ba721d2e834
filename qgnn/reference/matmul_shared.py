"""The dense product of int8 codes whose blocks share a power of two."""

from __future__ import annotations

import torch
from torch import Tensor

from qgnn.reference._common import row_chunks
from qgnn.rounding import shared_scale


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

        y[n, m] = sum_b (dot[n, m, b] * 2**(w_exponent[m, b] - 127 - fraction_bits)) * 2**(x_exponent[n, b] - 127)
                  + bias[m]

    The integer dot product ``dot`` of a block is exact. All else is fp32, or float64 for such a result, each operation
    rounded once: the two products, of which the first is exact or infinite (it is the dot product of codes of ``x`` and
    values of ``w``), and the second loses digits below ``2**-126`` only; the sums, in order of the blocks; the sum with
    the bias. A block with the exponent 255 makes its row or column NaN.

    Args:
        x_q: Codes of ``x``.
        x_exponent: Exponents of its blocks, biased by 127.
        w_q: Codes of ``w``.
        w_exponent: Exponents of its blocks, biased by 127.
        bias: What is added to each row.
        block_size: Columns ``G`` of a block, 1 to 128. The last one of a row may be shorter.
        fraction_bits: Bits behind the point, of both operands together, 0 to 22.
        out_dtype: Type of the result.

    Shapes:
        - **input:** int8 ``x_q [N, K]`` and ``w_q [M, K]``, uint8 ``x_exponent [N, ceil(K / G)]`` and
          ``w_exponent [M, ceil(K / G)]``, ``bias [M]``
        - **output:** ``[N, M]`` of ``out_dtype``
    """
    (N, K), M = x_q.shape, w_q.shape[0]
    dtype = torch.float64 if out_dtype == torch.float64 else torch.float32
    out = torch.empty((N, M), dtype=out_dtype, device=x_q.device)
    for rows in row_chunks(N, max(K, M)):
        y = torch.zeros((rows.stop - rows.start, M), dtype=dtype, device=x_q.device)
        for b in range(x_exponent.shape[1]):
            block = slice(b * block_size, (b + 1) * block_size)
            dot = x_q[rows, block].double() @ w_q[:, block].double().t()
            of_x = shared_scale(x_exponent[rows, b], 0, dtype)
            of_w = shared_scale(w_exponent[:, b], fraction_bits, dtype)
            y += dot.to(dtype) * of_w * of_x[:, None]
        out[rows] = y if bias is None else y + bias.to(dtype)
    return out
