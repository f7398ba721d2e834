"""sddmm, edge_softmax and attention_weights: values in the order of the given edges, gradients, and clear errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import leaky_relu
from torch_geometric import EdgeIndex
from torch_geometric.utils import softmax

from dense import CASES
from graphs import GRAPHS
from qgnn import Graph, QConfig, QTensor, formats, functional, trace

EDGES, N = GRAPHS["random"]
NEAREST = QConfig(rounding="nearest")
OPS = pytest.mark.parametrize("op", ["dot", "add"])
SHAPES = pytest.mark.parametrize("shape", [(6,), (1, 6), (3, 5)], ids=str)


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def gathered(edge_index: Tensor, x_source: Tensor, x_target: Tensor, op: str) -> Tensor:
    source, target = x_source[edge_index[0]], x_target[edge_index[1]]
    return (source * target).sum(-1) if op == "dot" else source + target


def assert_same(actual: Callable[..., Tensor], expected: Callable[..., Tensor], *leaves: Tensor) -> None:
    """Values and gradients, in float64."""
    out, exact = actual(*leaves), expected(*leaves)
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(exact)
    grads = (torch.autograd.grad(y, leaves, upstream) for y in (out, exact))
    for grad, exact_grad in zip(*grads, strict=True):
        torch.testing.assert_close(grad, exact_grad, rtol=1e-12, atol=1e-11)


# --- values ---


@pytest.mark.parametrize("name", CASES)
@OPS
@SHAPES
def test_sddmm_is_that_of_the_gathered_rows(name: str, op: str, shape: tuple[int, ...]) -> None:
    edge_index, num_sources, num_targets = CASES[name]
    graph = Graph.from_edge_index(edge_index, (num_sources, num_targets))
    assert_same(
        lambda s, t: functional.sddmm(graph, s, t, op),
        lambda s, t: gathered(edge_index, s, t, op),
        leaf(num_sources, *shape),
        leaf(num_targets, *shape),
    )


@pytest.mark.parametrize("name", CASES)
def test_edge_softmax_is_that_of_pyg(name: str) -> None:
    edge_index, num_sources, num_targets = CASES[name]
    graph = Graph.from_edge_index(edge_index, (num_sources, num_targets))
    for shape in ((), (1,), (3,)):
        assert_same(
            lambda s: functional.edge_softmax(graph, s),
            lambda s: softmax(s, edge_index[1], num_nodes=num_targets),
            leaf(edge_index.shape[1], *shape),
        )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("slope", [0.2, 0.01])
def test_attention_weights_are_those_of_gat(name: str, slope: float) -> None:
    edge_index, num_sources, num_targets = CASES[name]
    graph = Graph.from_edge_index(edge_index, (num_sources, num_targets))

    def exact(source: Tensor, target: Tensor) -> Tensor:
        scores = leaky_relu(source[edge_index[0]] + target[edge_index[1]], slope)
        return softmax(scores, edge_index[1], num_nodes=num_targets)

    leaves = leaf(num_sources, 3), leaf(num_targets, 3)
    assert_same(lambda s, t: functional.attention_weights(graph, s, t, slope), exact, *leaves)


def test_the_slope_is_that_of_gat_by_default() -> None:
    source, target = torch.randn(N, 2), torch.randn(N, 2)
    expected = functional.attention_weights(EDGES, source, target, 0.2)
    assert torch.equal(functional.attention_weights(EDGES, source, target), expected)


@pytest.mark.parametrize("kind", ["edge_index", "EdgeIndex", "matrix", "weighted graph"])
def test_whatever_pyg_takes_as_edges(kind: str) -> None:
    edge_index = EDGES
    edges: Any = EDGES
    if kind == "EdgeIndex":
        edges = EdgeIndex(EDGES, sparse_size=(N, N))
    elif kind == "matrix":
        edges = torch.sparse_coo_tensor(EDGES.flip(0), torch.rand(EDGES.shape[1]), (N, N)).coalesce()
        edge_index = edges.indices().flip(0)
    elif kind == "weighted graph":
        edges = Graph.from_edge_index(EDGES, N, torch.rand(EDGES.shape[1]))
    x, y = torch.randn(N, 6), torch.randn(N, 6)
    torch.testing.assert_close(functional.sddmm(edges, x, y), gathered(edge_index, x, y, "dot"))
    scores = torch.randn(edge_index.shape[1], 2)
    torch.testing.assert_close(functional.edge_softmax(edges, scores), softmax(scores, edge_index[1]))
    scores = leaky_relu(x[edge_index[0]] + y[edge_index[1]], 0.2)
    torch.testing.assert_close(functional.attention_weights(edges, x, y), softmax(scores, edge_index[1]))


def test_edge_softmax_counts_the_nodes_of_edges_anew_when_they_change() -> None:
    edge_index, scores = torch.tensor([[0, 1, 2], [0, 1, 1]]), torch.zeros(3)
    assert functional.edge_softmax(edge_index, scores).tolist() == [1.0, 0.5, 0.5]
    edge_index[1, 1] = 7
    assert functional.edge_softmax(edge_index, scores).tolist() == [1.0, 1.0, 1.0]
    assert functional.edge_softmax(torch.empty(2, 0, dtype=torch.long), torch.empty(0, 4)).shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_types_are_kept(dtype: torch.dtype) -> None:
    x, scores = torch.randn(N, 6).to(dtype), torch.randn(EDGES.shape[1]).to(dtype)
    results = [
        functional.sddmm(EDGES, x, x, op, config=c) for op, c in (("dot", None), ("dot", NEAREST), ("add", None))
    ]
    results += [functional.edge_softmax(EDGES, scores), functional.attention_weights(EDGES, x, x)]
    assert {out.dtype for out in results} == {dtype}


# --- int8 ---


@SHAPES
@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("save", ["int8", "fp32"])
def test_int8_dots_and_their_gradients_are_close(shape: tuple[int, ...], granularity: str, save: str) -> None:
    config = QConfig(rounding="nearest", granularity=granularity, save=save)
    source, target = leaf(N, *shape, dtype=torch.float32), leaf(N, *shape, dtype=torch.float32)
    out, exact = functional.sddmm(EDGES, source, target, config=config), gathered(EDGES, source, target, "dot")
    assert out.shape == exact.shape
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, (source, target), upstream)
    exact_grads = torch.autograd.grad(exact, (source, target), upstream)
    for ours, theirs in zip((out, *grads), (exact, *exact_grads), strict=True):
        # A step is absmax / 127; rounding to nearest is off by a root of twelfth of it, that is 0.6 % of a Gaussian
        # whose absmax, with one scale for all, is 3 of its deviations; both sides are rounded.
        assert (ours - theirs).norm() < 0.02 * theirs.norm()
    if save == "fp32":
        torch.testing.assert_close(grads, exact_grads)


def test_heads_have_scales_of_their_own() -> None:
    """A head of large values does not round away one of small values."""
    x = torch.randn(N, 2, 8) * torch.tensor([1e4, 1e-4])[:, None]
    out, exact = functional.sddmm(EDGES, x, x, config=NEAREST), gathered(EDGES, x, x, "dot")
    for head in (0, 1):
        assert (out - exact)[:, head].norm() < 0.02 * exact[:, head].norm()


@SHAPES
def test_quantized_rows_are_taken_as_they_are(shape: tuple[int, ...]) -> None:
    """With codes on both sides the integer product needs no config; the same codes come from the same config."""
    x, y = torch.randn(N, *shape), torch.randn(N, *shape)
    q, r = (functional.quantize(t, NEAREST) for t in (x, y))
    expected = functional.sddmm(EDGES, x, y, config=NEAREST)
    assert torch.equal(functional.sddmm(EDGES, q, r), expected)
    assert torch.equal(functional.sddmm(EDGES, q, r, config=NEAREST), expected)
    assert torch.equal(functional.sddmm(EDGES, q, y, config=NEAREST), expected)
    assert torch.equal(functional.sddmm(EDGES, x, r, config=NEAREST), expected)
    exact = gathered(EDGES, q.dequantize(), y, "dot")
    torch.testing.assert_close(functional.sddmm(EDGES, q, y), exact, rtol=1e-5, atol=1e-5)
    sums = functional.sddmm(EDGES, q, r, "add")
    torch.testing.assert_close(sums, gathered(EDGES, q.dequantize(), r.dequantize(), "add"), rtol=1e-6, atol=1e-6)
    assert torch.equal(functional.sddmm(EDGES, q, y, "add"), gathered(EDGES, q.dequantize(), y, "add"))


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_scales_of_tensors_and_heads_are_told_apart(num_nodes: int) -> None:
    """Also where there are as many heads as scales of one node."""
    edge_index, x = torch.zeros(2, 1, dtype=torch.long), torch.randn(num_nodes, 2, 4)
    for granularity in ("row", "tensor"):
        config = QConfig(granularity=granularity, rounding="nearest")
        q = functional.quantize(x, config)
        torch.testing.assert_close(
            functional.sddmm(edge_index, q, q), gathered(edge_index, q.dequantize(), q.dequantize(), "dot")
        )
        assert torch.equal(functional.sddmm(edge_index, x, x, config=config), functional.sddmm(edge_index, q, q))


def test_seeds_and_rounding() -> None:
    x = torch.randn(N, 6)
    results = [functional.sddmm(EDGES, x, x, config=QConfig(), seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    torch.manual_seed(0)
    drawn = [functional.sddmm(EDGES, x, x, config=QConfig()) for _ in range(2)]
    assert not torch.equal(*drawn)


def test_a_trace_shows_what_ran() -> None:
    x = torch.randn(N, 6)
    with trace() as report:
        functional.sddmm(EDGES, x, x, config=NEAREST)
        functional.attention_weights(EDGES, x, x)
        functional.edge_softmax(EDGES, torch.randn(EDGES.shape[1]))
    calls = {name: entry["calls"] for name, entry in report.ops.items()}
    assert calls == {"quantize.forward": 2, "sddmm.forward": 1, "softmax.forward": 2}
    assert "int8" in report.ops["sddmm.forward"]["format"]


def test_compiled_functions_are_one_graph() -> None:
    """As the other functions: no break, and the same numbers."""
    graph, x = Graph.from_edge_index(EDGES, N), torch.randn(N, 2, 6)

    def run(x: Tensor) -> Tensor:
        scores = functional.sddmm(graph, x, x, config=NEAREST)
        return functional.edge_softmax(graph, scores) + functional.attention_weights(graph, x[..., 0], x[..., 1])

    out = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(out, run(x), rtol=1e-6, atol=1e-6)


# --- errors ---


def test_sddmm_rejects_unknown_ops_and_configs() -> None:
    x = torch.ones(N, 6)
    with pytest.raises(ValueError, match=r"'sddmm' expects 'op' to be one of \('dot', 'add'\) \(got 'mul'\)"):
        functional.sddmm(EDGES, x, x, "mul")
    with pytest.raises(ValueError, match=r"'sddmm' quantizes with op='dot' only .*; use config=None"):
        functional.sddmm(EDGES, x, x, "add", config=QConfig())
    with pytest.raises(TypeError, match=r"'sddmm' expects 'config' to be a QConfig or None \(got 8\)"):
        functional.sddmm(EDGES, x, x, config=8)
    with pytest.raises(ValueError, match="'sddmm' expects granularity 'row' or 'tensor'"):
        functional.sddmm(EDGES, x, x, config=QConfig(granularity="block"))
    with pytest.raises(TypeError, match="'seed' expects an int"):
        functional.sddmm(EDGES, x, x, config=QConfig(), seed=1.5)


@pytest.mark.parametrize(
    ("source", "target", "error", "message"),
    [
        ([[1.0]], torch.ones(N, 6), TypeError, r"'sddmm' expects 'x_source' to be a tensor \(got list\)"),
        (
            torch.ones(N, 6),
            torch.ones(N, 6).long(),
            TypeError,
            r"'x_target' in a floating-point type .*'x_target.float",
        ),
        (
            torch.ones(N),
            torch.ones(N),
            ValueError,
            r"'x_source' of shape \[N, F\] or \[N, H, D\], H > 0 \(got \[50\]\)",
        ),
        (torch.ones(N, 6), torch.ones(N, 1, 2, 3), ValueError, r"'x_target' of shape \[N, F\] or \[N, H, D\]"),
        (torch.ones(N, 0, 6), torch.ones(N, 0, 6), ValueError, r"'x_source' of shape .* H > 0 \(got \[50, 0, 6\]\)"),
        (
            torch.ones(N, 6),
            torch.ones(N, 7),
            ValueError,
            r"rows of one shape \(got \[50, 6\] for 'x_source' and \[50, 7",
        ),
        (torch.ones(N, 6), torch.ones(N, 2, 3), ValueError, "rows of one shape"),
        (torch.ones(N, 6), torch.ones(N, 6).half(), TypeError, r"one type \(got torch.float32 for 'x_source' and .*16"),
        (
            torch.ones(N, 6),
            torch.ones(N, 6, device="meta"),
            ValueError,
            r"'sddmm' expects 'x_target' on cpu \(got meta",
        ),
    ],
)
@OPS
def test_sddmm_rejects_rows(source: Any, target: Any, error: type[Exception], message: str, op: str) -> None:
    with pytest.raises(error, match=message):
        functional.sddmm(EDGES, source, target, op)


def test_sddmm_rejects_codes_that_products_cannot_take() -> None:
    x = torch.randn(N, 6)
    wrong: list[tuple[QTensor, str]] = [
        (functional.quantize(x, formats.Int(8, symmetric=False)), "'sddmm' expects symmetric int8 codes"),
        (functional.quantize(x, QConfig(granularity="block", block_size=2)), "one scale a row or one a tensor"),
    ]
    for q, message in wrong:
        with pytest.raises(ValueError, match=message):
            functional.sddmm(EDGES, q, q)


def test_numbers_of_nodes_must_fit() -> None:
    graph = Graph.from_edge_index(EDGES, N)
    x, few = torch.ones(N, 6), torch.ones(N - 1, 6)
    for call in (functional.sddmm, functional.attention_weights):
        for source, target in ((few, x), (x, few)):
            with pytest.raises(ValueError, match=r"'graph' has 50 source and 50 target nodes \(expected"):
                call(graph, source, target)
        with pytest.raises(ValueError, match=r"expects (source|target) indices from 0 to"):
            call(EDGES, torch.ones(int(EDGES[0].max()), 6), x)


def test_edge_softmax_rejects_scores() -> None:
    E = EDGES.shape[1]
    for shape in ((E - 1,), (E + 1, 2), (E, 2, 2), ()):
        with pytest.raises(ValueError, match=rf"'edge_softmax' expects 'scores' of shape \[{E}\] or \[{E}, H\]"):
            functional.edge_softmax(EDGES, torch.ones(shape))
    with pytest.raises(TypeError, match="'edge_softmax' expects 'scores' in a floating-point type"):
        functional.edge_softmax(EDGES, torch.ones(E, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"'edge_softmax' expects 'scores' on cpu \(got meta\)"):
        functional.edge_softmax(EDGES, torch.ones(E, device="meta"))


def test_attention_weights_rejects_scores() -> None:
    for source, target in (((N,), (N, 3)), ((N, 3), (N,)), ((N, 3), (N, 4)), ((N, 3, 1), (N, 3))):
        with pytest.raises(ValueError, match=r"'attention_weights' expects 'score_\w+' of shape \[N, H\]"):
            functional.attention_weights(EDGES, torch.ones(source), torch.ones(target))
    with pytest.raises(TypeError, match="'attention_weights' expects 'score_target' in a floating-point type"):
        functional.attention_weights(EDGES, torch.ones(N, 2), torch.ones(N, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"expects scores of one type \(got torch.float32 and torch.float64\)"):
        functional.attention_weights(EDGES, torch.ones(N, 2), torch.ones(N, 2).double())
    for name in ("score_source", "score_target"):
        scores = [torch.ones(N, 2, device="meta" if name == n else "cpu") for n in ("score_source", "score_target")]
        with pytest.raises(ValueError, match=rf"'attention_weights' expects '{name}' on cpu \(got meta\)"):
            functional.attention_weights(EDGES, *scores)
