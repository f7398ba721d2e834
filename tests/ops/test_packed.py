"""Products that keep packed blocks of their rows: the gradient of the weight against the blocks that were kept."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dense import WIDTHS, assert_within, graph_of, seed_of, sum_bound
from op_checks import (
    NO_EPILOGUE,
    assert_unbiased,
    gradients,
    opcheck,
    saved_tensors,
    shares_memory,
    spmm_structure,
)
from qgnn import Graph, ops, reference, rng
from qgnn.ops._backends import (
    STREAM_GRAD,
    STREAM_UNPACKED,
    torch_backend,
    triton_backend,
)
from qgnn.ops._packed import packed_weight_grad
from qgnn.ops.graph_linear import graph_linear_backward
from qgnn.ops.matmul import matmul_backward

N, K, M = 13, 33, 7
EDGES = {2: torch.tensor([0, 1.25, 1.75, 3]), 4: torch.cat([torch.arange(15) * 0.875, torch.tensor([15.0])])}
FORMATS = {
    "int2": {"bits": 2, "block_size": 16},
    "int2-rp4": {"bits": 2, "block_size": 64, "projection": 8},
    "int2-vm": {"bits": 2, "block_size": 32, "edges": EDGES[2], "dtype": torch.float16},
    "int4-rp2-vm": {"bits": 4, "block_size": 24, "projection": 17, "edges": EDGES[4]},
    "int1": {"bits": 1, "block_size": 8, "dtype": torch.float32},
    "int8-rp33": {"bits": 8, "block_size": 40, "projection": 1},
}


def pack(
    x: Tensor,
    bits: int = 2,
    block_size: int = 16,
    projection: int = 0,
    edges: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 5,
) -> ops.Packed:
    seeds = rng.make_seed(seed, x.device)
    edges = None if edges is None else edges.to(x.device)
    blocks = ops.blocks_pack(x.detach(), seeds, bits, block_size, dtype, edges, projection, seeds)
    return ops.Packed(*blocks, edges, seeds, bits, projection)


def matmul(kept: ops.Packed, *, seed: int | None = 1, bits: int = 8, granularity: str = "row") -> Callable[..., Tensor]:
    options = (seed_of(seed), bits, granularity, False, *NO_EPILOGUE, *kept, None)
    return lambda x, weight, bias=None: ops.matmul(x, None, weight, bias, *options)[0]


def graph_linear(graph: Graph, kept: ops.Packed, *, seed: int | None = 1) -> Callable[..., Tensor]:
    options = (*spmm_structure(graph), seed_of(seed), 8, "row", False, False, *NO_EPILOGUE, *kept, None)
    return lambda x, weight, bias=None: ops.graph_linear(x, None, weight, bias, *(None,) * 3, *options)[0]


def rounded(x: Tensor, stream: int, seed: Tensor | None) -> Tensor:
    """float64 values of the codes that an operator makes."""
    codes, scale = reference.quantize(x, seed=seed, stream=stream)
    return codes.double() * scale.double()[:, None]


def assert_gradient_of(kept: ops.Packed, g: Tensor, num_columns: int, actual: Tensor) -> None:
    """``g^T x`` for what was kept of ``x``, within the error of sums over the rows."""
    options = (kept.edges, kept.projection, kept.packed_seed if kept.projection else None, num_columns, 0)
    size = len(g) * (kept.projection or num_columns)
    values = ops.blocks_unpack(*kept[:3], kept.packed_bits, size, torch.float32, *options)
    rows = rounded(values.view(len(g), num_columns), STREAM_UNPACKED, kept.packed_seed)
    assert_within(actual, g.t() @ rows, sum_bound(torch.tensor(len(g)), g.abs().t() @ rows.abs(), 3))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", [None, 1], ids=["nearest", "stochastic"])
def test_the_gradient_is_that_of_the_blocks(name: str, seed: int | None) -> None:
    x, weight, upstream = torch.randn(N, K), torch.randn(M, K), torch.randn(N, M)
    kept = pack(x, **FORMATS[name])
    _, grads = gradients(matmul(kept, seed=seed), {"x": x, "weight": weight}, upstream)
    assert_gradient_of(kept, rounded(upstream, STREAM_GRAD, seed_of(seed)), K, grads["weight"])


@pytest.mark.parametrize("name", ["int2", "int2-rp4"])
@pytest.mark.parametrize("graph_name", ["tall", "isolated"])
def test_the_gradient_behind_a_graph_is_that_of_the_blocks(name: str, graph_name: str) -> None:
    graph = graph_of(graph_name)
    x, weight = torch.randn(graph.num_sources, K), torch.randn(M, K)
    kept, upstream = pack(x, **FORMATS[name]), torch.randn(graph.num_targets, M)
    _, grads = gradients(graph_linear(graph, kept, seed=None), {"x": x, "weight": weight}, upstream)
    codes = reference.quantize(upstream)
    rows = reference.spmm_requantize(graph.csc.indptr, graph.csc.index, codes[0], x_scale=codes[1])
    assert_gradient_of(kept, rows[0].double() * rows[1].double()[:, None], K, grads["weight"])


@settings(max_examples=30)
@given(
    st.integers(0, 20),
    st.sampled_from(WIDTHS),
    st.integers(1, 9),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 9),
    st.integers(0, 12),
)
def test_any_shape_and_format(n: int, k: int, m: int, bits: int, block: int, projection: int) -> None:
    x, weight, upstream = torch.randn(n, k), torch.randn(m, k), torch.randn(n, m)
    kept = pack(x, bits, block * 8 // bits, projection)
    y, grads = gradients(matmul(kept), {"x": x, "weight": weight}, upstream)
    plain, expected = gradients(matmul(ops.Packed()), {"x": x, "weight": weight}, upstream)
    assert torch.equal(y, plain)
    assert torch.equal(grads["x"], expected["x"])
    assert_gradient_of(kept, rounded(upstream, STREAM_GRAD, seed_of(1)), k, grads["weight"])


@pytest.mark.parametrize("name", ["int2", "int2-rp4", "int2-vm", "int1"])
def test_the_mean_over_seeds_is_the_gradient_of_the_rows(name: str) -> None:
    """... given the codes of the upstream gradient, which one seed makes; rounding what is unpacked has its own."""
    x, upstream = torch.randn(N, K), torch.randn(N, M)
    g_q, g_scale = reference.quantize(upstream)
    g = g_q.double() * g_scale.double()[:, None]

    def draw(seed: int) -> dict[str, Tensor]:
        kept = pack(x, **FORMATS[name], seed=seed)
        return {"dw": packed_weight_grad(torch_backend(), g_q, g_scale, kept, 8, K)}

    assert_unbiased(draw, {"dw": g.t() @ x.double()}, 400)


def test_roundings_of_one_seed_are_independent() -> None:
    """One seed rounds rows and blocks of a row each: equal random bits would show as a bias of ``dw`` where the
    upstream gradient is the result itself."""
    x, weight = torch.randn(64, 8), torch.randn(8, 8)

    def draw(seed: int) -> dict[str, Tensor]:
        leaf = weight.clone().requires_grad_()
        y = matmul(pack(x, block_size=8, seed=seed), seed=seed, bits=2)(x, leaf)
        return {"dw": torch.autograd.grad(y, leaf, y.detach())[0]}

    assert_unbiased(draw, {"dw": (x @ weight.t()).double().t() @ x.double()}, 400)


def test_what_is_unpacked_is_rounded_by_random_bits_of_its_own() -> None:
    """Those of the blocks decided what there is to round."""
    x, (g_q, g_scale) = torch.randn(64, 8), reference.quantize(torch.randn(64, M))
    g = g_q.double() * g_scale.double()[:, None]

    def draw(seed: int) -> dict[str, Tensor]:
        kept = pack(x, bits=8, block_size=8, seed=seed)
        return {"dw": packed_weight_grad(torch_backend(), g_q, g_scale, kept, 8, 8)}

    assert_unbiased(draw, {"dw": g.t() @ x.double()}, 400)


@pytest.mark.parametrize("name", ["int2", "int2-rp4", "int2-vm"])
def test_nothing_else_of_the_rows_is_saved(name: str) -> None:
    graph = graph_of("random")
    x, weight = (torch.randn(*shape, requires_grad=True) for shape in ((graph.num_sources, K), (M, K)))
    kept = pack(x, **FORMATS[name])
    for run in (matmul(kept), graph_linear(graph, kept)):
        saved = saved_tensors(lambda run=run: run(x, weight))
        of_rows = [t for t in saved if t.shape[:1] == x.shape[:1] and t.dim() == 2]
        assert not shares_memory(x, saved)
        assert [t for t in of_rows if not shares_memory(t, [kept.packed])] == []
        assert shares_memory(kept.packed, saved)
        frozen = saved_tensors(lambda run=run: run(x, weight.detach()))
        assert not shares_memory(kept.packed, frozen)


@pytest.mark.parametrize("name", ["int2", "int4-rp2-vm"])
def test_opcheck(name: str) -> None:
    graph = graph_of("tall")
    x, weight = torch.randn(graph.num_sources, K, requires_grad=True), torch.randn(M, K, requires_grad=True)
    kept, bias = pack(x, **FORMATS[name]), torch.randn(M, requires_grad=True)
    options = (rng.make_seed(1), 8, "row", False)
    opcheck(ops.matmul, (x, None, weight, bias, *options, *NO_EPILOGUE, *kept, None), compiled=True)
    operands = (x, None, weight, bias, None, None, graph.mean_factor, *spmm_structure(graph))
    opcheck(ops.graph_linear, (*operands, *options, False, *NO_EPILOGUE, *kept, None), compiled=True)


@pytest.mark.parametrize("name", ["int2", "int4-rp2-vm"])
def test_backward_opcheck(name: str) -> None:
    graph = graph_of("tall")
    x, weight = torch.randn(graph.num_sources, K), torch.randn(M, K)
    kept, options = pack(x, **FORMATS[name]), (8, "row", 0, True, True)
    seed = rng.make_seed(1)
    rows = torch.randn(graph.num_sources, M)
    opcheck(matmul_backward, (rows, None, None, None, weight, seed, *kept, *options, True))
    operands = (None, None, None, weight, *(None,) * 4, graph.mean_factor, *spmm_structure(graph))
    grad = torch.randn(graph.num_targets, M)
    opcheck(graph_linear_backward, (grad, *operands, seed, *kept, *options, False, True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types_of_rows_and_weight(dtype: torch.dtype) -> None:
    x, weight, upstream = (torch.randn(*shape).to(dtype) for shape in ((N, K), (M, K), (N, M)))
    kept = pack(x, projection=8)
    _, grads = gradients(matmul(kept), {"x": x, "weight": weight}, upstream)
    wide = {"x": x.float(), "weight": weight.float()}
    _, expected = gradients(matmul(kept), wide, upstream.float())
    assert grads["weight"].dtype == dtype
    if dtype != torch.float64:  # whose sums are made in another order
        assert torch.equal(grads["weight"], expected["weight"].to(dtype))
    torch.testing.assert_close(grads["weight"].double(), expected["weight"].double(), rtol=2e-2, atol=2e-2)


def test_values_that_are_not_finite_reach_the_gradient() -> None:
    x, weight, upstream = torch.randn(N, K), torch.randn(M, K), torch.randn(N, M)
    x[3, 4] = torch.inf
    for name in ("int2", "int2-rp4"):
        _, grads = gradients(matmul(pack(x, **FORMATS[name])), {"x": x, "weight": weight}, upstream)
        assert grads["weight"].isnan().any()


@pytest.mark.parametrize("name", FORMATS)
def test_on_the_kernels(name: str, device: str) -> None:
    """The same blocks give the same integers; sums over rows differ by the fp16 factor that the kernel folds in, 2**-10
    of each term, on either side."""
    x, grad = torch.randn(N, K), torch.randn(N, M)
    kept, (g_q, g_scale) = pack(x, **FORMATS[name]), reference.quantize(grad)
    moved = ops.Packed(*(t.to(device) if isinstance(t, Tensor) else t for t in kept))
    results = [
        packed_weight_grad(backend, g_q.to(place), g_scale.to(place), packed, 8, K).cpu()
        for backend, place, packed in ((torch_backend(), "cpu", kept), (triton_backend(), device, moved))
    ]
    width = kept.projection or K
    values = reference.blocks_unpack(*kept[:3], bits=kept.packed_bits, size=N * width, edges=kept.edges).view(N, width)
    terms = grad.abs().double().t() @ values.abs().double()
    bound = 2.0**-9 * (terms.sum(1, keepdim=True) * width**-0.5 if kept.projection else terms)
    assert_within(results[1], results[0].double(), bound)


def test_forward_and_saved_rows_on_the_kernels(device: str) -> None:
    from qgnn.ops.matmul import _matmul

    x, weight, seed = torch.randn(N, K, device=device), torch.randn(M, K, device=device), rng.make_seed(1, device)
    kept = pack(x, projection=8)
    options = (seed, 8, "row", False, *NO_EPILOGUE)
    outs = [
        _matmul(triton_backend(), x, None, weight, None, *options, *packed, None)[0] for packed in (kept, ops.Packed())
    ]
    assert torch.equal(*outs)


def test_blocks_of_another_matrix_are_refused() -> None:
    x, weight = torch.randn(N, K), torch.randn(M, K, requires_grad=True)
    y = matmul(pack(torch.randn(2, K)))(x, weight)
    with pytest.raises(ValueError, match=r"'qgnn::blocks_unpack' expects a 'size' that fills 5 blocks of 16 values"):
        y.sum().backward()
