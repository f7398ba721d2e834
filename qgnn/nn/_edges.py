"""The edges that attention layers attend over, with self-loops and features of theirs as in PyG."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch_geometric.typing import SparseTensor, torch_sparse
from torch_geometric.utils import add_self_loops, remove_self_loops
from torch_geometric.utils.loop import compute_loop_attr
from torch_geometric.utils.sparse import set_sparse_value

from qgnn import functional
from qgnn.edge_checks import check_edge_index
from qgnn.graph import Graph, identity, kind_of, to_edges
from qgnn.weak_cache import cached


class Edges(NamedTuple):
    """The edges that a layer attends over.

    Args:
        graph: The edges, sorted; self-loops are the last of the given ones.
        attr: Features of theirs, ``[E, K]``, if the layer takes any.
        adjacency: The same edges as PyG would return them.
        spare: Whether the graph has one target more than the layer: where edges end that do not count.
    """

    graph: Graph
    attr: Tensor | None
    adjacency: Any
    spare: bool = False

    def of_targets(self, rows: Tensor) -> Tensor:
        """``rows`` with one for each target of the graph."""
        return pad(rows, (0, 0) * (rows.dim() - 1) + (0, 1)) if self.spare else rows

    def results(self, rows: Tensor) -> Tensor:
        """``rows`` without that of the spare target."""
        return rows[:-1] if self.spare else rows

    def with_weights(self, weights: Tensor, matrix: bool = True) -> Any:
        """The edges and their weights as PyG's layers return them beside the result, by the kind of the edges; those of
        a sparse matrix are its values if ``matrix``."""
        kind = kind_of(self.adjacency)
        if kind == "torch_sparse":
            return self.adjacency.set_value(weights, layout="coo")
        if kind == "sparse matrix" and matrix:
            return set_sparse_value(self.adjacency, weights), weights
        return (self.adjacency.edge_index(as_given=True) if kind == "graph" else self.adjacency), weights


def num_loops_of(num_nodes: tuple[int, int], x: tuple[Any, Any]) -> int:
    """How many nodes are on both ends of edges."""
    if x[0] is x[1]:
        return num_nodes[0]
    return torch.sym_min(*num_nodes)


class LoopedEdges:
    """Edges without self-loops of their own, and behind them one for each of the first nodes.

    Args:
        edge_index: The given edges.
        num_nodes: Number of nodes that messages come from, and that they go to.
        num_loops: Number of self-loops.
        reverse: Whether messages flow against the edges.
        fixed_shape: Leave self-loops of the edges' own in the list, to a spare target behind the others, so that no
            shape depends on data.
    """

    def __init__(
        self, edge_index: Tensor, num_nodes: tuple[int, int], num_loops: int, reverse: bool, fixed_shape: bool
    ) -> None:
        edge_index = edge_index.flip(0) if reverse else edge_index
        num_sources, num_targets = num_nodes
        check_edge_index(edge_index, num_sources, num_targets)
        self.num_loops, self.reverse, self.spare = num_loops, reverse, fixed_shape
        self.num_filled = num_sources if reverse else num_targets
        self.kept: Tensor | None = None
        self._filled: Graph | None = None
        is_loop = edge_index[0] == edge_index[1]
        if fixed_shape:
            edge_index = torch.stack([edge_index[0], torch.where(is_loop, num_targets, edge_index[1])])
            num_targets = num_targets + 1
        else:
            self.kept = (~is_loop).nonzero().squeeze(1)
            edge_index = edge_index[:, self.kept]
        node = torch.arange(num_loops, dtype=edge_index.dtype, device=edge_index.device)
        edge_index = torch.cat([edge_index, node.expand(2, -1)], dim=1)
        self.graph = Graph.from_edge_index(edge_index, (num_sources, num_targets))

    def filled(self) -> Graph:
        """The edges by the node whose self-loop their features fill: the second one given, wherever messages flow.
        Those that do not count are behind all nodes."""
        if self._filled is not None:
            return self._filled
        source, target = (
            self.graph.incidence(side)[2][: self.graph.num_edges - self.num_loops] for side in ("source", "target")
        )
        node = source if self.reverse else target
        if self.spare:
            node = torch.where(target == self.graph.num_targets - 1, self.num_filled, node)
        self._filled = Graph.from_edge_index(torch.stack([node, node]), self.num_filled + 1)
        return self._filled

    def features(self, edge_attr: Tensor, fill_value: float | Tensor | str) -> Tensor:
        """Features of the given edges, and those of the self-loops, as PyG fills them in."""
        kept = edge_attr if self.kept is None else edge_attr.index_select(0, self.kept)
        if not isinstance(fill_value, str):
            loops = compute_loop_attr(kept, kept, self.num_loops, False, fill_value)
        elif fill_value in ("add", "sum", "mean"):  # in fixed order, on every device
            filled = self.filled()
            loops = functional.incidence_sum(filled, kept)[: self.num_loops]
            if fill_value == "mean":
                loops = loops / filled.in_degree[: self.num_loops, None].clamp_min(1)
        else:
            ends = self.filled().incidence("target")[2].long().expand(2, -1)
            loops = compute_loop_attr(ends, kept, self.num_filled + 1, False, fill_value)[: self.num_loops]
        return torch.cat([kept, loops])


def edges_with_loops(
    edge_index: Any,
    edge_attr: Tensor | None,
    num_nodes: tuple[int, int],
    num_loops: int,
    reverse: bool,
    fill_value: Any,
    exact: bool,
) -> Edges:
    """The edges of a layer that puts self-loops in place of those they have: see :meth:`AttentionConv.edges_of`."""
    key = (num_nodes, num_loops, reverse)

    def build() -> LoopedEdges:
        fixed_shape = torch.compiler.is_compiling() and not exact
        return LoopedEdges(to_edges(edge_index)[0], num_nodes, num_loops, reverse, fixed_shape)

    tensors = identity(edge_index, weights=False)
    looped = cached(tensors, ("edges with loops", *key), build)
    if edge_attr is not None:
        if edge_attr.shape[0] != edge_index.shape[1]:
            raise ValueError(
                f"'edge_attr' expects a row for each of {edge_index.shape[1]} edges (got {list(edge_attr.shape)})"
            )
        given = edge_attr

        def features() -> Tensor:
            return looped.features(given, fill_value)

        values, fill = _keys(fill_value)
        edge_attr = cached((given, *tensors, *values), ("features with loops", fill, *key), features)
    adjacency = None
    if exact:
        adjacency = looped.graph.edge_index(as_given=True)
        adjacency = adjacency.flip(0) if reverse else adjacency
    return Edges(looped.graph, edge_attr, adjacency, looped.spare)


def matrix_with_loops(matrix: Any, fill_value: Any) -> Any:
    """A sparse matrix with self-loops as PyG puts them in."""

    def build() -> Any:
        if isinstance(matrix, SparseTensor):
            return torch_sparse.set_diag(matrix)
        own = matrix.coalesce() if matrix.layout == torch.sparse_coo else matrix
        return add_self_loops(remove_self_loops(own)[0], None, fill_value)[0]

    values, fill = _keys(fill_value)
    return cached((*identity(matrix, weights=True), *values), ("matrix with loops", fill), build)


def _keys(fill_value: Any) -> tuple[tuple[Tensor, ...], Any]:
    """What stands for ``fill_value`` in a cache: a tensor, or what else can be compared."""
    return ((fill_value,), None) if isinstance(fill_value, Tensor) else ((), fill_value)
