"""Quantization and dense products of int8 codes."""

from __future__ import annotations

import torch
from torch import Tensor

from qgnn.activation import Activation
from qgnn.packing import per_value
from qgnn.reference._common import compute_dtype, row_chunks, stream_seed
from qgnn.reference.activation import activate, activation_backward
from qgnn.rng import random_bits16
from qgnn.rounding import absmax_scale, round_codes

_EXACT_TERMS = 1024  # 1024 * 127 * 127 < 2**24: an fp32 sum of products of int8 codes is still exact


def _fill_codes(codes: Tensor, x: Tensor, inverse: Tensor, first_row: int, seed: Tensor | None) -> None:
    """Round ``x * inverse`` into ``codes``; rows are numbered from ``first_row`` for the hash."""
    bits16 = None if seed is None else random_bits16(first_row, x.shape[0], x.shape[1], seed)
    codes.copy_(round_codes(x, inverse, bits16))


def _group_absmax(x: Tensor, block_size: int) -> Tensor:
    """max|x| over blocks of ``block_size`` columns: [R, F] -> [R, ceil(F / block_size)]."""
    num_rows, width = x.shape
    num_blocks = -(-width // block_size)
    padded = torch.nn.functional.pad(x.abs(), (0, num_blocks * block_size - width))
    return padded.view(num_rows, num_blocks, block_size).amax(2)


def quantize(
    x: Tensor,
    *,
    bits: int = 8,
    granularity: str = "row",
    block_size: int = 128,
    seed: Tensor | None = None,
    stream: int = 0,
) -> tuple[Tensor, Tensor]:
    """Symmetric integer codes of a matrix and their scales.

    Args:
        x: Values.
        bits: Width of a code, 2 to 8.
        granularity: What shares a scale: ``"row"``, ``"tensor"`` or ``"block"`` (``block_size`` columns of a row).
        block_size: Columns of a block.
        seed: Seed of the stochastic rounding, or ``None`` to round to nearest.
        stream: Number of the seed's stream.

    Shapes:
        - **input:** ``[N, F]``, float
        - **output:** codes int8 ``[N, F]``; scale fp32 ``[N]``, ``[1]`` or ``[N, ceil(F / block_size)]``
    """
    num_rows, width = x.shape
    seed = stream_seed(seed, stream)
    codes = torch.empty((num_rows, width), dtype=torch.int8, device=x.device)
    if granularity == "tensor":
        absmax = torch.linalg.vector_norm(x, float("inf")) if x.numel() else x.new_zeros(())
        scale, inverse = absmax_scale(absmax.float().reshape(1), bits)
        for rows in row_chunks(num_rows, width):
            _fill_codes(codes[rows], x[rows].float(), inverse[:, None], rows.start, seed)
        return codes, scale
    group = min(block_size, max(1, width)) if granularity == "block" else width
    num_groups = -(-width // group) if width else 0
    scale = torch.zeros((num_rows, num_groups), dtype=torch.float32, device=x.device)
    for rows in row_chunks(num_rows, width) if width else ():
        chunk = x[rows].float()
        scale[rows], inverse = absmax_scale(_group_absmax(chunk, group), bits)
        if num_groups > 1:
            inverse = per_value(inverse, group, width)
        _fill_codes(codes[rows], chunk, inverse, rows.start, seed)
    if granularity == "block":
        return codes, scale
    return codes, scale.squeeze(1) if width else scale.new_zeros(num_rows)


def quantize_grad(
    grad: Tensor,
    *,
    bits: int = 8,
    granularity: str = "row",
    seed: Tensor | None = None,
    stream: int = 0,
    mask: Tensor | None = None,
    factor: float = 1.0,
    sum_columns: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """:func:`quantize` of a gradient before an activation, and beside it the gradient of a bias.

    Args:
        grad: Gradient behind the activation.
        bits: Width of a code, 2 to 8.
        granularity: ``"row"`` or ``"tensor"``.
        seed: Seed of the stochastic rounding, or ``None`` to round to nearest.
        stream: Number of the seed's stream.
        mask: Bits of the activation; ``None``: there was none.
        factor: Factor of the elements that it passed.
        sum_columns: Whether the sums of the columns are wanted.

    Shapes:
        - **input:** ``grad [N, F]``, ``mask`` uint8 ``[N, ceil(F / 8)]``
        - **output:** codes int8 ``[N, F]``; scale fp32 ``[N]`` or ``[1]``; sums before rounding ``[F]``, fp32 (float64
          for float64 input), or ``None``
    """
    wide = grad.to(compute_dtype(grad))
    if mask is not None:
        wide, _ = activation_backward(wide, mask, factor=factor)
    codes, scale = quantize(wide, bits=bits, granularity=granularity, seed=seed, stream=stream)
    return codes, scale, wide.sum(0) if sum_columns else None


def _integer_product(x_q: Tensor, w_q: Tensor) -> Tensor:
    """Exact ``x_q @ w_q.T`` of int8 codes, in fp32 where it fits 24 bits and int32 beyond: [N, K], [M, K] -> [N, M]."""
    total = x_q[:, :_EXACT_TERMS].float() @ w_q[:, :_EXACT_TERMS].float().t()
    if x_q.shape[1] > _EXACT_TERMS:
        total = total.to(torch.int32)
        for start in range(_EXACT_TERMS, x_q.shape[1], _EXACT_TERMS):
            terms = slice(start, start + _EXACT_TERMS)
            total += (x_q[:, terms].float() @ w_q[:, terms].float().t()).to(torch.int32)
    return total.float()


def matmul(
    x_q: Tensor,
    x_scale: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.float32,
    activation: Activation | None = None,
) -> Tensor:
    """``y = x w^T + bias`` from int8 operands, and what follows it; the integer sum is exact, scales, bias and
    activation are applied in fp32.

    Args:
        x_q: Codes of ``x``.
        x_scale: Scales of its rows, or one.
        w_q: Codes of ``w``.
        w_scale: Scales of its rows.
        bias: Added to each row.
        out_dtype: Type of the result.
        activation: ReLU and dropout, applied last.

    Shapes:
        - **input:** ``x_q [N, K]``, ``x_scale [N]`` or ``[1]``, ``w_q [M, K]``, ``w_scale [M]``, ``bias [M]``
        - **output:** ``[N, M]`` of ``out_dtype``
    """
    num_rows, num_outputs = x_q.shape[0], w_q.shape[0]
    out = torch.empty((num_rows, num_outputs), dtype=out_dtype, device=x_q.device)
    x_scale = x_scale.expand(num_rows)
    for rows in row_chunks(num_rows, max(x_q.shape[1], num_outputs)):
        y = (_integer_product(x_q[rows], w_q) * x_scale[rows, None]) * w_scale[None, :]
        y = y if bias is None else y + bias.float()
        out[rows] = y if activation is None else activate(y, activation, rows.start)
    return out


def matmul_requantize(
    x_q: Tensor,
    x_scale: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    *,
    bits: int = 8,
    seed: Tensor | None = None,
    stream: int = 0,
) -> tuple[Tensor, Tensor]:
    """``x w^T`` from int8 operands, rounded to int8 rows again. The row scale of ``x`` does not enter the codes.

    Args:
        x_q: Codes of ``x``.
        x_scale: Scales of its rows, or one.
        w_q: Codes of ``w``.
        w_scale: Scales of its rows.
        bits: Width of a code, 2 to 8.
        seed: Seed of the stochastic rounding, or ``None`` to round to nearest.
        stream: Number of the seed's stream.

    Shapes:
        - **input:** as :func:`matmul`
        - **output:** codes int8 ``[N, M]``, scale fp32 ``[N]``
    """
    num_rows, num_outputs = x_q.shape[0], w_q.shape[0]
    seed = stream_seed(seed, stream)
    codes = torch.empty((num_rows, num_outputs), dtype=torch.int8, device=x_q.device)
    scale = torch.zeros(num_rows, dtype=torch.float32, device=x_q.device)
    if num_outputs == 0:
        return codes, scale
    for rows in row_chunks(num_rows, max(x_q.shape[1], num_outputs)):
        y = _integer_product(x_q[rows], w_q) * w_scale[None, :]
        scale[rows], inverse = absmax_scale(y.abs().amax(1), bits)
        _fill_codes(codes[rows], y, inverse[:, None], rows.start, seed)
    return codes, scale * x_scale


def quantize_matmul(
    x: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    *,
    bits: int = 8,
    seed: Tensor | None = None,
    stream: int = 0,
    out_dtype: torch.dtype = torch.float32,
    activation: Activation | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`quantize` with a scale a row, then :func:`matmul` with the codes.

    Args:
        x: Values.
        w_q: Codes of ``w``.
        w_scale: Scales of its rows.
        bias: Added to each row.
        bits: Width of a code, 2 to 8.
        seed: Seed of the stochastic rounding, or ``None`` to round to nearest.
        stream: Number of the seed's stream.
        out_dtype: Type of the result.
        activation: ReLU and dropout, applied last.

    Shapes:
        - **input:** ``x [N, K]`` float, ``w_q [M, K]``, ``w_scale [M]``, ``bias [M]``
        - **output:** ``y [N, M]`` of ``out_dtype``; codes int8 ``[N, K]`` and scale fp32 ``[N]`` of ``x``
    """
    x_q, x_scale = quantize(x, bits=bits, seed=seed, stream=stream)
    y = matmul(x_q, x_scale, w_q, w_scale, bias, out_dtype=out_dtype, activation=activation)
    return y, x_q, x_scale


def quantize_matmul_requantize(
    x: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    *,
    bits: int = 8,
    seed: Tensor | None = None,
    stream: int = 0,
    hidden_stream: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`quantize` with a scale a row, then :func:`matmul_requantize`, whose rounding has the stream
    ``hidden_stream``.

    Args:
        x: Values.
        w_q: Codes of ``w``.
        w_scale: Scales of its rows.
        bits: Width of a code, 2 to 8.
        seed: Seed of the stochastic rounding, or ``None`` to round to nearest.
        stream: Number of the seed's stream.
        hidden_stream: Number of the stream that the product is rounded with.

    Shapes:
        - **input:** ``x [N, K]`` float, ``w_q [M, K]``, ``w_scale [M]``
        - **output:** codes int8 ``[N, M]`` and scale fp32 ``[N]`` of the product; codes int8 ``[N, K]`` and scale fp32
          ``[N]`` of ``x``
    """
    x_q, x_scale = quantize(x, bits=bits, seed=seed, stream=stream)
    hidden = matmul_requantize(x_q, x_scale, w_q, w_scale, bits=bits, seed=seed, stream=hidden_stream)
    return (*hidden, x_q, x_scale)


def matmul_dw(g_q: Tensor, g_scale: Tensor, x_q: Tensor, x_scale: Tensor) -> Tensor:
    """``dW = g^T x``, contracted over rows: both row scales are folded into ``g``, sums are fp32.

    Args:
        g_q: Codes of the gradient.
        g_scale: Scales of its rows, or one.
        x_q: Codes of ``x``.
        x_scale: Scales of its rows, or one.

    Shapes:
        - **input:** ``g_q [N, M]``, ``g_scale [N]`` or ``[1]``, ``x_q [N, K]``, ``x_scale [N]`` or ``[1]``
        - **output:** fp32 ``[M, K]``
    """
    num_rows = g_q.shape[0]
    out = torch.zeros((g_q.shape[1], x_q.shape[1]), dtype=torch.float32, device=g_q.device)
    factor = (g_scale * x_scale).expand(num_rows)
    for rows in row_chunks(num_rows, max(g_q.shape[1], x_q.shape[1])):
        out.addmm_((g_q[rows].float() * factor[rows, None]).t(), x_q[rows].float())
    return out
