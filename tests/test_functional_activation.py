"""ReLU and dropout of the stateless API, and sums over the edges of a node."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dense import CASES, adjacency, graph_of
from graphs import GRAPHS
from op_checks import saved_tensors
from qgnn import Graph, QConfig, functional

EDGES, N = GRAPHS["random"]
K, M = 6, 12
INT8 = QConfig()

Call = Callable[..., Tensor]


def linear(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return functional.linear(x, weight, **options)


def spmm(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return functional.spmm(EDGES, x, **options)


def graph_linear(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return functional.graph_linear(EDGES, x, weight, **options)


ALL = pytest.mark.parametrize("call", [linear, spmm, graph_linear], ids=lambda call: call.__name__)
CONFIGS = pytest.mark.parametrize("config", [None, INT8], ids=["fp32", "int8"])


@ALL
@CONFIGS
def test_relu_is_that_of_torch(call: Call, config: QConfig | None) -> None:
    x, weight = torch.randn(N, K, requires_grad=True), torch.randn(M, K, requires_grad=True)
    out = call(x, weight, activation="relu", config=config, seed=3)
    expected = call(x, weight, config=config, seed=3).relu()
    assert torch.equal(out, expected)
    upstream = torch.randn_like(out)
    inputs = (x,) if call is spmm else (x, weight)
    for ours, theirs in zip(
        torch.autograd.grad(out, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        assert torch.equal(ours, theirs)


@ALL
@CONFIGS
def test_dropout_follows_the_seed_and_keeps_the_mean(call: Call, config: QConfig | None) -> None:
    x, weight = torch.rand(N, K) + 1, torch.rand(M, K) + 1
    plain = call(x, weight, config=config, seed=3)
    out = call(x, weight, dropout=0.25, config=config, seed=3)
    kept = out != 0
    torch.testing.assert_close(out[kept], plain[kept] / 0.75)
    reached = plain != 0  # of a node without neighbors there is nothing to drop
    assert 0.6 < kept[reached].double().mean() < 0.9
    assert torch.equal(out, call(x, weight, dropout=0.25, config=config, seed=3))
    assert not torch.equal(kept, call(x, weight, dropout=0.25, config=config, seed=4) != 0)
    assert torch.equal(call(x, weight, dropout=0.0, config=config, seed=3), plain)
    assert not call(x, weight, dropout=1.0, config=config, seed=3).any()


@ALL
def test_epilogues_are_differentiable_in_float64(call: Call) -> None:
    x = torch.randn(N, K, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(M, K, dtype=torch.float64, requires_grad=call is not spmm)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return call(x, weight, activation="relu", dropout=0.5, seed=1)

    assert torch.autograd.gradcheck(run, (x, weight))


@ALL
def test_only_bits_are_kept_of_an_epilogue(call: Call) -> None:
    """No fp32 rows of the result: its ReLU and dropout are one bit an element."""
    x, weight = torch.randn(N, K, requires_grad=True), torch.randn(M, K, requires_grad=True)
    kept = saved_tensors(lambda: call(x, weight, activation="relu", dropout=0.5, config=INT8))
    assert sum(t.dtype == torch.uint8 and t.shape[0] == N for t in kept) == 1
    assert not [t for t in kept if t.dtype == torch.float32 and t.numel() >= N * min(K, M)]


class Masks(TorchDispatchMode):
    """Whether each call of an operator with an epilogue was to keep its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        if "keep_mask" in names:
            self.kept.append(args[names.index("keep_mask")])
        return func(*args, **(kwargs or {}))


@ALL
@pytest.mark.parametrize("needs", [False, True])
def test_masks_are_not_kept_without_gradients(call: Call, needs: bool) -> None:
    x, weight = torch.randn(N, K, requires_grad=needs), torch.randn(M, K, requires_grad=needs)
    with Masks() as masks:
        call(x, weight, activation="relu", config=INT8)
        with torch.no_grad():
            call(x, weight, activation="relu", config=INT8)
    assert masks.kept == [needs, False]


@pytest.mark.parametrize("name", ["tall", "wide"])
@CONFIGS
def test_a_bias_learns_alone(name: str, config: QConfig | None) -> None:
    """Behind rows, weights and edges that need no gradient, also where sources and targets are not as many."""
    graph, weight = graph_of(name), torch.randn(M, K)
    x, bias = torch.randn(graph.num_sources, K), torch.randn(M, requires_grad=True)
    out = functional.graph_linear(graph, x, weight, bias, activation="relu", config=config)
    upstream = torch.randint(-9, 9, out.shape).float()  # sums are exact
    (grad,) = torch.autograd.grad(out, bias, upstream)
    assert torch.equal(grad, upstream.where(out > 0, 0).sum(0))


@ALL
@CONFIGS
def test_wrong_epilogues_are_rejected(call: Call, config: QConfig | None) -> None:
    x, weight = torch.randn(N, K), torch.randn(M, K)
    with pytest.raises(ValueError, match=rf"'{call.__name__}' expects 'activation' to be 'relu' or None \(got 'elu'\)"):
        call(x, weight, activation="elu", config=config)
    for dropout in (-0.1, 1.5, float("nan"), "0.5"):
        with pytest.raises(ValueError, match=rf"'{call.__name__}' expects 'dropout' to be a probability from 0 to 1"):
            call(x, weight, dropout=dropout, config=config)


def test_extrema_have_no_epilogue() -> None:
    for epilogue in ({"activation": "relu"}, {"dropout": 0.5}):
        with pytest.raises(ValueError, match=r"to sums and means \(got reduce='max'\); apply them to its result"):
            functional.spmm(EDGES, torch.randn(N, K), reduce="max", **epilogue)


@pytest.mark.parametrize("call", [spmm, graph_linear], ids=lambda call: call.__name__)
@CONFIGS
@pytest.mark.parametrize("heads", [1, 2, 6])
def test_heads_have_their_weights(call: Call, config: QConfig | None, heads: int) -> None:
    """As one call a head on its columns; with weights all alike, as a weight an edge."""
    x, weight = torch.randn(N, K), torch.randn(M, K)
    by_head = torch.rand(EDGES.shape[1], heads).requires_grad_()
    same = by_head[:, :1].detach().expand(-1, heads).contiguous()
    options = {"config": config, "seed": 3}
    expected = call(x, weight, edge_weight=same[:, 0], **options)
    torch.testing.assert_close(call(x, weight, edge_weight=same, **options), expected)
    out = call(x, weight, edge_weight=by_head, **options)
    width = out.shape[1] // heads
    for h in range(heads):
        columns = slice(h * width, (h + 1) * width)
        alone = call(x, weight, edge_weight=by_head[:, h].detach(), **options)[:, columns]
        torch.testing.assert_close(out[:, columns].detach(), alone)
    upstream = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, by_head, upstream)
    assert grad.shape == by_head.shape
    exact = functional.linear(x, weight) if call is graph_linear else x
    source, target = EDGES
    terms = (upstream[target] * exact[source]).view(-1, heads, width).sum(2)
    assert (grad - terms).norm() <= (1e-5 if config is None else 0.05) * terms.norm()


@pytest.mark.parametrize("call", [spmm, graph_linear], ids=lambda call: call.__name__)
@CONFIGS
def test_heads_have_to_divide_the_columns(call: Call, config: QConfig | None) -> None:
    with pytest.raises(ValueError, match=r"expects a number of heads that divides the \d+ columns of the rows"):
        call(torch.randn(N, K), torch.randn(M, K), edge_weight=torch.rand(EDGES.shape[1], 5), config=config)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("side", ["target", "source"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 4)])
def test_incidence_sum_is_the_product_with_the_incidence_matrix(name: str, side: str, shape: tuple[int, ...]) -> None:
    edge_index, num_sources, num_targets = CASES[name]
    num_nodes, row = (num_targets, edge_index[1]) if side == "target" else (num_sources, edge_index[0])
    edge_x = torch.randn(edge_index.shape[1], *shape, dtype=torch.float64, requires_grad=True)
    numbers = torch.arange(edge_index.shape[1])
    matrix = adjacency(torch.stack([numbers, row]), edge_index.shape[1], num_nodes)
    out = functional.incidence_sum(graph_of(name), edge_x, side)
    assert out.shape == (num_nodes, *shape)
    expected = matrix @ edge_x.detach().flatten(1) if shape else matrix @ edge_x.detach()
    torch.testing.assert_close(out.detach(), expected.view(out.shape))
    upstream = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, edge_x, upstream)
    assert torch.equal(grad, upstream[row])


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 5), st.randoms(use_true_random=False))
def test_incidence_sum_does_not_depend_on_the_order_of_edges(num_nodes: int, E: int, F: int, random: Any) -> None:
    edge_index, edge_x = torch.randint(num_nodes, (2, E)), torch.randint(-9, 9, (E, F)).float()  # sums are exact
    order = list(range(E))
    random.shuffle(order)
    for side in ("target", "source"):
        out = functional.incidence_sum(edge_index, edge_x, side, num_nodes=num_nodes)
        shuffled = functional.incidence_sum(edge_index[:, order], edge_x[order], side, num_nodes=num_nodes)
        assert torch.equal(out, shuffled)


def test_incidence_sum_of_codes_is_unbiased() -> None:
    edge_x = torch.rand(EDGES.shape[1], 5)
    exact = functional.incidence_sum(EDGES, edge_x.double(), num_nodes=N)
    config = QConfig(bits=4)
    draws = [functional.incidence_sum(EDGES, edge_x, num_nodes=N, config=config, seed=s) for s in range(200)]
    samples = torch.stack(draws).double()
    allowed = 5 * samples.std(0) / 200**0.5 + 2.0**-14 * exact.abs().max()
    assert ((samples.mean(0) - exact).abs() <= allowed).all()
    assert samples.std(0).max() > 0


def test_incidence_sum_refuses_what_does_not_fit() -> None:
    edge_x, graph = torch.rand(EDGES.shape[1]), Graph.from_edge_index(EDGES, N)
    with pytest.raises(ValueError, match=r"'incidence_sum' expects 'side' to be one of .* \(got 'both'\)"):
        functional.incidence_sum(graph, edge_x, "both")
    with pytest.raises(ValueError, match=r"expects 'num_nodes' where 'graph' is no qgnn.Graph \(got None\)"):
        functional.incidence_sum(EDGES, edge_x)
    with pytest.raises(ValueError, match=r"expects 'edge_x' with one row for each of 200 edges \(got \[199\]\)"):
        functional.incidence_sum(graph, edge_x[1:])
    with pytest.raises(TypeError, match=r"expects 'edge_x' in a floating-point type \(got torch.int64\)"):
        functional.incidence_sum(graph, torch.ones(EDGES.shape[1], dtype=torch.int64))
    with pytest.raises(ValueError, match="'graph' has 50 source and 50 target nodes"):
        functional.incidence_sum(graph, edge_x, num_nodes=51)
