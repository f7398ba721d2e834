"""Balanced partitions with few cut edges, in torch alone: coarsen, cut, refine.

The scheme of METIS (`Karypis and Kumar, 1998 <https://doi.org/10.1137/S1064827595287997>`_) in steps that treat all
nodes at once: each node proposes to its heaviest neighbor, and pairs that agree become one node; what is left then
pairs up with others that have the same heaviest neighbor. The smallest graph is cut by growing parts node by node;
on the way back, nodes move to where they have more edges, in one direction between parts at a time, so that neighbors
do not swap places. All ties are broken by fixed hashes and numbers, so that a result repeats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qgnn.rng import counter_hash, make_seed

_COARSE_NODES = 30  # of the smallest graph, a part
_TRIALS = 8  # partitions of the smallest graph, of which the best one is kept
_ROUNDS = 24  # of moves a level, at most
_PATIENCE = 4  # rounds without a better cut


@dataclass(frozen=True)
class Level:
    """An undirected graph with weights.

    Args:
        source: One end of each edge ``[E]``; each edge is there in both directions, once.
        target: The other end.
        weight: How many edges it stands for, int64.
        size: How many nodes each node stands for ``[N]``, int64.
    """

    source: Tensor
    target: Tensor
    weight: Tensor
    size: Tensor

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.size.shape[0]

    def cut(self, parts: Tensor) -> int:
        """Weight of the edges between parts, each direction counted."""
        return int(self.weight[parts[self.source] != parts[self.target]].sum())

    def ties(self, parts: Tensor, num_parts: int) -> Tensor:
        """Weight of each node's edges into each part, ``[N, num_parts]``."""
        place = self.source * num_parts + parts[self.target]
        total = torch.zeros(self.num_nodes * num_parts, dtype=torch.int64)
        return total.index_add_(0, place, self.weight).view(self.num_nodes, num_parts)


def merged(source: Tensor, target: Tensor, weight: Tensor, size: Tensor) -> Level:
    """A level without self-loops, whose parallel edges are one."""
    N = size.shape[0]
    kept = source != target
    key, place = torch.unique(source[kept] * N + target[kept], return_inverse=True)
    total = torch.zeros_like(key).index_add_(0, place, weight[kept])
    return Level(key // max(1, N), key % max(1, N), total, size)


def multilevel(level: Level, num_parts: int, capacity: int) -> Tensor:
    """A part for each node, no part with more than ``capacity`` nodes.

    Args:
        level: The graph, each node of size 1.
        num_parts: Number of parts.
        capacity: Times ``num_parts`` at least the number of nodes.
    """
    levels, maps = [level], []
    smallest = max(_COARSE_NODES * num_parts, 100)
    largest = max(1, 3 * level.num_nodes // (2 * smallest))  # size of a coarse node
    while levels[-1].num_nodes > smallest:
        coarse = _coarse_nodes(levels[-1], largest, len(levels))
        num_nodes = int(coarse.max()) + 1
        if num_nodes > 0.95 * levels[-1].num_nodes:
            break
        maps.append(coarse)
        levels.append(_coarser(levels[-1], coarse, num_nodes))
    parts = _best_start(levels[-1], num_parts, capacity)
    for fine, coarse in zip(reversed(levels[:-1]), reversed(maps), strict=True):
        parts = _refined(fine, parts[coarse], num_parts, capacity)
    return parts


def _coarse_nodes(level: Level, largest: int, seed: int) -> Tensor:
    """The coarse node of each node, which takes at most two of them, of size ``largest`` together."""
    N, node = level.num_nodes, torch.arange(level.num_nodes)
    mate = node.clone()
    ends = torch.minimum(level.source, level.target) * N + torch.maximum(level.source, level.target)
    tie = counter_hash(ends, make_seed(seed)).long() & 0x7FFFFFFF
    rank = level.weight.clamp(max=(1 << 31) - 1) << 31 | tie  # the same from both ends
    fits = level.size[level.source] + level.size[level.target] <= largest
    for _ in range(6):
        free = mate == node
        wanted = _heaviest(level, rank, fits & free[level.source] & free[level.target])
        agreed = (wanted >= 0) & (wanted[wanted.clamp_min(0)] == node)
        if not agreed.any():
            break
        mate = torch.where(agreed, wanted, mate)
    # leaves of a hub, of which it takes one: pairs of those that have the same heaviest neighbor, or none
    left = ((mate == node) & (2 * level.size <= largest)).nonzero().squeeze(1)
    neighbor = _heaviest(level, rank, torch.ones_like(fits))[left]
    neighbor, order = torch.sort(neighbor, stable=True)
    left = left[order]
    within = torch.arange(len(left)) - torch.searchsorted(neighbor, neighbor)
    first = (within % 2 == 0).nonzero().squeeze(1)
    first = first[first + 1 < len(left)]
    first = first[neighbor[first] == neighbor[first + 1]]
    mate[left[first]], mate[left[first + 1]] = left[first + 1], left[first]
    return torch.unique(torch.minimum(node, mate), return_inverse=True)[1]


def _heaviest(level: Level, rank: Tensor, chosen: Tensor) -> Tensor:
    """Each node's neighbor by the chosen edge of the highest rank; -1 without one."""
    source, target, rank = level.source[chosen], level.target[chosen], rank[chosen]
    none = torch.full((level.num_nodes,), -1)
    best = none.scatter_reduce(0, source, rank, "amax")
    first = rank == best[source]
    return none.scatter_reduce(0, source[first], target[first], "amax")


def _coarser(level: Level, coarse: Tensor, num_nodes: int) -> Level:
    size = torch.zeros(num_nodes, dtype=torch.int64).index_add_(0, coarse, level.size)
    return merged(coarse[level.source], coarse[level.target], level.weight, size)


def _best_start(level: Level, num_parts: int, capacity: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    candidates = []
    for _ in range(_TRIALS):
        order = torch.randperm(level.num_nodes, generator=generator)
        parts = _refined(level, _grown(level, num_parts, order), num_parts, capacity)
        overfull = int((_sizes(level, parts, num_parts) - capacity).clamp_min(0).sum())
        candidates.append((overfull, level.cut(parts), parts))
    return min(candidates, key=lambda candidate: candidate[:2])[2]


def _grown(level: Level, num_parts: int, order: Tensor) -> Tensor:
    """Parts that grow one after the other, each from the first node in ``order`` that is left, by the node that has the
    most edges into it; the last part takes the rest."""
    parts = torch.full((level.num_nodes,), num_parts - 1, dtype=torch.int64)
    priority = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)).flip(0))
    start = torch.searchsorted(level.source, torch.arange(level.num_nodes + 1)).tolist()
    left, total = torch.ones(level.num_nodes, dtype=torch.bool), int(level.size.sum())
    for part in range(num_parts - 1):
        room = total // (num_parts - part)
        ties = torch.zeros_like(priority)
        while room > 0 and left.any():
            score = (ties * len(order) + priority).masked_fill(~left, -1)
            node = int(score.argmax())
            size = int(level.size[node])
            parts[node], left[node] = part, False
            room, total = room - size, total - size
            edges = slice(start[node], start[node + 1])
            ties.index_add_(0, level.target[edges], level.weight[edges])
    return parts


def _refined(level: Level, parts: Tensor, num_parts: int, capacity: int) -> Tensor:
    """Fewer cut edges by moves of nodes, after those that no part is too large."""
    best = parts = _balanced(level, parts, num_parts, capacity)
    best_cut, waited = level.cut(parts), 0
    for turn in range(_ROUNDS):
        ties, room = level.ties(parts, num_parts), capacity - _sizes(level, parts, num_parts)
        own = ties.gather(1, parts[:, None]).squeeze(1)
        part = torch.arange(num_parts)
        there = (part > parts[:, None]) if turn % 2 == 0 else (part < parts[:, None])
        there &= level.size[:, None] <= room
        gain, to = ties.masked_fill(~there, -1).max(1)
        gain = gain - own
        moves = ((gain > 0) & there.any(1)).nonzero().squeeze(1)
        moves = _within(moves, to[moves], -gain[moves], level.size, room)
        parts = parts.clone().index_copy_(0, moves, to[moves])
        cut = level.cut(parts)
        if cut < best_cut:
            best, best_cut, waited = parts, cut, 0
        else:
            waited += 1
        if waited == _PATIENCE:
            break
    return best


def _balanced(level: Level, parts: Tensor, num_parts: int, capacity: int) -> Tensor:
    """Nodes leave parts that are too large for others with room, those first that lose the fewest edges."""
    while True:
        room = capacity - _sizes(level, parts, num_parts)
        if int(room.min()) >= 0:
            return parts
        ties = level.ties(parts, num_parts)
        loss, to = (ties.gather(1, parts[:, None]) - ties).masked_fill(level.size[:, None] > room, 1 << 62).min(1)
        moves = ((room[parts] < 0) & (loss < 1 << 62)).nonzero().squeeze(1)
        moves = _within(moves, parts[moves], loss[moves], level.size, -room, over=True)
        moves = _within(moves, to[moves], loss[moves], level.size, room)
        if not len(moves):  # nodes that stand for many fit nowhere; those that they stand for will
            return parts
        parts = parts.clone().index_copy_(0, moves, to[moves])


def _within(moves: Tensor, group: Tensor, cost: Tensor, size: Tensor, limit: Tensor, over: bool = False) -> Tensor:
    """Of nodes in groups, the cheapest ones that fit a limit of their group; with ``over`` those that reach it."""
    order = torch.argsort(cost, stable=True)
    order = order[torch.argsort(group[order], stable=True)]
    moves, group = moves[order], group[order]
    total = size[moves].cumsum(0)
    before = torch.cat([total.new_zeros(1), total])[torch.searchsorted(group, group)]
    filled = total - before
    return moves[(filled - size[moves] < limit[group]) if over else (filled <= limit[group])]


def _sizes(level: Level, parts: Tensor, num_parts: int) -> Tensor:
    return torch.zeros(num_parts, dtype=torch.int64).index_add_(0, parts, level.size)
