"""Codes in bytes and back, in C: equal to the reference in every bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from qgnn.kernels.cpu.codes import codes_pack, codes_unpack
from torch import Tensor

from code_cases import codes_of
from kernel_cases import surrounded
from qgnn import reference

BITS = pytest.mark.parametrize("bits", range(1, 17))
PIECE = 8192  # codes of a row that a thread takes at a time, as in codes.c


def assert_equals_reference(codes: Tensor, bits: int) -> None:
    """Of what is packed, and of any bytes, some of which no code has filled."""
    stored = codes_pack(codes, bits=bits)
    assert torch.equal(stored, reference.codes_pack(codes, bits=bits))
    for given_bytes in (stored, torch.randint_like(stored, 256)):
        for signed in (False, True):
            options = {"bits": bits, "num_codes": codes.shape[1], "signed": signed}
            result, expected = codes_unpack(given_bytes, **options), reference.codes_unpack(given_bytes, **options)
            assert result.dtype == expected.dtype
            assert torch.equal(result, expected)


@BITS
def test_all_widths_of_rows(bits: int, threads: int) -> None:
    for num_codes in (*range(18), 33, PIECE - 1, PIECE, PIECE + 9, 3 * PIECE + 4):
        assert_equals_reference(codes_of(bits, 3, num_codes), bits)


@BITS
def test_bits_above_those_of_a_code_are_dropped(bits: int, threads: int) -> None:
    for num_codes in (5, 8, 100):
        assert_equals_reference(codes_of(8 if bits <= 8 else 16, 7, num_codes), bits)


@pytest.mark.parametrize("bits", [3, 8, 11])
def test_rows_that_are_not_adjacent(bits: int, threads: int) -> None:
    for codes in (codes_of(bits, 33, 5).t(), codes_of(bits, 9, 40)[::2, 1::3], surrounded(codes_of(bits, 5, 21), 77)):
        assert_equals_reference(codes, bits)
        if bits <= 8:
            assert_equals_reference(codes.view(torch.uint8), bits)


@given(bits=st.integers(1, 16), num_rows=st.integers(0, 9), num_codes=st.integers(0, 300), seed=st.integers(0, 999))
def test_any_sizes(bits: int, num_rows: int, num_codes: int, seed: int) -> None:
    torch.manual_seed(seed)
    assert_equals_reference(codes_of(bits, num_rows, num_codes), bits)
