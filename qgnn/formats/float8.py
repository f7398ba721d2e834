"""8-bit floating point with a scale a slice."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qgnn.formats._format import Encoded, Format, check_kind, only_width
from qgnn.formats._grid import float_grid
from qgnn.layout import FLOAT8, Layout
from qgnn.reference._common import row_chunks
from qgnn.reference.grids import round_elements_
from qgnn.rng import random_bits16
from qgnn.rounding import FLUSH


@dataclass(frozen=True)
class Float8(Format):
    r"""8-bit floats with an fp32 scale a slice, stored as :attr:`torch.float8_e4m3fn` or :attr:`torch.float8_e5m2`.

    After `"FP8 Formats for Deep Learning" <https://arxiv.org/abs/2209.05433>`_, with the scale that maps the largest
    magnitude of a slice to the largest element :math:`q_{max}` (448 for e4m3, 57344 for e5m2):

    .. math:: s = \max|x| / q_{max}, \quad q = \mathrm{clamp}(\mathrm{round}(x / s), -q_{max}, q_{max}), \quad
        \hat x = q s

    ``round`` goes to the nearest element, subnormal ones included. Unlike :class:`MXFP8` the scale uses the whole
    range, is no power of two and serves a whole slice. Slices whose magnitudes are at most 1e-30 become zeros. An
    infinity or NaN makes its slice NaN (the scale is NaN, the codes are zeros), and nothing else.

    Args:
        kind: ``"e4m3"`` or ``"e5m2"``: exponent and mantissa bits.

    Raises:
        TypeError: If ``kind`` is no string.
        ValueError: If ``kind`` is another string.

    Example:
        >>> q = qgnn.formats.Float8("e5m2").encode(torch.randn(4, 64))
        >>> q.storage.dtype
        torch.float8_e5m2
    """

    kind: str = "e4m3"

    def __post_init__(self) -> None:
        check_kind("Float8", self.kind, ("e4m3", "e5m2"))

    @property
    def bits(self) -> int:
        """Width of a code."""
        return 8

    @property
    def bits_per_value(self) -> float:
        """Bits of one code; the scale of a slice (32 bits) comes on top, once a slice."""
        return 8.0

    def _layout(self, shape: tuple[int, ...], dim: int) -> Layout:
        return Layout(8, shape, dim, mantissa_bits=float_grid(self.kind).mantissa_bits)

    def _encode_rows(self, rows: Tensor, seed: Tensor | None) -> Encoded:
        grid = float_grid(self.kind)
        codes = rows.new_empty(rows.shape, dtype=FLOAT8[grid.mantissa_bits])
        scales = rows.new_zeros((rows.shape[0], 1), dtype=torch.float32)
        for part in row_chunks(*rows.shape) if rows.shape[1] else ():
            values = rows[part].float()
            absmax = values.abs().amax(1, keepdim=True)
            poisoned = ~(absmax < float("inf"))
            live = ~poisoned & (absmax > FLUSH)
            inverse = torch.where(live, torch.full_like(absmax, grid.high) / absmax, 0.0)
            bits16 = None if seed is None else random_bits16(part.start, part.stop - part.start, rows.shape[1], seed)
            units = (values * inverse).masked_fill_(poisoned, 0.0)
            codes[part] = round_elements_(units, grid, bits16).to(codes.dtype)
            scale = torch.where(live, absmax * (1.0 / grid.high), 0.0)
            scales[part] = scale.masked_fill_(poisoned, float("nan"))
        return codes, scales, None

    def with_bits(self, bits: int) -> Float8:
        """The format itself, for its own width.

        Args:
            bits: Its width.

        Raises:
            ValueError: For any other width.
        """
        return only_width(self, bits)

    def __str__(self) -> str:
        """As ``fp8-e4m3``."""
        return f"fp8-{self.kind}"
