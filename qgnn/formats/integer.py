"""Integers with a scale a slice."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qgnn import ops
from qgnn.formats._format import Encoded, Format, check_flag, check_width
from qgnn.layout import Layout
from qgnn.reference._common import row_chunks
from qgnn.rng import random_bits16
from qgnn.rounding import absmax_scale, round_codes


@dataclass(frozen=True)
class Int(Format):
    r"""Integers of ``b`` bits with one fp32 scale (and, if asymmetric, one zero point) a slice.

    Symmetric, after `"Integer Quantization for Deep Learning Inference" <https://arxiv.org/abs/2004.09602>`_, the
    largest magnitude of a slice becomes the largest code, and 0 is exact:

    .. math:: q_{max} = 2^{b-1} - 1, \quad s = \max|x| / q_{max}, \quad q = \mathrm{round}(x / s), \quad \hat x = q s

    Asymmetric, codes run evenly from the smallest value :math:`l` to the largest :math:`h`:

    .. math:: s = (h - l) / (2^b - 1), \quad q = \mathrm{round}((x - l) / s), \quad \hat x = q s + l

    ``round`` is to nearest, halves up, or with a seed stochastic: up with the probability of the fraction, in steps of
    ``2**-16`` (:mod:`qgnn.rounding` has the arithmetic, in which no code is beyond the ends). Unlike
    :class:`FixedPoint` the scale is no power of two and uses the whole range. Symmetric slices whose magnitudes are at
    most 1e-30 become zeros; of asymmetric ones that are no wider than that, all values become the smallest. An infinity
    or NaN, or a range that is not finite in fp32, makes its slice NaN (the scale is NaN, the codes are zeros), and
    nothing else.

    Args:
        bits: Width ``b`` of a code, 2 to 8.
        symmetric: With ``True`` codes run from ``-(2**(bits-1) - 1)`` to ``2**(bits-1) - 1``, with ``False`` from 0 to
            ``2**bits - 1``.

    Raises:
        TypeError: If a field has the wrong type.
        ValueError: If ``bits`` is outside 2 to 8.

    Example:
        >>> q = qgnn.formats.Int(4).encode(torch.randn(10, 64))
        >>> q.codes.shape, q.scale.shape
        (torch.Size([10, 64]), torch.Size([10, 1]))
    """

    bits: int = 8
    symmetric: bool = True

    def __post_init__(self) -> None:
        check_width("Int", "bits", self.bits, 2, 8, "; wider codes do not fit an int8 kernel")
        check_flag("Int", "symmetric", self.symmetric)

    @property
    def is_integer(self) -> bool:
        """Whether codes have no zero point, so that integer kernels multiply them."""
        return self.symmetric

    @property
    def bits_per_value(self) -> float:
        """Bits of one code; the scale of a slice (32 bits, 64 with a zero point) comes on top, once a slice."""
        return float(self.bits)

    @property
    def arithmetic_density(self) -> float | None:
        """That of INT8 and INT4."""
        return {8: 7.7, 4: 20.9}.get(self.bits) if self.symmetric else None

    def _layout(self, shape: tuple[int, ...], dim: int) -> Layout:
        return Layout(self.bits, shape, dim, signed=self.symmetric)

    def _encode_rows(self, rows: Tensor, seed: Tensor | None) -> Encoded:
        if rows.shape[1] == 0:
            scale = rows.new_zeros((rows.shape[0], 1), dtype=torch.float32)
            return rows.to(torch.int8), scale, None if self.symmetric else scale.clone()
        if self.symmetric:
            codes, scale = ops.quantize(rows, seed, self.bits, "row", 1)
            return codes, scale[:, None], None
        codes = rows.new_empty(rows.shape, dtype=torch.uint8)
        low, high = (end.float() for end in rows.aminmax(dim=1, keepdim=True))
        # Codes 0 .. 2**bits - 1 are what the symmetric rule gives for one bit more on values that are never negative.
        scale, inverse = absmax_scale(high - low, self.bits + 1)
        for part in row_chunks(*rows.shape):
            bits16 = None if seed is None else random_bits16(part.start, part.stop - part.start, rows.shape[1], seed)
            codes[part] = round_codes(rows[part].float() - low[part], inverse[part], bits16, torch.uint8)
        return codes, scale, low

    def with_bits(self, bits: int) -> Int:
        """Integers of another width.

        Args:
            bits: The width.

        Raises:
            ValueError: If it is outside 2 to 8.
        """
        return replace(self, bits=bits)

    def __str__(self) -> str:
        """As ``int8`` or ``int4-affine``."""
        return f"int{self.bits}{'' if self.symmetric else '-affine'}"
