"""Graphs that change: an update is what a rebuild makes of the same edges, in every array and every result."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphs import GRAPHS
from qgnn import Graph, edge_checks, functional
from qgnn.nn import QGCNConv


def assert_same(graph: Graph, expected: Graph) -> None:
    assert (graph.num_sources, graph.num_targets) == (expected.num_sources, expected.num_targets)
    for name in ("csr", "csc"):
        ours, theirs = getattr(graph, name), getattr(expected, name)
        for array in ("indptr", "index", "order"):
            assert torch.equal(getattr(ours, array), getattr(theirs, array)), f"{name}.{array}"
            assert getattr(ours, array).dtype == getattr(theirs, array).dtype
    for ours, theirs in ((graph.weight, expected.weight), (graph.weight_t, expected.weight_t)):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    assert torch.equal(graph.edge_index(as_given=True), expected.edge_index(as_given=True))
    assert all(map(torch.equal, graph.incidence("source"), expected.incidence("source")))


class Rebuilt:
    """The same changes to a list of edges."""

    def __init__(self, edge_index: Tensor, num_nodes: int, weight: Tensor | None) -> None:
        self.edge_index, self.num_nodes, self.weight = edge_index, num_nodes, weight

    def update(
        self, add: Tensor, add_weight: Tensor | None, remove: Tensor, remove_nodes: Tensor, more_nodes: int
    ) -> None:
        alive = torch.ones(self.num_nodes, dtype=torch.bool)
        alive[remove_nodes] = False
        keep = torch.ones(self.edge_index.shape[1], dtype=torch.bool)
        keep[remove] = False
        keep &= alive[self.edge_index].all(0)
        self.edge_index = torch.cat([(alive.cumsum(0) - 1)[self.edge_index[:, keep]], add], 1)
        self.num_nodes = int(alive.sum()) + more_nodes
        if self.weight is not None:
            self.weight = torch.cat([self.weight[keep], add_weight])

    @property
    def graph(self) -> Graph:
        return Graph.from_edge_index(self.edge_index, self.num_nodes, self.weight)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 40), st.booleans(), st.booleans(), st.integers(0, 2**31), st.data())
def test_any_updates_are_a_rebuild(
    num_nodes: int, num_edges: int, weighted: bool, has_csc: bool, seed: int, data: Any
) -> None:
    torch.manual_seed(seed)
    weight = torch.rand(num_edges) if weighted else None
    rebuilt = Rebuilt(torch.randint(num_nodes, (2, num_edges)), num_nodes, weight)
    graph = rebuilt.graph
    for _ in range(2):
        if has_csc:
            assert graph.csc.num_rows == graph.num_sources
        E, N, more = graph.num_edges, graph.num_sources, data.draw(st.integers(0, 3))
        remove = torch.randint(E, (data.draw(st.integers(0, 10)),)) if E else torch.empty(0, dtype=torch.int64)
        remove_nodes = torch.randint(N, (data.draw(st.integers(0, 2)),)) if N else torch.empty(0, dtype=torch.int64)
        left = N - len(remove_nodes.unique()) + more
        add = torch.randint(max(left, 1), (2, data.draw(st.integers(0, 15)) if left else 0))
        add_weight = torch.rand(add.shape[1]) if weighted else None
        graph = graph.update(add=add, add_weight=add_weight, remove=remove, remove_nodes=remove_nodes, num_nodes=left)
        rebuilt.update(add, add_weight, remove, remove_nodes, more)
        assert "csc" in graph._shared or not has_csc
        assert_same(graph, rebuilt.graph)


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_that_break_kernels(name: str) -> None:
    edge_index, num_nodes = GRAPHS[name]
    half = torch.arange(edge_index.shape[1]) % 2 == 0
    graph = Graph.from_edge_index(edge_index[:, half], num_nodes)
    assert graph.csc.num_rows == num_nodes
    order = torch.cat([half.nonzero(), (~half).nonzero()]).view(-1)
    assert_same(graph.update(add=edge_index[:, ~half]), Graph.from_edge_index(edge_index[:, order], num_nodes))
    whole = Graph.from_edge_index(edge_index, num_nodes)
    assert_same(whole.update(remove=~half), graph)


def test_two_sets_of_nodes() -> None:
    edge_index = torch.tensor([[0, 2, 1, 2], [0, 1, 1, 0]])
    graph = Graph.from_edge_index(edge_index, (3, 2))
    changed = graph.update(remove=torch.tensor([1]), num_nodes=(5, 3), add=torch.tensor([[4, 0], [2, 1]]))
    expected = torch.tensor([[0, 1, 2, 4, 0], [0, 1, 0, 2, 1]])
    assert_same(changed, Graph.from_edge_index(expected, (5, 3)))


def test_the_old_graph_stays_and_nothing_old_is_served() -> None:
    """Sums and a layer that remembers normalizations see each graph's own edges, before and after."""
    torch.manual_seed(0)
    x, edge_index = torch.randn(30, 8), torch.randint(30, (2, 100))
    graph = Graph.from_edge_index(edge_index, 30)
    conv = QGCNConv(8, 4)
    before = functional.spmm(graph, x), conv(x, graph)
    changed = graph.update(remove=torch.arange(50))
    after = functional.spmm(changed, x), conv(x, changed)
    rebuilt = Graph.from_edge_index(edge_index[:, 50:], 30)
    assert torch.equal(after[0], functional.spmm(rebuilt, x))
    torch.testing.assert_close(after[1], conv(x, rebuilt), rtol=0.05, atol=0.05)
    assert not torch.allclose(before[0], after[0])
    assert torch.equal(functional.spmm(graph, x), before[0])


def test_nothing_to_do_gives_an_equal_graph() -> None:
    graph = Graph.from_edge_index(*GRAPHS["random"])
    assert_same(graph.update(), graph)


def test_indices_are_as_wide_as_they_have_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit stands in for that of int32."""
    monkeypatch.setattr(edge_checks, "INT32_SIZES", 10)
    edge_index = torch.randint(5, (2, 10))
    graph = Graph.from_edge_index(edge_index, 5)
    assert graph.csc.index.dtype == torch.int32
    wide = graph.update(add=edge_index[:, :4])
    assert_same(wide, Graph.from_edge_index(torch.cat([edge_index, edge_index[:, :4]], 1), 5))
    assert_same(wide.update(remove=torch.arange(4)), Graph.from_edge_index(wide.edge_index(as_given=True)[:, 4:], 5))
    assert_same(graph.update(num_nodes=11), Graph.from_edge_index(edge_index, 11))


def test_in_inference_mode() -> None:
    graph = Graph.from_edge_index(*GRAPHS["random"])
    with torch.inference_mode():
        changed = graph.update(add=torch.tensor([[1], [2]]), remove=torch.tensor([3]))
    assert not changed.csr.index.is_inference()


WEIGHTED = Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2, torch.ones(2))
PLAIN = Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2)
WIDE = Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), (3, 2))
EDGE = torch.tensor([[0], [1]])


@pytest.mark.parametrize(
    ("graph", "arguments", "message"),
    [
        (PLAIN, {"add": torch.tensor([[0], [2]])}, r"target indices from 0 to 1 \(got 2\)"),
        (PLAIN, {"add": EDGE.float()}, "expects torch.int64 node indices"),
        (PLAIN, {"add": EDGE, "add_weight": torch.ones(1)}, r"\(got a graph without weights\)"),
        (WEIGHTED, {"add": EDGE}, r"\(got a graph with weights\)"),
        (WEIGHTED, {"add": EDGE, "add_weight": torch.ones(2)}, r"one value an edge, \[1\] \(got \[2\]\)"),
        (WEIGHTED, {"add": EDGE, "add_weight": torch.ones(1, requires_grad=True)}, "constant edge weights"),
        (WEIGHTED, {"add_weight": torch.ones(2)}, "'add_weight' expects edges to 'add'"),
        (PLAIN, {"remove": torch.tensor([2])}, r"'remove' expects numbers from 0 to 1 \(got 2 to 2\)"),
        (PLAIN, {"remove": torch.tensor([-1, 0])}, r"\(got -1 to 0\)"),
        (PLAIN, {"remove": torch.ones(3, dtype=torch.bool)}, r"'remove' expects a mask \[2\] \(got \[3\]\)"),
        (PLAIN, {"remove": torch.ones(2)}, r"'remove' expects a mask \[2\] or a vector of numbers"),
        (PLAIN, {"remove": [0]}, r"\(got list\)"),
        (PLAIN, {"remove_nodes": torch.tensor([5])}, r"'remove_nodes' expects numbers from 0 to 1"),
        (WIDE, {"remove_nodes": torch.tensor([0])}, r"with one set of nodes \(got 3 sources, 2 targets\)"),
        (PLAIN, {"num_nodes": 1}, r"no fewer nodes than before \(got 1 sources and 1 targets, before 2 and 2\)"),
    ],
)
def test_bad_updates(graph: Graph, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        graph.update(**arguments)
