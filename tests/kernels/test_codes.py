"""Codes in bytes and back: the Triton kernels equal the reference, in every bit."""

import pytest
import torch
from qgnn.kernels.codes import codes_pack, codes_unpack
from torch import Tensor

from code_cases import codes_of
from kernel_cases import surrounded
from qgnn import reference

WIDTHS = (0, 1, 7, 8, 9, 33, 515)  # the last one: two tiles


def assert_equals_reference(codes: Tensor, bits: int) -> None:
    stored = codes_pack(codes, bits=bits)
    assert torch.equal(stored, reference.codes_pack(codes, bits=bits))
    for given in (stored, surrounded(torch.randint_like(stored, 256), 255)):
        for signed in (False, True):
            options = {"bits": bits, "num_codes": codes.shape[1], "signed": signed}
            result, expected = codes_unpack(given, **options), reference.codes_unpack(given, **options)
            assert result.dtype == expected.dtype
            assert torch.equal(result, expected)


@pytest.mark.parametrize("bits", range(1, 17))
def test_all_widths_of_codes_and_rows(device: str, bits: int) -> None:
    for num_codes in WIDTHS:
        assert_equals_reference(codes_of(bits, 5, num_codes).to(device), bits)


@pytest.mark.parametrize("bits", [3, 8, 11])
def test_any_strides_and_bits_above_those_of_a_code(device: str, bits: int) -> None:
    for codes in (codes_of(bits, 33, 5).t(), codes_of(8 if bits <= 8 else 16, 9, 40)[::2, 1::3]):
        assert_equals_reference(codes.to(device), bits)
