"""``qgnn::spmm_extremum``: element-wise maximum or minimum over the neighbors, with the gradients of rows and weights.

The gradient of an element goes to the one edge that it came from, so the backward pass gathers nothing and its rows
keep their type; what it needs is the edge of each element. With ``bits`` the rows are rounded to int8 before they are
compared, and the gradient passes the rounding as if it were not there. Rows that come as codes with ``x_scale`` have no
gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qgnn import reference, trace
from qgnn.ops._backends import STREAM_INPUT, Backend, fresh
from qgnn.ops._checks import CSR, GRANULARITIES, INT8_OR_FULL, Signature
from qgnn.ops._operator import define, register_autograd
from qgnn.ops.matmul import fake_kept, float_dtype, needs_rows_grad, quantize_operand, with_rows_grad


def _spmm_extremum(
    backend: Backend,
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor | None,
    indptr: Tensor,
    index: Tensor,
    seed: Tensor | None,
    bits: int,
    granularity: str,
    largest: bool,
    keep_codes: bool,
    x_float: Tensor | None,
) -> tuple[Tensor, ...]:
    rows, scale = x, x_scale
    if bits and x_scale is None:
        rows, scale = quantize_operand(backend, x, seed, bits, granularity, STREAM_INPUT, "forward")
    out, arg = backend.call(
        "spmm_extremum",
        "spmm_extremum.forward",
        indptr,
        index,
        rows,
        bits=bits or 8,
        weight=weight,
        x_scale=scale,
        largest=largest,
    )
    made_codes = bits > 0 and keep_codes and x_scale is None
    kept = (rows, scale) if made_codes else (None, None)
    return fresh(x, (out.to(float_dtype(x, x_float, torch.float32)), arg, *kept))


def _fake_spmm_extremum(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor | None,
    indptr: Tensor,
    index: Tensor,
    seed: Tensor | None,
    bits: int,
    granularity: str,
    largest: bool,
    keep_codes: bool,
    x_float: Tensor | None,
) -> tuple[Tensor, ...]:
    shape = (indptr.shape[0] - 1, x.shape[1])
    out = x.new_empty(shape, dtype=float_dtype(x, x_float, torch.float32))
    return (out, index.new_empty(shape), *fake_kept(x, x_scale, granularity, bits > 0 and keep_codes))


spmm_extremum = define(
    "spmm_extremum",
    _spmm_extremum,
    "(Tensor x, Tensor? x_scale, Tensor? weight, Tensor indptr, Tensor index, Tensor? seed, int bits,"
    " str granularity, bool largest, bool keep_codes, Tensor? x_float) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_spmm_extremum,
    Signature(
        {"x": "S F", **CSR, "x_scale": "S|1", "x_float": "S F", "weight": "E"},
        choices={"bits": INT8_OR_FULL, "granularity": GRANULARITIES},
        pointers=("indptr",),
        indices={"index": "S"},
    ),
)


def _spmm_extremum_backward(
    backend: Backend,
    grad: Tensor,
    arg: Tensor,
    x: Tensor | None,
    x_scale: Tensor | None,
    weight: Tensor | None,
    index: Tensor,
    num_sources: int,
    needs_dx: bool,
    needs_dweight: bool,
) -> tuple[Tensor, ...]:
    dx = dweight = None
    if needs_dx:
        dx = backend.call(
            "spmm_extremum_dx", "spmm_extremum.backward", index, grad, arg, num_sources=num_sources, weight=weight
        )
    if needs_dweight and x is not None and weight is not None:
        dweight = reference.spmm_extremum_dweight(index, grad, arg, x, x_scale=x_scale).to(weight.dtype)
        trace.report("spmm_extremum.backward_dweight", "float32", "torch", (grad, arg, x, dweight))
    return fresh(grad, (dx, dweight))


def _fake_spmm_extremum_backward(
    grad: Tensor,
    arg: Tensor,
    x: Tensor | None,
    x_scale: Tensor | None,
    weight: Tensor | None,
    index: Tensor,
    num_sources: int,
    needs_dx: bool,
    needs_dweight: bool,
) -> tuple[Tensor, ...]:
    dx = grad.new_empty((num_sources, grad.shape[1])) if needs_dx else grad.new_empty(0)
    dweight = weight.new_empty(weight.shape) if needs_dweight and weight is not None else grad.new_empty(0)
    return dx, dweight


spmm_extremum_backward = define(
    "spmm_extremum_backward",
    _spmm_extremum_backward,
    "(Tensor grad, Tensor arg, Tensor? x, Tensor? x_scale, Tensor? weight, Tensor index, SymInt num_sources,"
    " bool needs_dx, bool needs_dweight) -> (Tensor, Tensor)",
    _fake_spmm_extremum_backward,
    Signature(
        {"grad": "T F", "arg": "T F", "index": "E", "x": "S F", "x_scale": "S|1", "weight": "E"},
        sizes={"num_sources": "S"},
        indices={"index": "S", "arg": "E"},
    ),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, x_scale, weight, _, index, _, bits, _, _, keep_codes, _ = inputs
    _, arg, *kept = output
    ctx.mark_non_differentiable(arg, *kept)
    ctx.set_materialize_grads(False)
    saved_x = saved_scale = None
    if weight is not None and weight.requires_grad:
        saved_x, saved_scale = kept if bits and keep_codes and x_scale is None else (x, x_scale)
    ctx.save_for_backward(arg, saved_x, saved_scale, weight, index)
    ctx.num_sources = x.shape[0]


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 11
    needs_dx, needs_dweight = needs_rows_grad(ctx), ctx.needs_input_grad[2]
    dx = dweight = None
    if needs_dx or needs_dweight:
        dx, dweight = spmm_extremum_backward(grad, *ctx.saved_tensors, ctx.num_sources, needs_dx, needs_dweight)
    return with_rows_grad(ctx, dx, dweight if needs_dweight else None, *(None,) * 7)


register_autograd(spmm_extremum, _backward, setup_context=_setup_context)
