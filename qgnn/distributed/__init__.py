"""Training over several processes with fewer bytes between them, on ``torch.distributed``.

- :func:`int8_hook`: gradients of data-parallel training in int8, and :func:`fp32_hook` as they are;
- :class:`PartitionedGraph`: one graph over several processes, with rows of neighbors in codes of a few bits;
- :func:`partition_nodes`: which process gets which node, and :func:`save_partitions`: files of each part;
- :func:`mean_loss`: the loss over the nodes of all processes.

It is imported by its own name: ``import qgnn`` does not need a torch with processes.
"""

from qgnn.distributed.gradients import Int8State, fp32_hook, int8_hook
from qgnn.distributed.loss import mean_loss
from qgnn.distributed.partition import partition_nodes
from qgnn.distributed.partitioned_graph import PartitionedGraph
from qgnn.distributed.shards import save_partitions

__all__ = [
    "Int8State",
    "PartitionedGraph",
    "fp32_hook",
    "int8_hook",
    "mean_loss",
    "partition_nodes",
    "save_partitions",
]
