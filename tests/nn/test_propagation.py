"""What holds for the layers that propagate rows over a normalized graph: GCN, GCNII, SGC, APPNP, Chebyshev."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex

from graphs import GRAPHS
from layer_cases import assert_same_pass, passes
from layers import LAYERS, K, M
from qgnn import Graph, QConfig, functional, trace
from qgnn.nn import Epilogue

NEAREST = QConfig(rounding="nearest")
NAMES = ("gcn", "gcn2", "sg", "appnp", "cheb")
ALL = pytest.mark.parametrize("name", NAMES)
BATCHED = pytest.mark.parametrize("name", [name for name in NAMES if name != "gcn2"])  # PyG's adds matrices
EDGES, N = GRAPHS["random"]


def plain_edges() -> Tensor:
    """In the order of a matrix, without copies and self-loops, which matrices treat otherwise."""
    edges = torch.unique(EDGES.flip(0), dim=1).flip(0)
    return edges[:, edges[0] != edges[1]]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@ALL
def test_layer_takes_every_form_of_edges(name: str) -> None:
    ours, edges, x = LAYERS[name].ours(None), plain_edges(), torch.randn(N, K)
    expected = passes(ours, x, edges)
    csr = torch.sparse_coo_tensor(edges.flip(0), torch.ones(edges.shape[1]), (N, N)).to_sparse_csr()
    for form in (EdgeIndex(edges, sparse_size=(N, N)), csr, Graph.from_edge_index(edges, N)):
        assert_same_pass(passes(ours, x, form), expected)


@BATCHED
def test_layer_takes_several_sets_of_rows(name: str) -> None:
    theirs, ours = LAYERS[name].pair(None)
    for graph in ("random", "self_loops", "empty"):
        edges, num_nodes = GRAPHS[graph]
        x = torch.randn(3, num_nodes, K)
        assert_same_pass(passes(ours, x, edges), passes(theirs, x, edges))
        ours.epilogue = Epilogue("relu")
        assert torch.equal(ours(x, edges) > 0, theirs(x, edges) > 0)
        ours.epilogue = None


@BATCHED
def test_quantized_layer_takes_several_sets_of_rows(name: str) -> None:
    theirs, ours = LAYERS[name].pair(QConfig(), 64, 32)
    x = torch.randn(3, N, 64)
    expected = passes(theirs, x, EDGES)
    for key, value in passes(ours, x, EDGES).items():
        assert (value - expected[key]).norm() < 10 ** (-30 / 20) * expected[key].norm(), key  # as of the registry


@pytest.mark.parametrize("name", ["gcn", "sg", "cheb"])
def test_layer_takes_a_lazy_size(name: str) -> None:
    for config in (None, NEAREST):
        lazy, ours = LAYERS[name].ours(config, K=-1), LAYERS[name].ours(config)
        x = torch.randn(N, K)
        assert lazy(x, EDGES).shape == (N, M)
        lazy.load_state_dict(ours.state_dict())
        assert torch.equal(lazy(x, EDGES), ours(x, EDGES))


@ALL
def test_layer_takes_rows_that_are_quantized_already(name: str) -> None:
    ours = LAYERS[name].ours(None)
    x = torch.randn(N, K, requires_grad=True)
    ours._forward_pre_hooks.clear()
    rest = (torch.randn(N, K),) if name == "gcn2" else ()
    for straight in (False, True):
        q = functional.quantize(x, NEAREST, straight_through=straight)
        out, expected = ours(q, *rest, EDGES), ours(q.dequantize(), *rest, EDGES)
        if not straight:
            torch.testing.assert_close(out, expected)
            continue
        # A layer is linear in x: the gradient is that of x itself, whatever was rounded.
        upstream = torch.randn_like(out)
        (actual,), (dx,) = (torch.autograd.grad(y, x, upstream) for y in (out, ours(x, *rest, EDGES)))
        torch.testing.assert_close(actual, dx)


@ALL
def test_layer_shows_its_messages_to_hooks(name: str) -> None:
    theirs, ours = LAYERS[name].pair(NEAREST)
    seen: list[Any] = []
    ours.register_message_forward_hook(lambda *_: seen.append(1))
    x = torch.randn(N, K)
    with trace() as record:
        actual = passes(ours, x, EDGES)
    assert seen
    assert record.ops.keys() == {"messages.forward"}
    assert_same_pass(actual, passes(theirs, x, EDGES))
    with pytest.raises(ValueError, match="expects 'edge_index' as a tensor where PyG's own path has to run"):
        ours(x, Graph.from_edge_index(EDGES, N))


@ALL
def test_layer_says_which_aggregations_it_quantizes(name: str) -> None:
    layer = LAYERS[name]
    other = type(layer)(layer.name, {**layer.options, "aggr": "max"}, sizes=layer.sizes, hook=layer.hook)
    with pytest.raises(ValueError, match=rf"'Q{layer.name}' expects 'aggr' to be one of \('add', .* \(got 'max'\)"):
        other.ours(NEAREST)
    theirs, ours = other.pair(None)
    x = torch.randn(N, K)
    torch.testing.assert_close(ours(x, EDGES), theirs(x, EDGES))  # GCNII's has no gradient of a maximum in PyG


@pytest.mark.parametrize("name", ["gcn2", "sg", "appnp"])
def test_layer_takes_a_mean(name: str) -> None:
    layer = LAYERS[name]
    theirs, ours = type(layer)(layer.name, {**layer.options, "aggr": "mean"}, sizes=layer.sizes, hook=layer.hook).pair(
        None
    )
    edges, num_nodes = GRAPHS["self_loops"]
    x = torch.randn(num_nodes, K)
    assert_same_pass(passes(ours, x, edges), passes(theirs, x, edges))


@ALL
def test_layer_names_what_it_cannot_take(name: str) -> None:
    ours: nn.Module = LAYERS[name].ours(NEAREST)
    ours._forward_pre_hooks.clear()
    rest = (torch.randn(N, K),) if name == "gcn2" else ()
    with pytest.raises(ValueError, match=r"expects one tensor of node features \(got 2\)"):
        ours((torch.randn(N, K), torch.randn(N, K)), *rest, EDGES)
    shape = (2, N, K) if name == "gcn2" else (1, 2, N, K)
    with pytest.raises(ValueError, match=r"expects 'x' of shape \[N, F\].* \(got \["):
        ours(torch.randn(shape), *rest, EDGES)
    with pytest.raises(ValueError, match="expects source indices from 0 to 2 "):
        ours(torch.randn(3, K), *rest, EDGES)


@ALL
def test_layer_names_a_dimension_of_nodes_that_it_cannot_take(name: str) -> None:
    """PyG's layers multiply along the wrong dimension there."""
    layer = LAYERS[name]
    options = {**layer.options, "node_dim": 0}
    theirs, ours = type(layer)(layer.name, options, sizes=layer.sizes, hook=layer.hook).pair(None)
    x = torch.randn(N, K)
    assert_same_pass(passes(ours, x, EDGES), passes(theirs, x, EDGES))  # the last but one of two
    ours.node_dim = 1
    with pytest.raises(ValueError, match=r"expects nodes along the last but one dimension of 'x' \(got node_dim=1 for"):
        ours(x, EDGES)
