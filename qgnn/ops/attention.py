"""``qgnn::attention``: neighbor rows weighted by the softmax of additive scores (GAT), forward and backward in one op.

The weights exist edge by edge inside the kernels and nowhere else. The backward pass makes them again from the scores
and one logarithm a target and head, the dropout from its hash, and reads the rows that the forward pass gathered: with
``bits`` their codes. What is kept has a size of nodes, never of edges.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qgnn.ops import _attention
from qgnn.ops._activation import CHOICES, dropout_of
from qgnn.ops._backends import STREAM_GRAD, STREAM_INPUT, Backend, fresh
from qgnn.ops._checks import CSR, INT8_OR_FULL, Signature
from qgnn.ops._operator import define, register_autograd

_CHOICES = {"bits": INT8_OR_FULL, **CHOICES}
_SHAPES = {"x_scale": "S H", **_attention.EDGE_SHAPES, "edge_weight": "H K"}


def _attention_forward(
    backend: Backend,
    x: Tensor,
    x_scale: Tensor | None,
    score_target: Tensor,
    score_source: Tensor,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    edge_order: Tensor | None,
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    seed: Tensor | None,
    bits: int,
    threshold: int,
    dropout_seed: Tensor | None,
    negative_slope: float,
    keep: bool,
) -> tuple[Tensor, ...]:
    rows, scale = _attention.rows_by_head(backend, x, x_scale, score_target.shape[1], seed, bits, STREAM_INPUT)
    out, lse = backend.call(
        "attention",
        "attention.forward",
        indptr,
        index,
        score_target,
        score_source,
        rows,
        bits=bits or 8,
        x_scale=scale,
        edge_score=_attention.edge_term(edge_attr, edge_weight, edge_order, x),
        negative_slope=negative_slope,
        dropout=dropout_of(threshold, dropout_seed),
        out_dtype=_out_dtype(x, score_target),
    )
    return fresh(x, (out, lse, *_attention.made(x_scale, (rows, scale), keep)))


def _out_dtype(x: Tensor, score: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else score.dtype


def _fake_attention(
    x: Tensor,
    x_scale: Tensor | None,
    score_target: Tensor,
    score_source: Tensor,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    edge_order: Tensor | None,
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    seed: Tensor | None,
    bits: int,
    threshold: int,
    dropout_seed: Tensor | None,
    negative_slope: float,
    keep: bool,
) -> tuple[Tensor, ...]:
    num_rows, heads = score_target.shape
    out = x.new_empty((num_rows, x.shape[1]), dtype=_out_dtype(x, score_target))
    lse = _attention.fake_lse(x, num_rows, heads)
    return fresh(x, (out, lse, *_attention.fake_made(x, x_scale, heads, bits, keep)))


attention = define(
    "attention",
    _attention_forward,
    f"(Tensor x, Tensor? x_scale, Tensor score_target, Tensor score_source, {_attention.EDGES}, {_attention.STRUCTURE},"
    f" {_attention.OPTIONS}, float negative_slope, bool keep) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_attention,
    Signature(
        {"score_target": "T H", "score_source": "S H", "x": "S H*D", **CSR, **_SHAPES},
        choices=_CHOICES,
        **_attention.POINTERS,
    ),
)


def _attention_backward(
    backend: Backend,
    grad: Tensor,
    x: Tensor,
    x_scale: Tensor | None,
    lse: Tensor,
    score_target: Tensor,
    score_source: Tensor,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    edge_order: Tensor | None,
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    seed: Tensor | None,
    bits: int,
    threshold: int,
    dropout_seed: Tensor | None,
    negative_slope: float,
    needs_dattr: bool,
    needs_dweight: bool,
) -> tuple[Tensor, ...]:
    d_target, d_source, dx, d_edge = backend.call(
        "attention_backward",
        "attention.backward",
        indptr,
        index,
        indptr_t,
        index_t,
        order_t,
        score_target,
        score_source,
        x,
        lse,
        grad,
        bits=bits or 8,
        x_scale=x_scale,
        edge_score=_attention.edge_term(edge_attr, edge_weight, edge_order, x),
        negative_slope=negative_slope,
        dropout=dropout_of(threshold, dropout_seed),
        grad_bits=bits,
        seed=seed,
        stream=STREAM_GRAD,
        needs_dedge=needs_dattr or needs_dweight,
    )
    edges = _attention.edge_grads(d_edge, edge_attr, edge_weight, edge_order, needs_dattr, needs_dweight)
    return fresh(grad, (dx, d_target, d_source, *edges))


def _fake_attention_backward(
    grad: Tensor,
    x: Tensor,
    x_scale: Tensor | None,
    lse: Tensor,
    score_target: Tensor,
    score_source: Tensor,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    edge_order: Tensor | None,
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    seed: Tensor | None,
    bits: int,
    threshold: int,
    dropout_seed: Tensor | None,
    negative_slope: float,
    needs_dattr: bool,
    needs_dweight: bool,
) -> tuple[Tensor, ...]:
    scores = score_target.new_empty(score_target.shape), score_source.new_empty(score_source.shape)
    edges = _attention.fake_edge_grads(edge_attr, edge_weight, needs_dattr, needs_dweight)
    return fresh(grad, (grad.new_empty(x.shape), *scores, *edges))


attention_backward = define(
    "attention_backward",
    _attention_backward,
    "(Tensor grad, Tensor x, Tensor? x_scale, Tensor lse, Tensor score_target, Tensor score_source,"
    f" {_attention.EDGES}, {_attention.STRUCTURE}, {_attention.OPTIONS}, float negative_slope, bool needs_dattr,"
    " bool needs_dweight) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_attention_backward,
    Signature(
        {
            **{"score_target": "T H", "score_source": "S H", "x": "S H*D", "grad": "T H*D", "lse": "T H"},
            **{**_attention.BACKWARD_SHAPES, **_SHAPES},
        },
        choices=_CHOICES,
        **_attention.BACKWARD_POINTERS,
    ),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, x_scale, *scores_edges_graph, seed, bits, threshold, dropout_seed, negative_slope, keep = inputs
    _, lse, codes, codes_scale = output
    _attention.check_kept("attention", bits, keep)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    rows = _attention.kept(x, x_scale, codes, codes_scale, bits)
    ctx.save_for_backward(*rows, lse, *scores_edges_graph, seed, dropout_seed)
    ctx.options = bits, threshold, negative_slope


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 18
    *tensors, seed, dropout_seed = ctx.saved_tensors
    bits, threshold, negative_slope = ctx.options
    needs = ctx.needs_input_grad
    options = (seed, bits, threshold, dropout_seed, negative_slope, needs[4], needs[5])
    dx, d_target, d_source, d_attr, d_weight = attention_backward(grad, *tensors, *options)
    grads = (dx, None, d_target, d_source, d_attr, d_weight, *(None,) * 12)
    return tuple(g if needed else None for g, needed in zip(grads, needs, strict=True))


register_autograd(attention, _backward, setup_context=_setup_context)
