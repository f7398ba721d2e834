"""Small deterministic graphs that break kernels: the degenerate list that every primitive and layer is tested on.

``GRAPHS[name]`` is ``(edge_index, num_nodes)`` and ``RECTANGULAR[name]`` is ``(edge_index, num_source, num_target)``.
An edge runs from ``edge_index[0]`` (source) to ``edge_index[1]`` (target). All stay under 200 nodes and 800 edges:
Triton's interpreter takes about 0.6 ms an edge. Copy a tensor before changing it: the entries are shared.
"""

import torch
from torch import Tensor


def _edges(*pairs: tuple[int, int]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t().contiguous()


def _random(num_source: int, num_target: int, num_edges: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(num_source, (num_edges,), generator=generator)
    target = torch.randint(num_target, (num_edges,), generator=generator)
    return torch.stack([source, target])


def _power_law(num_nodes: int, num_edges: int, seed: int) -> Tensor:
    """Both ends drawn with probability ~ rank^-0.9, unsorted, duplicates and self-loops included."""
    generator = torch.Generator().manual_seed(seed)
    probability = torch.arange(1, num_nodes + 1, dtype=torch.float64).pow(-0.9)
    ends = torch.multinomial(probability, 2 * num_edges, replacement=True, generator=generator)
    return ends.reshape(2, num_edges)


def _hub(num_nodes: int) -> Tensor:
    """Node 0 receives from every other node twice over and sends to three: one row far longer than a kernel's tile."""
    leaves = torch.arange(1, num_nodes)
    into = torch.stack([leaves.repeat(2), torch.zeros(2 * len(leaves), dtype=torch.int64)])
    return torch.cat([into, _edges((0, 1), (0, 2), (0, num_nodes - 1))], dim=1)


def _broadcast(num_nodes: int) -> Tensor:
    """Node 0 sends to every node: the hub of the transposed graph."""
    return torch.stack([torch.zeros(num_nodes, dtype=torch.int64), torch.arange(num_nodes)])


def _loops(num_nodes: int) -> Tensor:
    nodes = torch.arange(num_nodes)
    return torch.stack([nodes, nodes])


GRAPHS: dict[str, tuple[Tensor, int]] = {
    "no_nodes": (_edges(), 0),
    "one_node": (_edges(), 1),
    "one_node_loop": (_edges((0, 0)), 1),
    "one_edge": (_edges((1, 0)), 2),
    "empty": (_edges(), 13),
    "isolated": (_edges((2, 5), (5, 2), (5, 9), (9, 11), (11, 2), (2, 11)), 21),  # ends and middle rows without edges
    "self_loops": (torch.cat([_loops(17), _random(17, 17, 30, seed=1)], dim=1), 17),
    "only_loops": (_loops(9), 9),
    "duplicates": (_random(8, 8, 20, seed=2).repeat(1, 3), 8),
    "one_pair": (_edges(*[(3, 1)] * 40), 5),  # the same edge 40 times
    "path": (torch.stack([torch.arange(32), torch.arange(1, 33)]), 33),
    "complete": (torch.cartesian_prod(torch.arange(9), torch.arange(9)).t().contiguous(), 9),
    "hub": (_hub(140), 140),
    "broadcast": (_broadcast(130), 130),
    "random": (_random(50, 50, 200, seed=3), 50),
    "power_law": (_power_law(160, 700, seed=4), 160),
}

RECTANGULAR: dict[str, tuple[Tensor, int, int]] = {
    "wide": (_random(60, 7, 90, seed=5), 60, 7),
    "tall": (_random(5, 80, 60, seed=6), 5, 80),
    "one_target": (_random(40, 1, 50, seed=7), 40, 1),
    "one_source": (_random(1, 40, 50, seed=8), 1, 40),
    "no_edges": (_edges(), 6, 4),
    "no_targets": (_edges(), 6, 0),
    "no_sources": (_edges(), 0, 6),
}
