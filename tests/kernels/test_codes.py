"""Codes in bytes and back: the Triton kernels equal the reference, in every bit."""

from functools import partial
from typing import Any

import pytest
import torch
from qgnn.kernels import tuning
from qgnn.kernels.codes import _codes_pack_kernel, _codes_unpack_kernel, codes_pack, codes_unpack
from qgnn.kernels.memory import MAX_COLUMNS, empty_codes
from qgnn.kernels.quantize import quantize
from qgnn.kernels.quantize_grid import quantize_shared
from torch import Tensor

from code_cases import codes_of
from kernel_cases import surrounded
from qgnn import reference
from qgnn.formats import MSFP

WIDTHS = (0, 1, 7, 8, 9, 33, 40, 2051, 2056)  # the last two: two tiles, of single codes and of whole groups


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


@pytest.mark.parametrize("bits", [3, 8])
def test_rows_as_kernels_lay_them_out_and_codes_without_a_sign(device: str, bits: int) -> None:
    for num_codes in (37, 40):
        codes = empty_codes(5, num_codes, torch.device(device)).copy_(codes_of(bits, 5, num_codes))
        assert codes.stride(0) == 48
        assert_equals_reference(codes, bits)
        assert_equals_reference(codes.view(torch.uint8), bits)


def test_rows_of_more_bytes_than_32_bits_count(device: str) -> None:
    """The first tile of such a row, which is all that there is room for here."""
    bits, num_codes, size = 16, 2**30, {"R": 1, "C_UNITS": 2**30, "UNIT": 1, "BITS": 16}
    config = tuning.codes(num_codes)
    codes = codes_of(bits, 1, 8 * config["BLOCK_R"] * config["BLOCK_G"]).to(device)
    stored, unpacked = torch.zeros((1, 2 * codes.numel()), dtype=torch.uint8, device=device), torch.zeros_like(codes)
    strides: dict[str, Any] = {"stride_cr": 2 * num_codes, "stride_cc": 1}
    _codes_pack_kernel[(1,)](stored_ptr=stored, codes_ptr=codes, BYTES=16, **size, **strides, **config)
    tile = slice(0, 8 * config["BLOCK_G"])
    assert torch.equal(stored[:, : 2 * tile.stop], reference.codes_pack(codes[:, tile], bits=bits))
    strides = {"stride_sr": 2 * num_codes, "stride_sb": 1, "SIGNED": True}
    _codes_unpack_kernel[(1,)](codes_ptr=unpacked, stored_ptr=stored, **size, **strides, **config)
    assert torch.equal(unpacked[:, tile], codes[:, tile])


@pytest.mark.parametrize("bits", [3, 8, 11])
def test_any_strides_and_bits_above_those_of_a_code(device: str, bits: int) -> None:
    for codes in (codes_of(bits, 33, 5).t(), codes_of(8 if bits <= 8 else 16, 9, 40)[::2, 1::3]):
        assert_equals_reference(codes.to(device), bits)


def test_rows_that_int32_cannot_count_are_refused() -> None:
    """Before anything is read: the tensors have no values."""
    row = torch.empty((1, MAX_COLUMNS + 1), dtype=torch.uint8, device="meta")
    calls = {
        "codes_pack": partial(codes_pack, row, bits=4),
        "codes_unpack": partial(codes_unpack, row[:, :9], bits=4, num_codes=MAX_COLUMNS + 1, signed=False),
        "quantize": partial(quantize, row.to(torch.float16), granularity="block"),
        "quantize_shared": partial(quantize_shared, row.to(torch.float16), MSFP(3).grid),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"{name}' expects at most 2147475456 columns .*\(got 2147475457\)"):
            call()
