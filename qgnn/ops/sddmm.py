"""``qgnn::sddmm``: one result an edge from the rows at its ends, dot products or sums, with both rows' gradients.

With ``bits`` float rows are rounded to int8, the two sides independently of each other, with a scale a head; rows that
come as codes with a scale are used as they are, and have no gradient. The gradient of a dot product is a neighbor sum
of the other side's rows (of their codes, where those were kept) with the edges' gradients, in full precision, as
weights. The gradient of a sum needs no rows: edges are summed by target, and by source.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qgnn.ops._backends import STREAM_HIDDEN, STREAM_INPUT, Backend, fake_codes, fresh
from qgnn.ops._checks import CSC, CSR, GRANULARITIES, INT8_OR_FULL, POSITIVE, Signature
from qgnn.ops._operator import define, register_autograd
from qgnn.ops.matmul import quantize_operand


def codes_of_heads(
    backend: Backend, x: Tensor, heads: int, seed: Tensor | None, bits: int, granularity: str, stream: int
) -> tuple[Tensor, Tensor]:
    """Codes [N, F] with a scale a head of a row (or one a tensor): [N] with one head, else [N, H]."""
    num_rows, width = x.shape
    by_head = x if heads == 1 else x.reshape(num_rows * heads, width // heads)
    codes, scale = quantize_operand(backend, by_head, seed, bits, granularity, stream, "forward")
    if heads == 1:
        return codes, scale
    return codes.reshape(num_rows, width), scale if granularity == "tensor" else scale.view(num_rows, heads)


def _sddmm(
    backend: Backend,
    x_target: Tensor,
    target_scale: Tensor | None,
    x_source: Tensor,
    source_scale: Tensor | None,
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    seed: Tensor | None,
    bits: int,
    granularity: str,
    op: str,
    heads: int,
    keep_codes: bool,
) -> tuple[Tensor, ...]:
    rounding = (seed, bits, granularity)
    made: list[Tensor | None] = [None] * 4
    target, source = (x_target, target_scale), (x_source, source_scale)
    if bits and target_scale is None:
        target = made[:2] = codes_of_heads(backend, x_target, heads, *rounding, STREAM_HIDDEN)
    if bits and source_scale is None:
        source = made[2:] = codes_of_heads(backend, x_source, heads, *rounding, STREAM_INPUT)
    options = {} if (op, heads) == ("dot", 1) else {"op": op, "heads": heads}
    scales = {"target_scale": target[1], "source_scale": source[1]}
    out = backend.call(
        "sddmm", "sddmm.forward", indptr, index, target[0], source[0], bits=bits or 8, **scales, **options
    )
    return fresh(x_target, (out.to(_out_dtype(x_target, x_source)), *(made if keep_codes else [None] * 4)))


def _out_dtype(x_target: Tensor, x_source: Tensor) -> torch.dtype:
    """That of the float rows; fp32 if both sides are codes."""
    floats = [x.dtype for x in (x_target, x_source) if x.is_floating_point()]
    return floats[0] if floats else torch.float32


def fake_codes_of_heads(x: Tensor, heads: int, granularity: str) -> tuple[Tensor, Tensor]:
    num_rows, width = x.shape
    codes = fake_codes(x, num_rows, width) if heads == 1 else x.new_empty((num_rows, width), dtype=torch.int8)
    by_row = (num_rows,) if heads == 1 else (num_rows, heads)
    return codes, x.new_empty((1,) if granularity == "tensor" else by_row, dtype=torch.float32)


def _fake_sddmm(
    x_target: Tensor,
    target_scale: Tensor | None,
    x_source: Tensor,
    source_scale: Tensor | None,
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    seed: Tensor | None,
    bits: int,
    granularity: str,
    op: str,
    heads: int,
    keep_codes: bool,
) -> tuple[Tensor, ...]:
    num_edges = index.shape[0]
    by_head = (num_edges,) if heads == 1 else (num_edges, heads)
    shape = by_head if op == "dot" else (num_edges, x_target.shape[1])
    kept: list[Tensor | None] = []
    for x, scale in ((x_target, target_scale), (x_source, source_scale)):
        made = bits and keep_codes and scale is None
        kept += fake_codes_of_heads(x, heads, granularity) if made else (None, None)
    return fresh(x_target, (x_target.new_empty(shape, dtype=_out_dtype(x_target, x_source)), *kept))


sddmm = define(
    "sddmm",
    _sddmm,
    "(Tensor x_target, Tensor? target_scale, Tensor x_source, Tensor? source_scale, Tensor indptr, Tensor index,"
    " Tensor indptr_t, Tensor index_t, Tensor order_t, Tensor? seed, int bits, str granularity, str op, int heads,"
    " bool keep_codes) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_sddmm,
    Signature(
        {"x_target": "T H*D", "x_source": "S H*D", **CSR, "target_scale": "T|T H|1", "source_scale": "S|S H|1"},
        sizes={"heads": "H"},
        choices={"bits": INT8_OR_FULL, "granularity": GRANULARITIES, "op": ("dot", "add"), "heads": POSITIVE},
        pointers=("indptr",),
        indices={"index": "S"},
    ),
)


def _sum_of_rows(
    backend: Backend,
    indptr: Tensor,
    index: Tensor,
    rows: Tensor,
    scale: Tensor | None,
    edge_grad: Tensor,
    heads: int,
    bits: int,
    dtype: torch.dtype,
) -> Tensor:
    """Neighbor sums of ``rows`` [S, F], each head weighted by its own gradient, ``edge_grad`` [E, H]: [N, F]."""
    weight = edge_grad.squeeze(1) if heads == 1 else edge_grad
    if scale is not None and scale.dim() == 2:  # of heads: made part of the weights, of which there is one a head too
        weight, scale = weight * scale.index_select(0, index).view_as(weight), None
    options = {"weight": weight, "x_scale": scale, "out_dtype": dtype}
    return backend.call("spmm", "spmm.backward", indptr, index, rows, bits=bits or 8, **options)


def _check_grad(grad: Tensor, index: Tensor, op: str, heads: int) -> None:
    """What a shape in letters cannot say: it depends on ``op``."""
    if op == "dot" and grad.dim() == 2 and (heads == 1 or grad.shape[1] != heads):
        raise ValueError(f"'qgnn::sddmm_backward' expects 'grad' of shape [E, {heads}] (got {list(grad.shape)})")
    if grad.dim() == 1 and (op == "add" or heads > 1):
        raise ValueError(f"'qgnn::sddmm_backward' expects 'grad' with two dimensions (got {list(grad.shape)})")


def _sddmm_backward(
    backend: Backend,
    grad: Tensor,
    x_target: Tensor | None,
    target_scale: Tensor | None,
    x_source: Tensor | None,
    source_scale: Tensor | None,
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    bits: int,
    op: str,
    heads: int,
    needs_dtarget: bool,
    needs_dsource: bool,
) -> tuple[Tensor, ...]:
    _check_grad(grad, index, op, heads)
    d_target = d_source = None
    if op == "add":
        edge = torch.arange(index.shape[0], dtype=index.dtype, device=index.device)
        if needs_dtarget:
            d_target = backend.call("spmm", "spmm.backward", indptr, edge, grad)
        if needs_dsource:
            d_source = backend.call("spmm", "spmm.backward", indptr_t, order_t, grad)
        return fresh(grad, (d_target, d_source))
    weight = grad.reshape(index.shape[0], heads)
    weight = weight if weight.dtype == torch.float64 else weight.float()
    common = (heads, bits, grad.dtype)
    if needs_dtarget and x_source is not None:
        d_target = _sum_of_rows(backend, indptr, index, x_source, source_scale, weight, *common)
    if needs_dsource and x_target is not None:
        weight_t = weight.index_select(0, order_t)
        d_source = _sum_of_rows(backend, indptr_t, index_t, x_target, target_scale, weight_t, *common)
    return fresh(grad, (d_target, d_source))


def _fake_sddmm_backward(
    grad: Tensor,
    x_target: Tensor | None,
    target_scale: Tensor | None,
    x_source: Tensor | None,
    source_scale: Tensor | None,
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    bits: int,
    op: str,
    heads: int,
    needs_dtarget: bool,
    needs_dsource: bool,
) -> tuple[Tensor, ...]:
    _check_grad(grad, index, op, heads)

    def rows(needed: bool, pointer: Tensor, other: Tensor | None) -> Tensor | None:
        like = grad if op == "add" else other
        return grad.new_empty((pointer.shape[0] - 1, like.shape[1])) if needed and like is not None else None

    return fresh(grad, (rows(needs_dtarget, indptr, x_source), rows(needs_dsource, indptr_t, x_target)))


sddmm_backward = define(
    "sddmm_backward",
    _sddmm_backward,
    "(Tensor grad, Tensor? x_target, Tensor? target_scale, Tensor? x_source, Tensor? source_scale, Tensor indptr,"
    " Tensor index, Tensor indptr_t, Tensor index_t, Tensor order_t, int bits, str op, int heads, bool needs_dtarget,"
    " bool needs_dsource) -> (Tensor, Tensor)",
    _fake_sddmm_backward,
    Signature(
        {
            **{**CSR, **CSC, "grad": "E|E F", "x_target": "T H*D", "x_source": "S H*D"},
            **{"target_scale": "T|T H|1", "source_scale": "S|S H|1"},
        },
        sizes={"heads": "H"},
        choices={"bits": INT8_OR_FULL, "op": ("dot", "add"), "heads": POSITIVE},
        pointers=("indptr", "indptr_t"),
        indices={"index": "S", "index_t": "T", "order_t": "E"},
    ),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x_target, target_scale, x_source, source_scale, *graph, _, bits, _, op, heads, keep_codes = inputs
    kept = output[1:]
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)
    target: tuple[Any, ...] = (x_target, target_scale)
    source: tuple[Any, ...] = (x_source, source_scale)
    if bits and keep_codes:
        target = target if target_scale is not None else kept[:2]
        source = source if source_scale is not None else kept[2:]
    # The gradient of one side is made of the other's rows.
    saves_target, saves_source = (op == "dot" and x.requires_grad for x in (x_source, x_target))
    saved = (*(target if saves_target else (None, None)), *(source if saves_source else (None, None)))
    ctx.save_for_backward(*saved, *graph)
    ctx.options = (bits, op, heads)


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 15
    needs_dtarget, _, needs_dsource = ctx.needs_input_grad[:3]
    d_target, d_source = sddmm_backward(grad, *ctx.saved_tensors, *ctx.options, needs_dtarget, needs_dsource)
    return (d_target if needs_dtarget else None, None, d_source if needs_dsource else None, *(None,) * 12)


register_autograd(sddmm, _backward, setup_context=_setup_context)
