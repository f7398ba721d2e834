"""A graph that was prepared in inference mode serves training as well: evaluate, then train."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qgnn import Graph, QConfig, functional
from qgnn.adjacency import Adjacency
from qgnn.graph import as_graph
from qgnn.nn import QGCNConv

N, E, K = 20, 60, 8
CONFIG = QConfig(rounding="nearest")


def edges() -> Tensor:
    return torch.randint(N, (2, E), generator=torch.Generator().manual_seed(3))


def constant_weight() -> Tensor:
    return torch.linspace(0.1, 1, E)


def layer() -> nn.Module:
    torch.manual_seed(1)
    return QGCNConv(K, 4, config=CONFIG)


def passes() -> dict[str, Callable[[Any, Tensor], Tensor]]:
    weight, conv = constant_weight(), layer()
    return {
        "sum": lambda graph, x: functional.spmm(graph, x, config=CONFIG),
        "mean": lambda graph, x: functional.spmm(graph, x, reduce="mean", config=CONFIG),
        "max": lambda graph, x: functional.spmm(graph, x, reduce="max"),
        "weighted": lambda graph, x: functional.spmm(as_graph(graph, N, weight), x, config=CONFIG),
        "learned weights": lambda graph, x: functional.spmm(graph, x, x.new_ones(E).requires_grad_(), config=CONFIG),
        "graph_linear": lambda graph, x: functional.graph_linear(graph, x, torch.eye(K), config=CONFIG),
        "sddmm": lambda graph, x: functional.sddmm(graph, x, x, config=CONFIG),
        "edge_softmax": lambda graph, x: functional.edge_softmax(graph, functional.sddmm(graph, x, x)),
        "attention_weights": lambda graph, x: functional.attention_weights(graph, x, x),
        "layer": lambda graph, x: conv(x, graph),
    }


@pytest.mark.parametrize("name", passes())
@pytest.mark.parametrize("kind", ["edge_index", "graph", "graph made in inference mode"])
def test_train_after_inference(name: str, kind: str) -> None:
    run, x = passes()[name], torch.randn(N, K)
    with torch.inference_mode(kind == "graph made in inference mode"):
        graph: Any = edges() if kind == "edge_index" else Graph.from_edge_index(edges(), N, None)
    with torch.inference_mode():
        evaluated = run(graph, x)
    assert evaluated.is_inference()
    leaf, fresh_leaf = (x.clone().requires_grad_() for _ in range(2))
    out = run(graph, leaf)
    out.square().sum().backward()
    expected = run(edges(), fresh_leaf)
    expected.square().sum().backward()
    assert torch.equal(out, expected)
    assert torch.equal(leaf.grad, fresh_leaf.grad)


def test_what_a_graph_remembers_is_no_inference_tensor() -> None:
    with torch.inference_mode():
        graph = Graph.from_edge_index(edges(), N, constant_weight())
        made = [graph.csc.index, graph.weight, graph.weight_t, graph.mean_factor, graph.given_order, graph.target]
    assert not any(t.is_inference() or t.requires_grad for t in made)


def test_weights_given_in_inference_mode() -> None:
    graph = Graph.from_edge_index(edges(), N)
    with torch.inference_mode():
        weighted = graph.with_weight(constant_weight())
    x = torch.randn(N, K, requires_grad=True)
    functional.spmm(weighted, x).sum().backward()
    assert x.grad is not None


def test_no_gradients_are_turned_on_by_building() -> None:
    with torch.inference_mode():
        Graph.from_edge_index(edges(), N).csc  # noqa: B018
        assert torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize("size", [E - 1, E + 1, 0])
def test_weights_of_another_length(size: int) -> None:
    graph = Graph.from_edge_index(edges(), N)
    with pytest.raises(ValueError, match=rf"'edge_weight' expects one value an edge, \[{E}\] \(got \[{size}\]\)"):
        graph.with_weight(torch.ones(size))
    with pytest.raises(ValueError, match=r"'edge_weight' expects one value an edge"):
        Graph(graph.csr, N, torch.ones(size))


def test_a_graph_of_indices_that_point_elsewhere() -> None:
    """Nobody looks at them when they are put together; the first function that would follow them does."""
    indptr = torch.arange(N + 1, dtype=torch.int32)
    csr = Adjacency(indptr, torch.full((N,), N, dtype=torch.int32), torch.arange(N, dtype=torch.int32))
    with pytest.raises(ValueError, match=rf"'index' from 0 to {N - 1} \(got {N}\)"):
        functional.spmm(Graph(csr, N), torch.randn(N, K))
