"""What the reference functions share: the walk over large inputs, the type of sums, the seeds of streams."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from qgnn.packing import row_parts
from qgnn.rng import stream_key

CHUNK_ELEMENTS = 1 << 20  # 4 MiB of fp32: stays in the last-level cache, and is worth waking the threads for


def row_chunks(num_rows: int, row_elements: int) -> Iterator[slice]:
    """Slices that cover all rows, of at most ``CHUNK_ELEMENTS`` elements each; one while compiling."""
    return row_parts(num_rows, row_elements, CHUNK_ELEMENTS)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type that sums over ``x`` are made in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def stream_seed(seed: Tensor | None, stream: int) -> Tensor | None:
    """The seed of a stream, or ``None`` to round to nearest."""
    return None if seed is None else seed ^ stream_key(stream)
