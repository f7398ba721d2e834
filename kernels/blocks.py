"""Block-wise packed storage: codes of 1, 2, 4 or 8 bits with one offset and one step a block of consecutive values.

    x, n values  ->  packed [B, G * bits / 8] uint8, low and step [B] fp32, bf16 or fp16        B = ceil(n / G)
    value of code c = low + step * c, or low + step * edges[c]

Byte ``k`` of a block holds the codes of its values ``k, k + r, k + 2 r, ...`` from the lowest bits on, ``r`` being the
bytes of a block (Eliassen and Selvan, arXiv:2309.11856, for blocks and bins; the layout is ours). Random projections,
which may come before, are in ``qgnn.kernels.blocks_project``.

Numerics: codes, offsets, steps and values equal the plain PyTorch definition in every bit. A block that holds a NaN or
an infinity gets NaN as offset and step; others do not see it. Whole blocks and the last, partial one are two launches
of a kernel: the values of whole blocks need no masks of their own, which would keep them from being read in vectors.

Oracle: qgnn.reference.blocks_pack, qgnn.reference.blocks_unpack
"""

from functools import partial

import torch
import triton
import triton.language as tl
from qgnn.kernels import tuning
from qgnn.kernels.blocks_project import blocks_project, blocks_unproject, fits_tile
from qgnn.kernels.blocks_tile import block_scale, decode, find_extrema, fold_codes, load_metadata, store_metadata
from qgnn.kernels.rounding import load_seed
from torch import Tensor


@triton.jit
def load_values(
    x_ptr,
    first_b,
    num_blocks,
    first,
    count,
    G: tl.constexpr,
    RUN: tl.constexpr,
    IS_TAIL: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
    R: tl.constexpr,
):
    """A tile of values, fp32 [P, B, R], and which positions of a block are there: bool [P, 1, R]."""
    offs_k = first + tl.arange(0, R)
    position = (tl.arange(0, P) * RUN)[:, None, None] + offs_k[None, None, :]
    inside = (offs_k < RUN)[None, None, :] & (position < (count if IS_TAIL else G))
    # Read as rows of bytes, part by part: threads then share the blocks, and each holds all parts of its bytes. Which
    # of two outer axes the threads would share first differs between versions of the compiler.
    row = tl.arange(0, P * B)
    offs_b = first_b + row % B
    offs_part = row // B * RUN
    mask = (offs_k < RUN)[None, :] & (offs_b < num_blocks)[:, None]
    if IS_TAIL:
        mask &= offs_part[:, None] + offs_k[None, :] < count
    x = tl.load(x_ptr + (offs_b * G + offs_part)[:, None] + offs_k[None, :], mask=mask, other=0.0)
    return x.to(tl.float32).reshape(P, B, R), inside


@triton.jit(
    do_not_specialize=["B", "first_block", "count", "stream"],
    do_not_specialize_on_alignment=["low_ptr", "step_ptr"],  # a tail's depends on how many blocks precede it
)
def _blocks_pack_kernel(
    # outputs
    packed_ptr,
    low_ptr,
    step_ptr,
    # inputs
    x_ptr,
    seed_ptr,
    edges_ptr,
    # sizes
    B,
    G: tl.constexpr,
    first_block,
    count,
    # scalars
    stream,
    # flags
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    IS_TAIL: tl.constexpr,
    # tiles
    BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program owns ``BLOCK_B`` whole blocks. Those of one tile are read once; longer ones are walked twice, for the
    extrema and for the codes. With ``IS_TAIL`` there is one block, of ``count`` values."""
    PARTS: tl.constexpr = 8 // BITS
    RUN: tl.constexpr = G * BITS // 8
    QMAX: tl.constexpr = (1 << BITS) - 1
    HAS_GAPS: tl.constexpr = IS_TAIL or RUN % BLOCK_R != 0
    first_b = tl.program_id(0).to(tl.int64) * BLOCK_B
    offs_b = first_b + tl.arange(0, BLOCK_B)
    mask_b = offs_b < B

    if RUN <= BLOCK_R:
        x, inside = load_values(x_ptr, first_b, B, 0, count, G, RUN, IS_TAIL, PARTS, BLOCK_B, BLOCK_R)
        low_key, high_key = find_extrema(x, inside, HAS_GAPS)
    else:
        low_key = tl.full((BLOCK_B,), 2**31 - 1, tl.int32)
        high_key = tl.full((BLOCK_B,), -(2**31), tl.int32)
        for first in range(0, RUN, BLOCK_R):
            x, inside = load_values(x_ptr, first_b, B, first, count, G, RUN, IS_TAIL, PARTS, BLOCK_B, BLOCK_R)
            low_tile, high_tile = find_extrema(x, inside, HAS_GAPS)
            low_key, high_key = tl.minimum(low_key, low_tile), tl.maximum(high_key, high_tile)
    low, step, factor = block_scale(low_key, high_key, QMAX, low_ptr.dtype.element_ty)
    store_metadata(low_ptr + offs_b, low, mask_b)
    store_metadata(step_ptr + offs_b, step, mask_b)

    seed = load_seed(seed_ptr, stream) if STOCHASTIC else 0
    block = first_block + offs_b
    for first in range(0, RUN, BLOCK_R):
        if RUN > BLOCK_R:
            x, inside = load_values(x_ptr, first_b, B, first, count, G, RUN, IS_TAIL, PARTS, BLOCK_B, BLOCK_R)
        byte = fold_codes(
            x, inside, low, factor, seed, block, first, edges_ptr, G, BITS, STOCHASTIC, IS_TAIL, PARTS, BLOCK_B, BLOCK_R
        )
        offs_k = first + tl.arange(0, BLOCK_R)
        mask = mask_b[:, None] & (offs_k < RUN)[None, :]
        tl.store(packed_ptr + (offs_b * RUN)[:, None] + offs_k[None, :], byte, mask=mask)


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
    """Packed codes, offsets and steps of all values of ``x``; the parameters are those of
    :func:`qgnn.reference.blocks_pack`. A tensor that is not contiguous is copied first, unless it is projected.

    A projection to 8, 16, 32 or 64 columns is packed by the kernel that makes it, if blocks are a power of two of at
    most 64 rows; any other is made by a kernel of its own."""
    x = x.detach()
    size = x.shape[0] * projection if projection else x.numel()
    num_blocks, whole = -(-size // block_size), size // block_size
    packed = torch.empty((num_blocks, block_size * bits // 8), dtype=torch.uint8, device=x.device)
    low = torch.empty(num_blocks, dtype=metadata_dtype, device=x.device)
    step = torch.empty(num_blocks, dtype=metadata_dtype, device=x.device)
    edges = None if edges is None else edges.contiguous()
    if projection:
        project = partial(
            blocks_project,
            x,
            projection=projection,
            projection_seed=projection_seed,
            projection_stream=projection_stream,
        )
        if fits_tile(tuning.blocks_project(x.shape[1], projection), projection, block_size):
            blocks = packed, low, step
            project(blocks=blocks, bits=bits, block_size=block_size, seed=seed, stream=stream, edges=edges)
            return blocks
        x = project()
    x = x.reshape(-1).contiguous()
    config = tuning.blocks_pack(block_size, bits, x.element_size(), edges is not None)
    with torch.cuda.device_of(x):
        for first, last in ((0, whole), (whole, num_blocks)):
            if first == last:
                continue
            is_tail = first == whole
            _blocks_pack_kernel[(triton.cdiv(last - first, config["BLOCK_B"]),)](
                packed_ptr=packed[first:],
                low_ptr=low[first:],
                step_ptr=step[first:],
                x_ptr=x[first * block_size :],
                seed_ptr=seed,
                edges_ptr=edges,
                B=last - first,
                G=block_size,
                first_block=first,
                count=size - first * block_size,
                stream=stream,
                BITS=bits,
                STOCHASTIC=seed is not None,
                IS_TAIL=is_tail,
                **config,
            )
    return packed, low, step


@triton.jit(do_not_specialize=["B", "count"], do_not_specialize_on_alignment=["low_ptr", "step_ptr"])
def _blocks_unpack_kernel(
    # outputs
    out_ptr,
    # inputs
    packed_ptr,
    low_ptr,
    step_ptr,
    edges_ptr,
    # sizes
    B,
    G: tl.constexpr,
    count,
    # strides
    stride_pb: tl.constexpr,
    # flags
    BITS: tl.constexpr,
    IS_TAIL: tl.constexpr,
    # tiles
    BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program owns ``BLOCK_R`` bytes of each of ``BLOCK_B`` blocks, and writes one part of the bytes after the
    other. With ``IS_TAIL`` there is one block, of ``count`` values."""
    RUN: tl.constexpr = G * BITS // 8
    NUM_R: tl.constexpr = (RUN + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)
    offs_b = (pid // NUM_R).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    offs_k = (pid % NUM_R) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_b = offs_b < B
    mask = mask_b[:, None] & (offs_k < RUN)[None, :]
    byte = tl.load(packed_ptr + (offs_b * stride_pb)[:, None] + offs_k[None, :], mask=mask, other=0).to(tl.int32)
    low = load_metadata(low_ptr + offs_b, mask_b)[:, None]
    step = load_metadata(step_ptr + offs_b, mask_b)[:, None]
    out_row = out_ptr + (offs_b * G)[:, None]
    for part in tl.static_range(8 // BITS):
        code = (byte >> (part * BITS)) & ((1 << BITS) - 1)
        value = decode(code, low, step, edges_ptr, mask)
        position = part * RUN + offs_k
        mask_out = mask & (position < count)[None, :] if IS_TAIL else mask
        tl.store(out_row + position[None, :], value.to(out_ptr.dtype.element_ty), mask=mask_out)


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
    """The values ``[size]`` that packed codes stand for, or the matrix that was projected; the parameters are those of
    :func:`qgnn.reference.blocks_unpack`."""
    num_blocks, num_bytes = packed.shape
    block_size = num_bytes * 8 // bits
    packed, low, step = packed.contiguous(), low.contiguous(), step.contiguous()
    edges = None if edges is None else edges.contiguous()
    if projection:
        assert projection_seed is not None
        return blocks_unproject(
            packed,
            low,
            step,
            bits=bits,
            size=size,
            dtype=dtype,
            edges=edges,
            projection=projection,
            projection_seed=projection_seed,
            projection_stream=projection_stream,
            num_columns=num_columns,
            first_row=first_row,
        )
    out = torch.empty((size,), dtype=dtype, device=packed.device)
    whole = size // block_size if block_size else 0
    config = tuning.blocks_unpack(block_size, bits, out.element_size())
    num_r = triton.cdiv(num_bytes, config["BLOCK_R"])
    with torch.cuda.device_of(packed):
        for first, last in ((0, whole), (whole, num_blocks)):
            if first == last:
                continue
            _blocks_unpack_kernel[(triton.cdiv(last - first, config["BLOCK_B"]) * num_r,)](
                out_ptr=out[first * block_size :],
                packed_ptr=packed[first:],
                low_ptr=low[first:],
                step_ptr=step[first:],
                edges_ptr=edges,
                B=last - first,
                G=block_size,
                count=size - first * block_size,
                stride_pb=num_bytes,
                BITS=bits,
                IS_TAIL=first == whole,
                **config,
            )
    return out
