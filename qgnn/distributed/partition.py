"""Which process gets which node of a graph."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, inf
from typing import Any

import torch
from torch import Tensor

from qgnn.distributed._multilevel import Level, merged, multilevel
from qgnn.edge_checks import check_edge_index
from qgnn.graph import Graph, to_edges

_METHODS = ("auto", "metis", "multilevel")


def partition_nodes(
    edge_index: Any,
    num_parts: int,
    num_nodes: int | None = None,
    *,
    method: str = "auto",
    imbalance: float = 0.03,
) -> Tensor:
    """A part for each node, so that few edges go from one part to another and parts are about equally large.

    An edge counts in both directions, multi-edges count as often as they are there, self-loops and weights do not
    count. The same arguments give the same parts.

    Args:
        edge_index: Whatever PyG takes as edges, or a :class:`qgnn.Graph`.
        num_parts: Number of parts.
        num_nodes: Number of nodes; a :class:`qgnn.Graph` knows its own.
        method: ``"metis"`` for the k-way partition of METIS (`Karypis and Kumar, 1998
            <https://doi.org/10.1137/S1064827595287997>`_), which ``pip install pymetis`` brings; ``"multilevel"`` for
            one of that kind in torch alone, with some more cut edges, for some dozens of parts: its time grows with
            the square of their number; ``"auto"`` for METIS where it is installed.
        imbalance: How much larger than the mean a part may be.

    Shapes:
        - **input:** ``[2, E]`` integer
        - **output:** ``[N]`` int64, from 0 to ``num_parts - 1``, each of which some node has; with ``"multilevel"`` at
          most ``ceil((1 + imbalance) * N / num_parts)`` nodes have the same, which METIS aims at

    Raises:
        ImportError: If ``method="metis"`` and pymetis is not installed.
        ValueError: If ``num_parts`` is below 1 or above the number of nodes, ``method`` is unknown, ``imbalance`` is
            negative or infinite, or edges and ``num_nodes`` do not fit together.

    Example:
        >>> parts = partition_nodes(edge_index, num_parts=4, num_nodes=len(x))
    """
    if method not in _METHODS:
        raise ValueError(f"'partition_nodes' expects 'method' to be one of {_METHODS} (got {method!r})")
    if not 0 <= imbalance < inf:
        raise ValueError(f"'partition_nodes' expects a finite 'imbalance' of at least 0 (got {imbalance!r})")
    if isinstance(edge_index, Graph) and num_nodes is None:
        num_nodes = edge_index.num_targets
    if num_nodes is None:
        raise ValueError("'partition_nodes' expects 'num_nodes' where edges are no qgnn.Graph (got None)")
    if isinstance(num_parts, bool) or not isinstance(num_parts, int) or not 1 <= num_parts <= num_nodes:
        raise ValueError(
            f"'partition_nodes' expects 'num_parts' from 1 to {num_nodes}, the number of nodes (got {num_parts!r})"
        )
    edges, _ = to_edges(edge_index)
    check_edge_index(edges, num_nodes, num_nodes)
    device, edges = edges.device, edges.cpu().long()
    source, target = torch.cat([edges, edges.flip(0)], 1)
    level = merged(source, target, torch.ones_like(source), torch.ones(num_nodes, dtype=torch.int64))
    metis = None if method == "multilevel" else _metis(required=method == "metis")
    if num_parts == 1:
        parts = torch.zeros(num_nodes, dtype=torch.int64)
    elif metis is not None:
        parts = metis(level, num_parts, imbalance)
    else:
        parts = multilevel(level, num_parts, ceil((1 + imbalance) * num_nodes / num_parts))
    return _filled(parts, num_parts).to(device)


def _metis(required: bool) -> Callable[[Level, int, float], Tensor] | None:
    """The partition of METIS."""
    try:
        from pymetis import CSRAdjacency, Options, part_graph
    except ImportError as error:
        if required:
            raise ImportError(
                "'partition_nodes' expects pymetis 2025.2 or newer for method='metis' (got none); 'pip install "
                "pymetis', or give method='multilevel'"
            ) from error
        return None

    def parts_of(level: Level, num_parts: int, imbalance: float) -> Tensor:
        start = torch.searchsorted(level.source, torch.arange(level.num_nodes + 1))
        _, parts = part_graph(
            num_parts,
            CSRAdjacency(start.numpy(), level.target.numpy()),
            eweights=level.weight.numpy(),
            recursive=False,
            options=Options(seed=0, ufactor=max(1, round(1000 * imbalance))),
        )
        return torch.tensor(parts, dtype=torch.int64)

    return parts_of


def _filled(parts: Tensor, num_parts: int) -> Tensor:
    """Without empty parts: each takes the last node of the largest one."""
    sizes = torch.bincount(parts, minlength=num_parts)
    for part in (sizes == 0).nonzero().flatten().tolist():
        largest = int(sizes.argmax())
        parts[(parts == largest).nonzero()[-1]] = part
        sizes[largest], sizes[part] = sizes[largest] - 1, 1
    return parts
