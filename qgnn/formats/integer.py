"""Integers with a scale a slice."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qgnn.formats._format import Format, check_width
from qgnn.qtensor import QTensor
from qgnn.rng import make_seed, random_bits16
from qgnn.rounding import absmax_scale, round_codes


@dataclass(frozen=True)
class Int(Format):
    """Integer codes with one scale (and, if asymmetric, one zero point) per slice.

    Args:
        bits: Width of a code, 2 to 8.
        symmetric: With ``True`` codes run from ``-(2**(bits-1) - 1)`` to ``2**(bits-1) - 1`` and 0 is exact; with
            ``False`` from 0 to ``2**bits - 1`` between the smallest and the largest value of the slice.

    Raises:
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
        return {8: 7.7, 4: 20.9}.get(self.bits)

    def encode(self, x: Tensor, dim: int = -1, seed: int | Tensor | None = None) -> QTensor:
        """Quantize ``x`` with one scale per slice along ``dim``.

        Args:
            x: Values of any floating type and shape with at least one dimension.
            dim: The dimension whose values share a scale.
            seed: A seed for stochastic rounding; ``None`` rounds to nearest.

        Raises:
            TypeError: If ``x`` is not a floating-point tensor.
        """
        if not x.is_floating_point():
            raise TypeError(
                f"'Int.encode' expects a floating-point tensor (got {x.dtype}); convert it with 'x.float()'"
            )
        if x.dim() == 0:
            raise ValueError("'Int.encode' expects a tensor with at least one dimension (got a scalar)")
        values = x.detach().movedim(dim, -1).float()
        if values.numel() == 0:
            return self._encode_nothing(values, dim, x.dtype)
        rows = values.reshape(-1, values.shape[-1])
        bits16 = None
        if seed is not None:
            bits16 = random_bits16(0, rows.shape[0], rows.shape[1], make_seed(seed, x.device))
        codes, scale, zero = self._encode_rows(rows, bits16)

        def restored(t: Tensor) -> Tensor:
            return t.reshape(*values.shape[:-1], t.shape[-1]).movedim(-1, dim)

        return QTensor(restored(codes), restored(scale), None if zero is None else restored(zero), dtype=x.dtype)

    def _encode_nothing(self, values: Tensor, dim: int, dtype: torch.dtype) -> QTensor:
        scale = values.new_zeros((*values.shape[:-1], 1)).movedim(-1, dim)
        codes = values.to(torch.int8 if self.symmetric else torch.uint8).movedim(-1, dim)
        return QTensor(codes, scale, None if self.symmetric else scale.clone(), dtype=dtype)

    def _encode_rows(self, rows: Tensor, bits16: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.symmetric:
            scale, inverse = absmax_scale(rows.abs().amax(1, keepdim=True), self.bits)
            return round_codes(rows, inverse, bits16), scale, None
        low, high = rows.aminmax(dim=1, keepdim=True)
        # Codes 0 .. 2**bits - 1 are what the symmetric rule gives for one bit more on values that are never negative.
        scale, inverse = absmax_scale(high - low, self.bits + 1)
        return round_codes(rows - low, inverse, bits16, torch.uint8), scale, low

    def with_bits(self, bits: int) -> Int:
        """Integers of another width."""
        return replace(self, bits=bits)

    def __str__(self) -> str:
        """As ``int8`` or ``int4-affine``."""
        return f"int{self.bits}{'' if self.symmetric else '-affine'}"
