"""Nodes of one graph, learned from sampled neighborhoods."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader

from qgnn.cli.errors import UsageError
from qgnn.cli.recipe import Recipe
from qgnn.cli.task import Features, Forward, NodeTask, Step, loss_of, normalize_rows
from qgnn.data import NeighborSampler, QuantizedFeatureStore

FANOUT = (15, 10)  # of the first hop, and of all others


@dataclass(frozen=True)
class Sampling:
    """How batches are made.

    Args:
        fanout: Edges into each node of a hop at most, -1 for all.
        batch_size: Nodes to train on in a step.
        workers: Processes that sample and gather; 0: the training one.
    """

    fanout: tuple[int, ...]
    batch_size: int
    workers: int


def sampling_of(options: argparse.Namespace, recipe: Recipe, by_graph: bool) -> Sampling | None:
    """What the command line asks for.

    Raises:
        UsageError: If it does not fit the model or the data set.
    """
    if options.sampler == "full":
        for name in ("fanout", "batch_size", "workers"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} expects --sampler neighbor")
        return None
    if by_graph:
        raise UsageError("--sampler neighbor expects a data set with classes of nodes (got one with classes of graphs)")
    hops = recipe.layers - 2 if options.model == "gcn2" else recipe.layers  # two of its layers are dense
    fanout = options.fanout or (FANOUT[0],) + FANOUT[1:] * (hops - 1)
    if len(fanout) != hops:
        raise UsageError(
            f"--fanout expects a number for each layer that sees neighbors, {hops} (got {len(fanout)}: "
            f"{','.join(map(str, fanout))})"
        )
    return Sampling(fanout, options.batch_size or 1024, options.workers or 0)


class SampledNodeTask(NodeTask):
    """Classes of the nodes of one graph; a step sees some of them and sampled neighborhoods.

    Batches are made in the memory of the host, from features that are codes where the first layer takes them as such.
    Scores are those of a pass over the whole graph on the device.

    Args:
        data: The graph, with ``x``, ``edge_index``, ``y`` and the three masks.
        sampling: How batches are made.
        device: Where to train.
        normalize: Scale each row of the features to sum to one.
    """

    same_edges = False

    def __init__(self, data: Data, sampling: Sampling, device: torch.device, normalize: bool = False) -> None:
        super().__init__(normalize_rows(data) if normalize else data)
        self.sampling, self.device = sampling, device
        self.description += f", batches of {sampling.batch_size}, fanout {','.join(map(str, sampling.fanout))}"
        self._edges = data.edge_index.to(device)

    def with_own_edges(self) -> SampledNodeTask:
        """The same: batches have edges of their own."""
        result = copy.copy(self)
        result._edges = self._edges.clone()
        return result

    def steps(self, x: Features, recipe: Recipe) -> Callable[[], Iterator[Step]]:
        """Those of an epoch: each node to train on once, in an order of its own."""
        sampling, data = self.sampling, self.data
        store = QuantizedFeatureStore(quantized=())
        store[None, "x", None], store[None, "y", None] = x, data.y
        loader = NodeLoader(
            (store, data),
            NeighborSampler(data, sampling.fanout),
            input_nodes=data.train_mask,
            batch_size=sampling.batch_size,
            shuffle=True,
            num_workers=sampling.workers,
            persistent_workers=sampling.workers > 0,
            pin_memory=self.device.type == "cuda",
        )
        dropout = recipe.dropout if recipe.input_dropout else 0.0

        def loss(batch: Data, forward: Forward) -> torch.Tensor:
            features = F.dropout(batch.x, dropout) if dropout else batch.x
            out = forward(features, batch.edge_index)
            return loss_of(out[: batch.batch_size], batch.y[: batch.batch_size])

        def epoch() -> Iterator[Step]:
            for batch in loader:
                batch = batch.to(self.device, non_blocking=True)
                yield Step(batch.x, partial(loss, batch), batch.batch_size)

        return epoch

    def evaluate(self, forward: Forward, inputs: Sequence[Features]) -> tuple[float, float]:
        """From one forward pass over the graph."""
        out = forward(inputs[0].to(self.device), self._edges)
        return self.scores(out.to(self.data.y.device))
