"""The loss of a model that several processes train."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def mean_loss(losses: Tensor, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """The mean over the losses of all processes, whatever number each of them has.

    It has the value of the mean in all processes, and in each the gradient of its own share, times the number of
    processes: so the mean of these gradients, which ``DistributedDataParallel`` and :func:`int8_hook` take, is the
    gradient that one process would have had. Without losses anywhere it is NaN, as a mean of none is.

    Args:
        losses: Those of this process, as of ``cross_entropy(..., reduction="none")``; it may have none.
        process_group: The processes; ``None`` for all.

    Shapes:
        - **input:** any
        - **output:** ``[]``, in fp32 at least

    Example:
        >>> model = DistributedDataParallel(model)
        >>> losses = F.cross_entropy(model(x, graph)[train], y[train], reduction="none")
        >>> mean_loss(losses).backward()
    """
    share = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    totals = torch.stack([share.detach().double(), share.new_tensor(losses.numel(), dtype=torch.float64)])
    dist.all_reduce(totals, group=process_group)
    total, count = totals.unbind()
    share = share * (dist.get_world_size(process_group) / count).to(share.dtype)
    return (total / count).to(share.dtype) + (share - share.detach())  # a zero with a gradient
