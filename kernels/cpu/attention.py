"""Attention over the edges into each target with additive scores, and its gradients, in C.

    s = score_target[i] + score_source[index[e]] + edge_score[e]
    p = exp(leaky(s) - L)
    out[i] = sum_e w * x[index[e]]

with w = p * factor where the edge's head is kept and 0 where it is dropped. Forward is one pass over the graph.
Backward is two: over the rows of targets, which round the gradient's rows, and over those of sources, which gather
them. Besides results, these keep four numbers a head of each target between them, and the codes; nothing has the size
of edges times heads, unless it is a result.

Numerics: fp32, fused multiply-adds where the processor has them; half types are converted first. Products of codes
are exact integers. The softmax is online over chunks of a row's edges; what they add up to is added in order. Codes of
the gradient are bit-equal to those of ``quantize``. A row is made by one thread: the number of threads changes nothing.

Oracle: qgnn.reference.attention, attention_backward
"""

from typing import Any

import torch
from qgnn.kernels.cpu.attention_dot import attention_dot, attention_dot_backward
from qgnn.kernels.cpu.attention_gatv2 import attention_gatv2, attention_gatv2_backward
from qgnn.kernels.cpu.attention_shared import dropout_arguments, floats, graph, rounding_arguments, rows, workspace
from qgnn.kernels.cpu.library import empty_codes, empty_floats, launch, rows_of
from torch import Tensor

__all__ = [
    "attention",
    "attention_backward",
    "attention_dot",
    "attention_dot_backward",
    "attention_gatv2",
    "attention_gatv2_backward",
]


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
    dropout: Any = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Result ``[N, H * D]`` and ``L`` ``[N, H]``; parameters as of the reference."""
    if out_dtype is None:
        out_dtype = x.dtype if x.is_floating_point() else torch.float32
    (N, H), width = score_target.shape, x.shape[1]
    out, lse = empty_floats(N, width), empty_floats(N, H)
    if lse.numel():
        scores = floats(score_target), floats(score_source), floats(edge_score)
        operands = (*scores, *rows(x, x_scale), float(negative_slope), *dropout_arguments(dropout))
        sizes = (N, index.numel(), H, width // H)
        launch("qgnn_attention", out, lse, *graph(indptr, index), *operands, *sizes, *workspace(H, width))
    return out.to(out_dtype), lse


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
    dropout: Any = None,
    grad_bits: int = 0,
    seed: Tensor | None = None,
    stream: int = 0,
    needs_dedge: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of both scores, of ``x`` and of ``edge_score``; parameters as of the reference."""
    (N, H), (S, width), E = score_target.shape, x.shape, index.numel()
    d_target, record = empty_floats(N, H), empty_floats(N, 4, H)
    d_source, dx = empty_floats(S, H), empty_floats(S, width)
    d_edge = empty_floats(E, H) if needs_dedge else None
    codes = empty_codes(N, width) if grad_bits else None
    source, edge, (x, x_scale, *kind) = floats(score_source), floats(edge_score), rows(x, x_scale)
    grad_rows = rows_of(grad, torch.float32)
    last = (float(negative_slope), *dropout_arguments(dropout))
    sizes = (H, width // max(H, 1), *workspace(H, width))
    if d_target.numel():
        operands = (floats(score_target), source, edge, x, x_scale, *kind, floats(lse), grad_rows, grad_rows.stride(0))
        rounding = rounding_arguments(grad_bits, seed, stream)
        made = d_target, record, codes
        launch("qgnn_attention_targets", *made, *graph(indptr, index), *operands, *last, *rounding, N, E, *sizes)
    if d_source.numel():
        operands = (source, edge, x, x_scale, *kind, record, codes, grad_rows, grad_rows.stride(0))
        edges = graph(indptr_t, index_t, order_t)
        launch("qgnn_attention_sources", d_source, dx, d_edge, *edges, *operands, *last, S, E, *sizes)
    results = d_target.to(score_target.dtype), d_source.to(score_source.dtype), dx.to(grad.dtype)
    return *results, d_edge
