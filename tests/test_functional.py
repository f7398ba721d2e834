"""The stateless API: values against dense float64, properties, and one clear error for each wrong argument."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graphs import GRAPHS, RECTANGULAR
from layer_cases import assert_same_pass, assert_unbiased, dense_adjacency, relative_error
from qgnn import Graph, QConfig, QTensor, formats, functional, rng

NEAREST = QConfig(rounding="nearest")
K, M = 12, 5


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors here are tiny: a second thread only waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def gradients(function: Callable[..., Tensor], *leaves: Tensor) -> dict[str, Tensor]:
    """Output and gradients of ``function(*leaves)`` for one fixed upstream gradient."""
    out = function(*leaves)
    generator = torch.Generator().manual_seed(3)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    grads = torch.autograd.grad(out, leaves, upstream)
    return {"out": out.detach(), **{f"d{i}": grad for i, grad in enumerate(grads)}}


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def bipartite(name: str) -> tuple[Tensor, int, int, Graph]:
    edge_index, num_sources, num_targets = RECTANGULAR[name]
    return edge_index, num_sources, num_targets, Graph.from_edge_index(edge_index, (num_sources, num_targets))


def dense_mean(edge_index: Tensor, num_sources: int, num_targets: int, weight: Tensor | None) -> Tensor:
    count = torch.bincount(edge_index[1], minlength=num_targets).clamp_min(1)
    return dense_adjacency(edge_index, num_sources, num_targets, weight) / count[:, None]


# --- values ---


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", RECTANGULAR)
def test_spmm_on_a_bipartite_graph_equals_the_dense_product(name: str, weighted: bool, reduce: str) -> None:
    edge_index, num_sources, num_targets, graph = bipartite(name)
    weight = torch.rand(edge_index.shape[1]) if weighted else None
    dense = (dense_mean if reduce == "mean" else dense_adjacency)(edge_index, num_sources, num_targets, weight)
    x = leaf(num_sources, K)
    expected = gradients(lambda x: dense.float() @ x, x)
    assert_same_pass(gradients(lambda x: functional.spmm(graph, x, weight, reduce), x), expected)
    actual = gradients(lambda x: functional.spmm(graph, x, weight, reduce, config=NEAREST), x)
    for key, value in expected.items():
        assert actual[key].shape == value.shape
        # a step is absmax / 127 of a row of 12 Gaussians: 0.4% of noise, less after a sum
        assert value.abs().sum() == actual[key].abs().sum() == 0 or relative_error(actual[key], value) < 0.01


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("name", RECTANGULAR)
def test_graph_linear_on_a_bipartite_graph_equals_the_dense_product(name: str, reduce: str) -> None:
    edge_index, num_sources, num_targets, graph = bipartite(name)
    dense = (dense_mean if reduce == "mean" else dense_adjacency)(edge_index, num_sources, num_targets, None).float()
    x, weight, bias = leaf(num_sources, K), leaf(M, K), leaf(M)
    expected = gradients(lambda x, w, b: dense @ (x @ w.t()) + b, x, weight, bias)
    for config, bound in ((None, 1e-5), (NEAREST, 0.03)):
        actual = gradients(
            lambda x, w, b, c=config: functional.graph_linear(graph, x, w, b, reduce=reduce, config=c), x, weight, bias
        )
        assert_same_pass(actual, expected, rel=bound)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize(
    "config",
    [None, NEAREST, QConfig(rounding="nearest", save="fp32"), QConfig(rounding="nearest", granularity="tensor")],
    ids=["fp32", "int8", "save_fp32", "tensor"],
)
def test_edge_weights_get_the_gradient_of_the_dense_product(config: QConfig | None, reduce: str) -> None:
    for name in ("wide", "tall", "one_target", "no_edges"):
        edge_index, num_sources, num_targets, graph = bipartite(name)
        x, weight, theta = leaf(num_sources, K), leaf(edge_index.shape[1]), leaf(M, K)
        per_row = torch.bincount(edge_index[1], minlength=num_targets).clamp_min(1)[:, None]
        divisor = per_row if reduce == "mean" else 1

        def dense(x: Tensor, w: Tensor, edge_index=edge_index, n=num_targets, divisor=divisor) -> Tensor:
            rows = w[:, None] * x[edge_index[0]]
            return x.new_zeros(n, x.shape[1]).index_add(0, edge_index[1], rows) / divisor

        bound = 1e-5 if config is None else 0.03
        for fused, exact in (
            (lambda x, w, g=graph: functional.spmm(g, x, w, reduce, config=config), dense),
            (
                lambda x, w, g=graph, t=theta: functional.graph_linear(g, x, t, None, w, reduce, config=config),
                lambda x, w, t=theta, dense=dense: dense(x @ t.t(), w),
            ),
        ):
            assert_same_pass(gradients(fused, x, weight), gradients(exact, x, weight), rel=bound)


def test_a_column_of_edge_weights_is_a_vector_of_them() -> None:
    edge_index, num_nodes = GRAPHS["random"]
    x, weight = torch.randn(num_nodes, K), torch.rand(edge_index.shape[1])
    expected = functional.spmm(edge_index, x, weight)
    assert torch.equal(functional.spmm(edge_index, x, weight[:, None]), expected)


def test_spmm_is_adjoint_of_its_gradient() -> None:
    edge_index, num_nodes = GRAPHS["power_law"]
    x, y = leaf(num_nodes, K, dtype=torch.float64), torch.randn(num_nodes, K, dtype=torch.float64)
    out = functional.spmm(edge_index, x)
    (grad,) = torch.autograd.grad(out, x, y)
    torch.testing.assert_close((out * y).sum(), (x * grad).sum())


def test_functions_are_differentiable_in_float64() -> None:
    edge_index, num_nodes = GRAPHS["isolated"]
    x, w = leaf(num_nodes, 3, dtype=torch.float64), leaf(edge_index.shape[1], dtype=torch.float64)
    theta, bias = leaf(2, 3, dtype=torch.float64), leaf(2, dtype=torch.float64)
    torch.autograd.gradcheck(lambda x, w: functional.spmm(edge_index, x, w, "mean"), (x, w))
    torch.autograd.gradcheck(
        lambda x, t, b, w: functional.graph_linear(edge_index, x, t, b, w), (x, theta, bias, w), atol=1e-6
    )


def test_graph_linear_is_linear_then_spmm() -> None:
    """Rounding to nearest, row by row: the two in one operator round the same rows as one after the other."""
    edge_index, num_nodes = GRAPHS["random"]
    x, weight, bias = torch.randn(num_nodes, K), torch.randn(M, K), torch.randn(M)
    fused = functional.graph_linear(edge_index, x, weight, bias, config=NEAREST)
    composed = functional.spmm(edge_index, functional.linear(x, weight, config=NEAREST), config=NEAREST) + bias
    # codes of the row before its factor or after it may differ by one of 127 steps where they sit on a half
    torch.testing.assert_close(fused, composed, rtol=0, atol=0.02 * composed.abs().max().item())
    exact = functional.graph_linear(edge_index, x, weight, bias)
    torch.testing.assert_close(exact, functional.spmm(edge_index, functional.linear(x, weight)) + bias)


@pytest.mark.parametrize("function", ["linear", "spmm", "graph_linear", "quantize"])
def test_a_seed_decides_the_codes(function: str) -> None:
    edge_index, num_nodes = GRAPHS["random"]
    x, weight = torch.randn(num_nodes, K), torch.randn(M, K)
    config = QConfig()
    run = {
        "linear": lambda seed: functional.linear(x, weight, config=config, seed=seed),
        "spmm": lambda seed: functional.spmm(edge_index, x, config=config, seed=seed),
        "graph_linear": lambda seed: functional.graph_linear(edge_index, x, weight, config=config, seed=seed),
        "quantize": lambda seed: functional.quantize(x, config, seed=seed).codes,
    }[function]
    state = torch.get_rng_state()
    assert torch.equal(run(3), run(3))
    assert torch.equal(run(rng.make_seed(3)), run(3))
    assert torch.equal(torch.get_rng_state(), state)  # a given seed leaves torch's generator alone
    assert not torch.equal(run(3), run(4))
    assert not torch.equal(run(None), run(None))
    torch.manual_seed(1)
    first = run(None)
    torch.manual_seed(1)
    assert torch.equal(run(None), first)


def test_spmm_with_weights_is_unbiased() -> None:
    edge_index, num_nodes = GRAPHS["isolated"]
    x, weight = leaf(num_nodes, K), leaf(edge_index.shape[1])
    exact = gradients(lambda x, w: functional.spmm(edge_index, x, w, "mean"), x, weight)
    config = QConfig(bits=4)
    assert_unbiased(
        lambda: gradients(lambda x, w: functional.spmm(edge_index, x, w, "mean", config=config), x, weight), exact, 300
    )


# --- quantize ---


@pytest.mark.parametrize("shape", [(9,), (1,), (4, 9), (0, 9), (4, 0), (2, 3, 9), (2, 0, 9)], ids=str)
@pytest.mark.parametrize("granularity", ["row", "tensor", "block"])
def test_quantize_shapes(granularity: str, shape: tuple[int, ...]) -> None:
    config = QConfig(granularity=granularity, rounding="nearest", block_size=4)
    x = torch.randn(shape)
    q = functional.quantize(x, config)
    scale_shape = {
        "row": (*shape[:-1], 1),
        "tensor": (1,) * len(shape),
        "block": (*shape[:-1], -(-shape[-1] // 4)),
    }[granularity]
    assert q.codes.shape == q.shape == x.shape
    assert q.codes.dtype == torch.int8
    assert q.scale.shape == scale_shape
    assert q.scale.dtype == torch.float32
    assert q.block_size == (4 if granularity == "block" else None)
    value = functional.dequantize(q)
    assert value.shape == x.shape
    step = q.scale.repeat_interleave(4, -1)[..., : shape[-1]] if granularity == "block" else q.scale
    assert ((value - x).abs() <= 0.501 * step).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_quantize_gives_back_the_type(dtype: torch.dtype) -> None:
    x = torch.randn(6, 9, dtype=dtype)
    q = functional.quantize(x, NEAREST)
    assert q.scale.dtype == torch.float32
    assert q.dequantize().dtype == dtype


@pytest.mark.parametrize("config", [None, NEAREST], ids=["fp32", "int8"])
def test_means_of_codes_of_float64_rows(config: QConfig | None) -> None:
    """Codes have fp32 scales and sums, whatever type was quantized and whatever type the weight has."""
    edge_index, num_nodes = GRAPHS["random"]
    x, weight = torch.randn(num_nodes, K), torch.randn(M, K)  # as float64 they are the same numbers
    codes, codes64 = functional.quantize(x, NEAREST), functional.quantize(x.double(), NEAREST)
    options: dict[str, Any] = {"reduce": "mean", "config": config}
    for out, expected in (
        (functional.spmm(edge_index, codes64, **options), functional.spmm(edge_index, codes, **options)),
        (
            functional.graph_linear(edge_index, codes64, weight.double(), **options),
            functional.graph_linear(edge_index, codes, weight, **options),
        ),
    ):
        assert out.dtype == torch.float64
        torch.testing.assert_close(out.float(), expected)


def test_quantize_takes_a_format() -> None:
    x = torch.randn(6, 9)
    q = functional.quantize(x, formats.Int(4, symmetric=False))
    assert q.codes.dtype == torch.uint8
    assert q.zero is not None
    assert ((q.dequantize() - x).abs() <= 0.51 * q.scale).all()
    assert torch.equal(
        functional.quantize(x, QConfig(fmt=formats.Int(4)), seed=1).codes.abs().amax(1), torch.full((6,), 7)
    )


def test_quantize_defaults_to_stochastic_int8_rows() -> None:
    x = torch.randn(6, 9)
    q = functional.quantize(x, seed=5)
    assert torch.equal(q.codes, functional.quantize(x, QConfig(), seed=5).codes)


VALUES = st.floats(-(2.0**99), 2.0**99, width=32)


@given(
    rows=st.lists(st.lists(VALUES, min_size=5, max_size=5), min_size=1, max_size=4),
    bits=st.integers(2, 8),
    rounding=st.sampled_from(["nearest", "stochastic"]),
)
def test_quantize_misses_by_less_than_a_step(rows: list[list[float]], bits: int, rounding: str) -> None:
    x = torch.tensor(rows)
    q = functional.quantize(x, QConfig(bits=bits, rounding=rounding), seed=1)
    qmax = 2 ** (bits - 1) - 1
    assert q.codes.abs().max() <= qmax
    error = (q.dequantize().double() - x.double()).abs()
    # half a step or a whole one, 2^-16 cut off, roundings of the scale; magnitudes up to 1e-30 count as zero
    steps = 0.5 if rounding == "nearest" else 1.0
    assert (error <= (steps + 1e-3) * q.scale.double() + 1.0001e-30).all()
    flipped = functional.quantize(-x, QConfig(bits=bits, rounding="nearest"))
    plain = functional.quantize(x, QConfig(bits=bits, rounding="nearest"))
    assert torch.equal(flipped.scale, plain.scale)
    assert ((flipped.codes + plain.codes).abs() <= 1).all()


@given(
    num_nodes=st.integers(1, 12),
    edges=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=30),
    reduce=st.sampled_from(["sum", "mean"]),
    order=st.randoms(use_true_random=False),
)
def test_spmm_does_not_depend_on_the_order_of_edges(
    num_nodes: int, edges: list[tuple[int, int]], reduce: str, order: Any
) -> None:
    edges = [(s % num_nodes, t % num_nodes) for s, t in edges]
    shuffled = list(range(len(edges)))
    order.shuffle(shuffled)
    edge_index = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t()
    weight, x = torch.rand(len(edges)), torch.randn(num_nodes, 3)
    permutation = torch.tensor(shuffled, dtype=torch.int64)
    first = functional.spmm(edge_index, x, weight, reduce, config=NEAREST)
    second = functional.spmm(edge_index[:, permutation], x, weight[permutation], reduce, config=NEAREST)
    torch.testing.assert_close(first, second)
    matrix = dense_mean if reduce == "mean" else dense_adjacency
    dense = matrix(edge_index, num_nodes, num_nodes, weight).float() @ functional.quantize(x, NEAREST).dequantize()
    torch.testing.assert_close(first, dense)


@given(
    leading=st.lists(st.integers(0, 3), max_size=3),
    widths=st.tuples(st.integers(1, 40), st.integers(1, 9)),
    granularity=st.sampled_from(["row", "tensor"]),
)
def test_linear_has_the_shape_of_torch(leading: list[int], widths: tuple[int, int], granularity: str) -> None:
    width, num_outputs = widths
    x, weight = torch.randn(*leading, width), torch.randn(num_outputs, width)
    config = QConfig(granularity=granularity, rounding="nearest")
    expected = torch.nn.functional.linear(x, weight)
    actual = functional.linear(x, weight, config=config)
    assert actual.shape == expected.shape
    # operands miss by half a step of 1/127 of their largest magnitude, each against the other's largest
    bound = width * 1.01 / 127 * (x.abs().max() if x.numel() else 0) * weight.abs().max()
    assert ((actual - expected).abs() <= bound).all()


def test_functions_take_quantized_features() -> None:
    edge_index, num_nodes = GRAPHS["random"]
    x, weight = torch.randn(num_nodes, K), leaf(M, K)
    for config in (NEAREST, QConfig(granularity="tensor", rounding="nearest")):
        q: QTensor = functional.quantize(x, config)
        for run in (
            lambda value, c=config: functional.linear(value, weight, config=c),
            lambda value, c=config: functional.graph_linear(edge_index, value, weight, config=c),
        ):
            assert torch.equal(run(q), run(x))
            torch.testing.assert_close(run(q, None), run(q.dequantize(), None))
    asymmetric = functional.quantize(x, formats.Int(8, symmetric=False))
    torch.testing.assert_close(functional.linear(asymmetric, weight), asymmetric.dequantize() @ weight.t())
