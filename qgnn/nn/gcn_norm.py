"""Self-loops and symmetric normalization, with PyG's results and finite gradients.

What depends on the edges alone (:class:`GCNStructure`) is made once a graph. What depends on their weights is cheap,
needs no synchronization and is differentiable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from qgnn.edge_checks import check_edge_index, check_edge_weight
from qgnn.graph import Graph, check_num_nodes, identity, kind_of, to_edges, weight_of
from qgnn.halo_graph import HaloGraph
from qgnn.weak_cache import cached

# What becomes of self-loops that a graph has already, by the kind of its edges, as in PyG: the weight of (the last copy
# of) each moves into the new self-loop, or is added to it, or is dropped.
_LOOP_RULE = {"edge_index": "move", "graph": "move", "sparse matrix": "add", "torch_sparse": "drop"}


def gcn_norm(graph: Graph, weight: Tensor) -> Tensor:
    r"""Symmetric normalization :math:`w_{ji} / \sqrt{d_j d_i}`, :math:`d_i` the sum of the weights into :math:`i`.

    A node of degree 0 gets factor 0, with a finite gradient: the power is taken of 1 in its place. A negative degree
    gives NaN, in the rows that it reaches. Sums are taken in CSR order, so they repeat bit for bit.

    Args:
        graph: The edges.
        weight: Their weights in CSR order, ``[E]``.
    """
    factor = _factor(_degree(graph, weight))
    return factor.index_select(0, graph.csr.index) * weight * factor.index_select(0, graph.target)


def _degree(graph: Graph, weight: Tensor) -> Tensor:
    return torch.segment_reduce(weight, "sum", offsets=graph.csr.indptr, initial=0, unsafe=True)


def _factor(degree: Tensor) -> Tensor:
    isolated = degree == 0
    return degree.masked_fill(isolated, 1.0).pow(-0.5).masked_fill(isolated, 0.0)


def normalized_graph(
    adjacency: Any,
    num_nodes: int,
    edge_weight: Tensor | None,
    dtype: torch.dtype,
    *,
    improved: bool = False,
    add_self_loops: bool = True,
    normalize: bool = True,
    flow: str = "source_to_target",
    mean: bool = False,
) -> Graph:
    """The graph that a GCN layer aggregates over, with its final weights; remembered while its tensors live unchanged.

    Args:
        adjacency: Edges in any accepted form.
        num_nodes: Number of nodes ``N``.
        edge_weight: Weights of the given edges.
        dtype: Type of the rows; weights are fp32, or float64 for float64 rows.
        improved: Whether self-loops weigh 2; as in PyG, on graphs with edge weights only.
        add_self_loops: Whether to add self-loops.
        normalize: Whether to normalize.
        flow: PyG's direction of messages.
        mean: Whether the layer takes a mean, which counts edges.
    """
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    if isinstance(adjacency, HaloGraph):
        if edge_weight is not None or flow != "source_to_target":
            raise ValueError(
                f"'normalized_graph' expects the weights of {adjacency!r} within it, and flow='source_to_target' (got "
                f"{'no ' if edge_weight is None else ''}'edge_weight' and flow={flow!r})"
            )
        check_num_nodes(adjacency, num_nodes, num_nodes)
        options = (dtype, improved, add_self_loops, normalize)
        return adjacency.remembered(("gcn", *options), lambda: _normalized_parts(adjacency, *options))
    key = (num_nodes, add_self_loops, flow)
    as_given = edge_weight is None and not normalize and not add_self_loops and flow == "source_to_target"
    if isinstance(adjacency, Graph):
        check_num_nodes(adjacency, num_nodes, num_nodes)
        if as_given:
            return adjacency

    def structure() -> GCNStructure:
        # A mean counts edges, so there the replaced self-loops really have to go.
        fixed_shape = torch.compiler.is_compiling() and not mean
        return GCNStructure(adjacency, num_nodes, add_self_loops, flow, fixed_shape)

    def weighted() -> Graph:
        edges = cached(identity(adjacency, weights=False), ("gcn structure", *key), structure)
        return edges.weighted(weight_of(adjacency, edge_weight), dtype, improved, normalize)

    tensors = identity(adjacency, weights=True) + (() if edge_weight is None else (edge_weight,))
    return cached(tensors, ("gcn", dtype, improved, normalize, *key), weighted)


def _normalized_parts(
    graph: HaloGraph, dtype: torch.dtype, improved: bool, add_self_loops: bool, normalize: bool
) -> HaloGraph:
    """Self-loops lie within a part; degrees of the halo come from where its nodes are."""
    structure = GCNStructure(graph.inner, graph.num_targets, add_self_loops)
    inner, halo = structure.weighted(graph.inner.weight, dtype, improved, normalize=False), graph.halo
    if not normalize:
        return graph.with_parts(inner, halo)
    weights = [_weight_of(part, dtype) for part in (inner, halo)]
    factor = _factor(_degree(inner, weights[0]) + _degree(halo, weights[1]))
    halo_factor = graph.exchange(factor.unsqueeze(1), exact=True)().squeeze(1)

    def normalized(part: Graph, weight: Tensor, source_factor: Tensor) -> Graph:
        source, target = source_factor.index_select(0, part.csr.index), factor.index_select(0, part.target)
        return part.with_weight(source * weight * target)

    return graph.with_parts(normalized(inner, weights[0], factor), normalized(halo, weights[1], halo_factor))


def _weight_of(graph: Graph, dtype: torch.dtype) -> Tensor:
    """Weights in CSR order, ones where there are none."""
    if graph.weight is None:
        return torch.ones(graph.num_edges, dtype=dtype, device=graph.device)
    return graph.weight.to(dtype)


class GCNStructure:
    """The edges of a GCN layer, sorted: the given ones and, if wanted, one self-loop a node.

    Args:
        adjacency: Edges in any accepted form.
        num_nodes: Number of nodes ``N``.
        add_self_loops: Whether to add self-loops.
        flow: PyG's direction of messages.
        fixed_shape: Leave self-loops that are replaced in the list with weight 0, so that no shape depends on data.
    """

    def __init__(
        self,
        adjacency: Any,
        num_nodes: int,
        add_self_loops: bool = True,
        flow: str = "source_to_target",
        fixed_shape: bool = False,
    ) -> None:
        edge_index, _ = to_edges(adjacency)
        check_edge_index(edge_index, num_nodes, num_nodes)
        if flow == "target_to_source":
            edge_index = edge_index.flip(0)
        self.num_given = edge_index.shape[1]
        self.rule = _LOOP_RULE[kind_of(adjacency)] if add_self_loops else None
        if add_self_loops:
            is_loop = edge_index[0] == edge_index[1]
            node = torch.arange(num_nodes, dtype=edge_index.dtype, device=edge_index.device)
            if fixed_shape:
                self.kept = None
                self.is_loop, self.loop_node = is_loop, torch.where(is_loop, edge_index[0], num_nodes).long()
            else:
                self.kept, self.loops = (~is_loop).nonzero().squeeze(1), is_loop.nonzero().squeeze(1)
                self.loop_node = edge_index[0, self.loops].long()
                edge_index = edge_index[:, self.kept]
            edge_index = torch.cat([edge_index, node.expand(2, -1)], dim=1)
        self.graph = Graph.from_edge_index(edge_index, num_nodes)

    def weighted(self, edge_weight: Tensor | None, dtype: torch.dtype, improved: bool, normalize: bool) -> Graph:
        """The graph with its final weights, which carry the gradient of the given ones.

        Args:
            edge_weight: Weights of the given edges, in their order; ``None`` means all ones.
            dtype: Type of the result's weights.
            improved: Whether a new self-loop weighs 2; without edge weights PyG gives it 1 all the same.
            normalize: Whether to normalize.
        """
        fill_value = 2.0 if improved and edge_weight is not None else 1.0
        if edge_weight is not None:
            edge_weight = check_edge_weight(edge_weight, self.num_given).to(dtype)
        elif not normalize:
            return self.graph
        else:
            edge_weight = torch.ones(self.num_given, dtype=dtype, device=self.graph.device)
        if self.rule is not None:
            edge_weight = self._with_loops(edge_weight, fill_value)
        weight = self.graph.to_csr_order(edge_weight)
        return self.graph.with_weight(gcn_norm(self.graph, weight) if normalize else weight)

    def _with_loops(self, edge_weight: Tensor, fill_value: float) -> Tensor:
        loop_weight = edge_weight.new_full((self.graph.num_targets,), fill_value)
        if self.kept is None:  # everything that is no self-loop writes to a spare slot
            slots, moved, kept_weight = pad(loop_weight, (0, 1)), edge_weight, edge_weight.masked_fill(self.is_loop, 0)
        else:
            slots, moved, kept_weight = loop_weight, edge_weight[self.loops], edge_weight[self.kept]
        if self.rule == "move":
            slots = slots.scatter(0, self.loop_node, moved)
        elif self.rule == "add":
            slots = slots.index_add(0, self.loop_node, moved)
        return torch.cat([kept_weight, slots[: self.graph.num_targets]])
