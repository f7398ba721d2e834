"""The models that are trained: PyG's own, converted where a scheme quantizes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import GAT, GCN, GIN, GCN2Conv, GraphSAGE, global_mean_pool
from torch_geometric.nn.models.basic_gnn import BasicGNN

from qgnn.cli.recipe import Recipe
from qgnn.cli.scheme import Scheme, parse_schedule
from qgnn.config import COMPONENTS
from qgnn.convert import quantize_
from qgnn.qtensor import QTensor

GAT_HEADS = 4
GRAPH_MODELS = ("gcn", "sage", "gat", "gin")

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
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int,
        dropout: float,
        cached: bool = True,
    ) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.first = nn.Linear(in_channels, hidden_channels)
        self.convs = nn.ModuleList(
            GCN2Conv(hidden_channels, alpha=0.1, theta=0.5, layer=layer, cached=cached)
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


class GraphPredictor(nn.Module):
    """Convolutions with batch norms, the mean of the rows of each graph, and a dense layer."""

    def __init__(self, convolutions: BasicGNN, out_channels: int, dropout: float) -> None:
        super().__init__()
        self.convolutions = convolutions
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(convolutions.out_channels, out_channels)

    def forward(self, x: Tensor | QTensor, edge_index: Tensor, batch: Tensor, batch_size: int) -> Tensor:
        """The logits of every graph, or its number."""
        rows = self.convolutions(x, edge_index)
        logits: Tensor = self.last(self.dropout(global_mean_pool(rows, batch, batch_size)))
        return logits


def check_model(name: str, recipe: Recipe, by_graph: bool) -> None:
    """Raise a ``ValueError`` if the model is not made for such data, or cannot have such a size."""
    if by_graph and name not in GRAPH_MODELS:
        raise ValueError(
            f"the model {name} expects a data set with classes of nodes (got one of many graphs); give one of "
            f"{', '.join(GRAPH_MODELS)}"
        )
    if name == "gat" and recipe.hidden % GAT_HEADS:
        raise ValueError(
            f"the model gat expects a hidden width that is a multiple of {GAT_HEADS}, its number of heads (got "
            f"{recipe.hidden})"
        )
    if name == "gcn2" and recipe.layers < 3:
        raise ValueError(
            f"the model gcn2 expects at least 3 layers (got {recipe.layers}), since the first and the last are dense"
        )


def check_scheme(scheme: Scheme, name: str, recipe: Recipe, by_graph: bool) -> None:
    """Raise a ``ValueError`` if the scheme would change nothing in the model, or its schedule is longer than the
    training."""
    if scheme.config is not None:
        if recipe.layers < 2 and not by_graph:
            raise ValueError(
                f"{scheme.name} expects at least 2 layers (got {recipe.layers}), since the last one stays in full "
                "precision"
            )
        named = {component for component in COMPONENTS if scheme.config.format_of(component) is not None}
        if named and not named & (there := components_of(name, recipe, by_graph)):
            raise ValueError(
                f"{scheme.name} expects a component that the model has: of {name} with {recipe.layers} layers, these "
                f"are {', '.join(component for component in COMPONENTS if component in there)}"
            )
    kind, widths = ("", ()) if scheme.schedule is None else parse_schedule(scheme.schedule)
    if kind == "sdq" and len(widths) > recipe.epochs:
        raise ValueError(f"{scheme.name} expects at least {len(widths)} epochs, one a width (got {recipe.epochs})")


def components_of(name: str, recipe: Recipe, by_graph: bool) -> frozenset[str]:
    """The components of :class:`qgnn.QConfig` that occur in the quantized layers of a model."""
    missing = set() if name == "gat" else {"attention"}
    # Where one layer is quantized, it reads features; GIN's has a second product, of activations.
    if name != "gin" and recipe.layers == (1 if by_graph else 2):
        missing.add("activations")
    return frozenset(COMPONENTS) - missing


def make_model(
    name: str,
    in_channels: int,
    out_channels: int,
    recipe: Recipe,
    scheme: Scheme,
    by_graph: bool = False,
    same_edges: bool = True,
) -> nn.Module:
    """A model with random weights, which follow from torch's seed alone.

    Args:
        name: One of ``MODELS`` of the command line; for graphs one of ``GRAPH_MODELS``.
        in_channels: Number of features.
        out_channels: Number of classes, or 1.
        recipe: Sizes and dropout.
        scheme: Its ``config`` converts PyG's model, all layers but, unless ``keep_last`` is false, the last one. What
            converted layers keep for the backward pass follows its compression if they compute in integers; with other
            formats they keep the codes that they computed with.
        by_graph: Whether the model has one result a graph: then ``recipe.layers`` convolutions precede the last layer.
        same_edges: Whether it sees the same edges each time, so that it may remember their normalization.
    """
    sizes = (in_channels, recipe.hidden, recipe.layers)
    if name == "gcn2":
        model: nn.Module = GCN2(*sizes, out_channels, dropout=recipe.dropout, cached=same_edges)
    else:
        cls, options = _BASIC[name]
        if by_graph or not same_edges:  # each split has edges of its own
            options = {name: value for name, value in options.items() if name != "cached"}
        if by_graph:
            convolutions = cls(*sizes, dropout=recipe.dropout, **{**options, "norm": "batch_norm"})
            model = GraphPredictor(convolutions, out_channels, recipe.dropout)
        else:
            model = cls(*sizes, out_channels, dropout=recipe.dropout, **options)
    config, blocks = scheme.config, scheme.compression.blocks
    if config is None:
        return model
    if blocks is not None and config.is_integer:
        config = replace(config, save=blocks)
    return quantize_(model, config, keep_last=scheme.keep_last)


def first_layer(model: nn.Module) -> nn.Module:
    """The layer that reads the features."""
    if isinstance(model, GCN2):
        return model.first
    convolutions = model.convolutions if isinstance(model, GraphPredictor) else model
    assert isinstance(convolutions.convs, nn.ModuleList)
    return convolutions.convs[0]


def parameter_groups(model: nn.Module, weight_decay: float, inner_weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """What an optimizer takes: weights of the first layer decay, and so do, at their own rate, GCN2's convolutions."""
    decays = {id(p): weight_decay for p in first_layer(model).parameters()}
    if isinstance(model, GCN2):
        decays |= {id(p): inner_weight_decay for p in model.convs.parameters()}
    return [
        {"params": [p for p in model.parameters() if decays.get(id(p), 0.0) == decay], "weight_decay": decay}
        for decay in dict.fromkeys((weight_decay, inner_weight_decay, 0.0))
    ]


def train_features(x: Tensor | QTensor, recipe: Recipe) -> Callable[[], Tensor | QTensor]:
    """What gives the features for a step: as they are, or behind a new dropout where the recipe has one.

    A zero is zero with or without dropout, so that random numbers are drawn for other features alone: of bags of words
    for few, which saves most of a step.
    """
    if not recipe.input_dropout or isinstance(x, QTensor):
        return lambda: x
    index = x.flatten().nonzero().view(-1)
    values = x.flatten()[index]

    def draw() -> Tensor:
        result = torch.zeros_like(x, memory_format=torch.contiguous_format)
        result.view(-1)[index] = torch.nn.functional.dropout(values, recipe.dropout)
        return result

    return draw
