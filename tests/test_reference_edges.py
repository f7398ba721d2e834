"""The reference's edge primitives against float64 algebra, on graphs that hurt."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dense import CASES, assert_within, graph_of, random_codes, random_scale
from qgnn import Graph, reference
from qgnn.reference import _common
from softmax_cases import (
    SLOPE,
    degrees,
    edge_scores,
    exact_backward,
    exact_softmax,
    row_sums,
    softmax_bound,
)
from statistics_checks import EPS

HEADS = [1, 3, 4]


def csr(graph: Graph) -> tuple[Tensor, Tensor]:
    return graph.csr.indptr, graph.csr.index


def ends(graph: Graph, x_target: Tensor, x_source: Tensor) -> tuple[Tensor, Tensor]:
    source, target = graph.edge_index()
    return x_target[target], x_source[source]


# --- dot products and sums


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("heads", HEADS)
def test_dots_of_heads_are_exact_for_codes(name: str, heads: int) -> None:
    graph, D = graph_of(name), 5
    x_target, x_source = (random_codes(n, heads * D) for n in (graph.num_targets, graph.num_sources))
    t, s = ends(graph, x_target, x_source)
    exact = (t.long() * s.long()).view(-1, heads, D).sum(2)
    out = reference.sddmm(*csr(graph), x_target, x_source, heads=heads)
    assert torch.equal(out, exact.float() if heads > 1 else exact.float()[:, 0])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("per", ["tensor", "row", "head"])
def test_scales_of_tensors_rows_and_heads(heads: int, per: str) -> None:
    """Two roundings of an exact integer, in this order."""
    graph, D = graph_of("wide"), 5
    x_target, x_source = (random_codes(n, heads * D) for n in (graph.num_targets, graph.num_sources))
    target_scale, source_scale = (
        {"tensor": random_scale(1), "row": random_scale(n), "head": random_scale(n * heads).view(n, heads)}[per]
        for n in (graph.num_targets, graph.num_sources)
    )
    scales = {"target_scale": target_scale, "source_scale": source_scale}
    source, target = graph.edge_index()
    t_scale = target_scale.reshape(len(target_scale), -1).expand(graph.num_targets, heads)[target]
    s_scale = source_scale.reshape(len(source_scale), -1).expand(graph.num_sources, heads)[source]
    bare = reference.sddmm(*csr(graph), x_target, x_source, heads=heads).view(-1, heads)
    dots = reference.sddmm(*csr(graph), x_target, x_source, heads=heads, **scales)
    assert torch.equal(dots.view(-1, heads), bare * t_scale * s_scale)
    t, s = (x.float().view(-1, heads, D) for x in ends(graph, x_target, x_source))
    sums = reference.sddmm(*csr(graph), x_target, x_source, op="add", heads=heads, **scales)
    assert torch.equal(sums, (t * t_scale[:, :, None] + s * s_scale[:, :, None]).flatten(1))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_of_rows(name: str, dtype: torch.dtype) -> None:
    graph = graph_of(name)
    x_target, x_source = (torch.randn(n, 7).to(dtype) for n in (graph.num_targets, graph.num_sources))
    out = reference.sddmm(*csr(graph), x_target, x_source, op="add")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    t, s = ends(graph, x_target, x_source)
    assert out.dtype == wide
    assert torch.equal(out, t.to(wide) + s.to(wide))


def test_chunks_of_edges_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of("random")
    x, scale = random_codes(50, 12), random_scale(100).view(50, 2)
    options: dict[str, Any] = {"heads": 2, "target_scale": scale, "source_scale": scale}
    whole = [reference.sddmm(*csr(graph), x, x, op=op, **options) for op in ("dot", "add")]
    monkeypatch.setattr(_common, "CHUNK_ELEMENTS", 2 * 12)
    for op, expected in zip(("dot", "add"), whole, strict=True):
        assert torch.equal(reference.sddmm(*csr(graph), x, x, op=op, **options), expected)


# --- softmax


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("heads", HEADS)
def test_softmax_is_that_of_each_row(name: str, heads: int) -> None:
    graph = graph_of(name)
    scores = 10 * torch.randn(graph.num_edges, heads)
    out = reference.softmax(graph.csr.indptr, scores)
    assert_within(out, exact_softmax(graph.csr.indptr, scores), softmax_bound(graph.csr.indptr, scores.double()))
    exact = reference.softmax(graph.csr.indptr, scores.double())
    torch.testing.assert_close(exact, exact_softmax(graph.csr.indptr, scores), rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_softmax_keeps_the_type(dtype: torch.dtype) -> None:
    graph = graph_of("random")
    scores = torch.randn(graph.num_edges, 2).to(dtype)
    out = reference.softmax(graph.csr.indptr, scores)
    assert torch.equal(out, reference.softmax(graph.csr.indptr, scores.float()).to(dtype))


SPECIAL = [
    [0.0, -math.inf, 1.0],
    [-math.inf, -math.inf],
    [-math.inf],
    [math.inf, 0.0],
    [math.inf, math.inf],
    [math.inf, -math.inf, 0.0],
    [math.nan, 0.0, math.inf],
    [3e38, -3e38, 0.0],
    [1e4, 1e4 - 100, 1e4 - 200],
    [-0.0, 0.0],
]


def test_softmax_of_special_values_is_as_in_torch() -> None:
    indptr = torch.tensor([0, *(len(row) for row in SPECIAL)]).cumsum(0)
    scores = torch.tensor([value for row in SPECIAL for value in row])[:, None]
    exact = exact_softmax(indptr, scores).float()
    torch.testing.assert_close(reference.softmax(indptr, scores), exact, rtol=8 * EPS, atol=0, equal_nan=True)
    assert exact.isnan().any()


@pytest.mark.parametrize("name", CASES)
def test_softmax_backward(name: str) -> None:
    graph = graph_of(name)
    indptr = graph.csr.indptr
    out = exact_softmax(indptr, torch.randn(graph.num_edges, 3)).float()
    grad = torch.randn(graph.num_edges, 3)
    exact, bound = exact_backward(indptr, out, grad)
    assert_within(reference.softmax_backward(indptr, out, grad), exact, bound)


# --- attention


@pytest.mark.parametrize("name", CASES)
def test_attention_scores_are_the_softmax_of_leaky_sums(name: str) -> None:
    graph = graph_of(name)
    target, source = torch.randn(graph.num_targets, 3), torch.randn(graph.num_sources, 3)
    scores = edge_scores(*csr(graph), target, source)
    out = reference.attention_scores(*csr(graph), target, source, negative_slope=SLOPE)
    exact = exact_softmax(graph.csr.indptr, scores)
    # Three roundings of a score: the sum of its two parts, the slope as an fp32 number, and their product.
    assert_within(out, exact, softmax_bound(graph.csr.indptr, scores, score_roundings=3))


@pytest.mark.parametrize("name", CASES)
def test_attention_backward_sums_over_targets_and_sources(name: str) -> None:
    graph = graph_of(name)
    indptr, csc = graph.csr.indptr, graph.csc
    target, source = torch.randn(graph.num_targets, 3), torch.randn(graph.num_sources, 3)
    scores = edge_scores(*csr(graph), target, source)
    out, grad = exact_softmax(indptr, scores).float(), torch.randn(graph.num_edges, 3)
    operands = (*csr(graph), csc.indptr, csc.order, target, source, out, grad)
    d_target, d_source = reference.attention_scores_backward(*operands, negative_slope=SLOPE)
    edge, bound = exact_backward(indptr, out, grad)
    edge = torch.where(scores > 0, edge, SLOPE * edge)
    bound = bound + (degrees(indptr) + 1) * EPS * edge.abs()
    assert_within(d_target, row_sums(indptr, edge), row_sums(indptr, bound))
    order = csc.order.long()
    out_degree = csc.indptr.diff().double()[:, None]
    total = row_sums(csc.indptr, edge[order].abs())
    assert_within(
        d_source, row_sums(csc.indptr, edge[order]), row_sums(csc.indptr, bound[order]) + out_degree * EPS * total
    )
