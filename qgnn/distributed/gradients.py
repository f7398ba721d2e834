"""Gradients of data-parallel training in a quarter of the bytes.

The gradient of the whole model is cut into one part a process. Each process gets its part from all others as int8
codes, adds them up in fp32, and sends the mean to all, as int8 codes again: 2 (W - 1) / W bytes a value, where a ring
of fp32 sends 8 (W - 1) / W. Both roundings are stochastic and independent, so that the mean is right in expectation;
all processes decode the same codes, so that their parameters stay the same, bit for bit.

There is one exchange a step, when the last gradient is known: models of graphs are small, so that messages are what
costs, and what is rounded with what does not depend on the size of buckets, or on the order that they take after the
first step. (With ``find_unused_parameters`` that order is another one from the first step on.)
"""

# DistributedDataParallel compares the annotations of a hook with the types: they may not become strings here.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qgnn.distributed._messages import decode, encode, seed_of

_Future = torch.futures.Future[Tensor]


class Int8State:
    """What :func:`int8_hook` keeps between the steps of one model.

    Args:
        process_group: The processes; ``None`` for all.
        block_size: Values that share a scale.
        error_feedback: Whether what rounding takes from a gradient is added to the next one, in the units of its own:
            of a gradient scaler, those of its scale then. It takes memory for one more gradient in fp32; without it,
            steps are unbiased one by one.
        seed: Of the rounding, the same in all processes. Each draws for itself, and each step anew.

    Attributes:
        step: Steps so far.
        sent_bytes: What this process has sent.
        full_bytes: What it would have sent in a ring of fp32.

    Raises:
        ValueError: If ``block_size`` is below 1.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        block_size: int = 1024,
        error_feedback: bool = False,
        seed: int = 0,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"'Int8State' expects 'block_size' of at least 1 (got {block_size})")
        self.process_group = process_group
        self.block_size = block_size
        self.error_feedback = error_feedback
        self.seed = seed
        self.step = self.sent_bytes = self.full_bytes = 0
        self._errors: tuple[Tensor, Tensor] | None = None  # of all blocks, and of the mean of its own
        self._order: dict[int, int] = {}  # by the id of a parameter, as in the first step
        self._buckets: list[tuple[dist.GradBucket, _Future]] = []

    @property
    def _arguments(self) -> dict[str, Any]:
        return {"block_size": self.block_size, "error_feedback": self.error_feedback, "seed": self.seed}

    def state_dict(self) -> dict[str, Any]:
        """What a process of the same rank has to know to go on as this one would: seeds follow from the step."""
        errors = None if self._errors is None else [error.clone() for error in self._errors]
        counts = {"step": self.step, "sent_bytes": self.sent_bytes, "full_bytes": self.full_bytes}
        return {**self._arguments, **counts, "errors": errors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state_dict`.

        Args:
            state: As :meth:`state_dict` of the process of this rank returned it.

        Raises:
            ValueError: If it is one of other arguments.
        """
        for name, value in self._arguments.items():
            if state[name] != value:
                raise ValueError(f"'Int8State' has {name}={value} (got the state of one with {state[name]})")
        self.step, self.sent_bytes, self.full_bytes = state["step"], state["sent_bytes"], state["full_bytes"]
        self._errors = None if state["errors"] is None else tuple(error.clone() for error in state["errors"])


def int8_hook(state: Int8State, bucket: dist.GradBucket) -> _Future:
    """A communication hook of ``DistributedDataParallel`` that averages gradients in int8, with a scale a block.

    An infinity or NaN makes its block NaN, which a gradient scaler finds; no later step sees it.

    Args:
        state: That of the model; its processes are those of the model too.
        bucket: Some of its gradients.

    Raises:
        NotImplementedError: If gradients are sparse.
        ValueError: If a state was loaded that is one of another number of processes, or of another model.

    Example:
        >>> model = DistributedDataParallel(model)
        >>> model.register_comm_hook(Int8State(), int8_hook)
    """
    if bucket.buffer().is_sparse:
        raise NotImplementedError("'int8_hook' expects dense gradients (got sparse ones); give Embedding sparse=False")
    if bucket.index() == 0:
        state._buckets.clear()  # of a step that an error ended
    future = _future_of(bucket)
    state._buckets.append((bucket, future))
    if bucket.is_last():
        _average(state)
    return future


def fp32_hook(process_group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> _Future:
    """A communication hook of ``DistributedDataParallel`` that averages gradients as they are, each on its own.

    Without one, gradients are summed by buckets, which DDP cuts anew after the first step. Of three processes and more
    the order of a sum goes by its place in a bucket, so that a resumed training would round otherwise than an
    undisturbed one; with this hook they are the same, bit for bit.

    Args:
        process_group: The processes of the model; ``None`` for all.
        bucket: Some of its gradients.

    Raises:
        NotImplementedError: If gradients are sparse.

    Example:
        >>> model.register_comm_hook(None, fp32_hook)
    """
    group = dist.group.WORLD if process_group is None else process_group
    if bucket.buffer().is_sparse:
        raise NotImplementedError("'fp32_hook' expects dense gradients (got sparse ones); give Embedding sparse=False")
    bucket.buffer().div_(dist.get_world_size(group))  # first, as a sum of halves could overflow
    sums = [dist.all_reduce(gradient, group=group, async_op=True) for gradient in bucket.gradients()]
    for each in sums:
        each.wait()
    future = _future_of(bucket)
    future.set_result(bucket.buffer())
    return future


def _future_of(bucket: dist.GradBucket) -> _Future:
    """What a hook returns."""
    device = bucket.buffer().device
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)


def _average(state: Int8State) -> None:
    """The means of all buckets, of which none is missing."""
    gradients: dict[int, Tensor] = {}
    for bucket, _ in state._buckets:
        gradients.update(zip(map(id, bucket.parameters()), bucket.gradients(), strict=True))
    if state._order.keys() != gradients.keys():
        state._order = {parameter: place for place, parameter in enumerate(gradients)}
    in_order = [gradients[parameter] for parameter in state._order]
    mean = _exchange(state, torch.cat([gradient.reshape(-1).float() for gradient in in_order]))
    for gradient, values in zip(in_order, mean.split([gradient.numel() for gradient in in_order]), strict=True):
        gradient.copy_(values.view(gradient.shape))
    state.step += 1
    for bucket, future in state._buckets:
        future.set_result(bucket.buffer())
    state._buckets.clear()


def _exchange(state: Int8State, flat: Tensor) -> Tensor:
    """The mean over the processes of fp32 ``[n]``."""
    group = dist.group.WORLD if state.process_group is None else state.process_group
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if world == 1:
        return flat
    size = flat.numel()
    num_blocks = -(-size // (world * state.block_size))
    block_size = -(-size // (world * num_blocks))  # no longer than they have to be
    rows = torch.nn.functional.pad(flat, (0, world * num_blocks * block_size - size)).view(-1, block_size)
    own = slice(rank * num_blocks, (rank + 1) * num_blocks)
    errors = _errors_of(state, rows, own) if state.error_feedback else None
    if errors is not None:
        rows += errors[0]

    sent = encode(rows, seed_of(flat.device, state.seed, state.step, rank, 0))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    parts = decode(received).view(world, num_blocks, block_size)
    parts[rank] = rows[own]  # which went nowhere, and need not be rounded
    mean = parts.sum(0).div_(world)
    if errors is not None:
        errors[0].copy_(_finite(rows - decode(sent)))
        errors[0][own] = 0.0
        mean += errors[1]

    sent_mean = encode(mean, seed_of(flat.device, state.seed, state.step, rank, 1))
    dist.all_gather(list(received.chunk(world)), sent_mean, group=group)
    if errors is not None:
        errors[1].copy_(_finite(mean - decode(sent_mean)))
    state.sent_bytes += 2 * (world - 1) * sent_mean.numel()
    state.full_bytes += ring_bytes(size, world)
    return decode(received).view(-1)[:size]


def ring_bytes(size: int, world: int) -> int:
    """What a process sends to average ``size`` values in fp32 in a ring of ``world`` processes."""
    return 2 * (world - 1) * 4 * size // world


def _errors_of(state: Int8State, rows: Tensor, own: slice) -> tuple[Tensor, Tensor]:
    """What earlier steps have left."""
    if state._errors is None:
        state._errors = torch.zeros_like(rows), torch.zeros_like(rows[own])
    elif state._errors[0].shape != rows.shape:
        raise ValueError(
            f"'int8_hook' has errors of {list(state._errors[0].shape)} blocks (got gradients of {list(rows.shape)}); a "
            f"state belongs to one model and one number of processes"
        )
    state._errors = state._errors[0].to(rows.device), state._errors[1].to(rows.device)
    return state._errors


def _finite(errors: Tensor) -> Tensor:
    """Without what an infinity or NaN leaves."""
    return errors.nan_to_num_(0.0, 0.0, 0.0)
