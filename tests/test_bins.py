"""``qgnn.bins``: the published table, quadrature, sampling and the rounding operators against the closed forms."""

import math
from itertools import pairwise
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qgnn import bins, ops, rng
from statistics_checks import SIGMAS

# Block-wise quantization with improved variance minimization, at 2 bits: d, alpha, E[Var] of bins of one width and of
# the best ones, and by how much these lower it, in percent.
TABLE = [
    (4, 1.0109, 0.08358, 0.08351, 0.07),
    (8, 1.0300, 0.12579, 0.12503, 0.61),
    (16, 1.0499, 0.14694, 0.14424, 1.84),
    (32, 1.0689, 0.15734, 0.15140, 3.78),
    (64, 1.0862, 0.16233, 0.15206, 6.33),
    (128, 1.1017, 0.16471, 0.14933, 9.34),
    (256, 1.1156, 0.16594, 0.14492, 12.66),
    (512, 1.1281, 0.16673, 0.13979, 16.16),
    (1024, 1.1394, 0.16746, 0.13446, 19.71),
    (2048, 1.1495, 0.16828, 0.12920, 23.22),
]
WIDTHS = st.integers(2, 4)
SIZES = st.integers(1, bins.MAX_BLOCK_SIZE)


def deviation(bits: int, block_size: int) -> float:
    return -((1 << bits) - 1) / 2 / NormalDist().inv_cdf(1 / block_size)


def clipped_normal(bits: int, block_size: int, *shape: int, seed: int) -> Tensor:
    last = (1 << bits) - 1
    z = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (last / 2 + deviation(bits, block_size) * z).clamp(0, last)


@pytest.mark.parametrize(("d", "alpha", "uniform", "optimal", "reduction"), TABLE, ids=[str(row[0]) for row in TABLE])
def test_two_bits_are_the_published_table(
    d: int, alpha: float, uniform: float, optimal: float, reduction: float
) -> None:
    edges = bins.optimal_bins(2, d)
    found = bins.expected_variance(2, d), bins.expected_variance(2, d, edges)
    assert edges.tolist() == pytest.approx([0, alpha, 3 - alpha, 3], abs=1e-4)  # as many digits as are printed
    assert found == pytest.approx((uniform, optimal), abs=1e-5)
    assert 100 * (1 - found[1] / found[0]) == pytest.approx(reduction, abs=0.01)


@pytest.mark.parametrize(
    ("bits", "d", "kind"),
    [
        *((bits, d, "uniform") for bits, d in ((1, 3), (2, 64), (4, 65536), (8, 512))),
        *((bits, d, "optimal") for bits, d in ((2, 64), (3, 2048), (4, 16), (4, 65536))),
    ],
)
def test_the_closed_form_is_the_integral(bits: int, d: int, kind: str) -> None:
    edges = torch.arange(1 << bits) if kind == "uniform" else bins.optimal_bins(bits, d)
    model = stats.norm(((1 << bits) - 1) / 2, deviation(bits, d))
    parts = [
        integrate.quad(lambda h, a=a, b=b: (h - a) * (b - h) * model.pdf(h), a, b, epsabs=1e-13)[0]
        for a, b in pairwise(edges.tolist())
    ]
    # Each of the 2**bits - 1 terms is a difference of numbers below (1 + half range**2 < 19), times sigma**2.
    rounding = (1 << bits) * 19 * deviation(bits, d) ** 2 * 2.0**-52
    given_edges = None if kind == "uniform" else edges
    assert bins.expected_variance(bits, d, given_edges) == pytest.approx(math.fsum(parts), rel=1e-9, abs=rounding)


@pytest.mark.parametrize(("bits", "d"), [(2, 8), (2, 1024), (3, 64), (4, 2048)])
@pytest.mark.parametrize("kind", bins.BINS)
def test_the_closed_form_is_what_sampling_gives(bits: int, d: int, kind: str) -> None:
    """Values of the model, rounded up or down at random: the mean squared error within five standard errors."""
    edges = None if kind == "uniform" else bins.optimal_bins(bits, d)
    levels = torch.arange(1 << bits).double() if edges is None else edges.double()
    h = clipped_normal(bits, d, 400_000, seed=bits + d)
    below = torch.bucketize(h, levels[1:-1], right=True)
    low, high = levels[below], levels[below + 1]
    up = torch.rand(h.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) < (h - low) / (high - low)
    squares = (torch.where(up, high, low) - h) ** 2
    error = float(squares.mean()) - bins.expected_variance(bits, d, edges)
    assert abs(error) <= SIGMAS * float(squares.std()) / len(h) ** 0.5
    # Given the values, it is (h - a) (b - h).
    assert torch.allclose(bins.rounding_variance(h, edges), (h - low) * (high - h), rtol=0, atol=1e-12)


@given(WIDTHS, SIZES)
def test_optimal_bins_are_symmetric_and_rise(bits: int, block_size: int) -> None:
    edges, last = bins.optimal_bins(bits, block_size), (1 << bits) - 1
    assert edges.dtype == torch.float32
    assert edges.shape == (1 << bits,)
    assert torch.equal(edges + edges.flip(0), torch.full_like(edges, last))
    assert torch.equal(edges * 65536, (edges * 65536).round())
    assert edges[0] == 0
    assert (edges.diff() > 0.5).all()
    if block_size <= 2:
        assert torch.equal(edges, torch.arange(1 << bits).float())
    else:
        # The density rises towards the middle, so bins get narrower; a multiple of 2**-16 may be off by half of it.
        half = edges[: len(edges) // 2 + 1].diff()
        assert (half.diff() <= 2.0**-15).all()
    if bits != 3:
        x = torch.linspace(-1, 1, 16)
        packed = ops.blocks_pack(x, None, bits, 16, torch.float32, edges, 0, None)
        assert ops.blocks_unpack(*packed, bits, 16, torch.float32, edges, 0, None, 0, 0).shape == x.shape


# Edges are off by up to 2**-17 each, which costs at most half of that squared times the Hessian: 14 edges, and by
# Gershgorin twice the widest bins (< 6) times the density (< 0.4 / 0.35).
ROUNDED = 14 * 0.5 * 2.0**-34 * 2 * 6 * (0.4 / 0.35)


@given(st.data(), WIDTHS, st.integers(3, bins.MAX_BLOCK_SIZE), st.sampled_from([0.3, 0.03, 0.003]))
def test_no_other_bins_have_less_variance(data: st.DataObject, bits: int, block_size: int, size: float) -> None:
    edges = bins.optimal_bins(bits, block_size).double()
    inner = len(edges) - 2
    moved = edges.clone()
    moved[1:-1] += torch.tensor(data.draw(st.lists(st.floats(-size, size), min_size=inner, max_size=inner))).double()
    best = bins.expected_variance(bits, block_size, edges)
    assert bins.expected_variance(bits, block_size, moved.sort().values) >= best - ROUNDED
    assert best <= bins.expected_variance(bits, block_size) + ROUNDED


@given(WIDTHS, st.integers(3, bins.MAX_BLOCK_SIZE))
def test_the_gradient_of_every_edge_vanishes(bits: int, block_size: int) -> None:
    """Central differences, whose error is a sixth of ``h**2`` times the third derivative (below 20: densities, and
    their slopes times a width, over sigma**2 > 0.1), and rounding; and the Hessian times 2**-17."""
    edges, h = bins.optimal_bins(bits, block_size).double(), 1e-4
    for i in range(1, len(edges) - 1):
        shift = torch.zeros_like(edges)
        shift[i] = h
        rise = bins.expected_variance(bits, block_size, edges + shift)
        fall = bins.expected_variance(bits, block_size, edges - shift)
        assert abs(rise - fall) / (2 * h) <= 20 * h**2 / 6 + 1e-10 + 2 * 6 * (0.4 / 0.35) * 2.0**-17


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("d", [16, 64, 1024, 65536])
def test_more_bits_gain_more_from_optimal_bins(bits: int, d: int) -> None:
    gains = [
        1 - bins.expected_variance(b, d, bins.optimal_bins(b, d)) / bins.expected_variance(b, d) for b in (2, bits)
    ]
    assert 0.01 < gains[0] < gains[1]


@pytest.mark.parametrize(("bits", "d"), [(2, 64), (2, 2048), (4, 1024)])
@pytest.mark.parametrize("kind", bins.BINS)
def test_the_operators_round_with_the_expected_variance(bits: int, d: int, kind: str) -> None:
    """Values of the model in blocks that hold both ends, so that steps are 1: within five standard errors, and what
    positions and edges in units of 2**-16 may change of (h - a) (b - h)."""
    edges, last, size = (None if kind == "uniform" else bins.optimal_bins(bits, d)), (1 << bits) - 1, 4096
    x = clipped_normal(bits, d, 100, size, seed=bits + d)
    x[:, 0], x[:, 1] = 0, last
    x = x.float()
    packed = ops.blocks_pack(x, rng.make_seed(3), bits, size, torch.float32, edges, 0, None)
    restored = ops.blocks_unpack(*packed, bits, x.numel(), torch.float32, edges, 0, None, 0, 0).view_as(x)
    squares = (restored - x)[:, 2:].double() ** 2
    error = float(squares.mean()) - bins.expected_variance(bits, d, edges)
    assert abs(error) <= SIGMAS * float(squares.std()) / squares.numel() ** 0.5 + 4 * 2.0**-16


def test_the_prediction_is_in_variances_of_the_values() -> None:
    step = 2 * -NormalDist().inv_cdf(1 / 256) / 15
    edges = bins.optimal_bins(4, 256)
    found = bins.predicted_variance(4, 256, edges)
    assert found == pytest.approx(step**2 * bins.expected_variance(4, 256, edges), rel=1e-12)
    # Ranges of real normal blocks are longer; the square of their mean range says by how much (scipy's order statistics
    # of 256 values: 2 * 2.83 deviations, against 2 * 2.66).
    measured = bins.measure_variances(torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)), 4, "optimal")
    assert 1.0 < measured[256] / found < 1.2


@pytest.mark.parametrize("block_size", [1, 2])
def test_what_is_an_end_of_its_block_is_not_rounded(block_size: int) -> None:
    assert bins.expected_variance(2, block_size) == bins.predicted_variance(2, block_size) == 0.0


def test_bins_are_new_tensors() -> None:
    bins.optimal_bins(2, 64).zero_()
    assert bins.optimal_bins(2, 64)[-1] == 3


def test_bins_are_constants_of_a_compiled_function() -> None:
    compiled = torch.compile(lambda x: x + bins.optimal_bins(4, 64), fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.zeros(16)), bins.optimal_bins(4, 64))


@pytest.mark.parametrize("bits", [1, 5, 8, 2.0])
def test_other_widths_have_no_optimal_bins(bits: int) -> None:
    wanted = rf"expects 'bits' to be a whole number from 2 to 4 \(got {bits}\)"
    with pytest.raises(ValueError, match=f"'optimal_bins' {wanted}"):
        bins.optimal_bins(bits, 64)
    if isinstance(bits, int):
        with pytest.raises(ValueError, match=f"'best_block_size' {wanted}"):
            bins.best_block_size(bits, 64, "optimal")


def test_errors_say_what_is_expected() -> None:
    with pytest.raises(ValueError, match=r"'optimal_bins' expects 'block_size' .* from 1 to 65536 \(got 0\)"):
        bins.optimal_bins(2, 0)
    with pytest.raises(ValueError, match=r"'expected_variance' expects 'bits' .* from 1 to 8 \(got 9\)"):
        bins.expected_variance(9, 64)
    for wrong in ([0, 1, 3], [0, 2, 1, 3], [0, 1, 2, 4], [1, 1.5, 2, 3], [0, 1, math.nan, 3]):
        with pytest.raises(ValueError, match=r"'edges' of shape \[4\] that rise from 0 to 3 for 2-bit codes \(got \["):
            bins.expected_variance(2, 64, torch.tensor(wrong))
    for call in (lambda b: bins.best_block_size(2, 64, b), lambda b: bins.measure_variances(torch.ones(8), 2, b)):
        with pytest.raises(ValueError, match=r"expects 'bins' to be one of \('uniform', 'optimal'\) \(got 'best'\)"):
            call("best")
    with pytest.raises(ValueError, match="'variances' of at least one block size"):
        bins.best_block_size(2, 64, variances={})


def cost(bits: int, n: int, size: int, metadata_bits: int, variance: float) -> float:
    bytes_stored = math.ceil(n / size) * (size * bits / 8 + metadata_bits / 8)
    return 8 * bytes_stored / n + math.log(variance) / math.log(((2 ** (bits + 1) - 1) / (2**bits - 1)) ** 2)


@given(st.integers(1, 8), st.integers(3, 1 << 24), st.booleans(), st.sampled_from([16, 32, 64]))
def test_the_rule_takes_the_least_cost(bits: int, n: int, optimal: bool, metadata_bits: int) -> None:
    optimal = optimal and 2 <= bits <= 4
    costs = {}
    for size in (2**k for k in range(3, 17)):
        variance = bins.predicted_variance(bits, size, bins.optimal_bins(bits, size) if optimal else None)
        costs[size] = cost(bits, n, size, metadata_bits, variance)
    found = bins.best_block_size(bits, n, bins.BINS[optimal], metadata_bits)
    assert costs[found] == min(costs.values())


@given(st.integers(1, 8), st.integers(0, 1 << 24), st.integers(1, 256))
def test_the_rule_is_sane(bits: int, n: int, metadata_bits: int) -> None:
    found = bins.best_block_size(bits, n, "uniform", metadata_bits)
    assert found in bins.block_sizes(n)
    assert found == 8 or found < 2 * n  # half of it would not hold all values
    assert found <= bins.MAX_BLOCK_SIZE
    if n >= 1 << 20:  # where no tail counts, larger metadata never ask for shorter blocks
        assert bins.best_block_size(bits, n, "uniform", 2 * metadata_bits) >= found


@given(st.dictionaries(st.sampled_from(bins.block_sizes(1 << 20)), st.floats(1e-9, 1e9), min_size=1))
def test_measured_variances_take_the_place_of_predicted_ones(variances: dict[int, float]) -> None:
    costs = {size: cost(2, 1 << 20, size, 32, variance) for size, variance in variances.items()}
    found = bins.best_block_size(2, 1 << 20, variances=variances)
    assert costs[found] == pytest.approx(min(costs.values()), abs=1e-12)


@pytest.mark.parametrize("kind", bins.BINS)
def test_measured_variances_are_those_of_the_operators(kind: str) -> None:
    """On rows of different sizes, over 50 seeds: within five standard errors of their mean, and what a step of the
    position's 2**-16 is worth."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 16, generator=generator) * torch.randn(1000, 1, generator=generator).exp()
    variances = bins.measure_variances(x, 2, kind)
    assert list(variances) == bins.block_sizes(16000)
    for size in (8, 128, 16384):
        edges = None if kind == "uniform" else bins.optimal_bins(2, size)
        errors = []
        for seed in range(50):
            packed = ops.blocks_pack(x, rng.make_seed(seed), 2, size, torch.float32, edges, 0, None)
            restored = ops.blocks_unpack(*packed, 2, x.numel(), torch.float32, edges, 0, None, 0, 0)
            errors.append(float((restored - x.flatten()).double().square()[: 16000 // min(size, 16000) * size].mean()))
        mean = torch.tensor(errors)
        slack = SIGMAS * mean.std() / 50**0.5 + 4 * 2.0**-16 * variances[size]
        assert abs(mean.mean() - variances[size]) <= slack


def test_a_sample_stands_for_a_large_tensor() -> None:
    """The whole is 21 pieces of 65536 values and a rest, of which four pieces are looked at."""
    x = torch.full((21 * bins.MAX_BLOCK_SIZE + 5,), math.inf)
    pieces, looked_at = x[:-5].view(21, -1), [0, 6, 12, 18]
    pieces[looked_at] = torch.randn(4, bins.MAX_BLOCK_SIZE, generator=torch.Generator().manual_seed(0))
    found = bins.measure_variances(x, 2)
    assert found == bins.measure_variances(pieces[looked_at], 2)
    assert bins.measure_variances(x[:-1].view(-1, 4), 2) == found


def test_measuring_leaves_out_what_is_not_finite_and_takes_constants() -> None:
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    broken = torch.cat([x, torch.tensor([math.inf, 0, 0, 0, -math.inf, 0, math.nan, 0])])
    assert bins.measure_variances(broken, 2)[8] == bins.measure_variances(x, 2)[8] > 0
    assert set(bins.measure_variances(broken[-8:], 2).values()) == {0.0}
    half = bins.measure_variances(torch.cat([x, torch.ones(1024)]), 2)
    assert half[8] == pytest.approx(bins.measure_variances(x, 2)[8] / 2, rel=1e-12)
    constant = bins.measure_variances(torch.full((4096,), 3.0), 2)
    assert set(constant.values()) == {0.0}
    assert bins.best_block_size(2, 4096, variances=constant) == 4096  # lossless at any size: the fewest bytes
    assert bins.measure_variances(torch.empty(0), 2) == {8: 0.0}
    assert bins.best_block_size(2, 0) == 8


def test_measuring_waits_for_the_device_once() -> None:
    class Ops(TorchDispatchMode):
        names: list[str]

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    Ops.names = []
    with Ops():
        bins.measure_variances(torch.randn(1 << 14), 2, "optimal")
    waiting = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_to_copy_cpu")
    assert "aten::aminmax" in Ops.names
    assert not [name for name in Ops.names if any(word in name for word in waiting)]
