"""Operators of the namespace ``qgnn``: each one's kernels, fake and derivative, registered with torch's dispatcher.

``torch.library.custom_op`` would do the same, but a call with a gradient reads the schema again, argument by argument:
with twenty of them that takes longer than the kernels of a small graph. Here a call passes by that, by the checks of
its arguments if others of the same types and shapes have passed them, and by the search for results that share memory
with an argument, which tests do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from qgnn.autocast import without_autocast
from qgnn.ops import _backends
from qgnn.ops._checks import Signature

_LIBRARY = torch.library.Library("qgnn", "FRAGMENT")
_MAX_REMEMBERED = 256  # sets of types and shapes an operator: batches of a sampler have new ones for ever

_functions: dict[OpOverload, type[torch.autograd.Function]] = {}


def define(
    name: str, function: Callable[..., Any], schema: str, fake: Callable[..., Any], signature: Signature
) -> OpOverload:
    """Register ``function(backend, ...)`` as the operator ``qgnn::name`` on CPU and CUDA.

    Args:
        name: Name within the namespace.
        function: The operator over a backend.
        schema: Its schema, without the name.
        fake: Shapes and types of its results.
        signature: What its arguments must be, or an error says so: of real tensors and of fake ones.
    """
    owner = f"qgnn::{name}"
    signature = replace(signature, required=tuple(re.findall(r"\bTensor (\w+)", schema)))
    passed: dict[tuple[Hashable, ...], dict[str, Any]] = {}  # the sizes of arguments without fault

    def check(args: tuple[Any, ...]) -> None:
        arguments, form = dict(zip(parameters, args, strict=True)), tuple(_form(a) for a in args)
        sizes = passed.get(form)
        if sizes is None:
            sizes = signature.check(owner, arguments)
            if len(passed) >= _MAX_REMEMBERED:
                passed.clear()
            passed[form] = sizes
        signature.check_values(owner, arguments, sizes)

    # torch.compile looks into calls from frames that it could not compile: not into these.
    @torch.compiler.disable
    def on_cpu(*args: Any) -> Any:
        with without_autocast("cpu"):
            check(args)
            return function(_backends.cpu_backend(), *args)

    @torch.compiler.disable
    def on_cuda(*args: Any) -> Any:
        with without_autocast("cuda"):
            check(args)
            return function(_backends.triton_backend(), *args)

    def on_fake(*args: Any) -> Any:
        signature.check(owner, dict(zip(parameters, args, strict=True)))
        return fake(*args)

    @torch.compiler.disable
    def with_derivative(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            refuse_transforms()
            return _functions[op].apply(*args)
        return _below_autograd(op, args)

    _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(torch.ops.qgnn, name).default
    parameters = tuple(argument.name for argument in op._schema.arguments)
    _LIBRARY.impl(name, on_cpu, "CPU")
    _LIBRARY.impl(name, on_cuda, "CUDA")
    _LIBRARY.impl(name, with_derivative, "Autograd")
    torch.library.register_fake(owner, on_fake, lib=_LIBRARY)
    refuse = no_second_derivative if name.endswith("_backward") else _no_derivative
    register_autograd(op, partial(refuse, name.removesuffix("_backward")))
    return op


def refuse_transforms() -> None:
    """Raise within a transform of ``torch.func``."""
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(
            "'torch.func' does not transform operators of qgnn; use 'torch.autograd.grad', or PyG's layers"
        )


def _form(argument: Any) -> Hashable:
    """All of an argument that :meth:`Signature.check` looks at."""
    if not isinstance(argument, Tensor):
        return argument
    return argument.dtype, argument.shape, argument.device, argument.is_contiguous()


def _below_autograd(op: OpOverload, args: tuple[Any, ...]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def register_autograd(
    op: OpOverload, backward: Callable[..., Any], *, setup_context: Callable[..., None] | None = None
) -> None:
    """Give an operator its derivative.

    Args:
        op: The operator.
        backward: ``backward(ctx, *grads)`` returns the gradient of each argument.
        setup_context: ``setup_context(ctx, inputs, output)`` keeps what it needs.
    """

    def forward(ctx: Any, *args: Any) -> Any:
        output = _below_autograd(op, args)
        if setup_context is not None:
            setup_context(ctx, args, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    _functions[op] = type(f"qgnn_{op._opname}_", (torch.autograd.Function,), methods)  # a node's name ends in Backward


def no_second_derivative(name: str, *_: Any) -> Any:
    raise NotImplementedError(
        f"'qgnn::{name}' has no second derivatives, which a gradient of a gradient (create_graph=True) needs; use "
        f"PyG's layer or a torch function there"
    )


def _no_derivative(name: str, *_: Any) -> Any:
    raise NotImplementedError(f"'qgnn::{name}' has no derivative; give it tensors that need none ('detach()')")
