"""Fixed point: integers with a power-of-two scale, or between the ends of a range."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qgnn.formats._format import check_flag, check_width
from qgnn.formats._grid import GridFormat
from qgnn.rounding import Grid


@dataclass(frozen=True)
class FixedPoint(GridFormat):
    r"""Two's complement numbers of ``b`` bits with one scale a slice; the fixed point of the quantized training study.

    Symmetric, the scale is a power of two, so that scaling is a shift:

    .. math:: s = 2^{\lceil \log_2 \max|x| \rceil - (b - 1)}, \quad
        q = \mathrm{clamp}(\mathrm{round}(x / s), -2^{b-1}, 2^{b-1} - 1), \quad \hat x = q s

    Affine, codes run evenly from the smallest value :math:`l` to the largest :math:`h`:

    .. math:: s = (h - l) / (2^b - 1), \quad q = \mathrm{clamp}(\mathrm{round}((x - l) / s), 0, 2^b - 1), \quad
        \hat x = q s + l

    Unlike :class:`Int`, whose symmetric scale is ``max|x| / (2**(b-1) - 1)``, up to half of the symmetric range is
    unused. A largest magnitude that is itself a power of two is code ``-2**(b-1)`` if it is negative, and clamped to
    ``2**(b-1) - 1`` otherwise. Scales below ``2**(-127 - (b-1))`` do not occur: smaller slices lose bits, down to
    zeros; a largest magnitude above ``2**127`` is clamped to about that. Of an affine slice narrower than 1e-30 all
    values become the smallest. An infinity or NaN, or a range that is not finite in fp32, makes its slice NaN, and
    nothing else.

    Symmetric fp16 slices with magnitudes above 32768 have a code for -65536, which fp16 has not. With up to 11 bits
    values round to it, and become -inf: to nearest those of at most ``-65536 + s / 2``, at random some below
    ``-65536 + s``.

    Args:
        bits: Width ``b`` of a code, 2 to 16. Up to 8, symmetric codes run on the integer kernels.
        affine: Whether a slice has a zero point.

    Raises:
        TypeError: If a field has the wrong type.
        ValueError: If ``bits`` is outside 2 to 16.

    Example:
        >>> qgnn.formats.FixedPoint(4).quantize(torch.tensor([1.0, 0.3, -0.8]))
        tensor([ 0.8750,  0.2500, -0.7500])
    """

    bits: int = 8
    affine: bool = False

    def __post_init__(self) -> None:
        check_width("FixedPoint", "bits", self.bits, 2, 16)
        check_flag("FixedPoint", "affine", self.affine)

    @property
    def grid(self) -> Grid:
        """The values of a slice."""
        low, high = -(2.0 ** (self.bits - 1)), 2.0 ** (self.bits - 1) - 1
        if self.affine:
            return Grid(0, False, 0, 0, 0, 0, low, high, True)
        fraction = self.bits - 1
        return Grid(0, True, 0, fraction, fraction, fraction, low, high, False)

    @property
    def bits_per_value(self) -> float:
        """Bits of one code; the scale of a slice (32 bits, 64 with a zero point) comes on top, once a slice."""
        return float(self.bits)

    @property
    def arithmetic_density(self) -> float | None:
        """7.7 for 8 bits, the number published for INT8; the study gives it for fixed point."""
        return 7.7 if self.bits == 8 else None

    def with_bits(self, bits: int) -> FixedPoint:
        """Fixed point of another width.

        Args:
            bits: The width.

        Raises:
            ValueError: If it is outside 2 to 16.
        """
        return replace(self, bits=bits)

    def __str__(self) -> str:
        """As ``fixed8`` or ``fixed8-affine``."""
        return f"fixed{self.bits}{'-affine' if self.affine else ''}"
