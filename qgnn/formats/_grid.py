"""Formats whose values lie on a :class:`qgnn.rounding.Grid`."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from qgnn.formats._format import Encoded, Format, round_to_float, round_to_integer
from qgnn.packing import Layout
from qgnn.rounding import Grid

_POISON = 255  # code of a NaN scale in E8M0, which stores exponents with 127 added


class GridFormat(Format):
    """A format whose values lie on a :class:`qgnn.rounding.Grid`."""

    @property
    @abstractmethod
    def grid(self) -> Grid:
        """The values of a block."""

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers of at most 8 bits without a zero point, which integer kernels multiply."""
        return self.grid.is_integer

    @property
    def _block_size(self) -> int | None:
        return self.grid.block_size or None

    def _layout(self, shape: tuple[int, ...], dim: int) -> Layout:
        grid = self.grid
        is_float = grid.min_exponent != grid.mantissa_bits
        return Layout(
            self.bits,
            shape,
            dim,
            signed=not grid.affine,
            mantissa_bits=grid.mantissa_bits if is_float else None,
            fraction_bits=grid.fraction_bits,
        )

    def _encode_rows(self, rows: Tensor, bits16: Tensor | None) -> Encoded:
        grid = self.grid
        if grid.affine:
            return _affine(rows, grid, bits16)
        block = grid.block_size or rows.shape[1]
        width = rows.shape[1]
        values = torch.nn.functional.pad(rows, (0, -width % block)).unflatten(1, (-1, block))
        largest = values.abs().amax(2)
        fraction, exponent = torch.frexp(largest)
        # frexp's fraction is from 1/2 to below 1, so its exponent is the logarithm rounded up, but for powers of two.
        exponent -= (fraction == 0.5) | (fraction == 0) if grid.round_up else 1
        shared = (exponent - grid.max_exponent).clamp_(-127, 127)
        shared = torch.where(largest == 0, -127, shared)
        finite = largest < float("inf")
        down = torch.where(finite, grid.fraction_bits - shared, 0)
        half = down >> 1  # no fp32 number is 2**142, the inverse of the smallest unit
        codes = (values * _power_of_two(half)[:, :, None] * _power_of_two(down - half)[:, :, None]).flatten(1)
        codes = codes[:, :width]
        if grid.min_exponent == grid.mantissa_bits:
            codes = round_to_integer(codes, bits16)
        else:
            codes = round_to_float(codes, grid.mantissa_bits, grid.min_exponent, bits16)
        codes.clamp_(grid.low, grid.high)
        if grid.block_size:
            scales = torch.where(finite, shared + 127, _POISON).to(torch.uint8).view(torch.float8_e8m0fnu)
            poisoned = (~finite).repeat_interleave(block, 1)[:, :width]
        else:
            poisoned = ~finite
            scales = (_power_of_two(shared) * 2.0**-grid.fraction_bits).masked_fill_(poisoned, float("nan"))
        return codes.masked_fill_(poisoned, 0), scales, None


def _affine(rows: Tensor, grid: Grid, bits16: Tensor | None) -> Encoded:
    low, high = rows.aminmax(dim=1, keepdim=True)
    spread, last = high - low, grid.high - grid.low
    inverse = torch.where(spread > 1e-30, torch.full_like(spread, last) / spread, 0.0)
    codes = round_to_integer((rows - low) * inverse, bits16).clamp_(0, last)
    finite = spread < float("inf")
    scales = (spread / torch.full_like(spread, last)).masked_fill_(~finite, float("nan"))
    return codes.masked_fill_(~finite, 0), scales, low


def _power_of_two(exponent: Tensor) -> Tensor:
    """``2**exponent`` in fp32, for integers from -127 to 127."""
    return (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu).float()
