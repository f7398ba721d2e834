"""Attention with scaled dot products as scores, and its gradients; the symbols are those of ``attention.py``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qgnn.activation import Activation
from qgnn.reference._attention import (
    by_head,
    dropped,
    recomputed_weights,
    result_dtype,
    rounded_grad,
    rows_by_head,
    score_grads,
    weights_of,
)
from qgnn.reference._common import row_chunks
from qgnn.reference.edges import edge_targets, row_sums, sddmm
from qgnn.reference.sparse import spmm


def attention_dot(
    indptr: Tensor,
    index: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    heads: int = 1,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    edge_x: Tensor | None = None,
    dropout: Activation | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted sum of neighbor rows with scaled dot products as scores.

    ``e = <query[i], key[index[e]] + edge_x[e]> / sqrt(D)``, ``value[e] = value[index[e]] + edge_x[e]``.

    Args:
        indptr: First edge of each target row.
        index: Source row of each edge.
        query: int8 codes or float rows of the targets.
        key: Rows of the same kind of the sources.
        value: Rows of the same kind of the sources.
        heads: Groups of columns, H.
        query_scale: One scale a head of each target row; required for codes.
        key_scale: One a head of each source row.
        value_scale: One a head of each source row.
        edge_x: Rows of the edges, in CSR order.
        dropout: As in :func:`attention`.
        out_dtype: Type of ``out``; that of a float ``value`` by default, else fp32.

    Shapes:
        - **input:** ``indptr [N + 1]``, ``index [E]``, ``query [N, H * D]``, ``key`` and ``value`` ``[S, H * D]``,
          ``query_scale [N, H]``, ``key_scale`` and ``value_scale`` ``[S, H]``, ``edge_x [E, H * D]``
        - **output:** as of :func:`attention`
    """
    q, k, v = (
        rows_by_head(query, query_scale, heads),
        rows_by_head(key, key_scale, heads),
        rows_by_head(value, value_scale, heads),
    )
    p, lse = weights_of(indptr, _dot_scores(indptr, index, q, k, edge_x))
    weight = dropped(p, dropout)
    out = spmm(indptr, index, v.flatten(1), weight=weight)
    if edge_x is not None:
        out += row_sums(indptr, edge_x.to(v.dtype), weight)
    return out.to(result_dtype(value, out_dtype)), lse


def attention_dot_backward(
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    grad: Tensor,
    *,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    edge_x: Tensor | None = None,
    dropout: Activation | None = None,
    grad_bits: int = 0,
    seed: Tensor | None = None,
    stream: int = 0,
    needs_dedge: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the rows of :func:`attention_dot`; ``grad`` is rounded as in :func:`attention_backward`, and every
    gradient is made of the rounded rows.

    Args:
        indptr: First edge of each target row.
        index: Source row of each edge.
        indptr_t: First edge of each source row, in the transposed graph.
        index_t: Target row of each edge of the transposed graph.
        order_t: Where each edge of the transposed graph stands in the graph.
        query: As given to :func:`attention_dot`.
        key: As given to :func:`attention_dot`.
        value: As given to :func:`attention_dot`.
        lse: ``L``, as it returned it.
        grad: Gradient of ``out``.
        query_scale: As given to :func:`attention_dot`.
        key_scale: As given to :func:`attention_dot`.
        value_scale: As given to :func:`attention_dot`.
        edge_x: As given to :func:`attention_dot`.
        dropout: As given to :func:`attention_dot`.
        grad_bits: As in :func:`attention_backward`.
        seed: As in :func:`attention_backward`.
        stream: As in :func:`attention_backward`.
        needs_dedge: Whether ``edge_x`` has a gradient, which is made only then.

    Shapes:
        - **output:** of ``query``, ``key``, ``value`` and ``edge_x``, of their shapes: three of the type of ``grad``,
          the last fp32 (float64 for float64 rows)
    """
    heads = lse.shape[1]
    q, k, v = (
        rows_by_head(query, query_scale, heads),
        rows_by_head(key, key_scale, heads),
        rows_by_head(value, value_scale, heads),
    )
    dtype, rows = q.dtype, edge_targets(indptr, index.numel())
    p, factor = recomputed_weights(indptr, _dot_scores(indptr, index, q, k, edge_x), lse, dropout)
    rounded = rounded_grad(grad, heads, dtype, grad_bits, seed, stream)
    t = by_head(sddmm(indptr, index, rounded, v.flatten(1), heads=heads))
    if edge_x is not None:
        for edges in row_chunks(index.numel(), rounded.shape[1]):
            products = rounded[rows[edges]] * edge_x[edges].to(dtype)
            t[edges] += products.view(products.shape[0], heads, -1).sum(2)
    weight = p * factor
    ds = score_grads(indptr, p, factor * t) / math.sqrt(q.shape[2])

    d_query = spmm(indptr, index, k.flatten(1), weight=ds)
    d_edge = None
    if edge_x is not None:
        d_query += row_sums(indptr, edge_x.to(dtype), ds)
    d_key = spmm(indptr_t, index_t, q.flatten(1), weight=ds[order_t])
    d_value = spmm(indptr_t, index_t, rounded, weight=weight[order_t])
    if needs_dedge:
        d_edge = torch.empty((index.numel(), rounded.shape[1]), dtype=dtype, device=q.device)
        for edges in row_chunks(index.numel(), rounded.shape[1]):
            made = ds[edges][:, :, None] * q[rows[edges]]
            made += weight[edges][:, :, None] * rounded[rows[edges]].view_as(made)
            d_edge[edges] = made.flatten(1)
    return d_query.to(grad.dtype), d_key.to(grad.dtype), d_value.to(grad.dtype), d_edge


def _dot_scores(indptr: Tensor, index: Tensor, q: Tensor, k: Tensor, edge_x: Tensor | None) -> Tensor:
    rows = edge_targets(indptr, index.numel())
    score = q.new_empty((index.numel(), q.shape[1]))
    for edges in row_chunks(index.numel(), max(1, q.shape[1] * q.shape[2])):
        other = k[index[edges]]
        if edge_x is not None:
            other = other + edge_x[edges].to(other.dtype).view_as(other)
        score[edges] = (q[rows[edges]] * other).sum(2)
    return score / math.sqrt(q.shape[2])
