"""What ``qgnn train`` learns, for suites: real data sets with their recipes, and what models say before training."""

import argparse
import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import qgnn
from qgnn.cli.model import make_model
from qgnn.cli.recipe import GIVEN, Recipe, num_edges_of, recipe_for
from qgnn.cli.scheme import FULL_PRECISION, Scheme
from qgnn.cli.task import NodeTask, Task, make_task
from qgnn.data.datasets import GRAPH_ENTRIES, key

from . import pyg_models
from .inputs import Setting, adjacency_int64, from_root, graph, graph_name

QUICK_EPOCHS = 3
FP32 = Scheme.from_parts(FULL_PRECISION[0])


def name_of(dataset: str, setting: Setting) -> str:
    """How a case's name begins; a synthetic graph stands for the data set where it has to be quick."""
    return graph_name("arxiv", setting) if setting.quick else dataset


def is_of_graphs(dataset: str) -> bool:
    """Whether it is a set of graphs with a label each."""
    return key(dataset) in GRAPH_ENTRIES


@lru_cache(maxsize=1)
def _data(dataset: str, setting: Setting) -> Any:
    if setting.quick:
        return graph("arxiv", setting)
    return (qgnn.data.load_graphs if is_of_graphs(dataset) else pyg_models.read)(dataset, setting.root)


@lru_cache(maxsize=1)
def load(dataset: str, model: str, setting: Setting) -> tuple[Task, Recipe]:
    """The task and the usual recipe of the model on it.

    Raises:
        UnavailableError: If the files of the data set are not there.
    """
    with from_root():
        data = _data(dataset, setting)
    recipe = recipe_for(argparse.Namespace(dataset=dataset, model=model, **dict.fromkeys(GIVEN)), num_edges_of(data))
    if setting.quick:
        recipe = replace(recipe, epochs=QUICK_EPOCHS)
    return make_task(data, setting.device, recipe.normalize), recipe


def by_matrix(task: NodeTask, dtype: torch.dtype) -> NodeTask:
    """The same with edges as a CSR matrix, with which PyG's layers sum rows of neighbors without a message an edge; as
    it is with parallel edges, over which a matrix has no mean."""
    edge_index = task.data.edge_index
    ones = torch.ones(edge_index.shape[1], dtype=dtype, device=edge_index.device)
    matrix = adjacency_int64(edge_index, ones, len(task.data.x))
    if matrix.values().shape != ones.shape:
        return task
    found = copy.copy(task)
    found.data = copy.copy(task.data)
    found.data.edge_index = matrix
    return found


def untrained(
    task: Task,
    recipe: Recipe,
    scheme: Scheme,
    model_name: str,
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Sequence[Tensor]:
    """The result of the first weights, rounded to nearest."""
    x, outputs = task.features[0].to(dtype), []
    torch.manual_seed(seed)
    model = make_model(model_name, x.shape[1], task.num_outputs, recipe, scheme, task.by_graph)
    model.to(device, dtype).eval()

    def forward(*arguments: Any) -> Tensor:
        with scheme.autocast(device):
            outputs.append(model(*arguments))
        return outputs[-1]

    with torch.no_grad():
        task.with_own_edges().loss(forward, x)
    return outputs
