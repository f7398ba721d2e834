"""Layouts: codes along any dimension, the values of floating-point ones, and blocks and parts of values."""

import pytest
import torch

from qgnn import ops
from qgnn.layout import Layout
from qgnn.packing import packed_bytes, row_parts, scale_blocks_


def minifloats(bits: int, mantissa_bits: int) -> torch.Tensor:
    """The values of all codes, from the definition: sign, exponent with its bias, mantissa."""
    values = []
    bias = (1 << (bits - mantissa_bits - 2)) - 1
    for code in range(1 << bits):
        sign, field = -1.0 if code >> (bits - 1) else 1.0, (code >> mantissa_bits) % (1 << (bits - 1 - mantissa_bits))
        fraction = (code % (1 << mantissa_bits)) / (1 << mantissa_bits)
        values.append(sign * (fraction * 2.0 ** (1 - bias) if field == 0 else (1 + fraction) * 2.0 ** (field - bias)))
    return torch.tensor(values)


@pytest.mark.parametrize(("bits", "mantissa_bits"), [(4, 1), (6, 2), (6, 3)])
def test_floating_point_codes_are_those_of_the_definition(bits: int, mantissa_bits: int) -> None:
    layout = Layout(bits, (1 << bits,), mantissa_bits=mantissa_bits)
    codes, values = torch.arange(1 << bits, dtype=torch.uint8), minifloats(bits, mantissa_bits)
    stored = ops.codes_pack(codes[None], bits)[0]
    assert torch.equal(layout.load(stored), values)
    assert torch.equal(layout.load(stored).signbit(), values.signbit())  # of zeros too
    assert torch.equal(layout.store(values), stored)


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize(("dtype", "mantissa_bits"), [(torch.float8_e4m3fn, 3), (torch.float8_e5m2, 2)])
def test_8_bit_floats_are_those_of_torch(dtype: torch.dtype, mantissa_bits: int, flush: bool) -> None:
    """All bytes but those that torch has infinities and NaN for; whether or not it flushes denormal numbers."""
    stored = torch.arange(256, dtype=torch.uint8).view(dtype)
    finite = stored.float().isfinite()
    assert finite.sum() == (254 if mantissa_bits == 3 else 248)
    layout = Layout(8, (256,), mantissa_bits=mantissa_bits)
    torch.set_flush_denormal(flush)
    try:
        values = layout.load(stored)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(values[finite].view(torch.int32), stored.float()[finite].view(torch.int32))  # and signs of zeros
    assert torch.equal(values[finite], minifloats(8, mantissa_bits)[finite])
    assert torch.equal(layout.store(values).view(torch.uint8)[finite], stored.view(torch.uint8)[finite])


@pytest.mark.parametrize("dim", [-1, -2, -3])
@pytest.mark.parametrize("bits", [3, 8, 11])
def test_layouts_lie_along_any_dimension(bits: int, dim: int) -> None:
    codes = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (3, 5, 9), dtype=torch.int16)
    layout = Layout(bits, (3, 5, 9), dim)
    storage = layout.store(codes.movedim(dim, -1)).movedim(-1, dim)
    assert storage.shape[dim] == packed_bytes(codes.shape[dim], bits)
    assert layout.load(storage).dtype == (torch.int8 if bits <= 8 else torch.int16)
    assert torch.equal(layout.load(storage).short(), codes)


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("width", [0, 1, 3, 4, 5, 8])
def test_blocks_are_scaled_each_by_its_own(width: int, dim: int) -> None:
    """Blocks of four, the last one as long as it is; in place, also of a view."""
    values, scale = torch.randn(2, width, 3), torch.randn(2, -(-width // 4), 3)
    if dim == -1:
        values, scale = (t.transpose(1, 2).contiguous().movedim(0, 1) for t in (values, scale))
    expected = values * torch.stack([scale.select(dim, i // 4) for i in range(width)], dim) if width else values.clone()
    assert scale_blocks_(values, scale, 4, dim) is values
    assert torch.equal(values, expected)


def test_parts_cover_all_rows_once() -> None:
    for num_rows, width, most in ((0, 5, 7), (3, 5, 7), (3, 5, 10), (3, 5, 100), (4, 0, 1), (2, 9, 1)):
        parts = list(row_parts(num_rows, width, most))
        assert [i for part in parts for i in range(num_rows)[part]] == list(range(num_rows))
        assert all((part.stop - part.start) * width <= max(most, width) for part in parts)
