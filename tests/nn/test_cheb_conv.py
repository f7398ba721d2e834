"""QChebConv: the scaled Laplacian is PyG's, made once, and finite where PyG's is not."""

import itertools
from typing import Any

import pytest
import torch
from torch_geometric.nn import ChebConv

from graphs import GRAPHS
from layer_cases import assert_same_pass, passes
from qgnn import Graph, QConfig, trace
from qgnn.nn import QChebConv

NEAREST = QConfig(rounding="nearest")
CONFIGS = pytest.mark.parametrize("config", [None, NEAREST], ids=["fp32", "int8"])
EDGES, N = GRAPHS["self_loops"]
K, M = 7, 12


def pair(config: QConfig | None = None, **options: Any) -> tuple[ChebConv, QChebConv]:
    theirs, ours = ChebConv(K, M, **options), QChebConv(K, M, **options, config=config)
    if theirs.bias is not None:
        torch.nn.init.normal_(theirs.bias)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("normalization", [None, "sym", "rw"])
def test_cheb_conv_equals_pyg_with_every_laplacian(normalization: str | None) -> None:
    for flow, weighted in itertools.product(("source_to_target", "target_to_source"), (False, True)):
        theirs, ours = pair(K=4, normalization=normalization, flow=flow)
        x = torch.randn(N, K)
        weight = (torch.rand(EDGES.shape[1]) + 0.1).requires_grad_() if weighted else None
        extra = (weight,) if weighted else ()
        for largest in (None, 3.0, torch.tensor(3.0), torch.tensor([3.0])):
            args = (EDGES, weight, None, largest)
            assert_same_pass(passes(ours, x, *args, extra=extra), passes(theirs, x, *args, extra=extra))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_cheb_conv_equals_pyg_for_any_filter_size(size: int) -> None:
    theirs, ours = pair(K=size, bias=size > 1)
    x = torch.randn(N, K)
    assert_same_pass(passes(ours, x, EDGES), passes(theirs, x, EDGES))


def test_cheb_conv_scales_each_graph_of_a_batch() -> None:
    theirs, ours = pair(K=3)
    other, num_others = GRAPHS["path"]
    edges = torch.cat([EDGES, other + N], dim=1)
    x = torch.randn(N + num_others, K)
    batch = (torch.arange(N + num_others) >= N).long()
    largest = torch.tensor([1.5, 3.0], requires_grad=True)
    expected = passes(theirs, x, edges, None, batch, largest, extra=(largest,))
    assert_same_pass(passes(ours, x, edges, None, batch, largest, extra=(largest,)), expected)
    for part, rows, nodes in ((EDGES, 0, slice(0, N)), (other, 1, slice(N, None))):
        alone = ours(x[nodes], part, None, None, largest[rows].item())
        torch.testing.assert_close(alone, expected["out"][nodes], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("normalization", [None, "sym", "rw"])
@CONFIGS
def test_cheb_conv_is_finite_on_a_graph_without_edges(config: QConfig | None, normalization: str | None) -> None:
    """Without normalization PyG divides 0 by 0 there."""
    _, ours = pair(config, K=3, normalization=normalization)
    for name in ("no_nodes", "one_node", "empty", "only_loops"):
        edges, num_nodes = GRAPHS[name]
        weight = torch.rand(edges.shape[1], requires_grad=True)
        result = passes(ours, torch.randn(num_nodes, K), edges, weight, extra=(weight,))
        assert all(value.isfinite().all() for value in result.values())
        assert not result["dextra0"].any()


@pytest.mark.parametrize("normalization", ["sym", "rw"])
def test_cheb_conv_has_a_finite_gradient_at_degree_zero(normalization: str) -> None:
    _, ours = pair(K=3, normalization=normalization)
    edges = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])
    weight = torch.tensor([0.0, 1.0, 1.0, -1.0], requires_grad=True)
    result = passes(ours, torch.randn(4, K), edges, weight, extra=(weight,))
    assert all(value.isfinite().all() for value in result.values())


def test_cheb_conv_makes_the_laplacian_once(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = pair(K=3)
    made: list[int] = []
    original, sort = QChebConv._scaled, Graph.from_edge_index
    monkeypatch.setattr(QChebConv, "_scaled", lambda *args: made.append(0) or original(*args))
    monkeypatch.setattr(Graph, "from_edge_index", staticmethod(lambda *args: made.append(1) or sort(*args)))
    edges, x = EDGES.clone(), torch.randn(N, K)
    for expected, run in (
        ([0, 1], lambda: ours(x, edges)),
        ([0, 1], lambda: ours(torch.randn(N, K), edges)),
        ([0, 0, 1], lambda: ours(x, edges, None, None, 3.0)),
        ([0, 0, 0, 1], lambda: ours(x, edges, torch.rand(edges.shape[1]))),
    ):
        run()
        assert sorted(made) == expected
    edges[0, 0] = 3
    torch.testing.assert_close(ours(x, edges), theirs(x, edges), atol=1e-5, rtol=1e-5)


def test_cheb_conv_rounds_each_set_of_rows_once() -> None:
    _, ours = pair(QConfig(), K=4)
    x = torch.randn(N, K, requires_grad=True)
    ours(x, EDGES)
    with trace() as record:
        ours(x, EDGES)
    # four sets of rows, and four weights
    assert record.ops["quantize.forward"]["calls"] == 4 + 4
    assert record.ops["spmm.forward"]["calls"] == 3
    assert record.ops["spmm.forward"]["format"] == "int8"
