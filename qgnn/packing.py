"""Codes of any width in bytes: a little-endian bit stream along the last dimension.

Code ``i`` of a row takes the bits ``i * bits`` to ``(i + 1) * bits - 1`` of the row's bytes, bit ``k`` of which is bit
``k % 8`` of byte ``k // 8``. Eight codes fill ``bits`` bytes, so whatever their width, a byte is made of the same few
codes in each group of eight. Each row starts at a byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def packed_bytes(num_codes: int, bits: int) -> int:
    """Bytes of so many codes."""
    return -(-num_codes * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """The low ``bits`` bits of integers, 1 to 16 each. Higher ones are dropped, without a check: it would wait for the
    device, and the codes of formats fit.

    Args:
        codes: Integers of any type; of negative ones, those of two's complement.
        bits: Width of a code.

    Shapes:
        - **input:** ``[..., F]``
        - **output:** uint8 ``[..., ceil(F * bits / 8)]``
    """
    num_codes = codes.shape[-1]
    kind = torch.uint8 if bits <= 8 else torch.int32  # shifts of uint8 drop what leaves the byte
    whole = torch.nn.functional.pad(codes, (0, -num_codes % 8)).to(kind) & ((1 << bits) - 1)
    groups = whole.unflatten(-1, (-(-num_codes // 8), 8))
    stored = torch.empty((*groups.shape[:-1], bits), dtype=torch.uint8, device=codes.device)
    for byte in range(bits):
        first, last = 8 * byte // bits, (8 * byte + 7) // bits  # codes with a bit in this byte
        value = _shifted(groups[..., first], first * bits - 8 * byte)
        for code in range(first + 1, last + 1):
            value |= _shifted(groups[..., code], code * bits - 8 * byte)
        stored[..., byte] = value & 255
    return stored.flatten(-2)[..., : packed_bytes(num_codes, bits)]


def unpack(stored: Tensor, bits: int, num_codes: int) -> Tensor:
    """The codes that :func:`pack` stored, without their signs.

    Args:
        stored: Bytes.
        bits: Width of a code.
        num_codes: Codes of a row.

    Shapes:
        - **input:** uint8 ``[..., ceil(num_codes * bits / 8)]``
        - **output:** ``[..., num_codes]``, uint8 up to 8 bits, int32 above
    """
    kind = torch.uint8 if bits <= 8 else torch.int32
    num_groups = -(-num_codes // 8)
    whole = torch.nn.functional.pad(stored, (0, num_groups * bits - stored.shape[-1]))
    groups = whole.unflatten(-1, (num_groups, bits)).to(kind)
    codes = torch.empty((*groups.shape[:-1], 8), dtype=kind, device=stored.device)
    for code in range(8):
        first, last = code * bits // 8, (code * bits + bits - 1) // 8  # bytes with a bit of this code
        value = _shifted(groups[..., first], 8 * first - code * bits)
        for byte in range(first + 1, last + 1):
            value |= _shifted(groups[..., byte], 8 * byte - code * bits)
        codes[..., code] = value & ((1 << bits) - 1)
    return codes.flatten(-2)[..., :num_codes]


def _shifted(t: Tensor, left: int) -> Tensor:
    """A new tensor, shifted to the left, or to the right by ``-left``."""
    return t << left if left >= 0 else t >> -left


# By bits of the mantissa: the type of torch that holds all values of a format of at most 8 bits.
FLOAT8 = {1: torch.float8_e5m2, 2: torch.float8_e5m2, 3: torch.float8_e4m3fn}


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
            codes = self._minifloat_codes(codes.float())
        return pack(codes.int() if codes.is_floating_point() else codes, self.bits)

    def load(self, storage: Tensor) -> Tensor:
        """The codes of a whole storage: integers, or the floats that codes stand for."""
        if self.bits == 8:
            return storage if self.mantissa_bits is None else storage.float()
        codes = unpack(storage.movedim(self.dim, -1), self.bits, self.shape[self.dim])
        if self.mantissa_bits is not None:
            codes = self._minifloats(storage.device)[codes.int()]
        elif self.signed:
            sign = 1 << (self.bits - 1)
            kind = torch.int8 if self.bits < 8 else torch.int32
            codes = ((codes ^ sign).to(kind) - sign).to(torch.int8 if self.bits < 8 else torch.int16)
        return codes.movedim(-1, self.dim)

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest floating-point code that is not subnormal."""
        assert self.mantissa_bits is not None
        return 2 - (1 << (self.bits - self.mantissa_bits - 2))

    def _minifloat_codes(self, values: Tensor) -> Tensor:
        assert self.mantissa_bits is not None
        exponent = (torch.frexp(values).exponent - 1).clamp_min_(self.min_exponent)
        exponent.masked_fill_(values == 0, self.min_exponent)  # frexp gives zero the exponent of 1/2
        # The leading one of a mantissa adds one to the exponent's field; subnormal numbers have none.
        steps = torch.ldexp(values.abs(), self.mantissa_bits - exponent).int()
        magnitude = steps + ((exponent - self.min_exponent) << self.mantissa_bits)
        return magnitude | (values.signbit().int() << (self.bits - 1))

    def _minifloats(self, device: torch.device) -> Tensor:
        """The value of each floating-point code."""
        assert self.mantissa_bits is not None
        codes = torch.arange(1 << self.bits, device=device)
        magnitude = codes & ((1 << (self.bits - 1)) - 1)
        field = magnitude >> self.mantissa_bits
        mantissa = magnitude - ((field - 1).clamp_min(0) << self.mantissa_bits)
        values = torch.ldexp(mantissa.float(), (field - 1).clamp_min(0) + self.min_exponent - self.mantissa_bits)
        return torch.where(codes >> (self.bits - 1) == 1, -values, values)
