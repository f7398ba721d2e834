"""Graph: both sort orders against dense algebra, every accepted form of edges, bad input, copies."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor

from dense import CASES, adjacency, adjacency_of, graph_of
from graphs import GRAPHS
from qgnn import Graph, edge_checks
from qgnn import graph as graph_module
from qgnn.adjacency import Adjacency
from qgnn.graph import as_graph

TRIANGLE = torch.tensor([[0, 1, 2], [1, 2, 0]])


def dense_of(adjacency_: Adjacency, num_columns: int, weight: Tensor | None = None) -> Tensor:
    """Row by row, from ``indptr`` and ``index`` alone."""
    matrix = torch.zeros(adjacency_.num_rows, num_columns, dtype=torch.float64)
    for row in range(adjacency_.num_rows):
        for edge in range(int(adjacency_.indptr[row]), int(adjacency_.indptr[row + 1])):
            matrix[row, int(adjacency_.index[edge])] += 1 if weight is None else weight[edge]
    return matrix


# --- the two orders


@pytest.mark.parametrize("name", CASES)
def test_graph_is_the_dense_matrix_in_both_orders(name: str) -> None:
    edge_index, num_sources, num_targets = CASES[name]
    weight = torch.randn(edge_index.shape[1])
    graph = Graph.from_edge_index(edge_index, (num_sources, num_targets), weight)
    expected = adjacency(edge_index, num_sources, num_targets, weight)
    assert (graph.num_sources, graph.num_targets, graph.num_edges) == (num_sources, num_targets, edge_index.shape[1])
    torch.testing.assert_close(dense_of(graph.csr, num_sources, graph.weight), expected)
    torch.testing.assert_close(dense_of(graph.csc, num_targets, graph.weight_t), expected.t())
    torch.testing.assert_close(dense_of(graph.csr, num_sources), adjacency(edge_index, num_sources, num_targets))
    assert graph.csr.indptr.shape == (num_targets + 1,)
    assert graph.csc.indptr.shape == (num_sources + 1,)


@pytest.mark.parametrize("name", CASES)
def test_graph_permutations(name: str) -> None:
    edge_index = CASES[name][0]
    graph = graph_of(name)
    assert torch.equal(graph.edge_index(), edge_index[:, graph.csr.order.long()])
    assert torch.equal(graph.csr.order.sort().values.long(), torch.arange(graph.num_edges))
    target_in_csr = graph.edge_index()[1]
    assert torch.equal(graph.csc.index.long(), target_in_csr[graph.csc.order.long()])
    values = torch.randn(graph.num_edges, requires_grad=True)
    in_csr = graph.to_csr_order(values)
    assert torch.equal(in_csr, values[graph.csr.order.long()])
    upstream = torch.randn(graph.num_edges)
    (grad,) = torch.autograd.grad(in_csr, values, upstream)
    assert torch.equal(grad[graph.csr.order.long()], upstream)


def test_edges_of_a_row_keep_their_order() -> None:
    """So that sums come out the same from run to run."""
    graph = graph_of("hub")
    for sorted_edges in (graph.csr, graph.csc):
        order = sorted_edges.order.long()
        for row in range(sorted_edges.num_rows):
            of_row = order[sorted_edges.indptr[row] : sorted_edges.indptr[row + 1]]
            assert (of_row.diff() > 0).all()


def test_multi_edges_and_self_loops_are_kept() -> None:
    assert graph_of("one_pair").num_edges == 40
    assert graph_of("duplicates").num_edges == 60
    assert adjacency_of(graph_of("one_pair"))[1, 3] == 40
    assert graph_of("only_loops").num_edges == 9


@pytest.mark.parametrize("name", CASES)
def test_mean_factor(name: str) -> None:
    edge_index, _, num_targets = CASES[name]
    degree = torch.bincount(edge_index[1], minlength=num_targets)
    assert torch.equal(graph_of(name).mean_factor, 1 / degree.clamp_min(1).float())


# --- index types


def test_indices_are_int32_where_they_fit() -> None:
    for dtype in (torch.int64, torch.int32):
        graph = Graph.from_edge_index(TRIANGLE.to(dtype), 3)
        for part in (graph.csr, graph.csc):
            assert {part.indptr.dtype, part.index.dtype, part.order.dtype} == {torch.int32}
    assert graph.edge_index().dtype == torch.int64


@pytest.mark.parametrize("given", [torch.int64, torch.int32])
@pytest.mark.parametrize(("num_nodes", "num_edges"), [(11, 4), (4, 11), ((11, 3), 4), ((3, 11), 4)], ids=str)
def test_indices_are_int64_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch, num_nodes: int | tuple[int, int], num_edges: int, given: torch.dtype
) -> None:
    """Nodes of either side or edges may be too many; a limit of its own stands in for that of int32."""
    edge_index = torch.randint(3, (2, num_edges), dtype=given)
    monkeypatch.setattr(edge_checks, "INT32_SIZES", 10)
    graph = Graph.from_edge_index(edge_index, num_nodes)
    for part in (graph.csr, graph.csc):
        assert {part.indptr.dtype, part.index.dtype, part.order.dtype} == {torch.int64}
    monkeypatch.setattr(edge_checks, "INT32_SIZES", 11)
    assert Graph.from_edge_index(edge_index, num_nodes).csr.index.dtype == torch.int32


# --- forms of edges


WEIGHTED = torch.tensor([[0.0, 2, 0], [0, 0, 3], [4, 0, 0]])  # a row for each target


@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_graph_from_a_sparse_matrix(layout: str) -> None:
    """Rows are targets, as in PyG."""
    matrix = getattr(WEIGHTED, {"coo": "to_sparse", "csr": "to_sparse_csr", "csc": "to_sparse_csc"}[layout])()
    graph = Graph.from_adjacency(matrix, 3)
    assert torch.equal(dense_of(graph.csr, 3, graph.weight), WEIGHTED.double())
    assert torch.equal(as_graph(matrix, 3).weight, graph.weight)


@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_graph_from_a_rectangular_sparse_matrix(layout: str) -> None:
    wide = torch.cat([WEIGHTED, torch.eye(3)], dim=1)
    matrix = getattr(wide, {"coo": "to_sparse", "csr": "to_sparse_csr", "csc": "to_sparse_csc"}[layout])()
    graph = Graph.from_adjacency(matrix, (6, 3))
    assert torch.equal(dense_of(graph.csr, 6, graph.weight), wide.double())


def test_graph_from_edge_index_objects() -> None:
    edge_index, num_nodes = GRAPHS["power_law"]
    plain = graph_of("power_law")
    for sort in (None, "row", "col"):
        given = EdgeIndex(edge_index, sparse_size=(num_nodes, num_nodes))
        if sort is not None:
            given = given.sort_by(sort).values
        graph = Graph.from_edge_index(given, num_nodes)
        assert torch.equal(adjacency_of(graph), adjacency_of(plain))
        assert type(graph.csr.index) is Tensor


@pytest.mark.skipif(not WITH_TORCH_SPARSE, reason="torch_sparse is not installed")
def test_graph_from_torch_sparse() -> None:
    graph = Graph.from_adjacency(SparseTensor.from_dense(WEIGHTED), 3)
    assert torch.equal(dense_of(graph.csr, 3, graph.weight), WEIGHTED.double())


class StandInStorage:
    def __init__(self, col: Tensor, value: Tensor | None) -> None:
        self._col, self._value = col, value

    def col(self) -> Tensor:
        return self._col

    def rowptr(self) -> Tensor:
        return self._col  # only its identity counts

    def value(self) -> Tensor | None:
        return self._value


class StandInSparseTensor:
    """What is used of ``torch_sparse.SparseTensor``: ``storage`` for the cache, ``coo()`` for the edges."""

    def __init__(self, row: Tensor, col: Tensor, value: Tensor | None = None) -> None:
        self.row = row
        self.storage = StandInStorage(col, value)

    def coo(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.row, self.storage.col(), self.storage.value()


@pytest.mark.parametrize("has_value", [False, True])
def test_graph_from_torch_sparse_stand_in(monkeypatch: pytest.MonkeyPatch, has_value: bool) -> None:
    """The same path without that package."""
    import torch_geometric.utils.sparse as pyg_sparse

    monkeypatch.setattr(graph_module, "SparseTensor", StandInSparseTensor)
    monkeypatch.setattr(pyg_sparse, "SparseTensor", StandInSparseTensor)
    value = torch.tensor([1.0, 2, 3]) if has_value else None
    matrix = StandInSparseTensor(torch.tensor([0, 0, 1]), torch.tensor([1, 2, 0]), value)
    graph = as_graph(matrix, 3)
    weights = [1.0, 2, 3] if has_value else [1.0, 1, 1]
    expected = torch.tensor([[0, weights[0], weights[1]], [weights[2], 0, 0], [0, 0, 0]]).double()
    assert torch.equal(adjacency_of(graph, graph.weight), expected)
    assert as_graph(matrix, 3) is graph


def test_graph_from_a_graph() -> None:
    graph = graph_of("random")
    assert Graph.from_adjacency(graph, 50) is graph
    assert as_graph(graph, 50) is graph
    edge_index = GRAPHS["random"][0]
    weight = torch.rand(edge_index.shape[1])
    weighted = Graph.from_adjacency(graph, 50, weight)
    assert torch.equal(adjacency_of(weighted, weighted.weight), adjacency(edge_index, 50, 50, weight))
    assert graph.weight is None


@pytest.mark.parametrize("shape", [(3,), (3, 1)], ids=str)
def test_edge_weight_shapes(shape: tuple[int, ...]) -> None:
    weight = torch.tensor([1.0, 2, 3]).reshape(shape)
    graph = Graph.from_edge_index(TRIANGLE, 3, weight)
    assert graph.weight.tolist() == [3.0, 1, 2]  # by target: the edges 2 -> 0, 0 -> 1, 1 -> 2
    assert graph.weight_t.tolist() == [1.0, 2, 3]


def test_weights_that_need_a_gradient_do_not_belong_into_a_graph() -> None:
    with pytest.raises(ValueError, match=r"expects constant edge weights .* give them to the layer or function"):
        Graph.from_edge_index(TRIANGLE, 3, torch.ones(3, requires_grad=True))


def test_unweighted_graph_has_no_weights() -> None:
    graph = Graph.from_edge_index(TRIANGLE, 3)
    assert graph.weight is None
    assert graph.weight_t is None
    weighted = graph.with_weight(torch.arange(3.0))
    assert torch.equal(weighted.weight, torch.arange(3.0))
    assert weighted.csr is graph.csr
    assert weighted.with_weight(None).weight_t is None


def test_building_a_graph_leaves_the_edges_alone() -> None:
    edge_index, weight = GRAPHS["power_law"][0].clone(), torch.rand(700)
    before = edge_index.clone(), weight.clone()
    graph = Graph.from_edge_index(edge_index, 160, weight)
    graph.csc  # noqa: B018
    assert torch.equal(edge_index, before[0])
    assert torch.equal(weight, before[1])
    assert edge_index._version == weight._version == 0


# --- bad input

BAD_EDGES = {
    "float": (torch.tensor([[], []]), 3, ValueError, r"'edge_index' expects torch.int64 .*\(got torch.float32\)"),
    "bool": (torch.ones(2, 3, dtype=torch.bool), 3, ValueError, r"\(got torch.bool\)"),
    "transposed": (TRIANGLE.t(), 3, ValueError, r"the shape \[2, E\] \(got \[3, 2\]\); it looks transposed: pass"),
    "one_row": (torch.zeros(1, 4, dtype=torch.int64), 3, ValueError, r"\[2, E\] \(got \[1, 4\]\)$"),
    "flat": (torch.zeros(4, dtype=torch.int64), 3, ValueError, r"\[2, E\] \(got \[4\]\)"),
    "target_out": (TRIANGLE, (3, 2), ValueError, r"target indices from 0 to 1 \(got 2\); check that 'x' has a row"),
    "source_out": (TRIANGLE, (2, 3), ValueError, r"source indices from 0 to 1 \(got 2\)"),
    "negative": (TRIANGLE - 1, 3, ValueError, r"source indices from 0 to 2 \(got -1\)"),
    "far_negative": (torch.tensor([[0], [-(2**40)]]), 3, ValueError, r"target indices from 0 to 2 \(got -1099"),
    "beyond_int32": (torch.tensor([[0], [2**32]]), 3, ValueError, r"target indices from 0 to 2 \(got 4294967296\)"),
    "no_nodes": (torch.tensor([[0], [0]]), 0, ValueError, r"source indices .*\(got 0\)"),
    "list": ([[0, 1], [1, 0]], 2, TypeError, r"a tensor, EdgeIndex, sparse matrix or Graph \(got list\)"),
    "none": (None, 2, TypeError, r"\(got NoneType\)"),
    "numpy": (np.zeros((2, 3), dtype=np.int64), 2, TypeError, r"\(got ndarray\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_EDGES)
@pytest.mark.parametrize("build", [Graph.from_edge_index, Graph.from_adjacency, as_graph])
def test_bad_edges_are_rejected(name: str, build) -> None:
    edges, num_nodes, error, message = BAD_EDGES[name]
    with pytest.raises(error, match=message):
        build(edges, num_nodes)


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (torch.ones(4), ValueError, r"'edge_weight' expects one value an edge, \[3\] \(got \[4\]\)"),
        (torch.ones(2), ValueError, r"\[3\] \(got \[2\]\)"),
        (torch.ones(1), ValueError, r"\[3\] \(got \[1\]\)"),
        (torch.ones(3, 2), ValueError, r"\[3\] \(got \[3, 2\]\)"),
        (torch.ones(1, 3), ValueError, r"\[3\] \(got \[1, 3\]\)"),
        (torch.tensor(1.0), ValueError, r"\[3\] \(got \[\]\)"),
        (torch.ones(3, dtype=torch.int64), ValueError, r"'edge_weight' expects a floating-point tensor \(got"),
        ([1.0, 2.0, 3.0], TypeError, r"'edge_weight' expects .*tensor \(got list\)"),
    ],
    ids=["long", "short", "one", "wide", "row", "scalar", "integer", "list"],
)  # fmt: skip
@pytest.mark.parametrize("form", ["edge_index", "graph"])
def test_bad_weights_are_rejected(weight: object, error: type[Exception], message: str, form: str) -> None:
    edges = TRIANGLE if form == "edge_index" else Graph.from_edge_index(TRIANGLE, 3)
    with pytest.raises(error, match=message):
        Graph.from_adjacency(edges, 3, weight)


@pytest.mark.parametrize("num_nodes", [3.0, "3", None, -1, (3,), (3, 3, 3), (3, -1), torch.ones(2)], ids=str)
def test_bad_numbers_of_nodes_are_rejected(num_nodes: object) -> None:
    with pytest.raises((TypeError, ValueError), match="'num_nodes' expects"):
        Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), num_nodes)


@pytest.mark.parametrize("num_nodes", [np.int64(3), torch.tensor(3)], ids=["numpy", "tensor"])
def test_integer_likes_are_numbers_of_nodes(num_nodes: object) -> None:
    assert Graph.from_edge_index(TRIANGLE, num_nodes).num_targets == 3


def test_a_graph_must_fit_the_nodes() -> None:
    graph = Graph.from_edge_index(TRIANGLE, (4, 3))
    assert as_graph(graph, (4, 3)) is graph
    with pytest.raises(ValueError, match=r"'graph' has 4 source and 3 target nodes \(expected 5 and 5, from 'x'\)"):
        as_graph(graph, 5)
    with pytest.raises(ValueError, match="expected 4 and 4"):
        as_graph(graph, 4)
    with pytest.raises(ValueError, match=r"from 0 to 1 \(got 2\)"):
        as_graph(TRIANGLE, 2)


# --- moving, printing, copying


def test_graph_repr() -> None:
    assert repr(graph_of("random")) == "Graph(50 -> 50 nodes, 200 edges)"
    assert repr(Graph.from_edge_index(TRIANGLE, (4, 3), torch.ones(3))) == "Graph(4 -> 3 nodes, 3 edges, weighted)"


@pytest.mark.parametrize("uses_csc", [False, True])
@pytest.mark.parametrize("way", ["to", "deepcopy", "pickle"])
def test_graph_copies(way: str, uses_csc: bool, device: str) -> None:
    edge_index = GRAPHS["power_law"][0]
    graph = Graph.from_edge_index(edge_index, 160, torch.rand(700))
    if uses_csc:
        graph.weight_t, graph.mean_factor  # noqa: B018
    copies = {
        "to": lambda: graph.to(device),
        "deepcopy": lambda: copy.deepcopy(graph),
        "pickle": lambda: pickle.loads(pickle.dumps(graph)),
    }
    other = copies[way]()
    for ours, theirs in (
        (graph.csr.indptr, other.csr.indptr),
        (graph.csr.index, other.csr.index),
        (graph.csr.order, other.csr.order),
        (graph.csc.index, other.csc.index),
        (graph.csc.order, other.csc.order),
        (graph.weight, other.weight),
        (graph.weight_t, other.weight_t),
        (graph.mean_factor, other.mean_factor),
    ):
        assert torch.equal(ours, theirs.cpu())
    assert other.device.type == (device if way == "to" else "cpu")
    assert repr(other) == repr(graph)


def test_orders_of_edges_are_inverse_and_differentiable() -> None:
    edge_index = GRAPHS["power_law"][0]
    graph = Graph.from_edge_index(edge_index, 160)
    values = torch.randn(700, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(graph.to_given_order(graph.edge_index().t()), edge_index.t())
    assert torch.equal(graph.to_csr_order(edge_index.t()), graph.edge_index().t())
    assert torch.equal(graph.to_given_order(graph.to_csr_order(values)), values)
    upstream = torch.randn_like(values)
    for moved, back in ((graph.to_csr_order, graph.to_given_order), (graph.to_given_order, graph.to_csr_order)):
        (grad,) = torch.autograd.grad(moved(values), values, upstream)
        assert torch.equal(grad, back(upstream))
        few = Graph.from_edge_index(edge_index[:, :9], 160)
        move = few.to_csr_order if moved == graph.to_csr_order else few.to_given_order
        assert torch.autograd.gradgradcheck(move, values.detach()[:9].requires_grad_())
