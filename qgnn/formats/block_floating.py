"""Block floating point: Microsoft's MSFP."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qgnn.formats._format import check_width
from qgnn.formats._grid import GridFormat
from qgnn.rounding import MAX_SHARED_BLOCK_SIZE, Grid

_ARITHMETIC_DENSITY = {7: 8.8, 6: 10.8, 5: 13.9, 4: 18.3, 3: 31.9, 2: 50.9}


@dataclass(frozen=True)
class MSFP(GridFormat):
    r"""Sign and ``m`` bits a value, and an 8-bit exponent that ``G`` consecutive values share.

    After `Rouhani et al., "Pushing the Limits of Narrow Precision Inferencing at Cloud Scale with Microsoft Floating
    Point" (NeurIPS 2020)
    <https://proceedings.neurips.cc/paper/2020/hash/747e32ab0fea7fbd2ad9ec03daa3f840-Abstract.html>`_:

    .. math:: e = \lceil \log_2 \max|x| \rceil, \quad
        q = \mathrm{clamp}(\mathrm{round}(x\, 2^{m - e}), -(2^m - 1), 2^m - 1), \quad \hat x = q\, 2^{e - m}

    MSFP12 has ``m = 3``: the number is 9 + m, those of exponent and sign included. A block maximum equal to a power of
    two would be code ``2**m``: it is clamped to ``2**m - 1``, as is all that rounds up to it. Exponents run from -127
    to 127: blocks below ``2**-127`` share that one and lose bits, denormals down to zeros, and blocks beyond
    ``2**127`` are clamped to about that. An infinity or NaN makes its block NaN (exponent code 255), and nothing else.

    Args:
        mantissa_bits: Bits ``m`` of a magnitude, 1 to 7.
        block_size: Values ``G`` of a block, a power of two from 2 to 128. The last block of a slice may be shorter.

    Raises:
        TypeError: If a field has the wrong type.
        ValueError: If a field is out of range.

    Example:
        >>> msfp12 = qgnn.formats.MSFP(3)
        >>> msfp12.bits_per_value, round(msfp12.memory_density, 2)
        (4.5, 7.11)
    """

    mantissa_bits: int
    block_size: int = 16

    def __post_init__(self) -> None:
        check_width("MSFP", "mantissa_bits", self.mantissa_bits, 1, 7)
        check_width("MSFP", "block_size", self.block_size, 2, MAX_SHARED_BLOCK_SIZE)
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"'MSFP' expects 'block_size' to be a power of two (got {self.block_size})")

    @property
    def bits(self) -> int:
        """Width of a code, sign and magnitude."""
        return 1 + self.mantissa_bits

    @property
    def grid(self) -> Grid:
        """The values of a block."""
        m = self.mantissa_bits
        return Grid(self.block_size, True, 0, m, m, m, -(2.0**m - 1), 2.0**m - 1, False)

    @property
    def bits_per_value(self) -> float:
        """Bits of one code and its share of the exponent."""
        return self.bits + 8 / self.block_size

    @property
    def arithmetic_density(self) -> float | None:
        """That of MSFP11 to MSFP16 with blocks of 16."""
        return _ARITHMETIC_DENSITY.get(self.mantissa_bits) if self.block_size == 16 else None

    def with_bits(self, bits: int) -> MSFP:
        """Codes of another width, sign included: MSFP with ``bits - 1`` bits of magnitude.

        Args:
            bits: The width.

        Raises:
            ValueError: If ``bits`` is outside 2 to 8.
        """
        check_width("MSFP.with_bits", "bits", bits, 2, 8)
        return replace(self, mantissa_bits=bits - 1)

    def __str__(self) -> str:
        """As ``msfp12``, or ``msfp12-g32`` where blocks are not of 16."""
        return f"msfp{9 + self.mantissa_bits}{'' if self.block_size == 16 else f'-g{self.block_size}'}"
