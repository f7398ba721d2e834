"""Rows in parts that stay in cache, blocks of values that share a scale, and the bytes of codes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK = 1 << 18  # values of a large matrix that are decoded at once: 1 MiB of fp32, which the second-level cache holds


def row_parts(num_rows: int, width: int, most: int) -> Iterator[slice]:
    """Slices that cover all rows, of at most ``most`` values each; one while compiling, which fuses what is done with
    them and must not depend on their number."""
    if torch.compiler.is_compiling():
        yield slice(0, num_rows)
        return
    step = max(1, most // max(1, width))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def per_value(t: Tensor, block_size: int, width: int, dim: int = -1) -> Tensor:
    """What blocks along a dimension share, once for each of ``width`` values."""
    return t.repeat_interleave(block_size, dim=dim).narrow(dim, 0, width)


def scale_blocks_(values: Tensor, scale: Tensor, block_size: int, dim: int = -1) -> Tensor:
    """Multiply values in place by the scales of their blocks along a dimension, which is counted from the end; the last
    block may be shorter."""
    width = values.shape[dim]
    if torch.compiler.is_compiling():  # which fuses the copy, and must not depend on the length of the last block
        return values.mul_(per_value(scale, block_size, width, dim))
    whole = width // block_size
    of_whole, rest = values.split([whole * block_size, width - whole * block_size], dim)
    first, last = scale.split([whole, scale.shape[dim] - whole], dim)
    of_whole.unflatten(dim, (whole, block_size)).mul_(first.unsqueeze(dim))
    rest.mul_(last)
    return values


def code_dtype(bits: int, signed: bool) -> torch.dtype:
    """The type of integer codes once they are unpacked."""
    narrow, wide = (torch.int8, torch.int16) if signed else (torch.uint8, torch.int32)
    return narrow if bits <= 8 else wide


def packed_bytes(num_codes: int, bits: int) -> int:
    """Bytes of so many codes."""
    return -(-num_codes * bits // 8)
