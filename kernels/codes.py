"""Codes of 1 to 16 bits in bytes, a little-endian bit stream along each row, and back.

    codes_pack:    codes [R, C] int8, uint8, or int16 above 8 bits  ->  stored [R, ceil(C * bits / 8)] uint8
    codes_unpack:  stored                                           ->  codes [R, C] int8 or uint8, int16 or int32 above

Numerics: integers alone. A byte is put together from the few codes that have bits in it, and a code from its bytes,
each by the thread that stores it; what neighbors share comes from the first-level cache.

Oracle: qgnn.reference.codes_pack, codes_unpack
"""

import math

import torch
import triton
import triton.language as tl
from qgnn.kernels import tuning
from qgnn.kernels.memory import column_offsets
from torch import Tensor


@triton.jit
def _shifted(x, left):
    """To the left, or to the right by ``-left``."""
    return tl.where(left >= 0, x << tl.maximum(left, 0), x >> tl.maximum(-left, 0))


@triton.jit
def _tile(num_columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Rows and columns of this program's tile."""
    pid = tl.program_id(0)
    column_tiles = (num_columns + BLOCK_C - 1) // BLOCK_C
    offs_r = (pid // column_tiles).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    return offs_r, (pid % column_tiles) * BLOCK_C + tl.arange(0, BLOCK_C)


@triton.jit(do_not_specialize=["R", "C", "B"], do_not_specialize_on_alignment=["stride_cr"])
def _codes_pack_kernel(
    # output
    stored_ptr,
    # input
    codes_ptr,
    # sizes
    R,
    C,
    B,
    BITS: tl.constexpr,
    NUM: tl.constexpr,
    # strides
    stride_cr,
    stride_cc,
    # tiles
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program owns a [BLOCK_R, BLOCK_C] tile of bytes, in each of which ``NUM`` codes at most have bits."""
    offs_r, offs_b = _tile(B, BLOCK_R, BLOCK_C)
    mask_r, mask_b = offs_r < R, offs_b < B
    first = offs_b * 8 // BITS
    left = first * BITS - offs_b * 8  # where the first of them begins in the byte: in front of it, or at its start
    row = codes_ptr + offs_r[:, None] * stride_cr
    byte = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
    for i in tl.static_range(NUM):
        mask = mask_r[:, None] & (mask_b & (first + i < C))[None, :]
        code = tl.load(row + column_offsets(first + i, stride_cc)[None, :], mask=mask, other=0).to(tl.int32)
        byte |= _shifted(code & ((1 << BITS) - 1), (left + i * BITS)[None, :])
    stored = stored_ptr + offs_r[:, None] * B + offs_b[None, :]
    tl.store(stored, byte.to(tl.uint8), mask=mask_r[:, None] & mask_b[None, :])


@triton.jit(do_not_specialize=["R", "C", "B"], do_not_specialize_on_alignment=["stride_sr"])
def _codes_unpack_kernel(
    # output
    codes_ptr,
    # input
    stored_ptr,
    # sizes
    R,
    C,
    B,
    BITS: tl.constexpr,
    NUM: tl.constexpr,
    # strides
    stride_sr,
    stride_sb,
    # flags
    SIGNED: tl.constexpr,
    # tiles
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program owns a [BLOCK_R, BLOCK_C] tile of codes, each of which has bits in ``NUM`` bytes at most."""
    SIGN: tl.constexpr = 1 << (BITS - 1)
    offs_r, offs_c = _tile(C, BLOCK_R, BLOCK_C)
    mask_r, mask_c = offs_r < R, offs_c < C
    first, right = offs_c * BITS // 8, offs_c * BITS % 8
    row = stored_ptr + offs_r[:, None] * stride_sr
    word = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
    for i in tl.static_range(NUM):
        mask = mask_r[:, None] & (mask_c & (first + i < B))[None, :]
        byte = tl.load(row + column_offsets(first + i, stride_sb)[None, :], mask=mask, other=0).to(tl.int32)
        word |= byte << 8 * i
    code = (word >> right[None, :]) & ((1 << BITS) - 1)
    if SIGNED:
        code = (code ^ SIGN) - SIGN
    codes = codes_ptr + offs_r[:, None] * C + offs_c[None, :]
    tl.store(codes, code.to(codes_ptr.dtype.element_ty), mask=mask_r[:, None] & mask_c[None, :])


def _most(length: int, unit: int) -> int:
    """How many units at most have a part of a stretch of ``length`` that begins at a multiple of it."""
    return 1 + triton.cdiv(length - math.gcd(length, unit), unit)


def codes_pack(codes: Tensor, *, bits: int) -> Tensor:
    """Bytes of codes; the parameters are those of :func:`qgnn.reference.codes_pack`."""
    R, C = codes.shape
    B = -(-C * bits // 8)
    stored = torch.empty((R, B), dtype=torch.uint8, device=codes.device)
    if stored.numel():
        config = tuning.codes(B)
        with torch.cuda.device_of(codes):
            _codes_pack_kernel[(_num_tiles(R, B, config),)](
                stored_ptr=stored,
                codes_ptr=codes,
                R=R,
                C=C,
                B=B,
                BITS=bits,
                NUM=_most(8, bits),
                stride_cr=codes.stride(0),
                stride_cc=codes.stride(1),
                **config,
            )
    return stored


def codes_unpack(stored: Tensor, *, bits: int, num_codes: int, signed: bool) -> Tensor:
    """Codes of bytes; the parameters are those of :func:`qgnn.reference.codes_unpack`."""
    R, B = stored.shape
    narrow, wide = (torch.int8, torch.int16) if signed else (torch.uint8, torch.int32)
    codes = torch.empty((R, num_codes), dtype=narrow if bits <= 8 else wide, device=stored.device)
    if codes.numel():
        config = tuning.codes(num_codes)
        with torch.cuda.device_of(stored):
            _codes_unpack_kernel[(_num_tiles(R, num_codes, config),)](
                codes_ptr=codes,
                stored_ptr=stored,
                R=R,
                C=num_codes,
                B=B,
                BITS=bits,
                NUM=_most(bits, 8),
                stride_sr=stored.stride(0),
                stride_sb=stored.stride(1),
                SIGNED=signed,
                **config,
            )
    return codes


def _num_tiles(num_rows: int, num_columns: int, config: tuning.Config) -> int:
    return triton.cdiv(num_rows, config["BLOCK_R"]) * triton.cdiv(num_columns, config["BLOCK_C"])
