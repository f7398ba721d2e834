"""QAPPNP: dropout of edges draws what PyG's does, and the mix with the first rows is exact."""

import pytest
import torch
from torch_geometric.nn import APPNP

from graphs import GRAPHS
from layer_cases import assert_equal_pass, assert_same_pass, kept_bytes, passes
from qgnn import Graph, QConfig
from qgnn.nn import QAPPNP, Epilogue

NEAREST = QConfig(rounding="nearest")
EDGES, N = GRAPHS["self_loops"]
F = 16


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loops", [False, True])
def test_appnp_drops_the_edges_that_pyg_drops(loops: bool, weighted: bool) -> None:
    theirs, ours = (cls(K=3, alpha=0.2, dropout=0.4, add_self_loops=loops) for cls in (APPNP, QAPPNP))
    ours.configure(None)
    x = torch.randn(N, F)
    weight = (torch.rand(EDGES.shape[1]) + 0.1).requires_grad_() if weighted else None
    extra = (weight,) if weighted else ()

    def run(layer: APPNP, seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return passes(layer, x, EDGES, weight, extra=extra)

    first = run(ours, 3)
    assert_same_pass(first, run(theirs, 3))
    assert not torch.equal(first["out"], run(ours, 4)["out"])
    assert_same_pass(run(ours.eval(), 3), run(theirs.eval(), 4))


def test_appnp_drops_edges_without_weights() -> None:
    """PyG's layer asks for weights then; an edge without one weighs 1 wherever it is not asked."""
    ours = QAPPNP(K=1, alpha=0.0, dropout=0.5, normalize=False, config=None)
    x = torch.ones(N, 1)
    degree = torch.bincount(EDGES[1], minlength=N)
    assert torch.equal(ours.eval()(x, EDGES)[:, 0], degree.float())
    out = ours.train()(x, EDGES)[:, 0]
    assert torch.equal(out % 2, torch.zeros(N))  # what is kept counts twice
    assert (out <= 2 * degree).all()
    assert 0 < out.sum() < 2 * degree.sum()
    assert 0 < ours(x, Graph.from_edge_index(EDGES, N)).sum() < 2 * degree.sum()


@pytest.mark.parametrize("config", [None, NEAREST], ids=["fp32", "int8"])
def test_appnp_that_teleports_always_returns_its_rows(config: QConfig | None) -> None:
    x = torch.randn(N, F)
    assert torch.equal(QAPPNP(K=4, alpha=1.0, config=config)(x, EDGES), x)
    assert torch.equal(QAPPNP(K=0, alpha=0.1, config=config, epilogue=Epilogue("relu"))(x, EDGES), x.relu())


def test_appnp_notices_another_graph() -> None:
    theirs, ours = APPNP(K=2, alpha=0.1), QAPPNP(K=2, alpha=0.1, cached=True, config=None)
    for name in ("random", "self_loops", "random", "power_law"):
        edges, num_nodes = GRAPHS[name]
        x = torch.randn(num_nodes, F)
        assert_same_pass(passes(ours, x, edges), passes(theirs, x, edges))
    weight = (torch.rand(EDGES.shape[1]) + 0.1).requires_grad_()
    x = torch.randn(N, F)
    first = passes(ours, x, EDGES, weight, extra=(weight,))
    assert_equal_pass(passes(ours, x, EDGES, weight, extra=(weight,)), first)


def test_appnp_keeps_nothing_of_its_rows() -> None:
    ours = QAPPNP(K=5, alpha=0.1)
    few, many = (torch.randn(N, width, requires_grad=True) for width in (16, 256))
    ours(few, EDGES)
    assert kept_bytes(lambda: ours(few, EDGES)) == kept_bytes(lambda: ours(many, EDGES))
