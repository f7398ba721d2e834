"""How each data set is trained unless the command line says otherwise."""

import argparse
from dataclasses import dataclass, replace

from torch_geometric.data import Data

from qgnn.data import GraphSet
from qgnn.data.datasets import ENTRIES, key, metric_of

# What a command line or a sweep may give in place of a recipe's own.
GIVEN = ("hidden", "layers", "dropout", "lr", "weight_decay", "epochs")


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of one run.

    Args:
        hidden: Width of the hidden layers.
        layers: Number of layers.
        dropout: Dropout between layers.
        lr: Learning rate of Adam.
        weight_decay: Weight decay of the first layer.
        inner_weight_decay: Weight decay of GCN2's convolutions; all other layers have none.
        epochs: Number of full-batch steps.
        eval_every: Epochs between two evaluations, each of which costs another forward pass.
        normalize: Scale each row of the features to sum to one.
        input_dropout: Whether dropout also applies to the input features.
    """

    hidden: int = 64
    layers: int = 2
    dropout: float = 0.5
    lr: float = 0.01
    weight_decay: float = 5e-4
    inner_weight_decay: float = 0.0
    epochs: int = 200
    eval_every: int = 1
    normalize: bool = False
    input_dropout: bool = False


# As in Kipf and Welling, https://arxiv.org/abs/1609.02907.
PLANETOID = Recipe(hidden=16, normalize=True, input_dropout=True)

# Width, dropout and decay of Chen et al. for Cora, https://arxiv.org/abs/2007.02133, whose models are deeper.
PLANETOID_GCN2 = replace(PLANETOID, hidden=64, dropout=0.6, inner_weight_decay=0.01)

# A high rate and little dropout: 20 epochs bring most of the accuracy of 200 gentle ones, in two minutes on two cores.
WORDNET = Recipe(hidden=48, dropout=0.2, lr=0.2, weight_decay=0.0, epochs=20, eval_every=10)

# Graphs of some dozens of nodes, all of a split in one step.
GRAPHS = Recipe(hidden=32, layers=3, dropout=0.2, weight_decay=0.0, epochs=100)

# Numbers are learned more slowly than classes.
MOLECULES = replace(GRAPHS, epochs=300)

# Convolutions between two dense layers, made to be many.
GCN2_LAYERS = 8

# Graphs on which evaluating after each epoch would cost as much as training.
LARGE_NUM_EDGES = 1_000_000
LARGE = Recipe(hidden=256, weight_decay=0.0, eval_every=5)


def recipe_for(options: argparse.Namespace, num_edges: int | None) -> Recipe:
    """The recipe of the data set of such a size, with what the command line gives in its place."""
    recipe = usual_recipe(options.dataset, options.model, num_edges)
    given = {field: getattr(options, field) for field in GIVEN if getattr(options, field) is not None}
    return replace(recipe, **given)


def num_edges_of(data: Data | GraphSet) -> int | None:
    """The size by which recipes differ: the number of edges, or ``None`` of a set of graphs."""
    return None if isinstance(data, GraphSet) else int(data.num_edges)


def usual_recipe(dataset: str, model: str, num_edges: int | None = 0) -> Recipe:
    """The recipe of a data set, with nothing in its place.

    Args:
        dataset: Its name.
        model: Name of the model.
        num_edges: How large it is, on which neither layers nor epochs depend; ``None`` for a set of graphs.
    """
    name = key(dataset)
    if name == "wordnet":
        recipe = WORDNET
    elif name in ENTRIES and ENTRIES[name].cls == "Planetoid":
        recipe = PLANETOID_GCN2 if model == "gcn2" else PLANETOID
    elif num_edges is None:
        recipe = MOLECULES if metric_of(name) == "rmse" else GRAPHS
    elif num_edges >= LARGE_NUM_EDGES:
        recipe = LARGE
    else:
        recipe = Recipe()
    return replace(recipe, layers=GCN2_LAYERS) if model == "gcn2" else recipe
