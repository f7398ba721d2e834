"""Codes of 1 to 16 bits in bytes: the bit stream, checked against Python's integers."""

import pytest
import torch

from code_cases import codes_of
from kernel_cases import surrounded
from qgnn.packing import CHUNK, packed_bytes
from qgnn.reference import codes_pack, codes_unpack

BITS = pytest.mark.parametrize("bits", range(1, 17))


@BITS
def test_unpack_returns_what_was_packed(bits: int) -> None:
    for num_codes in (0, 1, 7, 8, 9, 33, CHUNK // 2 + 3):  # the last ones: in more than one part
        codes = codes_of(bits, 3, num_codes)
        stored = codes_pack(codes, bits=bits)
        assert stored.dtype == torch.uint8
        assert stored.shape == (3, packed_bytes(num_codes, bits))
        signed, unsigned = (codes_unpack(stored, bits=bits, num_codes=num_codes, signed=s) for s in (True, False))
        assert (signed.dtype, unsigned.dtype) == (
            (torch.int8, torch.uint8) if bits <= 8 else (torch.int16, torch.int32)
        )
        assert torch.equal(signed, codes)
        assert torch.equal(unsigned.int(), codes.int() & ((1 << bits) - 1))


@BITS
def test_packed_codes_are_a_little_endian_bit_stream(bits: int) -> None:
    """A row's bytes are the digits of one large number, in which code ``i`` counts ``2**(i * bits)``."""
    codes = codes_of(8 if bits <= 8 else 16, 2, 19)  # what lies above the lowest bits is not stored
    for row, stored in zip(codes.tolist(), codes_pack(codes, bits=bits).tolist(), strict=True):
        number = sum((code % (1 << bits)) << (i * bits) for i, code in enumerate(row))
        assert bytes(stored) == number.to_bytes(packed_bytes(19, bits), "little")


@BITS
def test_rows_may_lie_anywhere(bits: int) -> None:
    """Behind an odd number of bytes, transposed, and without a sign."""
    codes = codes_of(bits, 3, 24)
    stored = codes_pack(codes, bits=bits)
    views = [surrounded(codes, 0), codes.t().contiguous().t()]
    if bits <= 8:
        views.append(surrounded(codes.view(torch.uint8), 0))
    for view in views:
        assert torch.equal(codes_pack(view, bits=bits), stored)
    for rows in (surrounded(stored, 0), stored.t().contiguous().t()):
        assert torch.equal(codes_unpack(rows, bits=bits, num_codes=24, signed=True), codes)
