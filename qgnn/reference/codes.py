"""Codes of any width in bytes: a little-endian bit stream along the rows.

Code ``i`` of a row takes the bits ``i * bits`` to ``(i + 1) * bits - 1`` of the row's bytes, bit ``k`` of which is bit
``k % 8`` of byte ``k // 8``. Eight codes fill ``bits`` bytes, so whatever their width, a byte is made of the same few
codes in each group of eight. Each row starts at a byte.
"""

import torch
from torch import Tensor

from qgnn.packing import CHUNK, code_dtype, packed_bytes, row_parts


def codes_pack(codes: Tensor, *, bits: int) -> Tensor:
    """The low ``bits`` bits of integers; higher ones are dropped.

    Args:
        codes: Integers; of negative ones, those of two's complement.
        bits: Width of a code, 1 to 16.

    Shapes:
        - **input:** ``[R, C]``, int8 or uint8 up to 8 bits, int16 above
        - **output:** uint8 ``[R, ceil(C * bits / 8)]``
    """
    (num_rows, num_codes), kind = codes.shape, torch.uint8 if bits <= 8 else torch.int32
    stored = codes.new_empty((num_rows, packed_bytes(num_codes, bits)), dtype=torch.uint8)
    for part in row_parts(num_rows, num_codes, CHUNK):
        copy = codes[part].to(kind, copy=True, memory_format=torch.contiguous_format)  # words have to be aligned
        stored[part] = _pack(copy, bits)
    return stored


def codes_unpack(stored: Tensor, *, bits: int, num_codes: int, signed: bool) -> Tensor:
    """The codes that :func:`codes_pack` stored.

    Args:
        stored: Bytes.
        bits: Width of a code, 1 to 16.
        num_codes: Codes of a row.
        signed: Whether codes are integers in two's complement; otherwise they are not negative.

    Shapes:
        - **input:** uint8 ``[R, ceil(num_codes * bits / 8)]``
        - **output:** ``[R, num_codes]``, int8 or, without a sign, uint8 up to 8 bits; int16 or int32 above
    """
    codes = stored.new_empty((stored.shape[0], num_codes), dtype=code_dtype(bits, signed))
    sign = 1 << (bits - 1)
    for part in row_parts(stored.shape[0], num_codes, CHUNK):
        unpacked = _unpack(stored[part].clone(memory_format=torch.contiguous_format), bits, num_codes)
        codes[part] = (unpacked ^ sign).to(torch.int32) - sign if signed else unpacked
    return codes


def _pack(codes: Tensor, bits: int) -> Tensor:
    num_codes = codes.shape[1]
    num_groups = -(-num_codes // 8)
    groups = _padded(codes, -num_codes % 8).unflatten(-1, (num_groups, 8))
    stored = _pack_narrow(groups, bits) if bits < 8 else groups if bits == 8 else _pack_wide(groups, bits)
    return stored.flatten(-2)[:, : packed_bytes(num_codes, bits)]


def _unpack(stored: Tensor, bits: int, num_codes: int) -> Tensor:
    """Without signs."""
    num_groups = -(-num_codes // 8)
    groups = _padded(stored, num_groups * bits - stored.shape[1]).unflatten(-1, (num_groups, bits))
    codes = _unpack_narrow(groups, bits) if bits < 8 else groups if bits == 8 else _unpack_wide(groups, bits)
    return codes.flatten(-2)[:, :num_codes]


def _padded(rows: Tensor, num_zeros: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, num_zeros)) if num_zeros else rows


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
