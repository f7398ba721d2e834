"""Sums and attention with formats by component, against dense float64 models of rounded operands."""

import pytest
import torch
from torch import Tensor

from dense import CASES, adjacency, assert_within, degree_of, graph_of, sum_bound
from dense_attention import KINDS, ROWS, D, H, exact, magnitudes, operands_of, ours
from op_checks import gradients
from qgnn import Graph, QConfig, functional
from qgnn.formats import MSFP, MXFP4, FixedPoint, Float8, Format, Int

F = 40
FORMATS = (Int(4), Int(8, symmetric=False), FixedPoint(6), MSFP(3), MXFP4(), Float8())
EACH = pytest.mark.parametrize("fmt", FORMATS, ids=str)


def rounded(x: Tensor, fmt: Format | None, dim: int = -1) -> Tensor:
    return x.double() if fmt is None else fmt.quantize(x.detach().float(), dim).double()


def messages(fmt: Format, **components: Format | None) -> QConfig:
    return QConfig.only(messages=fmt, rounding="nearest", **components)


@pytest.mark.parametrize("graph_name", ["random", "tall", "isolated", "no_edges", "hub"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@EACH
def test_spmm_sums_rounded_messages(fmt: Format, reduce: str, graph_name: str) -> None:
    """Terms see the weight, the factor of a mean and the scale of a code; a gradient is rounded before it is spread."""
    graph, (edge_index, S, T) = graph_of(graph_name), CASES[graph_name]
    weight, x, upstream = torch.rand(edge_index.shape[1]), torch.randn(S, F), torch.randn(T, F)
    config = messages(fmt, output_gradient=fmt)
    matrix = adjacency(edge_index, S, T, weight)
    if reduce == "mean":
        matrix = matrix / degree_of(graph).clamp_min(1)
    terms = torch.tensor(max(edge_index.shape[1], 1))
    y, grads = gradients(lambda x: functional.spmm(graph, x, weight, reduce, config=config), {"x": x}, upstream)
    rows = rounded(x, fmt)
    assert_within(y, matrix @ rows, sum_bound(terms, matrix @ rows.abs(), 4))
    g = rounded(upstream, fmt)
    # integer kernels fold the factor of a mean, and edges' weights, into rows before these are rounded
    if not (isinstance(fmt, Int) and fmt.symmetric and reduce == "mean"):
        assert_within(grads["x"], matrix.t() @ g, sum_bound(terms, matrix.t() @ g.abs(), 4))


@EACH
def test_spmm_rounds_the_sum_alone(fmt: Format) -> None:
    graph, x, upstream = graph_of("random"), torch.randn(50, F), torch.randn(50, F)
    config = QConfig.only(aggregation=fmt, rounding="nearest")
    y, grads = gradients(lambda x: functional.spmm(graph, x, config=config), {"x": x}, upstream)
    plain, plain_grads = gradients(lambda x: functional.spmm(graph, x), {"x": x}, upstream)
    assert torch.equal(y, fmt.quantize(plain))
    assert torch.equal(grads["x"], plain_grads["x"])


@pytest.mark.parametrize("reduce", ["max", "min"])
@EACH
def test_extrema_are_those_of_rounded_messages(fmt: Format, reduce: str) -> None:
    graph, x = graph_of("random"), torch.randn(50, F)
    y = functional.spmm(graph, x, reduce=reduce, config=messages(fmt))
    torch.testing.assert_close(y, functional.spmm(graph, fmt.quantize(x), reduce=reduce))


@EACH
def test_graph_linear_is_a_product_and_a_sum(fmt: Format) -> None:
    graph, bias = graph_of("random"), torch.randn(12)
    tensors = {"x": torch.randn(50, F), "weight": torch.randn(12, F)}
    config = QConfig(fmt=fmt, rounding="nearest", components={"aggregation": MSFP(7)})

    def two(x: Tensor, weight: Tensor) -> Tensor:
        hidden = functional.linear(x, weight, config=config)
        return functional.spmm(graph, hidden, reduce="mean", activation="relu", config=config)

    def one(x: Tensor, weight: Tensor) -> Tensor:
        return functional.graph_linear(graph, x, weight, reduce="mean", activation="relu", config=config)

    (y, grads), (expected, expected_grads) = gradients(one, tensors), gradients(two, tensors)
    assert torch.equal(y, expected)
    for key, value in expected_grads.items():
        assert torch.equal(grads[key], value)
    exact_config = QConfig.only(aggregation=MSFP(7), rounding="nearest")
    shifted = functional.graph_linear(graph, **tensors, bias=bias, config=exact_config)
    torch.testing.assert_close(shifted, functional.graph_linear(graph, **tensors, config=exact_config) + bias)


@pytest.mark.parametrize("heads", [None, 3])
@EACH
def test_sddmm_multiplies_rounded_rows(fmt: Format, heads: int | None) -> None:
    graph = graph_of("tall")
    shape = (F,) if heads is None else (heads, F)
    source, target = torch.randn(graph.num_sources, *shape), torch.randn(graph.num_targets, *shape)
    out = functional.sddmm(graph, source, target, config=messages(fmt))
    i, j = graph.to_given_order(graph.target).long(), graph.to_given_order(graph.csr.index).long()
    terms = rounded(target, fmt)[i] * rounded(source, fmt)[j]
    assert_within(out, terms.sum(-1), sum_bound(torch.tensor(F), terms.abs().sum(-1), 2))


@EACH
def test_edge_softmax_rounds_weights_along_the_edges(fmt: Format) -> None:
    graph = graph_of("random")
    scores = torch.randn(graph.num_edges, H)
    plain = functional.edge_softmax(graph, scores)
    actual = functional.edge_softmax(graph, scores, config=QConfig.only(attention=fmt, rounding="nearest"))
    expected = graph.to_given_order(fmt.quantize(graph.to_csr_order(plain), 0))
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, plain)
    assert torch.equal(functional.edge_softmax(graph, scores, config=QConfig(fmt=fmt)), plain)


@pytest.mark.parametrize("side", ["target", "source"])
@EACH
def test_incidence_sum_sums_rounded_values(fmt: Format, side: str) -> None:
    graph = graph_of("tall")
    edge_x = torch.randn(graph.num_edges, F)
    y = functional.incidence_sum(graph, edge_x, side, config=messages(fmt))
    ends = graph.to_given_order(graph.target if side == "target" else graph.csr.index).long()
    rows = rounded(edge_x, fmt)
    zeros = torch.zeros(y.shape, dtype=torch.float64)
    bound = sum_bound(torch.tensor(graph.num_edges), zeros.index_add(0, ends, rows.abs()), 0)
    assert_within(y, zeros.index_add(0, ends, rows), bound)


@pytest.mark.parametrize("kind", KINDS)
@EACH
def test_attention_is_that_of_rounded_rows(fmt: Format, kind: str) -> None:
    """Rows alone are rounded, each head's along its columns. Int(4) runs in the fused kernels, which round too."""
    graph = graph_of("random")
    operands = operands_of(kind, graph)
    config = messages(fmt, output_gradient=MSFP(7), aggregation=None)
    upstream = torch.randn(graph.num_targets, H, D)
    y, grads = gradients(ours(kind, graph, config=config), operands, upstream)
    model = {name: rounded(t, fmt if name in ROWS[kind] else None) for name, t in operands.items()}
    expected, expected_grads = gradients(exact(kind, graph), model, rounded(upstream, MSFP(7)))
    sizes = magnitudes(kind, graph, torch.ones(()).double(), model, rounded(upstream, MSFP(7)).abs())
    # sums over at most E edges and H * D columns, an exponential of a score of some units: 2^-24 times a thousand
    assert_within(y, expected, 2.0**-14 * sizes["out"] + 1e-6)
    for name, value in expected_grads.items():
        assert_within(grads[name], value, 2.0**-14 * sizes[name] + 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_kernels_keep_their_weights(kind: str) -> None:
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2)
    config = QConfig.only(attention=Int(4))
    with pytest.raises(ValueError, match=f"'{kind}' keeps its weights in registers, in full precision"):
        ours(kind, graph, config=config)(**operands_of(kind, graph))
