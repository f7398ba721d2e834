"""What is learned, and from which graphs: the classes of nodes, or those or a number of whole graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import NormalizeFeatures

from qgnn.cli.metric import METRICS, Metric
from qgnn.cli.model import train_features
from qgnn.cli.recipe import Recipe
from qgnn.data import GraphSet
from qgnn.qtensor import QTensor

Features = Tensor | QTensor
Forward = Callable[..., Tensor]  # the model, in what its scheme runs a forward pass in


class Step(NamedTuple):
    """A step of training.

    Args:
        features: What the first layer reads, without dropout.
        loss: The training loss of a model, as :func:`loss_of` has it.
        size: The number of nodes or graphs whose mean it is; 0 for a step without any of its own.
        share: The factor with which the mean of this loss over all processes is that of all their nodes.
    """

    features: Features
    loss: Callable[[Forward], Tensor]
    size: int
    share: float = 1.0


class Task(Protocol):
    """What a run needs to know of its data."""

    description: str  # how much there is of it
    by_graph: bool  # whether a model has one result a graph, not one a node
    same_edges: bool  # whether a model sees the same edges each time, and may remember what it makes of them
    num_outputs: int
    metric: Metric  # by which models are compared

    @property
    def features(self) -> tuple[Tensor, ...]:
        """The features of each part that a model sees on its own, that for training first."""

    def with_own_edges(self) -> Task:
        """The same on copies of the edges: what a run prepares from its edges lives as long as these."""

    def loss(self, forward: Forward, x: Features) -> Tensor:
        """Training loss, as :func:`loss_of` has it.

        Args:
            forward: The model.
            x: The first of the features, or what stands for them.
        """

    def steps(self, x: Features, recipe: Recipe, seed: int) -> Callable[[int], Iterator[Step]]:
        """What gives the steps of an epoch, by its number.

        Args:
            x: The first of the features, or what stands for them.
            recipe: Whether and how features are dropped.
            seed: Of the order of nodes or graphs.
        """

    def evaluate(self, forward: Forward, inputs: Sequence[Features]) -> tuple[float, float]:
        """The :attr:`metric` of what is there to validate and to test.

        Args:
            forward: The model.
            inputs: The features, or what stands for them.
        """


class NodeTask:
    """Classes of the nodes of one graph, of which each split sees some.

    Args:
        data: The graph, with ``x``, ``edge_index``, ``y``, the three masks, and ``metric`` if it is not accuracy, or
            micro-F1 of several labels a node.
    """

    by_graph, same_edges = False, True

    def __init__(self, data: Data) -> None:
        self.data = data
        self.num_outputs = data.y.shape[1] if data.y.dim() == 2 else int(data.y.max()) + 1
        self.metric = METRICS[data.metric if "metric" in data else "micro_f1" if data.y.dim() == 2 else "accuracy"]
        self.description = f"{data.num_nodes:,} nodes, {data.num_edges:,} directed edges, {data.x.shape[1]} features"

    @property
    def features(self) -> tuple[Tensor, ...]:
        """Those of the graph."""
        return (self.data.x,)

    def with_own_edges(self) -> NodeTask:
        """The same on a copy of the edges."""
        result = copy.copy(self)
        result.data = _with_own_edges(self.data)
        return result

    def loss(self, forward: Forward, x: Features) -> Tensor:
        """Of the nodes to train on."""
        data = self.data
        return loss_of(forward(x, data.edge_index)[data.train_mask], data.y[data.train_mask])

    def steps(self, x: Features, recipe: Recipe, seed: int) -> Callable[[int], Iterator[Step]]:
        """One over the graph."""
        return _single_step(self, x, recipe)

    def evaluate(self, forward: Forward, inputs: Sequence[Features]) -> tuple[float, float]:
        """From one forward pass over the graph."""
        return self.scores(forward(inputs[0], self.data.edge_index))

    def scores(self, out: Tensor) -> tuple[float, float]:
        """Of results for all nodes."""
        masks = self.data.val_mask, self.data.test_mask
        val, test = (self.metric.of(out[mask], self.data.y[mask]) for mask in masks)
        return val, test


class GraphTask:
    """Classes of graphs, or a number that each has. The graphs of a split are one of many components, so that a step
    is one over all of them.

    Numbers are learned in units of their deviation from their mean, both of the graphs to train on; scores are in the
    data set's own unit.

    Args:
        graphs: The graphs and their split.
        device: Where to keep them.
    """

    by_graph, same_edges = True, False

    def __init__(self, graphs: GraphSet, device: torch.device) -> None:
        self.parts = tuple(Batch.from_data_list(graphs.graphs(split)).to(device) for split in ("train", "val", "test"))
        self.metric, self.unit = METRICS[graphs.metric], 1.0
        if (y := self.parts[0].y).is_floating_point():
            self.num_outputs, mean = 1, float(y.mean())
            self.unit = float(y.std(correction=0)) or 1.0
            for part in self.parts:
                part.y = (part.y - mean) / self.unit
        else:
            self.num_outputs = graphs.dataset.num_classes
        nodes, edges = (sum(getattr(part, f"num_{what}") for part in self.parts) for what in ("nodes", "edges"))
        self.description = (
            f"{len(graphs.dataset):,} graphs, {nodes:,} nodes, {edges:,} directed edges, "
            f"{self.parts[0].x.shape[1]} features"
        )

    @property
    def features(self) -> tuple[Tensor, ...]:
        """Those of the graphs to train, validate and test on."""
        return tuple(part.x for part in self.parts)

    def with_own_edges(self) -> GraphTask:
        """The same on copies of the edges."""
        result = copy.copy(self)
        result.parts = tuple(_with_own_edges(part) for part in self.parts)
        return result

    def loss(self, forward: Forward, x: Features) -> Tensor:
        """Of the graphs to train on."""
        part = self.parts[0]
        return loss_of(forward(x, part.edge_index, part.batch, part.num_graphs), part.y)

    def steps(self, x: Features, recipe: Recipe, seed: int) -> Callable[[int], Iterator[Step]]:
        """One over the graphs to train on."""
        return _single_step(self, x, recipe)

    def evaluate(self, forward: Forward, inputs: Sequence[Features]) -> tuple[float, float]:
        """From a forward pass over each."""
        val, test = (
            self.unit * self.metric.of(forward(x, part.edge_index, part.batch, part.num_graphs), part.y)
            for x, part in zip(inputs[1:], self.parts[1:], strict=True)
        )
        return val, test


def _single_step(task: Task, x: Features, recipe: Recipe) -> Callable[[int], Iterator[Step]]:
    draw = train_features(x, recipe)
    step = Step(x, lambda forward: task.loss(forward, draw()), 1)
    return lambda _: iter([step])


def make_task(data: Data | GraphSet, device: torch.device, normalize: bool = False) -> Task:
    """The task that a data set sets.

    Args:
        data: What :func:`qgnn.data.load` or :func:`qgnn.data.load_graphs` returned.
        device: Where to train.
        normalize: Scale each row of the features of nodes to sum to one.
    """
    if isinstance(data, GraphSet):
        return GraphTask(data, device)
    if normalize:
        data = normalize_rows(data)
    return NodeTask(data.to(device, "x", "edge_index", "y", "train_mask", "val_mask", "test_mask"))


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of classes, its multi-label form of several labels a node, the mean square error of numbers.

    Shapes:
        - ``out``: [N, C] logits, or [N, 1] numbers
        - ``y``: [N] int64 classes, [N, C] zeros and ones, or [N] floating-point numbers
    """
    if y.dim() == 2:
        return F.binary_cross_entropy_with_logits(out, y.float())
    return F.mse_loss(out.squeeze(1), y) if y.is_floating_point() else F.cross_entropy(out, y)


def normalize_rows(data: Data) -> Data:
    """A copy with rows of ``x`` that sum to one."""
    return NormalizeFeatures()(data.clone())


def _with_own_edges(data: Data) -> Data:
    data = copy.copy(data)
    data.edge_index = data.edge_index.clone()
    return data
