"""Which of the tensors that a torch function saves may be coded, and how.

A gradient stays unbiased if it is linear in what is rounded. So the second operand of a product may be coded, the
denominator of a quotient may not, and what this table does not name is kept as it is. Of functions whose gradient asks
for a sign alone, a bit is kept. Norms are the one exception: their gradient contains a product of two values of one
rounding, whose bias is the rounding's variance over the number of values that the norm averages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Call = tuple[Any, ...]


class Rule(NamedTuple):
    """What may become of the tensors that a function saves.

    Args:
        projected: Whether the columns may be projected: of operands of dense products.
        multiplies: Whether a saved operand serves the gradients of the other operands alone. Its rounding may then be
            shared with other functions, as long as these gradients go to leaves: no gradient is the product of two.
        exact: Name of the second argument, if that stays as it is.
        normal: Whether saved values are as good as normal; those of a projection are, too.
        input_only: Whether only what is as large as the first argument is coded: not the means and deviations of norms.
        applies: Whether the rule holds for these arguments; ``None``: for all.
        bits: Width of the codes in place of the usual one.
        indices: Whether saved integers point into an argument's dimensions, so that its sizes bound them.
        two_valued: What to keep in one bit: of a saved tensor, one of two values with which the gradient is the same.
    """

    projected: bool = False
    multiplies: bool = False
    exact: str | None = None
    normal: bool = False
    input_only: bool = False
    applies: Callable[[Call, dict[str, Any]], bool] | None = None
    bits: int | None = None
    indices: bool = False
    two_valued: Callable[[Tensor, Call, dict[str, Any]], Tensor] | None = None

    def exact_argument(self, args: Call, kwargs: dict[str, Any]) -> Any:
        """The argument that stays as it is."""
        return None if self.exact is None else argument(args, kwargs, 1, self.exact)

    def is_statistic(self, t: Tensor, args: Call, kwargs: dict[str, Any]) -> bool:
        """Whether ``t`` is smaller than the input of a norm."""
        return self.input_only and t.numel() < argument(args, kwargs, 0, "input").numel()


def functions(*names: str) -> Iterator[Any]:
    """Whatever torch calls so: functions, methods, and those of ``torch.nn.functional``."""
    # PyG puts functions of its own in the place of some of torch's, which call those.
    owners = (torch._C._VariableFunctions, torch, torch.Tensor, F, torch.sparse)
    for name in names:
        for owner in owners:
            function = getattr(owner, name, None)
            if function is not None:
                yield function


def argument(args: Call, kwargs: dict[str, Any], position: int, name: str, default: Any = None) -> Any:
    """An argument by position or name."""
    return args[position] if len(args) > position else kwargs.get(name, default)


def _is_square(args: Call, kwargs: dict[str, Any]) -> bool:
    exponent = argument(args, kwargs, 1, "exponent")
    return isinstance(exponent, (int, float)) and exponent == 2


def _either(condition: Tensor, value: float, other: float) -> Tensor:
    return torch.full_like(condition, other, dtype=torch.float32).masked_fill_(condition, value)


def _positive(saved: Tensor, args: Call, kwargs: dict[str, Any]) -> Tensor:
    return _either(saved > 0, 1.0, -1.0)


def _passes(saved: Tensor, args: Call, kwargs: dict[str, Any]) -> Tensor:
    return _either(saved <= 0, 0.0, 1.0)  # ReLU lets the gradient of NaN through, leaky ReLU does not


def _range(args: Call, kwargs: dict[str, Any]) -> tuple[float, float]:
    return argument(args, kwargs, 1, "min_val", -1.0), argument(args, kwargs, 2, "max_val", 1.0)


def _is_bounded(args: Call, kwargs: dict[str, Any]) -> bool:
    return all(map(math.isfinite, _range(args, kwargs)))


def _inside(saved: Tensor, args: Call, kwargs: dict[str, Any]) -> Tensor:
    """Of hardtanh: the middle of its range, or a value beyond it, by far more than a rounding."""
    low, high = _range(args, kwargs)
    return _either((saved > low) & (saved < high), (low + high) / 2, 2 * high - low)


def _inside_6(saved: Tensor, args: Call, kwargs: dict[str, Any]) -> Tensor:
    return _inside(saved, (None, 0.0, 6.0), {})


def _noise(saved: Tensor, args: Call, kwargs: dict[str, Any]) -> Tensor:
    """What dropout multiplied by: 0 or a factor, or whether an element stayed."""
    return saved.float()


def _has_two_operands(args: Call, kwargs: dict[str, Any]) -> bool:
    """Whether an einsum is one product; of three operands, two may be one tensor, whose rounding would be squared."""
    return len(args) == 3 or (len(args) == 2 and isinstance(args[1], (tuple, list)) and len(args[1]) <= 2)


def _fits_fp32(args: Call, kwargs: dict[str, Any]) -> bool:
    return bool(argument(args, kwargs, 0, "input").dtype != torch.float64)


_PRODUCT = Rule(projected=True, multiplies=True)

RULES: dict[Any, Rule] = {
    **dict.fromkeys(functions("linear", "mm", "matmul", "__matmul__", "__rmatmul__", "addmm", "addmm_"), _PRODUCT),
    **dict.fromkeys(functions("bmm", "baddbmm", "addbmm", "mv", "conv1d", "conv2d"), _PRODUCT),
    **dict.fromkeys(functions("einsum"), _PRODUCT._replace(applies=_has_two_operands)),
    **dict.fromkeys(functions("mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"), Rule(multiplies=True)),
    **dict.fromkeys(functions("square", "exp", "exp_"), Rule()),
    **dict.fromkeys(functions("pow", "__pow__"), Rule(applies=_is_square)),
    **dict.fromkeys(functions("div", "div_", "__truediv__", "__itruediv__"), Rule(exact="other")),
    **dict.fromkeys(functions("true_divide", "divide"), Rule(exact="other")),
    **dict.fromkeys(
        functions("batch_norm", "layer_norm", "group_norm", "instance_norm"), Rule(normal=True, input_only=True)
    ),
    **dict.fromkeys(
        functions("index_select", "gather", "scatter", "scatter_add", "scatter_reduce"), Rule(indices=True)
    ),
    **dict.fromkeys(functions("scatter_", "scatter_add_", "scatter_reduce_"), Rule(indices=True)),
    **dict.fromkeys(functions("index_add", "index_add_", "__getitem__", "embedding"), Rule(indices=True)),
    **dict.fromkeys(functions("relu", "relu_"), Rule(two_valued=_passes)),
    **dict.fromkeys(functions("leaky_relu", "leaky_relu_"), Rule(two_valued=_positive)),
    **dict.fromkeys(functions("hardtanh", "hardtanh_"), Rule(two_valued=_inside, applies=_is_bounded)),
    **dict.fromkeys(functions("relu6"), Rule(two_valued=_inside_6)),
    **dict.fromkeys(functions("dropout", "dropout_"), Rule(two_valued=_noise, applies=_fits_fp32)),
}
# Our own operators, of which only those in full precision save floats.
QGNN_RULES = {"qgnn::graph_linear": _PRODUCT, "qgnn::spmm": Rule(multiplies=True)}


def rule_of(function: Any, args: Call, kwargs: dict[str, Any]) -> Rule | None:
    """The rule for a call, or ``None`` to keep everything that it saves."""
    if isinstance(function, torch._ops.OpOverload):
        return QGNN_RULES.get(function._schema.name)
    rule = RULES.get(function)
    if rule is None or (rule.applies is not None and not rule.applies(args, kwargs)):
        return None
    return rule
