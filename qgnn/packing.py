"""Codes of any width in bytes: a little-endian bit stream along the last dimension.

Code ``i`` of a row takes the bits ``i * bits`` to ``(i + 1) * bits - 1`` of the row's bytes, bit ``k`` of which is bit
``k % 8`` of byte ``k // 8``. Eight codes fill ``bits`` bytes, so whatever their width, a byte is made of the same few
codes in each group of eight. Each row starts at a byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 18  # values of a large matrix that are decoded at once: 1 MiB of fp32, which the second-level cache holds


def row_parts(num_rows: int, width: int, most: int) -> Iterator[slice]:
    """Slices that cover all rows, of at most ``most`` values each; one while compiling, which fuses what is done with
    them and must not depend on their number."""
    if torch.compiler.is_compiling():
        yield slice(0, num_rows)
        return
    step = max(1, most // max(1, width))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def per_value(t: Tensor, block_size: int, width: int, dim: int = -1) -> Tensor:
    """What blocks along a dimension share, once for each of ``width`` values."""
    return t.repeat_interleave(block_size, dim=dim).narrow(dim, 0, width)


def scale_blocks_(values: Tensor, scale: Tensor, block_size: int, dim: int = -1) -> Tensor:
    """Multiply values in place by the scales of their blocks along a dimension, which is counted from the end; the last
    block may be shorter."""
    width = values.shape[dim]
    if torch.compiler.is_compiling():  # which fuses the copy, and must not depend on the length of the last block
        return values.mul_(per_value(scale, block_size, width, dim))
    whole = width // block_size
    of_whole, rest = values.split([whole * block_size, width - whole * block_size], dim)
    first, last = scale.split([whole, scale.shape[dim] - whole], dim)
    of_whole.unflatten(dim, (whole, block_size)).mul_(first.unsqueeze(dim))
    rest.mul_(last)
    return values


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
    num_groups = -(-num_codes // 8)
    kind = torch.uint8 if bits <= 8 else torch.int32
    whole = _padded(codes.to(kind), -num_codes % 8)
    groups = whole.unflatten(-1, (num_groups, 8))
    stored = _pack_narrow(groups, bits) if bits < 8 else groups if bits == 8 else _pack_wide(groups, bits)
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
    num_groups = -(-num_codes // 8)
    whole = _padded(stored, num_groups * bits - stored.shape[-1])
    groups = whole.unflatten(-1, (num_groups, bits))
    codes = _unpack_narrow(groups, bits) if bits < 8 else groups if bits == 8 else _unpack_wide(groups, bits)
    return codes.flatten(-2)[..., :num_codes]


def _padded(rows: Tensor, num_zeros: int) -> Tensor:
    return (torch.nn.functional.pad(rows, (0, num_zeros)) if num_zeros else rows).contiguous()


# Codes of less than 8 bits go eight at a time, as the lanes of a 64-bit word: twice as wide and half as many in each of
# three steps. Words are little-endian.
_STEPS = (8, 16, 32)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes; others have to be copied out of longer ones


def _lanes(width: int, used: int) -> int:
    """A word whose lanes have their lowest ``used`` of ``width`` bits set."""
    return sum(((1 << used) - 1) << lane for lane in range(0, 64, width))


def _pack_narrow(groups: Tensor, bits: int) -> Tensor:
    """uint8 ``[..., 8]`` -> ``[..., bits]``."""
    words = groups.view(torch.int64).squeeze(-1) & _lanes(8, bits)
    for width in _STEPS:
        used = width * bits // 8
        low = words & _lanes(2 * width, used)
        words = words.bitwise_xor_(low).bitwise_right_shift_(width - used).bitwise_or_(low)
    return words.to(_WORDS.get(bits, torch.int64)).unsqueeze(-1).view(torch.uint8)[..., :bits]


def _unpack_narrow(groups: Tensor, bits: int) -> Tensor:
    """uint8 ``[..., bits]`` -> ``[..., 8]``."""
    kind = _WORDS.get(bits)
    if kind is None:
        words = torch.nn.functional.pad(groups, (0, 8 - bits)).view(torch.int64).squeeze(-1)
    else:
        words = groups.view(kind).squeeze(-1).to(torch.int64) & _lanes(64, 8 * bits)  # without the sign of the type
    for width in reversed(_STEPS):
        used = width * bits // 8
        low = words & _lanes(2 * width, used)
        words = words.bitwise_xor_(low).bitwise_left_shift_(width - used).bitwise_or_(low)
    return words.unsqueeze(-1).view(torch.uint8)


def _pack_wide(groups: Tensor, bits: int) -> Tensor:
    """int32 ``[..., 8]`` -> uint8 ``[..., bits]``."""
    groups = groups & ((1 << bits) - 1)
    stored = torch.empty((*groups.shape[:-1], bits), dtype=torch.uint8, device=groups.device)
    for byte in range(bits):
        first, last = 8 * byte // bits, (8 * byte + 7) // bits  # codes with a bit in this byte
        value = _shifted(groups[..., first], first * bits - 8 * byte)
        for code in range(first + 1, last + 1):
            value |= _shifted(groups[..., code], code * bits - 8 * byte)
        stored[..., byte] = value & 255
    return stored


def _unpack_wide(groups: Tensor, bits: int) -> Tensor:
    """uint8 ``[..., bits]`` -> int32 ``[..., 8]``."""
    groups = groups.to(torch.int32)
    codes = torch.empty((*groups.shape[:-1], 8), dtype=torch.int32, device=groups.device)
    for code in range(8):
        first, last = code * bits // 8, (code * bits + bits - 1) // 8  # bytes with a bit of this code
        value = _shifted(groups[..., first], 8 * first - code * bits)
        for byte in range(first + 1, last + 1):
            value |= _shifted(groups[..., byte], 8 * byte - code * bits)
        codes[..., code] = value & ((1 << bits) - 1)
    return codes


def _shifted(t: Tensor, left: int) -> Tensor:
    """A new tensor, shifted to the left, or to the right by ``-left``."""
    return t << left if left >= 0 else t >> -left


# By bits of the mantissa: the type of torch that holds all values of a format of at most 8 bits.
FLOAT8 = {1: torch.float8_e5m2, 2: torch.float8_e5m2, 3: torch.float8_e4m3fn}


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
        return pack(codes, self.bits)

    def load(self, storage: Tensor) -> Tensor:
        """The codes of a whole storage: integers, or the floats that codes stand for."""
        if self.bits == 8:
            return storage if self.mantissa_bits is None else _from_float8(storage)
        codes = unpack(storage.movedim(self.dim, -1), self.bits, self.shape[self.dim])
        if self.mantissa_bits is not None:
            codes = self._minifloats(codes)
        elif self.signed:
            sign = 1 << (self.bits - 1)
            codes = codes.bitwise_xor_(sign)
            codes = (codes.view(torch.int8) if self.bits < 8 else codes).sub_(sign).to(self.dtype)
        return codes.movedim(-1, self.dim)

    @property
    def dtype(self) -> torch.dtype:
        """Type of what :meth:`load` returns."""
        if self.mantissa_bits is not None:
            return torch.float32
        if self.bits <= 8:
            return torch.int8 if self.signed else torch.uint8
        return torch.int16 if self.signed else torch.int32

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
