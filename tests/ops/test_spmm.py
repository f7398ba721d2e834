"""``qgnn::spmm``: the neighbor sum and its gradients, exact in full precision, against its codes in int8."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dense import CASES, adjacency_of, assert_within, degree_of, graph_of, seed_of, sum_bound
from op_checks import (
    PLAIN,
    assert_inputs_unchanged,
    assert_unbiased,
    gradients,
    opcheck,
    saved_tensors,
    shares_memory,
    spmm_structure,
)
from qgnn import Graph, ops, reference, rng
from qgnn.ops._backends import STREAM_GRAD, STREAM_INPUT, _with_plans, torch_backend, triton_backend
from qgnn.ops.spmm import _spmm, _spmm_backward, spmm_backward

EPS64 = 2.0**-53


def run(
    graph: Graph,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    weight_t: Tensor | None = None,
    row_factor: Tensor | None = None,
    seed: int | None = 1,
    bits: int = 8,
    granularity: str = "row",
    keep_codes: bool = True,
) -> Tensor:
    structure = spmm_structure(graph)
    options = (seed_of(seed), bits, granularity, keep_codes and bits > 0)
    return ops.spmm(x, None, weight, weight_t, row_factor, bias, *structure, *options, *PLAIN)[0]


def inputs(graph: Graph, F: int = 7, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {
        "x": torch.randn(graph.num_sources, F, dtype=dtype),
        "weight": torch.randn(graph.num_edges, dtype=dtype),
        "bias": torch.randn(F, dtype=dtype),
    }


def rounded(t: Tensor, stream: int, seed: int | None, bits: int, granularity: str) -> Tensor:
    """float64 values of the codes that the operator makes of ``t``; ``t`` itself with ``bits=0``."""
    if bits == 0:
        return t.double()
    codes, scale = reference.quantize(t, bits=bits, granularity=granularity, seed=seed_of(seed), stream=stream)
    return codes.double() * scale.double()[:, None]


def check_against_codes(graph: Graph, given_inputs: dict[str, Tensor], upstream: Tensor, **options: Any) -> None:
    """Every result lies within the rounding error of float64 algebra on the very codes it is made of."""
    seed, bits, granularity = options.get("seed", 1), options.get("bits", 8), options.get("granularity", "row")
    x, weight, bias = given_inputs.values()
    y, grads = gradients(lambda **t: run(graph, **t, **options), given_inputs, upstream)
    x_hat = rounded(x, STREAM_INPUT, seed, bits, granularity)
    g_hat = rounded(upstream, STREAM_GRAD, seed, bits, granularity)
    if options.get("row_factor") is not None:
        factor = options["row_factor"].double()[:, None]
        g_hat = g_hat * factor
    else:
        factor = torch.ones(1, 1, dtype=torch.float64)
    eps = EPS64 if x.dtype == torch.float64 else 2.0**-24
    A, A_abs = adjacency_of(graph, weight), adjacency_of(graph, weight.abs())
    in_degree, out_degree = degree_of(graph), graph.csc.indptr.diff().double()[:, None]
    magnitude = factor * (A_abs @ x_hat.abs()) + bias.double().abs()
    assert_within(y, factor * (A @ x_hat) + bias.double(), sum_bound(in_degree, magnitude, 5, eps), x.dtype)
    bound = sum_bound(out_degree, A_abs.t() @ g_hat.abs(), 5, eps)
    assert_within(grads["x"], A.t() @ g_hat, bound, x.dtype)
    source, target = graph.edge_index()
    kept = x_hat if options.get("keep_codes", True) else x.double()
    terms = g_hat[target] * kept[source]
    bound = sum_bound(torch.tensor(x.shape[1]), terms.abs().sum(1), 5, eps)
    assert_within(grads["weight"], terms.sum(1), bound, x.dtype)
    column = upstream.double()
    bound = sum_bound(torch.tensor(len(column)), column.abs().sum(0), 0, eps)
    assert_within(grads["bias"], column.sum(0), bound, x.dtype)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bits", [0, 8])
@pytest.mark.parametrize("mean", [False, True])
def test_spmm_on_every_graph(name: str, bits: int, mean: bool) -> None:
    graph = graph_of(name)
    row_factor = graph.mean_factor if mean else None
    check_against_codes(graph, inputs(graph), torch.randn(graph.num_targets, 7), bits=bits, row_factor=row_factor)


@pytest.mark.parametrize("F", [1, 32, 33, 130])
@pytest.mark.parametrize("bits", [0, 8])
def test_spmm_widths(F: int, bits: int) -> None:
    graph = graph_of("power_law")
    check_against_codes(graph, inputs(graph, F), torch.randn(160, F), bits=bits)


@pytest.mark.parametrize("seed", [None, 1], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("keep_codes", [False, True])
def test_spmm_options(seed: int | None, granularity: str, bits: int, keep_codes: bool) -> None:
    """Without kept codes the gradient of the edge weights is formed from ``x`` itself."""
    graph = graph_of("tall")
    options = {"seed": seed, "granularity": granularity, "bits": bits, "keep_codes": keep_codes}
    check_against_codes(graph, inputs(graph), torch.randn(80, 7), row_factor=graph.mean_factor, **options)


@settings(max_examples=15)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 40), st.integers(1, 9), st.sampled_from([0, 3, 8]))
def test_spmm_any_graph(num_sources: int, num_targets: int, num_edges: int, F: int, bits: int) -> None:
    edge_index = torch.stack([torch.randint(n, (num_edges,)) for n in (num_sources, num_targets)])
    graph = Graph.from_edge_index(edge_index, (num_sources, num_targets))
    check_against_codes(graph, inputs(graph, F), torch.randn(num_targets, F), bits=bits)


@pytest.mark.parametrize("name", ["random", "tall", "wide", "isolated", "one_pair", "empty"])
@pytest.mark.parametrize("mean", [False, True])
def test_exact_spmm_gradcheck(name: str, mean: bool) -> None:
    graph = graph_of(name)
    row_factor = graph.mean_factor if mean else None
    leaves = [t.requires_grad_() for t in inputs(graph, 3, torch.float64).values()]

    def op(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return run(graph, x, weight, bias, row_factor=row_factor, bits=0)

    assert torch.autograd.gradcheck(op, leaves, fast_mode=True)


@pytest.mark.parametrize("bits", [0, 8])
@pytest.mark.parametrize("has_weight_t", [False, True])
def test_spmm_constant_weights(bits: int, has_weight_t: bool) -> None:
    """Transposed weights may be given; without them they are permuted."""
    graph, upstream = graph_of("power_law"), torch.randn(160, 7)
    tensors = inputs(graph)
    weight = tensors.pop("weight")
    weight_t = weight[graph.csc.order] if has_weight_t else None
    y, grads = gradients(lambda **t: run(graph, weight=weight, weight_t=weight_t, bits=bits, **t), tensors, upstream)
    learned, learned_grads = gradients(lambda **t: run(graph, bits=bits, **t), tensors | {"weight": weight}, upstream)
    assert torch.equal(y, learned)
    assert torch.equal(grads["x"], learned_grads["x"])
    assert set(grads) == {"x", "bias"}


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_spmm_gradients_have_their_own_scale(factor: float) -> None:
    """A gradient far larger or smaller than the forward rows; the forward's scale would clip it or flush it."""
    graph, upstream = graph_of("random"), torch.randn(50, 33) * factor
    tensors = inputs(graph, 33)
    _, grads = gradients(lambda **t: run(graph, **t), tensors, upstream)
    exact = adjacency_of(graph, tensors["weight"]).t() @ upstream.double()
    assert (grads["x"] - exact).norm() < 0.03 * exact.norm()
    source, target = graph.edge_index()
    exact = (upstream[target] * tensors["x"][source]).sum(1)
    assert (grads["weight"] - exact).norm() < 0.03 * exact.norm()


def test_spmm_is_unbiased() -> None:
    graph, upstream = graph_of("duplicates"), torch.randn(8, 7)
    tensors = inputs(graph)
    x, weight, bias = (t.double() for t in tensors.values())

    def draw(seed: int) -> dict[str, Tensor]:
        y, grads = gradients(
            lambda **t: run(graph, seed=seed, bits=2, row_factor=graph.mean_factor, **t), tensors, upstream
        )
        return {"y": y, "x": grads["x"], "weight": grads["weight"]}

    factor = graph.mean_factor.double()[:, None]
    A, g = adjacency_of(graph, weight), upstream.double() * factor
    source, target = graph.edge_index()
    assert_unbiased(draw, {"y": factor * (A @ x) + bias, "x": A.t() @ g, "weight": (g[target] * x[source]).sum(1)})


def test_spmm_seeds() -> None:
    graph, upstream = graph_of("random"), torch.randn(50, 7)
    tensors = inputs(graph)
    results = [gradients(lambda seed=seed, **t: run(graph, seed=seed, **t), tensors, upstream) for seed in (1, 1, 2)]
    (y, grads), (y_again, grads_again), (y_other, grads_other) = results
    assert torch.equal(y, y_again)
    assert not torch.equal(y, y_other)
    for name in ("x", "weight"):
        assert torch.equal(grads[name], grads_again[name])
        assert not torch.equal(grads[name], grads_other[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bits", [0, 8])
def test_spmm_keeps_the_type(dtype: torch.dtype, bits: int) -> None:
    """Weights and scales stay fp32; the sums are as those of fp32 rows, rounded once."""
    graph = graph_of("power_law")
    x, weight = torch.randn(160, 7).to(dtype), torch.randn(700)
    if dtype == torch.float64:
        x = x.float().double()
    upstream = torch.randn(160, 7).to(dtype)
    y, grads = gradients(lambda **t: run(graph, bits=bits, **t), {"x": x, "weight": weight}, upstream)
    single = {"x": x.float(), "weight": weight}
    expected, expected_grads = gradients(lambda **t: run(graph, bits=bits, **t), single, upstream.float())
    assert y.dtype == grads["x"].dtype == dtype
    assert grads["weight"].dtype == torch.float32
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float64 else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(y, expected.to(dtype), **tolerance)
    torch.testing.assert_close(grads["x"], expected_grads["x"].to(dtype), **tolerance)
    torch.testing.assert_close(grads["weight"], expected_grads["weight"], **tolerance)


def test_spmm_of_no_columns() -> None:
    graph = graph_of("random")
    y, grads = gradients(lambda **t: run(graph, **t), inputs(graph, 0))
    assert y.shape == (50, 0)
    assert grads["x"].shape == (50, 0)
    assert torch.equal(grads["weight"], torch.zeros(200))


def test_spmm_isolated_rows_get_the_bias_only() -> None:
    graph = graph_of("isolated")
    tensors = inputs(graph)
    y = run(graph, **tensors)
    alone = graph.csr.indptr.diff() == 0
    assert torch.equal(y[alone], tensors["bias"].expand(int(alone.sum()), -1))


def test_spmm_strided_rows_and_expanded_gradient() -> None:
    graph, x = graph_of("random"), torch.randn(100, 14)[::2, ::2]
    _, grads = gradients(lambda x: run(graph, x), {"x": x})
    leaf = x.clone().requires_grad_()
    y = run(graph, leaf)
    y.sum().backward()  # an upstream gradient with strides of 0
    assert torch.equal(y, run(graph, x))
    assert torch.equal(grads["x"], leaf.grad)


@pytest.mark.parametrize("bits", [0, 8])
def test_spmm_leaves_its_inputs_alone(bits: int) -> None:
    graph = graph_of("random")
    tensors = {name: t.requires_grad_() for name, t in inputs(graph).items()}
    assert_inputs_unchanged(lambda **t: run(graph, bits=bits, **t), tensors)


@pytest.mark.parametrize("bits", [0, 8])
def test_spmm_saves_nothing_of_x_for_constant_weights(bits: int) -> None:
    graph = graph_of("random")
    tensors = {name: t.requires_grad_() for name, t in inputs(graph).items()}
    constant = tensors | {"weight": tensors["weight"].detach()}
    kept = saved_tensors(lambda: run(graph, bits=bits, keep_codes=False, **constant))
    assert not shares_memory(tensors["x"], kept)
    assert all(t.dim() == 1 for t in kept)
    kept = saved_tensors(lambda: run(graph, bits=bits, keep_codes=True, **tensors))
    assert shares_memory(tensors["x"], kept) == (bits == 0)
    assert any(t.dtype == torch.int8 for t in kept) == (bits == 8)


@pytest.mark.parametrize("bits", [0, 8])
def test_spmm_second_order_gradient_is_refused(bits: int) -> None:
    graph = graph_of("random")
    x, weight, _ = (t.requires_grad_() for t in inputs(graph).values())
    (dx,) = torch.autograd.grad(run(graph, x, weight, bits=bits).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        dx.sum().backward()


@pytest.mark.parametrize("bits", [0, 8])
def test_spmm_under_autocast(bits: int) -> None:
    graph, upstream = graph_of("random"), torch.randn(50, 7)
    tensors = inputs(graph)
    y, grads = gradients(lambda **t: run(graph, bits=bits, **t), tensors, upstream)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_mixed, grads_mixed = gradients(lambda **t: run(graph, bits=bits, **t), tensors, upstream)
    assert torch.equal(y, y_mixed)
    for name, grad in grads.items():
        assert torch.equal(grad, grads_mixed[name]), name


@pytest.mark.parametrize("bits", [0, 8])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_spmm_opcheck(bits: int, learned: bool, granularity: str) -> None:
    graph = graph_of("tall")
    x, weight, bias = (t.requires_grad_() for t in inputs(graph).values())
    weight = weight if learned else weight.detach()
    weight_t = None if learned else weight[graph.csc.order]
    keep_codes = learned and bits > 0
    options = (rng.make_seed(1) if bits else None, bits, granularity, keep_codes, *PLAIN)
    args = (x, None, weight, weight_t, graph.mean_factor, bias, *spmm_structure(graph), *options)
    opcheck(ops.spmm, args, compiled=granularity == "row")
    opcheck(ops.spmm, (x, None, None, None, None, None, *spmm_structure(graph), *options))


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, False)], ids=str)
@pytest.mark.parametrize("bits", [0, 8])
def test_spmm_backward_opcheck(needs: tuple[bool, bool, bool], bits: int) -> None:
    graph = graph_of("tall")
    x, weight, _ = inputs(graph).values()
    x, x_scale = reference.quantize(x) if bits else (x, None)
    args = (x, x_scale, weight, None, graph.mean_factor, *spmm_structure(graph), rng.make_seed(1), bits, "row")
    opcheck(spmm_backward, (torch.randn(80, 7), None, *args, 0, *needs))


@pytest.mark.parametrize("bits", [0, 8])
def test_spmm_on_the_kernels(bits: int, device: str) -> None:
    """The operator over the Triton kernels: equal codes, and sums within the bound of any order of addition."""
    graph = graph_of("isolated")
    x, weight, bias = inputs(graph).values()
    grad = torch.randn(21, 7)
    results = []
    for backend, place in ((torch_backend(), "cpu"), (triton_backend(), device)):
        moved = [t.to(place) for t in (x, weight, graph.mean_factor, bias, grad)]
        structure = [t.to(place) for t in spmm_structure(graph)]
        options = (rng.make_seed(1, place), bits, "row")
        x_there, weight_there, factor, bias_there, grad_there = moved
        rows = (x_there, None, weight_there, None, factor, bias_there)
        y, codes, scale, _ = _spmm(backend, *rows, *structure, *options, bits > 0, *PLAIN)
        kept = (codes, scale) if bits else (x_there, None)
        operands = (grad_there, None, *kept, weight_there, None, factor)
        back = _spmm_backward(backend, *operands, *structure, *options, 0, True, True, True)
        results.append([t.cpu() for t in (codes, scale, y, *back)])
    (codes, scale, *sums), (codes_kernel, scale_kernel, *sums_kernel) = results
    assert torch.equal(codes, codes_kernel)
    assert torch.equal(scale, scale_kernel)
    for ours, kernels in zip(sums, sums_kernel, strict=True):
        # At most 7 terms with 5 roundings each, on either side; terms stay below 16.
        torch.testing.assert_close(kernels, ours, rtol=0, atol=2 * 12 * 7 * 16 * 2.0**-24)


def test_work_items_are_made_once_a_graph(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """... and not kept if they are part of a CUDA graph that is being captured."""
    made: list[int] = []

    def make_plan(indptr: Tensor, num_edges: int) -> int:
        made.append(num_edges)
        return len(made)

    planned = _with_plans(lambda indptr, index, plan: plan, make_plan, {"plan": 0})
    graph = graph_of("random")
    indptr, index = graph.csr.indptr.to(device), graph.csr.index.to(device)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for capturing, number, expected in ((True, 1, 1), (True, 2, 2), (False, 3, 3), (False, 3, 3), (True, 3, 3)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        assert planned(indptr, index) == expected
        assert made == [200] * number
