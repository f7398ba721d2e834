"""What makes a layer of PyG's a quantized one: its config, its epilogue, and when PyG's own path has to run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch_geometric.nn.conv import MessagePassing

from qgnn import trace
from qgnn.autocast import without_autocast
from qgnn.config import QConfig, check_product_config
from qgnn.graph import Graph
from qgnn.nn._common import (
    activate,
    active_config,
    float_rows,
    has_custom_messages,
    hidden_config,
    is_custom,
    restore_propagate,
    tells_activations,
)
from qgnn.nn.epilogue import Epilogue, check_epilogue
from qgnn.qtensor import QTensor


class Quantized:
    """Mixed into a layer of PyG's, in front of it. All that it adds to a layer is set by :meth:`configure`, so that a
    layer of PyG's becomes a quantized one by a change of its class, with the parameters that it has."""

    config: QConfig | None
    epilogue: Epilogue | None
    training: bool
    pyg: ClassVar[type[nn.Module]]  # the class that this one stands in for
    has_network: ClassVar[bool] = False  # whether it runs a module that somebody gave it, under their autocast
    takes_activations = False  # whether the rows of the last training step needed a gradient

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__ and not cls.has_network:
            cls.forward = _without_autocast(cls.forward)  # type: ignore[attr-defined]
        for base in cls.__mro__:
            if base.__module__.startswith("torch_geometric."):
                cls.pyg = base
                return

    @property
    def note(self) -> str | None:
        """What a summary of a model has to say about this layer."""
        return None

    def configure(self, config: QConfig | None, epilogue: Epilogue | None = None) -> None:
        """Set what is quantized, and what is applied to the result."""
        name = type(self).__name__
        check_product_config(config, name)
        check_epilogue(epilogue, name)
        self.config, self.epilogue = config, epilogue

    @property
    def active(self) -> QConfig | None:
        """The config of this call: in eval mode, rounding is to nearest. Rows have the format that those of the last
        training step had, of features or of activations: without gradients, nothing else tells which they are."""
        config = active_config(self.training, self.config)
        if config is not None and self.takes_activations and not self._learns and tells_activations(config):
            return hidden_config(config)
        return config

    @property
    def _learns(self) -> bool:
        """Whether this call is that of a training step."""
        return self.training and torch.is_grad_enabled()

    def remember(self, x: Any) -> None:
        """Note what the rows of a training step are, for passes without gradients."""
        if self._learns and tells_activations(self.config):
            rows = x[0] if isinstance(x, (tuple, list)) else x
            rows = rows.origin if isinstance(rows, QTensor) else rows
            takes_activations = isinstance(rows, Tensor) and rows.requires_grad
            if takes_activations != self.takes_activations:
                self.takes_activations = takes_activations

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None and tells_activations(self.config):  # no entry of its own: the keys stay those of PyG
            metadata.setdefault(prefix[:-1], {})["takes_activations"] = self.takes_activations

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if tells_activations(self.config) and "takes_activations" in local_metadata:
            self.takes_activations = bool(local_metadata["takes_activations"])
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)  # type: ignore[misc]

    @property
    def operands(self) -> str:
        """What a summary says that this layer computes with: :attr:`qgnn.QConfig.name`, or ``"fp32"``."""
        return "fp32" if self.config is None else self.config.name

    @property
    def applied(self) -> Epilogue | None:
        """The epilogue of this call."""
        return self.epilogue if self.epilogue is not None and self.epilogue.is_live else None

    def in_kernel(self) -> dict[str, Any]:
        """What of the epilogue a product or sum can apply itself, as its keyword arguments."""
        epilogue = self.applied
        if epilogue is None or epilogue.activation not in (None, "relu"):
            return {}
        return {"activation": epilogue.activation, "dropout": epilogue.drops(self.training)}

    def behind_kernel(self, out: Tensor) -> Tensor:
        """What of the epilogue is left to apply after :meth:`in_kernel`."""
        epilogue = self.applied
        return out if epilogue is None or epilogue.activation in (None, "relu") else self.finish(out)

    def finish(self, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Add a bias and other rows, and apply the whole epilogue: one pass."""
        return activate(out, self.applied, self.training, self.active, bias=bias, residual=residual)

    def __prepare_scriptable__(self) -> Any:
        raise TypeError(
            f"'{type(self).__name__}' cannot be compiled by 'torch.jit.script'; use 'torch.compile' or 'torch.export'"
        )

    def __repr__(self) -> str:
        epilogue = "" if self.applied is None else f", epilogue={self.applied}"
        return f"{super().__repr__()[:-1]}, config={self.config}{epilogue})"


# Names of dense layers in PyG's convolutions.
PRODUCTS = (
    *("lin", "lin_src", "lin_dst", "lin_edge", "res", "lin_l", "lin_r", "lin_rel", "lin_root", "lins"),
    *("lin_key", "lin_query", "lin_value", "lin_skip", "lin_beta"),
)


class QuantizedConv(Quantized):
    """A graph convolution."""

    aggr: Any
    node_dim: int
    flow: str

    def configure(self, config: QConfig | None, epilogue: Epilogue | None = None) -> None:
        """Set what is quantized, and what is applied to the result."""
        super().configure(config, epilogue)
        restore_propagate(self)

    @property
    def note(self) -> str | None:
        """What a summary of a model has to say about this layer."""
        if self.has_attached_code:
            return "runs on PyG's path in full precision: an explainer, hooks or other dense layers are attached to it"
        return super().note

    @property
    def operands(self) -> str:
        """What a summary says that this layer computes with."""
        return "fp32" if self.has_attached_code else super().operands

    @property
    def has_attached_code(self) -> bool:
        """:meth:`needs_messages` of all dense layers whose weights the fused path reads."""
        return self.needs_messages(*self.products)

    @property
    def products(self) -> list[nn.Module]:
        """The dense layers that PyG's class has, whose weights the fused path reads; a subclass may have others."""
        assert isinstance(self, MessagePassing)
        parts = [child for name, child in self.named_children() if name in PRODUCTS]
        return [linear for part in parts for linear in (part if isinstance(part, nn.ModuleList) else (part,))]

    def needs_messages(self, *linears: nn.Module) -> bool:
        """Whether the fused path would skip code that somebody attached: explainers, message hooks, hooks on one of
        ``linears``, methods of a subclass."""
        assert isinstance(self, MessagePassing)
        return has_custom_messages(self, self.pyg) or any(is_custom(linear) for linear in linears)

    def nodes_elsewhere(self, x: Tensor | QTensor) -> bool:
        """Whether nodes lie along another dimension of ``x`` than the last but one."""
        return self.node_dim not in (-2, len(x.shape) - 2)

    def messages(self, *args: Any) -> Any:
        """PyG's own path, in full precision, and the epilogue behind it."""
        if any(isinstance(arg, Graph) for arg in args):
            raise ValueError(
                f"'{type(self).__name__}' expects 'edge_index' as a tensor where PyG's own path has to run: with an "
                f"explainer, hooks, or an aggregation of its own (got a Graph)"
            )
        args = tuple(_dequantized(arg) for arg in args)
        out = self.pyg.forward(self, *args)
        first = out[0] if isinstance(out, tuple) else out
        if not torch.compiler.is_compiling() and trace.recording():
            fmt = str(first.dtype).removeprefix("torch.")
            trace.report("messages.forward", fmt, "pyg", (*(a for a in args if isinstance(a, Tensor)), first))
        first = self.finish(first)
        return (first, *out[1:]) if isinstance(out, tuple) else first


def given_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rows among the arguments of a layer, which torch's dense one has under another name."""
    return args[0] if args else kwargs.get("x", kwargs.get("input"))


def _without_autocast(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Autocast changes nothing in a layer: it computes and returns the type of its input, whose kind it remembers."""

    @wraps(forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.remember(given_rows(args, kwargs))
        with without_autocast("cpu"), without_autocast("cuda"), _made_once(self):
            return forward(self, *args, **kwargs)

    return run


def _made_once(layer: nn.Module) -> AbstractContextManager[Any]:
    """Where parametrized weights are made at the first of several reads, as PyG's layers read them: some, such as those
    of spectral norm, change with each."""
    if any(parametrize.is_parametrized(part) for part in (layer, *layer.children())):
        return parametrize.cached()
    return nullcontext()


def _dequantized(x: Any) -> Any:
    if isinstance(x, (tuple, list)):
        return tuple(_dequantized(part) for part in x)
    return float_rows(x) if isinstance(x, QTensor) else x
