"""Clocks: what one call of a function costs in milliseconds, on the CPU and on a CUDA device."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Function = Callable[[], object]


class Clock(Protocol):
    """Measures one call."""

    def time(self, function: Function) -> float: ...

    def synchronize(self) -> None: ...


class CpuClock:
    """Wall time. Caches stay warm but for what the other providers of a case evict."""

    def time(self, function: Function) -> float:
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e3

    def synchronize(self) -> None:
        pass


class CudaClock:
    """Time between two events around the call, with the L2 cache overwritten before it.

    Overwriting also keeps the device busy while the host queues the call, so that a short call's launch gap is hidden
    as it is inside a training step; what the host takes beyond that shows, as it does there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(max(4 * l2_bytes, 1 << 27), dtype=torch.int8, device=device)

    def time(self, function: Function) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        function()
        end.record()
        self.synchronize()  # or else the next call would be queued, its launches for free, while this one runs
        return start.elapsed_time(end)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def make_clock(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def percentile(samples: Sequence[float], fraction: float) -> float:
    """Linear interpolation between the sorted samples."""
    ordered = sorted(samples)
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
