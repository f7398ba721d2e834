"""PartitionedGraph: a graph over several processes, each with the rows of its own nodes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qgnn.distributed._messages import RowFormat
from qgnn.distributed.halo_exchange import HaloExchange
from qgnn.distributed.shards import Cutter, Shard, load_shard
from qgnn.graph import Graph
from qgnn.halo_graph import HaloGraph
from qgnn.qtensor import QTensor
from qgnn.rounding import MAX_BLOCK_SIZE

_BITS = (None, 8, 4, 2, 1)
_FAILED = -1


class PartitionedGraph(HaloGraph):
    r"""The edges into the nodes of one of several processes, which train one model on one graph together.

    Each process has the rows of its own nodes. A layer that gets this graph in place of an ``edge_index`` computes the
    rows that it would compute of them in one process: the rows of neighbors that other processes have, the halo, come
    as codes of a few bits, rounded at random in training, to nearest where no gradients are recorded, and so go their
    gradients back. Edges between own nodes are summed in the meantime. Rows that need no gradient, such as input
    features, are constants if they come a second time in training: then they are sent as they are, and no more while
    they live unchanged in all processes, which agree on that.

    All processes have to run the same layers in the same order, those without nodes too, and call ``backward``: each
    sum over neighbors is a message to all others, and one more for its gradient. Layers of attention, maxima and
    :func:`torch.compile` do not work over processes; norms over nodes see those of their process.

    :class:`qgnn.trace` shows messages as ``halo.forward`` and ``halo.backward``; :attr:`sent_bytes` counts their bytes.

    Messages that are rounded at random and overlap with the sums of own nodes are those of `"Adaptive Message
    Quantization and Parallelization for Distributed Full-graph GNN Training" <https://arxiv.org/abs/2306.01381>`_, in
    one width for all rows. With 8 bits a row has an fp32 scale, with fewer each block an offset and a step in bf16.

    Build one with :meth:`from_edge_index` or :meth:`load`, in all processes at once.

    Args:
        shard: The part of this process.
        bits: Width of the codes that rows are sent as, 8, 4, 2 or 1; ``None`` sends rows as they are.
        block_size: The most values of a row that share an offset and a step, with fewer than 8 bits.
        process_group: The processes, one a part; ``None`` for all.

    Attributes:
        nodes: Own nodes, as numbers of the whole graph, ``[N]``: ``x[graph.nodes]`` are their rows.
        halo_nodes: Those of the halo, by process, ``[H]``.

    Raises:
        ValueError: If a number is outside its range, the processes have parts of different graphs or other formats, or
            are not one a part.
        RuntimeError: If there is no process group, or a process could not make its part.
    """

    def __init__(
        self,
        shard: Shard,
        *,
        bits: int | None = 8,
        block_size: int = 256,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        _check_format(bits, block_size)
        group = _group(process_group)
        if (shard.rank, shard.num_parts) != (dist.get_rank(group), dist.get_world_size(group)):
            raise ValueError(
                f"'PartitionedGraph' expects part {dist.get_rank(group)} of {dist.get_world_size(group)} in this "
                f"process (got part {shard.rank} of {shard.num_parts})"
            )
        num_nodes, num_halo = len(shard.nodes), len(shard.halo_nodes)
        super().__init__(
            Graph.from_edge_index(shard.inner, num_nodes, shard.inner_weight),
            Graph.from_edge_index(shard.halo, (num_halo, num_nodes), shard.halo_weight),
        )
        self.nodes, self.halo_nodes = shard.nodes, shard.halo_nodes
        counts = shard.sent.tolist(), shard.received.tolist()
        self._exchange = HaloExchange(shard.boundary, num_nodes, *counts, RowFormat(bits, block_size), group)

    @classmethod
    def from_edge_index(  # type: ignore[override]  # parts, where one process has a number of nodes
        cls,
        edge_index: Any,
        parts: Tensor,
        edge_weight: Tensor | None = None,
        *,
        bits: int | None = 8,
        block_size: int = 256,
        process_group: dist.ProcessGroup | None = None,
    ) -> PartitionedGraph:
        """The part of this process of a graph that all processes have.

        Args:
            edge_index: Edges of the whole graph, whatever PyG takes as such.
            parts: The process of each node, as :func:`partition_nodes` returns it.
            edge_weight: Constant edge weights.
            bits: As in the class.
            block_size: As in the class.
            process_group: As in the class.

        Shapes:
            - **input:** ``edge_index [2, E]`` integer, ``parts [N]`` integer, ``edge_weight [E]`` float

        Raises:
            TypeError: If ``edge_index`` or ``parts`` is no tensor of integers.
            ValueError: If edges, weights and parts do not fit together; see the class for what else.

        Example:
            >>> parts = partition_nodes(edge_index, dist.get_world_size(), num_nodes=len(x))
            >>> graph = PartitionedGraph.from_edge_index(edge_index, parts, bits=4)
            >>> out = conv(x[graph.nodes], graph)
        """
        group = _group(process_group)
        rank, size = dist.get_rank(group), dist.get_world_size(group)

        def cut() -> Shard:
            return Cutter(edge_index, parts, size, edge_weight).shard(rank)

        return cls._agreed(cut, bits, block_size, group)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        *,
        bits: int | None = 8,
        block_size: int = 256,
        process_group: dist.ProcessGroup | None = None,
    ) -> PartitionedGraph:
        """The part of this process from the file that :func:`save_partitions` wrote for it.

        Args:
            folder: Where the files are.
            bits: As in the class.
            block_size: As in the class.
            process_group: As in the class.

        Raises:
            FileNotFoundError: If the folder has no file for this process of so many.
            ValueError: If the file is damaged, or of something else.

        Example:
            >>> graph = PartitionedGraph.load("parts", bits=4)
        """
        group = _group(process_group)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        return cls._agreed(lambda: load_shard(folder, rank, size), bits, block_size, group)

    @classmethod
    def _agreed(
        cls, make: Callable[[], Shard], bits: int | None, block_size: int, group: dist.ProcessGroup
    ) -> PartitionedGraph:
        """The graph of a part, if all processes have one of the same graph: each waits for the others, even if it has
        none itself."""
        error, graph, own = None, None, (_FAILED, 0, 0)
        try:
            shard = make()
            graph = cls(shard, bits=bits, block_size=block_size, process_group=group)
            own = shard.fingerprint, bits or 0, block_size
        except Exception as found:
            error = found
        numbers = _gathered(own, group)
        if error is not None:
            raise error
        failed = [rank for rank, (other, *_) in enumerate(numbers) if other == _FAILED]
        if failed:
            raise RuntimeError(
                f"'PartitionedGraph' expects a part in all processes (got none in {failed}); see their errors"
            )
        for rank, other in enumerate(numbers):
            if other != numbers[0]:
                what = "'bits' or 'block_size'" if other[0] == numbers[0][0] else "edges, weights or parts"
                raise ValueError(
                    f"'PartitionedGraph' expects the same graph, parts and format in all processes (got other {what} "
                    f"in process {rank} than in process 0); give all the same, as of one seed or one file"
                )
        assert graph is not None
        return graph

    def exchange(self, x: Tensor | QTensor, *, exact: bool = False) -> Callable[[], Tensor]:
        """Send rows of own nodes to where they are part of the halo, and get ready to receive this process's halo.

        Args:
            x: A row for each own node; a :class:`qgnn.QTensor` is sent as the codes that it has.
            exact: Send rows as they are.

        Shapes:
            - **input:** ``[N, F]``, the same ``F`` in all processes
            - **output:** a function that waits, and returns the rows of the halo ``[H, F]``
        """
        return self._exchange.start(x, exact)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this process has sent, forward and backward."""
        return self._exchange.sent_bytes

    @property
    def full_bytes(self) -> int:
        """Bytes that these rows have in fp32."""
        return self._exchange.full_bytes

    @property
    def num_exchanges(self) -> int:
        """How often rows or gradients went to the other processes."""
        return self._exchange.count

    def to(self, device: torch.device | str) -> PartitionedGraph:
        """The graph on another device, which counts anew.

        Args:
            device: Where to.
        """
        graph = super().to(device)
        graph.nodes, graph.halo_nodes = self.nodes.to(device), self.halo_nodes.to(device)
        graph._exchange = self._exchange.to(device)
        return graph


def _check_format(bits: Any, block_size: Any) -> None:
    if bits is not None and (type(bits) is not int or bits not in _BITS):
        raise ValueError(f"'PartitionedGraph' expects 'bits' to be one of {_BITS} (got {bits!r})")
    if not isinstance(block_size, int) or not 8 <= block_size <= MAX_BLOCK_SIZE or block_size % 8:
        raise ValueError(
            f"'PartitionedGraph' expects 'block_size' to be a multiple of 8 up to {MAX_BLOCK_SIZE} (got {block_size!r})"
        )


def _group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise RuntimeError(
            "'PartitionedGraph' expects a process group (got none); call 'torch.distributed.init_process_group' in "
            "each process, as 'torchrun' starts them"
        )
    group = dist.group.WORLD if process_group is None else process_group
    assert group is not None
    return group


def _gathered(numbers: tuple[int, ...], group: dist.ProcessGroup) -> list[list[int]]:
    """What each process has of these."""
    own = torch.tensor(numbers, dtype=torch.int64, device="cuda" if dist.get_backend(group) == "nccl" else "cpu")
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    return [other.tolist() for other in found]
