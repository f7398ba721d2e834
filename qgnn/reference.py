"""Every primitive as one plain PyTorch function.

These functions define what the primitives compute: kernels are compared with them, bit for bit where a result is an
integer or a rounded code. They are also the path of machines without a GPU, so they walk over large inputs in chunks
that stay in cache, but contain no other trick. None of them carries gradients: ``qgnn.ops`` adds those.

Quantized pairs obey ``x = x_q * x_scale``. A seed is an int64 tensor of shape ``[1]``; ``None`` rounds to nearest.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from qgnn.formats import absmax_scale, round_codes
from qgnn.rng import random_bits16, stream_key

NAME = "torch"

with warnings.catch_warnings():  # torch says once a process that CSR tensors are in beta; users of qgnn never see one
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor(torch.tensor([0, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([]), size=(1, 1))

_CHUNK_ELEMENTS = 1 << 20  # 4 MiB of fp32: stays in the last-level cache, and is worth waking the threads for
_EXACT_TERMS = 1024  # 1024 * 127 * 127 < 2**24: an fp32 sum of products of int8 codes is still exact


def _row_chunks(num_rows: int, row_elements: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, row_elements))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _stream_seed(seed: Tensor | None, stream: int) -> Tensor | None:
    return None if seed is None else seed ^ stream_key(stream)


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
    seed = _stream_seed(seed, stream)
    codes = torch.empty((num_rows, width), dtype=torch.int8, device=x.device)
    if granularity == "tensor":
        absmax = torch.linalg.vector_norm(x, float("inf")) if x.numel() else x.new_zeros(())
        scale, inverse = absmax_scale(absmax.float().reshape(1), bits)
        for rows in _row_chunks(num_rows, width):
            _fill_codes(codes[rows], x[rows].float(), inverse[:, None], rows.start, seed)
        return codes, scale
    group = min(block_size, max(1, width)) if granularity == "block" else width
    num_groups = -(-width // group) if width else 0
    scale = torch.zeros((num_rows, num_groups), dtype=torch.float32, device=x.device)
    for rows in _row_chunks(num_rows, width) if width else ():
        chunk = x[rows].float()
        scale[rows], inverse = absmax_scale(_group_absmax(chunk, group), bits)
        if num_groups > 1:
            inverse = inverse.repeat_interleave(group, dim=1)[:, :width]
        _fill_codes(codes[rows], chunk, inverse, rows.start, seed)
    if granularity == "block":
        return codes, scale
    return codes, scale.squeeze(1) if width else scale.new_zeros(num_rows)


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
) -> Tensor:
    """``y = x w^T + bias`` from int8 operands; the integer sum is exact, scales and bias are applied in fp32.

    Shapes:
        - **input:** ``x_q [N, K]``, ``x_scale [N]`` or ``[1]``, ``w_q [M, K]``, ``w_scale [M]``, ``bias [M]``
        - **output:** ``[N, M]`` of ``out_dtype``
    """
    num_rows, num_outputs = x_q.shape[0], w_q.shape[0]
    out = torch.empty((num_rows, num_outputs), dtype=out_dtype, device=x_q.device)
    x_scale = x_scale.expand(num_rows)
    for rows in _row_chunks(num_rows, max(x_q.shape[1], num_outputs)):
        y = (_integer_product(x_q[rows], w_q) * x_scale[rows, None]) * w_scale[None, :]
        out[rows] = y if bias is None else y + bias.float()
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

    Shapes:
        - **input:** as :func:`matmul`
        - **output:** codes int8 ``[N, M]``, scale fp32 ``[N]``
    """
    num_rows, num_outputs = x_q.shape[0], w_q.shape[0]
    seed = _stream_seed(seed, stream)
    codes = torch.empty((num_rows, num_outputs), dtype=torch.int8, device=x_q.device)
    scale = torch.zeros(num_rows, dtype=torch.float32, device=x_q.device)
    if num_outputs == 0:
        return codes, scale
    for rows in _row_chunks(num_rows, max(x_q.shape[1], num_outputs)):
        y = _integer_product(x_q[rows], w_q) * w_scale[None, :]
        scale[rows], inverse = absmax_scale(y.abs().amax(1), bits)
        _fill_codes(codes[rows], y, inverse[:, None], rows.start, seed)
    return codes, scale * x_scale


def matmul_dw(g_q: Tensor, g_scale: Tensor, x_q: Tensor, x_scale: Tensor) -> Tensor:
    """``dW = g^T x``, contracted over rows: both row scales are folded into ``g``, sums are fp32.

    Shapes:
        - **input:** ``g_q [N, M]``, ``g_scale [N]`` or ``[1]``, ``x_q [N, K]``, ``x_scale [N]`` or ``[1]``
        - **output:** fp32 ``[M, K]``
    """
    num_rows = g_q.shape[0]
    out = torch.zeros((g_q.shape[1], x_q.shape[1]), dtype=torch.float32, device=g_q.device)
    factor = (g_scale * x_scale).expand(num_rows)
    for rows in _row_chunks(num_rows, max(g_q.shape[1], x_q.shape[1])):
        out.addmm_((g_q[rows].float() * factor[rows, None]).t(), x_q[rows].float())
    return out


def _sparse_matrix(indptr: Tensor, index: Tensor, value: Tensor, num_columns: int) -> Tensor:
    return torch.sparse_csr_tensor(
        indptr, index, value, size=(indptr.numel() - 1, num_columns), check_invariants=False, requires_grad=False
    )


def spmm(
    indptr: Tensor,
    index: Tensor,
    x: Tensor,
    *,
    weight: Tensor | None = None,
    x_scale: Tensor | None = None,
    row_factor: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Weighted sum of neighbor rows over a CSR graph.

    ``out[i] = row_factor[i] * sum_e weight[e] * x_scale[index[e]] * x[index[e]] + bias``, ``e`` from ``indptr[i]`` to
    ``indptr[i + 1]``. Sums are fp32 (float64 for float64 input). A row without edges gives ``bias``.

    Args:
        indptr: First edge of each row.
        index: Source row of each edge.
        x: int8 codes or float rows.
        weight: One weight an edge, in the order of ``index``.
        x_scale: One scale a source row; required for codes.
        row_factor: One factor an output row.
        bias: One value a column.
        out_dtype: Type of the result; that of a float ``x`` by default, else fp32.

    Shapes:
        - **input:** ``indptr [N + 1]``, ``index [E]``, ``x [S, F]``, ``weight [E]``, ``x_scale [S]`` or ``[1]``,
          ``row_factor [N]``, ``bias [F]``
        - **output:** ``[N, F]``
    """
    dtype = _compute_dtype(x)
    if out_dtype is None:
        out_dtype = x.dtype if x.is_floating_point() else torch.float32
    if index.numel() == 0 or x.shape[1] == 0:
        out = torch.zeros((indptr.numel() - 1, x.shape[1]), dtype=dtype, device=x.device)
    else:
        value = torch.ones(index.numel(), dtype=dtype, device=x.device) if weight is None else weight.to(dtype)
        if x_scale is not None:
            value = value * x_scale.expand(x.shape[0])[index]
        out = _sparse_sum(_sparse_matrix(indptr, index, value, x.shape[0]), x.to(dtype).contiguous())
    if row_factor is not None:
        out *= row_factor[:, None]
    if bias is not None:
        out += bias
    return out.to(out_dtype)


def _sparse_sum(matrix: Tensor, dense: Tensor) -> Tensor:
    # With a reduction named, torch's CPU product runs its own threaded loop in place of MKL's slower one.
    return torch.sparse.mm(matrix, dense, "sum") if dense.device.type == "cpu" else torch.sparse.mm(matrix, dense)


def spmm_requantize(
    indptr: Tensor,
    index: Tensor,
    x: Tensor,
    *,
    weight: Tensor | None = None,
    x_scale: Tensor | None = None,
    row_factor: Tensor | None = None,
    bits: int = 8,
    seed: Tensor | None = None,
    stream: int = 0,
) -> tuple[Tensor, Tensor]:
    """:func:`spmm` with the result rounded to int8 rows.

    Shapes:
        - **output:** codes int8 ``[N, F]``, scale fp32 ``[N]``
    """
    rows = spmm(indptr, index, x, weight=weight, x_scale=x_scale, row_factor=row_factor, out_dtype=torch.float32)
    return quantize(rows, bits=bits, seed=seed, stream=stream)


def sddmm(
    indptr: Tensor,
    index: Tensor,
    x_target: Tensor,
    x_source: Tensor,
    *,
    target_scale: Tensor | None = None,
    source_scale: Tensor | None = None,
) -> Tensor:
    """Dot product of the two end rows of each edge, in CSR order; exact integer sums for int8 rows.

    Shapes:
        - **input:** ``indptr [N + 1]``, ``index [E]``, ``x_target [N, F]``, ``x_source [S, F]``, scales ``[N]`` and
          ``[S]`` (or ``[1]``), required for int8 rows
        - **output:** fp32 ``[E]`` (float64 for float64 rows)
    """
    if (x_target.dtype == torch.int8) != (x_source.dtype == torch.int8):
        raise TypeError(
            f"'sddmm' expects both operands in int8 or both in a floating-point type (got {x_target.dtype} and "
            f"{x_source.dtype})"
        )
    target = torch.repeat_interleave(indptr.diff().long(), output_size=index.numel())
    dtype = torch.int32 if x_target.dtype == torch.int8 else _compute_dtype(x_target)
    out = torch.empty(index.numel(), dtype=_compute_dtype(x_target), device=x_target.device)
    for edges in _row_chunks(index.numel(), x_target.shape[1]):
        out[edges] = (x_target[target[edges]].to(dtype) * x_source[index[edges]].to(dtype)).sum(1).to(out.dtype)
    if target_scale is not None:
        out *= target_scale.expand(x_target.shape[0])[target]
    if source_scale is not None:
        out *= source_scale.expand(x_source.shape[0])[index]
    return out
