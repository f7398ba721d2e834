"""Widths under a budget: the allocation, what is measured for it, and when."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from qgnn.compress import budget, compress_activations
from qgnn.compress.budget import Candidate, allocate, gradients, leaves_of
from qgnn.memory import MIB, STATUS
from qgnn.rounding import BLOCK_BITS

candidates = st.lists(
    st.tuples(st.floats(1e-6, 1e6), st.integers(1, 1000)).map(
        lambda pair: Candidate(pair[0], {bits: bits * pair[1] + 4 for bits in BLOCK_BITS})
    ),
    min_size=1,
    max_size=5,
)


def total(chosen: dict[object, Candidate], widths: dict[object, int]) -> tuple[float, int]:
    """Variance and bytes."""
    variance = sum(c.variance_of(widths[key]) for key, c in chosen.items())
    return variance, sum(c.num_bytes[widths[key]] for key, c in chosen.items())


@settings(derandomize=True, max_examples=100, deadline=None)
@given(candidates, st.floats(0, 1))
def test_allocation_is_the_best_but_for_the_step_that_does_not_fit(found: list[Candidate], share: float) -> None:
    chosen = {("op", "", number): c for number, c in enumerate(found)}
    least, most = (sum(c.num_bytes[bits] for c in found) for bits in (1, 8))
    budget = int(least + share * (most - least))
    variance, used = total(chosen, allocate(chosen, budget))
    assert used <= budget
    every = itertools.product(BLOCK_BITS, repeat=len(found))
    tried = [total(chosen, dict(zip(chosen, widths, strict=True))) for widths in every]
    # Greedy steps by slope are optimal for the bytes that they fill; the next step is at most half of a widest tensor.
    room = max(c.num_bytes[8] - c.num_bytes[4] for c in found)
    best_with_less = min(v for v, size in tried if size <= max(budget - room, least))
    assert variance <= best_with_less * (1 + 1e-9)


def test_allocation_refuses_too_few_bytes() -> None:
    with pytest.raises(ValueError, match="one bit a value takes 14 bytes, of which there are 13"):
        allocate({("op", "", 0): Candidate(1.0, {bits: 10 * bits + 4 for bits in BLOCK_BITS})}, 13)


class Two(torch.nn.Module):
    """Two layers side by side, of which the gradient of one is a hundred times that of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.loud, self.quiet = torch.nn.Linear(64, 16, bias=False), torch.nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (100 * self.loud(x * 1.0) + self.quiet(y * 1.0)).square().mean()


def problem() -> tuple[Two, Tensor, Tensor]:
    torch.manual_seed(0)
    return Two(), torch.randn(256, 64), torch.randn(256, 64)


def step(compressor: compress_activations, model: Two, x: Tensor, y: Tensor) -> tuple[object, list[Tensor]]:
    model.zero_grad()
    with compressor as report:
        model(x, y).backward()
    return report, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def formats(report: object) -> dict[str, str]:
    return {t.module: t.format for t in report.by_tensor if t.op == "linear"}  # type: ignore[attr-defined]


def test_what_matters_more_gets_more_bits_within_the_budget() -> None:
    model, x, y = problem()
    compressor = compress_activations(2, budget_mib=0.016)
    first, _ = step(compressor, model, x, y)
    assert {f.split("-")[0] for f in formats(first).values()} == {"int8"}  # the block that measures
    second, _ = step(compressor, model, x, y)
    assert second.saved_bytes <= 0.016 * MIB  # type: ignore[attr-defined]
    widths = {name: int(fmt.split("-")[0].removeprefix("int")) for name, fmt in formats(second).items()}
    assert widths["loud"] > widths["quiet"]


MEASUREMENTS, SEEDS = 8, 20
# A sum of squared errors of 64 rows or columns of dW that are independent deviates by at most sqrt(2 / 64) = 0.18 of
# it, means of so many by less.
DEVIATION = (2 / 64) ** 0.5 * (MEASUREMENTS**-0.5 + SEEDS**-0.5)


def measured(loss: Callable[[], Tensor], **how: Any) -> dict[str, float]:
    """The variance of codes of 2 bits by module, the mean of several measurements."""
    found = Counter[str]()
    for seed in range(MEASUREMENTS):
        compressor = compress_activations(8, budget_mib=1.0, seed=seed, **how)
        with compressor:
            loss().backward()
        assert compressor._budget is not None
        for (_, module, _), variance in compressor._budget._variances.items():
            found[module] += Candidate(variance, {}).variance_of(2) / MEASUREMENTS
    return dict(found)


def variance_of(loss: Callable[[], Tensor], weight: Tensor, square: float, **how: Any) -> float:
    """The variance of the gradient of a weight, relative to a square."""
    (exact,) = torch.autograd.grad(loss(), weight)
    distances = []
    for seed in range(SEEDS):
        with compress_activations(2, seed=seed, **how):
            (grad,) = torch.autograd.grad(loss(), weight)
        distances.append(float((grad - exact).square().sum()) / square)
    return sum(distances) / SEEDS


def test_the_measured_variance_is_that_of_the_gradient() -> None:
    model, x, y = problem()
    grads = torch.autograd.grad(model(x, y), list(model.parameters()))
    square = sum(float(grad.square().sum()) for grad in grads)
    found = measured(lambda: model(x, y))
    for name in ("loud", "quiet"):
        weight = getattr(model, name).weight
        expected = variance_of(lambda: model(x, y), weight, square, exclude=lambda t, name=name: t.module != name)
        assert abs(found[name] / expected - 1) < 5 * DEVIATION


@pytest.mark.parametrize("how", [{"block_size": 8}, {"block_size": 65536}, {"block_rows": 1}])
def test_the_measured_variance_is_that_of_the_blocks(how: dict[str, int]) -> None:
    """Of values of which a few are large, long blocks add many times the variance of short ones."""
    torch.manual_seed(0)
    x, w = torch.randn(512, 64), torch.randn(64, 16, requires_grad=True)
    x[::16] *= 31

    def loss() -> Tensor:
        return ((x * 1) @ w).sigmoid().sum()

    (exact,) = torch.autograd.grad(loss(), w)
    (found,) = measured(loss, exclude="sigmoid", **how).values()
    expected = variance_of(loss, w, float(exact.square().sum()), exclude="sigmoid", **how)
    assert abs(found / expected - 1) < 5 * DEVIATION


def test_the_scale_of_a_loss_does_not_count() -> None:
    """As that of a gradient scaler, which changes between two measurements."""
    model, x, y = problem()
    variances = []
    for scales in ((1.0, 1.0), (1.0, 1024.0), (2.0**-10, 1.0)):
        compressor = compress_activations(8, budget_mib=1.0, reestimate_every=1, seed=3)
        for scale in scales:
            with compressor:
                (model(x, y) * scale).backward()
        assert compressor._budget is not None
        variances.append(compressor._budget._variances)
    assert variances[0] == variances[1] == variances[2]
    assert all(variance > 0 for variance in variances[0].values())


def test_the_width_of_a_loss_is_chosen_as_well() -> None:
    """Beside a projection of 8 columns to one, whose error is many times the gradient, its roundings count little."""
    torch.manual_seed(0)
    x, w, labels = torch.randn(512, 64), torch.randn(64, 16, requires_grad=True), torch.randint(16, (512,))
    compressor = compress_activations(2, projection=8, budget_mib=0.006, seed=0)
    widths = []
    for _ in range(2):
        with compressor as report:
            F.cross_entropy(F.linear(x * 1, w.t()), labels).backward()
        widths.append({t.op: int(t.format.split("-")[0].removeprefix("int")) for t in report.by_tensor})
    assert widths[0] == {"linear": 8, "cross_entropy": 8}
    assert widths[1]["cross_entropy"] < widths[1]["linear"]
    assert report.saved_bytes <= 0.006 * MIB
    assert {t.format.split("-")[0] for t in report.by_tensor} != {"int8"}


def test_blocks_in_between_do_not_measure() -> None:
    model, x, y = problem()
    compressor = compress_activations(2, budget_mib=0.016, reestimate_every=3)
    widest = [{f.split("-")[0] for f in formats(step(compressor, model, x, y)[0]).values()} for _ in range(7)]
    assert [names == {"int8"} for names in widest] == [True, False, False, True, False, False, True]


def test_a_new_tensor_is_measured_in_the_next_block() -> None:
    model, x, y = problem()
    compressor = compress_activations(2, budget_mib=1.0)
    step(compressor, model, x, y)
    with compressor as report:
        (model(x, y) + model(x, y)).backward()
    assert "int2" in {t.format.split("-")[0] for t in report.by_tensor}
    report, _ = step(compressor, model, x, y)
    assert {f.split("-")[0] for f in formats(report).values()} == {"int8"}


def test_measuring_leaves_no_trace_in_gradients_and_generator() -> None:
    model, x, y = problem()
    _, plain = step(compress_activations(8, seed=1), model, x, y)
    torch.manual_seed(5)
    with compress_activations(2, seed=1, budget_mib=1.0):
        before = torch.get_rng_state()
        model.zero_grad()
        model(x, y).backward()
        assert torch.equal(torch.get_rng_state(), before)
    for p, expected in zip(model.parameters(), plain, strict=True):
        assert torch.equal(p.grad, expected)


def test_a_budget_that_holds_nothing_says_what_would_do() -> None:
    model, x, y = problem()
    with pytest.raises(ValueError, match=r"expects a 'budget_mib' of at least 0\.0\d+: one bit a value"):
        step(compress_activations(2, budget_mib=1e-4), model, x, y)


def test_a_block_that_measures_needs_its_backward_pass() -> None:
    model, x, y = problem()
    with (
        pytest.raises(RuntimeError, match=r"call 'loss.backward\(\)' inside the block"),
        compress_activations(2, budget_mib=1.0),
    ):
        model(x, y)


def test_an_error_inside_the_block_is_not_replaced() -> None:
    model, x, y = problem()

    def failing() -> None:
        with compress_activations(2, budget_mib=1.0):
            model(x, y)
            raise KeyError

    with pytest.raises(KeyError):
        failing()


@pytest.mark.parametrize("arguments", [{"budget_mib": 0}, {"budget_mib": float("nan")}, {"reestimate_every": 0}])
def test_numbers_out_of_range_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expects a positive 'budget_mib', and 'reestimate_every' of at least 1 block"):
        compress_activations(2, **arguments)  # type: ignore[arg-type]


def test_leaves_are_all_that_get_a_gradient() -> None:
    model, x, y = problem()
    x.requires_grad_()
    found = leaves_of(model(x, y))
    assert {id(t) for t in found} == {id(t) for t in (*model.parameters(), x)}
    assert len(found) == 3


def test_a_measured_block_size_is_that_of_the_first_values() -> None:
    model, x, y = problem()
    x = x * (torch.arange(256)[:, None] % 2 * 99 + 1)  # rows a hundred times as long as their neighbors
    report, _ = step(compress_activations(2, "measured"), model, x, y)
    assert formats(report)["loud"] == "int2-g64"  # a block a row
    assert formats(report)["quiet"] != "int2-g64"


@pytest.mark.skipif(not STATUS.exists(), reason="only Linux tells a process its peak of memory")
def test_the_report_ends_with_the_peak_of_the_process() -> None:
    model, x, y = problem()
    with compress_activations(2) as report:
        ballast = torch.ones(1 << 24)
        model(x, y).backward()
        assert report.peak_bytes is None
    assert report.peak_bytes is not None
    assert report.peak_bytes > 2 * ballast.nbytes  # beside what torch itself takes
    assert f"{report.peak_bytes / MIB:.0f}" in str(report)


def test_a_second_backward_pass_in_the_block_adds_to_the_first() -> None:
    """Each of them alone would see nothing of the other's layer."""
    model, x, y = problem()
    both = compress_activations(2, budget_mib=0.016)
    with both as report:
        (100 * model.loud(x * 1.0)).square().mean().backward()
        model.quiet(y * 1.0).square().mean().backward()
    assert {t.format.split("-")[0] for t in report.by_tensor if t.op == "linear"} == {"int8"}
    with both as report:
        (100 * model.loud(x * 1.0)).square().mean().backward()
        model.quiet(y * 1.0).square().mean().backward()
    assert report.saved_bytes <= 0.016 * MIB
    loud, quiet = (int(t.format.split("-")[0].removeprefix("int")) for t in report.by_tensor if t.op == "linear")
    assert loud > quiet


def test_a_backward_pass_of_a_kept_graph_adds_to_the_first() -> None:
    model, x, y = problem()
    compressor = compress_activations(2, budget_mib=0.016)
    for _ in range(2):
        with compressor as report:
            loss = model(x, y)
            loss.backward(retain_graph=True)
            loss.backward()
    widths = {name: int(fmt.split("-")[0].removeprefix("int")) for name, fmt in formats(report).items()}
    assert 8 > widths["loud"] > widths["quiet"]


def test_gradients_that_overflow_are_measured_again() -> None:
    model, x, y = problem()
    compressor = compress_activations(2, budget_mib=0.016)
    seen = []
    for scale in (math.inf, 1.0, 1.0):
        with compressor as report:
            (model(x, y) * scale).backward()
        seen.append({f.split("-")[0] for f in formats(report).values()})
    assert seen[:2] == [{"int8"}, {"int8"}]
    assert seen[2] != {"int8"}


def test_an_error_while_measuring_leaves_the_codes_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem()
    _, expected = step(compress_activations(8, seed=1), model, x, y)
    calls = itertools.count()

    def failing(*args: Any) -> list[Tensor]:
        if next(calls):
            raise MemoryError
        return gradients(*args)

    monkeypatch.setattr(budget, "gradients", failing)
    model.zero_grad()
    with compress_activations(2, seed=1, budget_mib=1.0):
        loss = model(x, y)
        with pytest.raises(MemoryError):
            loss.backward()
        torch.autograd.backward(loss)  # as it is
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.grad, grad)


def test_two_roundings_of_a_softmax_share_a_width_and_the_budget_holds_both() -> None:
    torch.manual_seed(0)
    w, x = torch.randn(64, 64, requires_grad=True), torch.randn(256, 64)
    # 16,384 values of the softmax twice in 2 bits, those of the product in 4, and half a bit each for offset and step.
    compressor = compress_activations(1, block_size=64, budget_mib=(2 * 16384 * 2.5 + 16384 * 4.5) / 8 / MIB)
    for _ in range(2):
        with compressor as report:
            ((x * 1.0) @ w).softmax(-1).square().sum(-1).exp().sum().backward()
    softmax = next(t for t in report.by_tensor if t.op == "softmax")
    assert softmax.format.endswith("twice")
    assert not softmax.format.startswith("int8")
    assert report.saved_bytes <= compressor._budget._mib * MIB  # type: ignore[union-attr]


def test_measured_block_sizes_are_within_the_budget() -> None:
    model, x, y = problem()
    x, y = x.square() * x, y.square() * y  # heavy tails want shorter blocks than normal values
    compressor = compress_activations(2, "measured", budget_mib=0.011)
    step(compressor, model, x, y)
    report, _ = step(compressor, model, x, y)
    assert report.saved_bytes <= 0.011 * MIB  # type: ignore[attr-defined]


def test_codes_are_not_held_by_the_budget() -> None:
    model, x, y = problem()
    compressor = compress_activations(2, budget_mib=1.0)
    with compressor:
        loss = model(x, y)
        assert compressor._budget is not None
        codes = compressor._budget._codes
        assert len(codes) == 3
        loss.backward()
        assert len(codes) == 0


def test_a_budget_is_for_one_block_at_a_time() -> None:
    compressor = compress_activations(2, budget_mib=1.0)
    with compressor, pytest.raises(RuntimeError, match="expects to be left before it is entered again"), compressor:
        pass
