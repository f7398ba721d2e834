"""``functional.spmm`` beyond sums of float rows: maximum and minimum, and rows that are quantized already."""

import pytest
import torch
from torch import Tensor
from torch_geometric.nn.aggr import MaxAggregation, MinAggregation

from dense import CASES
from layer_cases import relative_error
from qgnn import Graph, QConfig, QTensor, functional, trace

NEAREST = QConfig(rounding="nearest")
PYG = {"max": MaxAggregation(), "min": MinAggregation()}
REDUCES = pytest.mark.parametrize("reduce", ["max", "min"])
CONFIGS = pytest.mark.parametrize("config", [None, QConfig()], ids=["fp32", "int8"])


def case(name: str) -> tuple[Tensor, int, int, Graph]:
    edge_index, num_sources, num_targets = CASES[name]
    return edge_index, num_sources, num_targets, Graph.from_edge_index(edge_index, (num_sources, num_targets))


def pyg(edge_index: Tensor, x: Tensor, num_targets: int, reduce: str, weight: Tensor | None = None) -> Tensor:
    source, target = edge_index
    message = x[source] if weight is None else x[source] * weight[:, None]
    return PYG[reduce](message, target, dim_size=num_targets, dim=0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("weighted", [False, True])
@REDUCES
def test_extrema_are_those_of_pyg_with_their_gradients(name: str, weighted: bool, reduce: str) -> None:
    """PyG shares a gradient among equal values where we give it to the first. Only copies of an edge are equal here:
    with weights they are not, and without they have one source, which gets the same sum."""
    edge_index, num_sources, num_targets, graph = case(name)
    x = torch.randn(num_sources, 9, requires_grad=True)
    weight = torch.randn(edge_index.shape[1], requires_grad=True) if weighted else None
    y = functional.spmm(graph, x, weight, reduce=reduce)
    expected = pyg(edge_index, x, num_targets, reduce, weight)
    assert torch.equal(y, expected)
    leaves = [x] if weight is None else [x, weight]
    upstream = torch.randn_like(y)
    grads, expected_grads = (
        torch.autograd.grad(out + 0 * sum(leaf.sum() for leaf in leaves), leaves, upstream) for out in (y, expected)
    )
    for ours, theirs in zip(grads, expected_grads, strict=True):
        # Sums of at most 700 products of numbers below 5, in any order, PyG's with a division by the number of copies.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=700 * 25 * 2 * 2.0**-24)


@REDUCES
@CONFIGS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_an_isolated_node_gets_zero_from_an_extremum(reduce: str, config: QConfig | None, dtype: torch.dtype) -> None:
    """Its neighbors are all positive, or all negative: a fill value would show, and overflow in 16 bits."""
    sign = 1 if reduce == "min" else -1
    edge_index = torch.tensor([[0, 1], [1, 1]])
    y = functional.spmm(edge_index, sign * (1 + torch.rand(3, 5)).to(dtype), reduce=reduce, config=config)
    assert y.dtype == dtype
    assert torch.equal(y[[0, 2]], torch.zeros(2, 5, dtype=dtype))
    assert (sign * y[1] >= 0.9).all()


@REDUCES
def test_quantized_extrema_are_close_to_exact_ones(reduce: str) -> None:
    edge_index, _, num_targets, graph = case("power_law")
    x = torch.randn(160, 32)
    y = functional.spmm(graph, x, reduce=reduce, config=QConfig(), seed=1)
    # A step is a 127th of a row's largest value, about 2.5 deviations: errors of at most a step, and mostly half of it.
    assert 0 < relative_error(y, pyg(edge_index, x, num_targets, reduce)) < 2.5 / 127
    assert not torch.equal(y, functional.spmm(graph, x, reduce=reduce, config=QConfig(), seed=2))


@REDUCES
def test_extrema_take_weights_in_the_order_of_the_edges(reduce: str) -> None:
    edge_index, _, num_targets, _ = case("power_law")
    weight = torch.rand(edge_index.shape[1])
    x = torch.randn(160, 4)
    expected = pyg(edge_index, x, num_targets, reduce, weight)
    assert torch.equal(functional.spmm(edge_index, x, weight, reduce), expected)
    weighted = Graph.from_edge_index(edge_index, 160, weight)
    assert torch.equal(functional.spmm(weighted, x, reduce=reduce), expected)


def test_graph_linear_has_no_extrema() -> None:
    """They do not commute with the product, so there is nothing to fuse."""
    with pytest.raises(ValueError, match=r"expects 'reduce' to be one of \('sum', 'mean'\) \(got 'max'\)"):
        functional.graph_linear(torch.tensor([[0], [1]]), torch.ones(2, 3), torch.ones(4, 3), reduce="max")


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_quantized_features_are_gathered_as_they_are(reduce: str, granularity: str) -> None:
    """The same as codes that are made within the call, with a config and without one."""
    _, _, _, graph = case("power_law")
    x, config = torch.randn(160, 16), QConfig(rounding="nearest", granularity=granularity)
    q = functional.quantize(x, config)
    within = functional.spmm(graph, x, reduce=reduce, config=config)
    with trace() as t:
        assert torch.equal(functional.spmm(graph, q, reduce=reduce, config=config), within)
        assert torch.equal(functional.spmm(graph, q, reduce=reduce), within)
    assert "quantize.forward" not in t.ops


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("config", [None, NEAREST, QConfig(save="fp32")], ids=str)
def test_edge_weights_learn_from_quantized_features(reduce: str, config: QConfig | None) -> None:
    """The gradient is that of the values that the codes stand for, but for the rounding of the upstream gradient."""
    _, _, _, graph = case("random")
    q = functional.quantize(torch.randn(50, 16), NEAREST)
    weight = torch.randn(graph.num_edges, requires_grad=True)
    upstream = torch.randn(50, 16)
    (grad,) = torch.autograd.grad(functional.spmm(graph, q, weight, reduce, config=config), weight, upstream)
    values = functional.spmm(graph, q.dequantize().double(), weight.double(), reduce)
    (expected,) = torch.autograd.grad(values, weight, upstream.double())
    # Sums of 16 products; an upstream row is rounded to 127 steps of its largest value.
    rounds = config is not None and reduce in ("sum", "mean")
    assert relative_error(grad, expected) < (0.02 if rounds else 2.0**-18)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_quantized_features_give_the_type_that_was_quantized(dtype: torch.dtype, reduce: str) -> None:
    _, _, _, graph = case("random")
    x = torch.randn(50, 16).to(dtype)
    y = functional.spmm(graph, functional.quantize(x, NEAREST), reduce=reduce)
    assert y.dtype == dtype
    assert torch.equal(y, functional.spmm(graph, x, reduce=reduce, config=NEAREST))


def test_codes_that_aggregation_cannot_take_are_rejected() -> None:
    edges, x = torch.tensor([[0], [1]]), torch.randn(2, 8)
    blocks = functional.quantize(x, QConfig(granularity="block", block_size=4))
    with pytest.raises(ValueError, match="'spmm' expects one scale a row or one a tensor"):
        functional.spmm(edges, blocks)
    offset = QTensor(torch.zeros(2, 8, dtype=torch.int8), torch.ones(2, 1), zero=torch.ones(2, 1))
    with pytest.raises(ValueError, match="'spmm' expects symmetric int8 codes"):
        functional.spmm(edges, offset, reduce="max")
    with pytest.raises(ValueError, match="'spmm' expects 'x' with one row for each of the graph's 2 source nodes"):
        functional.spmm(Graph.from_edge_index(edges, 2), functional.quantize(torch.randn(3, 8)))


@REDUCES
@CONFIGS
def test_extrema_compile_without_a_break(reduce: str, config: QConfig | None) -> None:
    _, _, _, graph = case("random")
    config = None if config is None else NEAREST
    x = torch.randn(50, 8, requires_grad=True)
    compiled = torch.compile(
        lambda x: functional.spmm(graph, x, reduce=reduce, config=config), fullgraph=True, backend="aot_eager"
    )
    y, expected = compiled(x), functional.spmm(graph, x, reduce=reduce, config=config)
    assert torch.equal(y, expected)
    (grad,), (expected_grad,) = (torch.autograd.grad(out.sum(), x) for out in (y, expected))
    assert torch.equal(grad, expected_grad)
