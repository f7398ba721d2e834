"""Sampled neighborhoods, in torch alone."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput, NegativeSampling, NodeSamplerInput, SamplerOutput
from torch_geometric.sampler.neighbor_sampler import edge_sample, node_sample

from qgnn.graph import Graph
from qgnn.rng import counter_hash, make_seed, stream_key


class NeighborSampler(BaseSampler):
    """Sources of some of the edges into each node, hop by hop, uniformly and without replacement: the sampling of
    GraphSAGE (https://arxiv.org/abs/1706.02216), for PyG's loaders, on a graph with one type of nodes.

    PyG's own sampler needs ``pyg-lib`` or ``torch-sparse``, which have to be compiled or fetched for each version of
    torch; this one needs neither, and what it draws follows from ``torch.manual_seed`` and the number of workers of the
    loader. Graphs with several types, times of edges or weights need PyG's.

    Args:
        graph: A :class:`torch_geometric.data.Data`, a :class:`qgnn.Graph`, or all else that has the edges of one.
        num_neighbors: Edges into each node of a hop at most, from the seeds outward; -1 for all.
        num_nodes: Number of nodes, where ``graph`` does not tell it.

    Shapes:
        - **input:** ``graph`` with E edges among N nodes
        - **output:** of a batch of B seeds, ``node [B + M]`` with the seeds first; ``row``, ``col`` and ``edge``, one
          entry an edge

    Raises:
        TypeError: If numbers of neighbors are no integers, or the graph has several types.
        ValueError: If there is no hop, a number is below -1, the graph has two sets of nodes or is not on the CPU, or
            nobody says how many nodes there are.
        IndexError: If a seed is no node.
        NotImplementedError: If seeds have times.

    Example:
        >>> sampler = qgnn.data.NeighborSampler(data, [15, 10])
        >>> loader = NodeLoader(data, sampler, input_nodes=data.train_mask, batch_size=1024, shuffle=True)
    """

    def __init__(self, graph: Any, num_neighbors: Sequence[int], num_nodes: int | None = None) -> None:
        super().__init__()
        if not isinstance(num_neighbors, Sequence) or not all(_is_integer(number) for number in num_neighbors):
            raise TypeError(f"'NeighborSampler' expects a list of integers as 'num_neighbors' (got {num_neighbors!r})")
        if not num_neighbors or min(num_neighbors) < -1:
            raise ValueError(
                f"'NeighborSampler' expects in 'num_neighbors' a number for each hop, or -1 for all neighbors (got "
                f"{list(num_neighbors)})"
            )
        self.num_neighbors = tuple(map(int, num_neighbors))
        self._csr = _graph_of(graph, num_nodes).csr
        self._place: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the graph."""
        return self._csr.num_rows

    @property
    def edge_permutation(self) -> None:
        """``None``, since edges are numbered as they were given."""
        return

    def sample_from_nodes(self, inputs: NodeSamplerInput, **_: Any) -> SamplerOutput:
        """What PyG's node loaders call.

        Args:
            inputs: Seeds.

        Raises:
            IndexError: If a seed is no node.
            NotImplementedError: If seeds have times.
        """
        return node_sample(inputs, self._sample)

    def sample_from_edges(
        self, inputs: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None
    ) -> SamplerOutput:
        """What PyG's link loaders call.

        Args:
            inputs: Seed edges.
            neg_sampling: How edges that are not there are drawn; ``None`` for none.

        Raises:
            IndexError: If an end of a seed edge is no node.
            NotImplementedError: If seeds have times.
        """
        return edge_sample(inputs, self._sample, self.num_nodes, False, None, neg_sampling)

    def _sample(self, seeds: Tensor, time: Tensor | None = None) -> SamplerOutput:
        if time is not None:
            raise NotImplementedError(
                "'NeighborSampler' knows no times of edges; use PyG's NeighborSampler, with pyg-lib"
            )
        seeds = seeds.long()
        if seeds.numel() and not (int(seeds.min()) >= 0 and int(seeds.max()) < self.num_nodes):
            raise IndexError(
                f"'NeighborSampler' has nodes 0 to {self.num_nodes - 1} (got {int(seeds.min())} to {int(seeds.max())})"
            )
        place, self._place = self._place, None  # back at the end: an error would leave something in it
        if place is None:
            place = torch.full((self.num_nodes,), -1)
        key = make_seed()
        nodes, sources, targets, edges = [seeds], [], [], []
        place[seeds] = torch.arange(len(seeds))
        first, num_found = 0, len(seeds)
        for hop, most in enumerate(self.num_neighbors):
            target, edge = _edges_into(nodes[-1], self._csr.indptr, most, key ^ stream_key(hop))
            source = self._csr.index[edge].long()
            found = source[place[source] < 0].unique()
            place[found] = torch.arange(num_found, num_found + len(found))
            sources.append(place[source])
            targets.append(target + first)
            edges.append(self._csr.order[edge].long())
            nodes.append(found)
            first, num_found = num_found, num_found + len(found)
        node = torch.cat(nodes)
        place[node] = -1
        self._place = place
        return SamplerOutput(
            node,
            *map(torch.cat, (sources, targets, edges)),
            num_sampled_nodes=[len(found) for found in nodes],
            num_sampled_edges=[len(edge) for edge in edges],
        )

    def __getstate__(self) -> dict[str, Any]:
        """Without what a process works in."""
        return {**self.__dict__, "_place": None}

    def __repr__(self) -> str:
        return f"NeighborSampler({list(self.num_neighbors)}, {self.num_nodes} nodes, {self._csr.index.shape[0]} edges)"


def _is_integer(number: Any) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool)


def _graph_of(graph: Any, num_nodes: int | None) -> Graph:
    if isinstance(graph, HeteroData):
        raise TypeError(
            "'NeighborSampler' expects a graph with one type of nodes and edges (got HeteroData); use PyG's"
        )
    if isinstance(graph, Data):
        num_nodes = graph.num_nodes if num_nodes is None else num_nodes
        graph = graph.edge_index if graph.edge_index is not None else graph.get("adj_t")
        if graph is None:
            raise ValueError(
                "'NeighborSampler' expects a graph with edges (got one with neither 'edge_index' nor 'adj_t')"
            )
    if not isinstance(graph, Graph):
        if num_nodes is None:
            raise ValueError("'NeighborSampler' expects 'num_nodes' with edges alone, which do not tell it")
        graph = Graph.from_adjacency(graph, num_nodes)
    if graph.device.type != "cpu":
        raise ValueError(
            f"'NeighborSampler' expects edges on the CPU (got {graph.device}); loaders move batches to a GPU"
        )
    if graph.num_sources != graph.num_targets:
        raise ValueError(
            f"'NeighborSampler' expects one set of nodes (got {graph.num_sources} sources, {graph.num_targets} targets)"
        )
    return graph


def _edges_into(nodes: Tensor, indptr: Tensor, most: int, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Some of the edges into each node: the places of the nodes among ``nodes``, and those of the edges."""
    start = indptr[nodes].long()
    degree = indptr[nodes + 1].long() - start
    count = degree if most < 0 else degree.clamp_max(most)
    owner = torch.arange(len(nodes)).repeat_interleave(count)
    edge = torch.arange(len(owner)) + (start - (count.cumsum(0) - count))[owner]
    many = (degree > count).nonzero().view(-1)
    if most > 0 and many.numel():
        chosen = _choose(nodes[many], degree[many], most, seed) + start[many, None]
        edge[(degree > count)[owner]] = chosen.view(-1)
    return owner, edge


def _choose(nodes: Tensor, degree: Tensor, count: int, seed: Tensor) -> Tensor:
    """``count`` different numbers below each degree, which is larger: ``[len(nodes), count]``.

    Floyd's way: for each j from degree - count on, a number up to j, or j itself if that one has been chosen.
    """
    random = counter_hash(nodes[:, None] * count + torch.arange(count), seed).long() & 0xFFFFFFFF
    chosen = torch.empty_like(random)
    for i in range(count):
        last = degree - count + i
        drawn = random[:, i] * (last + 1) >> 32
        is_taken = (chosen[:, :i] == drawn[:, None]).any(1)
        chosen[:, i] = torch.where(is_taken, last, drawn)
    return chosen
