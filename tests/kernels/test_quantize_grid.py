"""The Triton kernel of grids equals the reference, bit for bit."""

import pytest
import torch
from qgnn.kernels import tuning
from qgnn.kernels.quantize_grid import quantize_dequantize, quantize_shared

from grid_cases import GRIDS, INTEGERS, WIDTHS, assert_same_bits, hurting_rows
from kernel_cases import LAYOUTS, quiet, surrounded
from qgnn import reference, rng
from qgnn.rounding import Grid


def _assert_equals_reference(x: torch.Tensor, grid: Grid, seed: torch.Tensor | None = None) -> None:
    expected = reference.quantize_dequantize(x, grid, seed=seed, stream=3)
    assert_same_bits(quantize_dequantize(x, grid, seed=seed, stream=3), expected)
    if grid.is_integer:
        codes = quantize_shared(x, grid, seed=seed, stream=3)
        for actual, wanted in zip(codes, reference.quantize_shared(x, grid, seed=seed, stream=3), strict=True):
            assert_same_bits(actual, wanted)


@quiet
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", GRIDS)
def test_values_and_codes_equal_the_reference(device: str, name: str, width: int, stochastic: bool) -> None:
    x = hurting_rows(width).to(device)
    _assert_equals_reference(x, GRIDS[name], rng.make_seed(7, device) if stochastic else None)


@quiet
@pytest.mark.parametrize("name", ["fixed8", "fixed8-affine"])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("value", [40.0, float("nan")])
def test_rows_that_exceed_the_registers(device: str, name: str, num_rows: int, value: float) -> None:
    """One row is folded; several are parts of tiles. Other layouts than that of one row are not folded."""
    x = torch.randn(num_rows, 2 * tuning.QUANTIZE_GRID_MAX_COLUMNS + 77, device=device)
    x[0, -3] = value  # the largest value lies in the last tile
    for rows in (x, LAYOUTS["column_major"](x)):
        _assert_equals_reference(rows, GRIDS[name], rng.make_seed(2, device))
        _assert_equals_reference(rows, GRIDS[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["fixed8", "msfp12", "mxfp8-e4m3"])  # whose values are numbers of both types
def test_halves_equal_the_reference(device: str, name: str, dtype: torch.dtype) -> None:
    _assert_equals_reference(torch.randn(9, 33, device=device).to(dtype), GRIDS[name], rng.make_seed(1, device))


@quiet
@pytest.mark.parametrize("layout", [*LAYOUTS, "surrounded"])
@pytest.mark.parametrize("name", ["msfp12", "fixed8-affine"])
def test_any_strides(device: str, layout: str, name: str) -> None:
    x = torch.randn(19, 33, device=device)
    x = surrounded(x, float("nan")) if layout == "surrounded" else LAYOUTS[layout](x)
    _assert_equals_reference(x, GRIDS[name], rng.make_seed(3, device))


@pytest.mark.parametrize("block_size", [2, 64, 128])
def test_blocks_of_other_lengths(device: str, block_size: int) -> None:
    _assert_equals_reference(
        torch.randn(5, 130, device=device), INTEGERS["msfp12"]._replace(block_size=block_size), rng.make_seed(3, device)
    )


@pytest.mark.parametrize("block_size", [3, 24, 8192])
def test_blocks_that_tiles_cannot_cover_are_refused(device: str, block_size: int) -> None:
    grid = INTEGERS["msfp12"]._replace(block_size=block_size)
    with pytest.raises(ValueError, match=rf"'block_size' to be a power of two up to 4096, .* \(got {block_size}\)"):
        quantize_dequantize(torch.randn(1, 9000, device=device), grid)
    _assert_equals_reference(torch.randn(2, 3, device=device), grid)  # the whole row


@pytest.mark.parametrize("shape", [(0, 7), (4, 0)])
@pytest.mark.parametrize("name", ["fixed8", "msfp12", "fixed8-affine"])
def test_nothing(device: str, shape: tuple[int, int], name: str) -> None:
    _assert_equals_reference(torch.randn(shape, device=device), GRIDS[name])
