"""Sums and extrema of neighbor rows over a CSR graph."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from qgnn.activation import Activation
from qgnn.reference._common import compute_dtype, row_chunks
from qgnn.reference.activation import activate
from qgnn.reference.dense import quantize

with warnings.catch_warnings():  # torch says once a process that CSR tensors are in beta; users of qgnn never see one
    warnings.simplefilter("ignore")
    _none = torch.empty(0, dtype=torch.int64)
    torch.sparse_csr_tensor(torch.tensor([0, 0]), _none, _none, size=(1, 1))


def _sparse_matrix(indptr: Tensor, index: Tensor, value: Tensor, num_columns: int) -> Tensor:
    return torch.sparse_csr_tensor(
        indptr,
        index.to(indptr.dtype),
        value,
        size=(indptr.numel() - 1, num_columns),
        check_invariants=False,
        requires_grad=False,
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
    activation: Activation | None = None,
) -> Tensor:
    """Weighted sum of neighbor rows over a CSR graph.

    ``out[i] = row_factor[i] * sum_e weight[e] * x_scale[index[e]] * x[index[e]] + bias``, ``e`` from ``indptr[i]`` to
    ``indptr[i + 1]``, and what follows. Sums are fp32 (float64 for float64 input). A row without edges gives ``bias``.
    With weights for ``H`` heads, the ``F / H`` columns of a head have its weights.

    Args:
        indptr: First edge of each row.
        index: Source row of each edge.
        x: int8 codes or float rows.
        weight: One weight an edge, or one an edge and head, in the order of ``index``.
        x_scale: One scale a source row; required for codes.
        row_factor: One factor an output row.
        bias: One value a column.
        out_dtype: Type of the result; that of a float ``x`` by default, else fp32.
        activation: ReLU and dropout, applied last.

    Shapes:
        - **input:** ``indptr [N + 1]``, ``index [E]``, ``x [S, F]``, ``weight [E]`` or ``[E, H]``, ``x_scale [S]`` or
          ``[1]``, ``row_factor [N]``, ``bias [F]``
        - **output:** ``[N, F]``
    """
    dtype = compute_dtype(x)
    if out_dtype is None:
        out_dtype = x.dtype if x.is_floating_point() else torch.float32
    if index.numel() == 0 or x.shape[1] == 0:
        out = torch.zeros((indptr.numel() - 1, x.shape[1]), dtype=dtype, device=x.device)
    else:
        value = torch.ones(index.numel(), dtype=dtype, device=x.device) if weight is None else weight.to(dtype)
        if x_scale is not None:
            scale = x_scale.to(dtype).expand(x.shape[0])[index]
            value = value * (scale if value.dim() == 1 else scale[:, None])
        heads = value.unbind(1) if value.dim() == 2 else (value,)
        out = torch.cat(
            [
                _sparse_sum(
                    _sparse_matrix(indptr, index, value.contiguous(), x.shape[0]), columns.to(dtype).contiguous()
                )
                for value, columns in zip(heads, x.chunk(len(heads), dim=1), strict=True)
            ],
            dim=1,
        )
    if row_factor is not None:
        out *= row_factor[:, None]
    if bias is not None:
        out += bias
    if activation is not None:
        out = activate(out, activation)
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

    Args:
        indptr: As in :func:`spmm`.
        index: As in :func:`spmm`.
        x: As in :func:`spmm`.
        weight: As in :func:`spmm`.
        x_scale: As in :func:`spmm`.
        row_factor: As in :func:`spmm`.
        bits: Width of a code, 2 to 8.
        seed: Seed of the stochastic rounding, or ``None`` to round to nearest.
        stream: Number of the seed's stream.

    Shapes:
        - **input:** as :func:`spmm`
        - **output:** codes int8 ``[N, F]``, scale fp32 ``[N]``
    """
    rows = spmm(indptr, index, x, weight=weight, x_scale=x_scale, row_factor=row_factor, out_dtype=torch.float32)
    return quantize(rows, bits=bits, seed=seed, stream=stream)


def spmm_extremum(
    indptr: Tensor,
    index: Tensor,
    x: Tensor,
    *,
    weight: Tensor | None = None,
    x_scale: Tensor | None = None,
    largest: bool = True,
) -> tuple[Tensor, Tensor]:
    """Element-wise maximum (or minimum) of the weighted neighbor rows, and the edge that each element comes from.

    ``out[i] = max_e weight[e] * x_scale[index[e]] * x[index[e]]``, ``e`` from ``indptr[i]`` to ``indptr[i + 1]``. Among
    equal values the first edge wins, and over all of them the first NaN. A row without edges gives 0, with edge -1.

    Args:
        indptr: First edge of each row.
        index: Source row of each edge.
        x: int8 codes or float rows.
        weight: One weight an edge, in the order of ``index``.
        x_scale: One scale a source row; required for codes.
        largest: Maximum; otherwise minimum.

    Shapes:
        - **input:** ``indptr [N + 1]``, ``index [E]``, ``x [S, F]``, ``weight [E]``, ``x_scale [S]`` or ``[1]``
        - **output:** values ``[N, F]`` of the type of a float ``x``, else fp32; edges ``[N, F]`` of ``index``'s type
    """
    dtype = compute_dtype(x)
    out_dtype = x.dtype if x.is_floating_point() else torch.float32
    shape, E = (indptr.numel() - 1, x.shape[1]), index.numel()
    if E == 0 or x.shape[1] == 0:
        return torch.zeros(shape, dtype=out_dtype, device=x.device), index.new_full(shape, -1)
    value = torch.ones(E, dtype=dtype, device=x.device) if weight is None else weight.to(dtype)
    if x_scale is not None:
        value = value * x_scale.to(dtype).expand(x.shape[0])[index]
    message = x[index].to(dtype) * value[:, None]  # [E, F]
    target = torch.repeat_interleave(indptr.diff().long(), output_size=E)
    reduce, where = "amax" if largest else "amin", target[:, None].expand(message.shape)
    out = message.new_zeros(shape).scatter_reduce_(0, where, message, reduce, include_self=False)
    wins = (message == out[target]) | message.isnan()
    edge = torch.arange(E, device=index.device)[:, None]
    arg = edge.new_full(shape, E).scatter_reduce_(0, where, torch.where(wins, edge, E), "amin")
    return out.to(out_dtype), torch.where(arg == E, -1, arg).to(index.dtype)


def spmm_extremum_dx(
    index: Tensor, grad: Tensor, arg: Tensor, num_sources: int, *, weight: Tensor | None = None
) -> Tensor:
    """Gradient of the rows that :func:`spmm_extremum` chose from: each element goes to the source that it came from.

    Elements are added in the order of the rows of ``grad``.

    Args:
        index: Source row of each edge.
        grad: Gradient of the result.
        arg: Edge of each element of the result; -1 for none.
        num_sources: Number of source rows.
        weight: One weight an edge.

    Shapes:
        - **input:** ``index [E]``, ``grad [N, F]``, ``arg [N, F]``, ``weight [E]``
        - **output:** ``[S, F]`` of ``grad``'s type; sums are fp32 (float64 for float64 input)
    """
    dtype, F = compute_dtype(grad), grad.shape[1]
    dx = torch.zeros(num_sources * F, dtype=dtype, device=grad.device)
    column = torch.arange(F, device=grad.device)
    for rows in row_chunks(grad.shape[0], F) if index.numel() else ():
        edge = arg[rows].long().clamp_min(0)
        value = grad[rows].to(dtype) if weight is None else grad[rows].to(dtype) * weight.to(dtype)[edge]
        _add_at(dx, index[edge].long() * F + column, value.masked_fill(arg[rows] < 0, 0))
    return dx.view(num_sources, F).to(grad.dtype)


def spmm_extremum_dweight(
    index: Tensor, grad: Tensor, arg: Tensor, x: Tensor, *, x_scale: Tensor | None = None
) -> Tensor:
    """Gradient of the weights of :func:`spmm_extremum`.

    For each edge, the sum of ``grad * x_scale * x`` over the elements of the result that come from it.

    Args:
        index: Source row of each edge.
        grad: Gradient of the result.
        arg: Edge of each element of the result; -1 for none.
        x: int8 codes or float rows.
        x_scale: One scale a source row; required for codes.

    Shapes:
        - **input:** ``index [E]``, ``grad [N, F]``, ``arg [N, F]``, ``x [S, F]``, ``x_scale [S]`` or ``[1]``
        - **output:** fp32 ``[E]`` (float64 for a float64 ``grad``)
    """
    dtype, F = compute_dtype(grad), grad.shape[1]
    dweight = torch.zeros(index.numel(), dtype=dtype, device=grad.device)
    column = torch.arange(F, device=grad.device)
    for rows in row_chunks(grad.shape[0], F) if index.numel() else ():
        edge = arg[rows].long().clamp_min(0)
        source = index[edge].long()
        value = grad[rows].to(dtype) * x[source, column].to(dtype)
        if x_scale is not None:
            value = value * x_scale.expand(x.shape[0])[source]
        _add_at(dweight, edge, value.masked_fill(arg[rows] < 0, 0))
    return dweight


def _add_at(total: Tensor, where: Tensor, value: Tensor) -> None:
    """``total[where] += value``, in the same order on every run."""
    if total.device.type == "cuda":  # sorts the positions; scatter_add_ uses atomics there
        total.index_put_((where.flatten(),), value.flatten(), accumulate=True)
    else:  # walks in order; index_put_ uses atomics here
        total.scatter_add_(0, where.flatten(), value.flatten())
