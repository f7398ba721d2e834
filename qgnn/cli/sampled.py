"""Nodes of one graph, learned from sampled neighborhoods."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F
from torch.utils.data import Sampler
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader

from qgnn.cli.errors import UsageError
from qgnn.cli.processes import ALONE, Processes
from qgnn.cli.recipe import Recipe
from qgnn.cli.task import Features, Forward, NodeTask, Step, loss_of, normalize_rows
from qgnn.data import NeighborSampler, QuantizedFeatureStore
from qgnn.rng import derive_seed

FANOUT = (15, 10)  # of the first hop, and of all others


@dataclass(frozen=True)
class Sampling:
    """How batches are made.

    Args:
        fanout: Edges into each node of a hop at most, -1 for all.
        batch_size: Nodes to train on in a step, of all processes.
        workers: Processes that sample and gather, for each that trains; 0: that one itself.
    """

    fanout: tuple[int, ...]
    batch_size: int
    workers: int


def sampling_of(
    options: argparse.Namespace, recipe: Recipe, by_graph: bool, processes: Processes = ALONE
) -> Sampling | None:
    """What the command line asks for.

    Raises:
        UsageError: If it does not fit the model, the data set, or the number of processes.
    """
    if processes.size > 1 and (by_graph or options.sampler == "full"):
        got = "many graphs" if by_graph else "a step over a whole graph"
        remedy = "start a single one" if by_graph else "give --sampler neighbor, or start a single one"
        raise UsageError(f"{processes.size} processes expect batches, to share each (got {got}); {remedy}")
    if options.sampler == "full":
        for name in ("fanout", "batch_size", "workers"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} expects --sampler neighbor")
        return None
    if by_graph:
        raise UsageError("--sampler neighbor expects a data set with classes of nodes (got one of many graphs)")
    hops = recipe.layers - 2 if options.model == "gcn2" else recipe.layers  # two of its layers are dense
    fanout = options.fanout or (FANOUT[0],) + FANOUT[1:] * (hops - 1)
    if len(fanout) != hops:
        raise UsageError(
            f"--fanout expects a number for each layer that sees neighbors, {hops} (got {len(fanout)}: "
            f"{','.join(map(str, fanout))})"
        )
    sampling = Sampling(fanout, options.batch_size or 1024, options.workers or 0)
    if sampling.batch_size < processes.size:
        raise UsageError(f"--batch-size expects a node for each process, {processes.size} (got {sampling.batch_size})")
    return sampling


class Shares(Sampler[list[int]]):
    """What one of several processes takes of the batches of an epoch: numbers from 0 on.

    All processes draw the same order, from the seed and the epoch, as ``DistributedSampler`` does, and take turns in
    each batch. Where a batch has none left for a process, it gets the first one, so that all take the same steps.

    Args:
        count: How much there is to train on.
        batch_size: How much of it is in a batch, of all processes.
        seed: Of the order.
        processes: Those that train.

    Attributes:
        epoch: The epoch that is drawn next.
    """

    def __init__(self, count: int, batch_size: int, seed: int, processes: Processes) -> None:
        if count == 0:
            raise ValueError("expected nodes to train on (got none)")
        self.count, self.batch_size, self.seed, self.processes = count, batch_size, seed, processes
        self.epoch = 0

    def __len__(self) -> int:
        return -(-self.count // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        for batch in torch.randperm(self.count, generator=generator).split(self.batch_size):
            share = batch[self.processes.rank :: self.processes.size]
            yield (share if len(share) else batch[:1]).tolist()

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Of each batch, how much is this process's own, and how much of all."""
        totals = [min(self.batch_size, self.count - first) for first in range(0, self.count, self.batch_size)]
        return [(len(range(self.processes.rank, total, self.processes.size)), total) for total in totals]


class SampledNodeTask(NodeTask):
    """Classes of the nodes of one graph; a step sees some of them and sampled neighborhoods.

    Batches are made in the memory of the host, from features that are codes where the first layer takes them as such.
    Scores are those of a pass over the whole graph on the device.

    Args:
        data: The graph, with ``x``, ``edge_index``, ``y`` and the three masks.
        sampling: How batches are made.
        device: Where to train.
        normalize: Scale each row of the features to sum to one.
        processes: Those that share the batches.
    """

    same_edges = False

    def __init__(
        self,
        data: Data,
        sampling: Sampling,
        device: torch.device,
        normalize: bool = False,
        processes: Processes = ALONE,
    ) -> None:
        super().__init__(normalize_rows(data) if normalize else data)
        self.sampling, self.device, self.processes = sampling, device, processes
        self.description += f", batches of {sampling.batch_size}, fanout {','.join(map(str, sampling.fanout))}"
        self._edges = data.edge_index.to(device if processes.is_first else "cpu")  # the others evaluate nothing

    def with_own_edges(self) -> SampledNodeTask:
        """The same: batches have edges of their own."""
        result = copy.copy(self)
        result._edges = self._edges.clone() if self.processes.is_first else self._edges
        return result

    def steps(self, x: Features, recipe: Recipe, seed: int) -> Callable[[int], Iterator[Step]]:
        """Those of an epoch: each node to train on once, in an order of its own."""
        sampling, data = self.sampling, self.data
        store = QuantizedFeatureStore(quantized=())
        store[None, "x", None], store[None, "y", None] = x, data.y
        shares = Shares(int(data.train_mask.sum()), sampling.batch_size, seed, self.processes)
        loader = NodeLoader(
            (store, data),
            NeighborSampler(data, sampling.fanout),
            input_nodes=data.train_mask,
            batch_sampler=shares,
            # Started anew for each epoch, since a training that is resumed within them could not set back their seeds.
            num_workers=sampling.workers,
            pin_memory=self.device.type == "cuda",
        )
        dropout = recipe.dropout if recipe.input_dropout else 0.0

        def loss(batch: Data, forward: Forward) -> torch.Tensor:
            features = F.dropout(batch.x, dropout) if dropout else batch.x
            out = forward(features, batch.edge_index)
            return loss_of(out[: batch.batch_size], batch.y[: batch.batch_size])

        def epoch(number: int) -> Iterator[Step]:
            shares.epoch = number
            for batch, (size, total) in zip(loader, shares.sizes, strict=True):
                batch = batch.to(self.device, non_blocking=True)
                yield Step(batch.x, partial(loss, batch), size, size * self.processes.size / total)

        return epoch

    def evaluate(self, forward: Forward, inputs: Sequence[Features]) -> tuple[float, float]:
        """From one forward pass over the graph."""
        out = forward(inputs[0].to(self.device), self._edges)
        return self.scores(out.to(self.data.y.device))
