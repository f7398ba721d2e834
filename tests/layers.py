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
        switched: Gradients behind a choice made from rounded values: the term of a maximum, the sign of a ReLU.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    args: Args = no_args
    sizes: Callable[[int, int], tuple[Any, ...]] = lambda K, M: (K, M)
    build: Callable[[int, int], dict[str, Any]] = lambda K, M: {}
    switched: tuple[str, ...] = ()

    def theirs(self, K: int = K, M: int = M) -> nn.Module:
        layer = getattr(pyg, self.name)(*self.sizes(K, M), **self.build(K, M), **self.options)
        for name, parameter in layer.named_parameters():
            if "bias" in name or name == "eps":
                nn.init.normal_(parameter)  # PyG starts them at 0, which hides mistakes
        return layer

    def ours(self, config: QConfig | None, K: int = K, M: int = M) -> nn.Module:
        cls = getattr(qnn, f"Q{self.name}")
        return cls(*self.sizes(K, M), **self.build(K, M), **self.options, config=config)

    def pair(self, config: QConfig | None, K: int = K, M: int = M) -> tuple[nn.Module, nn.Module]:
        """PyG's layer and ours with equal parameters."""
        theirs, ours = self.theirs(K, M), self.ours(config, K, M)
        ours.load_state_dict(theirs.state_dict())
        return theirs, ours


LAYERS: dict[str, Layer] = {
    "gcn": Layer("GCNConv"),
    "gcn/weighted": Layer("GCNConv", args=edge_weight),
    "gcn/no_normalize": Layer("GCNConv", {"normalize": False, "bias": False}),
    "gcn/reversed": Layer("GCNConv", {"flow": "target_to_source"}),
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
