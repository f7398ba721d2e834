"""``reference.quantize_dequantize`` and ``quantize_shared`` against a model of their definition in exact arithmetic."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grid_cases import GRIDS, HURTING, INTEGERS, assert_same_bits, hurting_rows
from qgnn import reference, rng
from qgnn.rounding import Grid, shared_scale
from statistics_checks import SIGMAS, rounding_bias_z

POWERS = {name: grid for name, grid in GRIDS.items() if not grid.affine}


def floor_log2(value: Fraction) -> int:
    return math.frexp(float(value))[1] - 1


def model_block(values: list[float], grid: Grid) -> list[float]:
    """The values of one block to nearest: fractions, except where fp32 rounds once by definition."""
    if not all(map(math.isfinite, values)):
        return [math.nan] * len(values)
    if grid.affine:
        return model_affine(np.array(values, np.float32), grid)
    m = max(abs(Fraction(v)) for v in values)
    exponent = floor_log2(m) if m else -1000
    if grid.round_up and m and m != Fraction(2) ** exponent:
        exponent += 1
    shared = min(max(exponent - grid.max_exponent, -127), 127)
    unit = Fraction(2) ** (shared - grid.fraction_bits)
    result = []
    for v in values:
        t = Fraction(v) / unit
        own = max(floor_log2(abs(t)), grid.min_exponent) if t else grid.min_exponent
        step = Fraction(2) ** (own - grid.mantissa_bits)
        element = min(max(round(t / step) * step, Fraction(grid.low)), Fraction(grid.high))
        result.append(float(element * unit))
    return result


def model_affine(x: np.ndarray, grid: Grid) -> list[float]:
    low, levels = x.min(), np.float32(grid.high - grid.low)
    with np.errstate(over="ignore"):
        width = x.max() - low
    if not np.isfinite(width):
        return [math.nan] * len(x)
    inverse = levels / width if width > np.float32(1e-30) else np.float32(0)
    codes = np.clip(np.rint((x - low) * inverse), 0, levels)
    return (codes * (width / levels) + low).tolist()


def model(x: Tensor, grid: Grid) -> Tensor:
    size = grid.block_size or x.shape[1]
    rows = [[v for block in row.split(size) for v in model_block(block.tolist(), grid)] for row in x]
    return torch.tensor(rows, dtype=torch.float32).view(x.shape)


@given(st.data(), st.sampled_from(sorted(GRIDS)))
def test_values_are_those_of_the_definition(data: st.DataObject, name: str) -> None:
    width = data.draw(st.integers(1, 36))
    x = torch.tensor([data.draw(st.lists(HURTING, min_size=width, max_size=width))], dtype=torch.float32)
    torch.testing.assert_close(
        reference.quantize_dequantize(x, GRIDS[name]), model(x, GRIDS[name]), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("name", GRIDS)
def test_hurting_rows_are_those_of_the_definition(name: str) -> None:
    x = hurting_rows(33)
    torch.testing.assert_close(
        reference.quantize_dequantize(x, GRIDS[name]), model(x, GRIDS[name]), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("name", POWERS)
def test_float64_is_rounded_to_the_same_grid(name: str) -> None:
    x = torch.randn(5, 40)
    y = reference.quantize_dequantize(x.double(), GRIDS[name])
    assert y.dtype == torch.float64
    assert torch.equal(y, reference.quantize_dequantize(x, GRIDS[name]).double())


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("name", INTEGERS)
def test_codes_with_their_exponents_are_the_values(name: str, stochastic: bool) -> None:
    grid, x, seed = INTEGERS[name], hurting_rows(33), rng.make_seed(3) if stochastic else None
    codes, exponent = reference.quantize_shared(x, grid, seed=seed, stream=2)
    scale = shared_scale(exponent, grid.fraction_bits).repeat_interleave(grid.block_size or 33, 1)[:, :33]
    values = reference.quantize_dequantize(x, grid, seed=seed, stream=2)
    torch.testing.assert_close(codes.float() * scale, values, rtol=0, atol=0, equal_nan=True)
    assert codes.min() >= grid.low
    assert codes.max() <= grid.high
    assert not codes[3:6][exponent[3:6].repeat_interleave(grid.block_size or 33, 1)[:, :33] == 255].any()
    assert (exponent[[3, 4, 5]] == 255).any(1).all()


@pytest.mark.parametrize("name", GRIDS)
def test_names(name: str) -> None:
    assert GRIDS[name].name == name
    if GRIDS[name].block_size or GRIDS[name].affine:  # a power of two that blocks share makes FixedPoint MSFP
        assert GRIDS[name]._replace(block_size=64).name == f"{name}-g64"


# --- stochastic rounding


@pytest.mark.parametrize("name", GRIDS)
def test_stochastic_rounding_is_the_definition(name: str) -> None:
    """The same with the same stream, not with another; of integers, the random bits of each element decide."""
    grid, x, seed = GRIDS[name], torch.randn(6, 40), rng.make_seed(5)
    y = reference.quantize_dequantize(x, grid, seed=seed, stream=4)
    assert torch.equal(y, reference.quantize_dequantize(x, grid, seed=seed, stream=4))
    assert not torch.equal(y, reference.quantize_dequantize(x, grid, seed=seed, stream=5))
    if grid.is_integer:
        codes, exponent = reference.quantize_shared(x, grid, seed=seed, stream=4)
        scale = shared_scale(exponent, grid.fraction_bits).repeat_interleave(grid.block_size or 40, 1)[:, :40]
        t = x / scale
        bits16 = rng.random_bits16(0, 6, 40, seed ^ rng.stream_key(4))
        up = ((t - t.floor()) * 65536).int() + bits16 >= 65536
        assert torch.equal(codes.float(), (t.floor() + up).clamp(grid.low, grid.high))


@pytest.mark.parametrize("name", ["fixed8", "fixed8-affine", "msfp12", "mxint8", "mxfp8-e4m3", "mxfp4"])
def test_stochastic_rounding_is_unbiased(name: str) -> None:
    """In steps of values between two neighbors that lie within low .. high; the block's largest value keeps them 1."""
    grid = GRIDS[name]
    fractions = torch.tensor([0, 2.0**-10, 0.1, 0.25, 0.5, 0.9, 1 - 2.0**-10])
    whole = torch.tensor([-2.0, -1.0, 0.0, 1.0])  # of mxfp4, between which elements are 1 apart from 2 on
    steps = (whole[:, None] + fractions).flatten() if not grid.affine else 2 + fractions
    if grid.min_exponent != grid.mantissa_bits and not grid.affine:
        steps = 2 + fractions  # elements from 2**mantissa to twice that are 1 step apart
        anchor, step = 2.0**grid.max_exponent, 2.0 ** (1 - grid.mantissa_bits)
        steps = steps if grid.mantissa_bits == 1 else steps + 2**grid.mantissa_bits - 2
    else:
        anchor, step = (grid.high, 1.0)
    zero = torch.zeros(1)

    def rounder(draws: Tensor, seed: int) -> Tensor:
        ends = torch.cat([zero, torch.tensor([anchor])]).expand(len(draws), -1)
        size = grid.block_size - 2 if grid.block_size else draws.shape[1]
        blocks = [torch.cat([ends, part * step], 1) for part in draws.split(size, 1)]
        if grid.affine:
            blocks = [torch.cat([ends * 0, ends[:, 1:] + 128, part], 1) for part in draws.split(size, 1)]
        parts = []
        for number, block in enumerate(blocks):
            y = reference.quantize_dequantize(block, grid, seed=rng.make_seed(seed + number))
            parts.append(y[:, -min(size, block.shape[1] - 2) :] if not grid.affine else y[:, 3:])
        return torch.cat(parts, 1) / step

    assert rounding_bias_z(rounder, steps, num_draws=5000) < SIGMAS


# --- properties


@pytest.mark.parametrize("name", GRIDS)
def test_a_larger_value_of_a_block_never_becomes_a_smaller_one(name: str) -> None:
    grid = GRIDS[name]
    x = torch.cat([torch.randn(200, 31), torch.full((200, 1), 3.0)], 1).sort(1).values
    y = reference.quantize_dequantize(x, grid._replace(block_size=0))
    assert (y.diff(dim=1) >= 0).all()


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=16), st.sampled_from(sorted(POWERS)))
def test_rounding_again_changes_nothing_while_the_exponent_is_the_same(values: list[float], name: str) -> None:
    """The largest value may be rounded or clamped into another binade; where it is not, all are on the grid already."""
    grid, x = GRIDS[name]._replace(block_size=0), torch.tensor([values])
    once = reference.quantize_dequantize(x, grid)
    exponent = [reference.grids._shared_exponent(t.abs().amax(1), grid) for t in (x, once)]
    if torch.equal(*exponent):
        assert torch.equal(reference.quantize_dequantize(once, grid), once)
        assert torch.equal(reference.quantize_dequantize(once, grid, seed=rng.make_seed(1)), once)


def test_every_element_of_the_small_floats_is_reached_and_no_other() -> None:
    """Of e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP Microscaling Formats 1.0, table 5)."""
    x = torch.cat([torch.linspace(-6, 6, 1201), torch.tensor([6.0])])[None]
    elements = reference.quantize_dequantize(x, GRIDS["mxfp4"]._replace(block_size=0)).unique().tolist()
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert elements == [-e for e in positive[:0:-1]] + positive
    assert all(a < b for a, b in pairwise(elements))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("name", ["fixed8", "msfp12", "fixed8-affine"])
def test_nothing_stays_nothing(shape: tuple[int, int], name: str) -> None:
    grid = GRIDS[name]
    assert reference.quantize_dequantize(torch.empty(shape), grid).shape == shape
    if grid.is_integer:
        codes, exponent = reference.quantize_shared(torch.empty(shape), grid)
        assert codes.shape == shape
        assert exponent.shape == (shape[0], -(-shape[1] // grid.block_size) if grid.block_size else 1)


def test_nearest_takes_halves_to_even() -> None:
    x = torch.tensor([[64.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    expected = torch.tensor([[64.0, 0.0, 2.0, 2.0, -0.0, -2.0, -2.0]])
    assert_same_bits(reference.quantize_dequantize(x, GRIDS["mxint8"]), expected)
