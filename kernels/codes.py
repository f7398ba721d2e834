"""Codes of 1 to 16 bits in bytes, a little-endian bit stream along each row, and back.

    codes_pack:    codes [R, C] int8, uint8, or int16 above 8 bits  ->  stored [R, ceil(C * bits / 8)] uint8
    codes_unpack:  stored                                           ->  codes [R, C] int8 or uint8, int16 or int32 above

Numerics: integers alone. Eight codes, which fill as many bytes as each has bits, are a group: two words of four codes,
in int32 up to 8 bits and int64 above. Where rows are aligned, as quantizing kernels lay them out, a thread reads the
codes of a word at once.

Oracle: qgnn.reference.codes_pack, codes_unpack
"""

import torch
import triton
import triton.language as tl
from qgnn.kernels import tuning
from qgnn.kernels.memory import check_columns, column_offsets, common_unit
from torch import Tensor


@triton.jit
def _groups_of_tile(G, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr):
    """Row and group in the row of each group of this program's tile, [BLOCK_R * BLOCK_G]; ``G`` are in a row, whose
    codes and bytes may be more than 32 bits count."""
    pid = tl.program_id(0)
    tiles = (G + BLOCK_G - 1) // BLOCK_G
    index = tl.arange(0, BLOCK_R * BLOCK_G)
    first_row, first_group = (pid // tiles).to(tl.int64) * BLOCK_R, (pid % tiles).to(tl.int64) * BLOCK_G
    return first_row + index // BLOCK_G, first_group + index % BLOCK_G


@triton.jit
def _load_word(codes_ptr, row, first, inside, C, stride_cc, BITS: tl.constexpr, WORD: tl.constexpr):
    """The codes ``first`` to ``first + 3`` of rows side by side in a word."""
    four = tl.arange(0, 4)
    offs_c = first[:, None] + four[None, :]
    mask = inside[:, None] & (offs_c < C)
    codes = tl.load(codes_ptr + row[:, None] + column_offsets(offs_c, stride_cc), mask=mask, other=0).to(WORD)
    return tl.sum((codes & ((1 << BITS) - 1)) << (four * BITS)[None, :].to(WORD), axis=1)


@triton.jit(do_not_specialize=["R", "C_UNITS"], do_not_specialize_on_alignment=["stride_cr"])
def _codes_pack_kernel(
    # output
    stored_ptr,
    # input
    codes_ptr,
    # sizes
    R,
    C_UNITS,
    UNIT: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    # strides: of rows in units
    stride_cr,
    stride_cc,
    # tiles
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """One program owns ``BLOCK_G`` groups of each of ``BLOCK_R`` rows of ``C_UNITS * UNIT`` codes. ``BYTES`` is a power
    of two of at least ``BITS``."""
    C = C_UNITS * UNIT
    WORD: tl.constexpr = tl.int32 if BITS <= 8 else tl.int64
    HALF: tl.constexpr = 4 * BITS  # where the second word begins
    offs_r, group = _groups_of_tile((C + 7) // 8, BLOCK_R, BLOCK_G)
    inside = offs_r < R
    row = offs_r * stride_cr * UNIT
    low = _load_word(codes_ptr, row, group * 8, inside, C, stride_cc, BITS, WORD)
    high = _load_word(codes_ptr, row, group * 8 + 4, inside, C, stride_cc, BITS, WORD)

    byte = tl.arange(0, BYTES)
    bit = (byte * 8).to(WORD)[None, :]
    of_low = tl.where(bit < HALF, low[:, None] >> tl.minimum(bit, HALF - 1), 0)
    of_high = tl.where(bit >= HALF, high[:, None] >> tl.minimum(tl.maximum(bit - HALF, 0), HALF - 1), 0)
    across = (bit < HALF) & (bit + 8 > HALF)
    of_high |= tl.where(across, high[:, None] << tl.maximum(HALF - bit, 0) % 8, 0)
    num_bytes = (C.to(tl.int64) * BITS + 7) // 8
    offs_b = group[:, None] * BITS + byte[None, :]
    mask = inside[:, None] & (byte < BITS)[None, :] & (offs_b < num_bytes)
    tl.store(stored_ptr + (offs_r * num_bytes)[:, None] + offs_b, (of_low | of_high).to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["R", "C_UNITS"], do_not_specialize_on_alignment=["stride_sr"])
def _codes_unpack_kernel(
    # output
    codes_ptr,
    # input
    stored_ptr,
    # sizes
    R,
    C_UNITS,
    UNIT: tl.constexpr,
    BITS: tl.constexpr,
    # strides
    stride_sr,
    stride_sb,
    # flags
    SIGNED: tl.constexpr,
    # tiles
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """One program owns ``BLOCK_G`` groups of each of ``BLOCK_R`` rows of ``C_UNITS * UNIT`` codes."""
    C = C_UNITS * UNIT
    WORD: tl.constexpr = tl.int32 if BITS <= 8 else tl.int64
    HALF: tl.constexpr = 4 * BITS
    SIGN: tl.constexpr = 1 << (BITS - 1)
    offs_r, group = _groups_of_tile((C + 7) // 8, BLOCK_R, BLOCK_G)
    inside = offs_r < R
    num_bytes = (C.to(tl.int64) * BITS + 7) // 8
    row = stored_ptr + offs_r * stride_sr
    low = tl.zeros((BLOCK_R * BLOCK_G,), WORD)
    high = tl.zeros((BLOCK_R * BLOCK_G,), WORD)
    for i in tl.static_range(BITS):
        offs_b = group * BITS + i
        byte = tl.load(row + column_offsets(offs_b, stride_sb), mask=inside & (offs_b < num_bytes), other=0).to(WORD)
        if 8 * i < HALF:
            low |= byte << 8 * i
        if 8 * i >= HALF:
            high |= byte << 8 * i - HALF
        elif 8 * i + 8 > HALF:
            high |= byte >> HALF - 8 * i

    place = tl.arange(0, 8)
    word = tl.where((place < 4)[None, :], low[:, None], high[:, None])
    code = (word >> (place % 4 * BITS)[None, :].to(WORD)) & ((1 << BITS) - 1)
    if SIGNED:
        code = (code ^ SIGN) - SIGN
    offs_c = group[:, None] * 8 + place[None, :]
    codes = codes_ptr + (offs_r * C)[:, None] + offs_c
    tl.store(codes, code.to(codes_ptr.dtype.element_ty), mask=inside[:, None] & (offs_c < C))


def codes_pack(codes: Tensor, *, bits: int) -> Tensor:
    """Bytes of codes; the parameters are those of :func:`qgnn.reference.codes_pack`."""
    R, C = codes.shape
    check_columns("codes_pack", C)
    stored = torch.empty((R, -(-C * bits // 8)), dtype=torch.uint8, device=codes.device)
    if stored.numel():
        config, unit = tuning.codes(C), _unit(C, codes.stride(0))
        with torch.cuda.device_of(codes):
            _codes_pack_kernel[(_num_tiles(R, C, config),)](
                stored_ptr=stored,
                codes_ptr=codes,
                R=R,
                C_UNITS=C // unit,
                UNIT=unit,
                BITS=bits,
                BYTES=triton.next_power_of_2(bits),
                stride_cr=codes.stride(0) // unit,
                stride_cc=codes.stride(1),
                **config,
            )
    return stored


def codes_unpack(stored: Tensor, *, bits: int, num_codes: int, signed: bool) -> Tensor:
    """Codes of bytes; the parameters are those of :func:`qgnn.reference.codes_unpack`."""
    R, C = stored.shape[0], num_codes
    check_columns("codes_unpack", C)
    narrow, wide = (torch.int8, torch.int16) if signed else (torch.uint8, torch.int32)
    codes = torch.empty((R, C), dtype=narrow if bits <= 8 else wide, device=stored.device)
    if codes.numel():
        config, unit = tuning.codes(C), _unit(C)
        with torch.cuda.device_of(stored):
            _codes_unpack_kernel[(_num_tiles(R, C, config),)](
                codes_ptr=codes,
                stored_ptr=stored,
                R=R,
                C_UNITS=C // unit,
                UNIT=unit,
                BITS=bits,
                stride_sr=stored.stride(0),
                stride_sb=stored.stride(1),
                SIGNED=signed,
                **config,
            )
    return codes


def _unit(num_codes: int, *strides: int) -> int:
    """Whole groups where rows have them, or single codes: two kernels for all sizes of a tile."""
    return 8 if common_unit(num_codes, *strides) >= 8 else 1


def _num_tiles(num_rows: int, num_codes: int, config: tuning.Config) -> int:
    return triton.cdiv(num_rows, config["BLOCK_R"]) * triton.cdiv(triton.cdiv(num_codes, 8), config["BLOCK_G"])
