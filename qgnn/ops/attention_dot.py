"""``qgnn::attention_dot``: ``qgnn::attention`` with scaled dot products as scores.

Queries, keys and values are rounded independently of each other. The score itself is made of the codes, so the backward
pass is that of the quantized forward pass, exactly or without bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qgnn.ops import _attention
from qgnn.ops._activation import CHOICES, dropout_of
from qgnn.ops._backends import STREAM_GRAD, STREAM_HIDDEN, STREAM_INPUT, STREAM_WEIGHT, Backend, fresh
from qgnn.ops._checks import CSR, INT8_OR_FULL, POSITIVE, Signature
from qgnn.ops._operator import define, register_autograd

_CHOICES = {"bits": INT8_OR_FULL, "heads": POSITIVE, **CHOICES}
_ROWS = {"query": "T H*D", "key": "S H*D", "value": "S H*D"}
_SHAPES = {
    **{"query_scale": "T H", "key_scale": "S H", "value_scale": "S H"},
    **{**_attention.EDGE_SHAPES, "edge_weight": "H*D K"},
}
_STREAMS = (STREAM_HIDDEN, STREAM_WEIGHT, STREAM_INPUT)  # of queries, keys and values


def _attention_dot(
    backend: Backend,
    query: Tensor,
    query_scale: Tensor | None,
    key: Tensor,
    key_scale: Tensor | None,
    value: Tensor,
    value_scale: Tensor | None,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    edge_order: Tensor | None,
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    heads: int,
    seed: Tensor | None,
    bits: int,
    threshold: int,
    dropout_seed: Tensor | None,
    keep: bool,
) -> tuple[Tensor, ...]:
    given = ((query, query_scale), (key, key_scale), (value, value_scale))
    rows = [
        _attention.rows_by_head(backend, x, scale, heads, seed, bits, stream)
        for (x, scale), stream in zip(given, _STREAMS, strict=True)
    ]
    out, lse = backend.call(
        "attention_dot",
        "attention.forward",
        indptr,
        index,
        *(x for x, _ in rows),
        bits=bits or 8,
        heads=heads,
        query_scale=rows[0][1],
        key_scale=rows[1][1],
        value_scale=rows[2][1],
        edge_x=_attention.edge_term(edge_attr, edge_weight, edge_order, value),
        dropout=dropout_of(threshold, dropout_seed),
        out_dtype=value.dtype if value.is_floating_point() else torch.float32,
    )
    kept = [_attention.made(scale, made, keep) for (_, scale), made in zip(given, rows, strict=True)]
    return fresh(value, (out, lse, *kept[0], *kept[1], *kept[2]))


def _fake_attention_dot(
    query: Tensor,
    query_scale: Tensor | None,
    key: Tensor,
    key_scale: Tensor | None,
    value: Tensor,
    value_scale: Tensor | None,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    edge_order: Tensor | None,
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    heads: int,
    seed: Tensor | None,
    bits: int,
    threshold: int,
    dropout_seed: Tensor | None,
    keep: bool,
) -> tuple[Tensor, ...]:
    out = value.new_empty(query.shape, dtype=value.dtype if value.is_floating_point() else torch.float32)
    given = ((query, query_scale), (key, key_scale), (value, value_scale))
    kept = [_attention.fake_made(x, scale, heads, bits, keep) for x, scale in given]
    return fresh(value, (out, _attention.fake_lse(value, query.shape[0], heads), *kept[0], *kept[1], *kept[2]))


attention_dot = define(
    "attention_dot",
    _attention_dot,
    "(Tensor query, Tensor? query_scale, Tensor key, Tensor? key_scale, Tensor value, Tensor? value_scale,"
    f" {_attention.EDGES}, {_attention.STRUCTURE}, int heads, {_attention.OPTIONS}, bool keep)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_attention_dot,
    Signature(
        {**_ROWS, **CSR, **_SHAPES},
        sizes={"heads": "H"},
        choices=_CHOICES,
        **_attention.POINTERS,
    ),
)


def _attention_dot_backward(
    backend: Backend,
    grad: Tensor,
    query: Tensor,
    query_scale: Tensor | None,
    key: Tensor,
    key_scale: Tensor | None,
    value: Tensor,
    value_scale: Tensor | None,
    lse: Tensor,
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
    needs_dattr: bool,
    needs_dweight: bool,
) -> tuple[Tensor, ...]:
    *grads, d_edge = backend.call(
        "attention_dot_backward",
        "attention.backward",
        indptr,
        index,
        indptr_t,
        index_t,
        order_t,
        query,
        key,
        value,
        lse,
        grad,
        bits=bits or 8,
        query_scale=query_scale,
        key_scale=key_scale,
        value_scale=value_scale,
        edge_x=_attention.edge_term(edge_attr, edge_weight, edge_order, value),
        dropout=dropout_of(threshold, dropout_seed),
        grad_bits=bits,
        seed=seed,
        stream=STREAM_GRAD,
        needs_dedge=needs_dattr or needs_dweight,
    )
    edges = _attention.edge_grads(d_edge, edge_attr, edge_weight, edge_order, needs_dattr, needs_dweight)
    return fresh(grad, (*grads, *edges))


def _fake_attention_dot_backward(
    grad: Tensor,
    query: Tensor,
    query_scale: Tensor | None,
    key: Tensor,
    key_scale: Tensor | None,
    value: Tensor,
    value_scale: Tensor | None,
    lse: Tensor,
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
    needs_dattr: bool,
    needs_dweight: bool,
) -> tuple[Tensor, ...]:
    grads = (grad.new_empty(x.shape) for x in (query, key, value))
    return fresh(grad, (*grads, *_attention.fake_edge_grads(edge_attr, edge_weight, needs_dattr, needs_dweight)))


attention_dot_backward = define(
    "attention_dot_backward",
    _attention_dot_backward,
    "(Tensor grad, Tensor query, Tensor? query_scale, Tensor key, Tensor? key_scale, Tensor value,"
    f" Tensor? value_scale, Tensor lse, {_attention.EDGES}, {_attention.STRUCTURE}, {_attention.OPTIONS},"
    " bool needs_dattr, bool needs_dweight) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_attention_dot_backward,
    Signature(
        {"lse": "T H", **_ROWS, "grad": "T H*D", **_attention.BACKWARD_SHAPES, **_SHAPES},
        choices={"bits": INT8_OR_FULL, **CHOICES},
        **_attention.BACKWARD_POINTERS,
    ),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _, seed, bits, threshold, dropout_seed, keep = inputs
    rows, scales, edges_graph = tensors[:6:2], tensors[1:6:2], tensors[6:]
    _, lse, *codes = output
    _attention.check_kept("attention_dot", bits, keep)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    kept = [
        _attention.kept(x, scale, x_q, x_scale, bits)
        for x, scale, x_q, x_scale in zip(rows, scales, codes[::2], codes[1::2], strict=True)
    ]
    ctx.save_for_backward(*kept[0], *kept[1], *kept[2], lse, *edges_graph, seed, dropout_seed)
    ctx.options = bits, threshold


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 20
    *tensors, seed, dropout_seed = ctx.saved_tensors
    bits, threshold = ctx.options
    needs = ctx.needs_input_grad
    options = (seed, bits, threshold, dropout_seed, needs[6], needs[7])
    d_query, d_key, d_value, d_attr, d_weight = attention_dot_backward(grad, *tensors, *options)
    grads = (d_query, None, d_key, None, d_value, None, d_attr, d_weight, *(None,) * 12)
    return tuple(g if needed else None for g, needed in zip(grads, needs, strict=True))


register_autograd(attention_dot, _backward, setup_context=_setup_context)
