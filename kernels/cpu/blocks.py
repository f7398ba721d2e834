"""Block-wise packed storage in C: codes of 1, 2, 4 or 8 bits with one offset and one step a block.

Numerics: bit-equal to the reference, codes, offsets, steps and unpacked values. A block is read once from memory: its
extrema are found, and its codes made and packed, while it lies in the first-level cache. Other types than fp32 are
converted a few blocks at a time, so no fp32 copy of the whole tensor is made; nor is a projection of the whole tensor.
The sums of a projection are added in ascending order, without fused multiply-adds.

Oracle: qgnn.reference.blocks_pack, qgnn.reference.blocks_unpack
"""

import math
from collections.abc import Iterator

import torch
from qgnn.kernels.cpu.library import FLOAT_TYPES, empty_floats, launch, stream_key
from torch import Tensor

_CONVERTED = 1 << 18  # values of another type that are converted at a time: 1 MiB of fp32
_MAX_BLOCK = 1 << 16  # as in blocks.c, which keeps a block's codes on the stack


def _chunks(num_blocks: int, block_size: int, dtype: torch.dtype, whole: int = 1) -> Iterator[tuple[slice, slice]]:
    """``(blocks, values)`` of the pieces that one call works on: everything, if it is fp32. With ``whole``, pieces of
    so many values that are made or used by a projection: they stay in a cache."""
    if block_size > _MAX_BLOCK:
        raise ValueError(f"'blocks' expects 'block_size' up to {_MAX_BLOCK} (got {block_size})")
    multiple = math.lcm(block_size, whole) // block_size  # blocks that hold whole rows
    chunk = num_blocks
    if dtype != torch.float32 or whole > 1:
        chunk = max(1, _CONVERTED // (multiple * block_size)) * multiple
    for first in range(0, num_blocks, chunk or 1):
        last = min(first + chunk, num_blocks)
        yield slice(first, last), slice(first * block_size, last * block_size)


def _signs(F: int, projection: int, seed: Tensor, stream: int, *, transposed: bool) -> Tensor:
    """The table of a projection's signs, [F, R'] or [R', F]: small beside the matrix."""
    signs = empty_floats(projection, F) if transposed else empty_floats(F, projection)
    launch("qgnn_blocks_signs", signs, seed, stream_key(stream), F, projection, int(transposed))
    return signs


class _Projection:
    """A projection of F columns: its table of signs, [F, R'] or for the way back [R', F], and the rows' own signs."""

    def __init__(self, F: int, projection: int, seed: Tensor, stream: int, *, restores: bool) -> None:
        self._signs = _signs(F, projection, seed, stream, transposed=restores)
        self._own = (seed, stream_key(stream), projection**-0.5, int(restores))

    def __call__(self, x: Tensor, first_row: int, out: Tensor) -> Tensor:
        """The product of rows of which the first has this number; ``out`` holds it, or is converted from it."""
        result = out if out.dtype == torch.float32 else empty_floats(*out.shape)
        sizes = (first_row, *x.shape, self._signs.shape[1])
        launch("qgnn_blocks_project", result, x, self._signs, *self._own, *sizes)
        return result if result is out else out.copy_(result)


def blocks_pack(
    x: Tensor,
    *,
    bits: int,
    block_size: int,
    metadata_dtype: torch.dtype = torch.float32,
    seed: Tensor | None = None,
    stream: int = 0,
    edges: Tensor | None = None,
    projection: int = 0,
    projection_seed: Tensor | None = None,
    projection_stream: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes uint8 ``[B, block_size * bits / 8]`` of all values of ``x``, and offsets and steps ``[B]``.

    Of a projection, a piece at a time is made and packed."""
    x = x.detach()
    edges = None if edges is None else edges.contiguous()
    if projection:
        assert projection_seed is not None
        project = _Projection(x.shape[1], projection, projection_seed, projection_stream, restores=False)
        num_values = x.shape[0] * projection
    else:
        x = x.reshape(-1)
        num_values = x.numel()
    num_blocks = -(-num_values // block_size)
    packed = torch.empty((num_blocks, block_size * bits // 8), dtype=torch.uint8)
    low, step = empty_floats(num_blocks), empty_floats(num_blocks)
    for blocks, values in _chunks(num_blocks, block_size, x.dtype, projection or 1):
        if projection:
            rows = slice(values.start // projection, min(values.stop // projection, x.shape[0]))
            made = empty_floats(rows.stop - rows.start, projection)
            piece = project(x[rows].float().contiguous(), rows.start, made).view(-1)
        else:
            piece = x[values].float().contiguous()  # a vector can have any stride
        operands = (packed[blocks], low[blocks], step[blocks], piece, seed, edges, stream_key(stream), bits)
        sizes = (blocks.start, piece.numel(), block_size)
        launch("qgnn_blocks_pack", *operands, FLOAT_TYPES[metadata_dtype], *sizes)
    return packed, low.to(metadata_dtype), step.to(metadata_dtype)  # exact: they are numbers of that type


def blocks_unpack(
    packed: Tensor,
    low: Tensor,
    step: Tensor,
    *,
    bits: int,
    size: int,
    dtype: torch.dtype = torch.float32,
    edges: Tensor | None = None,
    projection: int = 0,
    projection_seed: Tensor | None = None,
    projection_stream: int = 0,
    num_columns: int = 0,
    first_row: int = 0,
) -> Tensor:
    """The values ``[size]`` that packed codes stand for, or the matrix ``[N, num_columns]`` that was projected."""
    num_blocks, num_bytes = packed.shape
    block_size = num_bytes * 8 // bits
    packed, low, step = packed.contiguous(), low.float().contiguous(), step.float().contiguous()
    edges = None if edges is None else edges.contiguous()
    if projection:
        assert projection_seed is not None
        restore = _Projection(num_columns, projection, projection_seed, projection_stream, restores=True)
        out = torch.empty((size // projection, num_columns), dtype=dtype)
    else:
        out = torch.empty((size,), dtype=dtype)
    for blocks, values in _chunks(num_blocks, block_size, dtype, projection or 1):
        values = slice(values.start, min(values.stop, size))
        in_place = dtype == torch.float32 and not projection
        piece = out[values] if in_place else empty_floats(values.stop - values.start)
        operands = (packed[blocks], low[blocks], step[blocks], edges, bits)
        launch("qgnn_blocks_unpack", piece, *operands, piece.numel(), block_size)
        if projection:
            rows = slice(values.start // projection, values.stop // projection)
            restore(piece.view(-1, projection), first_row + rows.start, out[rows])
        elif not in_place:
            out[values] = piece
    return out
