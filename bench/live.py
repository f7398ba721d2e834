"""What lives in torch's memory: bytes that its allocator handed out and did not get back, and tensors that keep them.

The resident size of a process is too coarse for a step of some MiB, and on a CPU torch counts nothing by itself; its
profiler sees each allocation, also those within an operator. What C code takes on its own is not seen: our kernels take
some KiB a thread.
"""

import gc
from collections.abc import Callable, Iterable
from itertools import accumulate
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from qgnn.cli.measure import SavedBytes, storages_of
from qgnn.memory import MIB

_EVENT = "[memory]"  # what the profiler calls an allocation, or with negative bytes the end of one


class LiveBytes:
    """Context manager: what a block leaves behind, and the most that lived in it beyond what lived before.

    Args:
        device: Whose memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.net = self.peak = 0
        self._before = 0
        self._profile: Any = None

    def __enter__(self) -> "LiveBytes":
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            activities = [torch.profiler.ProfilerActivity.CPU]
            self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
            self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.net = torch.cuda.memory_allocated(self.device) - self._before
            self.peak = torch.cuda.max_memory_allocated(self.device) - self._before
            return
        self._profile.__exit__(kind, error, trace)
        events = [e for e in self._profile.profiler.kineto_results.events() if e.name() == _EVENT]
        live = list(accumulate((e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())), initial=0))
        self.net, self.peak = live[-1], max(live)


def saved_bytes(forward: Callable[[], object]) -> int:
    """Bytes of the distinct storages that ``forward`` makes and saves for the backward pass.

    What was alive before it (parameters, inputs, a prepared graph) is kept anyway and does not count.
    """
    saved = SavedBytes()
    with saved.count():
        forward()
    return round(saved.mib * MIB)


def storage_mib(tensors: Iterable[Tensor]) -> float:
    """What the distinct storages of tensors occupy; one of a subclass is the tensors that it is made of."""
    storages = {}
    waiting = list(tensors)
    while waiting:
        tensor = waiting.pop()
        if hasattr(tensor, "__tensor_flatten__"):
            waiting += [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        else:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values()) / MIB


def made(forward: Callable[[], Any]) -> list[Tensor]:
    """Tensors that live after a forward pass and did not before, its results left out: what it keeps, whatever stands
    for a tensor."""

    def alive() -> list[Tensor]:
        gc.collect()
        return [t for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter)]

    before = alive()
    results = forward()
    excluded = {s.data_ptr() for t in (*before, *results) for s in storages_of(t)}
    return [t for t in alive() if all(s.data_ptr() not in excluded for s in storages_of(t))]
