"""What each process needs of a graph whose nodes are split over processes, and files of it."""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgnn.data.disk import load_whole, replace_file
from qgnn.edge_checks import check_edge_index, check_edge_weight
from qgnn.graph import to_edges, weight_of


@dataclass(frozen=True)
class Shard:
    """The part of one process.

    Own nodes are numbered in the order of the whole graph; those of the halo by process, then in that order.

    Args:
        rank: Whose part it is.
        num_parts: Number of parts.
        nodes: Own nodes, as numbers of the whole graph ``[N]``.
        halo_nodes: Nodes of others that have edges to own ones ``[H]``.
        received: How many of them each process has ``[num_parts]``.
        boundary: Own nodes that others have in their halo, by process, as numbers of own nodes ``[S]``.
        sent: How many of them each process gets ``[num_parts]``.
        inner: Edges between own nodes, ``[2, E]``.
        inner_weight: Their weights, of a weighted graph.
        halo: Edges from nodes of the halo to own ones.
        halo_weight: Their weights.
        fingerprint: What is equal for parts of the same graph, cut in the same way.
    """

    rank: int
    num_parts: int
    nodes: Tensor
    halo_nodes: Tensor
    received: Tensor
    boundary: Tensor
    sent: Tensor
    inner: Tensor
    inner_weight: Tensor | None
    halo: Tensor
    halo_weight: Tensor | None
    fingerprint: int


class Cutter:
    """A graph that is cut into one part a process.

    Args:
        edge_index: Whatever PyG takes as edges, or a Graph.
        parts: The part of each node.
        num_parts: Number of parts.
        edge_weight: Constant edge weights.
    """

    def __init__(self, edge_index: Any, parts: Tensor, num_parts: int, edge_weight: Tensor | None = None) -> None:
        check_parts(parts, num_parts)
        edges, _ = to_edges(edge_index)
        check_edge_index(edges, len(parts), len(parts))
        weight = weight_of(edge_index, edge_weight)
        if weight is not None:
            weight = check_edge_weight(weight, edges.shape[1])
            if weight.requires_grad:
                raise ValueError(
                    "'edge_weight' expects constants in a graph of several processes (got weights that need a "
                    "gradient); detach them"
                )
        self.edges, self.weight, self.num_parts = edges.long(), weight, num_parts
        self.parts = parts.to(edges.device, torch.int64)
        order = torch.argsort(self.parts, stable=True)
        self.nodes = order.split(torch.bincount(self.parts, minlength=num_parts).tolist())
        self.local = torch.empty_like(order)  # the number that each node has in its part
        for nodes in self.nodes:
            self.local[nodes] = torch.arange(len(nodes), device=order.device)
        self.fingerprint = _fingerprint(self.edges, self.parts, self.weight)

    def shard(self, rank: int) -> Shard:
        """The part of one process."""
        N = len(self.parts)
        source, target = self.edges
        from_part, to_part = self.parts[source], self.parts[target]
        inner = ((to_part == rank) & (from_part == rank)).nonzero().squeeze(1)
        halo = ((to_part == rank) & (from_part != rank)).nonzero().squeeze(1)
        out = ((to_part != rank) & (from_part == rank)).nonzero().squeeze(1)
        received, place = torch.unique(from_part[halo] * N + source[halo], return_inverse=True)
        sent = torch.unique(to_part[out] * N + source[out])
        width = max(1, N)
        return Shard(
            rank=rank,
            num_parts=self.num_parts,
            nodes=self.nodes[rank].clone(),  # a file would hold what it is a view of
            halo_nodes=received % width,
            received=torch.bincount(received // width, minlength=self.num_parts),
            boundary=self.local[sent % width],
            sent=torch.bincount(sent // width, minlength=self.num_parts),
            inner=self.local[self.edges[:, inner]],
            inner_weight=None if self.weight is None else self.weight[inner],
            halo=torch.stack([place, self.local[target[halo]]]),
            halo_weight=None if self.weight is None else self.weight[halo],
            fingerprint=self.fingerprint,
        )


def save_partitions(
    folder: str | os.PathLike[str],
    edge_index: Any,
    parts: Tensor,
    edge_weight: Tensor | None = None,
    *,
    num_parts: int | None = None,
) -> None:
    """Write a file for each process, from which :meth:`PartitionedGraph.load` makes its part of the graph.

    So no process of a training has to hold the whole graph. Files appear one by one, each when it is complete.

    Args:
        folder: Where to; made if it is missing.
        edge_index: Edges of the whole graph, whatever PyG takes as such.
        parts: The process of each node, as :func:`partition_nodes` returns it.
        edge_weight: Constant edge weights.
        num_parts: Number of processes; ``None`` for the largest part that a node has.

    Shapes:
        - **input:** ``edge_index [2, E]`` integer, ``parts [N]`` integer, ``edge_weight [E]`` float

    Raises:
        TypeError: If ``edge_index`` or ``parts`` is no tensor of integers.
        ValueError: If edges, weights and parts do not fit together.

    Example:
        >>> save_partitions("parts", edge_index, partition_nodes(edge_index, num_parts=4, num_nodes=N))
    """
    folder = Path(folder)
    if num_parts is None:
        check_parts(parts, None)
        num_parts = int(parts.max()) + 1 if len(parts) else 1
    cutter = Cutter(edge_index, parts, num_parts, edge_weight)
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(num_parts):
        content = io.BytesIO()
        torch.save(asdict(cutter.shard(rank)), content)
        replace_file(_path(folder, rank, num_parts), content.getvalue())


def load_shard(folder: str | os.PathLike[str], rank: int, num_parts: int) -> Shard:
    """The part of one process from its file."""
    path = _path(Path(folder), rank, num_parts)
    if not path.exists():
        others = sorted(other.name for other in Path(folder).glob("part-*-of-*.pt"))
        raise FileNotFoundError(
            f"'PartitionedGraph.load' expects {path}, of a graph cut for {num_parts} processes (the folder has "
            f"{', '.join(others[:3]) or 'none'}); write it with 'save_partitions(..., num_parts={num_parts})'"
        )
    try:
        with path.open("rb") as file:
            saved = load_whole(file)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"'PartitionedGraph.load' expects a whole file (got {str(path)!r}: {error}); write it anew with "
            f"'save_partitions'"
        ) from error
    if not isinstance(saved, dict) or saved.keys() != Shard.__annotations__.keys():
        raise ValueError(
            f"'PartitionedGraph.load' expects a part of a graph (got {str(path)!r}, another file); write it with "
            f"'save_partitions'"
        )
    shard = Shard(**saved)
    if not _is_part(shard, rank, num_parts):
        raise ValueError(
            f"'PartitionedGraph.load' expects part {rank} of {num_parts} (got {str(path)!r}, which holds something "
            f"else); write it anew with 'save_partitions'"
        )
    return shard


def _is_part(shard: Shard, rank: int, num_parts: int) -> bool:
    """Whether all that it says is of this part, and fits together."""
    if (shard.rank, shard.num_parts) != (rank, num_parts) or type(shard.fingerprint) is not int:
        return False
    vectors = (shard.nodes, shard.halo_nodes, shard.received, shard.boundary, shard.sent)
    if not all(_are_numbers(t, 1) for t in vectors) or not all(_are_numbers(t, 2) for t in (shard.inner, shard.halo)):
        return False
    N, H = len(shard.nodes), len(shard.halo_nodes)
    counts = ((shard.received, H), (shard.sent, len(shard.boundary)))
    edges = ((shard.inner, (N, N), shard.inner_weight), (shard.halo, (H, N), shard.halo_weight))
    return (
        all(t.shape == (num_parts,) and int(t.sum()) == total for t, total in counts)
        and _below(shard.boundary, N)
        and (shard.inner_weight is None) == (shard.halo_weight is None)
        and all(
            ends.shape[0] == 2
            and all(map(_below, ends, sizes))
            and (weight is None or (isinstance(weight, Tensor) and weight.is_floating_point()))
            and (weight is None or weight.shape == ends.shape[1:])
            for ends, sizes, weight in edges
        )
    )


def _are_numbers(t: Any, num_dims: int) -> bool:
    """A tensor of so many dimensions, of numbers from 0 on."""
    is_ours = isinstance(t, Tensor) and t.dtype == torch.int64 and t.dim() == num_dims and t.device.type == "cpu"
    return is_ours and (not t.numel() or int(t.min()) >= 0)


def _below(t: Tensor, size: int) -> bool:
    return not t.numel() or int(t.max()) < size


def _path(folder: Path, rank: int, num_parts: int) -> Path:
    return folder / f"part-{rank}-of-{num_parts}.pt"


def check_parts(parts: Any, num_parts: int | None) -> None:
    """Raise unless ``parts`` names a part of each node."""
    if not isinstance(parts, Tensor) or parts.is_floating_point() or parts.is_complex() or parts.dtype == torch.bool:
        got = parts.dtype if isinstance(parts, Tensor) else type(parts).__name__
        raise TypeError(
            f"'parts' expects a tensor of integers, the part of each node (got {got}); make one with 'partition_nodes'"
        )
    if parts.dim() != 1:
        raise ValueError(f"'parts' expects the shape [N] (got {list(parts.shape)})")
    if not len(parts):
        return
    low, high = int(parts.min()), int(parts.max())
    if low < 0 or (num_parts is not None and high >= num_parts):
        last = "on" if num_parts is None else f"to {num_parts - 1}, one for each process"
        raise ValueError(f"'parts' expects numbers from 0 {last} (got {low} to {high})")


def _fingerprint(*tensors: Tensor | None) -> int:
    digest = hashlib.blake2b(digest_size=7)
    for t in tensors:
        digest.update(b"none" if t is None else f"{t.dtype} {list(t.shape)}".encode())
        if t is not None and t.numel():
            plain = t.detach().cpu().clone(memory_format=torch.contiguous_format)
            digest.update(plain.view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "little")
