"""``qgnn::spmm``: the weighted neighbor sum over a graph, with the gradients of rows, edge weights and bias.

With ``bits`` the rows are rounded to int8 before they are gathered, and so is the gradient, with *its* scale; with
``bits=0`` rows and gradient keep their type. Rows that come as codes with ``x_scale`` are gathered as they are; their
gradient goes to ``x_float``, if that is given. Constant edge weights need nothing of ``x`` in the backward pass, so
nothing is kept then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qgnn.ops import _activation
from qgnn.ops._backends import STREAM_INPUT, Backend, fresh
from qgnn.ops._checks import CSC, CSR, GRANULARITIES, INT8_OR_FULL, Signature
from qgnn.ops._operator import define, register_autograd
from qgnn.ops.matmul import (
    fake_db,
    fake_kept,
    float_dtype,
    masked_gradient,
    needs_rows_grad,
    quantize_gradient,
    quantize_operand,
    with_rows_grad,
)
from qgnn.reference._common import compute_dtype


def transposed_weight(weight: Tensor | None, weight_t: Tensor | None, order_t: Tensor) -> Tensor | None:
    """Edge weights in the order of the transposed graph: the given ones, or ``weight`` permuted."""
    if weight is None or weight_t is not None:
        return weight_t
    return weight.index_select(0, order_t)


def fold_row_factor(g_scale: Tensor | None, row_factor: Tensor | None) -> Tensor | None:
    """Scale of gradient rows with the forward's factor of each output row folded in."""
    if row_factor is None or g_scale is None:
        return row_factor if g_scale is None else g_scale
    return g_scale * row_factor


def edge_weight_grad(
    backend: Backend,
    indptr: Tensor,
    index: Tensor,
    rows_target: tuple[Tensor, Tensor | None],
    rows_source: tuple[Tensor, Tensor | None],
    bits: int,
    weight: Tensor,
) -> Tensor:
    """Gradient of ``weight``: the dot product of each edge's target's gradient row and its source's row, by head."""
    (g, g_scale), (x, x_scale) = rows_target, rows_source
    if g.dtype == torch.int8 and x.dtype != torch.int8:  # the rows themselves were kept, not their codes
        g, x = g.float(), x.float()
    elif x.dtype == torch.int8 and g.dtype != torch.int8:  # the rows came as codes, which any float type holds exactly
        x = x.to(g.dtype)
    scales: dict[str, Any] = {"target_scale": g_scale, "source_scale": x_scale}
    if weight.dim() == 2 and weight.shape[1] > 1:
        scales["heads"] = weight.shape[1]
    dweight = backend.call("sddmm", "sddmm.backward", indptr, index, g, x, bits=bits or 8, **scales)
    return dweight.view_as(weight).to(weight.dtype)


def _spmm(
    backend: Backend,
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor | None,
    weight_t: Tensor | None,
    row_factor: Tensor | None,
    bias: Tensor | None,
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    seed: Tensor | None,
    bits: int,
    granularity: str,
    keep_codes: bool,
    relu: bool,
    threshold: int,
    dropout_seed: Tensor | None,
    keep_mask: bool,
    x_float: Tensor | None,
) -> tuple[Tensor, ...]:
    T, F = indptr.shape[0] - 1, x.shape[1]
    activation = _activation.make_activation(x, T, F, relu, threshold, dropout_seed, keep_mask)
    rows, scale = x, x_scale
    if bits and x_scale is None:
        rows, scale = quantize_operand(backend, x, seed, bits, granularity, STREAM_INPUT, "forward")
    out = backend.call(
        "spmm",
        "spmm.forward",
        indptr,
        index,
        rows,
        bits=bits or 8,
        weight=weight,
        x_scale=scale,
        row_factor=row_factor,
        bias=bias,
        out_dtype=float_dtype(x, x_float, torch.float32),
        activation=activation,
    )
    made_codes = bits > 0 and keep_codes and x_scale is None
    mask = None if activation is None else activation.mask
    return fresh(x, (out, rows if made_codes else None, scale if made_codes else None, mask))


def _fake_spmm(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor | None,
    weight_t: Tensor | None,
    row_factor: Tensor | None,
    bias: Tensor | None,
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    seed: Tensor | None,
    bits: int,
    granularity: str,
    keep_codes: bool,
    relu: bool,
    threshold: int,
    dropout_seed: Tensor | None,
    keep_mask: bool,
    x_float: Tensor | None,
) -> tuple[Tensor, ...]:
    T, F = indptr.shape[0] - 1, x.shape[1]
    out = x.new_empty((T, F), dtype=float_dtype(x, x_float, torch.float32))
    mask = _activation.fake_mask(x, T, F, relu, threshold, keep_mask)
    return (out, *fake_kept(x, x_scale, granularity, bits > 0 and keep_codes), mask)


spmm = define(
    "spmm",
    _spmm,
    "(Tensor x, Tensor? x_scale, Tensor? weight, Tensor? weight_t, Tensor? row_factor, Tensor? bias, Tensor indptr,"
    " Tensor index, Tensor indptr_t, Tensor index_t, Tensor order_t, Tensor? seed, int bits, str granularity,"
    f" bool keep_codes, {_activation.SCHEMA}, Tensor? x_float) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_spmm,
    Signature(
        {
            **{"x": "S F", **CSR, "x_scale": "S|1", "x_float": "S F", "weight": "E|E H", "weight_t": "E|E H"},
            **{"row_factor": "T", "bias": "F"},
        },
        choices={"bits": INT8_OR_FULL, "granularity": GRANULARITIES, **_activation.CHOICES},
        pointers=("indptr",),
        indices={"index": "S"},
        shares={"F": "H"},
    ),
)


def _spmm_backward(
    backend: Backend,
    grad: Tensor,
    mask: Tensor | None,
    x: Tensor | None,
    x_scale: Tensor | None,
    weight: Tensor | None,
    weight_t: Tensor | None,
    row_factor: Tensor | None,
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    seed: Tensor | None,
    bits: int,
    granularity: str,
    threshold: int,
    needs_dx: bool,
    needs_dweight: bool,
    needs_db: bool,
) -> tuple[Tensor, ...]:
    if bits:
        rows, scale, db = quantize_gradient(backend, grad, mask, threshold, seed, bits, granularity, needs_db)
    else:
        rows, scale = masked_gradient(backend, grad, mask, threshold), None
        db = rows.sum(0, dtype=compute_dtype(grad)) if needs_db else None
    scale = fold_row_factor(scale, row_factor)
    dx = dweight = None
    if needs_dx:
        dx = backend.call(
            "spmm",
            "spmm.backward",
            indptr_t,
            index_t,
            rows,
            bits=bits or 8,
            weight=transposed_weight(weight, weight_t, order_t),
            x_scale=scale,
            out_dtype=grad.dtype,
        )
    if needs_dweight and x is not None and weight is not None:
        dweight = edge_weight_grad(backend, indptr, index, (rows, scale), (x, x_scale), bits, weight)
    return fresh(grad, (dx, dweight, db))


def _fake_spmm_backward(
    grad: Tensor,
    mask: Tensor | None,
    x: Tensor | None,
    x_scale: Tensor | None,
    weight: Tensor | None,
    weight_t: Tensor | None,
    row_factor: Tensor | None,
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    seed: Tensor | None,
    bits: int,
    granularity: str,
    threshold: int,
    needs_dx: bool,
    needs_dweight: bool,
    needs_db: bool,
) -> tuple[Tensor, ...]:
    dx = grad.new_empty((indptr_t.shape[0] - 1, grad.shape[1])) if needs_dx else grad.new_empty(0)
    dweight = weight.new_empty(weight.shape) if needs_dweight and weight is not None else grad.new_empty(0)
    return dx, dweight, fake_db(grad, needs_db)


spmm_backward = define(
    "spmm_backward",
    _spmm_backward,
    "(Tensor grad, Tensor? mask, Tensor? x, Tensor? x_scale, Tensor? weight, Tensor? weight_t, Tensor? row_factor,"
    " Tensor indptr, Tensor index, Tensor indptr_t, Tensor index_t, Tensor order_t, Tensor? seed, int bits,"
    " str granularity, int threshold, bool needs_dx, bool needs_dweight, bool needs_db) -> (Tensor, Tensor, Tensor)",
    _fake_spmm_backward,
    Signature(
        {
            **{"grad": "T F", **CSR, **CSC, "x": "S F", "x_scale": "S|1", "mask": "T F/8"},
            **{"weight": "E|E H", "weight_t": "E|E H", "row_factor": "T"},
        },
        choices={"bits": INT8_OR_FULL, "granularity": GRANULARITIES, **_activation.CHOICES},
        pointers=("indptr", "indptr_t"),
        indices={"index": "S", "index_t": "T", "order_t": "E"},
        shares={"F": "H"},
    ),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, x_scale, weight, weight_t, row_factor, bias, *rest = inputs
    *graph, seed, bits, granularity, keep_codes, relu, threshold, _, keep_mask, _ = rest
    _, rows, scale, mask = output
    _activation.check_mask_kept("spmm", relu, threshold, keep_mask)
    ctx.mark_non_differentiable(rows, scale, mask)
    ctx.set_materialize_grads(False)
    saved_x = saved_scale = None
    if weight is not None and weight.requires_grad:
        saved_x, saved_scale = (rows, scale) if bits and keep_codes and x_scale is None else (x, x_scale)
    kept_mask = mask if relu or threshold else None
    ctx.save_for_backward(kept_mask, saved_x, saved_scale, weight, weight_t, row_factor, *graph, seed)
    ctx.options = (bits, granularity, threshold)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 20
    _, _, needs_dweight, _, _, needs_db = ctx.needs_input_grad[:6]
    needs_dx = needs_rows_grad(ctx)
    dx, dweight, db = spmm_backward(grad, *ctx.saved_tensors, *ctx.options, needs_dx, needs_dweight, needs_db)
    return with_rows_grad(
        ctx,
        dx,
        dweight if needs_dweight else None,
        *(None, None),
        db.to(ctx.bias_dtype) if needs_db else None,
        *(None,) * 13,
    )


register_autograd(spmm, _backward, setup_context=_setup_context)
