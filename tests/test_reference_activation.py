"""ReLU and dropout as an epilogue: the definition against torch's own functions, and the bits of its mask."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from activation_cases import assert_no_code_overflows
from dense import WIDTHS
from qgnn import reference, rng
from qgnn.activation import (
    Activation,
    derivative_size,
    derivative_steps,
    dropout_threshold,
    keep_factor,
    mask_width,
)
from qgnn.reference.activation import _exponential, _pack, _unpack, activate
from statistics_checks import EPS, assert_plausible, correlation_z


def activation(width: int, num_rows: int = 9, relu: bool = True, p: float = 0.0, seed: int = 1) -> Activation:
    mask = torch.full((num_rows, mask_width(width)), 77, dtype=torch.uint8)
    return Activation(relu, dropout_threshold(p), rng.make_seed(seed), 6, mask)


@given(st.integers(0, 9), st.integers(0, 40), st.integers(0, 2**32))
def test_bits_are_packed_and_unpacked(num_rows: int, width: int, seed: int) -> None:
    passes = torch.rand((num_rows, width), generator=torch.Generator().manual_seed(seed)) < 0.5
    mask = _pack(passes)
    assert mask.shape == (num_rows, -(-width // 8))
    assert torch.equal(_unpack(mask, width), passes)
    for f in range(width):
        assert torch.equal((mask[:, f // 8] >> f % 8) & 1, passes[:, f].to(torch.uint8))


def test_bits_behind_the_last_column_are_zero() -> None:
    assert _pack(torch.ones(3, 11, dtype=torch.bool)).tolist() == [[255, 7]] * 3


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_relu_is_that_of_torch(width: int, dtype: torch.dtype) -> None:
    y = torch.randn(9, width).to(dtype).requires_grad_()
    y.data[0, 0], y.data[1, 0] = float("nan"), 0.0
    a, upstream = activation(width), torch.randn(9, width).to(dtype)
    y.relu().backward(upstream)
    torch.testing.assert_close(activate(y.detach(), a), y.detach().relu(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(reference.activation_backward(upstream, a.mask)[0], y.grad)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("p", [0.25, 0.5])
def test_what_is_kept_is_scaled_so_that_the_mean_stays(relu: bool, p: float) -> None:
    y = torch.randn(400, 33)
    a = activation(33, 400, relu, p)
    out, expected = activate(y, a), y.relu() if relu else y
    kept = out != 0
    torch.testing.assert_close(out[kept], expected[kept] / (1 - p))
    counted = (y > 0) if relu else torch.ones_like(y, dtype=torch.bool)
    share, n = kept[counted].double().mean(), int(counted.sum())
    assert_plausible([(share - (1 - p)) / (p * (1 - p) / n) ** 0.5], "share of kept elements")
    upstream = torch.randn(400, 33)
    gradient = reference.activation_backward(upstream, a.mask, factor=a.factor)[0]
    assert torch.equal(gradient != 0, kept & (upstream != 0))
    torch.testing.assert_close(gradient[kept], upstream[kept] / (1 - p))


def test_dropout_takes_other_bits_than_rounding() -> None:
    """One seed serves both: an element that is rounded up must not be the one that is kept."""
    seed = rng.make_seed(5)
    kept = activate(torch.ones(2000, 64), Activation(False, 1 << 15, seed, 6, None)) != 0
    bits = rng.random_bits16(0, 2000, 64, seed)
    assert_plausible([correlation_z(kept.flatten() * 65535, bits.flatten())], "dropout against rounding")


@pytest.mark.parametrize(("p", "threshold"), [(0.0, 0), (1.0, 65536), (0.5, 32768), (2.0**-18, 0)])
def test_threshold_and_factor(p: float, threshold: int) -> None:
    assert dropout_threshold(p) == threshold
    assert keep_factor(threshold) == (0.0 if threshold == 65536 else 65536 / (65536 - threshold))
    out = activate(torch.randn(50, 8), activation(8, 50, relu=False, p=p))
    assert (out == 0).all() == (threshold == 65536)


def test_seeds_and_rows() -> None:
    y = torch.ones(30, 12)
    out, again, other = (activate(y, activation(12, 30, p=0.5, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(out, again)
    assert not torch.equal(out, other)
    a = activation(12, 30, p=0.5)
    parts = [activate(y[rows], a, rows.start) for rows in (slice(0, 7), slice(7, 30))]
    assert torch.equal(torch.cat(parts), out)
    whole = activation(12, 30, p=0.5)
    activate(y, whole)
    assert torch.equal(a.mask, whole.mask)


@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("masked", [False, True])
def test_quantize_grad_is_quantize_of_the_masked_gradient(granularity: str, masked: bool) -> None:
    grad, a = torch.randn(9, 13), activation(13, p=0.3)
    activate(torch.randn(9, 13), a)
    mask, factor = (a.mask, a.factor) if masked else (None, 1.0)
    expected = reference.activation_backward(grad, a.mask, factor=factor)[0] if masked else grad
    options = {"bits": 5, "granularity": granularity, "seed": rng.make_seed(3), "stream": 3}
    codes, scale, sums = reference.quantize_grad(grad, mask=mask, factor=factor, sum_columns=True, **options)
    for actual, wanted in zip((codes, scale), reference.quantize(expected, **options), strict=True):
        assert torch.equal(actual, wanted)
    torch.testing.assert_close(sums, expected.sum(0))
    assert reference.quantize_grad(grad, **options)[2] is None


def test_exponentials_are_within_four_roundings() -> None:
    """With x = n ln 2 + r, |r| < 0.35: q = e^r - 1 is off by less than two roundings of |q| < 0.42, and by 0.38 where
    n < 0, as r is rounded itself. So (q + 1) 2^n is off by 1.2 and one each for sum and product; q 2^n + (2^n - 1),
    which is 0.29 at least where n < 0, by 2.8 and one for the sum."""
    x = torch.cat([-torch.logspace(-40, 1.9, 200_000, dtype=torch.float64).float(), -87 * torch.rand(200_000)])
    for ours, exact in zip(_exponential(x), (x.double().exp(), x.double().expm1()), strict=True):
        assert ((ours.double() - exact).abs() <= 4 * EPS * exact.abs()).all()
    grown, less_one = _exponential(torch.tensor([0.0, -0.0, 5.0, -88.0, -1e30, -torch.inf]))
    assert grown.tolist() == [1, 1, 1, 0, 0, 0]
    assert less_one.tolist() == [0, 0, 0, -1, -1, -1]


ALPHAS = pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0, 1.3, 1e30])


@ALPHAS
def test_elu_is_that_of_torch(alpha: float) -> None:
    """To within five roundings, of which the last is the product with alpha, or one step of denormals."""
    x = torch.cat(
        [5 * torch.randn(9, 70), torch.tensor([0.0, -1e-9, -1e-39, 1e-39, torch.inf, -torch.inf]).expand(9, 6)], 1
    )
    derivative = torch.empty(x.shape)
    y = reference.activation(x, kind="elu", slope=alpha, derivative=derivative)
    leaf = x.double().requires_grad_()
    exact = F.elu(leaf, float(torch.tensor(alpha)))
    (slope,) = torch.autograd.grad(exact.sum(), leaf)
    assert ((y - exact).abs() <= 5 * EPS * exact.abs() + 2.0**-149)[x.isfinite()].all()
    assert torch.equal(y[:, -2:], F.elu(x[:, -2:], alpha))
    assert ((derivative - slope).abs() <= 5 * EPS * slope.abs() + 2.0**-126).all()


@ALPHAS
@pytest.mark.parametrize("seed", [None, 3])
def test_codes_of_a_derivative_are_its_neighbors(alpha: float, seed: int | None) -> None:
    """... among 256 values from 0 to the largest one: to nearest off by half a step, else by less than one, both but
    for the rounding of the product. The largest are met whatever is drawn."""
    x = torch.cat([torch.randn(300, 33), torch.zeros(300, 1), torch.full((300, 1), -1e-9)], 1)
    exact, codes = torch.empty(x.shape), torch.empty(x.shape, dtype=torch.uint8)
    options = {"kind": "elu", "slope": alpha, "steps": derivative_steps(alpha)}
    rounding = {"seed": None if seed is None else rng.make_seed(seed), "stream": 8}
    y = reference.activation(x, derivative=exact, **options)
    assert torch.equal(y, reference.activation(x, derivative=codes, **options, **rounding))
    steps = exact.double() / derivative_size(alpha)
    assert ((codes.double() - steps).abs() <= (0.5 if seed is None else 1) + 2.0**-14).all()
    assert (codes[exact == max(1.0, alpha)] == 255).all()
    assert (codes[exact == 0] == 0).all()


def test_no_code_of_a_derivative_overflows() -> None:
    assert_no_code_overflows(reference.activation, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_leaky_relu_is_that_of_torch(dtype: torch.dtype) -> None:
    x, upstream = torch.randn(9, 13).to(dtype).requires_grad_(), torch.randn(9, 13).to(dtype)
    x.data[0, 0], x.data[1, 0] = float("nan"), 0.0
    expected = F.leaky_relu(x, 0.2)
    expected.backward(upstream)
    mask = torch.full((9, 2), 77, dtype=torch.uint8)
    y = reference.activation(x.detach(), kind="leaky_relu", slope=0.2, mask=mask)
    torch.testing.assert_close(y, expected.detach(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(reference.activation_backward(upstream, mask, slope=0.2)[0], x.grad)
