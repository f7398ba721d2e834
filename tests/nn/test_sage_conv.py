"""QSAGEConv and QGraphConv: which products run, in which order, on which codes; what is kept; what falls to PyG."""

from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.nn import GraphConv, SAGEConv
from torch_geometric.nn.aggr import MeanAggregation

from graphs import GRAPHS
from layer_cases import assert_same_pass, assert_unbiased, kept_bytes, passes
from qgnn import Graph, QConfig, functional, trace
from qgnn.nn import Epilogue, QGraphConv, QSAGEConv

EDGES, N = GRAPHS["random"]
NEAREST = QConfig(rounding="nearest")


def calls(conv: nn.Module, x: Any, *args: Any) -> dict[str, int]:
    """How often each operation ran in int8, in one pass and back."""
    with trace() as record:
        conv(x, EDGES, *args).sum().backward()
    return {name: row["calls"] for name, row in record.ops.items() if row["format"] == "int8"}


@pytest.mark.parametrize("layer", [QSAGEConv, QGraphConv])
def test_the_product_comes_first_unless_it_widens_rows(layer: type) -> None:
    x = torch.randn(N, 48, requires_grad=True)
    narrow, wide = calls(layer(48, 48), x), calls(layer(48, 49), x)
    for ops in (narrow, wide):
        assert ops["spmm.forward"] == ops["spmm.backward"] == 1
        assert ops["matmul.forward"] == ops["matmul.backward_dx"] == ops["matmul.backward_dw"] == 2
    assert narrow["quantize.forward"] == 3  # x, once for both products, and two weights; hidden rows leave as codes
    assert wide["quantize.forward"] == 4  # and the sums


def test_rows_are_rounded_once_for_all_products() -> None:
    x = torch.randn(N, 48, requires_grad=True)
    assert calls(QSAGEConv(48, 16, project=True), x)["quantize.forward"] == 5  # x, three weights, projected rows
    assert calls(QSAGEConv(48, 16, aggr="max"), x)["quantize.forward"] == 4  # x, two weights, the maximum
    pair = (x, torch.randn(N, 48, requires_grad=True))
    assert calls(QSAGEConv(48, 16), pair)["quantize.forward"] == 4  # two tensors
    constant, conv = torch.randn(N, 48), QSAGEConv(48, 16)
    assert calls(conv, constant)["quantize.forward"] == 3
    assert calls(conv, constant)["quantize.forward"] == 2  # the weights; the features are remembered


def test_without_root_weight_the_epilogue_runs_in_the_last_kernel() -> None:
    x = torch.randn(N, 48)
    for out_channels in (16, 64):
        conv = QSAGEConv(48, out_channels, root_weight=False, config=NEAREST, epilogue=Epilogue("relu", dropout=0.5))
        exact = SAGEConv(48, out_channels, root_weight=False)
        exact.load_state_dict(conv.state_dict())
        graph = Graph.from_edge_index(EDGES, N)
        kept = kept_bytes(lambda conv=conv, graph=graph: conv(x, graph), ignore=(x, *conv.parameters()))
        conv.epilogue = None
        bare = kept_bytes(lambda conv=conv, graph=graph: conv(x, graph), ignore=(x, *conv.parameters()))
        assert 0 < kept - bare <= N * 8 * -(-out_channels // 64)  # a bit an element, rows in whole words
        conv.epilogue = Epilogue("relu", dropout=0.5)
        out, expected = conv(x, EDGES), exact(x, EDGES).relu()
        dropped = (out == 0) & (expected > 0.1)
        assert 0.4 < dropped.sum() / (expected > 0.1).sum() < 0.6  # 50 * 16 / 2 draws: 0.1 is four deviations
        assert ((out - 2 * expected)[~dropped & (expected > 0.1)].abs() < 0.04 * expected.abs().max() * 2).all()


def test_the_epilogue_comes_behind_the_sum_and_the_normalization() -> None:
    x = torch.randn(N, 48)
    conv = QSAGEConv(48, 16, normalize=True, config=NEAREST, epilogue=Epilogue("relu"))
    out = conv(x, EDGES)
    conv.epilogue = None
    assert torch.equal(out, conv(x, EDGES).relu())
    torch.testing.assert_close(conv(x, EDGES).norm(dim=1), torch.ones(N))


@pytest.mark.parametrize("aggr", ["max", "min"])
def test_a_maximum_of_codes_is_that_of_the_rounded_rows(aggr: str) -> None:
    """The gradient goes, unrounded by the layer's sum, to the row that was taken: only the product's error is left."""
    x = torch.randn(N, 64, requires_grad=True)
    for weight in (None, (torch.rand(EDGES.shape[1]) + 0.1).requires_grad_()):
        conv = QGraphConv(64, 32, aggr=aggr, config=NEAREST)
        theirs = GraphConv(64, 32, aggr=aggr)
        theirs.load_state_dict(conv.state_dict())
        rounded = functional.quantize(x.detach(), NEAREST).dequantize()
        extra = () if weight is None else (weight,)
        actual = passes(conv, x, EDGES, weight, extra=extra)
        expected = passes(theirs, rounded, EDGES, weight, extra=extra)
        for key, value in expected.items():
            # maximum, weights and gradient are rounded to steps of 1 % at most of a row's deviation
            error = (actual[key] - value).norm() / value.norm()
            assert error < 0.03, (key, error)


@pytest.mark.parametrize("out_channels", [4, 12])  # both orders
def test_quantized_sage_conv_is_unbiased(out_channels: int) -> None:
    edge_index, num_nodes = GRAPHS["isolated"]
    conv = QSAGEConv(6, out_channels, config=QConfig(bits=4))
    theirs = SAGEConv(6, out_channels).double()
    theirs.load_state_dict(conv.state_dict())
    x = torch.randn(num_nodes, 6)
    exact = passes(theirs, x.double(), edge_index)
    del exact["dlin_l.bias"]  # exact
    assert_unbiased(lambda: passes(conv, x, edge_index), exact, draws=150)


@pytest.mark.parametrize("out_channels", [32, 256])
def test_int8_keeps_fewer_bytes_than_pyg(out_channels: int) -> None:
    edge_index, num_nodes = GRAPHS["power_law"]
    x = torch.randn(num_nodes, 256, requires_grad=True)
    conv, theirs = QSAGEConv(256, out_channels), SAGEConv(256, out_channels)
    graph = Graph.from_edge_index(edge_index, num_nodes)
    graph_bytes = 4 * (2 * (num_nodes + 1) + 3 * edge_index.shape[1] + num_nodes)
    kept = kept_bytes(lambda: conv(x, graph), ignore=(x, *conv.parameters()))
    codes = num_nodes * (256 + 4)  # a byte a value, a scale a row, one copy for both products
    assert codes <= kept <= codes + graph_bytes + 2 * 8  # and a seed of each product
    assert kept_bytes(lambda: theirs(x, edge_index), ignore=(x, *theirs.parameters())) > 3 * codes


@pytest.mark.parametrize("aggr", ["lstm", ["mean", "max"], MeanAggregation()], ids=["lstm", "list", "module"])
def test_other_aggregations_run_on_the_path_of_pyg_and_say_so(aggr: Any) -> None:
    order = EDGES[1].argsort(stable=True)
    edge_index, x = EDGES[:, order], torch.randn(N, 5)
    theirs, conv = SAGEConv(5, 4, aggr), QSAGEConv(5, 4, aggr)
    conv.load_state_dict(theirs.state_dict())
    with trace() as record:
        actual = passes(conv, x, edge_index)
    assert_same_pass(actual, passes(theirs, x, edge_index))
    assert record.ops.keys() == {"messages.forward"}
    assert conv.note == f"aggregation {theirs.aggr!r} runs on PyG's path in full precision"
    assert QSAGEConv(5, 4).note is None


def test_graph_conv_takes_a_column_of_weights_and_remembers_their_order() -> None:
    x, weight = torch.randn(N, 5), torch.rand(EDGES.shape[1], 1)
    conv, theirs = QGraphConv(5, 4, config=None), GraphConv(5, 4)
    theirs.load_state_dict(conv.state_dict())
    expected = passes(theirs, x, EDGES, weight)
    assert_same_pass(passes(conv, x, EDGES, weight), expected)
    assert_same_pass(passes(conv, x, EDGES, weight.squeeze(1)), expected)
    weight.mul_(2)
    assert_same_pass(passes(conv, x, EDGES, weight), passes(theirs, x, EDGES, weight))


def test_graph_conv_says_which_weights_it_cannot_take() -> None:
    conv, x = QGraphConv(5, 4), torch.randn(N, 5)
    for weight in (torch.rand(EDGES.shape[1], 2), torch.rand(7)):
        with pytest.raises(ValueError, match=r"'edge_weight' expects one value an edge, \[200\] \(got \["):
            conv(x, EDGES, weight)
    graph = Graph.from_edge_index(EDGES, N, torch.rand(EDGES.shape[1]))
    with pytest.raises(ValueError, match="got 'edge_weight' and edges that have weights of their own; give one"):
        conv(x, graph, torch.rand(EDGES.shape[1]))


def test_a_change_of_class_is_all_that_a_layer_of_pyg_needs() -> None:
    conv = SAGEConv(48, 16, project=True)
    x = torch.randn(N, 48)
    expected = passes(conv, x, EDGES)
    conv.__class__ = QSAGEConv
    conv.configure(None)
    assert_same_pass(passes(conv, x, EDGES), expected)
    assert conv.note is None
