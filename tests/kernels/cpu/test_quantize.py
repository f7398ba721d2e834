"""The native ``quantize`` equals the reference, bit for bit."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from qgnn.kernels.cpu.quantize import quantize
from torch import Tensor

from block_cases import ANY_FLOAT, SEEDS
from kernel_cases import FLOATS, LAYOUTS, SIZES, far_columns, surrounded
from qgnn import reference, rng

WIDTHS = [*SIZES, 256, 600, 1433, 2500]  # random bits are made for 512 columns at a time
GRANULARITIES = {
    "row": {},
    "tensor": {"granularity": "tensor"},
    "block16": {"granularity": "block", "block_size": 16},
    "block8": {"granularity": "block", "block_size": 8},  # several at a time, if they make up a row
    "block4": {"granularity": "block", "block_size": 4},
    "block2": {"granularity": "block", "block_size": 2},
    "block1": {"granularity": "block", "block_size": 1},
    "block5": {"granularity": "block", "block_size": 5},  # odd: a block begins in the middle of a hash
    "block515": {"granularity": "block", "block_size": 515},
    "block_wider": {"granularity": "block", "block_size": 1 << 16},
}


def _assert_equals_reference(x: Tensor, seed: Tensor | None = None, **options: object) -> Tensor:
    codes, scale = quantize(x, seed=seed, **options)
    expected_codes, expected_scale = reference.quantize(x, seed=seed, **options)
    assert codes.dtype == torch.int8
    assert torch.equal(codes, expected_codes)
    torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0, equal_nan=True)
    return codes


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("stochastic", [False, True])
def test_quantize_equals_reference(width: int, granularity: str, stochastic: bool) -> None:
    x = torch.randn(21, width) * torch.logspace(-3, 3, 21)[:, None]
    seed = rng.make_seed(7) if stochastic else None
    _assert_equals_reference(x, seed, stream=3, **GRANULARITIES[granularity])


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("granularity", ["row", "tensor", "block5"])
def test_quantize_equals_reference_for_every_width_of_codes_and_type(
    bits: int, dtype: torch.dtype, granularity: str
) -> None:
    x = torch.randn(9, 33).to(dtype)
    for seed in (None, rng.make_seed(1)):
        codes = _assert_equals_reference(x, seed, bits=bits, **GRANULARITIES[granularity])
        assert codes.abs().max() == (1 << (bits - 1)) - 1  # the largest value of a group takes the largest code


@pytest.mark.parametrize("granularity", ["row", "tensor", "block5"])
def test_threads_change_nothing(threads: int, granularity: str) -> None:
    x = torch.randn(1001, 133)  # several times the least work of a thread
    x[1000] *= 50  # the absmax of the matrix lies in the last thread's part
    _assert_equals_reference(x, rng.make_seed(2), **GRANULARITIES[granularity])


@given(st.data(), st.integers(2, 8), st.integers(0, 5), SEEDS)
def test_any_values(data: st.DataObject, bits: int, stream: int, seed: Tensor | None) -> None:
    num_rows, width = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 40))
    values = data.draw(st.lists(ANY_FLOAT, min_size=num_rows * width, max_size=num_rows * width))
    x = torch.tensor(values, dtype=torch.float32).view(num_rows, width)
    block_size = data.draw(st.integers(1, 45))
    for granularity in ("row", "block", "tensor"):
        _assert_equals_reference(x, seed, bits=bits, stream=stream, granularity=granularity, block_size=block_size)


@pytest.mark.parametrize("block_size", [4, 8, 16])
@pytest.mark.parametrize("num_blocks", [3, 17])
def test_narrow_blocks_of_special_values(block_size: int, num_blocks: int) -> None:
    x = torch.randn(6, block_size * num_blocks)
    for row, value in enumerate((math.nan, math.inf, -math.inf, 0.0, 1e-40)):
        x[row, row :: block_size + 1] = value
        x[row, -block_size:] = value
    for seed in (None, rng.make_seed(3)):
        _assert_equals_reference(x, seed, granularity="block", block_size=block_size)


def test_nearest_rounding_takes_halves_up() -> None:
    """With an absmax of 127 a code is the value itself; a step is 2^-16, and the scale is short of 1 by 2^-22."""
    half = 0.5 + 2.0**-17
    x = torch.tensor([[127.0, half, 0.5 - 2.0**-15, 1.0, half - 2, -127.0, -0.5 - 2.0**-15, -half + 2.0**-14]])
    assert quantize(x)[0].tolist() == [[127, 1, 0, 1, -1, -127, -1, 0]]
    _assert_equals_reference(x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("granularity", ["row", "tensor", "block16"])
def test_quantize_takes_any_strides(layout: str, granularity: str) -> None:
    x = LAYOUTS[layout](torch.randn(19, 33))
    _assert_equals_reference(x, rng.make_seed(3), **GRANULARITIES[granularity])


@pytest.mark.parametrize("granularity", ["row", "tensor", "block2"])
def test_quantize_finds_columns_beyond_32_bit_offsets(granularity: str) -> None:
    x = torch.randn(2, 5).half()
    _assert_equals_reference(far_columns(x), rng.make_seed(3), **GRANULARITIES[granularity])


def test_quantize_finds_rows_beyond_32_bit_offsets() -> None:
    """The rows of the matrix whose columns lie far apart."""
    x = far_columns(torch.randn(5, 2)).t()
    _assert_equals_reference(x, rng.make_seed(3))


@pytest.mark.parametrize("width", SIZES)
def test_quantize_uses_nothing_outside_a_view(width: int) -> None:
    x = surrounded(torch.randn(11, width), float("nan"))
    _assert_equals_reference(x, rng.make_seed(4))
    _assert_equals_reference(x, granularity="tensor")


def test_quantize_takes_a_row_that_is_repeated_without_memory() -> None:
    _assert_equals_reference(torch.randn(1, 33).expand(6, 33), rng.make_seed(4))
    _assert_equals_reference(torch.randn(6, 1).expand(6, 33), rng.make_seed(4))


def test_quantize_takes_what_needs_a_gradient() -> None:
    codes, scale = quantize(torch.randn(6, 33, requires_grad=True))
    assert not codes.requires_grad
    assert not scale.requires_grad


def test_quantize_leaves_its_input_alone() -> None:
    x, seed = torch.randn(10, 33), rng.make_seed(5)
    x_before, seed_before = x.clone(), seed.clone()
    quantize(x, seed=seed, stream=2)
    assert torch.equal(x, x_before)
    assert torch.equal(seed, seed_before)


@pytest.mark.parametrize("granularity", ["row", "tensor", "block16"])
def test_quantize_gives_zero_and_tiny_rows_the_scale_zero(granularity: str) -> None:
    tiny = torch.tensor([0.0, -0.0, 1e-36, -1e-30, 1e-45])[:, None].expand(5, 33)
    assert not _assert_equals_reference(tiny, rng.make_seed(8), **GRANULARITIES[granularity]).any()
    assert not quantize(tiny, **GRANULARITIES[granularity])[1].any()
    _assert_equals_reference(torch.cat([tiny, torch.ones(1, 33)]), rng.make_seed(8), **GRANULARITIES[granularity])


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), -float("nan")])
@pytest.mark.parametrize("width", [33, 1100])
@pytest.mark.parametrize("stochastic", [False, True])
def test_quantize_keeps_poison_in_its_row(value: float, width: int, stochastic: bool) -> None:
    x = torch.randn(6, width)
    x[2, width - 2] = value
    codes = _assert_equals_reference(x, rng.make_seed(9) if stochastic else None)
    assert not codes[2].any()
    assert quantize(x)[1].isnan().nonzero().tolist() == [[2]]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("nan")])
def test_quantize_spreads_poison_over_a_shared_scale(value: float) -> None:
    x = torch.randn(6, 33)
    x[2, 31] = value
    codes, scale = quantize(x, granularity="tensor")
    assert scale.isnan().all()
    assert not codes.any()
    block_scale = quantize(x, granularity="block", block_size=16)[1]
    assert block_scale.isnan().nonzero().tolist() == [[2, 1]]


@pytest.mark.parametrize("shape", [(0, 7), (4, 0), (0, 0)])
def test_quantize_of_nothing(shape: tuple[int, int]) -> None:
    scale_shapes = {"row": shape[:1], "tensor": (1,), "block16": (shape[0], 1 if shape[1] else 0)}
    for granularity, scale_shape in scale_shapes.items():
        codes, scale = quantize(torch.randn(shape), seed=rng.make_seed(1), **GRANULARITIES[granularity])
        assert codes.shape == shape
        assert torch.equal(scale, torch.zeros(scale_shape))


def test_seeds_and_streams_change_codes_and_repeat_them() -> None:
    x = torch.randn(20, 33)
    codes = [quantize(x, seed=rng.make_seed(seed), stream=stream)[0] for seed, stream in [(1, 0), (2, 0), (1, 1)]]
    assert torch.equal(codes[0], quantize(x, seed=rng.make_seed(1))[0])
    assert not torch.equal(codes[0], codes[1])
    assert not torch.equal(codes[0], codes[2])
