"""The microscaling formats of the Open Compute Project: MXINT8, MXFP8, MXFP6, MXFP4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from qgnn.formats._format import check_kind, only_width
from qgnn.formats._grid import GridFormat, float_grid
from qgnn.rounding import Grid

_BLOCK_SIZE = 32  # the one that the specification has concrete formats of
_Self = TypeVar("_Self", bound="_Microscaling")


class _Microscaling(GridFormat):
    """What the MX formats share: blocks of 32 with an E8M0 scale, and a width that their name fixes."""

    @property
    def bits_per_value(self) -> float:
        """Bits of an element and its share of the scale."""
        return self.bits + 8 / _BLOCK_SIZE

    def with_bits(self: _Self, bits: int) -> _Self:
        """The format itself, for its own width.

        Args:
            bits: Its width.

        Raises:
            ValueError: For any other width.
        """
        return only_width(self, bits)


@dataclass(frozen=True)
class MXINT8(_Microscaling):
    r"""8-bit integers with 6 fraction bits, and a power-of-two scale that 32 consecutive values share.

    After the `OCP Microscaling Formats (MX) Specification v1.0
    <https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf>`_ and `"Microscaling Data
    Formats for Deep Learning" <https://arxiv.org/abs/2310.10537>`_:

    .. math:: e = \lfloor \log_2 \max|x| \rfloor, \quad
        q = \mathrm{clamp}(\mathrm{round}(x\, 2^{6 - e}), -127, 127), \quad \hat x = q\, 2^{e - 6}

    The code -128 is not used, so that the format has no bias to either side. Unlike :class:`MSFP` the exponent is
    rounded down: a block maximum equal to a power of two is exact. Exponents run from -127 to 127: blocks below
    ``2**-127`` share that one and lose bits. An infinity or NaN makes its block NaN (scale code 255), and nothing
    else.

    Example:
        >>> q = qgnn.formats.MXINT8().encode(torch.randn(4, 64))  # 64 bytes of codes and 2 of scales a row
    """

    @property
    def bits(self) -> int:
        """Width of an element."""
        return 8

    @property
    def grid(self) -> Grid:
        """The values of a block."""
        return Grid(_BLOCK_SIZE, False, 0, 6, 7, 7, -127.0, 127.0, False)

    def __str__(self) -> str:
        return "mxint8"


class _Minifloat(_Microscaling):
    """What the MX formats with floating-point elements share."""

    kind: str

    @property
    def grid(self) -> Grid:
        """The values of a block."""
        return float_grid(self.kind, _BLOCK_SIZE)

    def __str__(self) -> str:
        """As ``mxfp8-e4m3``."""
        return f"mxfp{self.bits}-{self.kind}"


@dataclass(frozen=True)
class MXFP8(_Minifloat):
    r"""8-bit floats and a power-of-two scale that 32 consecutive values share.

    After the `OCP Microscaling Formats (MX) Specification v1.0
    <https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf>`_ and `"Microscaling Data
    Formats for Deep Learning" <https://arxiv.org/abs/2310.10537>`_:

    .. math:: s = 2^{\lfloor \log_2 \max|x| \rfloor - e_{max}}, \quad
        q = \mathrm{clamp}(\mathrm{round}(x / s)), \quad \hat x = q s

    with the exponent of the largest element :math:`e_{max}` (8 for e4m3, 15 for e5m2). Elements are rounded to the
    nearest one, subnormal ones included, and clamped to the largest finite one (448, 57344), never infinite or NaN
    themselves. Exponents of scales run from -127: smaller blocks share that one and lose bits. An infinity or NaN
    makes its block NaN (scale code 255), and nothing else. Elements are stored as :attr:`torch.float8_e4m3fn` or
    :attr:`torch.float8_e5m2`.

    Args:
        kind: ``"e4m3"`` or ``"e5m2"``: exponent and mantissa bits.

    Raises:
        TypeError: If ``kind`` is no string.
        ValueError: If ``kind`` is another string.

    Example:
        >>> y = qgnn.formats.MXFP8("e5m2").quantize(torch.randn(4, 64))
    """

    kind: str = "e4m3"

    def __post_init__(self) -> None:
        check_kind("MXFP8", self.kind, ("e4m3", "e5m2"))

    @property
    def bits(self) -> int:
        """Width of an element."""
        return 8


@dataclass(frozen=True)
class MXFP6(_Minifloat):
    """6-bit floats and a power-of-two scale that 32 consecutive values share: :class:`MXFP8` with narrower elements.

    The exponent of the largest element is 2 for e2m3 (7.5) and 4 for e3m2 (28); neither kind has infinities or NaN.

    Args:
        kind: ``"e2m3"`` or ``"e3m2"``: exponent and mantissa bits.

    Raises:
        TypeError: If ``kind`` is no string.
        ValueError: If ``kind`` is another string.

    Example:
        >>> q = qgnn.formats.MXFP6().encode(torch.randn(4, 64))  # 48 bytes of codes and 2 of scales a row
    """

    kind: str = "e2m3"

    def __post_init__(self) -> None:
        check_kind("MXFP6", self.kind, ("e2m3", "e3m2"))

    @property
    def bits(self) -> int:
        """Width of an element."""
        return 6


@dataclass(frozen=True)
class MXFP4(_Minifloat):
    """4-bit floats (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) and a power-of-two scale that 32 consecutive
    values share: :class:`MXFP8` with narrower elements, without infinities or NaN.

    Example:
        >>> q = qgnn.formats.MXFP4().encode(torch.randn(4, 64))  # 32 bytes of codes and 2 of scales a row
    """

    kind = "e2m1"

    @property
    def bits(self) -> int:
        """Width of an element."""
        return 4

    def __str__(self) -> str:
        return "mxfp4"
