"""``qgnn::activation``: ``y = drop(act(x + bias + residual))`` behind whatever has no epilogue, with all gradients.

What is kept is a bit an element of ReLU (whether its gradient passes) and of leaky ReLU (whether it was positive). Of
ELU its derivative is kept, in ``x``'s type or as a byte. Nothing is kept of the identity: like that of leaky ReLU, its
dropout is drawn again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qgnn.activation import KINDS, derivative_size, derivative_steps, keep_factor, mask_width
from qgnn.ops import _activation
from qgnn.ops._backends import STREAM_DERIVATIVE, Backend, fresh
from qgnn.ops._checks import Signature
from qgnn.ops._operator import define, no_second_derivative, register_autograd
from qgnn.ops.matmul import fake_db
from qgnn.reference._common import compute_dtype


def _kept(x: Tensor, kind: str, keep: bool, keep_codes: bool) -> tuple[Tensor | None, Tensor | None]:
    """Room for the bits and for the derivative that are kept; their values are undefined."""
    N, F = x.shape
    mask = derivative = None
    if keep and kind in ("relu", "leaky_relu"):
        mask = x.new_empty((N, mask_width(F)), dtype=torch.uint8)
    elif keep and kind == "elu":
        derivative = x.new_empty((N, F), dtype=torch.uint8 if keep_codes else x.dtype)
    return mask, derivative


def _activation_forward(
    backend: Backend,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    seed: Tensor | None,
    dropout_seed: Tensor | None,
    kind: str,
    slope: float,
    threshold: int,
    keep: bool,
    keep_codes: bool,
) -> tuple[Tensor, ...]:
    mask, derivative = _kept(x, kind, keep, keep_codes)
    y = backend.call(
        "activation",
        "activation.forward",
        x,
        bias,
        residual,
        kind=kind,
        slope=slope,
        dropout=_activation.dropout_of(threshold, dropout_seed),
        mask=mask,
        derivative=derivative,
        steps=derivative_steps(slope),
        seed=seed,
        stream=STREAM_DERIVATIVE,
    )
    return fresh(x, (y, mask, derivative))


def _fake_activation(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    seed: Tensor | None,
    dropout_seed: Tensor | None,
    kind: str,
    slope: float,
    threshold: int,
    keep: bool,
    keep_codes: bool,
) -> tuple[Tensor, ...]:
    return fresh(x, (x.new_empty(x.shape), *_kept(x, kind, keep, keep_codes)))


_CHOICES = {"kind": KINDS, **_activation.CHOICES}

activation = define(
    "activation",
    _activation_forward,
    "(Tensor x, Tensor? bias, Tensor? residual, Tensor? seed, Tensor? dropout_seed, str kind, float slope,"
    " int threshold, bool keep, bool keep_codes) -> (Tensor, Tensor, Tensor)",
    _fake_activation,
    Signature({"x": "N F", "bias": "F", "residual": "N F"}, choices=_CHOICES),
)


def _check_kept(kind: str, mask: Tensor | None, derivative: Tensor | None) -> None:
    """Raise if what the forward pass kept is not there."""
    name, kept = ("derivative", derivative) if kind == "elu" else ("mask", mask)
    if kind != "none" and kept is None:
        raise ValueError(f"'qgnn::activation_backward' expects '{name}' of kind '{kind}' (got None)")


def _activation_backward(
    backend: Backend,
    grad: Tensor,
    mask: Tensor | None,
    derivative: Tensor | None,
    dropout_seed: Tensor | None,
    kind: str,
    slope: float,
    threshold: int,
    needs_db: bool,
) -> tuple[Tensor, ...]:
    _check_kept(kind, mask, derivative)
    factor = keep_factor(threshold)
    if derivative is not None:  # with the factor of dropout in it, unless it is codes
        factor = factor * derivative_size(slope) if derivative.dtype == torch.uint8 else 1.0
    results = backend.call(
        "activation_backward",
        "activation.backward",
        grad,
        mask=mask,
        derivative=derivative,
        slope=slope if kind == "leaky_relu" else 0.0,
        factor=factor,
        dropout=_activation.dropout_of(threshold, dropout_seed) if kind in ("none", "leaky_relu") else None,
        sum_columns=needs_db,
    )
    return fresh(grad, results)


def _fake_activation_backward(
    grad: Tensor,
    mask: Tensor | None,
    derivative: Tensor | None,
    dropout_seed: Tensor | None,
    kind: str,
    slope: float,
    threshold: int,
    needs_db: bool,
) -> tuple[Tensor, ...]:
    _check_kept(kind, mask, derivative)
    return grad.new_empty(grad.shape), fake_db(grad, needs_db)


activation_backward = define(
    "activation_backward",
    _activation_backward,
    "(Tensor grad, Tensor? mask, Tensor? derivative, Tensor? dropout_seed, str kind, float slope, int threshold,"
    " bool needs_db) -> (Tensor, Tensor)",
    _fake_activation_backward,
    Signature({"grad": "N F", "mask": "N F/8", "derivative": "N F"}, choices=_CHOICES),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, bias, _, _, dropout_seed, kind, slope, threshold, keep, _ = inputs
    _, mask, derivative = output
    if kind != "none" and not keep:
        raise ValueError("'qgnn::activation' expects 'keep' where it has a backward pass (got False)")
    ctx.mark_non_differentiable(mask, derivative)
    ctx.set_materialize_grads(False)
    is_bits, is_elu = kind in ("relu", "leaky_relu"), kind == "elu"
    ctx.save_for_backward(mask if is_bits else None, derivative if is_elu else None, dropout_seed)
    ctx.options = (kind, slope, threshold)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 10
    needs_dx, needs_db, needs_dresidual = ctx.needs_input_grad[:3]
    kind, _, threshold = ctx.options
    if kind == "elu" and torch.is_grad_enabled():  # what is kept does not depend on x, as far as autograd knows
        no_second_derivative("activation")
    if kind == "none" and not threshold:
        dx, db = grad, grad.sum(0, dtype=compute_dtype(grad)) if needs_db else None
    else:
        dx, db = activation_backward(grad, *ctx.saved_tensors, *ctx.options, needs_db)
    return (
        dx if needs_dx else None,
        db.to(ctx.bias_dtype) if db is not None and needs_db else None,
        dx if needs_dresidual else None,
        *(None,) * 7,
    )


register_autograd(activation, _backward, setup_context=_setup_context)
