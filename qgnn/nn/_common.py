"""What all layers share."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.dense.linear import Linear

from qgnn.config import QConfig
from qgnn.qtensor import QTensor

_MESSAGE_HOOKS = [
    f"_{stage}_forward_{kind}"
    for stage in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for kind in ("pre_hooks", "hooks")
]


@lru_cache(maxsize=64)
def _nearest(config: QConfig) -> QConfig:
    return replace(config, fmt=None, rounding="nearest")


def active_config(module: nn.Module, config: QConfig | None) -> QConfig | None:
    """The config of this call: a layer in eval mode rounds to nearest."""
    if config is None or module.training or not config.stochastic:
        return config
    return replace(config, fmt=None, rounding="nearest") if torch.compiler.is_compiling() else _nearest(config)


def initialize_lazy(linear: Linear, x: Tensor | QTensor) -> None:
    """Give a weight of unknown input width its shape, as the linear module's own forward would."""
    if isinstance(linear.weight, UninitializedParameter):
        linear.initialize_parameters(None, (x.codes if isinstance(x, QTensor) else x,))


def restore_propagate(conv: MessagePassing) -> None:
    """Give explainers the ``propagate`` that they need.

    PyG replaces a class's ``propagate`` by a generated one and remembers the class's own for explainers. Once the
    parent class was used, what a subclass inherits, and hence remembers, is the parent's generated one, which ignores
    masks.
    """
    cls = type(conv)
    if cls._jinja_propagate is not cls._orig_propagate:  # equal where a class has a propagate of its own
        cls._orig_propagate = MessagePassing.propagate


_MESSAGE_METHODS = ("message", "aggregate", "message_and_aggregate", "update")  # PyG generates propagate itself


def needs_message_path(conv: MessagePassing, base: type[MessagePassing], *linears: nn.Module) -> bool:
    """Whether a fused path would skip code that somebody attached: explainers, message hooks, hooks on a submodule."""
    if conv.explain or conv.decomposed_layers > 1 or any(getattr(conv, name, None) for name in _MESSAGE_HOOKS):
        return True
    if any(getattr(type(conv), name) is not getattr(base, name) for name in _MESSAGE_METHODS):
        return True
    return any(type(linear) is not Linear or has_hooks(linear) for linear in linears)


def has_hooks(linear: Any) -> bool:
    """Whether hooks are registered on a module, other than PyG's own that initializes a lazy weight."""
    lazy = getattr(linear, "_hook", None)
    own = {lazy.id} if lazy is not None else set()
    hooks = (linear._forward_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    return bool(set(linear._forward_pre_hooks) - own) or any(hooks)
