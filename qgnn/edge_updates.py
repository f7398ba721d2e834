"""Sorted edges with some taken out or put in: copied once, where a rebuild would sort them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qgnn.adjacency import Adjacency, sort_by
from qgnn.edge_checks import INT32_MAX, check_edge_index, check_edge_weight, index_dtype, mask_of, plain


class SortedEdges(NamedTuple):
    """What a :class:`qgnn.Graph` knows of its edges.

    Args:
        csr: Edges sorted by target.
        csc: Those sorted by source, if that order is known.
        num_sources: Number of source nodes.
        weight: Weights in CSR order, if there are any.
    """

    csr: Adjacency
    csc: Adjacency | None
    num_sources: int
    weight: Tensor | None


def taken_out(edges: SortedEdges, remove: Tensor | None, remove_nodes: Tensor | None) -> SortedEdges:
    """Without some edges and some nodes; what is left is numbered anew, in its order."""
    csr, csc, num_sources, weight = edges
    keep = torch.ones_like(csr.index, dtype=torch.bool)  # in CSR order
    if remove is not None:
        keep &= (~mask_of("remove", remove, keep.shape[0]).to(keep.device)).index_select(0, csr.order)
    if remove_nodes is None:
        return _without_edges(edges, keep)
    if num_sources != csr.num_rows:
        raise ValueError(
            f"'remove_nodes' expects a graph with one set of nodes (got {num_sources} sources, {csr.num_rows} targets)"
        )
    alive = ~mask_of("remove_nodes", remove_nodes, num_sources).to(keep.device)
    keep &= alive.index_select(0, csr.index) & alive.repeat_interleave(csr.indptr.diff(), output_size=keep.shape[0])
    csr, csc, _, weight = _without_edges(edges, keep)
    places = _places(alive)
    csr, csc = _without_rows(csr, alive, places), None if csc is None else _without_rows(csc, alive, places)
    return SortedEdges(csr, csc, csr.num_rows, weight)


def grown(edges: SortedEdges, num_sources: int, num_targets: int) -> SortedEdges:
    """The same edges among no fewer nodes."""
    csr, csc, before, weight = edges
    if num_sources < before or num_targets < csr.num_rows:
        raise ValueError(
            f"'num_nodes' expects no fewer nodes than before (got {num_sources} sources and {num_targets} targets, "
            f"before {before} and {csr.num_rows}); take nodes out with 'remove_nodes'"
        )

    def with_rows(adjacency: Adjacency, num_rows: int) -> Adjacency:
        more = adjacency.indptr[-1:].expand(num_rows - adjacency.num_rows)
        return Adjacency(torch.cat([adjacency.indptr, more]), adjacency.index, adjacency.order)

    csc = None if csc is None else with_rows(csc, num_sources)
    return SortedEdges(with_rows(csr, num_targets), csc, num_sources, weight)


def put_in(edges: SortedEdges, add: Tensor | None, add_weight: Tensor | None) -> SortedEdges:
    """More edges, given behind the others."""
    csr, csc, num_sources, weight = edges
    if add is None:
        raise ValueError("'add_weight' expects edges to 'add' (got none)")
    add = plain(add)
    check_edge_index(add, num_sources, csr.num_rows)
    if (add_weight is None) != (weight is None):
        raise ValueError(
            f"'add_weight' expects weights of new edges where the others have some (got a graph "
            f"{'without' if weight is None else 'with'} weights)"
        )
    num_edges, num_new = csr.index.shape[0], add.shape[1]
    dtype = index_dtype(num_sources, csr.num_rows, num_edges + num_new)
    source, target = add.to(csr.index.device, dtype)
    new = sort_by(target, source, csr.num_rows)
    target = target.index_select(0, new.order)
    places = _Places(csr.indptr[1:].index_select(0, target), num_edges)  # behind those of the same target
    merged = places.merged(csr, Adjacency(new.indptr, new.index, new.order + num_edges))
    if weight is not None and add_weight is not None:
        weight = places.insert(weight, check_edge_weight(add_weight, num_new).to(weight).index_select(0, new.order))
    if csc is not None:
        csc = _with_new(csc, new.index, target, places)
    return SortedEdges(merged, csc, num_sources, weight)


def as_rebuilt(edges: SortedEdges) -> SortedEdges:
    """With indices of the type that so many nodes and edges need."""
    csr, csc, num_sources, weight = edges
    dtype = index_dtype(num_sources, csr.num_rows, csr.index.shape[0])
    return SortedEdges(csr.to(dtype), None if csc is None else csc.to(dtype), num_sources, weight)


class _Places:
    """Where old and new edges go, if new ones stand before the old ones numbered ``at``, ascending.

    Args:
        at: Of each new edge.
        num_old: Number of old edges.
    """

    def __init__(self, at: Tensor, num_old: int) -> None:
        self.new = at.long() + torch.arange(len(at), device=at.device)
        is_new = torch.zeros(num_old + len(at), dtype=torch.bool, device=at.device)
        is_new[self.new] = True
        self.old = (~is_new).nonzero().view(-1)

    def insert(self, values: Tensor, new: Tensor) -> Tensor:
        """Values of the old edges with new ones among them, in the type of these."""
        result = new.new_empty(len(self.old) + len(self.new))
        return result.index_copy_(0, self.old, values.to(new.dtype)).index_copy_(0, self.new, new)

    def merged(self, old: Adjacency, new: Adjacency) -> Adjacency:
        """All edges."""
        indptr = (old.indptr + new.indptr).to(new.indptr.dtype)
        return Adjacency(indptr, self.insert(old.index, new.index), self.insert(old.order, new.order))


def _with_new(csc: Adjacency, source: Tensor, target: Tensor, places: _Places) -> Adjacency:
    """Edges sorted by source, with new ones that are given in CSR order, where ``places`` has them."""
    new = sort_by(source, target, csc.num_rows)
    num_edges = len(places.old) + len(places.new)
    old_order, new_order = places.old.index_select(0, csc.order), places.new.index_select(0, new.order)
    row = torch.arange(csc.num_rows, device=source.device).repeat_interleave(
        csc.indptr.diff(), output_size=csc.index.shape[0]
    )
    # Those of a source stand in CSR order: the pair of both as one number ascends.
    keys = source.index_select(0, new.order).long().mul_(num_edges).add_(new_order)
    at = torch.searchsorted(row.mul_(num_edges).add_(old_order), keys)
    moved = Adjacency(csc.indptr, csc.index, old_order)
    return _Places(at, csc.index.shape[0]).merged(moved, Adjacency(new.indptr, new.index, new_order.to(source.dtype)))


def _without_edges(edges: SortedEdges, keep: Tensor) -> SortedEdges:
    """Those of the edges that ``keep`` has in CSR order."""
    csr, csc, num_sources, weight = edges
    kept_given = torch.empty_like(keep).index_copy_(0, csr.order.long(), keep)
    places = _places(keep)
    kept = keep.nonzero().view(-1)
    weight = None if weight is None else weight.index_select(0, kept)
    csr = _some(csr, kept, places, _places(kept_given))
    if csc is not None:
        of_csc = keep.index_select(0, csc.order)
        csc = _some(csc, of_csc.nonzero().view(-1), _places(of_csc), places)
    return SortedEdges(csr, csc, num_sources, weight)


def _some(adjacency: Adjacency, kept: Tensor, places: Tensor, places_before: Tensor) -> Adjacency:
    """The edges ``kept``, given the places that all would have among these, here and where they stood before."""
    indptr = torch.cat([places.new_full((1,), -1), places]).index_select(0, adjacency.indptr).add_(1)
    order = places_before.index_select(0, adjacency.order.index_select(0, kept))
    return Adjacency(indptr, adjacency.index.index_select(0, kept), order)


def _without_rows(adjacency: Adjacency, alive: Tensor, places: Tensor) -> Adjacency:
    """Only rows that are alive, which no edge leaves."""
    indptr = torch.cat([adjacency.indptr[:-1][alive], adjacency.indptr[-1:]])
    return Adjacency(indptr, places.index_select(0, adjacency.index), adjacency.order)


def _places(keep: Tensor) -> Tensor:
    """The place of each that is kept among those."""
    return keep.cumsum(0, dtype=torch.int64 if len(keep) > INT32_MAX else torch.int32).sub_(1)
