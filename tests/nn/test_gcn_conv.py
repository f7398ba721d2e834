"""QGCNConv without quantization is PyG's GCNConv: outputs and every gradient, on every graph, in every form."""

import copy
import itertools
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import GCNConv

from graphs import GRAPHS
from layer_cases import assert_equal_pass, assert_same_pass, passes
from qgnn import Graph
from qgnn.nn import QGCNConv
from qgnn.nn.gcn_norm import GCNStructure

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "improved": {"improved": True},
    "no_normalize": {"normalize": False},
    "no_self_loops": {"add_self_loops": False},
    "no_bias": {"bias": False},
    "mean": {"aggr": "mean"},
    "reversed": {"flow": "target_to_source"},
}
WEIGHTS = ("none", "constant", "learnable")
K, M = 7, 33


@cache  # PyG renders and compiles a template for each new layer
def pair(**options: Any) -> tuple[GCNConv, QGCNConv]:
    """PyG's layer and ours with equal parameters, the bias not zero. Shared: tests leave the parameters alone."""
    torch.manual_seed(1)
    theirs = GCNConv(K, M, **options)
    if theirs.bias is not None:
        torch.nn.init.normal_(theirs.bias)
    ours = QGCNConv(K, M, **options, config=None)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def edge_weights(edge_index: Tensor, kind: str) -> Tensor | None:
    if kind == "none":
        return None
    return (torch.rand(edge_index.shape[1]) + 0.1).requires_grad_(kind == "learnable")


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", GRAPHS)
def test_gcn_conv_equals_pyg(name: str, options: str) -> None:
    edge_index, num_nodes = GRAPHS[name]
    x = torch.randn(num_nodes, K)
    for kind in WEIGHTS:
        theirs, ours = pair(**OPTIONS[options])
        weight = edge_weights(edge_index, kind)
        extra = (weight,) if kind == "learnable" else ()
        expected = passes(theirs, x, edge_index, weight, extra=extra)
        assert all(value.isfinite().all() for value in expected.values())
        assert_same_pass(passes(ours, x, edge_index, weight, extra=extra), expected)


def test_gcn_conv_equals_pyg_with_both_options_of_self_loops() -> None:
    edge_index, num_nodes = GRAPHS["self_loops"]
    x = torch.randn(num_nodes, K)
    for improved, loops, aggr, flow in itertools.product(
        (True, False), (True, False), ("add", "sum", "mean"), ("source_to_target", "target_to_source")
    ):
        theirs, ours = pair(improved=improved, add_self_loops=loops, aggr=aggr, flow=flow)
        weight = edge_weights(edge_index, "learnable")
        expected = passes(theirs, x, edge_index, weight, extra=(weight,))
        assert_same_pass(passes(ours, x, edge_index, weight, extra=(weight,)), expected)


def without_duplicates(name: str, loops: bool = True) -> tuple[Tensor, int]:
    """Edges in the order of a matrix with a row for each target; PyG's sparse products would merge duplicates."""
    edge_index, num_nodes = GRAPHS[name]
    edge_index = torch.unique(edge_index.flip(0), dim=1).flip(0)
    return edge_index if loops else edge_index[:, edge_index[0] != edge_index[1]], num_nodes


def as_matrix(form: str, edge_index: Tensor, num_nodes: int, value: Tensor) -> Tensor:
    coo = torch.sparse_coo_tensor(edge_index.flip(0), value, (num_nodes, num_nodes)).coalesce()
    return coo if form == "coo" else coo.to_sparse_csr()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:Converting sparse tensor to CSR")
@pytest.mark.parametrize("options", ["default", "improved", "no_normalize", "no_self_loops", "mean"])
@pytest.mark.parametrize("form", ["coo", "csr"])
def test_gcn_conv_equals_pyg_on_sparse_matrices(form: str, options: str) -> None:
    theirs, ours = pair(**OPTIONS[options])
    for name, weighted in itertools.product(("random", "self_loops", "isolated"), (False, True)):
        edge_index, num_nodes = without_duplicates(name)
        value = torch.rand(edge_index.shape[1]) + 0.1 if weighted else torch.ones(edge_index.shape[1])
        matrix = as_matrix(form, edge_index, num_nodes, value)
        x = torch.randn(num_nodes, K)
        assert_same_pass(passes(ours, x, matrix), passes(theirs, x, matrix))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_gcn_conv_gives_a_gradient_to_the_values_of_a_sparse_matrix() -> None:
    edge_index, num_nodes = without_duplicates("random", loops=False)
    x = torch.randn(num_nodes, K)
    theirs, ours = pair()
    weight = edge_weights(edge_index, "learnable")
    expected = passes(theirs, x, edge_index, weight, extra=(weight,))
    # not COO: torch has no derivative through one that is coalesced twice, here as in PyG's layer
    matrix = as_matrix("csr", edge_index, num_nodes, weight)
    assert_same_pass(passes(ours, x, matrix, extra=(weight,)), expected)


def test_gcn_conv_equals_pyg_on_a_torch_sparse_matrix() -> None:
    torch_sparse = pytest.importorskip("torch_sparse")
    edge_index, num_nodes = without_duplicates("self_loops")
    for options, weighted in itertools.product(("default", "no_normalize", "no_self_loops"), (False, True)):
        theirs, ours = pair(**OPTIONS[options])
        value = torch.rand(edge_index.shape[1]) + 0.1 if weighted else None
        matrix = torch_sparse.SparseTensor(
            row=edge_index[1], col=edge_index[0], value=value, sparse_sizes=(num_nodes, num_nodes)
        )
        x = torch.randn(num_nodes, K)
        assert_same_pass(passes(ours, x, matrix), passes(theirs, x, matrix))


@pytest.mark.parametrize("sort_order", [None, "row", "col"])
def test_gcn_conv_takes_an_edge_index_object(sort_order: str | None) -> None:
    edge_index, num_nodes = GRAPHS["power_law"]
    if sort_order is not None:
        by = edge_index[0] if sort_order == "row" else edge_index[1]
        edge_index = edge_index[:, torch.argsort(by, stable=True)]
    typed = EdgeIndex(edge_index, sparse_size=(num_nodes, num_nodes), sort_order=sort_order)
    x = torch.randn(num_nodes, K)
    theirs, ours = pair()
    weight = edge_weights(edge_index, "learnable")
    for given, extra in ((None, ()), (weight.detach(), ()), (weight, (weight,))):
        expected = passes(theirs, x, edge_index, given, extra=extra)
        assert_same_pass(passes(ours, x, typed, given, extra=extra), expected)


@pytest.mark.parametrize("options", ["default", "no_normalize", "mean"])
def test_gcn_conv_takes_a_graph(options: str) -> None:
    edge_index, num_nodes = GRAPHS["power_law"]
    x = torch.randn(num_nodes, K)
    theirs, ours = pair(**OPTIONS[options])
    constant = torch.rand(edge_index.shape[1]) + 0.1
    for weight in (None, constant):
        graph = Graph.from_edge_index(edge_index, num_nodes, weight)
        assert_same_pass(passes(ours, x, graph), passes(theirs, x, edge_index, weight))


def test_gcn_conv_takes_a_graph_and_learnable_weights_in_the_order_of_its_edges() -> None:
    edge_index, num_nodes = GRAPHS["random"]
    x = torch.randn(num_nodes, K)
    theirs, ours = pair()
    weight = edge_weights(edge_index, "learnable")
    expected = passes(theirs, x, edge_index, weight, extra=(weight,))
    graph = Graph.from_edge_index(edge_index, num_nodes)
    assert_same_pass(passes(ours, x, graph, weight, extra=(weight,)), expected)


def test_gcn_conv_equals_pyg_in_float64() -> None:
    for name, kind in itertools.product(("hub", "power_law", "isolated"), WEIGHTS):
        edge_index, num_nodes = GRAPHS[name]
        weight = edge_weights(edge_index, kind)
        if weight is not None:
            weight = weight.detach().double().requires_grad_(kind == "learnable")
        extra = (weight,) if kind == "learnable" else ()
        theirs, ours = (copy.deepcopy(layer).double() for layer in pair())
        x = torch.randn(num_nodes, K, dtype=torch.float64)
        expected = passes(theirs, x, edge_index, weight, extra=extra)
        assert_same_pass(passes(ours, x, edge_index, weight, extra=extra), expected, rel=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_gcn_conv_keeps_a_half_type(dtype: torch.dtype, kind: str) -> None:
    edge_index, num_nodes = GRAPHS["power_law"]
    x = torch.randn(num_nodes, K)
    theirs, ours = pair()
    weight = edge_weights(edge_index, kind)  # fp32 on purpose
    extra = (weight,) if kind == "learnable" else ()
    expected = passes(theirs, x, edge_index, weight, extra=extra)
    actual = passes(copy.deepcopy(ours).to(dtype), x.to(dtype), edge_index, weight, extra=extra)
    for name, value in actual.items():
        assert value.dtype == (torch.float32 if name.startswith("dextra") else dtype), name
    # x, weight, hidden rows, output: four roundings to the type, each a relative eps/2 of a term, terms all of one size
    bound = 8 * torch.finfo(dtype).eps
    for name, value in expected.items():
        error = (actual[name].float() - value).abs().amax() / value.abs().amax()
        assert error < bound, (name, error)


def test_gcn_conv_takes_two_graphs_in_turn() -> None:
    x = torch.randn(50, K)
    theirs, ours = pair()
    first = GRAPHS["random"][0].clone()
    second = first.flip(0).contiguous()
    for edge_index in (first, second, first):
        assert_same_pass(passes(ours, x, edge_index), passes(theirs, x, edge_index))


def test_gcn_conv_notices_edges_and_weights_changed_in_place() -> None:
    edge_index, num_nodes = GRAPHS["random"][0].clone(), GRAPHS["random"][1]
    weight = torch.rand(edge_index.shape[1])
    x = torch.randn(num_nodes, K)
    theirs, ours = pair()
    assert_same_pass(passes(ours, x, edge_index, weight), passes(theirs, x, edge_index, weight))
    weight[:100] *= 3
    assert_same_pass(passes(ours, x, edge_index, weight), passes(theirs, x, edge_index, weight))
    edge_index[0, :50] = 1
    assert_same_pass(passes(ours, x, edge_index, weight), passes(theirs, x, edge_index, weight))


def test_gcn_conv_prepares_a_graph_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    original = Graph.from_edge_index
    monkeypatch.setattr(Graph, "from_edge_index", staticmethod(lambda *a: built.append(1) or original(*a)))
    edge_index = GRAPHS["random"][0].clone()
    x = torch.randn(50, K)
    layers = [pair()[1] for _ in range(2)]
    results = [passes(layer, x, edge_index) for layer in layers for _ in range(3)]
    assert len(built) == 1  # layers share it
    assert_equal_pass(results[0], results[2])


def test_gcn_conv_normalizes_constant_weights_of_a_graph_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    original = GCNStructure.weighted
    monkeypatch.setattr(GCNStructure, "weighted", lambda *args: built.append(1) or original(*args))
    edge_index, num_nodes = GRAPHS["random"]
    graph, weight = Graph.from_edge_index(edge_index, num_nodes), torch.rand(edge_index.shape[1])
    _, ours = pair()
    for _ in range(3):
        ours(torch.randn(num_nodes, K), graph, weight)
    assert len(built) == 1


def test_gcn_conv_is_the_same_for_a_view_of_x() -> None:
    edge_index, num_nodes = GRAPHS["random"]
    wide = torch.randn(2 * num_nodes, 2 * K)
    _, ours = pair()
    for view in (
        wide[::2, ::2],
        wide[:num_nodes, :K],
        torch.randn(K, num_nodes).t(),
        wide[:1, :K].expand(num_nodes, K),
    ):
        assert_same_pass(passes(ours, view, edge_index), passes(ours, view.contiguous(), edge_index))
