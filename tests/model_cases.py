"""Models as PyG's users write them, for the tests of conversion: how to build one, and a pass over a small graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg

from graphs import GRAPHS

EDGES, N = GRAPHS["random"]
K, HIDDEN, CLASSES = 7, 16, 4

RELATIONS = [("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "by", "author")]
METADATA = (["paper", "author"], RELATIONS)


@dataclass(frozen=True)
class Case:
    """A model, what :func:`qgnn.quantize_` makes of it by default, and how it is called.

    Args:
        build: Makes the model, in PyG's layers.
        converted: Names of layers in int8.
        kept: Names of layers in full precision.
        left: What is left alone: a part of the reason by name.
        fused: What some layers apply to their results, by name; all others nothing.
        run: Calls the model: node features ``[N, K]`` -> ``[N, classes]``.
    """

    build: Callable[[], nn.Module]
    converted: list[str]
    kept: list[str]
    left: dict[str, str] = field(default_factory=dict)
    fused: dict[str, str] = field(default_factory=dict)
    run: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x, EDGES)


def basic(cls: type[nn.Module], **options: Any) -> Callable[[], nn.Module]:
    """One of PyG's BasicGNN models with three layers."""
    return lambda: cls(K, HIDDEN, 3, CLASSES, dropout=0.5, **options)


def hetero_inputs(x: Tensor) -> tuple[dict[str, Tensor], dict[tuple[str, str, str], Tensor]]:
    """Papers are the nodes, and every fifth of them an author."""
    author = torch.arange(N).div(5, rounding_mode="floor")
    writes = torch.stack([author, torch.arange(N)])
    x_dict = {"paper": x, "author": x[::5]}
    return x_dict, dict(zip(RELATIONS, (EDGES, writes, writes.flip(0)), strict=True))


def run_hetero(model: nn.Module, x: Tensor) -> Tensor:
    return model(*hetero_inputs(x))["paper"]


class Hetero(nn.Module):
    """Convolutions of each kind of edge, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.HeteroConv({kind: pyg.SAGEConv((K, K), HIDDEN) for kind in RELATIONS})
        self.lin = pyg.Linear(HIDDEN, CLASSES)

    def forward(self, x: dict[str, Tensor], edges: dict[Any, Tensor]) -> dict[str, Tensor]:
        return {kind: self.lin(rows.relu()) for kind, rows in self.conv(x, edges).items()}


class DeeperGCN(nn.Module):
    """As PyG's example of DeeperGCN."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(K, HIDDEN)
        blocks = [pyg.GENConv(HIDDEN, HIDDEN, norm="layer") for _ in range(2)]
        norms = [nn.LayerNorm(HIDDEN) for _ in range(2)]
        self.layers = nn.ModuleList(
            pyg.DeepGCNLayer(conv, norm, nn.ReLU(), dropout=0.1, ckpt_grad=True)
            for conv, norm in zip(blocks, norms, strict=True)
        )
        self.lin = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.encoder(x)
        for layer in self.layers:
            x = layer(x, edge_index)
        return self.lin(x)


def pyg_sequential() -> nn.Module:
    """PyG's own example of a Sequential, jumping knowledge included."""
    return pyg.Sequential(
        "x, edge_index",
        [
            (nn.Dropout(0.5), "x -> x"),
            (pyg.GCNConv(K, HIDDEN), "x, edge_index -> x1"),
            nn.ReLU(inplace=True),
            (pyg.GATConv(HIDDEN, HIDDEN), "x1, edge_index -> x2"),
            nn.ELU(alpha=0.5),
            nn.Dropout(0.3),
            (lambda x1, x2: [x1, x2], "x1, x2 -> xs"),
            (pyg.JumpingKnowledge("cat", HIDDEN, num_layers=2), "xs -> x"),
            nn.Linear(2 * HIDDEN, CLASSES),
        ],
    )


CONVS = ["convs.0", "convs.1", "convs.2"]
RELU = {"convs.0": "relu, dropout 0.5", "convs.1": "relu, dropout 0.5"}
NORM, NONE = "normalization is cheap and needs full precision", "no quantized counterpart"
PNA = {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.tensor([1, 2, 3])}


def inner(convs: list[str], *parts: str) -> list[str]:
    return [f"{conv}.{part}" for conv in convs for part in parts]


LINS = ("nn.lins.0", "nn.lins.1")

MODELS: dict[str, Case] = {
    "gcn": Case(basic(pyg.GCN), CONVS[:2], CONVS[2:], fused=RELU),
    "gcn/batch_norm": Case(
        basic(pyg.GCN, norm="batch_norm"), CONVS[:2], CONVS[2:], {"norms.0.module": NORM, "norms.1.module": NORM}
    ),
    "gcn/act_first": Case(
        basic(pyg.GCN, norm="layer_norm", act_first=True),
        CONVS[:2],
        CONVS[2:],
        {"norms.0": NORM, "norms.1": NORM},
        {"convs.0": "relu", "convs.1": "relu"},
    ),
    "gcn/cat": Case(
        basic(pyg.GCN, jk="cat", act="leaky_relu", act_kwargs={"negative_slope": 0.3}),
        CONVS,
        ["lin"],
        fused=dict.fromkeys(CONVS, "leaky_relu, dropout 0.5"),
    ),
    "sage/lstm": Case(
        basic(pyg.GraphSAGE, jk="lstm"),
        [*CONVS, "jk.att"],
        ["lin"],
        {"jk.lstm": f"LSTM: {NONE}"},
        dict.fromkeys(CONVS, "relu, dropout 0.5"),
    ),
    "sage/no_act": Case(basic(pyg.GraphSAGE, act=None), CONVS[:2], CONVS[2:]),
    "gat/max": Case(
        basic(pyg.GAT, heads=2, jk="max", act="elu"), CONVS, ["lin"], fused=dict.fromkeys(CONVS, "elu, dropout 0.5")
    ),
    "gatv2": Case(basic(pyg.GAT, heads=2, v2=True), CONVS[:2], CONVS[2:], fused=RELU),
    "gin": Case(
        basic(pyg.GIN),
        ["convs.0", *inner(["convs.0"], *LINS), "convs.1", *inner(["convs.1"], *LINS)],
        ["convs.2", *inner(["convs.2"], *LINS)],
        fused={**RELU, **dict.fromkeys(inner(CONVS, "nn.lins.0"), "relu")},
    ),
    "pna": Case(
        basic(pyg.PNA, **PNA),
        inner(CONVS[:2], "pre_nns.0.0", "post_nns.0.0", "lin"),
        inner(CONVS[2:], "pre_nns.0.0", "post_nns.0.0", "lin"),
        dict.fromkeys(CONVS, f"PNAConv: {NONE}"),
    ),
    "edge_cnn": Case(
        basic(pyg.EdgeCNN),
        inner(CONVS[:2], *LINS),
        inner(CONVS[2:], *LINS),
        dict.fromkeys(CONVS, f"EdgeConv: {NONE}"),
        dict.fromkeys(inner(CONVS, "nn.lins.0"), "relu"),
    ),
    "deeper_gcn": Case(
        DeeperGCN,
        ["encoder", *inner(["layers.0.conv", "layers.1.conv"], "mlp.0", "mlp.4")],
        ["lin"],
        {
            **dict.fromkeys(inner(["layers.0", "layers.1"], "conv"), f"GENConv: {NONE}"),
            **dict.fromkeys(inner(["layers.0", "layers.1"], "conv.mlp.1", "norm"), NORM),
        },
    ),
    "sequential": Case(
        pyg_sequential,
        ["module_1", "module_3"],
        ["module_8"],
        fused={"module_1": "relu", "module_3": "elu, dropout 0.3"},
    ),
    "mlp": Case(
        lambda: pyg.MLP([K, HIDDEN, HIDDEN, CLASSES], dropout=0.5, norm=None),
        ["lins.0", "lins.1"],
        ["lins.2"],
        fused={"lins.0": "relu", "lins.1": "relu"},
        run=lambda model, x: model(x),
    ),
    "hetero_conv": Case(Hetero, [f"conv.convs.<{'___'.join(kind)}>" for kind in RELATIONS], ["lin"], run=run_hetero),
    "to_hetero": Case(
        lambda: pyg.to_hetero(pyg.GraphSAGE((K, K), HIDDEN, 2, CLASSES, act="elu", dropout=0.5), METADATA),
        [f"convs.0.{'__'.join(kind)}" for kind in RELATIONS],
        [f"convs.1.{'__'.join(kind)}" for kind in RELATIONS],
        run=run_hetero,
    ),
}
