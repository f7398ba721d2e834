"""``qgnn::graph_linear``: product and aggregation with int8 rows in between, against the codes it is made of."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dense import CASES, adjacency_of, assert_within, degree_of, graph_of, seed_of, sum_bound
from op_checks import (
    PLAIN_PRODUCT,
    assert_inputs_unchanged,
    assert_unbiased,
    gradients,
    opcheck,
    saved_tensors,
    shares_memory,
    spmm_structure,
)
from qgnn import Graph, ops, reference, rng
from qgnn.ops import _backends as streams
from qgnn.ops._backends import torch_backend, triton_backend
from qgnn.ops.graph_linear import _graph_linear, _graph_linear_backward, graph_linear_backward

K, M = 9, 7


def run(
    graph: Graph,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    edge_weight: Tensor | None = None,
    *,
    x_scale: Tensor | None = None,
    row_factor: Tensor | None = None,
    seed: int | None = 1,
    bits: int = 8,
    granularity: str = "row",
    keep_codes: bool = True,
) -> Tensor:
    keep_hidden = edge_weight is not None and edge_weight.requires_grad
    options = (seed_of(seed), bits, granularity, keep_codes, keep_hidden, *PLAIN_PRODUCT)
    return ops.graph_linear(x, x_scale, weight, bias, edge_weight, None, row_factor, *spmm_structure(graph), *options)[
        0
    ]


def inputs(graph: Graph, k: int = K, m: int = M) -> dict[str, Tensor]:
    return {
        "x": torch.randn(graph.num_sources, k),
        "weight": torch.randn(m, k),
        "bias": torch.randn(m),
        "edge_weight": torch.randn(graph.num_edges),
    }


def values(pair: tuple[Tensor, Tensor]) -> Tensor:
    """float64 values of codes and scale."""
    codes, scale = pair
    return codes.double() * scale.double()[:, None]


def check_against_codes(graph: Graph, tensors: dict[str, Tensor], upstream: Tensor, **options: Any) -> None:
    """Every result lies within the rounding error of float64 algebra on the very codes it is made of."""
    x, weight, bias, edge_weight = tensors.values()
    y, grads = gradients(lambda **t: run(graph, **t, **options), tensors, upstream)
    bits, granularity = options.get("bits", 8), options.get("granularity", "row")
    rounding = {"bits": bits, "seed": seed_of(options.get("seed", 1))}
    by_tensor = granularity == "tensor"

    x_pair = reference.quantize(x, granularity=granularity, stream=streams.STREAM_INPUT, **rounding)
    w_pair = reference.quantize(weight, stream=streams.STREAM_WEIGHT, **rounding)
    if by_tensor:
        product = reference.matmul(*x_pair, *w_pair)
        h_pair = reference.quantize(product, granularity="tensor", stream=streams.STREAM_HIDDEN, **rounding)
    else:
        h_pair = reference.matmul_requantize(*x_pair, *w_pair, stream=streams.STREAM_HIDDEN, **rounding)
    h = values(h_pair)
    A, A_abs = adjacency_of(graph, edge_weight), adjacency_of(graph, edge_weight.abs())
    row_factor = options.get("row_factor")
    factor = torch.ones(1, 1, dtype=torch.float64) if row_factor is None else row_factor.double()[:, None]
    magnitude = factor * (A_abs @ h.abs()) + bias.double().abs()
    assert_within(y, factor * (A @ h) + bias.double(), sum_bound(degree_of(graph), magnitude, 5))

    g_codes, g_scale = reference.quantize(upstream, granularity=granularity, stream=streams.STREAM_GRAD, **rounding)
    folded = g_scale if row_factor is None else g_scale * row_factor
    transposed = {"weight": edge_weight[graph.csc.order], "x_scale": folded}
    csc = (graph.csc.indptr, graph.csc.index)
    if by_tensor:
        rows = reference.spmm(*csc, g_codes, **transposed)
        dh_pair = reference.quantize(rows, granularity="tensor", stream=streams.STREAM_GRAD_HIDDEN, **rounding)
    else:
        dh_pair = reference.spmm_requantize(*csc, g_codes, stream=streams.STREAM_GRAD_HIDDEN, **transposed, **rounding)
    dh = values(dh_pair)
    wt = values(reference.quantize(weight.t(), stream=streams.STREAM_WEIGHT_T, **rounding))
    dx = dh @ wt.t()
    assert_within(grads["x"], dx, sum_bound(torch.tensor(0), dx.abs(), 4))
    kept = values(x_pair) if options.get("keep_codes", True) else x.double()
    bound = sum_bound(torch.tensor(len(x)), dh.abs().t() @ kept.abs(), 3)
    assert_within(grads["weight"], dh.t() @ kept, bound)
    source, target = graph.edge_index()
    terms = values((g_codes, folded))[target] * h[source]
    bound = sum_bound(torch.tensor(0), terms.sum(1).abs(), 5)
    assert_within(grads["edge_weight"], terms.sum(1), bound)
    columns = upstream.double()
    assert_within(grads["bias"], columns.sum(0), sum_bound(torch.tensor(len(columns)), columns.abs().sum(0), 0))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mean", [False, True])
def test_graph_linear_on_every_graph(name: str, mean: bool) -> None:
    graph = graph_of(name)
    row_factor = graph.mean_factor if mean else None
    check_against_codes(graph, inputs(graph), torch.randn(graph.num_targets, M), row_factor=row_factor)


@pytest.mark.parametrize("k", [1, 32, 33])
@pytest.mark.parametrize("m", [1, 33, 130])
def test_graph_linear_widths(k: int, m: int) -> None:
    graph = graph_of("power_law")
    check_against_codes(graph, inputs(graph, k, m), torch.randn(160, m))


@pytest.mark.parametrize("seed", [None, 1], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("keep_codes", [False, True])
def test_graph_linear_options(seed: int | None, granularity: str, bits: int, keep_codes: bool) -> None:
    graph = graph_of("tall")
    options = {"seed": seed, "granularity": granularity, "bits": bits, "keep_codes": keep_codes}
    check_against_codes(graph, inputs(graph), torch.randn(80, M), row_factor=graph.mean_factor, **options)


@settings(max_examples=10)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 40), st.integers(1, 9), st.integers(-9, 9))
def test_graph_linear_any_graph(num_sources: int, num_targets: int, num_edges: int, k: int, power: int) -> None:
    edge_index = torch.stack([torch.randint(n, (num_edges,)) for n in (num_sources, num_targets)])
    graph = Graph.from_edge_index(edge_index, (num_sources, num_targets))
    check_against_codes(graph, inputs(graph, k), torch.randn(num_targets, M) * 10.0**power)


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_graph_linear_gradients_have_their_own_scale(factor: float) -> None:
    """A gradient far larger or smaller than the forward rows; the forward's scale would clip it or flush it."""
    graph, upstream = graph_of("random"), torch.randn(50, 33) * factor
    tensors = inputs(graph, 32, 33)
    _, grads = gradients(lambda **t: run(graph, **t), tensors, upstream)
    x, weight, _, edge_weight = (t.double() for t in tensors.values())
    dh = adjacency_of(graph, edge_weight).t() @ upstream.double()
    source, target = graph.edge_index()
    exact = {
        "x": dh @ weight,
        "weight": dh.t() @ x,
        "edge_weight": (upstream.double()[target] * (x @ weight.t())[source]).sum(1),
    }
    for name, expected in exact.items():
        assert (grads[name] - expected).norm() < 0.04 * expected.norm(), name


def test_graph_linear_is_unbiased() -> None:
    graph, upstream = graph_of("duplicates"), torch.randn(8, M)
    tensors = inputs(graph, M, M)
    x, weight, bias, edge_weight = (t.double() for t in tensors.values())

    def draw(seed: int) -> dict[str, Tensor]:
        y, grads = gradients(lambda **t: run(graph, seed=seed, bits=2, **t), tensors, upstream)
        return {"y": y, **{name: grads[name] for name in ("x", "weight", "edge_weight")}}

    A, h = adjacency_of(graph, edge_weight), x @ weight.t()
    dh = A.t() @ upstream.double()
    source, target = graph.edge_index()
    dedge = (upstream.double()[target] * h[source]).sum(1)
    assert_unbiased(draw, {"y": A @ h + bias, "x": dh @ weight, "weight": dh.t() @ x, "edge_weight": dedge})


def test_graph_linear_seeds() -> None:
    graph, upstream = graph_of("random"), torch.randn(50, M)
    tensors = inputs(graph)
    results = [gradients(lambda seed=seed, **t: run(graph, seed=seed, **t), tensors, upstream) for seed in (1, 1, 2)]
    (y, grads), (y_again, grads_again), (y_other, grads_other) = results
    assert torch.equal(y, y_again)
    assert not torch.equal(y, y_other)
    for name in ("x", "weight", "edge_weight"):
        assert torch.equal(grads[name], grads_again[name])
        assert not torch.equal(grads[name], grads_other[name])


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_graph_linear_of_given_codes(granularity: str) -> None:
    """Codes that were made before give what the operator's own would, without the gradient of x."""
    graph, upstream = graph_of("random"), torch.randn(50, M)
    tensors = inputs(graph)
    rounding = {"granularity": granularity, "seed": rng.make_seed(1), "stream": streams.STREAM_INPUT}
    x_q, x_scale = reference.quantize(tensors["x"], **rounding)
    expected, expected_grads = gradients(lambda **t: run(graph, granularity=granularity, **t), tensors, upstream)
    y, grads = gradients(
        lambda **t: run(graph, x_scale=x_scale, granularity=granularity, **t), tensors | {"x": x_q}, upstream
    )
    assert torch.equal(y, expected)
    assert set(grads) == {"weight", "bias", "edge_weight"}
    for name, grad in grads.items():
        assert torch.equal(grad, expected_grads[name]), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_graph_linear_keeps_the_type(dtype: torch.dtype) -> None:
    graph, upstream = graph_of("power_law"), torch.randn(160, M).to(dtype)
    tensors = {name: t.to(dtype) for name, t in inputs(graph).items()}
    tensors["edge_weight"] = tensors["edge_weight"].float()
    y, grads = gradients(lambda **t: run(graph, **t), tensors, upstream)
    single = {name: t.float() for name, t in tensors.items()}
    expected, expected_grads = gradients(lambda **t: run(graph, **t), single, upstream.float())
    assert y.dtype == dtype
    assert torch.equal(y, expected.to(dtype))
    for name, grad in grads.items():
        assert grad.dtype == tensors[name].dtype
        assert torch.equal(grad, expected_grads[name].to(grad.dtype)), name


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "edge_weight"])
def test_graph_linear_single_gradients(wanted: str) -> None:
    graph, upstream = graph_of("random"), torch.randn(50, M)
    tensors = inputs(graph)
    _, all_grads = gradients(lambda **t: run(graph, **t), tensors, upstream)
    leaf = tensors[wanted].requires_grad_()
    (grad,) = torch.autograd.grad(run(graph, **tensors), leaf, upstream)
    assert torch.equal(grad, all_grads[wanted])


@pytest.mark.parametrize(("k", "m"), [(0, 3), (5, 0), (0, 0)])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_graph_linear_without_columns(k: int, m: int, granularity: str) -> None:
    graph = graph_of("random")
    tensors = inputs(graph, k, m)
    y, grads = gradients(lambda **t: run(graph, granularity=granularity, **t), tensors)
    assert torch.equal(y, tensors["bias"].expand(50, m))
    assert torch.equal(grads["x"], torch.zeros(50, k))
    assert torch.equal(grads["weight"], torch.zeros(m, k))
    assert torch.equal(grads["edge_weight"], torch.zeros(200))


def test_graph_linear_poison_stays_in_its_neighborhood() -> None:
    graph = graph_of("random")
    tensors = inputs(graph)
    clean = run(graph, **tensors)
    tensors["x"][11, 3] = float("nan")
    y = run(graph, **tensors)
    reached = adjacency_of(graph)[:, 11] > 0
    assert reached.any()
    assert y[reached].isnan().all()
    assert torch.equal(y[~reached], clean[~reached])


def test_graph_linear_leaves_its_inputs_alone() -> None:
    graph = graph_of("random")
    tensors = {name: t.requires_grad_() for name, t in inputs(graph).items()}
    assert_inputs_unchanged(lambda **t: run(graph, **t), tensors)


def test_graph_linear_saves_codes_and_what_is_needed() -> None:
    graph = graph_of("random")
    tensors = {name: t.requires_grad_() for name, t in inputs(graph).items()}

    def kept_codes(keep_codes: bool = True, **changed: Tensor) -> list[tuple[int, ...]]:
        kept = saved_tensors(lambda: run(graph, **(tensors | changed), keep_codes=keep_codes))
        assert shares_memory(tensors["x"], kept) != keep_codes
        return sorted(tuple(t.shape) for t in kept if t.dtype == torch.int8 and t.numel())

    assert kept_codes() == [(50, M), (50, K)]  # the rows between product and sum, and the input
    assert kept_codes(edge_weight=tensors["edge_weight"].detach()) == [(50, K)]
    assert kept_codes(weight=tensors["weight"].detach()) == [(50, M)]
    assert kept_codes(keep_codes=False) == [(50, M)]


def test_graph_linear_second_order_gradient_is_refused() -> None:
    graph = graph_of("random")
    tensors = {name: t.requires_grad_() for name, t in inputs(graph).items()}
    (dx,) = torch.autograd.grad(run(graph, **tensors).sum(), tensors["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        dx.sum().backward()


def test_graph_linear_under_autocast() -> None:
    graph, upstream = graph_of("random"), torch.randn(50, M)
    tensors = inputs(graph)
    y, grads = gradients(lambda **t: run(graph, **t), tensors, upstream)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_mixed, grads_mixed = gradients(lambda **t: run(graph, **t), tensors, upstream)
    assert torch.equal(y, y_mixed)
    for name, grad in grads.items():
        assert torch.equal(grad, grads_mixed[name]), name


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("given_codes", [False, True])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_graph_linear_opcheck(learned: bool, given_codes: bool, granularity: str) -> None:
    graph = graph_of("tall")
    x, weight, bias, edge_weight = inputs(graph).values()
    x, x_scale = reference.quantize(x, granularity=granularity) if given_codes else (x.requires_grad_(), None)
    edge_weight_t = None if learned else edge_weight[graph.csc.order]
    edge_weight = edge_weight.requires_grad_(learned)
    options = (rng.make_seed(1), 8, granularity, True, learned, *PLAIN_PRODUCT)
    arguments = (x, x_scale, weight.requires_grad_(), bias.requires_grad_(), edge_weight, edge_weight_t)
    args = (*arguments, graph.mean_factor, *spmm_structure(graph), *options)
    opcheck(ops.graph_linear, args, compiled=granularity == "row" and not given_codes)


@pytest.mark.parametrize("needs", [(True,) * 4, (True, False, False, False), (False, False, True, False)], ids=str)
def test_graph_linear_backward_opcheck(needs: tuple[bool, bool, bool, bool]) -> None:
    graph = graph_of("tall")
    x, weight, _, edge_weight = inputs(graph).values()
    kept = (*reference.quantize(x), weight, *reference.quantize(torch.randn(5, M)))
    graph_arguments = (edge_weight, None, graph.mean_factor, *spmm_structure(graph))
    args = (torch.randn(80, M), None, *kept, *graph_arguments, rng.make_seed(1), *ops.Packed(), 8, "row", 0, *needs)
    opcheck(graph_linear_backward, args)


def test_graph_linear_on_the_kernels(device: str) -> None:
    """The operator over the Triton kernels.

    Codes made from products are equal, since those are exact. Codes made from sums may differ by one where the sums do,
    and dW carries the fp16 factor of its kernel: compared by norm, one code of 127 being 0.8 %.
    """
    graph = graph_of("isolated")
    tensors, grad = inputs(graph), torch.randn(21, M)
    results = []
    for backend, place in ((torch_backend(), "cpu"), (triton_backend(), device)):
        x, weight, bias, edge_weight = (t.to(place) for t in tensors.values())
        structure = [t.to(place) for t in spmm_structure(graph)]
        factor, options = graph.mean_factor.to(place), (rng.make_seed(1, place), 8, "row")
        y, *kept = _graph_linear(
            backend, x, None, weight, bias, edge_weight, None, factor, *structure, *options, True, True, *PLAIN_PRODUCT
        )
        x_q, x_scale, h_q, h_scale, _ = kept
        saved = (None, x_q, x_scale, weight, h_q, h_scale, edge_weight, None, factor, *structure)
        options = (options[0], *ops.Packed(), *options[1:])
        back = _graph_linear_backward(backend, grad.to(place), *saved, *options, 0, True, True, True, True)
        results.append([[t.cpu() for t in group] for group in (kept, (y,), back)])
    (kept, (y,), back), (kept_kernel, (y_kernel,), back_kernel) = results
    assert all(torch.equal(a, b) for a, b in zip(kept, kept_kernel, strict=True))
    torch.testing.assert_close(y_kernel, y, rtol=1e-5, atol=1e-5)
    for ours, kernels in zip(back, back_kernel, strict=True):
        assert (ours - kernels).norm() <= 0.01 * ours.norm()
