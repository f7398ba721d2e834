"""``qgnn::attention_gatv2``: ``qgnn::attention`` with the scores of GATv2.

The rows of both ends are rounded independently of each other. The score itself is made of the codes, so the backward
pass is that of the quantized forward pass, exactly or without bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qgnn.ops import _attention
from qgnn.ops._activation import CHOICES, dropout_of
from qgnn.ops._backends import STREAM_GRAD, STREAM_HIDDEN, STREAM_INPUT, Backend, fresh
from qgnn.ops._checks import CSR, INT8_OR_FULL, Signature
from qgnn.ops._operator import define, register_autograd

_CHOICES = {"bits": INT8_OR_FULL, **CHOICES}
_SHAPES = {"target_scale": "T H", "source_scale": "S H", **_attention.EDGE_SHAPES, "edge_weight": "H*D K"}


def _attention_gatv2(
    backend: Backend,
    x_target: Tensor,
    target_scale: Tensor | None,
    x_source: Tensor,
    source_scale: Tensor | None,
    att: Tensor,
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
    heads = att.shape[0]
    target = _attention.rows_by_head(backend, x_target, target_scale, heads, seed, bits, STREAM_HIDDEN)
    source = _attention.rows_by_head(backend, x_source, source_scale, heads, seed, bits, STREAM_INPUT)
    out, lse = backend.call(
        "attention_gatv2",
        "attention.forward",
        indptr,
        index,
        target[0],
        source[0],
        att,
        bits=bits or 8,
        target_scale=target[1],
        source_scale=source[1],
        edge_x=_attention.edge_term(edge_attr, edge_weight, edge_order, x_source),
        negative_slope=negative_slope,
        dropout=dropout_of(threshold, dropout_seed),
        out_dtype=_out_dtype(x_source, att),
    )
    kept = (*_attention.made(target_scale, target, keep), *_attention.made(source_scale, source, keep))
    return fresh(x_source, (out, lse, *kept))


def _out_dtype(x: Tensor, att: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else att.dtype


def _fake_attention_gatv2(
    x_target: Tensor,
    target_scale: Tensor | None,
    x_source: Tensor,
    source_scale: Tensor | None,
    att: Tensor,
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
    heads = att.shape[0]
    out = x_source.new_empty(x_target.shape, dtype=_out_dtype(x_source, att))
    kept_target = _attention.fake_made(x_target, target_scale, heads, bits, keep)
    kept_source = _attention.fake_made(x_source, source_scale, heads, bits, keep)
    return fresh(x_source, (out, _attention.fake_lse(x_source, x_target.shape[0], heads), *kept_target, *kept_source))


attention_gatv2 = define(
    "attention_gatv2",
    _attention_gatv2,
    "(Tensor x_target, Tensor? target_scale, Tensor x_source, Tensor? source_scale, Tensor att,"
    f" {_attention.EDGES}, {_attention.STRUCTURE}, {_attention.OPTIONS}, float negative_slope, bool keep)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_attention_gatv2,
    Signature(
        {"att": "H D", "x_target": "T H*D", "x_source": "S H*D", **CSR, **_SHAPES},
        choices=_CHOICES,
        **_attention.POINTERS,
    ),
)


def _attention_gatv2_backward(
    backend: Backend,
    grad: Tensor,
    x_target: Tensor,
    target_scale: Tensor | None,
    x_source: Tensor,
    source_scale: Tensor | None,
    lse: Tensor,
    att: Tensor,
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
    *grads, d_edge = backend.call(
        "attention_gatv2_backward",
        "attention.backward",
        indptr,
        index,
        indptr_t,
        index_t,
        order_t,
        x_target,
        x_source,
        att,
        lse,
        grad,
        bits=bits or 8,
        target_scale=target_scale,
        source_scale=source_scale,
        edge_x=_attention.edge_term(edge_attr, edge_weight, edge_order, x_source),
        negative_slope=negative_slope,
        dropout=dropout_of(threshold, dropout_seed),
        grad_bits=bits,
        seed=seed,
        stream=STREAM_GRAD,
        needs_dedge=needs_dattr or needs_dweight,
    )
    edges = _attention.edge_grads(d_edge, edge_attr, edge_weight, edge_order, needs_dattr, needs_dweight)
    return fresh(grad, (*grads, *edges))


def _fake_attention_gatv2_backward(
    grad: Tensor,
    x_target: Tensor,
    target_scale: Tensor | None,
    x_source: Tensor,
    source_scale: Tensor | None,
    lse: Tensor,
    att: Tensor,
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
    grads = grad.new_empty(x_target.shape), grad.new_empty(x_source.shape), att.new_empty(att.shape)
    edges = _attention.fake_edge_grads(edge_attr, edge_weight, needs_dattr, needs_dweight)
    return fresh(grad, (*grads, *edges))


attention_gatv2_backward = define(
    "attention_gatv2_backward",
    _attention_gatv2_backward,
    "(Tensor grad, Tensor x_target, Tensor? target_scale, Tensor x_source, Tensor? source_scale, Tensor lse,"
    f" Tensor att, {_attention.EDGES}, {_attention.STRUCTURE}, {_attention.OPTIONS}, float negative_slope,"
    " bool needs_dattr, bool needs_dweight) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_attention_gatv2_backward,
    Signature(
        {
            **{"att": "H D", "x_target": "T H*D", "x_source": "S H*D", "grad": "T H*D", "lse": "T H"},
            **{**_attention.BACKWARD_SHAPES, **_SHAPES},
        },
        choices=_CHOICES,
        **_attention.BACKWARD_POINTERS,
    ),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x_target, target_scale, x_source, source_scale, *edges_graph, seed, bits, threshold, dropout_seed, slope, keep = (
        inputs
    )
    _, lse, *codes = output
    _attention.check_kept("attention_gatv2", bits, keep)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    target = _attention.kept(x_target, target_scale, codes[0], codes[1], bits)
    source = _attention.kept(x_source, source_scale, codes[2], codes[3], bits)
    ctx.save_for_backward(*target, *source, lse, *edges_graph, seed, dropout_seed)
    ctx.options = bits, threshold, slope


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 19
    *tensors, seed, dropout_seed = ctx.saved_tensors
    bits, threshold, negative_slope = ctx.options
    needs = ctx.needs_input_grad
    options = (seed, bits, threshold, dropout_seed, negative_slope, needs[5], needs[6])
    d_target, d_source, d_att, d_attr, d_weight = attention_gatv2_backward(grad, *tensors, *options)
    grads = (d_target, None, d_source, None, d_att, d_attr, d_weight, *(None,) * 12)
    return tuple(g if needed else None for g, needed in zip(grads, needs, strict=True))


register_autograd(attention_gatv2, _backward, setup_context=_setup_context)
