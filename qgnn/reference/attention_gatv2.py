"""Attention with the scores of GATv2, and its gradients; the symbols are those of ``attention.py``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from qgnn.activation import Activation
from qgnn.reference._attention import (
    by_head,
    dropped,
    leaky_slope,
    recomputed_weights,
    result_dtype,
    rounded_grad,
    rows_by_head,
    score_grads,
    weights_of,
)
from qgnn.reference._common import row_chunks
from qgnn.reference.edges import edge_targets, sddmm
from qgnn.reference.sparse import spmm


def attention_gatv2(
    indptr: Tensor,
    index: Tensor,
    x_target: Tensor,
    x_source: Tensor,
    att: Tensor,
    *,
    target_scale: Tensor | None = None,
    source_scale: Tensor | None = None,
    edge_x: Tensor | None = None,
    negative_slope: float = 0.2,
    dropout: Activation | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted sum of neighbor rows with the scores of GATv2.

    ``e = <att, leaky(h)>`` with ``h[e] = x_target[i] + x_source[index[e]] + edge_x[e]``, ``value[e] =
    x_source[index[e]]``.

    Args:
        indptr: First edge of each target row.
        index: Source row of each edge.
        x_target: int8 codes or float rows of the targets.
        x_source: Rows of the same kind of the sources.
        att: One vector a head.
        target_scale: One scale a head of each target row; required for codes.
        source_scale: The same of the sources.
        edge_x: Rows of the edges, in CSR order.
        negative_slope: Slope of the leaky ReLU below 0.
        dropout: As in :func:`attention`.
        out_dtype: Type of ``out``; that of a float ``x_source`` by default, else fp32.

    Shapes:
        - **input:** ``indptr [N + 1]``, ``index [E]``, ``x_target [N, H * D]``, ``x_source [S, H * D]``, ``att [H,
          D]``, ``target_scale [N, H]``, ``source_scale [S, H]``, ``edge_x [E, H * D]``
        - **output:** as of :func:`attention`
    """
    heads = att.shape[0]
    target, source = rows_by_head(x_target, target_scale, heads), rows_by_head(x_source, source_scale, heads)
    e = source.new_empty((index.numel(), heads))
    for edges, hidden in _hidden(indptr, index, target, source, edge_x):
        e[edges] = (leaky_relu(hidden, negative_slope) * att.to(hidden.dtype)).sum(2)
    p, lse = weights_of(indptr, e)
    out = spmm(indptr, index, source.flatten(1), weight=dropped(p, dropout))
    return out.to(result_dtype(x_source, out_dtype)), lse


def attention_gatv2_backward(
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    x_target: Tensor,
    x_source: Tensor,
    att: Tensor,
    lse: Tensor,
    grad: Tensor,
    *,
    target_scale: Tensor | None = None,
    source_scale: Tensor | None = None,
    edge_x: Tensor | None = None,
    negative_slope: float = 0.2,
    dropout: Activation | None = None,
    grad_bits: int = 0,
    seed: Tensor | None = None,
    stream: int = 0,
    needs_dedge: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the rows and of ``att`` of :func:`attention_gatv2`; ``grad`` is rounded as in
    :func:`attention_backward`, and every gradient is made of the rounded rows.

    Args:
        indptr: First edge of each target row.
        index: Source row of each edge.
        indptr_t: First edge of each source row, in the transposed graph.
        index_t: Target row of each edge of the transposed graph.
        order_t: Where each edge of the transposed graph stands in the graph.
        x_target: As given to :func:`attention_gatv2`.
        x_source: As given to :func:`attention_gatv2`.
        att: As given to :func:`attention_gatv2`.
        lse: ``L``, as it returned it.
        grad: Gradient of ``out``.
        target_scale: As given to :func:`attention_gatv2`.
        source_scale: As given to :func:`attention_gatv2`.
        edge_x: As given to :func:`attention_gatv2`.
        negative_slope: As given to :func:`attention_gatv2`.
        dropout: As given to :func:`attention_gatv2`.
        grad_bits: As in :func:`attention_backward`.
        seed: As in :func:`attention_backward`.
        stream: As in :func:`attention_backward`.
        needs_dedge: Whether ``edge_x`` has a gradient, which is made only then.

    Shapes:
        - **output:** of ``x_target``, ``x_source``, ``att`` and ``edge_x``, of their shapes: the first two of the type
          of ``grad``, the third of ``att``'s, the last fp32 (float64 for float64 rows)
    """
    heads = att.shape[0]
    target, source = rows_by_head(x_target, target_scale, heads), rows_by_head(x_source, source_scale, heads)
    dtype = source.dtype
    vector, rows = att.to(dtype), edge_targets(indptr, index.numel())
    e = source.new_empty((index.numel(), heads))
    for edges, hidden in _hidden(indptr, index, target, source, edge_x):
        e[edges] = (leaky_relu(hidden, negative_slope) * vector).sum(2)
    p, factor = recomputed_weights(indptr, e, lse, dropout)
    rounded = rounded_grad(grad, heads, dtype, grad_bits, seed, stream)
    t = by_head(sddmm(indptr, index, rounded, source.flatten(1), heads=heads))
    de = score_grads(indptr, p, factor * t)

    d_target, d_source, d_att = torch.zeros_like(target), torch.zeros_like(source), torch.zeros_like(vector)
    d_edge = source.new_empty((index.numel(), *source.shape[1:])) if needs_dedge else None
    for edges, hidden in _hidden(indptr, index, target, source, edge_x):
        d_att += (de[edges][:, :, None] * leaky_relu(hidden, negative_slope)).sum(0)
        dh = de[edges][:, :, None] * vector * leaky_slope(hidden, negative_slope)
        d_target.index_add_(0, rows[edges], de[edges][:, :, None] * (hidden > 0))
        d_source.index_add_(0, index[edges], dh)
        if d_edge is not None:
            d_edge[edges] = dh
    d_target *= vector * (1 - negative_slope)
    d_source = d_source.flatten(1) + spmm(indptr_t, index_t, rounded, weight=(p * factor)[order_t])
    results = d_target.flatten(1).to(grad.dtype), d_source.to(grad.dtype), d_att.to(att.dtype)
    return *results, None if d_edge is None else d_edge.flatten(1)


def _hidden(
    indptr: Tensor, index: Tensor, target: Tensor, source: Tensor, edge_x: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """Chunk by chunk, the slice of edges and ``h`` [e, H, D]: target, then source, then edge."""
    rows = edge_targets(indptr, index.numel())
    for edges in row_chunks(index.numel(), target[0].numel() if len(target) else 1):
        hidden = target[rows[edges]] + source[index[edges]]
        if edge_x is not None:
            hidden += edge_x[edges].to(hidden.dtype).view_as(hidden)
        yield edges, hidden
