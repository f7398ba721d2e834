"""Block-wise packed storage in C: codes of 1, 2, 4 or 8 bits with one offset and one step a block.

Numerics: bit-equal to the reference, codes, offsets, steps and unpacked values. A block is read once from memory: its
extrema are found, and its codes made and packed, while it lies in the first-level cache. Other types than fp32 are
converted a few blocks at a time, so no fp32 copy of the whole tensor is made.

Oracle: qgnn.reference.blocks_pack, qgnn.reference.blocks_unpack
"""

from collections.abc import Iterator

import torch
from qgnn.kernels.cpu.library import launch, stream_key
from torch import Tensor

_METADATA = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in blocks.c
_CONVERTED = 1 << 18  # values of another type that are converted at a time: 1 MiB of fp32
_MAX_BLOCK = 1 << 16  # as in blocks.c, which keeps a block's codes on the stack


def _chunks(num_blocks: int, block_size: int, dtype: torch.dtype) -> Iterator[tuple[slice, slice]]:
    """``(blocks, values)`` of the pieces that one call works on: everything, if it is fp32."""
    if block_size > _MAX_BLOCK:
        raise ValueError(f"'blocks' expects 'block_size' up to {_MAX_BLOCK} (got {block_size})")
    chunk = num_blocks if dtype == torch.float32 else max(1, _CONVERTED // block_size)
    for first in range(0, num_blocks, chunk or 1):
        last = min(first + chunk, num_blocks)
        yield slice(first, last), slice(first * block_size, last * block_size)


def blocks_pack(
    x: Tensor,
    *,
    bits: int,
    block_size: int,
    metadata_dtype: torch.dtype = torch.float32,
    seed: Tensor | None = None,
    stream: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes uint8 ``[B, block_size * bits / 8]`` of all values of ``x``, and offsets and steps ``[B]``."""
    x = x.detach().reshape(-1)
    num_blocks = -(-x.numel() // block_size)
    packed = torch.empty((num_blocks, block_size * bits // 8), dtype=torch.uint8)
    low, step = torch.empty(num_blocks), torch.empty(num_blocks)
    for blocks, values in _chunks(num_blocks, block_size, x.dtype):
        piece = x[values].float().contiguous()  # a vector can have any stride
        operands = (packed[blocks], low[blocks], step[blocks], piece, seed, stream_key(stream), bits)
        sizes = (blocks.start, piece.numel(), block_size)
        launch("qgnn_blocks_pack", *operands, _METADATA[metadata_dtype], *sizes)
    return packed, low.to(metadata_dtype), step.to(metadata_dtype)  # exact: they are numbers of that type


def blocks_unpack(
    packed: Tensor, low: Tensor, step: Tensor, *, bits: int, size: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values ``[size]`` that packed codes stand for."""
    num_blocks, num_bytes = packed.shape
    block_size = num_bytes * 8 // bits
    packed, low, step = packed.contiguous(), low.float().contiguous(), step.float().contiguous()
    out = torch.empty((size,), dtype=dtype)
    for blocks, values in _chunks(num_blocks, block_size, dtype):
        piece = out[values]
        result = piece if dtype == torch.float32 else torch.empty(piece.shape)
        launch("qgnn_blocks_unpack", result, packed[blocks], low[blocks], step[blocks], bits, piece.numel(), block_size)
        if result is not piece:
            piece.copy_(result)
    return out
