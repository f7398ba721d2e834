"""Formats whose values lie on a :class:`qgnn.rounding.Grid`."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from qgnn import ops
from qgnn.formats._format import Encoded, Format
from qgnn.layout import FLOAT8, Layout
from qgnn.reference.grids import affine_codes_, blocks_of_rows, elements_, from_blocks, stored_exponent
from qgnn.rng import make_seed
from qgnn.rounding import Grid, shared_scale


def float_grid(kind: str, block_size: int = 0) -> Grid:
    """The grid of floating-point elements, by the bits of their exponent and mantissa."""
    # Written here, as a compiler may take the numbers of a global table for variables.
    max_exponent, mantissa_bits, min_exponent, largest = {
        "e4m3": (8, 3, -6, 448.0),
        "e5m2": (15, 2, -14, 57344.0),
        "e2m3": (2, 3, 0, 7.5),
        "e3m2": (4, 2, -2, 28.0),
        "e2m1": (2, 1, 0, 6.0),
    }[kind]
    return Grid(block_size, False, max_exponent, 0, mantissa_bits, min_exponent, -largest, largest, False)


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

    @property
    def _is_integer_grid(self) -> bool:
        """Whether codes are integers, of whatever width."""
        return self.grid.affine or self.grid.is_uniform

    def _layout(self, shape: tuple[int, ...], dim: int) -> Layout:
        grid = self.grid
        is_float = not self._is_integer_grid
        return Layout(
            self.bits,
            shape,
            dim,
            signed=not grid.affine,
            mantissa_bits=grid.mantissa_bits if is_float else None,
            fraction_bits=grid.fraction_bits,
        )

    def _encode_rows(self, rows: Tensor, seed: Tensor | None) -> Encoded:
        grid = self.grid
        if grid.is_integer:
            codes, exponent = ops.quantize_shared(_at_most_fp32(rows), seed, 0, *grid)
            return codes, self._scales(exponent), None
        num_rows, width = rows.shape
        num_blocks = -(-width // grid.block_size) if grid.block_size else 1
        codes = rows.new_empty((num_rows, width), dtype=self._dtype)
        scales = rows.new_zeros((num_rows, num_blocks), dtype=torch.float32 if grid.affine else torch.uint8)
        zero = rows.new_zeros((num_rows, num_blocks), dtype=torch.float32) if grid.affine else None
        for part, blocks, bits16 in blocks_of_rows(rows, grid, seed, torch.float32):
            if zero is not None:
                values, step, low = affine_codes_(blocks, grid, bits16)
                scales[part], zero[part] = step.squeeze(2), low.squeeze(2)
            else:
                values, shared, poisoned = elements_(blocks, grid, bits16)
                scales[part] = stored_exponent(shared, poisoned)
            codes[part] = from_blocks(values, width).to(codes.dtype)
        return codes, scales if grid.affine else self._scales(scales), zero

    @property
    def _dtype(self) -> torch.dtype:
        """The narrowest type that holds codes until they are packed."""
        if not self._is_integer_grid:
            return FLOAT8[self.grid.mantissa_bits]
        if not self.grid.affine:
            return torch.int16
        return torch.uint8 if self.bits <= 8 else torch.int32  # without a sign, 16 bits do not fit int16

    def _scales(self, exponent: Tensor) -> Tensor:
        """Shared exponents as they are stored: of blocks those, of slices the fp32 factors of codes."""
        # torch's own compiler has no code for numbers of the exponents' type, only for their bytes, which products of
        # integers read.
        converted = torch.compiler.is_compiling() and not self.is_integer
        if self.grid.block_size and not converted:
            return exponent.view(torch.float8_e8m0fnu)
        return shared_scale(exponent, self.grid.fraction_bits)

    def quantize(self, x: Tensor, dim: int | None = -1, seed: int | Tensor | None = None) -> Tensor:
        """Fake quantization in one pass over the values.

        Args:
            x: As in :meth:`Format.quantize`.
            dim: As in :meth:`Format.encode`.
            seed: As in :meth:`Format.encode`.

        Raises:
            TypeError: As :meth:`Format.quantize`.
            ValueError: As :meth:`Format.quantize`.
            IndexError: As :meth:`Format.quantize`.
        """
        moved, rows = self._rows("quantize", x, dim)
        key = None if seed is None else make_seed(seed, x.device)
        rounded = ops.quantize_dequantize(_at_most_fp32(rows), key, 0, *self.grid).view(moved.shape).to(x.dtype)
        return rounded if dim is None else rounded.movedim(-1, dim)


def _at_most_fp32(x: Tensor) -> Tensor:
    """``x`` in a type that the operators take."""
    return x.float() if x.dtype == torch.float64 else x
