"""Random projections of a matrix, before its values are packed in blocks and after they are unpacked.

    P = (x S) R / sqrt(R')    x [N, F] fp32, bf16 or fp16, any strides;  R [F, R'] signs  ->  P [N, R'], or its blocks
    H = P R^T S / sqrt(R')    P from its blocks                                           ->  H [N, F]

Signs are bits of the counter hash (Liu et al., EXACT, ICLR 2022, store them), those of R and each row's own, S. They
are made in each program, for the rows of its tile; so ``x`` is read once, and with whole blocks in a tile ``P`` never
lies in memory.

Numerics: values of 16 bits times a sign are exact in TF32, which has 11 bits of significand, as many as they at most. A
value of fp32 is cut in two, its first 11 bits and the rest, of which the tensor cores drop at most the last two bits:
3 units of the 24th bit of the value, less than what the sum of eight products may lose in fp32. Sums are fp32, in an
order that depends on the tile. Blocks of ``P`` are then packed as in ``qgnn.kernels.blocks``.

Oracle: qgnn.reference.blocks_pack, qgnn.reference.blocks_unpack
"""

import torch
import triton
import triton.language as tl
from qgnn.kernels import tuning
from qgnn.kernels.blocks_tile import (
    block_scale,
    decode,
    find_extrema,
    flip,
    fold_codes,
    load_metadata,
    make_signs,
    store_metadata,
)
from qgnn.kernels.memory import column_offsets
from qgnn.kernels.rounding import load_seed
from torch import Tensor


@triton.jit
def add_products(total, x, signs):
    """``total + x @ signs`` on tensor cores."""
    if x.dtype == tl.float32:
        first = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)  # 11 bits of significand
        total = tl.dot(x - first, signs, total, input_precision="tf32")
        return tl.dot(first, signs, total, input_precision="tf32")
    else:
        return tl.dot(x.to(tl.float32), signs, total, input_precision="tf32")


@triton.jit(do_not_specialize=["N", "stream", "projection_stream", "factor"])
def _blocks_project_kernel(
    # outputs
    out_ptr,
    packed_ptr,
    low_ptr,
    step_ptr,
    # inputs
    x_ptr,
    seed_ptr,
    edges_ptr,
    projection_seed_ptr,
    # sizes
    N,
    F: tl.constexpr,
    PROJECTION: tl.constexpr,
    G: tl.constexpr,
    # strides
    stride_xn: tl.constexpr,
    stride_xf,
    # scalars
    stream,
    projection_stream,
    factor,
    # flags
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    # tiles
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program owns ``BLOCK_R`` columns of ``BLOCK_N`` rows of the projection and walks the columns of ``x`` in
    ascending order. Without ``out_ptr`` these are whole rows that make whole blocks, which are packed."""
    NUM_R: tl.constexpr = (PROJECTION + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)
    tile = (pid // NUM_R).to(tl.int64)
    first_r = (pid % NUM_R) * BLOCK_R
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    projection_seed = load_seed(projection_seed_ptr, projection_stream)
    x_row = x_ptr + offs_n[:, None] * stride_xn
    total = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for first in range(0, F, BLOCK_K):
        offs_f = first + tl.arange(0, BLOCK_K)
        mask = mask_n[:, None] & (offs_f < F)[None, :]
        x = tl.load(x_row + column_offsets(offs_f, stride_xf)[None, :], mask=mask, other=0.0)
        x = flip(x, projection_seed, offs_n, first, F, BLOCK_K)
        signs = make_signs(projection_seed, first, first_r, PROJECTION, BLOCK_K, BLOCK_R, False)
        total = add_products(total, x, signs)
    total *= factor

    if out_ptr is not None:
        offs_r = first_r + tl.arange(0, BLOCK_R)
        mask = mask_n[:, None] & (offs_r < PROJECTION)[None, :]
        tl.store(out_ptr + offs_n[:, None] * PROJECTION + offs_r[None, :], total, mask=mask)
    else:
        PARTS: tl.constexpr = 8 // BITS
        RUN: tl.constexpr = G * BITS // 8
        BLOCK_B: tl.constexpr = BLOCK_N * BLOCK_R // G
        values = total.reshape(BLOCK_B, PARTS, RUN).trans(1, 0, 2)
        block = tile * BLOCK_B + tl.arange(0, BLOCK_B)
        position = (tl.arange(0, PARTS) * RUN)[:, None, None] + tl.arange(0, RUN)[None, None, :]
        size = N.to(tl.int64) * PROJECTION
        valid = (block * G)[None, :, None] + position < size
        mask_b = block * G < size
        low_key, high_key = find_extrema(values, valid | ~mask_b[None, :, None], True)
        low, step, scale = block_scale(low_key, high_key, (1 << BITS) - 1, low_ptr.dtype.element_ty)
        store_metadata(low_ptr + block, low, mask_b)
        store_metadata(step_ptr + block, step, mask_b)
        seed = load_seed(seed_ptr, stream) if STOCHASTIC else 0
        byte = fold_codes(
            values, valid, low, scale, seed, block, 0, edges_ptr, G, BITS, STOCHASTIC, True, PARTS, BLOCK_B, RUN
        )
        offs_k = tl.arange(0, RUN)
        tl.store(packed_ptr + (block * RUN)[:, None] + offs_k[None, :], byte, mask=mask_b[:, None] & (offs_k < RUN))


def fits_tile(config: tuning.Config, projection: int, block_size: int) -> bool:
    """Whether a tile of whole rows is made of whole blocks that are a power of two."""
    whole_rows = projection == config["BLOCK_R"]
    return whole_rows and block_size & (block_size - 1) == 0 and block_size <= config["BLOCK_N"] * projection


def blocks_project(
    x: Tensor,
    *,
    projection: int,
    projection_seed: Tensor,
    projection_stream: int,
    blocks: tuple[Tensor, Tensor, Tensor] | None = None,
    bits: int = 8,
    block_size: int = 8,
    seed: Tensor | None = None,
    stream: int = 0,
    edges: Tensor | None = None,
) -> Tensor | None:
    """The projection of ``x``, fp32 [N, R']; or, written to ``blocks`` of a size that :func:`fits_tile`, its blocks."""
    N, F = x.shape
    out = None
    if blocks is None:
        out = torch.empty((N, projection), dtype=torch.float32, device=x.device)
    packed, low, step = blocks or (None, None, None)
    if N == 0:
        return out
    config = tuning.blocks_project(F, projection)
    num_r = triton.cdiv(projection, config["BLOCK_R"])
    with torch.cuda.device_of(x):
        _blocks_project_kernel[(triton.cdiv(N, config["BLOCK_N"]) * num_r,)](
            out_ptr=out,
            packed_ptr=packed,
            low_ptr=low,
            step_ptr=step,
            x_ptr=x,
            seed_ptr=seed,
            edges_ptr=edges,
            projection_seed_ptr=projection_seed,
            N=N,
            F=F,
            PROJECTION=projection,
            G=block_size,
            stride_xn=x.stride(0),
            stride_xf=x.stride(1),
            stream=stream,
            projection_stream=projection_stream,
            factor=projection**-0.5,
            BITS=bits,
            STOCHASTIC=seed is not None,
            **config,
        )
    return out


@triton.jit(do_not_specialize=["N", "first_row", "projection_stream", "factor"])
def _blocks_unproject_kernel(
    # outputs
    out_ptr,
    # inputs
    packed_ptr,
    low_ptr,
    step_ptr,
    edges_ptr,
    projection_seed_ptr,
    # sizes
    N,
    F: tl.constexpr,
    PROJECTION: tl.constexpr,
    G: tl.constexpr,
    # scalars
    first_row,
    projection_stream,
    factor,
    # flags
    BITS: tl.constexpr,
    # tiles
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program owns a [BLOCK_N, BLOCK_F] tile and walks the columns of the projection in ascending order. A code is
    found by the place of its value, so that blocks of any size may lie across rows: for each, a byte is read, which is
    little beside the row of the result."""
    RUN: tl.constexpr = G * BITS // 8
    NUM_F: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    pid = tl.program_id(0)
    first_n = (pid // NUM_F).to(tl.int64) * BLOCK_N
    first_f = (pid % NUM_F) * BLOCK_F
    rows = tl.arange(0, BLOCK_N)
    mask_n = first_n + rows < N
    offs_f = first_f + tl.arange(0, BLOCK_F)
    projection_seed = load_seed(projection_seed_ptr, projection_stream)
    first_block = first_n * PROJECTION // G  # of the tile; within it, places have 32 bits
    first_place = (first_n * PROJECTION - first_block * G).to(tl.int32)
    total = tl.zeros((BLOCK_N, BLOCK_F), tl.float32)
    for first in range(0, PROJECTION, BLOCK_R):
        offs_r = first + tl.arange(0, BLOCK_R)
        mask = mask_n[:, None] & (offs_r < PROJECTION)[None, :]
        place = first_place + (rows * PROJECTION)[:, None] + offs_r[None, :]
        block, position = first_block + place // G, place % G
        byte = tl.load(packed_ptr + block * RUN + position % RUN, mask=mask, other=0).to(tl.int32)
        low, step = load_metadata(low_ptr + block, mask), load_metadata(step_ptr + block, mask)
        code = (byte >> (position // RUN * BITS)) & ((1 << BITS) - 1)
        values = decode(code, low, step, edges_ptr, mask)
        signs = make_signs(projection_seed, first_f, first, PROJECTION, BLOCK_F, BLOCK_R, True)
        total = add_products(total, values, signs)
    out = flip(total * factor, projection_seed, first_row + first_n + rows, first_f, F, BLOCK_F)
    out = out.to(out_ptr.dtype.element_ty)
    mask = mask_n[:, None] & (offs_f < F)[None, :]
    tl.store(out_ptr + (first_n + rows)[:, None] * F + offs_f[None, :], out, mask=mask)


def blocks_unproject(
    packed: Tensor,
    low: Tensor,
    step: Tensor,
    *,
    bits: int,
    size: int,
    dtype: torch.dtype,
    edges: Tensor | None,
    projection: int,
    projection_seed: Tensor,
    projection_stream: int,
    num_columns: int,
    first_row: int = 0,
) -> Tensor:
    """The matrix ``[size / R', num_columns]`` whose projection is packed; all tensors are contiguous, and its first row
    has that number."""
    N, F = size // projection, num_columns
    out = torch.empty((N, F), dtype=dtype, device=packed.device)
    if out.numel() == 0:
        return out
    config = tuning.blocks_unproject(F, projection)
    num_tiles = triton.cdiv(N, config["BLOCK_N"]) * triton.cdiv(F, config["BLOCK_F"])
    with torch.cuda.device_of(packed):
        _blocks_unproject_kernel[(num_tiles,)](
            out_ptr=out,
            packed_ptr=packed,
            low_ptr=low,
            step_ptr=step,
            edges_ptr=edges,
            projection_seed_ptr=projection_seed,
            N=N,
            F=F,
            PROJECTION=projection,
            G=packed.shape[1] * 8 // bits,
            first_row=first_row,
            projection_stream=projection_stream,
            factor=projection**-0.5,
            BITS=bits,
            **config,
        )
    return out
