"""The C softmax over edges and its gradients against exact results, and the functions of exp.h over all numbers."""

import ctypes
import math
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qgnn.kernels.cpu import build
from qgnn.kernels.cpu.softmax import attention_scores, attention_scores_backward, softmax, softmax_backward
from torch import Tensor

from graphs import GRAPHS, RECTANGULAR
from kernel_cases import FLOATS, assert_within, csr, surrounded
from qgnn import reference
from softmax_cases import (
    SLOPE,
    TINY,
    edge_scores,
    exact_attention_backward,
    exact_backward,
    exact_softmax,
    softmax_bound,
    transposed,
)
from statistics_checks import EPS

ALL_GRAPHS = {name: (edges, n, n) for name, (edges, n) in GRAPHS.items()} | RECTANGULAR
# Those with code of their own, divisors of 16 and others, and more heads than are taken at a time.
HEADS = [1, 2, 3, 4, 5, 8, 16, 17, 31, 32, 33, 70]
INDEX_TYPES = [torch.int32, torch.int64]
HUB = GRAPHS["hub"]

Operands = tuple[Tensor, ...]


def graph_of(name: str, dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor, int, int]:
    edge_index, S, N = ALL_GRAPHS[name]
    return *csr(edge_index, N, "cpu", dtype), S, N


# --- the exponential and the logarithm


Function = Callable[[Tensor], Tensor]


@pytest.fixture(scope="session")
def functions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Function, Function]:
    """exp_fp32 and log_fp32 of exp.h, compiled as the kernels are."""
    folder = tmp_path_factory.mktemp("exp")
    source, library = folder / "probe.c", folder / "probe.so"
    source.write_text(
        '#include "exp.h"\n'
        + "".join(
            f"EXPORT void probe_{name}(float *y, const float *x, int64_t n) {{\n"
            f"    for (int64_t i = 0; i < n; i++) y[i] = {name}_fp32(x[i]);\n"
            "}\n"
            for name in ("exp", "log")
        )
    )
    include = Path(build.__file__).parent
    command = [*build.compiler(), *build.FLAGS, "-march=native", f"-I{include}", "-o", library, source, "-lm"]
    subprocess.run(command, check=True)
    probe = ctypes.CDLL(str(library))

    def run(function: Any, x: Tensor) -> Tensor:
        y = torch.full_like(x, math.nan)
        pointers = ctypes.c_void_p(y.data_ptr()), ctypes.c_void_p(x.data_ptr())
        function(*pointers, ctypes.c_int64(x.numel()))
        return y

    return partial(run, probe.probe_exp), partial(run, probe.probe_log)


@pytest.fixture(scope="session")
def exponential(functions: tuple[Function, Function]) -> Function:
    return functions[0]


def test_exp_is_within_one_unit_in_the_last_place_everywhere(exponential: Callable[[Tensor], Tensor]) -> None:
    """Every 601st of all numbers for which the result is a normal number, and a step of denormals below."""
    bits = torch.arange(0, 0x42CFFFFF, 601, dtype=torch.int32)  # 0 to 104
    x = torch.cat([bits.view(torch.float32), -bits.view(torch.float32)])
    y, exact = exponential(x), x.double().exp()
    fits = exact < 2.0**128 * (1 - 2.0**-25)
    step = (exact.clamp_min(2.0**-126).log2().floor() - 23).exp2()
    assert ((y.double() - exact).abs() <= step)[fits].all()
    assert y[~fits].isinf().all()
    assert (~fits).any()


def test_exp_of_special_values(exponential: Callable[[Tensor], Tensor]) -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor([0.0, -0.0, -inf, -1e30, -104.0, -200.0, inf, 1e30, 89.0, nan, 1e-45])
    expected = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, inf, inf, inf, nan, 1.0])
    assert torch.equal(exponential(x).nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))


def test_exp_does_not_decrease(exponential: Callable[[Tensor], Tensor]) -> None:
    """Up to its error: neighbors may change places by one step."""
    x = torch.linspace(-90, 0, 500_001)
    y = exponential(x).double()
    assert (y[1:] >= y[:-1] * (1 - 2.0**-22)).all()


def test_log_is_within_one_unit_in_the_last_place_everywhere(functions: tuple[Function, Function]) -> None:
    """Every 601st of all normal numbers."""
    x = torch.arange(0x00800000, 0x7F7FFFFF, 601, dtype=torch.int32).view(torch.float32)
    y, exact = functions[1](x), x.double().log()
    assert ((y.double() - exact).abs() <= (exact.abs().clamp_min(2.0**-126).log2().floor() - 23).exp2()).all()
    special = torch.tensor([1.0, math.inf, math.nan])
    assert functions[1](special).nan_to_num(nan=-1.0, posinf=-2.0).tolist() == [0.0, -2.0, -1.0]


def test_softmax_over_the_whole_range_of_exp() -> None:
    """Of the scores x and 0, the first result is exp(x) / (1 + exp(x)): exp(x) itself for very negative x."""
    x = -torch.logspace(-6, 2.03, 20_000)
    scores = torch.stack([x, torch.zeros_like(x)], dim=1).view(-1, 1)
    indptr = torch.arange(0, len(scores) + 1, 2)
    assert_within(softmax(indptr, scores), exact_softmax(indptr, scores), softmax_bound(indptr, scores.double()))


# --- softmax


@pytest.mark.parametrize("name", ALL_GRAPHS)
@pytest.mark.parametrize("dtype", INDEX_TYPES)
def test_softmax_on_every_graph(name: str, dtype: torch.dtype, threads: int) -> None:
    indptr, index, *_ = graph_of(name, dtype)
    for heads in (1, 3, 4):
        scores = 10 * torch.randn(index.numel(), heads)
        assert_within(softmax(indptr, scores), exact_softmax(indptr, scores), softmax_bound(indptr, scores.double()))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", ["hub", "power_law", "isolated"])
def test_softmax_with_every_number_of_heads(name: str, heads: int) -> None:
    indptr, index, *_ = graph_of(name)
    scores = 10 * torch.randn(index.numel(), heads)
    assert_within(softmax(indptr, scores), exact_softmax(indptr, scores), softmax_bound(indptr, scores.double()))


@pytest.mark.parametrize("heads", [1, 4, 5, 40])
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("edge", [0, 100, 276])
def test_special_values_reach_their_row_and_head_alone(special: float, heads: int, edge: int) -> None:
    edge_index, num_nodes = HUB
    indptr, _ = csr(edge_index, num_nodes, "cpu")
    scores = torch.randn(edge_index.shape[1], heads)
    clean = softmax(indptr, scores)
    scores[edge, heads - 1] = special
    out, exact = softmax(indptr, scores), exact_softmax(indptr, scores).float()
    torch.testing.assert_close(out, exact, rtol=1e-5, atol=0, equal_nan=True)
    assert torch.equal(out[:, : heads - 1], clean[:, : heads - 1])
    others = indptr[1]  # the first row is the hub's
    assert torch.equal(out[others:], clean[others:])
    if special == -math.inf:
        assert out[edge, heads - 1] == 0
        assert out.isfinite().all()
    else:
        assert out[:others, heads - 1].isnan().all()


@pytest.mark.parametrize("heads", [1, 3, 4, 33])
def test_rows_of_nothing_but_minus_infinity_are_nan_as_in_torch(heads: int) -> None:
    indptr = torch.tensor([0, 1, 4, 4, 24])
    scores = torch.full((24, heads), -math.inf)
    scores[0] = 2.0
    out = softmax(indptr, scores)
    assert out[0].tolist() == [1.0] * heads
    assert out[1:].isnan().all()


def test_scores_of_one_edge_and_of_equal_edges_are_exact() -> None:
    indptr = torch.tensor([0, 1, 3, 7])
    out = softmax(indptr, torch.tensor([-3.7, 5.1, 5.1, 1e30, 1e30, 1e30, 1e30])[:, None])
    assert out.flatten().tolist() == [1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25]


@pytest.mark.parametrize("dtype", FLOATS)
def test_half_types_are_computed_in_fp32(dtype: torch.dtype) -> None:
    indptr, index, S, N = graph_of("power_law")
    scores, grad = (torch.randn(index.numel(), 3).to(dtype) for _ in range(2))
    out = softmax(indptr, scores)
    assert torch.equal(out, softmax(indptr, scores.float()).to(dtype))
    dx = softmax_backward(indptr, out, grad)
    assert torch.equal(dx, softmax_backward(indptr, out.float(), grad.float()).to(dtype))
    target, source = torch.randn(N, 3).to(dtype), torch.randn(S, 3).to(dtype)
    alpha = attention_scores(indptr, index, target, source)
    assert torch.equal(alpha, attention_scores(indptr, index, target.float(), source.float()).to(dtype))
    graph = (indptr, index, *transposed(indptr, index, S))
    halves = attention_scores_backward(*graph, target, source, alpha, grad)
    floats = attention_scores_backward(*graph, *(t.float() for t in (target, source, alpha, grad)))
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(halves, floats, strict=True))


@pytest.mark.parametrize("name", ALL_GRAPHS)
@pytest.mark.parametrize("dtype", INDEX_TYPES)
def test_softmax_backward_on_every_graph(name: str, dtype: torch.dtype, threads: int) -> None:
    indptr, index, *_ = graph_of(name, dtype)
    for heads in (1, 3, 4):
        assert_softmax_backward(indptr, index.numel(), heads)


@pytest.mark.parametrize("heads", HEADS)
def test_softmax_backward_with_every_number_of_heads(heads: int) -> None:
    indptr, index, *_ = graph_of("power_law")
    assert_softmax_backward(indptr, index.numel(), heads)


def assert_softmax_backward(indptr: Tensor, E: int, heads: int) -> None:
    out = exact_softmax(indptr, torch.randn(E, heads)).float()
    grad = torch.randn(E, heads)
    exact, bound = exact_backward(indptr, out, grad)
    assert_within(softmax_backward(indptr, out, grad), exact, bound)


# --- attention


def attention_operands(name: str, heads: int, dtype: torch.dtype = torch.int32) -> Operands:
    indptr, index, S, N = graph_of(name, dtype)
    return indptr, index, torch.randn(N, heads), torch.randn(S, heads)


def assert_attention(operands: Operands) -> None:
    indptr, index, target, source = operands
    scores = edge_scores(indptr, index, target, source)
    out = attention_scores(*operands, negative_slope=SLOPE)
    assert_within(out, exact_softmax(indptr, scores), softmax_bound(indptr, scores, score_roundings=3))
    graph = (indptr, index, *transposed(indptr, index, source.shape[0]))
    grad = torch.randn_like(out)
    d_target, d_source = attention_scores_backward(*graph, target, source, out, grad, negative_slope=SLOPE)
    exact = exact_attention_backward(indptr, scores, out, grad, *graph[2:])
    for actual, (expected, bound) in zip((d_target, d_source), exact, strict=True):
        assert_within(actual, expected, bound)


@pytest.mark.parametrize("name", ALL_GRAPHS)
@pytest.mark.parametrize("dtype", INDEX_TYPES)
def test_attention_on_every_graph(name: str, dtype: torch.dtype, threads: int) -> None:
    for heads in (1, 3, 4):
        assert_attention(attention_operands(name, heads, dtype))


@pytest.mark.parametrize("heads", HEADS)
def test_attention_with_every_number_of_heads(heads: int) -> None:
    assert_attention(attention_operands("power_law", heads))


@pytest.mark.parametrize("negative_slope", [0.0, 0.01, 1.0, -0.5])
def test_attention_with_other_slopes(negative_slope: float) -> None:
    operands = attention_operands("power_law", 4)
    out = attention_scores(*operands, negative_slope=negative_slope)
    expected = reference.attention_scores(*operands, negative_slope=negative_slope)
    torch.testing.assert_close(out, expected, rtol=300 * EPS, atol=TINY)
    graph = (*operands[:2], *transposed(*operands[:2], operands[3].shape[0]))
    rest = (*operands[2:], out, torch.randn_like(out))
    for actual, exact in zip(
        attention_scores_backward(*graph, *rest, negative_slope=negative_slope),
        reference.attention_scores_backward(*graph, *(t.double() for t in rest), negative_slope=negative_slope),
        strict=True,
    ):
        torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-5)


def test_the_slope_at_zero_is_the_negative_one_as_in_torch() -> None:
    indptr, index, order = torch.tensor([0, 2]), torch.tensor([0, 1]), torch.tensor([0, 1])
    target, source = torch.tensor([[1.0]]), torch.tensor([[-1.0], [2.0]])
    out, grad = torch.tensor([[0.5], [0.5]]), torch.tensor([[1.0], [0.0]])
    operands = (indptr, index, torch.tensor([0, 1, 2]), order, target, source, out, grad)
    _, d_source = attention_scores_backward(*operands, negative_slope=0.5)
    assert d_source.tolist() == [[0.125], [-0.25]]


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_special_scores_of_a_source_reach_its_targets_alone(special: float) -> None:
    indptr, index, target, source = attention_operands("random", 4)
    clean = attention_scores(indptr, index, target, source)
    source[11, 2] = special
    out = attention_scores(indptr, index, target, source)
    exact = exact_softmax(indptr, edge_scores(indptr, index, target, source)).float()
    torch.testing.assert_close(out, exact, rtol=300 * EPS, atol=TINY, equal_nan=True)
    row = torch.repeat_interleave(indptr.diff())
    reached = torch.isin(row, row[index == 11])
    assert reached.any()
    assert torch.equal(out[~reached], clean[~reached])
    assert torch.equal(out[:, :2], clean[:, :2])


# --- layouts


def every_second_column(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=1)[:, ::2]


@pytest.mark.parametrize(
    "layout", [every_second_column, lambda x: x.t().contiguous().t(), lambda x: surrounded(x, 9.0)]
)
def test_any_strides(layout: Callable[[Tensor], Tensor]) -> None:
    operands = attention_operands("power_law", 3)
    graph, scores = [t.repeat_interleave(2)[::2] for t in operands[:2]], [layout(t) for t in operands[2:]]
    out = attention_scores(*operands)
    grad = torch.randn_like(out)
    assert torch.equal(attention_scores(*graph, *scores), out)
    assert torch.equal(softmax(graph[0], layout(grad)), softmax(operands[0], grad))
    assert torch.equal(softmax_backward(graph[0], layout(out), layout(grad)), softmax_backward(operands[0], out, grad))
    csc = transposed(*operands[:2], operands[3].shape[0])
    strided_csc = [t.repeat_interleave(2)[::2] for t in csc]
    expected = attention_scores_backward(*operands[:2], *csc, *operands[2:], out, grad)
    actual = attention_scores_backward(*graph, *strided_csc, *scores, layout(out), layout(grad))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_inputs_are_left_alone() -> None:
    indptr, index, target, source = attention_operands("power_law", 3)
    graph = (indptr, index, *transposed(indptr, index, source.shape[0]))
    out, grad = attention_scores(indptr, index, target, source), torch.randn(index.numel(), 3)
    inputs = [*graph, target, source, out, grad]
    before = [t.clone() for t in inputs]
    attention_scores_backward(*inputs)
    softmax(indptr, grad)
    softmax_backward(indptr, out, grad)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


def test_threads_share_a_large_graph_and_change_nothing() -> None:
    """Parts of rows, a hub of half the edges among them, cover every edge once."""
    N, E, heads = 900, 40_000, 4
    target = torch.cat([torch.randint(N, (E // 2,)), torch.full((E // 2,), 17)])
    indptr, index = csr(torch.stack([torch.randint(N, (E,)), target]), N, "cpu")
    operands = (indptr, index, torch.randn(N, heads), torch.randn(N, heads))
    grad = torch.randn(E, heads)
    graph = (indptr, index, *transposed(indptr, index, N))

    def results() -> list[Tensor]:
        out = attention_scores(*operands)
        gradients = attention_scores_backward(*graph, *operands[2:], out, grad)
        return [out, *gradients, softmax(indptr, grad), softmax_backward(indptr, out, grad)]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = results()
        torch.testing.assert_close(alone[0], reference.attention_scores(*operands), rtol=1e-3, atol=0)
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert all(torch.equal(a, b) for a, b in zip(results(), alone, strict=True))
    finally:
        torch.set_num_threads(before)


@settings(max_examples=60)
@given(
    degrees_of=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    heads=st.integers(1, 40),
    spread=st.sampled_from([0.0, 1.0, 30.0, 1e4, 1e38]),
    seed=st.integers(0, 2**31),
)
def test_softmax_at_any_size(degrees_of: list[int], heads: int, spread: float, seed: int) -> None:
    torch.manual_seed(seed)
    indptr = torch.tensor([0, *degrees_of]).cumsum(0)
    scores = spread * torch.randn(int(indptr[-1]), heads).clamp(-3, 3)
    assert_within(softmax(indptr, scores), exact_softmax(indptr, scores), softmax_bound(indptr, scores.double()))
