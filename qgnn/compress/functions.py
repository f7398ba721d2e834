"""Functions that run in place of torch's, with the same result, because what torch saves of them cannot be coded.

ReLU and leaky ReLU keep a bit an element. Of other functions of single elements the derivative is coded instead of the
argument: the gradient is linear in it, so that it stays unbiased. So is that of a loss with one result in its gradient,
of which 8 bits are kept, as all others are made of it; it is computed in the type of the loss, since half precision
would lose it before a scaler multiplies. The gradient of softmax contains its result twice, and two independent
roundings make it unbiased. Functions that write to their argument run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from qgnn.activation import dropout_threshold
from qgnn.compress.policy import Call, Rule, argument, functions
from qgnn.compress.recorder import Op, Recorder, has_columns, same_storage, tensors_in
from qgnn.compress.saved import no_second_derivative
from qgnn.functional.activation import activation

# ``None`` leaves the call to torch.
Replacement = Callable[[Recorder, Any, Call, dict[str, Any]], Tensor | None]

_CODED = Rule()
_CODED_LOSS = Rule(bits=8)


class _WithDerivative(torch.autograd.Function):
    """A function of single elements, or one with a single result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str, results: tuple[Tensor, Tensor]) -> Tensor:
        y, derivative = results
        ctx.op, ctx.dtype = op, x.dtype
        ctx.save_for_backward(derivative)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        no_second_derivative(ctx.op)
        (derivative,) = ctx.saved_tensors
        return (grad * derivative).to(ctx.dtype), None, None


class _Softmax(torch.autograd.Function):
    """Saves its result once for each time that it is in the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, results: tuple[Tensor]) -> Tensor:
        (y,) = results  # an input that is returned would be a view
        ctx.dim, ctx.dtype = dim, x.dtype
        ctx.save_for_backward(y, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        once, again = ctx.saved_tensors  # decoded for this call alone
        weighted = once.mul_(grad)
        total = weighted.sum(ctx.dim, keepdim=True)
        return weighted.sub_(again.mul_(total)).to(ctx.dtype), None, None


@cache
def _names(function: Any) -> tuple[str, ...]:
    """Names of a function's arguments; none of torch's own in C, which do not tell, and have no flag ``inplace``."""
    try:
        return tuple(signature(function).parameters)
    except ValueError:
        return ()


def _writes(function: Any, args: Call, kwargs: dict[str, Any]) -> bool:
    """Whether a function writes to one of its arguments."""
    flags = [value for name, value in zip(_names(function), args, strict=False) if name == "inplace"]
    return any((*flags, kwargs.get("inplace"))) or kwargs.get("out") is not None


def _one_bit(op: Op, x: Tensor, original_bytes: int) -> None:
    """Enter the bits that stand for ``x``."""
    (entry,) = op.entries
    entry.shape, entry.dtype, entry.format, entry.original_bytes = tuple(x.shape), x.dtype, "1 bit", original_bytes


def _relu(recorder: Recorder, function: Any, args: Call, kwargs: dict[str, Any]) -> Tensor | None:
    x = argument(args, kwargs, 0, "input")
    if not recorder.takes(function, x) or _writes(function, args, kwargs) or not x.is_contiguous():
        return None
    with recorder.standing_for(function) as op:
        y = activation(x, "relu")
        _one_bit(op, x, recorder.original_bytes(y))
    return y


def _leaky_relu(recorder: Recorder, function: Any, args: Call, kwargs: dict[str, Any]) -> Tensor | None:
    x, slope = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "negative_slope", 0.01)
    if not recorder.takes(function, x) or _writes(function, args, kwargs) or not x.is_contiguous():
        return None
    with recorder.standing_for(function) as op:
        y = activation(x, "leaky_relu", negative_slope=slope)
        _one_bit(op, x, recorder.original_bytes(x))
    return y


def _without_input(args: Call, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments but the first argument, which may be among them."""
    return kwargs if args else {name: value for name, value in kwargs.items() if name != "input"}


def _elementwise(recorder: Recorder, function: Any, args: Call, kwargs: dict[str, Any]) -> Tensor | None:
    if _writes(function, args, kwargs):
        return None
    return _with_derivative(recorder, function, args, kwargs, _CODED)


def _loss(recorder: Recorder, function: Any, args: Call, kwargs: dict[str, Any]) -> Tensor | None:
    if any(t.requires_grad for t in tensors_in((*args[1:], *_without_input(args, kwargs).values()))):
        return None
    return _with_derivative(recorder, function, args, kwargs, _CODED_LOSS)


def _with_derivative(
    recorder: Recorder, function: Any, args: Call, kwargs: dict[str, Any], rule: Rule
) -> Tensor | None:
    """The result, with codes of its derivative for the backward pass."""
    x, others = argument(args, kwargs, 0, "input"), _without_input(args, kwargs)
    if not recorder.takes(function, x) or not has_columns(x):
        return None
    rest = args[1:]
    saved: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        saved.append(x if same_storage(t, x) else t.detach())
        return t.detach()

    def run(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        leaf = x.detach().to(dtype).requires_grad_()
        return leaf, function(leaf, *rest, **others)

    with torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            leaf, y = run(x.dtype)
        if y.shape != (x.shape if rule is _CODED else ()):  # a loss for each row
            return None
        result = y.detach()
        if rule is _CODED_LOSS:
            if y.dtype == torch.float16:
                return None
            if y.dtype != x.dtype and x.dtype.itemsize < 4:  # under autocast
                with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda t: t):
                    leaf, y = run(y.dtype)
        (derivative,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    given = [x, *tensors_in((*rest, *others.values()))]
    own = [t for t in saved if not any(same_storage(t, a) for a in given)]
    if not own and recorder.lives_anyway(x):
        return None
    original = sum(recorder.original_bytes(t, any(t is o for o in own)) for t in saved)
    with recorder.standing_for(function, rule) as op:
        out: Tensor = _WithDerivative.apply(x, op.name, (result, derivative))
        op.entries[0].original_bytes = original
    return out


def _softmax(recorder: Recorder, function: Any, args: Call, kwargs: dict[str, Any]) -> Tensor | None:
    x, dim = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "dim")
    if not recorder.takes(function, x) or not isinstance(dim, int) or not has_columns(x):
        return None
    with recorder.standing_for(function, _CODED) as op:
        with torch.no_grad():
            y = function(*args, **kwargs)
            entry = recorder.enter(op, y, recorder.original_bytes(y, is_result=True))
            op.ready = recorder.roundings(y, op, entry, 2)
            entry.format += " twice"
        result: Tensor = _Softmax.apply(x, dim, (y,))
    return result


def redrawn_dropout(recorder: Recorder, function: Any, args: Call, kwargs: dict[str, Any]) -> Tensor | None:
    """Dropout that keeps nothing but a seed. It draws other masks than torch's."""
    x, probability = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "p", 0.5)
    training = argument(args, kwargs, 2, "training", function is torch.nn.functional.dropout)
    inplace = argument(args, kwargs, 3, "inplace", False)
    if not recorder.takes(function, x) or not training or inplace or not dropout_threshold(probability):
        return None
    mask_bytes = x.numel() * (x.element_size() if x.device.type == "cpu" else 1)  # a factor, or a boolean
    with recorder.standing_for(function) as op:
        y = activation(x, None, probability, seed=recorder.seed(x.device))
        op.entries[0].original_bytes = mask_bytes
    return y


DROPOUTS = frozenset(functions("dropout"))

_ELEMENTWISE = (
    *("elu", "celu", "selu", "gelu", "silu", "mish", "sigmoid", "tanh", "softplus", "logsigmoid"),
    *("hardswish", "hardsigmoid", "softsign", "sin", "cos", "erf"),
)

_LOSSES = (
    *("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss"),
    *("l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss"),
)

REPLACEMENTS: dict[Any, Replacement] = {
    **dict.fromkeys(functions("relu"), _relu),
    **dict.fromkeys(functions("leaky_relu"), _leaky_relu),
    **dict.fromkeys(functions(*_ELEMENTWISE), _elementwise),
    **dict.fromkeys(functions("softmax"), _softmax),
    **dict.fromkeys(functions(*_LOSSES), _loss),
}
