import math
from collections.abc import Callable

import pytest
import torch
from qgnn.kernels import tuning
from qgnn.kernels.softmax import attention_scores, attention_scores_backward, softmax, softmax_backward
from qgnn.kernels.spmm_plan import Plan, make_plan
from torch import Tensor

from graphs import GRAPHS, RECTANGULAR
from kernel_cases import LAYOUTS, assert_within, csr, quiet, storage_error, surrounded
from qgnn import reference
from softmax_cases import (
    SLOPE,
    edge_scores,
    exact_attention_backward,
    exact_backward,
    exact_softmax,
    online_softmax_bound,
    transposed,
)
from statistics_checks import EPS

ALL_GRAPHS = {name: (edges, n, n) for name, (edges, n) in GRAPHS.items()} | RECTANGULAR
HUB = "hub"  # its first row has 278 of 281 edges: two chunks with the least cap of a plan, 256 edges

Operands = tuple[Tensor, Tensor, Tensor, Tensor]


def operands_of(name: str, heads: int, device: str, dtype: torch.dtype = torch.int32) -> Operands:
    """A graph, and scores of its targets and sources."""
    edge_index, S, N = ALL_GRAPHS[name]
    indptr, index = csr(edge_index, N, device, dtype)
    return indptr, index, torch.randn(N, heads, device=device), torch.randn(S, heads, device=device)


def plans_of(operands: Operands, cap: int | None) -> dict[str, Plan]:
    indptr, index, _, source = operands
    pointers = {"plan": indptr, "plan_t": transposed(indptr, index, source.shape[0])[0]}
    return {} if cap is None else {name: make_plan(p, index.numel(), cap=cap) for name, p in pointers.items()}


def assert_softmax(operands: Operands, cap: int | None = None) -> None:
    """Its result and its gradient."""
    indptr, index, target, _ = operands
    plan = {"plan": plans_of(operands, cap).get("plan")}
    scores = 10 * torch.randn(index.numel(), target.shape[1], device=target.device)
    out = softmax(indptr, scores, **plan)
    assert_within(out, exact_softmax(indptr, scores), online_softmax_bound(indptr, scores.double()))
    grad = torch.randn_like(out)
    dx = softmax_backward(indptr, out, grad, **plan)
    assert_within(dx, *exact_backward(indptr, out, grad))


def assert_attention(operands: Operands, cap: int | None = None) -> None:
    """Its weights and its gradients."""
    indptr, index, target, source = operands
    plans = plans_of(operands, cap)
    scores = edge_scores(indptr, index, target, source)
    out = attention_scores(*operands, negative_slope=SLOPE, plan=plans.get("plan"))
    assert_within(out, exact_softmax(indptr, scores), online_softmax_bound(indptr, scores, score_roundings=3))
    grad = torch.randn_like(out)
    graph = (indptr, index, *transposed(indptr, index, source.shape[0]))
    found = attention_scores_backward(*graph, target, source, out, grad, negative_slope=SLOPE, **plans)
    exact = exact_attention_backward(indptr, scores, out, grad, *graph[2:])
    for actual, (expected, bound) in zip(found, exact, strict=True):
        assert_within(actual, expected, bound)


@pytest.mark.parametrize("name", ALL_GRAPHS)
def test_attention_on_every_graph(device: str, name: str) -> None:
    assert_attention(operands_of(name, 3, device, [torch.int32, torch.int64][len(name) % 2]))


@pytest.mark.parametrize("name", ["no_targets", "no_edges", "isolated", HUB])
def test_softmax_on_degenerate_graphs(device: str, name: str) -> None:
    assert_softmax(operands_of(name, 3, device))


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 17, 33])
def test_every_number_of_heads(device: str, heads: int) -> None:
    operands = operands_of("self_loops", heads, device)
    assert_softmax(operands)
    assert_attention(operands)


@pytest.mark.parametrize(("name", "heads", "cap"), [(HUB, 1, 40), ("duplicates", 4, 6)])
def test_chunks_of_hubs(device: str, name: str, heads: int, cap: int) -> None:
    """7 chunks of a hub, and a graph in which most rows are hubs."""
    operands = operands_of(name, heads, device)
    assert_softmax(operands, cap)
    assert_attention(operands, cap)


def test_hubs_of_more_chunks_than_a_step_merges(device: str) -> None:
    assert tuning.softmax_hubs(16)["BLOCK_S"] < 40
    assert_softmax(operands_of("one_pair", 16, device), cap=1)


def test_results_repeat_bit_for_bit(device: str) -> None:
    operands = operands_of(HUB, 3, device)
    indptr, index, target, source = operands
    plans = plans_of(operands, 32)
    graph = (indptr, index, *transposed(indptr, index, 140))

    def results() -> list[Tensor]:
        out = attention_scores(*operands, plan=plans["plan"])
        return [out, *attention_scores_backward(*graph, target, source, out, out, **plans)]

    assert all(torch.equal(a, b) for a, b in zip(results(), results(), strict=True))


@quiet
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("edge", "cap"), [(0, None), (100, 16), (277, 16), (280, 16)])
def test_special_scores_reach_their_row_and_head_alone(device: str, special: float, edge: int, cap: int | None) -> None:
    operands = operands_of(HUB, 3, device)
    indptr, plan = operands[0], plans_of(operands, cap).get("plan")
    scores = torch.randn(281, 3, device=device)
    clean = softmax(indptr, scores, plan=plan)
    scores[edge, 2] = special
    out, exact = softmax(indptr, scores, plan=plan), exact_softmax(indptr, scores).float()
    torch.testing.assert_close(out, exact, rtol=300 * EPS, atol=0, equal_nan=True)
    row = torch.repeat_interleave(indptr.diff().long())
    others = row != row[edge]
    assert torch.equal(out[:, :2], clean[:, :2])
    assert torch.equal(out[others], clean[others])
    assert out[~others, 2].isnan().all() == (special != -math.inf or others.sum() == 280)


@quiet
@pytest.mark.parametrize("cap", [None, 4])
def test_rows_of_nothing_but_minus_infinity_are_nan_as_in_torch(device: str, cap: int | None) -> None:
    """A chunk of them alone is not: the row has other scores."""
    indptr = torch.tensor([0, 1, 4, 4, 24, 44], device=device)
    scores = torch.full((44, 3), -math.inf, device=device)
    scores[0], scores[43] = 2.0, -3.0
    out = softmax(indptr, scores, plan=None if cap is None else make_plan(indptr, 44, cap=cap))
    assert out[0].tolist() == out[43].tolist() == [1.0] * 3
    assert out[1:24].isnan().all()
    assert (out[24:43] == 0).all()


@quiet
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_special_scores_of_a_source_reach_its_targets_alone(device: str, special: float) -> None:
    operands = operands_of("random", 3, device)
    indptr, index, target, source = operands
    clean = attention_scores(*operands)
    source[11, 2] = special
    out = attention_scores(*operands)
    exact = exact_softmax(indptr, edge_scores(indptr, index, target, source)).float()
    torch.testing.assert_close(out, exact, rtol=300 * EPS, atol=0, equal_nan=True)
    row = torch.repeat_interleave(indptr.diff().long())
    reached = torch.isin(row, row[index == 11])
    assert reached.any()
    assert torch.equal(out[~reached], clean[~reached])
    assert torch.equal(out[:, :2], clean[:, :2])


@quiet
@pytest.mark.parametrize("cap", [None, 16])
def test_a_nan_gradient_reaches_its_row_and_head_alone(device: str, cap: int | None) -> None:
    operands = operands_of(HUB, 3, device)
    indptr, index, target, source = operands
    graph, plans = (indptr, index, *transposed(indptr, index, 140)), plans_of(operands, cap)
    out = attention_scores(*operands)
    grad = torch.randn_like(out)
    clean = attention_scores_backward(*graph, target, source, out, grad, **plans)
    clean_dx = softmax_backward(indptr, out, grad, plan=plans.get("plan"))
    grad[5, 1] = math.nan  # of the hub
    d_target, d_source = attention_scores_backward(*graph, target, source, out, grad, **plans)
    dx = softmax_backward(indptr, out, grad, plan=plans.get("plan"))
    in_row = torch.arange(281, device=device) < indptr[1]
    assert torch.equal(dx.isnan(), in_row[:, None] & torch.tensor([False, True, False], device=device))
    assert torch.equal(dx[~dx.isnan()], clean_dx[~dx.isnan()])
    for made, before in ((d_target, clean[0]), (d_source, clean[1])):
        assert torch.equal(made[:, [0, 2]], before[:, [0, 2]])
    assert d_target[:, 1].isnan().nonzero().tolist() == [[0]]
    assert torch.equal(d_source[:, 1].isnan(), torch.isin(torch.arange(140, device=device), index[in_row]))


def test_scores_of_one_edge_and_of_equal_edges_are_exact(device: str) -> None:
    indptr = torch.tensor([0, 1, 3, 7], device=device)
    out = softmax(indptr, torch.tensor([-3.7, 5.1, 5.1, 1e30, 1e30, 1e30, 1e30], device=device)[:, None])
    assert out.flatten().tolist() == [1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_computed_in_fp32(device: str, dtype: torch.dtype) -> None:
    indptr, index, target, source = operands_of("self_loops", 3, device)
    graph = (indptr, index, *transposed(indptr, index, 17))
    scores, grad, target, source = (
        t.to(dtype) for t in (torch.randn(47, 3, device=device), torch.randn(47, 3, device=device), target, source)
    )
    out, alpha = softmax(indptr, scores), attention_scores(indptr, index, target, source)
    halves = out, alpha, *attention_scores_backward(*graph, target, source, alpha, grad)
    floats = (
        softmax(indptr, scores.float()),
        attention_scores(indptr, index, target.float(), source.float()),
        *attention_scores_backward(*graph, *(t.float() for t in (target, source, alpha, grad))),
    )
    halves = (*halves, softmax_backward(indptr, out, grad))
    floats = (*floats, softmax_backward(indptr, out.float(), grad.float()))
    for half, full in zip(halves, floats, strict=True):
        assert half.dtype == dtype
        smallest = torch.finfo(dtype).smallest_normal * storage_error(dtype)
        assert_within(half, full, storage_error(dtype) * full.double().abs() + smallest)


@pytest.mark.parametrize("negative_slope", [0.0, 1.0, -0.5])
def test_attention_with_other_slopes(device: str, negative_slope: float) -> None:
    """The slope at zero, where the first edge's score is, is the negative one, as in torch."""
    operands = operands_of("self_loops", 4, device)
    indptr, index, target, source = operands
    target[0] = -source[index[0].long()]
    assert indptr[1] > 0
    out = attention_scores(*operands, negative_slope=negative_slope)
    expected = reference.attention_scores(*operands, negative_slope=negative_slope)
    torch.testing.assert_close(out, expected, rtol=300 * EPS, atol=0)
    graph = (indptr, index, *transposed(indptr, index, 17))
    rest = (target, source, out, torch.randn_like(out))
    found = attention_scores_backward(*graph, *rest, negative_slope=negative_slope)
    expected = reference.attention_scores_backward(*graph, *rest, negative_slope=negative_slope)
    for actual, other in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, other, rtol=0, atol=200 * EPS)  # at most 17 terms below 4, 3 roundings each


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), lambda x: surrounded(x, 9.0)])
def test_any_strides(device: str, layout: Callable[[Tensor], Tensor]) -> None:
    operands = operands_of("self_loops", 3, device)
    csc = transposed(*operands[:2], 17)
    strided = [t.repeat_interleave(2)[::2] for t in (*operands[:2], *csc)]
    scores = [layout(t) for t in operands[2:]]
    out = attention_scores(*operands)
    grad = torch.randn_like(out)
    assert torch.equal(attention_scores(*strided[:2], *scores), out)
    assert torch.equal(softmax(strided[0], layout(grad)), softmax(operands[0], grad))
    dx = softmax_backward(strided[0], layout(out), layout(grad))
    assert torch.equal(dx, softmax_backward(operands[0], out, grad))
    found = attention_scores_backward(*strided, *scores, layout(out), layout(grad))
    expected = attention_scores_backward(*operands[:2], *csc, *operands[2:], out, grad)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_inputs_are_left_alone(device: str) -> None:
    indptr, index, target, source = operands_of("self_loops", 3, device)
    out, grad = attention_scores(indptr, index, target, source), torch.randn(47, 3, device=device)
    inputs = [indptr, index, *transposed(indptr, index, 17), target, source, out, grad]
    before = [t.clone() for t in inputs]
    attention_scores_backward(*inputs)
    softmax(indptr, grad)
    softmax_backward(indptr, out, grad)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
