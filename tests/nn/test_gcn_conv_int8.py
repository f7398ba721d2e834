"""QGCNConv with quantization: the error that the formats allow, and no more; what runs in int8; what is kept."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

from graphs import GRAPHS
from layer_cases import (
    assert_equal_pass,
    assert_unbiased,
    conv_bounds,
    gcn_matrix,
    kept_bytes,
    passes,
    relative_error,
)
from qgnn import Graph, QConfig, functional, trace
from qgnn.nn import QGCNConv

K, M = 24, 16
EDGES, N = GRAPHS["random"]
EDGES = EDGES[:, EDGES[0] != EDGES[1]]


def exact_layer(conv: QGCNConv) -> GCNConv:
    theirs = GCNConv(conv.in_channels, conv.out_channels, bias=conv.bias is not None)
    theirs.load_state_dict(conv.state_dict())
    return theirs


def upstream_of(out: Tensor, seed: int = 7) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(out.dtype)


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("save", ["int8", "fp32"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_quantized_gcn_conv_stays_within_its_error_bound(bits: int, granularity: str, save: str, rounding: str) -> None:
    config = QConfig(bits=bits, granularity=granularity, save=save, rounding=rounding)
    conv = QGCNConv(K, M, bias=False, config=config)
    weight = torch.rand(EDGES.shape[1]) + 0.1
    x = torch.randn(N, K) * torch.logspace(-2, 2, N)[:, None]  # rows of very different size
    actual = passes(conv, x, EDGES, weight)
    matrix = gcn_matrix(EDGES, N, weight)
    bounds = conv_bounds(matrix, x, conv.lin.weight, upstream_of(actual["out"]), config)
    for name, ball in bounds.items():
        assert ball.contains(actual[name]), name
        # The bound is a worst case: the error is real, but signs differ, so it stays well inside in the mean.
        error = (actual[name].double() - ball.value).norm() / ball.radius.norm()
        assert 0.005 < error < 0.5, (name, error)


def test_quantized_gcn_conv_error_follows_the_width() -> None:
    """One bit less doubles the step, and the noise of rounding with it: 2^2 from 8 to 6 bits and again from 6 to 4."""
    x = torch.randn(N, K)
    errors = {}
    for bits in (8, 6, 4):
        torch.manual_seed(1)
        conv = QGCNConv(K, M, config=QConfig(bits=bits, rounding="nearest"))
        actual, expected = passes(conv, x, EDGES), passes(exact_layer(conv), x, EDGES)
        errors[bits] = {name: relative_error(actual[name], expected[name]) for name in expected if name != "dbias"}
        torch.testing.assert_close(actual["dbias"], expected["dbias"])
    for name, error in errors[8].items():
        # Gaussian rows of 24 have absmax 2.2 sigma: a step is 1.7% of sigma, its noise step / sqrt(12) = 0.5%; three
        # independent roundings (x, weight, hidden) make 0.9%, on the way back the same.
        assert 0.003 < error < 0.018, (name, error)
        assert errors[6][name] / error == pytest.approx(127 / 31, rel=0.35)
        assert errors[4][name] / errors[6][name] == pytest.approx(31 / 7, rel=0.35)


def test_row_scales_shield_small_rows_from_large_ones() -> None:
    x = torch.randn(N, K)
    x[0] *= 1000
    isolated = torch.tensor([[0], [1]])  # node 0 reaches node 1 alone
    error = {}
    for granularity in ("row", "tensor"):
        torch.manual_seed(1)
        conv = QGCNConv(K, M, config=QConfig(granularity=granularity, rounding="nearest"))
        expected = exact_layer(conv)(x, isolated)
        error[granularity] = relative_error(conv(x, isolated)[2:], expected[2:])
    assert error["row"] < 0.02
    assert error["tensor"] > 0.5


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_quantized_gcn_conv_gives_weights_their_gradient(granularity: str) -> None:
    for name, aggr in itertools.product(("random", "hub", "duplicates"), ("add", "mean")):
        edge_index, num_nodes = GRAPHS[name]
        torch.manual_seed(1)
        conv = QGCNConv(K, M, aggr=aggr, config=QConfig(granularity=granularity, rounding="nearest"))
        theirs = GCNConv(K, M, aggr=aggr)
        theirs.load_state_dict(conv.state_dict())
        x = torch.randn(num_nodes, K)
        weight = (torch.rand(edge_index.shape[1]) + 0.1).requires_grad_()
        actual = passes(conv, x, edge_index, weight, extra=(weight,))
        expected = passes(theirs, x, edge_index, weight, extra=(weight,))
        for key, value in expected.items():
            error = relative_error(actual[key], value)
            assert error < 0.05, (name, aggr, key, error)
            assert error > 0.001 or key == "dbias", (name, aggr, key, error)


def test_quantized_gcn_conv_is_unbiased() -> None:
    edge_index, num_nodes = GRAPHS["isolated"]
    conv = QGCNConv(K, M, config=QConfig(bits=4))
    weight = (torch.rand(edge_index.shape[1]) + 0.1).requires_grad_()
    x = torch.randn(num_nodes, K)
    exact = passes(exact_layer(conv).double(), x.double(), edge_index, weight.double(), extra=(weight,))
    del exact["dbias"]  # exact
    assert_unbiased(lambda: passes(conv, x, edge_index, weight, extra=(weight,)), exact, draws=300)


def test_nearest_rounding_is_biased_where_stochastic_is_not() -> None:
    """The test of the test: rounding to nearest in training misses by more than five standard errors of a draw."""
    conv = QGCNConv(K, M, bias=False, config=QConfig(bits=4))
    x = torch.randn(N, K)
    exact = {"out": exact_layer(conv)(x, EDGES).detach()}
    nearest = QGCNConv(K, M, bias=False, config=QConfig(bits=4, rounding="nearest"))
    nearest.load_state_dict(conv.state_dict())
    noise = iter(range(10**9))

    def draw() -> dict[str, Tensor]:  # a constant error beside a variance far below it
        return {"out": nearest(x, EDGES).detach() * (1 + 1e-6 * (-1) ** next(noise))}

    with pytest.raises(AssertionError, match=r"out: .* of what is allowed"):
        assert_unbiased(draw, exact, draws=50)


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_gcn_conv_draws_in_training_and_not_in_evaluation(granularity: str) -> None:
    conv = QGCNConv(K, M, config=QConfig(granularity=granularity))
    x = torch.randn(N, K)
    first, second = passes(conv, x, EDGES), passes(conv, x, EDGES)
    for name in ("out", "dx", "dlin.weight"):
        assert not torch.equal(first[name], second[name]), name
    torch.manual_seed(11)
    first = passes(conv, x, EDGES)
    torch.manual_seed(11)
    assert_equal_pass(passes(conv, x, EDGES), first)
    torch.manual_seed(12)
    assert not torch.equal(passes(conv, x, EDGES)["out"], first["out"])

    conv.eval()
    nearest = QGCNConv(K, M, config=QConfig(granularity=granularity, rounding="nearest"))
    nearest.load_state_dict(conv.state_dict())
    state = torch.get_rng_state()
    evaluated = passes(conv, x, EDGES)
    assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn
    assert_equal_pass(passes(conv, x, EDGES), evaluated)
    assert_equal_pass(passes(nearest, x, EDGES), evaluated)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quantized_gcn_conv_keeps_a_half_type(dtype: torch.dtype) -> None:
    conv = QGCNConv(K, M, config=QConfig(rounding="nearest"))
    x = torch.randn(N, K)
    weight = (torch.rand(EDGES.shape[1]) + 0.1).requires_grad_()
    expected = passes(exact_layer(conv), x, EDGES, weight, extra=(weight,))
    actual = passes(conv.to(dtype), x.to(dtype), EDGES, weight, extra=(weight,))
    for name, value in expected.items():
        assert actual[name].dtype == (torch.float32 if name == "dextra0" else dtype), name
        # int8 noise as measured above (below 1.8%), and the type's own rounding of operands and result
        assert relative_error(actual[name].float(), value) < 0.018 + 4 * torch.finfo(dtype).eps, name


def test_trace_shows_int8_forward_and_backward() -> None:
    conv = QGCNConv(K, M)
    weight = torch.rand(EDGES.shape[1], requires_grad=True)
    with trace() as record:
        conv(torch.randn(N, K, requires_grad=True), EDGES, weight).sum().backward()
    products = ("matmul.forward", "matmul.backward_dx", "matmul.backward_dw", "spmm.forward", "spmm.backward")
    for name in (*products, "sddmm.backward"):
        assert record.ops[name]["calls"] == 1, name
        assert record.ops[name]["format"] == "int8", name
        assert record.ops[name]["bytes"] > 0, name
    assert record.ops["quantize.forward"]["calls"] == 2  # x and the weight; hidden rows leave the product as codes
    assert record.ops["quantize.backward"]["calls"] == 2  # the gradient and the transposed weight
    assert 0 < record.ops["quantize.forward"]["error"] < 0.02
    assert record.ops.keys() == {*products, "sddmm.backward", "quantize.forward", "quantize.backward"}


def test_trace_shows_the_width_of_codes() -> None:
    with trace() as record:
        QGCNConv(K, M, config=QConfig(bits=4))(torch.randn(N, K, requires_grad=True), EDGES).sum().backward()
    assert {op["format"] for op in record.ops.values()} == {"int4"}


def test_trace_shows_full_precision_without_config() -> None:
    with trace() as record:
        QGCNConv(K, M, config=None)(torch.randn(N, K, requires_grad=True), EDGES).sum().backward()
    assert {op["format"] for op in record.ops.values()} == {"float32"}
    assert {"matmul.forward", "spmm.forward", "spmm.backward"} <= record.ops.keys()


def test_backward_computes_only_what_is_asked_for() -> None:
    conv = QGCNConv(K, M)
    with trace() as record:
        conv(torch.randn(N, K), EDGES).sum().backward()
    assert "matmul.backward_dx" not in record.ops
    assert "sddmm.backward" not in record.ops
    conv.zero_grad()
    conv.requires_grad_(False)
    x = torch.randn(N, K, requires_grad=True)
    with trace() as record:
        conv(x, EDGES).sum().backward()
    assert "matmul.backward_dw" not in record.ops
    assert x.grad is not None
    assert conv.lin.weight.grad is None
    with trace() as record, torch.no_grad():
        conv(x, EDGES)
    assert not any("backward" in name for name in record.ops)


def test_int8_keeps_fewer_bytes_than_pyg() -> None:
    edge_index, num_nodes = GRAPHS["power_law"]
    graph_bytes = 4 * (2 * (num_nodes + 1) + 5 * 2 * (edge_index.shape[1] + num_nodes))  # both orders and their weights
    num_features = 256
    x = torch.randn(num_nodes, num_features)
    conv = QGCNConv(num_features, M)
    theirs = exact_layer(conv)
    exact = QGCNConv(num_features, M, config=None)
    kept = {
        layer: kept_bytes(lambda layer=layer: layer(x, edge_index), ignore=tuple(layer.parameters()))
        for layer in (conv, theirs, exact)
    }
    codes = num_nodes * (num_features + 4)  # a byte a value, a scale a row
    assert codes <= kept[conv] <= codes + graph_bytes + 8
    assert kept[exact] >= x.nbytes
    assert kept[conv] < 0.5 * kept[theirs]
    assert kept[conv] < 0.5 * kept[exact]


def test_saving_fp32_keeps_x_itself_and_a_more_exact_gradient() -> None:
    x = torch.randn(N, 256)
    kept, error = {}, {}
    for save in ("int8", "fp32"):
        torch.manual_seed(1)
        conv = QGCNConv(256, M, config=QConfig(bits=4, save=save, rounding="nearest"))
        kept[save] = kept_bytes(lambda conv=conv: conv(x, EDGES), ignore=(*conv.parameters(), EDGES))
        error[save] = relative_error(
            passes(conv, x, EDGES)["dlin.weight"], passes(exact_layer(conv), x, EDGES)["dlin.weight"]
        )
    assert kept["fp32"] - kept["int8"] == 3 * x.numel() - 4 * N
    assert error["fp32"] < 0.95 * error["int8"]


def test_an_eval_pass_without_gradients_keeps_nothing() -> None:
    conv = QGCNConv(K, M).eval()
    with torch.no_grad():
        out = conv(torch.randn(N, K), EDGES)
    assert out.grad_fn is None
    with torch.inference_mode():
        assert torch.equal(conv(torch.ones(N, K), EDGES), conv(torch.ones(N, K), EDGES))


def planted_graph(num_classes: int = 4, per_class: int = 40) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features, edges, labels, training mask: mostly edges within classes, features that barely tell them apart."""
    generator = torch.Generator().manual_seed(5)
    num_nodes = num_classes * per_class
    y = torch.arange(num_classes).repeat_interleave(per_class)
    rate = torch.where(y[:, None] == y[None, :], 0.12, 0.01)
    edge_index = torch.bernoulli(rate, generator=generator).triu(1).nonzero().t()
    edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    means = torch.randn(num_classes, K, generator=generator)
    x = 0.7 * means[y] + torch.randn(num_nodes, K, generator=generator)
    train = torch.rand(num_nodes, generator=generator) < 0.3
    return x, edge_index, y, train


class TwoLayers(nn.Module):
    def __init__(self, layer: type, **options: Any) -> None:
        super().__init__()
        self.conv1 = layer(K, 16, **options)
        self.conv2 = layer(16, 4, **options)

    def forward(self, x: Tensor, edges: Tensor | Graph) -> Tensor:
        return self.conv2(F.dropout(self.conv1(x, edges).relu(), training=self.training), edges)


def trained(model: nn.Module, x: Any, edges: Any, y: Tensor, train: Tensor, epochs: int = 60) -> float:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=1e-3)
    for _ in range(epochs):
        optimizer.zero_grad()
        F.cross_entropy(model(x, edges)[train], y[train]).backward()
        optimizer.step()
    with torch.no_grad():
        return (model.eval()(x, edges).argmax(1) == y)[~train].float().mean().item()


def test_training_in_int8_reaches_the_accuracy_of_pyg() -> None:
    x, edge_index, y, train = planted_graph()
    torch.manual_seed(0)
    theirs = trained(TwoLayers(GCNConv), x, edge_index, y, train)
    torch.manual_seed(0)
    ours = trained(TwoLayers(QGCNConv), x, edge_index, y, train)
    graph, features = Graph.from_edge_index(edge_index, len(y)), functional.quantize(x, QConfig())
    torch.manual_seed(0)
    constant_features = trained(TwoLayers(QGCNConv), features, graph, y, train)
    assert theirs > 0.85  # the graph is needed for that: features alone give about 0.8
    assert ours > theirs - 0.03  # 3 of 112 nodes
    assert constant_features > theirs - 0.03


def test_two_runs_with_one_seed_are_bit_equal() -> None:
    x, edge_index, y, train = planted_graph()
    states = []
    for seed in (4, 4, 5):
        torch.manual_seed(seed)
        model = TwoLayers(QGCNConv)
        trained(model, x, edge_index.clone(), y, train, epochs=5)
        states.append(torch.cat([value.flatten() for value in model.state_dict().values()]))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
