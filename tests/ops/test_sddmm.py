"""``qgnn::sddmm``: results of edges and both gradients, exact in full precision, against its codes in int8."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dense import CASES, assert_within, graph_of, random_codes, random_scale, seed_of, sum_bound
from op_checks import (
    assert_inputs_unchanged,
    assert_unbiased,
    gradients,
    opcheck,
    saved_tensors,
    shares_memory,
    spmm_structure,
)
from qgnn import Graph, ops, reference, trace
from qgnn.ops._backends import STREAM_HIDDEN, STREAM_INPUT, Backend, torch_backend, triton_backend
from qgnn.ops.sddmm import _sddmm, _sddmm_backward, sddmm_backward
from statistics_checks import EPS

OPS = pytest.mark.parametrize("op", ["dot", "add"])
BITS = pytest.mark.parametrize("bits", [0, 8])
STREAMS = {"x_target": STREAM_HIDDEN, "x_source": STREAM_INPUT}


def run(
    graph: Graph,
    x_target: Tensor,
    x_source: Tensor,
    *,
    target_scale: Tensor | None = None,
    source_scale: Tensor | None = None,
    seed: int | None = 1,
    bits: int = 0,
    granularity: str = "row",
    op: str = "dot",
    heads: int = 1,
    keep_codes: bool = True,
) -> Tensor:
    options = (seed_of(seed) if bits else None, bits, granularity, op, heads, keep_codes and bits > 0)
    return ops.sddmm(x_target, target_scale, x_source, source_scale, *spmm_structure(graph), *options)[0]


def inputs(graph: Graph, F: int = 6, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {
        "x_target": torch.randn(graph.num_targets, F, dtype=dtype),
        "x_source": torch.randn(graph.num_sources, F, dtype=dtype),
    }


def rounded(x: Tensor, stream: int, heads: int, seed: int | None, bits: int, granularity: str) -> Tensor:
    """float64 values of the codes that the operator makes of ``x``; ``x`` itself with ``bits=0``."""
    if bits == 0:
        return x.double()
    by_head = x.reshape(x.shape[0] * heads, -1) if x.numel() else x.reshape(0, x.shape[1] // heads)
    options = {"bits": bits, "granularity": granularity, "seed": seed_of(seed), "stream": stream}
    codes, scale = reference.quantize(by_head, **options)
    return (codes.double() * scale.double()[:, None]).view(x.shape)


def summed(index: Tensor, values: Tensor, num_rows: int) -> Tensor:
    return values.new_zeros(num_rows, values.shape[1]).index_add(0, index, values)


def check_dots(graph: Graph, given_inputs: dict[str, Tensor], **options: Any) -> None:
    """Every result lies within the rounding error of float64 algebra on the very codes it is made of."""
    seed, bits, granularity = options.get("seed", 1), options.get("bits", 0), options.get("granularity", "row")
    heads, F = options.get("heads", 1), given_inputs["x_target"].shape[1]
    upstream = torch.randn(graph.num_edges, heads)
    shaped = upstream if heads > 1 else upstream[:, 0]
    y, grads = gradients(lambda **t: run(graph, **t, **options), given_inputs, shaped)
    hats = [rounded(x, STREAMS[name], heads, seed, bits, granularity) for name, x in given_inputs.items()]
    t_hat, s_hat = hats
    source, target = graph.edge_index()
    terms = (t_hat[target] * s_hat[source]).view(graph.num_edges, heads, F // heads)
    bound = sum_bound(torch.tensor(F // heads), terms.abs().sum(2), 4)
    assert_within(y.view(-1, heads), terms.sum(2), bound)
    kept = hats if options.get("keep_codes", True) else [x.double() for x in given_inputs.values()]
    weight = upstream.double().repeat_interleave(F // heads, dim=1)
    for name, here, other, there in (("x_target", target, kept[1], source), ("x_source", source, kept[0], target)):
        num_rows = given_inputs[name].shape[0]
        terms = weight * other[there]
        degree = torch.bincount(here, minlength=num_rows).double()[:, None]
        bound = sum_bound(degree, summed(here, terms.abs(), num_rows), 4)
        assert_within(grads[name], summed(here, terms, num_rows), bound)


@pytest.mark.parametrize("name", CASES)
@BITS
@pytest.mark.parametrize("heads", [1, 3])
def test_dots_on_every_graph(name: str, bits: int, heads: int) -> None:
    graph = graph_of(name)
    check_dots(graph, inputs(graph), bits=bits, heads=heads)


@pytest.mark.parametrize("F", [1, 32, 33, 130])
@BITS
def test_dots_of_any_width(F: int, bits: int) -> None:
    graph = graph_of("power_law")
    check_dots(graph, inputs(graph, F), bits=bits)


@pytest.mark.parametrize("seed", [None, 1], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("keep_codes", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_dots_with_every_option(seed: int | None, granularity: str, bits: int, keep_codes: bool, heads: int) -> None:
    """Without kept codes the gradients are formed from the rows themselves."""
    graph = graph_of("tall")
    options = {"seed": seed, "granularity": granularity, "bits": bits, "keep_codes": keep_codes, "heads": heads}
    check_dots(graph, inputs(graph), **options)


@settings(max_examples=15)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 40), st.integers(1, 4), st.sampled_from([0, 3, 8]))
def test_dots_on_any_graph(num_sources: int, num_targets: int, num_edges: int, heads: int, bits: int) -> None:
    edge_index = torch.stack([torch.randint(n, (num_edges,)) for n in (num_sources, num_targets)])
    graph = Graph.from_edge_index(edge_index, (num_sources, num_targets))
    check_dots(graph, inputs(graph, 5 * heads), bits=bits, heads=heads)


@settings(max_examples=25)
@given(st.randoms(use_true_random=False), st.sampled_from(sorted(CASES)), st.sampled_from([0, 8]))
def test_edges_in_another_order_have_the_same_dots(random: Any, name: str, bits: int) -> None:
    edge_index, num_sources, num_targets = CASES[name]
    order = list(range(edge_index.shape[1]))
    random.shuffle(order)
    graph, shuffled = graph_of(name), Graph.from_edge_index(edge_index[:, order], (num_sources, num_targets))
    tensors = inputs(graph)
    results = [
        torch.empty(len(order)).index_copy(0, g.csr.order.long(), run(g, **tensors, bits=bits))
        for g in (graph, shuffled)
    ]
    assert torch.equal(results[0][order], results[1])


@pytest.mark.parametrize("name", CASES)
def test_sums_on_every_graph(name: str) -> None:
    graph = graph_of(name)
    tensors, upstream = inputs(graph), torch.randn(graph.num_edges, 6)
    y, grads = gradients(lambda **t: run(graph, op="add", **t), tensors, upstream)
    source, target = graph.edge_index()
    assert torch.equal(y, tensors["x_target"][target] + tensors["x_source"][source])
    for key, here in (("x_target", target), ("x_source", source)):
        num_rows = tensors[key].shape[0]
        degree = torch.bincount(here, minlength=num_rows).double()[:, None]
        bound = sum_bound(degree, summed(here, upstream.double().abs(), num_rows), 1)
        assert_within(grads[key], summed(here, upstream.double(), num_rows), bound)


@pytest.mark.parametrize("name", ["random", "tall", "wide", "isolated", "one_pair", "empty"])
@OPS
@pytest.mark.parametrize("heads", [1, 2])
def test_gradcheck(name: str, op: str, heads: int) -> None:
    graph = graph_of(name)
    leaves = [t.requires_grad_() for t in inputs(graph, 4, torch.float64).values()]
    assert torch.autograd.gradcheck(lambda t, s: run(graph, t, s, op=op, heads=heads), leaves, fast_mode=True)


@OPS
@pytest.mark.parametrize("heads", [1, 3])
def test_codes_are_used_as_they_are(op: str, heads: int) -> None:
    graph = graph_of("power_law")
    target, source = random_codes(160, 6), random_codes(160, 6)
    shape = (160,) if heads == 1 else (160, heads)
    scales = {name: random_scale(160 * heads).view(shape) for name in ("target_scale", "source_scale")}
    out = run(graph, target, source, op=op, heads=heads, **scales)
    structure = graph.csr.indptr, graph.csr.index
    assert torch.equal(out, reference.sddmm(*structure, target, source, op=op, heads=heads, **scales))


def test_rows_beside_codes_are_rounded_and_get_a_gradient() -> None:
    graph = graph_of("tall")
    x, codes, scale = torch.randn(80, 6), random_codes(5, 6), random_scale(5)
    y, grads = gradients(lambda x: run(graph, x, codes, source_scale=scale, bits=8), {"x": x})
    x_q, x_scale = reference.quantize(x, seed=seed_of(1), stream=STREAM_HIDDEN)
    structure = graph.csr.indptr, graph.csr.index
    assert torch.equal(y, reference.sddmm(*structure, x_q, codes, target_scale=x_scale, source_scale=scale))
    source, target = graph.edge_index()
    exact = summed(target, (codes.double() * scale.double()[:, None])[source], 80)
    torch.testing.assert_close(grads["x"].double(), exact, rtol=1e-5, atol=1e-5)


def test_dots_and_their_gradients_are_unbiased() -> None:
    """Loops among the edges: both ends of one are rounded independently.

    Next to a column of ones, which sets the scale, values stay away from the codes of 2 bits, 0 and 1: what is rounded
    up once in a thousand draws would need thousands of them.
    """
    graph, upstream = graph_of("self_loops"), torch.randn(47)
    x = torch.cat([torch.ones(17, 1), 0.25 + 0.5 * torch.rand(17, 5)], dim=1) * (2 * torch.randint(2, (17, 6)) - 1)
    tensors = {"x_target": x, "x_source": x}

    def draw(seed: int) -> dict[str, Tensor]:
        y, grads = gradients(lambda **t: run(graph, seed=seed, bits=2, **t), tensors, upstream)
        return {"y": y, **grads}

    source, target = graph.edge_index()
    rows = x.double()
    exact = {
        "y": (rows[target] * rows[source]).sum(1),
        "x_target": summed(target, upstream[:, None] * rows[source], 17),
        "x_source": summed(source, upstream[:, None] * rows[target], 17),
    }
    assert_unbiased(draw, exact)


def test_seeds() -> None:
    graph = graph_of("random")
    tensors = inputs(graph)
    first, again, other = (run(graph, seed=seed, bits=8, **tensors) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@BITS
@OPS
def test_types_are_kept(dtype: torch.dtype, bits: int, op: str) -> None:
    """Sums are as those of fp32 rows, rounded once."""
    if op == "add" and bits:
        return
    graph = graph_of("power_law")
    tensors = {name: t.half().to(dtype) for name, t in inputs(graph, 7).items()}
    upstream = torch.randn(700).to(dtype) if op == "dot" else torch.randn(700, 7).to(dtype)
    y, grads = gradients(lambda **t: run(graph, bits=bits, op=op, **t), tensors, upstream)
    single = {name: t.float() for name, t in tensors.items()}
    expected, expected_grads = gradients(lambda **t: run(graph, bits=bits, op=op, **t), single, upstream.float())
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float64 else {"rtol": 0, "atol": 0}
    for actual, exact in ((y, expected), *((grads[name], expected_grads[name]) for name in tensors)):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, exact.to(dtype), **tolerance)


@OPS
@pytest.mark.parametrize("heads", [1, 2])
def test_rows_without_columns(op: str, heads: int) -> None:
    graph = graph_of("random")
    y, grads = gradients(lambda **t: run(graph, op=op, heads=heads, **t), inputs(graph, 0))
    by_head = (200,) if heads == 1 else (200, heads)
    assert torch.equal(y, torch.zeros((200, 0) if op == "add" else by_head))
    assert grads["x_target"].shape == grads["x_source"].shape == (50, 0)


def test_strided_rows_and_expanded_gradient() -> None:
    graph = graph_of("random")
    x, y = (torch.randn(100, 12)[::2, ::2] for _ in range(2))
    _, grads = gradients(lambda x: run(graph, x, y, heads=2), {"x": x})
    leaf = x.clone().requires_grad_()
    run(graph, leaf, y, heads=2).sum().backward()  # an upstream gradient with strides of 0
    assert torch.equal(grads["x"], leaf.grad)


@BITS
@OPS
def test_inputs_are_left_alone(bits: int, op: str) -> None:
    graph = graph_of("random")
    tensors = {name: t.requires_grad_() for name, t in inputs(graph).items()}
    assert_inputs_unchanged(lambda **t: run(graph, bits=bits if op == "dot" else 0, op=op, **t), tensors)


def test_only_what_a_gradient_needs_is_saved() -> None:
    graph = graph_of("random")
    tensors = inputs(graph)
    target, source = tensors["x_target"], tensors["x_source"].requires_grad_()
    kept = saved_tensors(lambda: run(graph, target, source))
    assert shares_memory(target, kept)
    assert not shares_memory(source, kept)
    kept = saved_tensors(lambda: run(graph, target, source, bits=8))
    assert not shares_memory(target, kept)
    assert [t.shape for t in kept if t.dtype == torch.int8] == [target.shape]
    kept = saved_tensors(lambda: run(graph, target, source, op="add"))
    assert not any(t.is_floating_point() for t in kept)


@BITS
def test_second_order_gradient_is_refused(bits: int) -> None:
    graph = graph_of("random")
    target, source = (t.requires_grad_() for t in inputs(graph).values())
    (dx,) = torch.autograd.grad(
        run(graph, target, source, bits=bits, keep_codes=False).sum(), target, create_graph=True
    )
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        dx.sum().backward()


@BITS
def test_autocast_changes_nothing(bits: int) -> None:
    graph = graph_of("random")
    tensors = inputs(graph)
    y, grads = gradients(lambda **t: run(graph, bits=bits, **t), tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_mixed, grads_mixed = gradients(lambda **t: run(graph, bits=bits, **t), tensors)
    assert torch.equal(y, y_mixed)
    assert all(torch.equal(grads[name], grads_mixed[name]) for name in grads)


@BITS
def test_a_trace_shows_the_formats(bits: int) -> None:
    graph = graph_of("random")
    tensors = {name: t.requires_grad_() for name, t in inputs(graph).items()}
    with trace() as report:
        run(graph, bits=bits, **tensors).sum().backward()
    expected = f"int{bits}" if bits else "float32"
    assert expected in report.ops["sddmm.forward"]["format"]
    assert expected in report.ops["spmm.backward"]["format"]
    assert report.ops["spmm.backward"]["calls"] == 2


@BITS
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_opcheck_of_dots(bits: int, heads: int, granularity: str) -> None:
    graph = graph_of("tall")
    target, source = (t.requires_grad_() for t in inputs(graph).values())
    for keep_codes in (False, True):
        options = (seed_of(1) if bits else None, bits, granularity, "dot", heads, keep_codes)
        args = (target, None, source, None, *spmm_structure(graph), *options)
        opcheck(ops.sddmm, args, compiled=granularity == "row")


def test_opcheck_of_sums_and_of_codes() -> None:
    graph = graph_of("tall")
    target, source = (t.requires_grad_() for t in inputs(graph).values())
    structure = spmm_structure(graph)
    opcheck(ops.sddmm, (target, None, source, None, *structure, None, 0, "row", "add", 2, False), compiled=True)
    codes = (random_codes(80, 6), random_scale(80), random_codes(5, 6), random_scale(5))
    opcheck(ops.sddmm, (*codes, *structure, None, 0, "row", "dot", 1, False))
    opcheck(ops.sddmm, (target, None, *codes[2:], *structure, seed_of(1), 8, "row", "dot", 1, True), compiled=True)


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=str)
@BITS
@OPS
def test_opcheck_of_the_backward(needs: tuple[bool, bool], bits: int, op: str) -> None:
    graph = graph_of("tall")
    rows = [reference.quantize(x) if bits else (x, None) for x in inputs(graph).values()]
    saved = [None] * 4 if op == "add" else [t for pair in rows for t in pair]
    grad = torch.randn(60, 6) if op == "add" else torch.randn(60)
    opcheck(sddmm_backward, (grad, *saved, *spmm_structure(graph), bits, op, 1, *needs))


@BITS
@pytest.mark.parametrize(("op", "heads"), [("dot", 1), ("dot", 2), ("add", 1)])
def test_the_kernels_agree(bits: int, op: str, heads: int, device: str) -> None:
    """The operator over the Triton kernels: equal codes and results of codes, and sums within the bound of any order of
    addition."""
    graph = graph_of("isolated")
    x_target, x_source = inputs(graph).values()
    grad = torch.randn(6, 6) if op == "add" else torch.randn(6, heads).squeeze(1)

    def results(backend: Backend, place: str) -> list[Tensor]:
        target, source, upstream = (t.to(place) for t in (x_target, x_source, grad))
        structure = [t.to(place) for t in spmm_structure(graph)]
        seed = None if bits == 0 else seed_of(1).to(place)
        options = (seed, bits, "row", op, heads, bits > 0)
        y, *codes = _sddmm(backend, target, None, source, None, *structure, *options)
        kept = codes if bits else (target, None, source, None)
        back = _sddmm_backward(backend, upstream, *kept, *structure, bits, op, heads, True, True)
        return [t.cpu() for t in (*codes, y, *back)]

    for ours, kernels in zip(results(torch_backend(), "cpu"), results(triton_backend(), device), strict=True):
        if ours.dtype == torch.int8:
            assert torch.equal(ours, kernels)
        # At most 6 terms with 5 roundings each, on either side; terms stay below 16.
        torch.testing.assert_close(kernels, ours, rtol=0, atol=2 * 11 * 6 * 16 * EPS)
