"""Sorted edges with some taken out or put in: copied once, where a rebuild would sort them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qgnn import ops
from qgnn.adjacency import Adjacency
from qgnn.edge_checks import check_constant, check_edge_index, check_edge_weight, index_dtype, mask_of, plain


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
    keep = torch.ones_like(csr.index, dtype=torch.bool)  # of the given edges
    if remove is not None:
        keep = mask_of("remove", remove, len(keep)).to(keep.device).logical_not()
    if remove_nodes is None:
        return _without_edges(edges, keep)
    if num_sources != csr.num_rows:
        raise ValueError(
            f"'remove_nodes' expects a graph with one set of nodes (got {num_sources} sources, {csr.num_rows} targets)"
        )
    dead = mask_of("remove_nodes", remove_nodes, num_sources).to(keep.device)
    if csc is None:
        leaving = dead.index_select(0, csr.index).nonzero().view(-1)
    else:
        leaving = csc.order.index_select(0, _edges_of(csc, dead))
    keep[csr.order.index_select(0, torch.cat([leaving, _edges_of(csr, dead)])).long()] = False
    alive = dead.logical_not()
    csr, csc, _, weight = _without_edges(edges, keep, alive.cumsum(0).sub_(1).to(csr.index.dtype))
    csr, csc = _of_rows(csr, alive), None if csc is None else _of_rows(csc, alive)
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
    csr, csc, _, weight = _with_indices(edges, index_dtype(num_sources, csr.num_rows, num_edges + num_new))
    source, target = add.to(csr.index.device, csr.index.dtype)
    target, order = torch.sort(target, stable=True)
    source = source.index_select(0, order)
    if weight is not None and add_weight is not None:
        add_weight = check_constant(check_edge_weight(add_weight, num_new)).to(weight).index_select(0, order)
    merged, weight = _merge(csr, weight, target, source, order + num_edges, add_weight)
    if csc is not None:
        more = merged.indptr - csr.indptr  # new edges of the targets before each: they stand behind the others
        place = torch.arange(num_new, device=order.device) + csr.indptr.index_select(0, target + 1)
        source, order = torch.sort(source, stable=True)
        moved = Adjacency(csc.indptr, csc.index, csc.order + more.index_select(0, csc.index))
        csc, _ = _merge(moved, None, source, target.index_select(0, order), place.index_select(0, order), None)
    return SortedEdges(merged, csc, num_sources, weight)


def as_rebuilt(edges: SortedEdges) -> SortedEdges:
    """With indices of the type that so many nodes and edges need."""
    csr, _, num_sources, _ = edges
    return _with_indices(edges, index_dtype(num_sources, csr.num_rows, csr.index.shape[0]))


def _with_indices(edges: SortedEdges, dtype: torch.dtype) -> SortedEdges:
    csr, csc, num_sources, weight = edges
    return SortedEdges(csr.to(dtype), None if csc is None else csc.to(dtype), num_sources, weight)


def _merge(
    old: Adjacency,
    weight: Tensor | None,
    new_row: Tensor,
    new_index: Tensor,
    new_order: Tensor,
    new_weight: Tensor | None,
) -> tuple[Adjacency, Tensor | None]:
    """Edges with new ones among them, and the weights of all."""
    new = new_row, new_index, new_order, new_weight
    *merged, all_weights = ops.adjacency_merge(old.indptr, old.index, old.order, weight, *new)
    return Adjacency(*merged), None if weight is None else all_weights


def _without_edges(edges: SortedEdges, keep: Tensor, number: Tensor | None = None) -> SortedEdges:
    """Those that ``keep`` has of the given edges, between nodes that get another ``number``."""
    csr, csc, num_sources, weight = edges
    num_kept = int(keep.count_nonzero())

    def left(old: Adjacency, keep: Tensor, weight: Tensor | None) -> tuple[Adjacency, Tensor, Tensor]:
        *new, kept, left_weight = ops.adjacency_filter(old.indptr, old.index, old.order, keep, weight, number, num_kept)
        return Adjacency(*new), kept, left_weight

    csr, kept, left_weight = left(csr, keep, weight)
    csc = None if csc is None else left(csc, kept, None)[0]
    return SortedEdges(csr, csc, num_sources, None if weight is None else left_weight)


def _edges_of(adjacency: Adjacency, rows: Tensor) -> Tensor:
    """The places of the edges of some rows, given as a mask."""
    first, count = (t[rows].long() for t in (adjacency.indptr[:-1], adjacency.indptr.diff()))
    offset = first - (count.cumsum(0) - count)
    return offset.repeat_interleave(count).add_(torch.arange(int(count.sum()), device=rows.device))


def _of_rows(adjacency: Adjacency, alive: Tensor) -> Adjacency:
    """Only rows that are alive; the others have no edges."""
    indptr = torch.cat([adjacency.indptr[:-1][alive], adjacency.indptr[-1:]])
    return Adjacency(indptr, adjacency.index, adjacency.order)
