"""What the codes of a tensor are, and how they lie in its storage."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from qgnn import ops
from qgnn.packing import code_dtype

# By bits of the mantissa: the type of torch that holds all values of a format of at most 8 bits.
FLOAT8 = {1: torch.float8_e5m2, 2: torch.float8_e5m2, 3: torch.float8_e4m3fn}


def _as_matrix(t: Tensor) -> Tensor:
    """Slices along the last dimension as rows."""
    return t.reshape(prod(t.shape[:-1]), t.shape[-1])


def _from_float8(codes: Tensor) -> Tensor:
    """fp32 of float8 numbers, all finite: through fp16, as torch converts them one by one on a CPU."""
    if codes.is_cuda:
        return codes.float()
    is_e5m2 = codes.dtype == torch.float8_e5m2
    half = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(8 if is_e5m2 else 7)
    if is_e5m2:  # the upper byte of fp16
        return half.view(torch.float16).float()
    # Its exponent is one bit shorter, which the sign, extended, takes; and biased by 8 less.
    return half.bitwise_and_(~(1 << 14)).view(torch.float16).float().mul_(256.0)


@dataclass(frozen=True)
class Layout:
    """What the codes of a tensor are, and how they lie in its storage.

    Codes of 8 bits are stored as they are, in int8, uint8 or a float8 type; others are packed along a dimension, each
    slice by itself.

    Args:
        bits: Width of a code, 1 to 16.
        shape: Shape of the values.
        dim: The dimension that codes are packed along, and that blocks of scales lie along, counted from the end.
        signed: Whether codes are integers in two's complement; otherwise they are not negative.
        mantissa_bits: Of a floating-point code, bits behind the leading one; ``None`` for integers. Its highest bit is
            the sign, the next ones the exponent; an exponent of 0 marks subnormal numbers, and none stands for
            infinities or NaN.
        fraction_bits: Bits of a code behind the point, where stored scales leave them out.
    """

    bits: int
    shape: tuple[int, ...]
    dim: int = -1
    signed: bool = True
    mantissa_bits: int | None = None
    fraction_bits: int = 0

    def store(self, codes: Tensor) -> Tensor:
        """What is stored of slices along the last dimension: integers, or the floats that codes stand for.

        Shapes:
            - **input:** ``[..., F]``
            - **output:** ``[..., ceil(F * bits / 8)]``
        """
        if self.bits == 8:
            if self.mantissa_bits is None:
                return codes.to(torch.int8 if self.signed else torch.uint8)
            return codes.to(FLOAT8[self.mantissa_bits])
        if self.mantissa_bits is not None:
            codes = self._minifloat_codes(codes)
        if self.bits > 8:
            codes = codes.to(torch.int16)  # of codes without a sign, the same bits
        elif codes.dtype != torch.int8:
            codes = codes.to(torch.uint8)
        stored = ops.codes_pack(_as_matrix(codes), self.bits)
        return stored.view(*codes.shape[:-1], stored.shape[1])

    def load(self, storage: Tensor) -> Tensor:
        """The codes of a whole storage: integers, or the floats that codes stand for."""
        if self.bits == 8:
            return storage if self.mantissa_bits is None else _from_float8(storage)
        moved, is_signed = storage.movedim(self.dim, -1), self.signed and self.mantissa_bits is None
        codes = ops.codes_unpack(_as_matrix(moved), self.bits, self.shape[self.dim], is_signed)
        if self.mantissa_bits is not None:
            codes = self._minifloats(codes)
        return codes.view(*moved.shape[:-1], codes.shape[1]).movedim(-1, self.dim)

    @property
    def dtype(self) -> torch.dtype:
        """Type of what :meth:`load` returns."""
        if self.mantissa_bits is not None:
            return torch.float32
        return code_dtype(self.bits, self.signed)

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest floating-point code that is not subnormal."""
        assert self.mantissa_bits is not None
        return 2 - (1 << (self.bits - self.mantissa_bits - 2))

    def _minifloat_codes(self, values: Tensor) -> Tensor:
        dtype, shift, factor = self._in_float8
        wide = (values.float() * (1 / factor)).to(dtype).view(torch.uint8)
        return (wide & 127) >> shift | (wide >> 7) << (self.bits - 1)

    def _minifloats(self, codes: Tensor) -> Tensor:
        dtype, shift, factor = self._in_float8
        sign = 1 << (self.bits - 1)
        wide = (codes & (sign - 1)) << shift
        wide |= (codes & sign) << (8 - self.bits)
        return _from_float8(wide.view(dtype)).mul_(factor)

    @property
    def _in_float8(self) -> tuple[torch.dtype, int, float]:
        """Codes of fewer bits are the lowest ones of a type of 8 bits, times a power of two: the type, by how many bits
        its mantissa is longer, and the factor."""
        assert self.mantissa_bits is not None
        dtype = FLOAT8[self.mantissa_bits]
        wide = Layout(8, (), mantissa_bits=3 if dtype == torch.float8_e4m3fn else 2)
        assert wide.mantissa_bits is not None
        return dtype, wide.mantissa_bits - self.mantissa_bits, 2.0 ** (self.min_exponent - wide.min_exponent)
