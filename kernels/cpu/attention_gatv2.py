"""Attention over the edges into each target with the scores of GATv2, and its gradients, in C.

    h = x_target[i] + x_source[index[e]] + edge_x[e]
    p = exp(<att, leaky(h)> - L)
    out[i] = sum_e w * x_source[index[e]]

Layouts, dropout and numerics are those of ``attention.py``. Scores are made anew in each pass. The gradient of ``att``
is summed in 16 parts of the rows, which are added in order.

Oracle: qgnn.reference.attention_gatv2, attention_gatv2_backward
"""

from typing import Any

import torch
from qgnn.kernels.cpu.attention_shared import dropout_arguments, floats, graph, rounding_arguments, rows, workspace
from qgnn.kernels.cpu.library import PARTS, empty_codes, empty_floats, launch, rows_of
from torch import Tensor


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
    dropout: Any = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Result ``[N, H * D]`` and ``L`` ``[N, H]``; parameters as of the reference."""
    if out_dtype is None:
        out_dtype = x_source.dtype if x_source.is_floating_point() else torch.float32
    (N, width), (H, D) = x_target.shape, att.shape
    out, lse = empty_floats(N, width), empty_floats(N, H)
    if lse.numel():
        operands = (*rows(x_target, target_scale), *rows(x_source, source_scale), floats(att), floats(edge_x))
        last = (float(negative_slope), *dropout_arguments(dropout))
        sizes = (N, index.numel(), H, D, *workspace(H, width))
        launch("qgnn_attention_gatv2", out, lse, *graph(indptr, index), *operands, *last, *sizes)
    return out.to(out_dtype), lse


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
    dropout: Any = None,
    grad_bits: int = 0,
    seed: Tensor | None = None,
    stream: int = 0,
    needs_dedge: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of both rows, of ``att`` and of ``edge_x``; parameters as of the reference."""
    (N, width), S, E, (H, D) = x_target.shape, x_source.shape[0], index.numel(), att.shape
    d_target, d_source = empty_floats(N, width), empty_floats(S, width)
    d_att = torch.zeros((PARTS, H, D), dtype=torch.float32)
    record, d_edge = empty_floats(N, 4, H), empty_floats(E, width) if needs_dedge else None
    codes = empty_codes(N, width) if grad_bits else None
    grad_rows = rows_of(grad, torch.float32)
    operands = (*rows(x_target, target_scale), *rows(x_source, source_scale), floats(att), floats(edge_x))
    last = (grad_rows, grad_rows.stride(0), float(negative_slope), *dropout_arguments(dropout))
    sizes = (E, H, D, *workspace(H, width))
    if N * H:
        made = d_target, d_att, d_edge, record, codes
        rounding = rounding_arguments(grad_bits, seed, stream)
        edges = graph(indptr, index)
        launch(
            "qgnn_attention_gatv2_targets", *made, *edges, *operands, floats(lse), *last, *rounding, PARTS, N, *sizes
        )
    if S * H:
        edges = graph(indptr_t, index_t, order_t)
        launch("qgnn_attention_gatv2_sources", d_source, *edges, *operands, record, codes, *last, S, *sizes)
    return d_target.to(grad.dtype), d_source.to(grad.dtype), d_att.sum(0).to(att.dtype), d_edge
