"""Rounding of a matrix to a grid whose blocks share a power of two, or to an affine one (``qgnn.rounding.Grid``).

    quantize_dequantize:  x [R, C]  ->  y [R, C] of the same type
    quantize_shared:      x [R, C]  ->  codes [R, C] int8, exponent [R, ceil(C / G)] uint8
                          x ~ codes * 2**(exponent - 127 - fraction_bits), exponent 255 for NaN

Numerics: fp32; powers of two are made from bits, a factor that may not be a normal number is applied as two. Products
by them are exact; of affine grids each operation is rounded once. Equal in every bit to the plain PyTorch definition.
Rows of codes lie a multiple of 16 bytes apart, and what lies in the gap is undefined.

Oracle: qgnn.reference.quantize_dequantize, quantize_shared
"""

from typing import Any

import torch
import triton
import triton.language as tl
from qgnn.kernels import tuning
from qgnn.kernels.blocks_tile import flip_order
from qgnn.kernels.memory import VECTOR_BYTES, check_columns, column_offsets, common_unit, empty_codes
from qgnn.kernels.rounding import HIGHEST, INFINITY_BITS, LOWEST, NAN_EXPONENT, load_seed, power_of_two, random_bits16
from torch import Tensor

_INTEGER = tl.constexpr(2.0**23)  # from here on all floats are integers
# Of narrower rows all units up to 16 are told apart: the widths are a model's, and in single values each would take up
# to twice as many instructions. Wider rows lie along the nodes of sampled batches: all widths are two kernels.
_MAX_FEATURES = 1024


@triton.jit
def round_to_integer(x, bits16, STOCHASTIC: tl.constexpr):
    """To nearest, halves to even; or down or up. From 2**23 on, where the clamp decides, it may be off."""
    if STOCHASTIC:
        floor = tl.floor(x)
        return floor + tl.where(((x - floor) * 65536.0).to(tl.int32) + bits16 >= 65536, 1.0, 0.0)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
        rounded = (magnitude + _INTEGER) - _INTEGER
        return (rounded.to(tl.int32, bitcast=True) | (bits & LOWEST)).to(tl.float32, bitcast=True)


@triton.jit
def clamp(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    return tl.where(x < LOW, LOW, tl.where(x > HIGH, HIGH, x))


@triton.jit
def shared_exponent(absmax_bits, ROUND_UP: tl.constexpr, MAX_EXPONENT: tl.constexpr):
    """The shared exponent + 127 of blocks with these largest magnitudes; 255 for what is not finite."""
    bits = absmax_bits
    if ROUND_UP:  # of a denormal all that matters is whether it rounds up to a normal number: below, the clamp decides
        bits += tl.where(absmax_bits < 0x00800000, 0x003FFFFF, 0x007FFFFF)
    shared = tl.maximum((bits >> 23) - MAX_EXPONENT, 0)
    return tl.where(absmax_bits < INFINITY_BITS, tl.minimum(shared, 254), NAN_EXPONENT)


@triton.jit(do_not_specialize=["R", "C_UNITS", "stream"], do_not_specialize_on_alignment=["stride_xr"])
def _quantize_grid_kernel(
    # outputs
    y_ptr,
    exponent_ptr,
    # inputs
    x_ptr,
    low_ptr,
    high_ptr,
    seed_ptr,
    # sizes
    R,
    C_UNITS,
    SIZE,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    PADDED: tl.constexpr,
    # strides: of codes, and of x in units and in columns
    stride_qr,
    stride_xr,
    stride_xc,
    # scalars
    stream,
    # the grid
    ROUND_UP: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    FRACTION_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    # flags
    IS_AFFINE: tl.constexpr,
    IS_UNIFORM: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    IS_FLAT: tl.constexpr,
    IS_FULL: tl.constexpr,
    # tiles
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program owns a tile of whole blocks, ``GROUP`` columns each, of a matrix with ``C_UNITS * UNIT`` columns,
    ``PADDED`` if rounded up to a power of two. With ``IS_FULL`` they are exactly one tile's.

    With ``IS_GIVEN`` the tile is a part of blocks that are rows, whose extrema (fp32) are given. With ``IS_FLAT`` there
    is one such row, of ``SIZE`` values, folded into rows of ``C``: their random bits are the same."""
    GROUPS: tl.constexpr = BLOCK_C // GROUP
    LEVELS: tl.constexpr = HIGH - LOW
    C = BLOCK_C if IS_FULL else C_UNITS * UNIT
    pid = tl.program_id(0)
    if PADDED <= BLOCK_C:
        first_row, first_col = pid.to(tl.int64) * BLOCK_R, 0
    else:
        column_tiles = (C + BLOCK_C - 1) // BLOCK_C
        first_row, first_col = (pid // column_tiles).to(tl.int64) * BLOCK_R, (pid % column_tiles) * BLOCK_C
    offs_r = first_row + tl.arange(0, BLOCK_R)
    offs_c = first_col + tl.arange(0, BLOCK_C)
    mask_r = offs_r < R
    mask = mask_r[:, None] & (offs_c < C)[None, :]
    if IS_FLAT:
        mask &= offs_r[:, None] * C + offs_c[None, :] < SIZE
    x_row = x_ptr + offs_r[:, None] * stride_xr * UNIT
    x = tl.load(x_row + column_offsets(offs_c, stride_xc)[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32).reshape(BLOCK_R * GROUPS, GROUP)
    bits16 = 0
    if STOCHASTIC:
        bits16 = random_bits16(load_seed(seed_ptr, stream), offs_r, first_col, PADDED, BLOCK_R, BLOCK_C)
        bits16 = bits16.reshape(BLOCK_R * GROUPS, GROUP)

    shared = tl.zeros((BLOCK_R * GROUPS,), tl.int32)
    offs_given = offs_r * (0 if IS_FLAT else 1)
    if IS_AFFINE:
        if IS_GIVEN:
            low = tl.load(low_ptr + offs_given, mask=mask_r, other=0.0)
            high = tl.load(high_ptr + offs_given, mask=mask_r, other=0.0)
        else:
            key = flip_order(x.to(tl.int32, bitcast=True))
            inside = mask.reshape(BLOCK_R * GROUPS, GROUP)
            low = flip_order(tl.min(tl.where(inside, key, HIGHEST), axis=1)).to(tl.float32, bitcast=True)
            high = flip_order(tl.max(tl.where(inside, key, LOWEST), axis=1)).to(tl.float32, bitcast=True)
        width = high - low
        is_wide = width > 1e-30
        inverse = tl.where(is_wide, tl.div_rn(LEVELS, tl.where(is_wide, width, 1.0)), 0.0)
        code = clamp(round_to_integer((x - low[:, None]) * inverse[:, None], bits16, STOCHASTIC), 0.0, LEVELS)
        y = code * tl.div_rn(width, LEVELS)[:, None] + low[:, None]
        poisoned = (width.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= INFINITY_BITS
    else:
        if IS_GIVEN:
            absmax = tl.load(high_ptr + offs_given, mask=mask_r, other=0.0)
            absmax_bits = absmax.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        else:
            absmax_bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        shared = shared_exponent(absmax_bits, ROUND_UP, MAX_EXPONENT)
        poisoned = shared == NAN_EXPONENT
        unit = shared - (127 + FRACTION_BITS)
        half = unit >> 1
        t = x * power_of_two(-half)[:, None] * power_of_two(half - unit)[:, None]
        if IS_UNIFORM:
            y = round_to_integer(t, bits16, STOCHASTIC)
        else:
            own = ((t.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
            exponent = tl.maximum(own, MIN_EXPONENT) - MANTISSA_BITS
            y = power_of_two(exponent) * round_to_integer(t * power_of_two(-exponent), bits16, STOCHASTIC)
        y = clamp(y, LOW, HIGH)
        if y_ptr.dtype.element_ty != tl.int8:
            y = y * power_of_two(half)[:, None] * power_of_two(unit - half)[:, None]

    if y_ptr.dtype.element_ty == tl.int8:
        q = tl.where(poisoned[:, None], 0.0, y).to(tl.int8).reshape(BLOCK_R, BLOCK_C)
        # What ends the row may write into the gap behind it: whole vectors, whatever the width.
        q_row = y_ptr + offs_r[:, None] * stride_qr + offs_c[None, :]
        tl.store(q_row, q, mask=mask if IS_FLAT else mask_r[:, None] & (offs_c < stride_qr)[None, :])
        num_blocks = 1 if IS_GIVEN else (C + GROUP - 1) // GROUP
        index = tl.arange(0, BLOCK_R * GROUPS)
        row, group = first_row + index // GROUPS, first_col // GROUP + index % GROUPS
        is_first = (row < (1 if IS_FLAT else R)) & (group < num_blocks)
        tl.store(exponent_ptr + row * num_blocks + group, shared.to(tl.uint8), mask=is_first)
    else:
        y = tl.where(poisoned[:, None], float("nan"), y).reshape(BLOCK_R, BLOCK_C)
        y_row = y_ptr + offs_r[:, None] * C + offs_c[None, :]
        tl.store(y_row, y.to(y_ptr.dtype.element_ty), mask=mask)


def _launch(y: Tensor, exponent: Tensor | None, x: Tensor, grid: Any, seed: Tensor | None, stream: int) -> None:
    """Fill ``y``, values or codes, and ``exponent``; ``x`` is not empty."""
    R, C = x.shape
    size, (stride_xr, stride_xc), stride_qr = C, x.stride(), y.stride(0)
    group = min(grid.block_size or C, C)
    if group < C and (group & (group - 1) or group > tuning.QUANTIZE_GRID_MAX_COLUMNS):
        raise ValueError(
            f"'quantize_dequantize' and 'quantize_shared' expect 'block_size' to be a power of two up to "
            f"{tuning.QUANTIZE_GRID_MAX_COLUMNS}, or 0 for whole rows (got {grid.block_size})"
        )
    low = high = None
    is_given = group > tuning.QUANTIZE_GRID_MAX_COLUMNS
    with torch.cuda.device_of(x):
        if is_given and grid.affine:
            low, high = (extremum.float() for extremum in torch.aminmax(x, dim=1))
        elif is_given:
            high = torch.linalg.vector_norm(x, float("inf"), dim=1).float()
        is_flat = is_given and R == 1 and x.stride(1) == 1
        if is_flat:  # any length is one kernel
            C = tuning.QUANTIZE_GRID_MAX_COLUMNS
            R, stride_xr, stride_qr = triton.cdiv(size, C), C, C
        check_columns("quantize_dequantize" if exponent is None else "quantize_shared", C)
        config = tuning.quantize_grid(C, group)
        unit, block_c = common_unit(C, stride_xr) if stride_xc == 1 else 1, config["BLOCK_C"]
        if unit < VECTOR_BYTES and C > _MAX_FEATURES:
            unit = 1
        num_programs = triton.cdiv(R, config["BLOCK_R"]) * triton.cdiv(C, block_c)
        _quantize_grid_kernel[(num_programs,)](
            y_ptr=y,
            exponent_ptr=exponent,
            x_ptr=x,
            low_ptr=low,
            high_ptr=high,
            seed_ptr=seed,
            R=R,
            C_UNITS=C // unit,
            SIZE=size,
            GROUP=block_c if group >= C or is_given else group,
            UNIT=unit,
            PADDED=triton.next_power_of_2(C),
            stride_qr=stride_qr,
            stride_xr=stride_xr // unit,
            stride_xc=stride_xc,
            stream=stream,
            ROUND_UP=grid.round_up,
            MAX_EXPONENT=grid.max_exponent,
            FRACTION_BITS=grid.fraction_bits,
            MANTISSA_BITS=grid.mantissa_bits,
            MIN_EXPONENT=grid.min_exponent,
            LOW=float(grid.low),
            HIGH=float(grid.high),
            IS_AFFINE=grid.affine,
            IS_UNIFORM=grid.is_uniform,
            STOCHASTIC=seed is not None,
            IS_GIVEN=is_given,
            IS_FLAT=is_flat,
            IS_FULL=block_c == C,
            **config,
        )


def quantize_dequantize(x: Tensor, grid: Any, *, seed: Tensor | None = None, stream: int = 0) -> Tensor:
    """The values of ``grid`` that those of ``x`` become; the parameters are those of
    :func:`qgnn.reference.quantize_dequantize`."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _launch(y, None, x, grid, seed, stream)
    return y


def quantize_shared(x: Tensor, grid: Any, *, seed: Tensor | None = None, stream: int = 0) -> tuple[Tensor, Tensor]:
    """Codes of a grid of integers and exponents of blocks; the parameters are those of
    :func:`qgnn.reference.quantize_shared`."""
    R, C = x.shape
    num_blocks = triton.cdiv(C, grid.block_size) if grid.block_size else 1
    codes = empty_codes(R, C, x.device)
    if x.numel() == 0:
        return codes, torch.zeros((R, num_blocks), dtype=torch.uint8, device=x.device)
    exponent = torch.empty((R, num_blocks), dtype=torch.uint8, device=x.device)
    _launch(codes, exponent, x, grid, seed, stream)
    return codes, exponent
