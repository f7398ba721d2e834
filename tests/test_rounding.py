"""The rounding rule that every backend shares: bits, bounds, bias, and inputs that hurt."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qgnn import rng
from qgnn.formats import Int
from qgnn.reference import quantize
from qgnn.rounding import absmax_scale, round_codes
from statistics_checks import SIGMAS, nearest_bound, rounding_bias_z

BITS = range(2, 9)
GRANULARITIES = {"row": {}, "tensor": {}, "block": {"block_size": 8}}
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


def quantize_as(x: Tensor, granularity: str, **options: object) -> tuple[Tensor, Tensor]:
    return quantize(x, granularity=granularity, **GRANULARITIES[granularity], **options)


def per_value(scale: Tensor, x: Tensor, granularity: str) -> Tensor:
    """One scale for each value of ``x``."""
    if granularity == "block":
        return scale.repeat_interleave(8, dim=1)[:, : x.shape[1]]
    return scale[:, None].expand_as(x)


def numpy_codes(x: np.ndarray, absmax: np.ndarray, bits: int, bits16: np.ndarray | int) -> np.ndarray:
    """The rule in numpy's fp32, from its definition; finite values above the flush limit."""
    qmax = 2 ** (bits - 1) - 1
    inverse = np.float32(qmax * (1 - 2.0**-22)) / absmax
    steps = np.trunc(x * (inverse * np.float32(65536))).astype(np.int64)
    return (steps + bits16) >> 16


# --- the rule, bit for bit


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("seed", [None, 3], ids=["nearest", "stochastic"])
def test_quantize_is_the_rule_in_numpy(bits: int, seed: int | None) -> None:
    x = torch.randn(40, 33) * torch.logspace(-20, 20, 40)[:, None]
    seed = None if seed is None else rng.make_seed(seed)
    codes, scale = quantize(x, bits=bits, seed=seed)
    bits16 = 32768 if seed is None else rng.random_bits16(0, 40, 33, seed).numpy()
    absmax = x.abs().amax(1, keepdim=True).numpy()
    assert codes.dtype == torch.int8
    assert np.array_equal(codes.numpy(), numpy_codes(x.numpy(), absmax, bits, bits16))
    assert np.array_equal(scale.numpy(), absmax[:, 0] * np.float32(1 / (2 ** (bits - 1) - 1)))
    q = Int(bits).encode(x, seed=seed)
    assert torch.equal(q.codes, codes)
    assert torch.equal(q.scale[:, 0], scale)


@pytest.mark.parametrize("bits", range(2, 10))
def test_absmax_scale_is_the_rule_in_numpy(bits: int) -> None:
    """Nine bits too: codes without a sign are rounded as the non-negative ones of one bit more."""
    absmax = (torch.rand(5000) + 0.5) * torch.logspace(-29, 37, 5000)
    qmax = 2 ** (bits - 1) - 1
    scale, inverse = absmax_scale(absmax, bits)
    assert np.array_equal(scale.numpy(), absmax.numpy() * np.float32(1 / qmax))
    assert np.array_equal(inverse.numpy(), np.float32(qmax * (1 - 2.0**-22)) / absmax.numpy())
    codes = round_codes(absmax, inverse, torch.tensor(65535)).to(torch.uint8) if bits < 9 else None
    steps = (absmax * (inverse * 65536)).to(torch.int32)
    assert (steps + 65535 >> 16).max() == qmax  # the largest value stays in range whatever the random bits
    assert codes is None or codes.max() == qmax


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_quantize_shares_the_scale_of_its_granularity(granularity: str) -> None:
    x = torch.randn(13, 21)
    codes, scale = quantize_as(x, granularity, seed=rng.make_seed(1))
    group = {"row": x.abs().amax(1), "tensor": x.abs().amax().reshape(1)}.get(granularity)
    if group is None:
        group = torch.stack([block.abs().amax(1) for block in x.split(8, dim=1)], dim=1)
    assert torch.equal(scale, group * (1.0 / 127))
    bits16 = rng.random_bits16(0, 13, 21, rng.make_seed(1))
    absmax = per_value(group, x, granularity)
    assert np.array_equal(codes.numpy(), numpy_codes(x.numpy(), absmax.numpy(), 8, bits16.numpy()))


# --- bounds


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40),
    st.sampled_from(list(BITS)),
    st.booleans(),
)
def test_codes_stay_in_range_and_close(values: list[float], bits: int, stochastic: bool) -> None:
    x = torch.tensor([values])
    codes, scale = quantize(x, bits=bits, seed=rng.make_seed(len(values)) if stochastic else None)
    qmax = 2 ** (bits - 1) - 1
    assert codes.abs().max() <= qmax
    bound = nearest_bound(bits) + (0.5 if stochastic else 0)
    step = max(x.abs().max().item() / qmax, 1e-30)  # below 1e-30 everything is zero
    assert ((codes * scale[:, None]).double() - x).abs().max() <= bound * step


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bits16", [0, 32768, 65535])
@pytest.mark.parametrize("absmax", [1.1e-30, 1e-20, 1.0, 1 + 2.0**-23, 2 - 2.0**-23, math.pi, 1e4, 1e30, 3.4028235e38])
def test_largest_magnitudes_need_no_clamp(bits: int, bits16: int, absmax: float) -> None:
    x = torch.tensor([absmax, -absmax, absmax * (1 - 2.0**-24), -absmax / 2])
    scale, inverse = absmax_scale(x.abs().amax(), bits)
    codes = round_codes(x, inverse, torch.tensor(bits16))
    qmax = 2 ** (bits - 1) - 1
    assert codes.abs().max() <= qmax
    assert codes[0] in (qmax, qmax - 1)
    assert scale > 0
    assert torch.isfinite(scale)


@pytest.mark.parametrize("bits", BITS)
def test_nearest_error_is_at_most_half_a_step(bits: int) -> None:
    x = torch.cat([torch.linspace(-3, 3, 4001), torch.randn(4000)]).reshape(-1, 127)
    codes, scale = quantize(x, bits=bits)
    step = x.abs().amax(1, keepdim=True).double() / (2 ** (bits - 1) - 1)
    error = ((codes.float() * scale[:, None]).double() - x).abs() / step
    assert error.max() <= nearest_bound(bits)
    assert error.max() > 0.45  # the bound is not loose


@given(st.integers(0, 65535), st.sampled_from(list(BITS)))
def test_rounding_is_monotone(bits16: int, bits: int) -> None:
    """For any random bits, a larger value never gets a smaller code."""
    x = torch.cat([torch.randn(500), torch.tensor([0.0, 4.0, -4.0])]).sort().values
    _, inverse = absmax_scale(x.abs().amax(), bits)
    assert (round_codes(x, inverse, torch.tensor(bits16)).diff() >= 0).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_nearest_codes_of_the_negated_matrix_are_negated(granularity: str) -> None:
    """But for exact halves, which go up for either sign: one value in 65,536."""
    x = torch.randn(64, 130)
    (codes, scale), (negated, negated_scale) = quantize_as(x, granularity), quantize_as(-x, granularity)
    assert torch.equal(scale, negated_scale)
    total = codes.int() + negated.int()
    assert total.min() >= 0
    assert total.sum() <= 4


def test_scaling_by_a_power_of_two_keeps_codes() -> None:
    x = torch.randn(9, 33)
    codes, scale = quantize(x, seed=rng.make_seed(0))
    for power in (-60, -1, 1, 60):
        other, other_scale = quantize(x * 2.0**power, seed=rng.make_seed(0))
        assert torch.equal(other, codes)
        assert torch.equal(other_scale, scale * 2.0**power)


# --- bias


def through_quantize(steps: Tensor, seed: int, bits: int, granularity: str) -> Tensor:
    """Codes of values given in steps: a value of qmax beside them makes a step 1."""
    anchor = torch.full((len(steps), 1), 2.0 ** (bits - 1) - 1)
    if granularity == "block":
        padded = torch.nn.functional.pad(steps, (0, -steps.shape[1] % 7)).reshape(len(steps), -1, 7)
        x = torch.cat([padded, anchor[:, None].expand(-1, padded.shape[1], 1)], dim=2)
        codes, _ = quantize_as(x.flatten(1), granularity, bits=bits, seed=rng.make_seed(seed))
        return codes.view_as(x)[..., :7].flatten(1)[:, : steps.shape[1]]
    codes, _ = quantize_as(torch.cat([anchor, steps], dim=1), granularity, bits=bits, seed=rng.make_seed(seed))
    return codes[:, 1:]


def through_asymmetric(steps: Tensor, seed: int, bits: int) -> Tensor:
    low = torch.full((len(steps), 1), -(2.0 ** (bits - 1)))
    x = torch.cat([low, low + (2**bits - 1), steps], dim=1)
    q = Int(bits, symmetric=False).encode(x, seed=seed)
    return q.codes[:, 2:].int() - 2 ** (bits - 1)


def fractional_steps(bits: int) -> Tensor:
    """Values on codes (p = 0 and 1), next to them, and between, of both signs, up to the ends of the range."""
    qmax = 2 ** (bits - 1) - 1
    fractions = torch.tensor([0, 2.0**-10, 0.01, 0.1, 0.25, 0.5, 0.7, 0.9, 0.99, 1 - 2.0**-10, 1])
    whole = torch.tensor(sorted({-qmax, -qmax // 2, -1, 0, qmax // 2, qmax - 1}))
    return (whole[:, None] + fractions).flatten()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_stochastic_rounding_is_unbiased(bits: int, granularity: str) -> None:
    rounder = partial(through_quantize, bits=bits, granularity=granularity)
    assert rounding_bias_z(rounder, fractional_steps(bits), num_draws=5000) < SIGMAS


@pytest.mark.parametrize("bits", BITS)
def test_asymmetric_stochastic_rounding_is_unbiased(bits: int) -> None:
    rounder = partial(through_asymmetric, bits=bits)
    assert rounding_bias_z(rounder, fractional_steps(bits), num_draws=5000) < SIGMAS


def with_bits(make_bits16: Callable[[Tensor], Tensor], steps: Tensor, seed: int) -> Tensor:
    bits16 = make_bits16(rng.random_bits16(0, *steps.shape, rng.make_seed(seed)))
    return ((steps * 65536).to(torch.int32) + bits16) >> 16


BIASED_ROUNDERS = {
    "nearest": partial(with_bits, lambda r: torch.full_like(r, 32768)),
    "floor": lambda steps, seed: steps.floor(),
    "toward_zero": lambda steps, seed: steps.sign() * with_bits(lambda r: r * 0, steps.abs(), seed),
    "fifteen_of_sixteen_bits": partial(with_bits, lambda r: r & 0x7FFF),
    "two_percent_too_often": partial(with_bits, lambda r: r + 1311),
    "six_bits": partial(with_bits, lambda r: r & ~0x3FF),
    "signed_bits": partial(with_bits, lambda r: r - 32768),
    "down_from_a_code": lambda steps, seed: with_bits(lambda r: r, steps, seed) - (steps == 1).int(),
}


@pytest.mark.parametrize("name", BIASED_ROUNDERS)
def test_a_biased_rounder_fails_the_check(name: str) -> None:
    assert rounding_bias_z(BIASED_ROUNDERS[name], fractional_steps(8), num_draws=5000) > SIGMAS


def test_an_unbiased_rounder_passes_the_check() -> None:
    rounder = partial(with_bits, lambda r: r)
    assert rounding_bias_z(rounder, fractional_steps(8), num_draws=5000) < SIGMAS


def test_same_seed_same_codes_and_second_seed_not() -> None:
    x = torch.randn(20, 33)
    codes, scale = quantize(x, seed=rng.make_seed(1))
    again, _ = quantize(x, seed=rng.make_seed(1))
    other, other_scale = quantize(x, seed=rng.make_seed(2))
    stream, _ = quantize(x, seed=rng.make_seed(1), stream=1)
    assert torch.equal(codes, again)
    assert torch.equal(scale, other_scale)
    for different in (other, stream):
        assert not torch.equal(codes, different)
        assert (codes.int() - different.int()).abs().max() == 1
    assert torch.equal(Int().encode(x, seed=1).codes, codes)


# --- values that hurt


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("seed", [None, 5], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-36, 1e-30, 1e-42, -1e-45], ids=str)
def test_zero_and_tiny_values_are_zero(value: float, seed: int | None, granularity: str) -> None:
    x = torch.full((5, 17), value)
    codes, scale = quantize_as(x, granularity, seed=None if seed is None else rng.make_seed(seed))
    assert not codes.any()
    assert not scale.any()


@pytest.mark.parametrize("scale_of_values", [1e-29, 1e-20, 1e20, 1e30, 1e38], ids=str)
def test_extreme_magnitudes_are_finite(scale_of_values: float) -> None:
    x = torch.rand(5, 17) * scale_of_values
    for granularity in GRANULARITIES:
        codes, scale = quantize_as(x, granularity)
        value = codes.float() * per_value(scale, x, granularity)
        assert torch.isfinite(value).all()
        assert ((value - x).double().norm() / x.double().norm()) < 0.01


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("seed", [None, 5], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_poison_stays_in_its_group(poison: float, seed: int | None, granularity: str) -> None:
    x = torch.randn(6, 21)
    seed = None if seed is None else rng.make_seed(seed)
    clean_codes, clean_scale = quantize_as(x, granularity, seed=seed)
    x[2, 9] = poison
    codes, scale = quantize_as(x, granularity, seed=seed)
    sick = {"row": (slice(2, 3), slice(None)), "block": (slice(2, 3), slice(8, 16))}.get(
        granularity, (slice(None),) * 2
    )
    value = codes.float() * per_value(scale, x, granularity)
    clean = clean_codes.float() * per_value(clean_scale, x, granularity)
    expected = clean.clone()
    expected[sick] = math.nan
    assert torch.equal(codes[sick], torch.zeros_like(codes[sick]))
    torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)


@given(st.lists(st.lists(FLOATS, min_size=5, max_size=5), min_size=1, max_size=6), st.booleans())
def test_rows_are_independent(values: list[list[float]], stochastic: bool) -> None:
    """What a row holds, whatever it is, changes nothing in the others."""
    x = torch.tensor(values)
    seed = rng.make_seed(0) if stochastic else None
    codes, scale = quantize(x, seed=seed)
    for row in range(len(x)):
        alone = torch.zeros_like(x)
        alone[row] = x[row]
        codes_alone, scale_alone = quantize(alone, seed=seed)
        assert torch.equal(codes[row], codes_alone[row])
        assert torch.equal(scale[row].view(torch.int32), scale_alone[row].view(torch.int32))
        assert bool(scale[row].isnan()) == (not torch.isfinite(x[row]).all())


# --- types, layouts, sizes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_other_float_types_are_converted_first(dtype: torch.dtype, granularity: str) -> None:
    x = (torch.randn(7, 21) * 3).to(dtype)
    codes, scale = quantize_as(x, granularity, seed=rng.make_seed(0))
    expected, expected_scale = quantize_as(x.float(), granularity, seed=rng.make_seed(0))
    assert scale.dtype == torch.float32
    assert torch.equal(codes, expected)
    assert torch.equal(scale, expected_scale)


def test_half_scales_do_not_underflow() -> None:
    """1e-5 / 127 is below the smallest fp16 number."""
    x = torch.full((2, 4), 1e-5, dtype=torch.float16)
    codes, scale = quantize(x)
    torch.testing.assert_close(codes * scale[:, None], x.float(), rtol=1e-6, atol=0)


STRIDED = {
    "every_second_row": lambda t: t[::2],
    "every_third_column": lambda t: t[:, ::3],
    "transposed": lambda t: t.t(),
    "inner": lambda t: t[3:17, 5:20],
    "expanded_row": lambda t: t[:1].expand(9, -1),
    "expanded_value": lambda t: t[:1, :1].expand(9, 12),
}


@pytest.mark.parametrize("view", STRIDED)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_views_equal_their_contiguous_copies(view: str, granularity: str) -> None:
    x = STRIDED[view](torch.randn(26, 42))
    for seed in (None, rng.make_seed(0)):
        codes, scale = quantize_as(x, granularity, seed=seed)
        expected, expected_scale = quantize_as(x.contiguous(), granularity, seed=seed)
        assert torch.equal(codes, expected)
        assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("seed", [None, 5], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_quantize_smallest_shapes(shape: tuple[int, int], seed: int | None, granularity: str) -> None:
    codes, scale = quantize_as(torch.ones(shape), granularity, seed=None if seed is None else rng.make_seed(seed))
    expected_scale = {"row": shape[:1], "tensor": (1,), "block": (shape[0], math.ceil(shape[1] / 8))}[granularity]
    assert codes.shape == shape
    assert scale.shape == expected_scale


@pytest.mark.parametrize("block_size", [2, 4, 16, 64, 1024])
@pytest.mark.parametrize("width", [1, 7, 32, 33, 130])
def test_block_sizes(block_size: int, width: int) -> None:
    x = torch.randn(5, width)
    codes, scale = quantize(x, granularity="block", block_size=block_size)
    assert scale.shape == (5, math.ceil(width / block_size))
    for number, block in enumerate(x.split(block_size, dim=1)):
        first = number * block_size
        expected, expected_scale = quantize(block)
        assert torch.equal(codes[:, first : first + block_size], expected)
        assert torch.equal(scale[:, number], expected_scale)


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Number of elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(result):
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.numel())
        return result


@pytest.mark.parametrize("granularity", ["row", "tensor", "block"])
def test_quantize_needs_no_more_room_than_its_input(granularity: str) -> None:
    """A block far wider than the matrix is not padded to its full size."""
    x = torch.randn(300, 3)
    with LargestTensor() as largest:
        quantize(x, granularity=granularity, block_size=65536, seed=rng.make_seed(0))
    assert largest.numel <= 4 * x.numel()
