"""Graph: the edges of a graph, sorted once for everything that aggregates over them.

Kernels walk edges by target (CSR) in the forward pass and by source (CSC) in the backward pass. Both orders and the
permutation between them are built once and kept in a weak cache, keyed by the tensor that a model passes in and its
version: a changed or replaced tensor is never served the old graph, and a dropped one frees its entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor, to_edge_index

from qgnn.adjacency import Adjacency, Permutation, sort_by
from qgnn.edge_checks import check_constant, check_edge_index, check_edge_weight, index_dtype, plain, sizes_of
from qgnn.edge_updates import SortedEdges, as_rebuilt, grown, put_in, taken_out
from qgnn.weak_cache import cached, is_recorded, lasting

__all__ = ["Adjacency", "Graph"]

_T = TypeVar("_T")


class Graph:
    """Edges of a graph from sources to targets, ready for aggregation.

    Build one with :meth:`from_edge_index` or :meth:`from_adjacency`; every layer and function accepts it in place of an
    ``edge_index``. Multi-edges and self-loops are kept as they are.

    Args:
        csr: Edges sorted by target.
        num_sources: Number of source nodes.
        weight: Edge weights in CSR order; ``None`` means all ones.
        shared: What graphs with the same edges and other weights have in common, built at first use.
    """

    def __init__(
        self,
        csr: Adjacency,
        num_sources: int,
        weight: Tensor | None = None,
        shared: dict[str, Any] | None = None,
    ) -> None:
        self.csr = csr
        self.num_sources = num_sources
        if weight is not None:
            weight = check_edge_weight(weight, csr.index.shape[0])
            if not torch.compiler.is_compiling() and weight.is_inference():
                with lasting():
                    weight = weight.clone()
        self.weight = weight
        self._weight_t: tuple[Tensor, int, Tensor] | None = None  # of which weights, in which version
        self._shared: dict[str, Any] = {} if shared is None else shared

    @staticmethod
    def from_edge_index(
        edge_index: Tensor, num_nodes: int | tuple[int, int], edge_weight: Tensor | None = None
    ) -> Graph:
        """Build a graph from COO edges. Not cached: keep the result, or pass the ``edge_index`` itself to a layer.

        Args:
            edge_index: Sources in the first row, targets in the second.
            num_nodes: Number of nodes, or ``(num_sources, num_targets)`` of a bipartite graph.
            edge_weight: Constant edge weights. Weights that need a gradient go to the layer or function, not here.

        Shapes:
            - **input:** ``edge_index [2, E]`` integer, ``edge_weight [E]`` or ``[E, 1]`` float

        Raises:
            ValueError: If ``edge_index`` is no integer tensor of shape ``[2, E]``, or points outside the nodes.

        Example:
            >>> graph = qgnn.Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]), num_nodes=3)
        """
        edge_index = plain(edge_index)
        num_sources, num_targets = sizes_of(num_nodes)
        check_edge_index(edge_index, num_sources, num_targets)
        with lasting():
            edge_index = edge_index.to(index_dtype(num_sources, num_targets, edge_index.shape[1]))
            source, target = edge_index[0], edge_index[1]
            graph = Graph(sort_by(target, source, num_targets), num_sources)
        if edge_weight is None:
            return graph
        weight = check_constant(check_edge_weight(edge_weight, graph.num_edges))
        with lasting():
            return graph.with_weight(graph.to_csr_order(weight))

    @staticmethod
    def from_adjacency(adjacency: Any, num_nodes: int | tuple[int, int], edge_weight: Tensor | None = None) -> Graph:
        """Build a graph from whatever PyG takes as edges.

        Args:
            adjacency: ``edge_index``, :class:`torch_geometric.EdgeIndex`, a sparse torch matrix or a
                ``torch_sparse.SparseTensor``; matrices are transposed as in PyG, with a row for each target.
            num_nodes: Number of nodes, or ``(num_sources, num_targets)``.
            edge_weight: Constant edge weights, in the order of the edges.

        Raises:
            ValueError: As :meth:`from_edge_index`, or if weights are given twice, beside the edges and within them.
        """
        if isinstance(adjacency, Graph):
            return as_graph(adjacency, num_nodes, edge_weight)
        edge_index, value = to_edges(adjacency)
        return Graph.from_edge_index(edge_index, num_nodes, one_weight(edge_weight, value))

    @property
    def num_targets(self) -> int:
        """Number of target nodes."""
        return self.csr.num_rows

    @property
    def num_edges(self) -> int:
        """Number of edges, each direction and each copy counted."""
        return self.csr.index.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the edges."""
        return self.csr.index.device

    @property
    def csc(self) -> Adjacency:
        """Edges sorted by source, the transposed graph. Built at first use."""
        return self._once("csc", lambda: sort_by(self.csr.index, self.target, self.num_sources))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_weight_t": None}  # the versions of a copy begin anew

    @property
    def weight_t(self) -> Tensor | None:
        """Edge weights in the order of :attr:`csc`."""
        weight, known = self.weight, self._weight_t
        if weight is None:
            return None
        has_version = not torch.compiler.is_compiling() and not weight.is_inference()
        if has_version and known is not None and known[0] is weight and known[1] == weight._version:
            return known[2]
        with lasting():
            weight_t = cached(
                (weight, self.csr.index), "weight_t", lambda: weight.detach().index_select(0, self.csc.order)
            )
        if has_version and not is_recorded(weight):
            self._weight_t = weight, weight._version, weight_t
        return weight_t

    @property
    def in_degree(self) -> Tensor:
        """Number of edges into each target, ``[num_targets]``."""
        return self.csr.indptr.diff()

    @property
    def mean_factor(self) -> Tensor:
        """``1 / max(1, in-degree)`` of each target, fp32 ``[num_targets]``."""
        return self._once("mean_factor", lambda: self.in_degree.clamp_min(1).float().reciprocal())

    @property
    def given_order(self) -> Tensor:
        """Where each given edge stands in CSR order, the inverse of ``csr.order``, ``[E]``."""

        def invert() -> Tensor:
            position = torch.arange(self.num_edges, dtype=self.csr.order.dtype, device=self.device)
            return torch.empty_like(position).index_copy(0, self.csr.order.long(), position)

        return self._once("given_order", invert)

    def incidence(self, side: str) -> tuple[Tensor, Tensor, Tensor]:
        """The matrix of which node each given edge ends (``side="target"``) or starts at (``"source"``).

        Args:
            side: ``"target"`` or ``"source"``.

        Returns:
            The CSR pointers of its rows ``[N + 1]``, the numbers of their edges ``[E]``, and the node of each edge
            ``[E]``.
        """
        if side == "target":
            node = self._once("given_target", lambda: self.target.index_select(0, self.given_order))
            return self.csr.indptr, self.csr.order, node
        order = self._once("source_order", lambda: self.csr.order.index_select(0, self.csc.order))
        node = self._once("given_source", lambda: self.csr.index.index_select(0, self.given_order))
        return self.csc.indptr, order, node

    def to_csr_order(self, edge_values: Tensor) -> Tensor:
        """Values of the given edges, in CSR order (differentiable).

        Args:
            edge_values: Values in the order in which the edges were given.

        Shapes:
            - **input and output:** ``[E, ...]``
        """
        if torch.compiler.is_compiling() or not (edge_values.requires_grad and torch.is_grad_enabled()):
            return edge_values.index_select(0, self.csr.order)
        return Permutation.apply(edge_values, self.csr.order, self.given_order)

    def to_given_order(self, edge_values: Tensor) -> Tensor:
        """Values of edges in CSR order, in the order in which the edges were given (differentiable).

        Args:
            edge_values: Values in CSR order.

        Shapes:
            - **input and output:** ``[E, ...]``
        """
        if torch.compiler.is_compiling():
            return edge_values.index_select(0, self.given_order)
        return Permutation.apply(edge_values, self.given_order, self.csr.order)

    def with_weight(self, weight: Tensor | None) -> Graph:
        """The same edges with other weights.

        Args:
            weight: Edge weights in CSR order, ``[E]``; ``None`` for ones.

        Raises:
            ValueError: If there is not one floating-point weight an edge.
        """
        return Graph(self.csr, self.num_sources, weight, self._shared)

    def update(
        self,
        *,
        add: Tensor | None = None,
        add_weight: Tensor | None = None,
        remove: Tensor | None = None,
        remove_nodes: Tensor | None = None,
        num_nodes: int | tuple[int, int] | None = None,
    ) -> Graph:
        """The graph with edges and nodes taken out and put in: what :meth:`from_edge_index` makes of the edges that are
        left, in the order in which they were given, and of the new ones behind them.

        It copies the sorted edges, where that would sort them all. This graph stays as it is, and so does what was
        remembered for it; for the new one nothing is remembered yet.

        Args:
            add: Edges to put in, as the last step.
            add_weight: Their weights, of a graph with weights.
            remove: Edges to take out: which of the given ones, or their places.
            remove_nodes: Nodes to take out with all their edges, of a graph with one set of nodes: which of all, or
                their numbers. The others are numbered anew, in their order.
            num_nodes: Number of nodes after that, or ``(num_sources, num_targets)``: new ones have the last numbers.

        Shapes:
            - **input:** ``add [2, A]`` integer, ``add_weight [A]`` float, ``remove [E]`` bool or ``[R]`` integer,
              ``remove_nodes [N]`` bool or ``[R]`` integer

        Raises:
            ValueError: If a shape or type is another, a number is that of no edge or node, ``num_nodes`` is smaller
                than before, or weights are given to a graph that has none, or the reverse.

        Example:
            >>> graph = graph.update(remove=is_old, add=new_edges, num_nodes=graph.num_sources + 3)
        """
        known = SortedEdges(self.csr, self._shared.get("csc"), self.num_sources, self.weight)
        with lasting():
            if remove is not None or remove_nodes is not None:
                known = taken_out(known, remove, remove_nodes)
            if num_nodes is not None:
                known = grown(known, *sizes_of(num_nodes))
            if add is not None or add_weight is not None:
                known = put_in(known, add, add_weight)
            known = as_rebuilt(known)
        return Graph(known.csr, known.num_sources, known.weight, {} if known.csc is None else {"csc": known.csc})

    def edge_index(self, *, as_given: bool = False) -> Tensor:
        """The edges as int64 COO, ``[2, E]``.

        Args:
            as_given: In the order in which they were given; otherwise in CSR order.
        """
        ends = (self.csr.index, self.target)
        return torch.stack([(end.index_select(0, self.given_order) if as_given else end).long() for end in ends])

    @property
    def target(self) -> Tensor:
        """Target of each edge, in CSR order."""

        def repeat() -> Tensor:
            node = torch.arange(self.num_targets, dtype=self.csr.index.dtype, device=self.device)
            return torch.repeat_interleave(node, self.in_degree, output_size=self.num_edges)

        return self._once("target", repeat)

    def _once(self, name: str, build: Callable[[], _T]) -> _T:
        if name in self._shared:
            return self._shared[name]
        with lasting():
            value = build()
        if not is_recorded(self.csr.index):
            self._shared[name] = value
        return value

    def to(self, device: torch.device | str) -> Graph:
        """The graph on another device.

        Args:
            device: Where to.
        """
        weight = None if self.weight is None else self.weight.to(device)
        shared = {name: value.to(device) for name, value in self._shared.items()}
        return Graph(self.csr.to(device), self.num_sources, weight, shared)

    def __repr__(self) -> str:
        weighted = ", weighted" if self.weight is not None else ""
        return f"Graph({self.num_sources} -> {self.num_targets} nodes, {self.num_edges} edges{weighted})"


def kind_of(adjacency: Any) -> str:
    """``"graph"``, ``"torch_sparse"``, ``"sparse matrix"`` or ``"edge_index"``."""
    if isinstance(adjacency, Graph):
        return "graph"
    if isinstance(adjacency, SparseTensor):
        return "torch_sparse"
    return "sparse matrix" if is_torch_sparse_tensor(adjacency) else "edge_index"


def to_edges(adjacency: Any) -> tuple[Any, Tensor | None]:
    """``(edge_index, values or None)`` of anything that is taken as edges; a matrix has a row for each target."""
    kind = kind_of(adjacency)
    if kind == "graph":
        return adjacency.edge_index(), adjacency.weight
    if kind == "edge_index":
        return plain(adjacency), None
    if kind == "sparse matrix" and adjacency.layout == torch.sparse_coo:
        coalesced = adjacency.coalesce()  # PyG's conversion would mark the caller's own matrix as coalesced
        return coalesced.indices().flip(0), coalesced.values()
    matrix_index, value = to_edge_index(adjacency)
    return matrix_index.flip(0), value


def check_num_nodes(graph: Graph, num_sources: int, num_targets: int) -> None:
    """Raise unless ``graph`` has that many nodes."""
    if (graph.num_sources, graph.num_targets) != (num_sources, num_targets):
        raise ValueError(
            f"'graph' has {graph.num_sources} source and {graph.num_targets} target nodes (expected {num_sources} and "
            f"{num_targets}, from 'x'); build it with the number of rows of 'x'"
        )


def one_weight(edge_weight: Tensor | None, value: Tensor | None) -> Tensor | None:
    """The weights of edges: those given beside them, or those within them."""
    if edge_weight is not None and value is not None:
        raise ValueError("got 'edge_weight' and edges that have weights of their own; give one of them")
    return edge_weight if value is None else value


def weight_of(adjacency: Any, edge_weight: Tensor | None) -> Tensor | None:
    """The weights of the edges as :func:`to_edges` orders them: those given beside them, in the order in which the
    edges were given, or those within them."""
    if not isinstance(adjacency, Graph):
        return one_weight(edge_weight, to_edges(adjacency)[1])
    weight = one_weight(edge_weight, adjacency.weight)
    if edge_weight is None:
        return weight
    return adjacency.to_csr_order(check_edge_weight(edge_weight, adjacency.num_edges))


def identity(adjacency: Any, weights: bool) -> tuple[Any, ...]:
    """The tensors that stand for ``adjacency`` in a cache, with its weights or without."""
    kind = kind_of(adjacency)
    if kind == "graph":
        tensors: tuple[Any, ...] = (adjacency.csr.index,)
        value = adjacency.weight
    elif kind == "torch_sparse":
        tensors, value = (adjacency.storage.col(), adjacency.storage.rowptr()), adjacency.storage.value()
    else:
        tensors, value = (plain(adjacency),), None
    return tensors if value is None or not weights else (*tensors, value)


def as_graph(adjacency: Any, num_nodes: int | tuple[int, int], edge_weight: Tensor | None = None) -> Graph:
    """The graph of ``adjacency``: itself if it is one, else sorted once and then served from the weak cache.

    Weights keep their gradient; those that need none are brought into order once: it is these values that are
    remembered, as a whole graph would keep itself alive where ``adjacency`` is one with the same edges. A given
    :class:`Graph` must fit ``num_nodes``.
    """

    def build() -> Graph:
        edge_index, value = to_edges(adjacency)
        graph = Graph.from_edge_index(edge_index, num_nodes)
        return graph if value is None else graph.with_weight(in_order(graph, value))

    def in_order(graph: Graph, weight: Tensor) -> Tensor:
        return graph.to_csr_order(check_edge_weight(weight, graph.num_edges))

    if isinstance(adjacency, Graph):
        check_num_nodes(adjacency, *sizes_of(num_nodes))
        graph = adjacency
    else:
        graph = cached(identity(adjacency, weights=True), ("graph", num_nodes), build)
    weight = one_weight(edge_weight, None if edge_weight is None else graph.weight)
    if weight is None:
        return graph
    tensors = (weight, *identity(adjacency, weights=False))
    return graph.with_weight(cached(tensors, ("weight in order", num_nodes), lambda: in_order(graph, weight)))
