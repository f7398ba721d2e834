"""Bytes: of a MiB, and the most that were in use."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch

MIB = 2**20
STATUS = Path("/proc/self/status")


def peak_bytes(device: torch.device) -> int | None:
    """The most bytes in use so far: on CUDA those that torch's allocator handed out, on a CPU under Linux the resident
    size of the process, libraries and data included; ``None`` where that is unknown.

    Args:
        device: Whose memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):
        match = re.search(r"^VmHWM:\s*(\d+) kB", STATUS.read_text(), re.MULTILINE)
        return int(match[1]) * 1024 if match else None
    return None
