"""The models that are trained: PyG's own, converted for an integer precision."""

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import GAT, GCN, GIN, GCN2Conv, GraphSAGE
from torch_geometric.nn.models.basic_gnn import BasicGNN

from qgnn.cli.compression import NO_COMPRESSION, Compression
from qgnn.cli.precision import Precision
from qgnn.cli.recipe import Recipe
from qgnn.config import QConfig
from qgnn.convert import quantize_
from qgnn.qtensor import QTensor

GAT_HEADS = 4

# Sums of many neighbors grow from layer to layer, which GIN leaves to a normalization.
_BASIC: dict[str, tuple[type[BasicGNN], dict[str, Any]]] = {
    "gcn": (GCN, {"cached": True}),
    "sage": (GraphSAGE, {}),
    "gat": (GAT, {"heads": GAT_HEADS}),
    "gin": (GIN, {"norm": "batch_norm"}),
}


class GCN2(nn.Module):
    """The deep model of `"Simple and Deep Graph Convolutional Networks" <https://arxiv.org/abs/2007.02133>`_: a dense
    layer, convolutions that each see its rows too, and a dense layer."""

    def __init__(
        self, in_channels: int, hidden_channels: int, num_layers: int, out_channels: int, dropout: float
    ) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.first = nn.Linear(in_channels, hidden_channels)
        self.convs = nn.ModuleList(
            GCN2Conv(hidden_channels, alpha=0.1, theta=0.5, layer=layer, cached=True)
            for layer in range(1, num_layers - 1)
        )
        self.last = nn.Linear(hidden_channels, out_channels)  # behind the others: quantize_ keeps what comes last

    def forward(self, x: Tensor | QTensor, edge_index: Tensor) -> Tensor:
        """The logits of every node."""
        out = initial = self.first(x).relu()
        for conv in self.convs:
            out = conv(self.dropout(out), initial, edge_index).relu()
        logits: Tensor = self.last(self.dropout(out))
        return logits


def make_model(
    name: str,
    in_channels: int,
    out_channels: int,
    recipe: Recipe,
    precision: Precision,
    compression: Compression = NO_COMPRESSION,
) -> nn.Module:
    """A model with random weights, which follow from torch's seed alone.

    Args:
        name: One of ``MODELS`` of the command line.
        in_channels: Number of features.
        out_channels: Number of classes.
        recipe: Sizes and dropout.
        precision: ``fp32`` and ``bf16`` take PyG's model as it is; an integer precision converts it, all layers but the
            last, whose outputs are the logits.
        compression: What converted layers keep for the backward pass in place of int8 codes.
    """
    sizes = (in_channels, recipe.hidden, recipe.layers, out_channels)
    if name == "gcn2":
        model: nn.Module = GCN2(*sizes, dropout=recipe.dropout)
    else:
        cls, options = _BASIC[name]
        model = cls(*sizes, dropout=recipe.dropout, **options)
    if precision.bits is None:
        return model
    return quantize_(model, QConfig(bits=precision.bits, save=compression.blocks or "int8"))


def first_layer(model: nn.Module) -> nn.Module:
    """The layer that reads the features."""
    if isinstance(model, GCN2):
        return model.first
    assert isinstance(model.convs, nn.ModuleList)
    return model.convs[0]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """What an optimizer takes: the weights of the first layer decay."""
    first = list(first_layer(model).parameters())
    others = [p for p in model.parameters() if all(p is not of_first for of_first in first)]
    return [{"params": first, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def dropped(x: Tensor | QTensor, recipe: Recipe, training: bool) -> Tensor | QTensor:
    """The features behind the dropout of the input, where the recipe has one."""
    if not recipe.input_dropout or isinstance(x, QTensor):
        return x
    return torch.nn.functional.dropout(x, recipe.dropout, training)
