"""Attention over the edges into each target with scaled dot products as scores, and its gradients, in C.

    p = exp(<query[i], key[index[e]] + edge_x[e]> / sqrt(D) - L)
    out[i] = sum_e w * (value[index[e]] + edge_x[e])

Layouts, dropout and numerics are those of ``attention.py``. Scores are made anew in each pass.

Oracle: qgnn.reference.attention_dot, attention_dot_backward
"""

import math
from typing import Any

import torch
from qgnn.kernels.cpu.attention_shared import dropout_arguments, floats, graph, rounding_arguments, rows, workspace
from qgnn.kernels.cpu.library import empty_codes, empty_floats, launch, rows_of
from torch import Tensor


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
    dropout: Any = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Result ``[N, H * D]`` and ``L`` ``[N, H]``; parameters as of the reference."""
    if out_dtype is None:
        out_dtype = value.dtype if value.is_floating_point() else torch.float32
    (N, width), D = query.shape, query.shape[1] // heads
    out, lse = empty_floats(N, width), empty_floats(N, heads)
    if lse.numel():
        operands = (*rows(query, query_scale), *rows(key, key_scale), *rows(value, value_scale), floats(edge_x))
        last = (_score_factor(D), *dropout_arguments(dropout))
        sizes = (N, index.numel(), heads, D, *workspace(heads, width))
        launch("qgnn_attention_dot", out, lse, *graph(indptr, index), *operands, *last, *sizes)
    return out.to(out_dtype), lse


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
    dropout: Any = None,
    grad_bits: int = 0,
    seed: Tensor | None = None,
    stream: int = 0,
    needs_dedge: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the three rows and of ``edge_x``; parameters as of the reference."""
    (N, width), S, E, H = query.shape, key.shape[0], index.numel(), lse.shape[1]
    D = width // max(H, 1)
    d_query, d_key, d_value = empty_floats(N, width), empty_floats(S, width), empty_floats(S, width)
    record, d_edge = empty_floats(N, 4, H), empty_floats(E, width) if needs_dedge else None
    codes = empty_codes(N, width) if grad_bits else None
    grad_rows = rows_of(grad, torch.float32)
    operands = (*rows(query, query_scale), *rows(key, key_scale), *rows(value, value_scale), floats(edge_x))
    last = (grad_rows, grad_rows.stride(0), _score_factor(D), *dropout_arguments(dropout))
    sizes = (E, H, D, *workspace(H, width))
    if N * H:
        made, edges = (d_query, d_edge, record, codes), graph(indptr, index)
        rounding = rounding_arguments(grad_bits, seed, stream)
        launch("qgnn_attention_dot_targets", *made, *edges, *operands, floats(lse), *last, *rounding, N, *sizes)
    if S * H:
        edges = graph(indptr_t, index_t, order_t)
        launch("qgnn_attention_dot_sources", d_key, d_value, *edges, *operands, record, codes, *last, S, *sizes)
    return d_query.to(grad.dtype), d_key.to(grad.dtype), d_value.to(grad.dtype), d_edge


def _score_factor(D: int) -> float:
    return 1 / math.sqrt(D) if D else 1.0
