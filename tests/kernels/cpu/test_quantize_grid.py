"""The native rounding to grids equals the reference, bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from qgnn.kernels.cpu.quantize_grid import quantize_dequantize, quantize_shared
from torch import Tensor

from block_cases import SEEDS
from grid_cases import GRIDS, HURTING, WIDTHS, assert_same_bits, hurting_rows
from kernel_cases import FLOATS, LAYOUTS, surrounded
from qgnn import reference, rng
from qgnn.rounding import Grid


def _assert_equals_reference(x: Tensor, grid: Grid, seed: Tensor | None = None) -> None:
    expected = reference.quantize_dequantize(x, grid, seed=seed, stream=3)
    assert_same_bits(quantize_dequantize(x, grid, seed=seed, stream=3), expected)
    if grid.is_integer:
        codes = quantize_shared(x, grid, seed=seed, stream=3)
        for actual, wanted in zip(codes, reference.quantize_shared(x, grid, seed=seed, stream=3), strict=True):
            assert_same_bits(actual, wanted)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("width", [*WIDTHS, 1433])  # random bits are made for 512 columns at a time
@pytest.mark.parametrize("name", GRIDS)
def test_values_and_codes_equal_the_reference(name: str, width: int, stochastic: bool) -> None:
    _assert_equals_reference(hurting_rows(width), GRIDS[name], rng.make_seed(7) if stochastic else None)


@given(st.data(), st.sampled_from(sorted(GRIDS)), st.integers(0, 45), SEEDS)
def test_any_values(data: st.DataObject, name: str, block_size: int, seed: Tensor | None) -> None:
    """Blocks of any length: an odd one begins in the middle of a hash."""
    width = data.draw(st.integers(1, 50))
    x = torch.tensor([data.draw(st.lists(HURTING, min_size=width, max_size=width))], dtype=torch.float32)
    _assert_equals_reference(x, GRIDS[name]._replace(block_size=block_size), seed)


@pytest.mark.parametrize("shape", [(1, 70_001), (401, 133), (3, 40_000)], ids=str)
@pytest.mark.parametrize("name", ["fixed8", "fixed8-affine", "msfp12", "mxfp4"])
def test_threads_change_nothing(threads: int, shape: tuple[int, int], name: str) -> None:
    """One row that is a block has its extrema in the parts of both threads."""
    x = torch.randn(shape)
    x[-1, -1], x[0, 0] = 50.0, -60.0
    for seed in (None, rng.make_seed(2)):
        _assert_equals_reference(x, GRIDS[name], seed)
        _assert_equals_reference(x, GRIDS[name]._replace(block_size=700), seed)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["fixed16", "fixed8-affine", "msfp12", "mxfp8-e5m2"])
def test_every_type(name: str, dtype: torch.dtype) -> None:
    _assert_equals_reference(torch.randn(9, 33).to(dtype), GRIDS[name], rng.make_seed(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "width"), [("msfp10", 1), ("msfp16", 16), ("fixed8-affine", 64)])
def test_every_half(name: str, width: int, dtype: torch.dtype) -> None:
    """As values of blocks of one, of which the largest are rounded beyond the type, and among neighbors, where those of
    affine grids lie between the numbers of the type."""
    x = torch.arange(-(1 << 15), 1 << 15).short().view(dtype).view(-1, width)
    _assert_equals_reference(x, GRIDS[name])


@pytest.mark.parametrize(("dtype", "one"), [(torch.float16, 1 << 10), (torch.bfloat16, 1 << 7)])
def test_halves_are_rounded_to_even(dtype: torch.dtype, one: int) -> None:
    """Four levels from i to 4 i, of which 3 i, an odd number, lies between two numbers of the type."""
    i = torch.arange(one + 1, one * 5 // 4, 2)
    x = torch.stack([i, 3 * i + 1, 4 * i], 1).to(dtype)
    even = (3 * i + 1) // 4 * 4  # the multiple of 4 beside 3 i
    assert torch.equal(quantize_dequantize(x, GRIDS["fixed2-affine"])[:, 1].long(), even)


@pytest.mark.parametrize("layout", [*LAYOUTS, "surrounded"])
@pytest.mark.parametrize("name", ["msfp12", "fixed8-affine"])
def test_any_strides(layout: str, name: str) -> None:
    x = torch.randn(19, 33)
    x = surrounded(x, float("nan")) if layout == "surrounded" else LAYOUTS[layout](x)
    _assert_equals_reference(x, GRIDS[name], rng.make_seed(3))


@pytest.mark.parametrize("shape", [(2, 130), (530, 300)], ids=str)
@pytest.mark.parametrize(("name", "block_size"), [("msfp12", 16), ("fixed8", 270), ("fixed8-affine", 0)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_transposed_matrices(
    threads: int, shape: tuple[int, int], name: str, block_size: int, dtype: torch.dtype
) -> None:
    """They are read in tiles of 4 by 4, panels of 64 rows and 256 columns, and bands of 512 rows."""
    x = torch.randn(shape[::-1]).to(dtype).t()
    x[-1, -1] = float("inf")
    for seed in (None, rng.make_seed(2)):
        _assert_equals_reference(x, GRIDS[name]._replace(block_size=block_size), seed)


@pytest.mark.parametrize("shape", [(0, 7), (4, 0)])
@pytest.mark.parametrize("name", ["fixed8", "msfp12", "fixed8-affine"])
def test_nothing(shape: tuple[int, int], name: str) -> None:
    _assert_equals_reference(torch.randn(shape), GRIDS[name])
