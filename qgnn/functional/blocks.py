"""Compressed storage of tensors that only a backward pass reads."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from functools import cache, lru_cache
from math import prod

import torch
from torch import Tensor

from qgnn import ops
from qgnn.bins import best_block_size, optimal_bins
from qgnn.compressed_tensor import CompressedTensor
from qgnn.formats import Blocks
from qgnn.functional._checks import check_float
from qgnn.rng import make_rounding_seed
from qgnn.weak_cache import lasting

MANY = 1 << 30  # values of a large tensor


def compress(
    x: Tensor,
    bits: int = 2,
    block_size: int | None = None,
    bins: str = "uniform",
    projection: int | None = None,
    *,
    metadata_dtype: torch.dtype = torch.bfloat16,
    seed: int | Tensor | None = None,
) -> CompressedTensor:
    r"""Codes of 1, 2, 4 or 8 bits for the values of a tensor, or of its random projection, in blocks of neighbors.

    A value is rounded at random to one of the two edges around it, so that :func:`decompress` returns ``x`` in the mean
    over seeds. With a ``projection`` the columns are mixed first, :math:`P = (x S) R / \sqrt{R'}` with random signs
    :math:`R` and each row's own :math:`S`, and mixed back by :math:`\hat{x} = P R^{\top} S / \sqrt{R'}`, whose mean
    over seeds is ``x`` as well. The signs are a hash of the seed and never stored. Without :math:`S`, as in EXACT, the
    errors of all rows come from one matrix, and do not average out in a sum over rows, which the gradient of a weight
    is. A block with a value that is not finite, or larger than ``metadata_dtype`` holds, decodes to NaN, and no other
    one does; a value of fp16 may decode to infinity if it is within a step of its type's largest. After EXACT (Liu et
    al., ICLR 2022) and its block-wise successor (`arXiv:2309.11856 <https://arxiv.org/abs/2309.11856>`_).

    Args:
        x: Values; what is kept of them has no gradient.
        bits: Width of a code: 1, 2, 4 or 8.
        block_size: Values that share an offset and a step, in row-major order; ``None`` chooses a length for which the
            metadata costs as much as it saves in variance (:func:`qgnn.bins.best_block_size`); under torch.compile
            that of a large tensor.
        bins: ``"uniform"``, or ``"optimal"``: bins that minimize the variance of normal values
            (:func:`qgnn.compress.optimal_bins`), for 2 and 4 bits.
        projection: Ratio F / R' of the projection, of the last dimension; ``None`` for none.
        metadata_dtype: Type of offsets and steps: fp32, bf16 or fp16.
        seed: Seed of rounding and signs; ``None`` draws one from torch's generator.

    Shapes:
        - **input:** any; with a projection ``[..., F]`` of at least two dimensions
        - **output:** :math:`\lceil n / G \rceil` blocks of ``bits * G / 8`` bytes of codes and two numbers, for ``n``
          values, with a projection :math:`n R' / F`

    Raises:
        TypeError: If ``x`` holds no floats.
        ValueError: If a number is outside its range, or ``x`` has no columns to project.

    Example:
        >>> c = qgnn.functional.compress(torch.randn(1000, 128), bits=2, projection=8)
        >>> c.nbytes, qgnn.functional.decompress(c).shape
    """
    check_float("compress", "x", x)
    blocks = Blocks(bits, block_size, projection, bins, metadata_dtype)
    if projection is not None and x.dim() < 2:
        raise ValueError(
            f"'compress' expects 'x' with at least two dimensions for a 'projection' of the last one (got "
            f"{list(x.shape)}); give projection=None"
        )
    return pack(x, blocks, make_rounding_seed(seed, x.device))


def pack(x: Tensor, blocks: Blocks, seed: Tensor | None) -> CompressedTensor:
    """:func:`compress` in a format; without a seed, values that are not projected are rounded to nearest."""
    columns = blocks.columns(x.shape[-1]) if x.dim() > 1 else 0
    x = x.detach()
    values = x.reshape(prod(x.shape[:-1]), x.shape[-1]) if columns else x
    blocks = with_block_size(blocks, _num_values(x.shape, columns))
    assert blocks.block_size is not None
    projection_seed = seed if columns else None
    packed, low, step = ops.blocks_pack(
        values,
        seed,
        blocks.bits,
        blocks.block_size,
        blocks.metadata_dtype,
        edges_of(blocks, x.device),
        columns,
        projection_seed,
    )
    return CompressedTensor(packed, low, step, blocks, x.shape, x.dtype, columns, projection_seed)


def with_block_size(blocks: Blocks, num_values: int) -> Blocks:
    """The format with the length of a block that it has for so many coded values."""
    if blocks.block_size is not None:
        return blocks
    if torch.compiler.is_compiling():  # which may not know the number
        num_values = MANY
    metadata_bits = 16 * blocks.metadata_dtype.itemsize
    return replace(blocks, block_size=_best_block_size(blocks.bits, num_values, blocks.bins, metadata_bits))


_remembered_block_size = lru_cache(maxsize=1024)(best_block_size)


@torch.compiler.assume_constant_result  # a compiler looks through the cache, and would trace the choice
def _best_block_size(bits: int, num_values: int, bins: str, metadata_bits: int) -> int:
    return _remembered_block_size(bits, num_values, bins, metadata_bits)


@cache
def _edges_on(bits: int, block_size: int, device: torch.device) -> Tensor:
    with lasting():
        return optimal_bins(bits, block_size).to(device)


def edges_of(blocks: Blocks, device: torch.device) -> Tensor | None:
    """Edges of the bins of a format whose blocks have a length; ``None`` for those of one width."""
    if blocks.bins == "uniform":
        return None
    assert blocks.block_size is not None
    if torch.compiler.is_compiling():  # a constant of the graph; what a compiler or exporter traces is not to be kept
        return optimal_bins(blocks.bits, blocks.block_size).to(device)
    return _edges_on(blocks.bits, blocks.block_size, device)


def decompress(c: CompressedTensor, rows: slice | None = None) -> Tensor:
    """The values that codes stand for: of a tensor that was compressed, ``x`` in the mean over seeds.

    Args:
        c: As :func:`compress` returns it.
        rows: A range of the tensor's first dimension; only the blocks that hold it are read, and with a projection
            those whose values are whole rows together.

    Shapes:
        - **output:** the shape and type that were compressed; of ``rows``, so many of them

    Raises:
        TypeError: If ``c`` is no compressed tensor, or ``rows`` no slice.
        ValueError: If ``rows`` has a step, the tensor has no dimension, or the sizes of what ``c`` holds are not those
            of its blocks.

    Example:
        >>> c = qgnn.functional.compress(torch.randn(1000, 128), bits=4)
        >>> first = qgnn.functional.decompress(c, slice(0, 10))
    """
    if not isinstance(c, CompressedTensor):
        raise TypeError(f"'decompress' expects a CompressedTensor (got {type(c).__name__}); make one with 'compress'")
    c.check("decompress", "c")
    if rows is None:
        return _unpack(c, slice(None), _num_values(c.shape, c.columns), 0).view(c.shape)
    if not isinstance(rows, slice):
        raise TypeError(f"'decompress' expects 'rows' to be a slice or None (got {rows!r})")
    if rows.step not in (None, 1) or not c.shape:
        raise ValueError(
            f"'decompress' expects 'rows' to be a slice without a step, of a tensor with rows (got {rows!r} of "
            f"{list(c.shape)})"
        )
    assert c.blocks.block_size is not None
    first, last = _place(rows.start, 0, c.shape[0]), _place(rows.stop, c.shape[0], c.shape[0])
    num_rows = max(0, last - first)
    wide = prod(c.shape[1:])  # values of a row, and how many are coded of them; where there are none, any number does
    coded = max(1, _num_values(c.shape[1:], c.columns))
    # What is read is whole blocks; what is projected back is whole rows as well.
    unit = math.lcm(coded, c.blocks.block_size) if c.columns else c.blocks.block_size
    start, stop = first * coded // unit, -(-(first + num_rows) * coded // unit)
    blocks = slice(start * unit // c.blocks.block_size, stop * unit // c.blocks.block_size)
    num_values = max(0, min(stop * unit, _num_values(c.shape, c.columns)) - start * unit)
    offset = first * wide - start * unit * wide // coded
    first_row = start * unit // c.columns if c.columns else 0
    values = _unpack(c, blocks, num_values, first_row).flatten()[offset : offset + num_rows * wide]
    return values.view(num_rows, *c.shape[1:])


def _place(end: int | None, default: int, num_rows: int) -> int:
    """The row that an end of a slice is; compilers do not know :meth:`slice.indices`."""
    if end is None:
        return default
    end = operator.index(end)
    return max(0, end + num_rows) if end < 0 else min(end, num_rows)


def _num_values(shape: torch.Size, columns: int) -> int:
    """Values that are coded of a tensor of this shape."""
    return prod(shape[:-1]) * columns if columns else prod(shape)


def _unpack(c: CompressedTensor, blocks: slice, num_values: int, first_row: int) -> Tensor:
    """What a range of blocks with so many values decodes to; with a projection whole rows, from that one on."""
    return ops.blocks_unpack(
        c.packed[blocks],
        c.low[blocks],
        c.step[blocks],
        c.blocks.bits,
        num_values,
        c.dtype,
        edges_of(c.blocks, c.packed.device),
        c.columns,
        c.projection_seed,
        c.shape[-1] if c.columns else 0,
        first_row,
    )
