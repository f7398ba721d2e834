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


def learned(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Those of the arguments that need a gradient."""
    return tuple(t for t in args if isinstance(t, Tensor) and t.requires_grad)


@dataclass(frozen=True)
class Layer:
    """A layer with some options.

    Args:
        name: Name of PyG's class; ours has a Q in front.
        options: Arguments of the constructor behind the sizes.
        args: What a pass takes behind the edges.
        sizes: Arguments of the constructor that are sizes, for columns in and out.
        build: Makes the arguments of the constructor that are modules, anew for each layer.
        differences: Parameters whose gradients are differences of products as large as other gradients.
        vanishing: Parameters whose gradients are 0 but for rounding, whatever the inputs.
        kinked: Dense layers whose rows go through a kink.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    args: Args = no_args
    sizes: Callable[[int, int], tuple[Any, ...]] = lambda K, M: (K, M)
    build: Callable[[int, int], dict[str, Any]] = lambda K, M: {}
    differences: tuple[str, ...] = ()
    vanishing: tuple[str, ...] = ()
    kinked: tuple[str, ...] = ()

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

    @property
    def cancelling(self) -> tuple[str, ...]:
        """Parameters whose gradients are compared with the largest magnitude of a pass."""
        return self.differences + self.vanishing

    def dynamic(self, arg: Any, rows: Any, edges: Any, num_edges: int) -> dict[int, Any] | None:
        """Dimensions of an argument behind the edges that an exported layer leaves open."""
        if not isinstance(arg, Tensor):
            return None
        return {0: edges if arg.shape[0] == num_edges else rows}


def attention(name: str, options: Mapping[str, Any], args: Args = no_args) -> Layer:
    """A layer whose weights are a softmax.

    Its gradient is ``p (t - D)``, with ``D`` the mean of ``t`` over the edges of a target: 0 where there is one edge,
    and a difference of rounded numbers. What is in scores alone has no other. The key's bias adds the same to all
    scores of a target, which a softmax does not see. GATv2 takes the LeakyReLU of each element of a row.
    """
    scores = {
        "GATConv": ("att_src", "att_dst", "att_edge", "lin_edge.weight", "lin_dst.weight"),
        "GATv2Conv": ("att", "lin_r.weight", "lin_r.bias", "lin_edge.weight"),
        "TransformerConv": ("lin_key.weight", "lin_query.weight", "lin_query.bias"),
    }
    return Layer(
        name,
        options,
        args,
        differences=scores[name],
        vanishing=("lin_key.bias",) if name == "TransformerConv" else (),
        kinked=("lin_l", "lin_r") if name == "GATv2Conv" else (),
    )


LAYERS: dict[str, Layer] = {
    "gcn": Layer("GCNConv"),
    "gcn/weighted": Layer("GCNConv", args=edge_weight),
    "gcn/no_normalize": Layer("GCNConv", {"normalize": False, "bias": False}),
    "gcn/reversed": Layer("GCNConv", {"flow": "target_to_source"}),
    "gat": attention("GATConv", {"heads": 4, "residual": True}),
    "gat/mean_of_heads": attention(
        "GATConv", {"heads": 4, "concat": False, "bias": False, "add_self_loops": False, "negative_slope": 0.1}
    ),
    "gat/edges": attention("GATConv", {"heads": 2, "edge_dim": EDGE_DIM, "fill_value": "max"}, edge_attr),
    "gat/reversed": attention("GATConv", {"flow": "target_to_source", "edge_dim": EDGE_DIM}, edge_attr),
    "gatv2": attention("GATv2Conv", {}),
    "gatv2/mean_of_heads": attention(
        "GATv2Conv", {"heads": 4, "concat": False, "residual": True, "bias": False, "add_self_loops": False}
    ),
    "gatv2/edges": attention("GATv2Conv", {"heads": 2, "edge_dim": EDGE_DIM, "share_weights": True}, edge_attr),
    "transformer": attention("TransformerConv", {"heads": 4}),
    "transformer/no_root": attention("TransformerConv", {"root_weight": False, "bias": False}),
    "transformer/edges": attention(
        "TransformerConv", {"heads": 2, "concat": False, "beta": True, "edge_dim": EDGE_DIM}, edge_attr
    ),
}


@cache  # PyG renders and compiles a template for each new layer
def exact_pair(name: str) -> tuple[nn.Module, nn.Module]:
    """PyG's layer and ours in full precision. Shared: tests leave the parameters alone."""
    torch.manual_seed(1)
    return LAYERS[name].pair(None)
