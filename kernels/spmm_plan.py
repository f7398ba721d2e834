"""How an aggregation over a CSR graph is cut into work items of similar size.

An item is a group of consecutive rows, or one chunk of the edges of a hub, a row of more than ``cap`` edges. A group
has at most 16 rows and fewer than ``5 * cap`` edges: it ends at multiples of 16, at both sides of a hub, and where the
number of edges before a row passes a multiple of ``4 * cap``. A chunk has at most ``cap`` edges. Its sum goes to a slot
of a buffer, and a second kernel adds the slots of each hub in order.

A plan is made on the device: the sizes of its tensors depend on N and E alone, and how many of their rows are in use is
itself a tensor. Programs walk the items in steps of ``num_programs``, so no program is started for a row without use.
Chunks come first, for they are the longest.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP_ROWS = 16
_MIN_CAP, _MAX_CAP = 256, 4096
_GROUP_EDGES = 4  # in units of cap
_MAX_HUB_PROGRAMS = 1024


class Plan(NamedTuple):
    """The work items of a graph.

    Args:
        items: first row, number of rows (or minus one minus the slot of a chunk), first edge, edge behind the last one.
        hubs: row, first slot, slot behind the last one.
        counts: how many items and hubs there are.
        num_slots: slots to allocate.
        num_programs: programs that share the items.
        num_hub_programs: programs that share the hubs; 0 where no row can be a hub.

    Shapes:
        ``items [I, 4]``, ``hubs [J, 3]``, ``counts [2]``, of the type of the graph's ``indptr``
    """

    items: Tensor
    hubs: Tensor
    counts: Tensor
    num_slots: int
    num_programs: int
    num_hub_programs: int


def default_cap(num_rows: int, num_edges: int) -> int:
    """Rows of more edges are hubs. From 8 times the mean degree on, slots are at most a quarter as many as rows. Where
    rows are so long that this would leave few programs the work, slots are few beside edges: 1 in 2048 at most."""
    ample = 1 << max(0, 8 * num_edges // max(1, num_rows) - 1).bit_length()
    return min(max(_MIN_CAP, ample), _MAX_CAP)


def make_plan(indptr: Tensor, num_edges: int, *, cap: int | None = None) -> Plan:
    """The work items of the graph of ``indptr``, without waiting for the device."""
    N, E, device = indptr.numel() - 1, num_edges, indptr.device
    cap = default_cap(N, E) if cap is None else cap
    max_hubs = E // (cap + 1)
    max_slots = E // cap + max_hubs if max_hubs else 0
    typical_groups = triton.cdiv(N, GROUP_ROWS) + E // (_GROUP_EDGES * cap)
    max_items = max_slots + typical_groups + max_hubs
    if N == 0:
        return Plan(indptr.new_empty(0, 4), indptr.new_empty(0, 3), indptr.new_zeros(2), 0, 0, 0)

    start, stop = indptr[:-1].long(), indptr[1:].long()
    degree = stop - start
    is_hub = degree > cap
    cut = (torch.arange(N, device=device) % GROUP_ROWS == 0) | is_hub
    section = start // (_GROUP_EDGES * cap)
    cut[1:] |= is_hub[:-1] | (section[1:] != section[:-1])
    # Counts up to and including each row; the row of the k-th of something is where its count reaches k.
    cuts, groups, hubs = cut.cumsum(0), (cut & ~is_hub).cumsum(0), is_hub.cumsum(0)
    chunks = torch.where(is_hub, (degree + cap - 1) // cap, 0)
    slots = chunks.cumsum(0)

    item = torch.arange(max_items, device=device)
    is_chunk = item < slots[-1]
    group_row = torch.searchsorted(groups, item - slots[-1] + 1)
    row = torch.where(is_chunk, torch.searchsorted(slots, item, right=True), group_row).clamp_(max=N - 1)
    next_row = torch.searchsorted(cuts, cuts[row] + 1)
    first = start[row] + torch.where(is_chunk, (item - slots[row] + chunks[row]) * cap, 0)
    last = torch.where(is_chunk, torch.minimum(first + cap, stop[row]), stop[next_row - 1])
    num_rows = torch.where(is_chunk, -1 - item, next_row - row)
    is_item = item < slots[-1] + groups[-1]

    hub_row = torch.searchsorted(hubs, torch.arange(1, max_hubs + 1, device=device)).clamp_(max=N - 1)
    return Plan(
        items=(torch.stack([row, num_rows, first, last], 1) * is_item[:, None]).to(indptr.dtype),
        hubs=torch.stack([hub_row, slots[hub_row] - chunks[hub_row], slots[hub_row]], 1).to(indptr.dtype),
        counts=torch.stack([slots[-1] + groups[-1], hubs[-1]]).to(indptr.dtype),
        num_slots=max_slots,
        num_programs=typical_groups + max_slots // 4,
        num_hub_programs=min(max_hubs, _MAX_HUB_PROGRAMS),
    )


@triton.jit
def load_item(items_ptr, item):
    """``(first row, number of rows, slot or -1, first edge, edge behind the last one)`` of an item.

    The rows of a chunk are one."""
    row = tl.load(items_ptr + item * 4)
    num_rows = tl.load(items_ptr + item * 4 + 1)
    slot = tl.where(num_rows < 0, -1 - num_rows, -1)
    first = tl.load(items_ptr + item * 4 + 2)
    last = tl.load(items_ptr + item * 4 + 3)
    return row, tl.where(num_rows < 0, 1, num_rows), slot, first, last
