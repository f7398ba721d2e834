"""Attention over the edges into each target with additive scores (GAT), and its gradients.

Score ``s``, ``e = leaky(s)``, ``p = exp(e - L)`` with the logarithm ``L`` of the row's sum of exponentials,
``w = p * factor`` where the edge's head is kept and 0 where it is dropped, and ``out = sum w * value``.
With the gradient ``G`` of ``out`` and ``t = <G, value>``, that of the score is
``ds = p * (keep * factor * t - D) * leaky'(s)``, where ``D = <G, out> = sum w * t``: an edge whose weight was dropped
still has one, as its score is part of the row's sum.

Heads are groups of ``D`` columns. The random bits that decide over head ``h`` of the edge at position ``e`` are those
of element ``(e, h)`` of a matrix [E, H]. A row without edges gives 0.
"""

from __future__ import annotations

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
from qgnn.reference.edges import edge_targets, row_sums, sddmm
from qgnn.reference.sparse import spmm


def attention(
    indptr: Tensor,
    index: Tensor,
    score_target: Tensor,
    score_source: Tensor,
    x: Tensor,
    *,
    x_scale: Tensor | None = None,
    edge_score: Tensor | None = None,
    negative_slope: float = 0.2,
    dropout: Activation | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted sum of neighbor rows, the weights being the softmax over a row's edges of additive scores.

    ``s[e] = score_target[i] + score_source[index[e]] + edge_score[e]``, ``value[e] = x[index[e]]``, in the words above.

    Args:
        indptr: First edge of each target row.
        index: Source row of each edge.
        score_target: One score a head of each target.
        score_source: One score a head of each source.
        x: int8 codes or float rows of the sources.
        x_scale: One scale a head of each source row; required for codes.
        edge_score: One score a head of each edge, in CSR order.
        negative_slope: Slope of the leaky ReLU below 0.
        dropout: Threshold, seed and stream of the dropout of weights; ``None`` without one.
        out_dtype: Type of ``out``; that of a float ``x`` by default, else fp32.

    Shapes:
        - **input:** ``indptr [N + 1]``, ``index [E]``, ``score_target [N, H]``, ``score_source [S, H]``,
          ``x [S, H * D]``, ``x_scale [S, H]``, ``edge_score [E, H]``
        - **output:** out ``[N, H * D]``; ``L`` ``[N, H]`` in fp32 (float64 for float64 rows)
    """
    values = rows_by_head(x, x_scale)
    dtype = values.dtype
    score = _additive_scores(indptr, index, score_target, score_source, edge_score, dtype)
    p, lse = weights_of(indptr, leaky_relu(score, negative_slope))
    out = spmm(indptr, index, values.flatten(1), weight=dropped(p, dropout))
    return out.to(result_dtype(x, out_dtype)), lse


def attention_backward(
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    score_target: Tensor,
    score_source: Tensor,
    x: Tensor,
    lse: Tensor,
    grad: Tensor,
    *,
    x_scale: Tensor | None = None,
    edge_score: Tensor | None = None,
    negative_slope: float = 0.2,
    dropout: Activation | None = None,
    grad_bits: int = 0,
    seed: Tensor | None = None,
    stream: int = 0,
    needs_dedge: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the scores and of the rows of :func:`attention`.

    With ``grad_bits`` the rows of ``grad`` are rounded first, a scale a head of a row, as :func:`quantize` rounds the
    matrix [N * H, D]; ``D`` and ``t`` are made of the rounded rows. The target's score has the gradient
    ``(1 - negative_slope) * (pi_neg * <g, O_pos> - pi_pos * <g, O_neg>)`` with ``g`` not rounded, ``O_pos`` the part of
    ``out`` from edges with ``s > 0``, ``O_neg`` the rest, ``pi_pos`` and ``pi_neg`` the sums of their ``p``: it is what
    ``sum ds`` comes to, and exactly 0 where all scores of a row have one sign.

    Args:
        indptr: First edge of each target row.
        index: Source row of each edge.
        indptr_t: First edge of each source row, in the transposed graph.
        index_t: Target row of each edge of the transposed graph.
        order_t: Where each edge of the transposed graph stands in the graph.
        score_target: As given to :func:`attention`, like all that is not explained here.
        score_source: As given to it.
        x: As given to it.
        lse: ``L``, as it returned it.
        grad: Gradient of ``out``.
        x_scale: As given to it.
        edge_score: As given to it.
        negative_slope: As given to it.
        dropout: As given to it.
        grad_bits: Width of the codes of the gradient, 2 to 8; 0 takes it as it is.
        seed: Seed of its stochastic rounding, or ``None`` to round to nearest.
        stream: Number of the seed's stream.
        needs_dedge: Whether ``edge_score`` has a gradient, which is made only then.

    Shapes:
        - **output:** of ``score_target``, ``score_source``, ``x`` and ``edge_score``, of their shapes: the first two of
          the scores' types, the third of ``grad``'s, the last fp32 (float64 for float64 rows)
    """
    values = rows_by_head(x, x_scale)
    heads, dtype = score_target.shape[1], values.dtype
    score = _additive_scores(indptr, index, score_target, score_source, edge_score, dtype)
    p, factor = recomputed_weights(indptr, leaky_relu(score, negative_slope), lse, dropout)
    rounded = rounded_grad(grad, heads, dtype, grad_bits, seed, stream)

    source = values.flatten(1)
    t = by_head(sddmm(indptr, index, rounded, source, heads=heads))
    slope = leaky_slope(score, negative_slope)
    ds = score_grads(indptr, p, factor * t) * slope

    exact = t if grad_bits == 0 else by_head(sddmm(indptr, index, grad.to(dtype), source, heads=heads))
    positive = (score > 0).to(dtype)
    pi_pos, pi_neg = row_sums(indptr, p * positive), row_sums(indptr, p * (1 - positive))
    t_pos, t_neg = (row_sums(indptr, p * factor * exact * part) for part in (positive, 1 - positive))
    d_target = (1 - negative_slope) * (pi_neg * t_pos - pi_pos * t_neg)
    dx = spmm(indptr_t, index_t, rounded, weight=(p * factor)[order_t])
    d_source = spmm(indptr_t, order_t, ds)
    results = d_target.to(score_target.dtype), d_source.to(score_source.dtype), dx.to(grad.dtype)
    return *results, ds if needs_dedge else None


def _additive_scores(
    indptr: Tensor,
    index: Tensor,
    score_target: Tensor,
    score_source: Tensor,
    edge_score: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    score = score_target.to(dtype)[edge_targets(indptr, index.numel())] + score_source.to(dtype)[index]
    return score if edge_score is None else score + edge_score.to(dtype)
