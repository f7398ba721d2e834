"""HaloGraph: the edges into some nodes of a graph, where other processes have the rows of the others."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor

from qgnn.graph import Graph
from qgnn.qtensor import QTensor
from qgnn.weak_cache import lasting

_T = TypeVar("_T")
_Self = TypeVar("_Self", bound="HaloGraph")


class HaloGraph(Graph):
    """The edges into a process's own nodes: from own nodes, and from those of others, which are its halo.

    Sums and means over neighbors take it like any :class:`qgnn.Graph` of the own nodes. Its edges do not lie in one
    order, so that whatever else asks for them gets an error that names what works.

    Args:
        inner: Edges from own nodes.
        halo: Edges from nodes of the halo.
    """

    def __init__(self, inner: Graph, halo: Graph) -> None:
        self.inner, self.halo = inner, halo
        self.num_sources = inner.num_sources
        self._shared: dict[Any, Any] = {}

    @staticmethod
    def from_adjacency(*_: Any, **__: Any) -> Graph:
        """Not of one process: the whole graph would be its own."""
        raise NotImplementedError("'from_adjacency' makes a graph of one process; use PartitionedGraph.from_edge_index")

    def exchange(self, x: Tensor | QTensor, *, exact: bool = False) -> Callable[[], Tensor]:
        """Send rows of own nodes to where they are part of the halo. All processes have to do so together.

        Args:
            x: Rows of the own nodes.
            exact: Whether they go as they are, whatever the graph's format is.

        Shapes:
            - **input:** ``[N, F]``

        Returns:
            What waits for the rows of the halo, ``[H, F]``.
        """
        raise NotImplementedError

    @property
    def num_targets(self) -> int:
        """Number of own nodes."""
        return self.inner.num_targets

    @property
    def num_edges(self) -> int:
        """Number of edges into own nodes."""
        return self.inner.num_edges + self.halo.num_edges

    @property
    def device(self) -> torch.device:
        """Device of the edges."""
        return self.inner.device

    @property
    def in_degree(self) -> Tensor:
        """Number of edges into each own node, ``[N]``."""
        return self.inner.in_degree + self.halo.in_degree

    def with_parts(self: _Self, inner: Graph, halo: Graph) -> _Self:
        """The same nodes with other edges between them, or with other weights."""
        graph = copy(self)
        graph.inner, graph.halo, graph._shared = inner, halo, {}
        return graph

    def averaged(self: _Self, dtype: torch.dtype) -> _Self:
        """The graph whose sums are the means of this one, with weights of that type."""

        def build() -> _Self:
            factor = self.in_degree.clamp_min(1).to(dtype).reciprocal()

            def scaled(part: Graph) -> Graph:
                weight = factor.index_select(0, part.target)
                return part.with_weight(weight if part.weight is None else weight * part.weight.to(dtype))

            return self.with_parts(scaled(self.inner), scaled(self.halo))

        return self.remembered(("averaged", dtype), build)

    def remembered(self, key: Hashable, build: Callable[[], _T]) -> _T:
        """``build()``, made once for as long as the graph lives."""
        if key not in self._shared:
            with lasting():
                self._shared[key] = build()
        return self._shared[key]

    def to(self: _Self, device: torch.device | str) -> _Self:
        """The graph on another device."""
        return self.with_parts(self.inner.to(device), self.halo.to(device))

    def __getattr__(self, name: str) -> Any:
        if name in ("csr", "weight"):
            raise NotImplementedError(
                f"'{type(self).__name__}' serves sums and means over neighbors, flow='source_to_target': QGCNConv, "
                f"QGCN2Conv, QSGConv, QAPPNP without dropout of edges, QGINConv, and QSAGEConv and QGraphConv with "
                f"aggr='mean' or 'sum' (got a layer, function or method that asks for '{name}' of all edges, as "
                f"attention and updates do); use one of these, or the whole graph in one process"
            )
        raise AttributeError(f"'{type(self).__name__}' object has no attribute {name!r}")

    def __repr__(self) -> str:
        weighted = ", weighted" if self.inner.weight is not None else ""
        return (
            f"{type(self).__name__}({self.num_targets} nodes, {self.halo.num_sources} in the halo, {self.num_edges} "
            f"edges{weighted})"
        )
