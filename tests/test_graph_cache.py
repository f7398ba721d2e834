"""The weak cache of prepared graphs: hits, what invalidates an entry, and what frees it."""

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing

from dense import adjacency, adjacency_of
from graphs import GRAPHS
from qgnn import Graph, weak_cache
from qgnn import graph as graph_module
from qgnn.functional import spmm
from qgnn.graph import as_graph
from qgnn.nn import QChebConv, QGCNConv, QGraphConv, QRGCNConv, QSGConv, sg_conv
from qgnn.weak_cache import _entries, cached


def fresh_edges() -> Tensor:
    return GRAPHS["random"][0].clone()


def entries_of(tensor: Tensor) -> dict:
    return _entries.get(tensor, {})


def test_the_same_tensor_gives_the_same_graph() -> None:
    edge_index = fresh_edges()
    graph = as_graph(edge_index, 50)
    assert as_graph(edge_index, 50) is graph
    assert as_graph(edge_index.clone(), 50) is not graph
    assert as_graph(edge_index, (50, 50)) is not graph
    assert as_graph(edge_index, 60).num_targets == 60
    assert as_graph(edge_index, 50) is graph


def test_a_view_of_the_same_memory_is_another_tensor() -> None:
    edge_index = fresh_edges()
    graph = as_graph(edge_index, 50)
    shorter = as_graph(edge_index[:, :20], 50)
    assert shorter.num_edges == 20
    assert as_graph(edge_index, 50) is graph


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_an_in_place_change_is_noticed(dtype: torch.dtype) -> None:
    edge_index = fresh_edges().to(dtype)
    old = as_graph(edge_index, 50)
    before = adjacency_of(old)
    edge_index[0, :] = 7
    new = as_graph(edge_index, 50)
    assert torch.equal(adjacency_of(new), adjacency(edge_index, 50, 50))
    assert torch.equal(adjacency_of(old), before)  # and the old graph holds its own edges
    assert len(entries_of(edge_index)) == 1
    assert as_graph(edge_index, 50) is new


def test_an_in_place_change_through_a_view_is_noticed() -> None:
    edge_index = fresh_edges()
    as_graph(edge_index, 50)
    edge_index[1].fill_(3)
    assert adjacency_of(as_graph(edge_index, 50))[3].sum() == 200


def test_changed_edges_are_checked_again() -> None:
    edge_index = fresh_edges()
    as_graph(edge_index, 50)
    edge_index[0, 0] = 50
    with pytest.raises(ValueError, match=r"from 0 to 49 \(got 50\)"):
        as_graph(edge_index, 50)


def test_a_change_of_the_tensor_inside_an_edge_index_object_is_noticed() -> None:
    edge_index = fresh_edges()
    edges = EdgeIndex(edge_index, sparse_size=(50, 50))
    as_graph(edges, 50)
    edge_index[1].fill_(3)
    assert adjacency_of(as_graph(edges, 50))[3].sum() == 200


def test_a_swap_of_the_data_is_noticed() -> None:
    """Assigning to ``.data`` leaves the version as it was."""
    edge_index = fresh_edges()
    as_graph(edge_index, 50)
    edge_index.data = torch.full((2, 200), 3)
    assert adjacency_of(as_graph(edge_index, 50))[3, 3] == 200


def test_swaps_to_where_the_data_were_are_noticed() -> None:
    """The first address is free behind one swap, and what comes next may get it."""
    for _ in range(20):
        edge_index = fresh_edges()
        as_graph(edge_index, 50)
        edge_index.data = torch.full((2, 200), 3)
        edge_index.data = torch.full((2, 200), 4)
        assert adjacency_of(as_graph(edge_index, 50))[4, 4] == 200


def test_edges_are_sorted_once_whatever_weights_come(monkeypatch: pytest.MonkeyPatch) -> None:
    sorts, sort_by = [], graph_module.sort_by
    monkeypatch.setattr(graph_module, "sort_by", lambda *args: sorts.append(1) or sort_by(*args))
    edge_index = fresh_edges()
    for requires_grad in (False, True, False):
        graph = as_graph(edge_index, 50, torch.rand(200, requires_grad=requires_grad))
        assert graph.csc is as_graph(edge_index, 50).csc
    assert len(sorts) == 2  # by target and by source


def test_an_entry_dies_with_its_tensor() -> None:
    edge_index = fresh_edges()
    gc.collect()  # of other tests' graphs, which may be cycles
    alive = len(_entries)
    graph = weakref.ref(as_graph(edge_index, 50))
    tensor = weakref.ref(edge_index)
    assert graph() is not None
    assert len(_entries) == alive + 1
    del edge_index
    gc.collect()
    assert tensor() is None
    assert graph() is None
    assert len(_entries) == alive


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_graph_does_not_keep_its_edges_alive(dtype: torch.dtype, weighted: bool) -> None:
    edge_index = fresh_edges().to(dtype)
    weight = torch.rand(200) if weighted else None
    graph = as_graph(edge_index, 50, weight)
    graph.csc  # noqa: B018
    pointers = {t.untyped_storage().data_ptr() for t in (edge_index, weight) if t is not None}
    kept = (graph.csr.indptr, graph.csr.index, graph.csr.order, graph.csc.index, *((graph.weight,) if weighted else ()))
    assert not pointers & {t.untyped_storage().data_ptr() for t in kept}
    tensor = weakref.ref(edge_index)
    del edge_index
    gc.collect()
    assert tensor() is None
    assert graph.num_edges == 200


def test_weights_are_part_of_the_key() -> None:
    edge_index, weight = fresh_edges(), torch.rand(200)
    graph = as_graph(edge_index, 50, weight)
    assert as_graph(edge_index, 50, weight).weight is graph.weight
    assert as_graph(edge_index, 50, weight).weight_t is graph.weight_t
    assert as_graph(edge_index, 50).weight is None
    other = torch.rand(200)
    assert torch.equal(as_graph(edge_index, 50, other).weight.sort().values, other.sort().values)
    assert as_graph(edge_index, 50, weight).weight is graph.weight


def test_changed_weights_are_noticed() -> None:
    edge_index, weight = fresh_edges(), torch.rand(200)
    as_graph(edge_index, 50, weight)
    weight.mul_(2)
    new = as_graph(edge_index, 50, weight)
    assert torch.equal(adjacency_of(new, new.weight), adjacency(edge_index, 50, 50, weight))


def test_a_successor_of_dead_weights_is_not_mistaken_for_them() -> None:
    """A new tensor may get the address of one that died."""
    edge_index = fresh_edges()
    for value in range(20):
        weight = torch.full((200,), float(value))
        assert (as_graph(edge_index, 50, weight).weight == value).all()
        del weight
    as_graph(edge_index, 50, torch.ones(200))
    assert len(entries_of(edge_index)) <= 3  # entries of dead weights go when others come


def test_weights_that_need_a_gradient_are_not_cached() -> None:
    edge_index, weight = fresh_edges(), torch.rand(200, requires_grad=True)
    first = as_graph(edge_index, 50, weight)
    assert as_graph(edge_index, 50, weight) is not first
    assert len(entries_of(edge_index)) == 1  # the edges alone
    assert first.weight.requires_grad


def test_sparse_values_that_need_a_gradient_are_not_cached() -> None:
    matrix = torch.eye(3).to_sparse_coo().requires_grad_()
    assert as_graph(matrix, 3) is not as_graph(matrix, 3)
    assert as_graph(matrix, 3).weight.requires_grad
    assert not entries_of(matrix)


def test_inference_tensors_are_not_cached() -> None:
    """They have no version, so a change could not be noticed."""
    with torch.inference_mode():
        edge_index = fresh_edges()
        graph = as_graph(edge_index, 50)
        edge_index.fill_(7)
        assert adjacency_of(as_graph(edge_index, 50))[7, 7] == 200
        assert as_graph(edge_index, 50) is not graph


def test_edge_index_objects_are_cached() -> None:
    edges = EdgeIndex(fresh_edges(), sparse_size=(50, 50))
    graph = as_graph(edges, 50)
    assert as_graph(edges, 50) is graph
    assert as_graph(EdgeIndex(fresh_edges(), sparse_size=(50, 50)), 50) is not graph


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_changed_values_of_a_sparse_matrix_are_noticed(layout: str) -> None:
    """Its values are a tensor of their own, which can change while the matrix keeps its version."""
    matrix = torch.eye(3).to_sparse_csr() if layout == "csr" else torch.eye(3).to_sparse_coo().coalesce()
    graph = as_graph(matrix, 3)
    assert as_graph(matrix, 3) is graph
    matrix.values().mul_(2)
    assert (as_graph(matrix, 3).weight == 2).all()


def test_graphs_are_not_cached() -> None:
    graph = Graph.from_edge_index(fresh_edges(), 50)
    alive = len(_entries)
    assert as_graph(graph, 50) is graph
    assert len(_entries) == alive


def set_recording(monkeypatch: pytest.MonkeyPatch, now: bool) -> None:
    for module in (weak_cache, graph_module, sg_conv):
        monkeypatch.setattr(module, "is_recorded", lambda t: now)


def test_while_a_step_is_recorded_nothing_new_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    t, built = torch.ones(3), []

    def build() -> int:
        built.append(len(built))
        return built[-1]

    set_recording(monkeypatch, True)
    assert [cached((t,), "a key", build) for _ in range(2)] == [0, 1]
    for now in (False, True, False):
        set_recording(monkeypatch, now)
        assert cached((t,), "a key", build) == 2


def test_a_graph_keeps_nothing_that_is_made_while_a_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph.from_edge_index(fresh_edges(), 50, torch.rand(200))
    set_recording(monkeypatch, True)
    assert graph.csc is not graph.csc
    assert graph.weight_t is not graph.weight_t
    set_recording(monkeypatch, False)
    csc, weight_t = graph.csc, graph.weight_t
    set_recording(monkeypatch, True)
    assert graph.csc is csc
    assert graph.weight_t is weight_t


def test_features_behind_hops_are_not_taken_into_a_recorded_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay finds other features in the same memory."""
    conv, x, edge_index, hops = QSGConv(4, 3, cached=True), torch.randn(50, 4), fresh_edges(), []
    monkeypatch.setattr(QSGConv, "_hops", lambda self, graph, x, config: hops.append(1) or x)
    for now, calls in ((False, 1), (False, 1), (True, 2), (True, 3), (False, 3)):
        set_recording(monkeypatch, now)
        conv(x, edge_index)
        assert len(hops) == calls


def test_cached_builds_once_for_each_key() -> None:
    edge_index, built = fresh_edges(), []

    def build() -> object:
        built.append(object())
        return built[-1]

    first = cached((edge_index,), "a", build)
    assert cached((edge_index,), "a", build) is first
    assert cached((edge_index,), "b", build) is not first
    assert len(built) == 2


def test_a_failed_build_leaves_no_entry() -> None:
    edge_index = fresh_edges()

    def fail() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cached((edge_index,), "key", fail)
    assert not entries_of(edge_index)


def test_a_sparse_matrix_stays_as_it_was() -> None:
    """Two copies of an edge: the matrix must not be declared coalesced behind its owner's back."""
    indices, values = torch.tensor([[0, 0, 1], [1, 1, 2]]), torch.tensor([1.0, 2, 3])
    matrix = torch.sparse_coo_tensor(indices, values, (3, 3))
    graph = as_graph(matrix, 3)
    assert torch.equal(adjacency_of(graph, graph.weight), torch.tensor([[0.0, 3, 0], [0, 0, 3], [0, 0, 0]]).double())
    assert not matrix.is_coalesced()
    assert matrix._version == 0


def test_gradients_follow_weights_that_are_written_or_assigned() -> None:
    graph = Graph.from_edge_index(fresh_edges(), 50, torch.rand(200))
    x = torch.randn(50, 3, requires_grad=True)

    def check() -> None:
        (grad,) = torch.autograd.grad(spmm(graph, x).sum(), x)
        dense = torch.zeros(50, 50).index_put_((graph.target, graph.csr.index.long()), graph.weight, accumulate=True)
        torch.testing.assert_close(grad, dense.sum(0)[:, None].expand(-1, 3))

    check()
    graph.weight.mul_(10)
    check()
    graph.weight = graph.weight * 2
    check()
    graph.weight.mul_(1)
    check()
    graph.weight.mul_(10)
    graph = copy.deepcopy(graph)  # whose weights have the version again of those before
    check()


@pytest.mark.parametrize("conv", [QGCNConv(3, 3), QChebConv(3, 3, 2), QGraphConv(3, 3)], ids=repr)
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_a_graph_of_other_nodes_is_refused_whatever_is_remembered(conv: MessagePassing, flow: str) -> None:
    """An updated graph shares its edges with the one before."""
    conv.flow = flow
    graph, x = Graph.from_edge_index(fresh_edges(), 50), torch.randn(50, 3)
    conv(x, graph)
    with pytest.raises(ValueError, match="60 source"):
        conv(x, graph.update(num_nodes=60))


def test_relations_of_other_nodes_are_refused_whatever_is_remembered() -> None:
    graph, x, types = Graph.from_edge_index(fresh_edges(), 50), torch.randn(50, 3), torch.randint(2, (200,))
    conv = QRGCNConv(3, 3, 2)
    conv(x, graph, types)
    with pytest.raises(ValueError, match=r"'graph' has 60 source and 60 target nodes"):
        conv(x, graph.update(num_nodes=60), types)
