"""Values on grids with a shared power of two, and on affine ones: number formats that are emulated or kept as codes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from qgnn.reference._common import compute_dtype, row_chunks, stream_seed
from qgnn.rng import random_bits16
from qgnn.rounding import EXPONENT_BIAS, FLUSH, NAN_EXPONENT, Grid, scale_by_power_


def blocks_of_rows(
    x: Tensor, grid: Grid, seed: Tensor | None, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """The rows [R, C] of a matrix by parts: which these are, a copy of them in blocks [R, B, G], and random bits."""
    num_rows, width = x.shape
    size = min(grid.block_size or width, width)
    for rows in row_chunks(num_rows, width) if width else ():
        yield rows, _to_blocks(x[rows].to(dtype), size), _bits_of_rows(rows, width, size, seed)


def _bits_of_rows(rows: slice, width: int, size: int, seed: Tensor | None) -> Tensor | None:
    if seed is None:
        return None
    return _to_blocks(random_bits16(rows.start, rows.stop - rows.start, width, seed), size)


def _to_blocks(x: Tensor, size: int) -> Tensor:
    """[R, C] -> [R, B, size]; the last column is repeated, which changes no extremum."""
    missing = -x.shape[1] % size
    return torch.cat([x, x[:, -1:].expand(-1, missing)], 1).unflatten(1, (-1, size))


def from_blocks(blocks: Tensor, width: int) -> Tensor:
    """[R, B, size] -> [R, C]."""
    return blocks.flatten(1)[:, :width]


# A trailing underscore: the first argument is the caller's own copy, which is used up, as parts are large.


def _round_(x: Tensor, bits16: Tensor | None) -> Tensor:
    """To nearest, halves to even; with random bits, down or up."""
    if bits16 is None:
        return x.round_()
    floor = x.floor()
    return floor.add_(x.sub_(floor).mul_(65536.0).int().add_(bits16).bitwise_right_shift_(16))


def _shared_exponent(absmax: Tensor, grid: Grid) -> Tensor:
    mantissa, exponent = torch.frexp(absmax)  # absmax = mantissa * 2**exponent, mantissa from 0.5 to below 1
    rounded = exponent - (mantissa == 0.5).int() if grid.round_up else exponent - 1
    shared = (rounded - grid.max_exponent).clamp(-EXPONENT_BIAS, EXPONENT_BIAS)
    return shared.masked_fill_(absmax == 0, -EXPONENT_BIAS)


def elements_(blocks: Tensor, grid: Grid, bits16: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Elements [R, B, G] in units of their block, its shared exponent and whether it is poisoned: [R, B, 1]."""
    absmax = blocks.abs().amax(2, keepdim=True)
    poisoned = ~(absmax < float("inf"))
    shared = _shared_exponent(absmax.masked_fill(poisoned, 0.0), grid)
    t = scale_by_power_(blocks.masked_fill_(poisoned, 0.0), grid.fraction_bits - shared)
    return round_elements_(t, grid, bits16), shared, poisoned


def round_elements_(t: Tensor, grid: Grid, bits16: Tensor | None) -> Tensor:
    """The elements of a grid with a shared power of two that values in units of their block become."""
    kind, mantissa, bias = (torch.int64, 52, 1023) if t.dtype == torch.float64 else (torch.int32, 23, 127)
    # The exponent of a value is a power of two as it stands; of denormal numbers it is 0, which no grid comes near.
    own = t.view(kind) & ((2 * bias + 1) << mantissa)
    step = own.clamp_min_((grid.min_exponent + bias) << mantissa).sub_(grid.mantissa_bits << mantissa)
    t.mul_((((2 * bias) << mantissa) - step).view(t.dtype))
    return _round_(t, bits16).mul_(step.view(t.dtype)).clamp_(grid.low, grid.high)


def affine_codes_(blocks: Tensor, grid: Grid, bits16: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [R, B, G] of an affine grid, from 0 on, the step between them, NaN where a block is poisoned, and the value
    of code 0: [R, B, 1]."""
    low, high = blocks.aminmax(dim=2, keepdim=True)
    width = high - low
    levels = torch.full_like(width, grid.high - grid.low)  # a division by a number is not rounded once on every device
    inverse = torch.where(width > FLUSH, levels / width, 0.0)
    poisoned = ~(width < float("inf"))
    codes = _round_(blocks.sub_(low).mul_(inverse), bits16).clamp_(0.0, grid.high - grid.low)
    codes.masked_fill_(poisoned, 0.0)
    return codes, (width / levels).masked_fill(poisoned, float("nan")), low


def stored_exponent(shared: Tensor, poisoned: Tensor) -> Tensor:
    """Shared exponents [R, B, 1] as bytes [R, B]."""
    return (shared + EXPONENT_BIAS).masked_fill_(poisoned, NAN_EXPONENT).squeeze(2).to(torch.uint8)


def quantize_dequantize(x: Tensor, grid: Grid, *, seed: Tensor | None = None, stream: int = 0) -> Tensor:
    """The values of a :class:`qgnn.rounding.Grid` that the values of a matrix become.

    Args:
        x: Values.
        grid: The grid; its docstring has the formula.
        seed: Seed of the stochastic rounding, or ``None`` to round to nearest.
        stream: Number of the seed's stream.

    Shapes:
        - **input:** ``[R, C]``, float
        - **output:** ``[R, C]`` of the same type
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for rows, blocks, bits16 in blocks_of_rows(x, grid, stream_seed(seed, stream), compute_dtype(x)):
        if grid.affine:
            codes, step, low = affine_codes_(blocks, grid, bits16)
            values = codes.mul_(step).add_(low)
        else:
            values_in_units, shared, poisoned = elements_(blocks, grid, bits16)
            values = scale_by_power_(values_in_units, shared - grid.fraction_bits).masked_fill_(poisoned, float("nan"))
        out[rows] = from_blocks(values, x.shape[1]).to(x.dtype)
    return out


def quantize_shared(x: Tensor, grid: Grid, *, seed: Tensor | None = None, stream: int = 0) -> tuple[Tensor, Tensor]:
    """The codes of :func:`quantize_dequantize` on a grid of integers of at most 8 bits, and the exponents of blocks::

        x ~ codes * 2**(exponent - 127 - grid.fraction_bits)           exponent 255: NaN

    Args:
        x: Values.
        grid: The grid.
        seed: Seed of the stochastic rounding, or ``None`` to round to nearest.
        stream: Number of the seed's stream.

    Shapes:
        - **input:** ``[R, C]``, float
        - **output:** codes int8 ``[R, C]``; exponent uint8 ``[R, ceil(C / G)]``, ``[R, 1]`` of whole rows
    """
    num_rows, width = x.shape
    num_blocks = -(-width // grid.block_size) if grid.block_size else 1
    codes = torch.empty((num_rows, width), dtype=torch.int8, device=x.device)
    exponent = torch.zeros((num_rows, num_blocks), dtype=torch.uint8, device=x.device)
    for rows, blocks, bits16 in blocks_of_rows(x, grid, stream_seed(seed, stream), compute_dtype(x)):
        values_in_units, shared, poisoned = elements_(blocks, grid, bits16)
        codes[rows] = from_blocks(values_in_units, width).to(torch.int8)
        exponent[rows] = stored_exponent(shared, poisoned)
    return codes, exponent
