"""How code matrices lie in memory, and what a launcher needs to know about a tensor it is given.

Vector loads need rows that start on 16-byte boundaries, so code matrices are allocated with their row stride rounded
up. Views of any strides are accepted all the same: a kernel then reads exactly the view's columns."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

VECTOR_BYTES = 16


MAX_COLUMNS = 2**31 - 2**13  # that int32 counts, with a tile beyond the end


def check_columns(owner: str, num_columns: int) -> None:
    """Raise unless int32 counts the columns of a row; rows are counted in int64."""
    if num_columns > MAX_COLUMNS:
        raise ValueError(
            f"'{owner}' expects at most {MAX_COLUMNS} columns on a GPU (got {num_columns}); give more rows, of fewer "
            f"columns"
        )


def code_stride(num_columns: int) -> int:
    """Row stride of a code matrix: a multiple of 16, or a power of two for rows of at most 8 codes."""
    if num_columns <= 8:
        return 1 << max(0, num_columns - 1).bit_length()
    return -(-num_columns // VECTOR_BYTES) * VECTOR_BYTES


def empty_codes(num_rows: int, num_columns: int, device: torch.device) -> Tensor:
    """An uninitialized int8 matrix ``[num_rows, num_columns]`` whose rows lie :func:`code_stride` bytes apart."""
    stride = code_stride(num_columns)
    return torch.empty((num_rows, stride), dtype=torch.int8, device=device)[:, :num_columns]


def readable_width(x: Tensor) -> int:
    """How many columns of each row of a matrix may be read: the width rounded up to whole vectors where the row
    stride and the storage leave room for that, so that an odd width does not force narrow loads."""
    num_rows, width = x.shape
    vector = VECTOR_BYTES // x.element_size()
    padded = -(-width // vector) * vector
    if num_rows == 0 or x.stride(1) != 1 or (x.stride(0) < padded and num_rows > 1):
        return width
    last_row = x.storage_offset() + (num_rows - 1) * x.stride(0)
    return padded if (last_row + padded) * x.element_size() <= x.untyped_storage().nbytes() else width


def common_unit(*sizes: int) -> int:
    """The largest power of two up to 16 that divides all sizes.

    A kernel that takes sizes in such units, and the unit as a constant, sees of them what wide loads and stores need,
    and is not compiled anew for each size."""
    return math.gcd(VECTOR_BYTES, *sizes)


@triton.jit
def column_offsets(offs, stride):
    """Distances of the columns ``offs`` from the start of their row: 64-bit, since the columns of a transposed matrix
    lie far apart. Those of adjacent columns (a stride of 1 is a constant) are ``offs`` itself, at no cost."""
    if isinstance(stride, tl.constexpr):
        tl.static_assert(stride == 1, "a column stride is 1 or varies at run time")
        return offs
    else:
        return offs.to(tl.int64) * stride


@triton.jit
def head_offsets(offs_row, mask_row, offs_h, H: tl.constexpr):
    """Offsets and mask of the heads ``offs_h`` of rows ([R, E]) of a matrix ``[rows, H]``: [R, E, BLOCK_H]."""
    offs = offs_row.to(tl.int64)[:, :, None] * H + offs_h[None, None, :]
    return offs, mask_row[:, :, None] & (offs_h < H)[None, None, :]


def scale_stride(scale: Tensor) -> int:
    """Stride to walk a scale vector with: 0 if one value serves every row."""
    return 0 if scale.numel() == 1 else scale.stride(0)


def head_scale_strides(scale: Tensor | None) -> tuple[int, int]:
    """Strides to walk the scales of rows and heads with, from one value for all, one a row, or one a head of a row."""
    if scale is None:
        return 0, 0
    return scale_stride(scale), scale.stride(1) if scale.dim() == 2 and scale.shape[1] > 1 else 0
