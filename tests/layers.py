"""Every layer with every option that changes what it computes, for the tests that hold for all of them.

``LAYERS[name]`` says how to build PyG's layer and ours, and what a pass takes besides features and edges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg

from qgnn import QConfig
from qgnn import nn as qnn

K, M = 7, 12  # columns in and out
EDGE_DIM = 3
NUM_RELATIONS = 4

# What a pass takes behind the edges: (edge_index, num_nodes) -> arguments, those that need a gradient included.
Args = Callable[[Tensor, int], tuple[Any, ...]]


def no_args(edge_index: Tensor, num_nodes: int) -> tuple[Any, ...]:
    return ()


def edge_weight(edge_index: Tensor, num_nodes: int) -> tuple[Any, ...]:
    """Positive weights that need a gradient."""
    return ((torch.rand(edge_index.shape[1]) + 0.1).requires_grad_(),)


def edge_attr(edge_index: Tensor, num_nodes: int) -> tuple[Any, ...]:
    """Features of edges that need a gradient."""
    return (torch.randn(edge_index.shape[1], EDGE_DIM).requires_grad_(),)


def edge_type(edge_index: Tensor, num_nodes: int) -> tuple[Any, ...]:
    """Relations of edges, one of them without any."""
    return (torch.randint(NUM_RELATIONS - 1, edge_index.shape[1:]),)


def initial_features(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A hook that gives GCNII's layer its initial features in front of the edges."""
    return (args[0], args[0].flip(0), *args[1:])


def learned(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Those of the arguments that need a gradient."""
    return tuple(t for t in args if isinstance(t, Tensor) and t.requires_grad)


def constant_weight(edge_index: Tensor, num_nodes: int) -> tuple[Any, ...]:
    """Positive weights, a column of them."""
    return (torch.rand(edge_index.shape[1], 1) + 0.1,)


def mlp(K: int, M: int) -> dict[str, Any]:
    """Two dense layers, smooth in between: a ReLU there would flip with the rounding in front of it."""
    return {"nn": nn.Sequential(nn.Linear(K, M), nn.Tanh(), nn.Linear(M, M))}


@dataclass(frozen=True)
class Layer:
    """A layer with some options.

    Args:
        name: Name of PyG's class; ours has a Q in front.
        options: Arguments of the constructor behind the sizes.
        args: What a pass takes behind the edges.
        sizes: Arguments of the constructor that are sizes, for columns in and out.
        build: Makes the arguments of the constructor that are modules, anew for each layer.
        hook: What turns features, edges and further arguments of a pass into the layer's own, where these differ.
        fails_on: Graphs on which PyG's layer raises an error; ours is held to be finite there.
        switched: Gradients behind a choice made from rounded values: the term of a maximum, the sign of a ReLU.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    args: Args = no_args
    sizes: Callable[[int, int], tuple[Any, ...]] = lambda K, M: (K, M)
    build: Callable[[int, int], dict[str, Any]] = lambda K, M: {}
    hook: Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]] | None = None
    fails_on: tuple[str, ...] = ()
    switched: tuple[str, ...] = ()

    def theirs(self, K: int = K, M: int = M) -> nn.Module:
        layer = self._hooked(getattr(pyg, self.name)(*self.sizes(K, M), **self.build(K, M), **self.options))
        for name, parameter in layer.named_parameters():
            if "bias" in name or name == "eps":
                nn.init.normal_(parameter)  # PyG starts them at 0, which hides mistakes
        return layer

    def ours(self, config: QConfig | None, K: int = K, M: int = M) -> nn.Module:
        cls = getattr(qnn, f"Q{self.name}")
        return self._hooked(cls(*self.sizes(K, M), **self.build(K, M), **self.options, config=config))

    def _hooked(self, layer: nn.Module) -> nn.Module:
        if self.hook is not None:
            layer.register_forward_pre_hook(self.hook)
        return layer

    def pair(self, config: QConfig | None, K: int = K, M: int = M) -> tuple[nn.Module, nn.Module]:
        """PyG's layer and ours with equal parameters."""
        theirs, ours = self.theirs(K, M), self.ours(config, K, M)
        ours.load_state_dict(theirs.state_dict())
        return theirs, ours

    def dynamic(self, arg: Any, rows: Any, edges: Any, num_edges: int) -> dict[int, Any] | None:
        """Dimensions of an argument behind the edges that an exported layer leaves open."""
        if not isinstance(arg, Tensor):
            return None
        return {0: edges if arg.shape[0] == num_edges else rows}


def gcn2(args: Args = no_args, **options: Any) -> Layer:
    """A layer with as many columns out as in."""
    return Layer("GCN2Conv", {"alpha": 0.3, **options}, args, lambda K, M: (K,), hook=initial_features)


def appnp(args: Args = no_args, **options: Any) -> Layer:
    """A layer without sizes."""
    return Layer("APPNP", {"K": 2, "alpha": 0.2, **options}, args, lambda K, M: ())


def rgcn(**options: Any) -> Layer:
    return Layer("RGCNConv", options, edge_type, lambda K, M: (K, M, NUM_RELATIONS))


def largest_eigenvalue(edge_index: Tensor, num_nodes: int) -> tuple[Any, ...]:
    """No weights, no batch, and a number."""
    return None, None, 9.0


LAYERS: dict[str, Layer] = {
    "gcn": Layer("GCNConv"),
    "gcn/weighted": Layer("GCNConv", args=edge_weight),
    "gcn/no_normalize": Layer("GCNConv", {"normalize": False, "bias": False}),
    "gcn/reversed": Layer("GCNConv", {"flow": "target_to_source"}),
    "gcn2": gcn2(theta=0.5, layer=1),
    "gcn2/weighted": gcn2(edge_weight, theta=0.5, layer=2, shared_weights=False),
    "gcn2/no_normalize": gcn2(normalize=False),
    "sg": Layer("SGConv", {"K": 2}),
    "sg/weighted": Layer("SGConv", {"add_self_loops": False, "bias": False}, edge_weight),
    "appnp": appnp(),
    "appnp/weighted": appnp(edge_weight, add_self_loops=False),
    "appnp/no_normalize": appnp(normalize=False),
    "cheb": Layer("ChebConv", {"K": 3}, fails_on=("no_nodes",)),
    "cheb/weighted": Layer("ChebConv", {"K": 2, "normalization": "rw"}, edge_weight, fails_on=("no_nodes",)),
    "cheb/scaled": Layer("ChebConv", {"K": 2, "normalization": None, "bias": False}, largest_eigenvalue),
    "rgcn": rgcn(),
    "rgcn/bases": rgcn(num_bases=2, aggr="add"),
    "rgcn/max": rgcn(aggr="max", root_weight=False, bias=False),
    "sage": Layer("SAGEConv"),
    "sage/narrow": Layer("SAGEConv", sizes=lambda K, M: (K, M // 3)),  # the product comes first
    "sage/wide": Layer("SAGEConv", sizes=lambda K, M: (K, 2 * K)),  # the aggregation comes first
    "sage/sum": Layer("SAGEConv", {"aggr": "sum"}),
    "sage/max": Layer("SAGEConv", {"aggr": "max"}, switched=("dx",)),
    "sage/min": Layer("SAGEConv", {"aggr": "min", "root_weight": False}, switched=("dx",)),
    "sage/normalize": Layer("SAGEConv", {"normalize": True}),
    "sage/project": Layer("SAGEConv", {"project": True}, switched=("dx", "dlin.weight", "dlin.bias")),
    "sage/no_root": Layer("SAGEConv", {"root_weight": False}),
    "sage/no_bias": Layer("SAGEConv", {"bias": False}),
    "sage/reversed": Layer("SAGEConv", {"flow": "target_to_source"}),
    "graph": Layer("GraphConv"),
    "graph/weighted": Layer("GraphConv", args=edge_weight),
    "graph/wide": Layer("GraphConv", {"bias": False}, args=edge_weight, sizes=lambda K, M: (K, 2 * K)),
    "graph/mean": Layer("GraphConv", {"aggr": "mean"}, args=constant_weight),
    "graph/max": Layer("GraphConv", {"aggr": "max"}, args=edge_weight, switched=("dx", "dextra0")),
    "gin": Layer("GINConv", {"eps": 0.5}, sizes=lambda K, M: (), build=mlp),
    "gin/train_eps": Layer("GINConv", {"train_eps": True, "aggr": "mean"}, sizes=lambda K, M: (), build=mlp),
    "gine": Layer(
        "GINEConv",
        {"train_eps": True, "edge_dim": EDGE_DIM},
        edge_attr,
        sizes=lambda K, M: (),
        build=mlp,
        switched=("dx", "dlin.weight", "dlin.bias", "dextra0"),
    ),
}


@cache  # PyG renders and compiles a template for each new layer
def exact_pair(name: str) -> tuple[nn.Module, nn.Module]:
    """PyG's layer and ours in full precision. Shared: tests leave the parameters alone."""
    torch.manual_seed(1)
    return LAYERS[name].pair(None)
