"""Formats whose values lie on a :class:`qgnn.rounding.Grid`."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from qgnn.formats._format import Encoded, Format
from qgnn.packing import Layout
from qgnn.reference.grids import affine_codes, elements, from_blocks, to_blocks
from qgnn.rounding import Grid, scale_by_power

_BIAS, _NAN = 127, 255  # E8M0 stores exponents with 127 added; 255 is NaN


class GridFormat(Format):
    """A format whose values lie on a :class:`qgnn.rounding.Grid`."""

    @property
    @abstractmethod
    def grid(self) -> Grid:
        """The values of a block."""

    @property
    def _block_size(self) -> int | None:
        return self.grid.block_size or None

    def _layout(self, shape: tuple[int, ...], dim: int) -> Layout:
        grid = self.grid
        is_float = not (grid.affine or grid.is_uniform)
        return Layout(
            self.bits,
            shape,
            dim,
            signed=not grid.affine,
            mantissa_bits=grid.mantissa_bits if is_float else None,
            fraction_bits=grid.fraction_bits,
        )

    def _encode_rows(self, rows: Tensor, bits16: Tensor | None) -> Encoded:
        grid, width = self.grid, rows.shape[1]
        size = min(grid.block_size or width, width)
        blocks, bits = to_blocks(rows, size), None if bits16 is None else to_blocks(bits16, size)
        if grid.affine:
            codes, step, low = affine_codes(blocks, grid, bits)
            return from_blocks(codes, width), step.squeeze(2), low.squeeze(2)
        codes, shared, poisoned = elements(blocks, grid, bits)
        if grid.block_size:
            code = (shared + _BIAS).masked_fill_(poisoned, _NAN).to(torch.uint8)
            return from_blocks(codes, width), code.view(torch.float8_e8m0fnu).squeeze(2), None
        unit = scale_by_power(torch.ones_like(shared, dtype=torch.float32), shared - grid.fraction_bits)
        return from_blocks(codes, width), unit.masked_fill_(poisoned, float("nan")).squeeze(2), None
