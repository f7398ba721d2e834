"""``reference.blocks_pack`` and ``blocks_unpack``: the bytes against a plain Python model, error and bias."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from block_cases import ANY_FLOAT, BITS, METADATA, SEEDS, assert_same, codes_of, error_bound
from qgnn import rng
from qgnn.formats import Int
from qgnn.reference import blocks_pack, blocks_unpack
from qgnn.reference.blocks import _round_down
from statistics_checks import EPS, SIGMAS, rounding_bias_z, z_limit

MODERATE = st.floats(-(2.0**60), 2.0**60, width=32)
TINY = st.floats(0, 2.0**-22, width=32)  # around the smallest numbers of fp16


def unpack(blocks: tuple[Tensor, Tensor, Tensor], bits: int, size: int) -> Tensor:
    return blocks_unpack(*blocks, bits=bits, size=size)


# --- a model in Python, one value at a time


def numbers_of(dtype: torch.dtype) -> np.ndarray:
    """Every number of a 16-bit type, ascending, as float64."""
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).double()
    return np.unique(numbers[~numbers.isnan()].numpy())


NUMBERS = {torch.bfloat16: numbers_of(torch.bfloat16), torch.float16: numbers_of(torch.float16)}


def model_block_scale(values: list[float], bits: int, dtype: torch.dtype) -> tuple[float, float, float]:
    """``(low, step, inverse step * 65536)``."""
    f32, qmax = np.float32, 2**bits - 1
    if not np.isfinite(values).all():
        return math.nan, math.nan, 0.0
    low = f32(min(values))
    if dtype != torch.float32:
        low = f32(NUMBERS[dtype][np.searchsorted(NUMBERS[dtype], float(low), side="right") - 1])
    extent = f32(max(values)) - low
    step = extent * f32(1 / qmax) if extent > f32(1e-30) else f32(0)
    if dtype != torch.float32 and np.isfinite(step):
        step = f32(NUMBERS[dtype][np.searchsorted(NUMBERS[dtype], float(step), side="left")])
        extent = step * f32(qmax)
    if not (np.isfinite(extent) and np.isfinite(step)):
        return math.nan, math.nan, 0.0
    inverse = f32(qmax * (1 - 2.0**-22)) / extent if extent > f32(1e-30) else f32(0)
    return float(low), float(step), float(inverse * f32(65536))


def model_pack(
    x: list[float], bits: int, block_size: int, dtype: torch.dtype, seed: Tensor | None
) -> tuple[list[list[int]], list[float], list[float]]:
    rows, lows, steps = [], [], []
    with np.errstate(over="ignore", invalid="ignore"):
        for block in range(math.ceil(len(x) / block_size)):
            values = x[block * block_size : (block + 1) * block_size]
            low, step, factor = model_block_scale(values, bits, dtype)
            row = [0] * (block_size * bits // 8)
            bits16 = None if seed is None else rng.random_bits16(block, 1, block_size, seed)[0].tolist()
            for position, value in enumerate(values if factor else []):
                product = np.float32(np.float32(value) - np.float32(low)) * np.float32(factor)
                code = (int(product) + (32768 if bits16 is None else bits16[position])) >> 16
                assert 0 <= code < 2**bits
                row[position % len(row)] |= code << (bits * (position // len(row)))
            rows.append(row)
            lows.append(low)
            steps.append(step)
    return rows, lows, steps


@given(st.data(), st.sampled_from(BITS), st.sampled_from(METADATA), SEEDS)
def test_pack_is_the_model(data: st.DataObject, bits: int, dtype: torch.dtype, seed: Tensor | None) -> None:
    block_size = 8 // bits * data.draw(st.integers(1, 5))
    kinds = [ANY_FLOAT, MODERATE, st.floats(-3, 3, width=32), TINY]
    x = data.draw(st.one_of([st.lists(kind, max_size=40) for kind in kinds]))
    packed, low, step = blocks_pack(torch.tensor(x), bits=bits, block_size=block_size, metadata_dtype=dtype, seed=seed)
    rows, lows, steps = model_pack(x, bits, block_size, dtype, seed)
    assert packed.dtype == torch.uint8
    assert torch.equal(packed, torch.tensor(rows, dtype=torch.uint8).view(-1, block_size * bits // 8))
    assert_same((low, step), [torch.tensor(expected, dtype=torch.float64).to(dtype) for expected in (lows, steps)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_round_down_is_the_next_number_below(dtype: torch.dtype) -> None:
    numbers = torch.tensor(NUMBERS[dtype], dtype=torch.float32)
    between = (numbers[1:-2].double() + numbers[2:-1].double()) / 2
    x = torch.cat([numbers, between.float(), torch.tensor([65519.0, 65520.0, 1e9, -65519.0, -65520.0, -1e9, 1e-45])])
    expected = NUMBERS[dtype][np.searchsorted(NUMBERS[dtype], x.double().numpy(), side="right") - 1]
    assert torch.equal(_round_down(x, dtype).double(), torch.from_numpy(expected))


def test_layout_of_two_bits() -> None:
    x = torch.tensor([0.0, 1, 2, 3, 3, 2, 1, 0, 10.0, 16, 12, 14, 16])
    packed, low, step = blocks_pack(x, bits=2, block_size=8)
    assert packed.tolist() == [[0b01_11_10_00, 0b00_10_11_01], [0b00_11_01_00, 0b00_00_10_11]]
    assert low.tolist() == [0, 10]
    assert step.tolist() == [1, 2]
    assert torch.equal(unpack((packed, low, step), 2, 13), x)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("seed", [None, 1], ids=["nearest", "stochastic"])
def test_blocks_of_fp32_are_the_asymmetric_format(bits: int, seed: int | None) -> None:
    x = torch.randn(30, 64) * torch.logspace(-9, 9, 30)[:, None]
    packed, low, step = blocks_pack(x, bits=bits, block_size=64, seed=None if seed is None else rng.make_seed(seed))
    q = Int(bits, symmetric=False).encode(x, seed=seed)
    assert torch.equal(codes_of(packed, bits), q.codes.long())
    assert torch.equal(torch.stack([low, step], 1), torch.cat([q.zero, q.scale], 1))
    assert torch.equal(unpack((packed, low, step), bits, x.numel()).view_as(x), q.dequantize())


# --- error and bias


@given(st.data(), st.sampled_from(BITS), st.sampled_from(METADATA), SEEDS)
def test_error_is_at_most_a_step(data: st.DataObject, bits: int, dtype: torch.dtype, seed: Tensor | None) -> None:
    block_size = 8 // bits * data.draw(st.integers(1, 8))
    limit = 2.0**14 if dtype == torch.float16 else 2.0**100
    values = data.draw(st.lists(st.floats(-limit, limit, width=32), min_size=1, max_size=70))
    x = torch.tensor(values)
    blocks = blocks_pack(x, bits=bits, block_size=block_size, metadata_dtype=dtype, seed=seed)
    error = (unpack(blocks, bits, len(x)).double() - x).abs()
    bound = error_bound(*blocks[1:], bits, nearest=seed is None).repeat_interleave(block_size)[: len(x)]
    assert (error <= bound).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", METADATA)
def test_step_is_the_range_divided_and_rounded_outward(bits: int, dtype: torch.dtype) -> None:
    """The offset loses at most one unit of its type, which the range gains, and the step one more."""
    x = torch.randn(200, 32) + 4 * torch.randn(200, 1)
    _, low, step = blocks_pack(x, bits=bits, block_size=32, metadata_dtype=dtype)
    minimum, maximum = (t.double() for t in x.aminmax(dim=1))
    unit = torch.finfo(dtype).eps
    assert (low.double() <= minimum).all()
    assert (minimum - low.double() <= unit * minimum.abs()).all()
    exact = (maximum - low.double()) / (2**bits - 1)
    assert (
        step.double() >= exact * (1 - 3 * EPS)
    ).all()  # the difference, 1 / qmax and the product were rounded in fp32
    assert (step.double() <= exact * (1 + unit + 3 * EPS)).all()


def through_blocks(steps: Tensor, seed: int, bits: int, dtype: torch.dtype) -> Tensor:
    """Codes of values given in steps: values of 0 and qmax beside them make a step 1."""
    ends = torch.tensor([0.0, 2.0**bits - 1]).expand(len(steps), 2)
    x = torch.cat([ends, steps, torch.zeros(len(steps), -(steps.shape[1] + 2) % 8)], dim=1)
    blocks = blocks_pack(x, bits=bits, block_size=x.shape[1], metadata_dtype=dtype, seed=rng.make_seed(seed))
    assert torch.equal(blocks[2].float(), torch.ones(len(steps)))
    return unpack(blocks, bits, x.numel()).view_as(x)[:, 2 : 2 + steps.shape[1]]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", METADATA)
def test_packing_is_unbiased(bits: int, dtype: torch.dtype) -> None:
    fractions = torch.tensor([0, 2.0**-10, 0.01, 0.1, 0.25, 0.5, 0.7, 0.9, 0.99, 1 - 2.0**-10, 1])
    whole = torch.tensor(sorted({0, (2**bits - 1) // 2, 2**bits - 2}))
    steps = (whole[:, None] + fractions).flatten()
    rounder = partial(through_blocks, bits=bits, dtype=dtype)
    assert rounding_bias_z(rounder, steps, num_draws=5000) < SIGMAS


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("dtype", METADATA)
def test_metadata_of_any_type_leaves_no_bias(bits: int, dtype: torch.dtype) -> None:
    """Offset and step are not numbers of a half type here; were they rounded after the coding, the mean would be off by
    up to 2**-9 of the largest value, 50 standard errors."""
    draws = 20000
    x = 10.0 + torch.rand(64) * torch.linspace(0.1, 1, 64)
    blocks = blocks_pack(x.expand(draws, 64), bits=bits, block_size=64, metadata_dtype=dtype, seed=rng.make_seed(3))
    values = unpack(blocks, bits, draws * 64).view(draws, 64).double()
    granted = 2.0**-15 * blocks[2][0].double() + 3 * EPS * 11  # of the rounding rule, and of decoding in fp32
    error = ((values.mean(0) - x).abs() - granted).clamp_min(0)
    assert (error <= z_limit(64) * values.std(0) / draws**0.5).all()
    assert values.std(0).max() > 0


def test_codes_of_uniform_values_have_the_expected_shares() -> None:
    """Of a uniform value on (0, 3), codes 0 and 3 get 1/6 each, and 1 and 2 get 1/3 each."""
    num_blocks, block_size = 4000, 64
    x = 3 * torch.rand(num_blocks, block_size)
    x[:, 0], x[:, 1] = 0, 3
    packed, _, _ = blocks_pack(x, bits=2, block_size=block_size, seed=rng.make_seed(0))
    counts = torch.zeros(4, dtype=torch.float64)
    for shift in (0, 2, 4, 6):
        counts += torch.bincount((packed.flatten() >> shift & 3).long(), minlength=4)
    counts -= torch.tensor([num_blocks, 0, 0, num_blocks])
    share = torch.tensor([1 / 6, 1 / 3, 1 / 3, 1 / 6], dtype=torch.float64)
    n = num_blocks * (block_size - 2)
    z = (counts - n * share) / (n * share * (1 - share)).sqrt()
    assert z.abs().max() < SIGMAS


@given(st.lists(MODERATE, min_size=2, max_size=64), st.sampled_from(BITS), st.sampled_from(METADATA))
def test_rounding_to_nearest_is_monotone(values: list[float], bits: int, dtype: torch.dtype) -> None:
    x = torch.tensor(sorted(values)) * (2.0**-50 if dtype == torch.float16 else 1)
    packed, _, _ = blocks_pack(x, bits=bits, block_size=64, metadata_dtype=dtype)
    codes = codes_of(packed, bits)[0, : len(x)]
    assert (codes.diff() >= 0).all()


@pytest.mark.parametrize("bits", BITS)
def test_nearest_codes_reach_both_ends(bits: int) -> None:
    packed, _, _ = blocks_pack(torch.randn(50, 64), bits=bits, block_size=64)
    codes = codes_of(packed, bits)
    assert (codes.amin(1) == 0).all()
    assert (codes.amax(1) == 2**bits - 1).all()
