"""What has values an edge: scores from the rows at its ends, and their softmax over the edges of a target."""

from __future__ import annotations

import torch
from torch import Tensor

from qgnn.reference._common import compute_dtype, row_chunks
from qgnn.reference.sparse import spmm


def sddmm(
    indptr: Tensor,
    index: Tensor,
    x_target: Tensor,
    x_source: Tensor,
    *,
    op: str = "dot",
    heads: int = 1,
    target_scale: Tensor | None = None,
    source_scale: Tensor | None = None,
) -> Tensor:
    """One result an edge, in CSR order, from the two rows at its ends.

    ``"dot"``: the dot product of each head, one of ``heads`` equal groups of columns. For int8 rows it is an exact
    integer, times the target's scale, times the source's. ``"add"``: the sum of the rows, after their scales.

    Args:
        indptr: First edge of each target row.
        index: Source row of each edge.
        x_target: int8 codes or float rows.
        x_source: Rows of the same kind.
        op: ``"dot"`` or ``"add"``.
        heads: Groups of columns, H.
        target_scale: Scales of ``x_target``: one, one a row, or one a head of a row. Required for codes.
        source_scale: Scales of ``x_source``.

    Shapes:
        - **input:** ``indptr [N + 1]``, ``index [E]``, ``x_target [N, F]``, ``x_source [S, F]``, ``target_scale [1]``,
          ``[N]`` or ``[N, H]``, ``source_scale [1]``, ``[S]`` or ``[S, H]``
        - **output:** fp32 (float64 for float64 rows): dots ``[E]``, with several heads ``[E, H]``; sums ``[E, F]``
    """
    if (x_target.dtype == torch.int8) != (x_source.dtype == torch.int8):
        raise TypeError(
            f"'sddmm' expects both operands in int8 or both in a floating-point type (got {x_target.dtype} and "
            f"{x_source.dtype})"
        )
    E, F = index.numel(), x_target.shape[1]
    target = edge_targets(indptr, E)
    out_dtype = compute_dtype(x_target)
    if op == "add":
        out = torch.empty((E, F), dtype=out_dtype, device=x_target.device)
        for edges in row_chunks(E, F):
            t = _scaled_rows(x_target, target_scale, target[edges], heads)
            out[edges] = t + _scaled_rows(x_source, source_scale, index[edges], heads)
        return out
    dtype = torch.int32 if x_target.dtype == torch.int8 else out_dtype
    out = torch.empty((E, heads), dtype=out_dtype, device=x_target.device)
    for edges in row_chunks(E, F):
        terms = x_target[target[edges]].to(dtype) * x_source[index[edges]].to(dtype)
        out[edges] = terms.view(len(terms), heads, F // heads).sum(2).to(out_dtype)
    if target_scale is not None:
        out *= _scales_of(target_scale, x_target.shape[0], target)
    if source_scale is not None:
        out *= _scales_of(source_scale, x_source.shape[0], index)
    return out if heads > 1 else out.squeeze(1)


def edge_targets(indptr: Tensor, num_edges: int) -> Tensor:
    """The target row of each edge of a CSR graph, int64 [E]."""
    return torch.repeat_interleave(indptr.diff().long(), output_size=num_edges)


def _scales_of(scale: Tensor, num_rows: int, row: Tensor) -> Tensor:
    """Scales of the rows ``row``: [E, 1], or [E, H] if each head has its own."""
    return (scale if scale.dim() == 2 else scale[:, None]).expand(num_rows, -1)[row]


def _scaled_rows(x: Tensor, scale: Tensor | None, row: Tensor, heads: int) -> Tensor:
    rows = x[row].to(compute_dtype(x))
    if scale is None:
        return rows
    by_head = rows.view(len(rows), heads, x.shape[1] // heads) * _scales_of(scale, x.shape[0], row)[:, :, None]
    return by_head.view(rows.shape)


def softmax(indptr: Tensor, scores: Tensor) -> Tensor:
    """Softmax of scores over the edges of each row of a CSR graph, head by head.

    ``out[e] = exp(scores[e] - m) / sum_k exp(scores[k] - m)``, ``k`` over the edges of the same row and ``m`` their
    largest score. As in :func:`torch.softmax`, a score of -inf gives 0, and a head of a row that has a NaN, an inf or
    nothing but -inf gives NaN.

    Args:
        indptr: First edge of each row.
        scores: One score an edge and head.

    Shapes:
        - **input:** ``indptr [N + 1]``, ``scores [E, H]``, the edges in CSR order
        - **output:** ``[E, H]``, of the type of ``scores``; computed in fp32 (float64 for float64 scores)
    """
    value = scores.to(compute_dtype(scores))
    if scores.numel() == 0:
        return torch.empty_like(scores)
    target = edge_targets(indptr, scores.shape[0])
    largest = torch.segment_reduce(value, "max", offsets=indptr, axis=0, unsafe=True)
    value = (value - largest[target]).exp_()
    return value.div_(row_sums(indptr, value)[target]).to(scores.dtype)


def softmax_backward(indptr: Tensor, out: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the scores of :func:`softmax`: ``out[e] * (grad[e] - sum_k out[k] grad[k])``, ``k`` over the row.

    Args:
        indptr: First edge of each row.
        out: Result of :func:`softmax`.
        grad: Gradient of the result.

    Shapes:
        - **input:** ``indptr [N + 1]``, ``out [E, H]``, ``grad [E, H]``
        - **output:** ``[E, H]``, of the type of ``grad``
    """
    dtype = compute_dtype(grad)
    out, value = out.to(dtype), grad.to(dtype)
    mean = row_sums(indptr, out * value)[edge_targets(indptr, grad.shape[0])]
    return (out * (value - mean)).to(grad.dtype)


def row_sums(indptr: Tensor, edge_values: Tensor, weight: Tensor | None = None) -> Tensor:
    """Sums over the edges of each row, in their order, weighted by head: [E, F] -> [N, F]."""
    edge = torch.arange(edge_values.shape[0], dtype=indptr.dtype, device=indptr.device)
    return spmm(indptr, edge, edge_values, weight=weight)


def attention_scores(
    indptr: Tensor, index: Tensor, score_target: Tensor, score_source: Tensor, *, negative_slope: float = 0.2
) -> Tensor:
    """Attention weights of a GAT layer: the softmax over a target's edges of what its score and a source's make.

    ``out[e] = softmax(leaky_relu(score_target[i] + score_source[index[e]]))``, ``e`` an edge of row ``i``.

    Args:
        indptr: First edge of each target row.
        index: Source row of each edge.
        score_target: One score a head of each target.
        score_source: One score a head of each source.
        negative_slope: Slope of the leaky ReLU below 0.

    Shapes:
        - **input:** ``indptr [N + 1]``, ``index [E]``, ``score_target [N, H]``, ``score_source [S, H]``
        - **output:** ``[E, H]`` in CSR order, of the type of ``score_target``
    """
    score = _edge_scores(indptr, index, score_target, score_source)
    return softmax(indptr, torch.nn.functional.leaky_relu(score, negative_slope)).to(score_target.dtype)


def attention_scores_backward(
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    order_t: Tensor,
    score_target: Tensor,
    score_source: Tensor,
    out: Tensor,
    grad: Tensor,
    *,
    negative_slope: float = 0.2,
) -> tuple[Tensor, Tensor]:
    """Gradients of both scores of :func:`attention_scores`. No sum depends on which thread adds first.

    Args:
        indptr: First edge of each target row.
        index: Source row of each edge.
        indptr_t: First edge of each source row, in the transposed graph.
        order_t: Where each edge of the transposed graph stands in the graph.
        score_target: As given to :func:`attention_scores`.
        score_source: As given to :func:`attention_scores`.
        out: Its result.
        grad: Gradient of the result.
        negative_slope: As given to it.

    Shapes:
        - **input:** ``indptr [N + 1]``, ``index [E]``, ``indptr_t [S + 1]``, ``order_t [E]``, ``score_target [N, H]``,
          ``score_source [S, H]``, ``out [E, H]``, ``grad [E, H]``
        - **output:** ``[N, H]`` and ``[S, H]``, of the types of the scores
    """
    score = _edge_scores(indptr, index, score_target, score_source)
    edge_grad = softmax_backward(indptr, out, grad.to(score.dtype))
    edge_grad = torch.where(score > 0, edge_grad, edge_grad * negative_slope)
    d_source = spmm(indptr_t, order_t, edge_grad)
    return row_sums(indptr, edge_grad).to(score_target.dtype), d_source.to(score_source.dtype)


def _edge_scores(indptr: Tensor, index: Tensor, score_target: Tensor, score_source: Tensor) -> Tensor:
    dtype = compute_dtype(score_target)
    return score_target.to(dtype)[edge_targets(indptr, index.numel())] + score_source.to(dtype)[index]
