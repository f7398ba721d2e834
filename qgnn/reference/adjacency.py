"""Sorted edges with some taken out, or with others put in among them: what a stable sort of the changed edges gives.

Edges are sorted by row and, within a row, by ``order``: the place of each before the sort. So they stay.
"""

from __future__ import annotations

import torch
from torch import Tensor


def adjacency_filter(
    indptr: Tensor,
    index: Tensor,
    order: Tensor,
    keep: Tensor,
    *,
    num_kept: int,
    weight: Tensor | None = None,
    number: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Sorted edges without some of them.

    Args:
        indptr: First edge of each row, ``[N + 1]``.
        index: The other end of each edge, ``[E]``.
        order: The place of each edge before the sort, ``[E]``.
        keep: Which edges stay, by that place, bool ``[E]``.
        num_kept: How many these are.
        weight: Weight of each edge, ``[E]``.
        number: What the other ends are called in the result, ``[S]``.

    Returns:
        ``indptr [N + 1]``, ``index [num_kept]`` and ``order [num_kept]``, the place of each edge among those that stay,
        in the type of ``indptr``; which of the sorted edges they are, bool ``[E]``; and their weights, ``[num_kept]``.
    """
    kept = keep.index_select(0, order)
    stood = kept.nonzero_static(size=num_kept).view(-1)  # nonzero() would wait for the device
    before, given_before = (torch.cat([mask.new_zeros(1), mask]).cumsum(0) for mask in (kept, keep))
    pointers = before.index_select(0, indptr).to(indptr.dtype)
    left = index[stood] if number is None else number.index_select(0, index[stood])
    left_order = given_before.index_select(0, order[stood]).to(indptr.dtype)
    return pointers, left.to(indptr.dtype), left_order, kept, None if weight is None else weight[stood]


def adjacency_merge(
    indptr: Tensor,
    index: Tensor,
    order: Tensor,
    new_row: Tensor,
    new_index: Tensor,
    new_order: Tensor,
    *,
    weight: Tensor | None = None,
    new_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Sorted edges with others among them.

    Args:
        indptr: First edge of each row, ``[N + 1]``.
        index: The other end of each edge, ``[E]``.
        order: The place of each edge before the sort, from 0 to E + A - 1, ``[E]``.
        new_row: The row of each new edge, ascending, ``[A]``.
        new_index: Its other end, ``[A]``.
        new_order: Its place, which no other edge has and which ascends within a row, ``[A]``.
        weight: Weight of each edge, ``[E]``.
        new_weight: Weight of each new edge, ``[A]``.

    Returns:
        ``indptr [N + 1]``, ``index [E + A]`` and ``order [E + A]`` of all edges in the type of ``indptr``, and their
        weights, ``[E + A]``, in the type of ``weight``.
    """
    num_edges, num_new = len(index), len(new_row)
    rows = torch.arange(len(indptr), device=indptr.device)
    row = rows[:-1].repeat_interleave(indptr.diff(), output_size=num_edges)
    # The pair of row and order as one number ascends.
    key, new_key = (r.long() * (num_edges + num_new) + o for r, o in ((row, order), (new_row, new_order)))
    to = torch.searchsorted(new_key, key) + torch.arange(num_edges, device=row.device)
    new_to = torch.searchsorted(key, new_key) + torch.arange(num_new, device=row.device)

    def merged(old: Tensor, new: Tensor) -> Tensor:
        return old.new_empty(num_edges + num_new).index_copy_(0, to, old).index_copy_(0, new_to, new.to(old.dtype))

    pointers = (indptr + torch.searchsorted(new_row.contiguous(), rows.to(new_row.dtype))).to(indptr.dtype)
    index, order = (merged(old.to(indptr.dtype), new) for old, new in ((index, new_index), (order, new_order)))
    return pointers, index, order, None if weight is None or new_weight is None else merged(weight, new_weight)
