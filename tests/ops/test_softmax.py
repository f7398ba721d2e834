"""``qgnn::softmax`` and ``qgnn::attention_scores``: values, gradients, and what a softmax must hold."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dense import CASES, assert_within, graph_of
from op_checks import assert_inputs_unchanged, gradients, opcheck, saved_tensors, shares_memory
from qgnn import Graph, ops, reference, trace
from qgnn.ops._backends import Backend, torch_backend, triton_backend
from qgnn.ops.softmax import (
    _attention_scores,
    _attention_scores_backward,
    _softmax,
    _softmax_backward,
    attention_scores_backward,
    softmax_backward,
)
from softmax_cases import SLOPE, degrees, edge_scores, exact_backward, exact_softmax, row_sums, softmax_bound
from statistics_checks import EPS

H = 3


def structure(graph: Graph) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return graph.csr.indptr, graph.csr.index, graph.csc.indptr, graph.csc.order


def attention(graph: Graph, target: Tensor, source: Tensor) -> Tensor:
    return ops.attention_scores(target, source, *structure(graph), SLOPE)


def softmax(graph: Graph, scores: Tensor) -> Tensor:
    return ops.softmax(scores, graph.csr.indptr)


def node_scores(graph: Graph, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {
        "target": torch.randn(graph.num_targets, H, dtype=dtype),
        "source": torch.randn(graph.num_sources, H, dtype=dtype),
    }


@pytest.mark.parametrize("name", CASES)
def test_softmax_on_every_graph(name: str) -> None:
    graph, indptr = graph_of(name), graph_of(name).csr.indptr
    scores, upstream = 5 * torch.randn(graph.num_edges, H), torch.randn(graph.num_edges, H)
    out, grads = gradients(lambda scores: softmax(graph, scores), {"scores": scores}, upstream)
    assert_within(out, exact_softmax(indptr, scores), softmax_bound(indptr, scores.double()))
    assert_within(grads["scores"], *exact_backward(indptr, out, upstream))


@pytest.mark.parametrize("name", CASES)
def test_attention_scores_on_every_graph(name: str) -> None:
    graph = graph_of(name)
    tensors, upstream = node_scores(graph), torch.randn(graph.num_edges, H)
    out, grads = gradients(lambda **t: attention(graph, **t), tensors, upstream)
    indptr, indptr_t, order = graph.csr.indptr, graph.csc.indptr, graph.csc.order.long()
    scores = edge_scores(indptr, graph.csr.index, *tensors.values())
    assert_within(out, exact_softmax(indptr, scores), softmax_bound(indptr, scores, score_roundings=3))
    edge, bound = exact_backward(indptr, out, upstream)
    edge = torch.where(scores > 0, edge, SLOPE * edge)
    per_target = bound + (degrees(indptr) + 1) * EPS * edge.abs()
    assert_within(grads["target"], row_sums(indptr, edge), row_sums(indptr, per_target))
    additions = (indptr_t.diff().double()[:, None] + 1) * EPS * row_sums(indptr_t, edge[order].abs())
    assert_within(grads["source"], row_sums(indptr_t, edge[order]), row_sums(indptr_t, bound[order]) + additions)


@pytest.mark.parametrize("name", ["random", "tall", "wide", "isolated", "one_pair", "empty"])
def test_gradcheck(name: str) -> None:
    graph = graph_of(name)
    scores = torch.randn(graph.num_edges, H, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: softmax(graph, s), (scores,), fast_mode=True)
    leaves = [t.requires_grad_() for t in node_scores(graph, torch.float64).values()]
    assert torch.autograd.gradcheck(lambda t, s: attention(graph, t, s), leaves, fast_mode=True)


# --- what a softmax must hold

FINITE = st.sampled_from([0.0, 1.0, 20.0, 1e4])


@settings(max_examples=40)
@given(st.sampled_from(sorted(CASES)), FINITE, st.integers(0, 2**31))
def test_weights_of_a_row_are_positive_and_sum_to_one(name: str, spread: float, seed: int) -> None:
    torch.manual_seed(seed)
    graph = graph_of(name)
    indptr = graph.csr.indptr
    for out in (softmax(graph, spread * torch.randn(graph.num_edges, H)), attention(graph, **node_scores(graph))):
        assert (out >= 0).all()
        degree = indptr.diff().double()[:, None]
        total = row_sums(indptr, out.double())
        expected = (degree > 0).double().expand_as(total)
        # The fp32 sum is off by n eps, its reciprocal and each product by eps.
        assert ((total - expected).abs() <= 1.01 * (degree + 2) * EPS).all()


@settings(max_examples=40)
@given(st.sampled_from(sorted(CASES)), st.integers(-512, 512), st.integers(0, 2**31))
def test_a_shift_of_a_row_changes_nothing(name: str, shift: int, seed: int) -> None:
    """Scores are multiples of 1/256 and shifts of 1/2, whose sums fp32 holds: the results are equal."""
    torch.manual_seed(seed)
    graph = graph_of(name)
    scores = torch.randint(-2048, 2048, (graph.num_edges, H)) / 256
    shifts = torch.randint(-abs(shift), abs(shift) + 1, (graph.num_targets, H)) / 2
    assert torch.equal(softmax(graph, scores + shifts[graph.target.long()]), softmax(graph, scores))


@settings(max_examples=40)
@given(st.randoms(use_true_random=False), st.sampled_from(sorted(CASES)))
def test_edges_in_another_order_have_the_same_weights(random: Any, name: str) -> None:
    """But for the order of the sum: n eps on either side."""
    edge_index, num_sources, num_targets = CASES[name]
    order = list(range(edge_index.shape[1]))
    random.shuffle(order)
    graph, shuffled = graph_of(name), Graph.from_edge_index(edge_index[:, order], (num_sources, num_targets))
    tensors = node_scores(graph)
    given_order, other = (
        torch.empty(len(order), H).index_copy(0, g.csr.order.long(), attention(g, **tensors)) for g in (graph, shuffled)
    )
    longest = int(graph.csr.indptr.diff().max()) if num_targets else 0
    torch.testing.assert_close(given_order[order], other, rtol=2 * (longest + 2) * EPS, atol=0)


@settings(max_examples=20)
@given(st.sampled_from(sorted(CASES)))
def test_gradients_of_a_row_sum_to_zero(name: str) -> None:
    """The weights of a row keep their sum whatever its scores do."""
    graph = graph_of(name)
    scores = torch.randn(graph.num_edges, H, dtype=torch.float64)
    _, grads = gradients(lambda s: softmax(graph, s), {"s": scores}, torch.randn_like(scores))
    total = row_sums(graph.csr.indptr, grads["s"])
    torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=1e-13)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_special_scores_stay_in_their_row(special: float) -> None:
    graph = graph_of("hub")
    scores = torch.randn(graph.num_edges, H)
    clean = softmax(graph, scores)
    scores[5, 1] = special
    out = softmax(graph, scores)
    expected = exact_softmax(graph.csr.indptr, scores).float()
    torch.testing.assert_close(out, expected, rtol=400 * EPS, atol=0, equal_nan=True)
    assert torch.equal(out[278:], clean[278:])
    assert torch.equal(out[:, ::2], clean[:, ::2])


# --- types, memory, compilation


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types_are_kept(dtype: torch.dtype) -> None:
    """As those of fp32 scores, rounded once."""
    graph = graph_of("power_law")
    scores, upstream = (torch.randn(700, H).half().to(dtype) for _ in range(2))
    nodes = {name: t.half().to(dtype) for name, t in node_scores(graph).items()}
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float64 else {"rtol": 0, "atol": 0}
    calls: list[tuple[Callable[..., Tensor], dict[str, Tensor]]] = [
        (lambda scores: softmax(graph, scores), {"scores": scores}),
        (lambda **t: attention(graph, **t), nodes),
    ]
    for call, tensors in calls:
        out = call(**tensors)
        single = call(**{name: t.float() for name, t in tensors.items()})
        assert out.dtype == dtype
        torch.testing.assert_close(out, single.to(dtype), **tolerance)
        _, grads = gradients(call, tensors, upstream)
        for name, grad in grads.items():
            assert grad.dtype == dtype
            assert grad.shape == tensors[name].shape


def test_strided_scores_and_expanded_gradient() -> None:
    graph = graph_of("random")
    scores = torch.randn(400, 2 * H)[::2, ::2].requires_grad_()
    out = softmax(graph, scores)
    assert torch.equal(out, softmax(graph, scores.detach().contiguous()))
    out[:, :1].expand(-1, 2).sum().backward()
    leaf = scores.detach().clone().requires_grad_()
    (2 * softmax(graph, leaf)[:, 0]).sum().backward()
    assert torch.equal(scores.grad, leaf.grad)


def test_inputs_are_left_alone() -> None:
    graph = graph_of("random")
    assert_inputs_unchanged(lambda s: softmax(graph, s), {"s": torch.randn(200, H, requires_grad=True)})
    tensors = {name: t.requires_grad_() for name, t in node_scores(graph).items()}
    assert_inputs_unchanged(lambda **t: attention(graph, **t), tensors)


def test_only_the_weights_are_saved() -> None:
    """One tensor of the size of the edges and heads: the result itself."""
    graph = graph_of("random")
    tensors = {name: t.requires_grad_() for name, t in node_scores(graph).items()}
    results: list[Tensor] = []
    kept = saved_tensors(lambda: results.append(attention(graph, **tensors)))  # type: ignore[arg-type, return-value]
    of_edges = [t for t in kept if t.is_floating_point() and t.shape[0] == graph.num_edges]
    assert len(of_edges) == 1
    assert shares_memory(results[0], of_edges)
    assert all(shares_memory(t, kept) for t in tensors.values())


def test_second_order_gradient_is_refused() -> None:
    graph = graph_of("random")
    scores = torch.randn(200, H, requires_grad=True)
    (dx,) = torch.autograd.grad(softmax(graph, scores)[:, 0].sum(), scores, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        dx.sum().backward()


def test_autocast_changes_nothing() -> None:
    graph = graph_of("random")
    tensors = node_scores(graph)
    out, grads = gradients(lambda **t: attention(graph, **t), tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out_mixed, grads_mixed = gradients(lambda **t: attention(graph, **t), tensors)
    assert torch.equal(out, out_mixed)
    assert all(torch.equal(grads[name], grads_mixed[name]) for name in grads)


def test_a_trace_shows_forward_and_backward() -> None:
    graph = graph_of("random")
    tensors = {name: t.requires_grad_() for name, t in node_scores(graph).items()}
    with trace() as report:
        attention(graph, **tensors).square().sum().backward()
        softmax(graph, torch.randn(200, H, requires_grad=True)).square().sum().backward()
    assert {name: entry["calls"] for name, entry in report.ops.items()} == {"softmax.forward": 2, "softmax.backward": 2}


def test_opcheck() -> None:
    graph = graph_of("tall")
    scores = torch.randn(60, H, requires_grad=True)
    opcheck(ops.softmax, (scores, graph.csr.indptr), compiled=True)
    nodes = [t.requires_grad_() for t in node_scores(graph).values()]
    opcheck(ops.attention_scores, (*nodes, *structure(graph), SLOPE), compiled=True)
    out, grad = torch.rand(60, H), torch.randn(60, H)
    opcheck(softmax_backward, (grad, out, graph.csr.indptr))
    constant = [t.detach() for t in nodes]
    opcheck(attention_scores_backward, (grad, out, *constant, *structure(graph), SLOPE))


def test_opcheck_without_edges() -> None:
    graph = graph_of("empty")
    opcheck(ops.softmax, (torch.randn(0, H, requires_grad=True), graph.csr.indptr))
    nodes = [t.requires_grad_() for t in node_scores(graph).values()]
    opcheck(ops.attention_scores, (*nodes, *structure(graph), SLOPE))


def test_the_kernels_agree(device: str) -> None:
    graph = graph_of("isolated")
    nodes, grad = node_scores(graph), torch.randn(graph.num_edges, H)

    def results(backend: Backend, place: str) -> list[Tensor]:
        target, source, upstream = (t.to(place) for t in (*nodes.values(), grad))
        graph_there = [t.to(place) for t in structure(graph)]
        out = _attention_scores(backend, target, source, *graph_there, SLOPE)
        back = _attention_scores_backward(backend, upstream, out, target, source, *graph_there, SLOPE)
        alpha = _softmax(backend, upstream, graph_there[0])
        return [t.cpu() for t in (out, *back, alpha, _softmax_backward(backend, upstream, alpha, graph_there[0]))]

    for ours, there in zip(results(torch_backend(), "cpu"), results(triton_backend(), device), strict=True):
        torch.testing.assert_close(there, ours, rtol=64 * EPS, atol=64 * EPS)


def test_float64_runs_in_pytorch_on_a_gpu_as_well() -> None:
    """The kernels compute in fp32."""
    graph = graph_of("isolated")
    indptr, scores = graph.csr.indptr, torch.randn(6, 2, dtype=torch.float64)
    out = triton_backend().call("softmax", "softmax.forward", indptr, scores)
    assert torch.equal(out, reference.softmax(indptr, scores))
