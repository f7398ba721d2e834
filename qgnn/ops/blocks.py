"""``qgnn::blocks_pack`` and ``qgnn::blocks_unpack``: block-wise packed storage of 1, 2, 4 or 8 bits a value, in bins of
one width or of given edges, of the values or of their random projection.

Packed codes carry no gradient, so these ops have none. No projection is ``0``, with no seed and no columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qgnn.ops._backends import STREAM_PACKED, STREAM_PROJECTION, Backend
from qgnn.ops._checks import Signature
from qgnn.ops._operator import define
from qgnn.rounding import BLOCK_BITS, MAX_BLOCK_SIZE, METADATA_DTYPES

PROJECTIONS = range(1 << 16)  # columns; 0: none


def _check_pack(
    x: Tensor,
    bits: int,
    block_size: int,
    metadata_dtype: torch.dtype,
    projection: int,
) -> None:
    if projection and x.dim() != 2:
        raise ValueError(
            f"'qgnn::blocks_pack' expects 'x' of shape [N, F] with a 'projection' of its columns (got {list(x.shape)})"
        )
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(
            f"'qgnn::blocks_pack' expects 'block_size' from 1 to {MAX_BLOCK_SIZE} values (got {block_size})"
        )
    if block_size * bits % 8:
        raise ValueError(
            f"'qgnn::blocks_pack' expects 'block_size' to be a multiple of {8 // bits} for {bits}-bit codes, so that a "
            f"block takes whole bytes (got {block_size})"
        )
    if metadata_dtype not in METADATA_DTYPES:
        raise TypeError(
            f"'qgnn::blocks_pack' expects 'metadata_dtype' to be torch.float32, torch.bfloat16 or torch.float16 "
            f"(got {metadata_dtype})"
        )


def _check_unpack(
    packed: Tensor,
    low: Tensor,
    step: Tensor,
    bits: int,
    size: int,
    dtype: torch.dtype,
    projection: int,
    num_columns: int,
) -> None:
    if projection and (size % projection or num_columns < 0):
        raise ValueError(
            f"'qgnn::blocks_unpack' expects a 'size' of whole rows of 'projection' values, and 'num_columns' of the "
            f"matrix that was packed (got {size} values, {projection} a row, {num_columns} columns)"
        )
    for name, t in (("low", low), ("step", step)):
        if t.dtype not in METADATA_DTYPES:
            raise TypeError(f"'qgnn::blocks_unpack' expects '{name}' in a type of at most 32 bits (got {t.dtype})")
    num_blocks, block_size = packed.shape[0], packed.shape[1] * 8 // bits
    if block_size > MAX_BLOCK_SIZE:
        raise ValueError(f"'qgnn::blocks_unpack' expects blocks of up to {MAX_BLOCK_SIZE} values (got {block_size})")
    if not (num_blocks - 1) * block_size < size <= num_blocks * block_size and (size, num_blocks) != (0, 0):
        raise ValueError(
            f"'qgnn::blocks_unpack' expects a 'size' that fills {num_blocks} blocks of {block_size} values, the last "
            f"one at least in part (got {size})"
        )
    if not dtype.is_floating_point:
        raise TypeError(f"'qgnn::blocks_unpack' expects 'dtype' to be a floating-point type (got {dtype})")


def _blocks_pack(
    backend: Backend,
    x: Tensor,
    seed: Tensor | None,
    bits: int,
    block_size: int,
    metadata_dtype: torch.dtype,
    edges: Tensor | None,
    projection: int,
    projection_seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_pack(x, bits, block_size, metadata_dtype, projection)
    return backend.call(
        "blocks_pack",
        "blocks.pack",
        x,
        bits=bits,
        block_size=block_size,
        metadata_dtype=metadata_dtype,
        seed=seed,
        stream=STREAM_PACKED,
        edges=edges,
        projection=projection,
        projection_seed=projection_seed,
        projection_stream=STREAM_PROJECTION,
    )


def _fake_blocks_pack(
    x: Tensor,
    seed: Tensor | None,
    bits: int,
    block_size: int,
    metadata_dtype: torch.dtype,
    edges: Tensor | None,
    projection: int,
    projection_seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_pack(x, bits, block_size, metadata_dtype, projection)
    num_values = x.shape[0] * projection if projection else x.numel()
    num_blocks = (num_values + block_size - 1) // block_size
    packed = x.new_empty((num_blocks, block_size * bits // 8), dtype=torch.uint8)
    low = x.new_empty((num_blocks,), dtype=metadata_dtype)
    return packed, low, torch.empty_like(low)


blocks_pack = define(
    "blocks_pack",
    _blocks_pack,
    "(Tensor x, Tensor? seed, int bits, int block_size, ScalarType metadata_dtype, Tensor? edges, int projection, "
    "Tensor? projection_seed) -> (Tensor, Tensor, Tensor)",
    _fake_blocks_pack,
    Signature(choices={"bits": BLOCK_BITS, "projection": PROJECTIONS}, edges={"edges": "bits"}),
)


def _blocks_unpack(
    backend: Backend,
    packed: Tensor,
    low: Tensor,
    step: Tensor,
    bits: int,
    size: int,
    dtype: torch.dtype,
    edges: Tensor | None,
    projection: int,
    projection_seed: Tensor | None,
    num_columns: int,
    first_row: int,
) -> Tensor:
    _check_unpack(packed, low, step, bits, size, dtype, projection, num_columns)
    return backend.call(
        "blocks_unpack",
        "blocks.unpack",
        packed,
        low,
        step,
        bits=bits,
        size=size,
        dtype=dtype,
        edges=edges,
        projection=projection,
        projection_seed=projection_seed,
        projection_stream=STREAM_PROJECTION,
        num_columns=num_columns,
        first_row=first_row,
    )


def unpack_rows(
    backend: Backend,
    packed: Tensor,
    low: Tensor,
    step: Tensor,
    *,
    bits: int,
    edges: Tensor | None,
    projection: int,
    projection_seed: Tensor | None,
    num_rows: int,
    num_columns: int,
) -> Tensor:
    """The fp32 matrix ``[num_rows, num_columns]`` that codes stand for, within another operator."""
    size = num_rows * (projection or num_columns)
    chosen = (bits, size, torch.float32, edges, projection, projection_seed, num_columns, 0)
    return _blocks_unpack(backend, packed, low, step, *chosen).view(num_rows, num_columns)


def _fake_blocks_unpack(
    packed: Tensor,
    low: Tensor,
    step: Tensor,
    bits: int,
    size: int,
    dtype: torch.dtype,
    edges: Tensor | None,
    projection: int,
    projection_seed: Tensor | None,
    num_columns: int,
    first_row: int,
) -> Tensor:
    return packed.new_empty((size // projection, num_columns) if projection else (size,), dtype=dtype)


blocks_unpack = define(
    "blocks_unpack",
    _blocks_unpack,
    "(Tensor packed, Tensor low, Tensor step, int bits, SymInt size, ScalarType dtype, Tensor? edges, int projection, "
    "Tensor? projection_seed, SymInt num_columns, SymInt first_row) -> Tensor",
    _fake_blocks_unpack,
    Signature(
        {"packed": "B W", "low": "B", "step": "B"},
        choices={"bits": BLOCK_BITS, "projection": PROJECTIONS},
        edges={"edges": "bits"},
    ),
)
