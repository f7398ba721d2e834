"""What the launchers of attention share: the operands as the C functions take them, and their workspace."""

from typing import Any

import torch
from qgnn.kernels.cpu.library import empty_floats, num_threads, rows_of, stream_key
from torch import Tensor

CHUNK = 128  # edges of a row whose weights are made at a time, and fewer where their rows would not stay in cache
_CHUNK_BYTES, _LEAST_CHUNK = 1 << 18, 16

Arguments = tuple[Tensor | float | None, ...]


def floats(t: Tensor | None) -> Tensor | None:
    """Contiguous fp32."""
    return None if t is None else t.detach().float().contiguous()


def rows(x: Tensor, scale: Tensor | None) -> Arguments:
    """Rows, scales, the stride of the rows in elements, and whether they are codes."""
    is_codes = x.dtype == torch.int8
    x = rows_of(x, torch.int8 if is_codes else torch.float32)
    return x, floats(scale), x.stride(0), is_codes


def graph(indptr: Tensor, *edges: Tensor) -> Arguments:
    """``indptr``, what goes with it in the same integers, and whether these have 64 bits."""
    same = (t.to(indptr.dtype).contiguous() for t in edges)
    return indptr.contiguous(), *same, indptr.dtype == torch.int64


def dropout_arguments(dropout: Any) -> Arguments:
    """Threshold, seed, stream and factor of a ``qgnn.activation.Activation``."""
    if dropout is None or not dropout.threshold:
        return 0, None, 0, 1.0
    return dropout.threshold, dropout.seed, stream_key(dropout.stream), float(dropout.factor)


def rounding_arguments(bits: int, seed: Tensor | None, stream: int) -> Arguments:
    return seed, stream_key(stream), (1 << (bits - 1)) - 1 if bits else 0


def workspace(heads: int, width: int) -> Arguments:
    """Floats for each thread, how many that is, and the edges of a chunk."""
    edges = max(min(CHUNK, _LEAST_CHUNK), min(CHUNK, _CHUNK_BYTES // (4 * max(width, 1))))
    size = edges * (12 * heads + 16) + 8 * width + 10 * heads + 1040
    return empty_floats(num_threads(), size), size, edges
