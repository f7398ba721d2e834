"""What all layers share: operands quantized once, graphs of edges, and what says that PyG's own path has to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import type_before_parametrizations
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.dense.linear import Linear

from qgnn import functional
from qgnn.config import QConfig
from qgnn.graph import Graph, as_graph, check_num_nodes, identity, to_edges
from qgnn.nn.epilogue import Epilogue
from qgnn.qtensor import QTensor
from qgnn.rng import make_rounding_seed
from qgnn.weak_cache import cached, is_recorded, remembered

_MESSAGE_HOOKS = [
    f"_{stage}_forward_{kind}"
    for stage in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for kind in ("pre_hooks", "hooks")
]
# PyG generates propagate and edge_updater itself.
_MESSAGE_METHODS = ("message", "aggregate", "message_and_aggregate", "update", "edge_update")


@lru_cache(maxsize=64)
def _nearest(config: QConfig) -> QConfig:
    return replace(config, rounding="nearest")


def active_config(training: bool, config: QConfig | None) -> QConfig | None:
    """The config of a call: a layer in eval mode rounds to nearest."""
    if config is None or training or not config.stochastic:
        return config
    return replace(config, rounding="nearest") if torch.compiler.is_compiling() else _nearest(config)


def tells_activations(config: QConfig | None) -> bool:
    """Whether rows that need a gradient have another format than those that need none."""
    return config is not None and config.format_of("activations") != config.format_of("features")


def _as_hidden(config: QConfig) -> QConfig:
    return replace(config, components={**config.components, "features": config.format_of("activations")})


_cached_as_hidden = lru_cache(maxsize=64)(_as_hidden)


def hidden_config(config: QConfig) -> QConfig:
    """The config of a layer whose rows are activations, where autograd does not say so."""
    return _as_hidden(config) if torch.compiler.is_compiling() else _cached_as_hidden(config)


def operand(x: Tensor | QTensor, config: QConfig | None, *, shared: bool = False) -> Tensor | QTensor:
    """``x`` as a layer's products take it: as codes, if that saves rounding it again.

    Input features that need no gradient are constants: they are rounded to nearest, once for as long as the tensor
    lives unchanged, however many layers and steps use them. So are the rows of a pass without gradients in eval mode.

    Args:
        x: Rows, or codes, which are used as they are.
        config: The layer's active config.
        shared: Whether several products and sums of the layer take ``x``: then it is rounded for all of them here.
    """
    if config is None or isinstance(x, QTensor):
        return x
    if not config.is_integer:
        return _mixed_operand(x, config)
    # Drawn in any case: a reentrant checkpoint repeats what was drawn in a pass without gradients.
    seed = make_rounding_seed(None, x.device) if shared and config.stochastic else None
    constant = not x.requires_grad and (torch.is_grad_enabled() or not config.stochastic)
    key = ("codes", config.bits, config.granularity)
    if constant and config.keeps_codes:
        nearest = active_config(False, config)
        if is_recorded(x):
            return functional.quantize(x, nearest)
        return cached((x,), key, lambda: functional.quantize(x, nearest))
    # The pass without gradients of a reentrant checkpoint has to take what the other one takes. A CUDA graph replays on
    # other rows.
    if config.keeps_codes and not is_recorded(x) and (codes := remembered((x,), key)) is not None:
        return codes
    if shared and (config.keeps_codes or not torch.is_grad_enabled()):
        return functional.quantize(x, config, seed=seed, straight_through=True)
    return x


def _mixed_operand(x: Tensor, config: QConfig) -> Tensor | QTensor:
    """Constants of a training step as codes for products, with the rows themselves for what reads these."""
    fmt = config.format_of("features")
    if x.requires_grad or fmt is None or not config.keeps_codes or is_recorded(x):
        return x
    nearest, key = replace(config, rounding="nearest"), ("codes", str(fmt), config.granularity)
    if not torch.is_grad_enabled():
        q = remembered((x,), key)
        return x if q is None else replace(q, origin=x)
    return replace(cached((x,), key, lambda: functional.quantize(x, nearest)), origin=x)


def float_rows(x: Tensor | QTensor) -> Tensor:
    """``x`` in full precision: what codes were made of, where that needs a gradient, else what they stand for."""
    if isinstance(x, QTensor):
        return x.dequantize() if x.origin is None else x.origin
    return x


def activate(
    x: Tensor,
    epilogue: Epilogue | None,
    training: bool,
    config: QConfig | None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``x`` plus a bias and other rows, behind an epilogue, of ``x``'s type."""
    if epilogue is None:
        out = x if residual is None else x + residual
        return (out if bias is None else out + bias).to(x.dtype)
    return functional.activation(
        x,
        epilogue.activation,
        epilogue.drops(training),
        bias=bias,
        residual=None if residual is None else residual.to(x.dtype),
        negative_slope=epilogue.negative_slope,
        alpha=epilogue.alpha,
        config=config,
    )


def graph_for(conv: MessagePassing, edges: Any, num_sources: int, num_targets: int | None = None) -> Graph:
    """The sorted graph that ``conv`` aggregates over, made once for as long as ``edges`` live unchanged.

    Args:
        conv: Says in which direction messages flow.
        edges: Whatever PyG takes as edges, or a Graph.
        num_sources: Number of nodes that messages come from.
        num_targets: Number of nodes that they go to, where these are others.
    """
    num_nodes: int | tuple[int, int] = num_sources
    # While compiling, a comparison would be a guard on the sizes.
    if num_targets is not None and (torch.compiler.is_compiling() or num_targets != num_sources):
        num_nodes = (num_sources, num_targets)
    if conv.flow == "source_to_target":
        return as_graph(edges, num_nodes)
    if isinstance(edges, Graph):
        check_num_nodes(edges, num_sources, num_sources if num_targets is None else num_targets)

    def reverse() -> Graph:
        if isinstance(edges, Graph):  # values of edges come in the order in which its edges were given
            edge_index = edges.edge_index(as_given=True)
            weight = None if edges.weight is None else edges.to_given_order(edges.weight)
        else:
            edge_index, weight = to_edges(edges)
        return Graph.from_edge_index(edge_index.flip(0), num_nodes, weight)

    return cached(identity(edges, weights=True), ("reversed graph", num_nodes), reverse)


def check_flow(conv: MessagePassing, num_sources: int, num_targets: int) -> None:
    """Raise where messages flow against edges between two numbers of nodes: PyG's layers take the number of results
    from the wrong side there."""
    if conv.flow == "target_to_source" and num_sources != num_targets:
        raise ValueError(
            f"'{type(conv).__name__}' expects as many source as target nodes where flow='target_to_source' (got "
            f"{num_sources} and {num_targets}); give 'edge_index.flip(0)' to a layer with flow='source_to_target'"
        )


def by_set(function: Callable[[Any], Tensor], x: Tensor | QTensor) -> Tensor:
    """``function(x)``; of several sets of rows, ``[B, N, F]``, that of each, so that no set shares a scale with
    another."""
    if len(x.shape) == 2:
        return function(x)
    if x.shape[0] == 0:
        return function(float_rows(x).new_zeros(x.shape[1:])).unsqueeze(0)[:0]
    return torch.stack([function(rows) for rows in x.unbind()])


def aggregate(
    graph: Graph,
    x: Tensor | QTensor,
    edge_weight: Tensor | None = None,
    reduce: str = "sum",
    *,
    config: QConfig | None = None,
) -> Tensor:
    """:func:`functional.spmm`, also of several sets of rows on one graph, ``[B, N, F]``, as PyG takes them."""
    return by_set(lambda rows: functional.spmm(graph, rows, edge_weight, reduce, config=config), x)


def initialize_lazy(linear: nn.Module, x: Tensor | QTensor) -> None:
    """Give a weight of unknown input width its shape, as the linear module's own forward would."""
    if isinstance(linear, Linear) and isinstance(linear._parameters.get("weight"), UninitializedParameter):
        linear.initialize_parameters(None, (x.codes if isinstance(x, QTensor) else x,))


def restore_propagate(conv: Any) -> None:
    """Give explainers the ``propagate`` that they need.

    PyG replaces a class's ``propagate`` by a generated one and remembers the class's own for explainers. Once the
    parent class was used, what a subclass inherits, and hence remembers, is the parent's generated one, which ignores
    masks.
    """
    cls = type(conv)
    if cls._jinja_propagate is not cls._orig_propagate:  # equal where a class has a propagate of its own
        cls._orig_propagate = MessagePassing.propagate


def has_custom_messages(conv: MessagePassing, base: type[nn.Module]) -> bool:
    """Whether code is attached to the messages of ``conv``: an explainer, hooks, or a method that is not ``base``'s."""
    if conv.explain or conv.decomposed_layers > 1 or any(getattr(conv, name, None) for name in _MESSAGE_HOOKS):
        return True
    return any(
        name in vars(conv) or getattr(type(conv), name, None) is not getattr(base, name, None)
        for name in _MESSAGE_METHODS
    )


def is_custom(linear: Any) -> bool:
    """Whether a dense layer is another than PyG's plain one, whose weight may be parametrized, or has hooks besides
    PyG's own for lazy weights."""
    if type_before_parametrizations(linear) is not Linear or "forward" in vars(linear):
        return True
    lazy = getattr(linear, "_hook", None)
    own = {lazy.id} if lazy is not None else set()
    hooks = (linear._forward_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    return bool(set(linear._forward_pre_hooks) - own) or any(hooks)
