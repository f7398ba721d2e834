"""QSGConv: hops, and what ``cached`` may remember."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import SGConv

from graphs import GRAPHS
from layer_cases import assert_equal_pass, assert_same_pass, kept_bytes, passes
from qgnn import QConfig, trace
from qgnn.nn import QSGConv

NEAREST = QConfig(rounding="nearest")
CONFIGS = pytest.mark.parametrize("config", [None, NEAREST], ids=["fp32", "int8"])
EDGES, N = GRAPHS["random"]
OTHER, _ = GRAPHS["duplicates"]
K, M = 24, 8


def pair(config: QConfig | None = None, **options: Any) -> tuple[SGConv, QSGConv]:
    theirs, ours = SGConv(K, M, **options), QSGConv(K, M, **options, config=config)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def calls(run: Any) -> int:
    """Number of aggregations."""
    with trace() as record:
        run()
    return record.ops["spmm.forward"]["calls"] if "spmm.forward" in record.ops else 0


@pytest.mark.parametrize("hops", [0, 1, 3])
def test_sg_conv_equals_pyg_for_any_number_of_hops(hops: int) -> None:
    for options in ({}, {"add_self_loops": False, "bias": False}, {"flow": "target_to_source"}):
        theirs, ours = pair(K=hops, **options)
        x, weight = torch.randn(N, K), torch.rand(EDGES.shape[1])
        assert_same_pass(passes(ours, x, EDGES, weight), passes(theirs, x, EDGES, weight))


@CONFIGS
def test_sg_conv_remembers_the_aggregated_rows_of_this_graph_and_these_rows(config: QConfig | None) -> None:
    _, plain = pair(config, K=2)
    _, ours = pair(config, K=2, cached=True)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(N, K)
    assert calls(lambda: ours(x, EDGES)) == 2
    assert calls(lambda: ours(x, EDGES)) == 0
    assert calls(lambda: ours.eval()(x, EDGES)) == 0
    for changed, edges in ((x, OTHER), (torch.randn(N, K), EDGES), (x, EDGES)):
        torch.testing.assert_close(ours(changed, edges), plain(changed, edges))  # PyG's would serve the first result
    x.mul_(2)
    assert calls(lambda: ours(x, EDGES)) == 2
    torch.testing.assert_close(ours(x, EDGES), plain(x, EDGES))


@CONFIGS
def test_sg_conv_gives_what_is_learned_its_gradient_in_every_step(config: QConfig | None) -> None:
    """With ``cached``, PyG's layer has no gradient to give from its second step on."""
    _, plain = pair(config, K=2)
    _, ours = pair(config, K=2, cached=True)
    ours.load_state_dict(plain.state_dict())
    x, weight = torch.randn(N, K), torch.rand(EDGES.shape[1], requires_grad=True)
    expected = passes(plain, x, EDGES, weight, extra=(weight,))
    for _ in range(2):
        assert_equal_pass(passes(ours, x, EDGES, weight, extra=(weight,)), expected)


def test_sg_conv_forgets_what_pyg_remembered() -> None:
    theirs, ours = pair(cached=True)
    x = torch.randn(N, K)
    ours._cached_x = x.new_zeros(N, K)
    ours.configure(None)
    torch.testing.assert_close(ours(x, EDGES), theirs(x, EDGES))
    ours.register_message_forward_hook(lambda *_: None)
    for edges in (EDGES, OTHER):
        torch.testing.assert_close(ours(x, edges), SGConv.forward(pair_of(theirs), x, edges))
        assert ours._cached_x is None


def pair_of(layer: SGConv) -> SGConv:
    """A twin that remembers nothing."""
    twin = SGConv(K, M)
    twin.load_state_dict(layer.state_dict())
    return twin


def test_sg_conv_that_is_cached_rounds_features_once_and_to_nearest() -> None:
    _, ours = pair(QConfig(), K=3, cached=True)
    exact, _ = pair(K=3)
    exact.load_state_dict(ours.state_dict())
    x = torch.randn(N, K)
    ours.eval()
    first = ours(x, EDGES)
    del first
    ours.train()
    with trace() as record:
        outs = [ours(x, EDGES) for _ in range(2)]
    assert "spmm.forward" not in record.ops
    assert not torch.equal(*outs)  # the weight is rounded at random all the same
    for out in outs:
        # two operands at 0.013 of their norms, and three hops, whose errors are averaged like the rows
        assert (out - exact(x, EDGES)).norm() < 0.04 * exact(x, EDGES).norm()


def test_sg_conv_keeps_codes_of_the_last_rows() -> None:
    _, ours = pair(QConfig(), K=2)
    x = torch.randn(N, K, requires_grad=True)
    graph = ours.normalized(x, EDGES, None)
    structure: tuple[Tensor, ...] = (graph.csr.indptr, graph.csr.index, *graph._shared.values(), graph.csr.order)
    kept = kept_bytes(lambda: ours(x, EDGES), ignore=tuple(t for t in structure if isinstance(t, Tensor)))
    edges = EDGES.shape[1] + N
    # codes and scales, and of the graph, shared with all other steps: its transpose, and weights in both orders
    assert kept <= N * (K + 4) + ours.lin.weight.nbytes + 8 * 3 + (N + 1) * 4 + 4 * 4 * edges
