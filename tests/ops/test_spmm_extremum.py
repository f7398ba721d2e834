"""``qgnn::spmm_extremum``: the element-wise maximum and minimum over neighbors, and its gradients."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dense import CASES, graph_of, seed_of
from op_checks import assert_inputs_unchanged, gradients, opcheck, saved_tensors, shares_memory
from qgnn import Graph, ops, reference, trace
from qgnn.ops._backends import STREAM_INPUT, torch_backend
from qgnn.ops.spmm_extremum import _spmm_extremum, _spmm_extremum_backward, spmm_extremum_backward

LARGEST = pytest.mark.parametrize("largest", [True, False], ids=["max", "min"])
BITS = pytest.mark.parametrize("bits", [0, 8])


def run(
    graph: Graph,
    x: Tensor,
    weight: Tensor | None = None,
    *,
    x_scale: Tensor | None = None,
    largest: bool = True,
    seed: int | None = 1,
    bits: int = 0,
    granularity: str = "row",
    keep_codes: bool = True,
) -> Tensor:
    options = (seed_of(seed) if bits else None, bits, granularity, largest, keep_codes and bits > 0, None)
    return ops.spmm_extremum(x, x_scale, weight, graph.csr.indptr, graph.csr.index, *options)[0]


def inputs(graph: Graph, F: int = 7, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"x": torch.randn(graph.num_sources, F, dtype=dtype), "weight": torch.randn(graph.num_edges, dtype=dtype)}


def looped(graph: Graph, x: Tensor, weight: Tensor, largest: bool) -> Tensor:
    """The definition, row by row, in operations that autograd knows."""
    rows = []
    indptr, index = graph.csr.indptr.tolist(), graph.csr.index.long()
    for begin, end in pairwise(indptr):
        message = x[index[begin:end]] * weight[begin:end, None]
        if begin == end:
            rows.append(x.new_zeros(x.shape[1]))
        else:
            rows.append((message.max(0) if largest else message.min(0)).values)
    out = torch.stack(rows) if rows else x.new_zeros(0, x.shape[1])
    return out + 0 * (x.sum() + weight.sum())  # has a gradient even without edges


@pytest.mark.parametrize("name", CASES)
@LARGEST
def test_extremum_and_its_gradients_are_those_of_a_loop(name: str, largest: bool) -> None:
    """In float64 over random values, where equal ones do not occur but between copies of one edge, of equal weight."""
    graph = graph_of(name)
    tensors = inputs(graph, dtype=torch.float64)
    upstream = torch.randn(graph.num_targets, 7, dtype=torch.float64)
    out, grads = gradients(lambda **t: run(graph, **t, largest=largest), tensors, upstream)
    expected, expected_grads = gradients(lambda **t: looped(graph, **t, largest=largest), tensors, upstream)
    assert torch.equal(out, expected)
    for key, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[key], rtol=1e-13, atol=1e-13)


@settings(max_examples=25)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 40), st.integers(1, 20), st.booleans(), st.booleans())
def test_the_kernel_and_the_reference_agree_in_any_graph(
    num_sources: int, num_targets: int, num_edges: int, F: int, largest: bool, coarse: bool
) -> None:
    """The op in fp32 (C, where it compiles) against the one over plain PyTorch; coarse values are often equal."""
    edge_index = torch.stack([torch.randint(n, (num_edges,)) for n in (num_sources, num_targets)])
    graph = Graph.from_edge_index(edge_index, (num_sources, num_targets))
    x, weight = inputs(graph, F).values()
    if coarse:
        x, weight = x.round(), weight.sign()
    options = (None, 0, "row", largest, False, None)
    operands = (x, None, weight, graph.csr.indptr, graph.csr.index)
    out, arg, *_ = ops.spmm_extremum(*operands, *options)
    expected, expected_arg, *_ = _spmm_extremum(torch_backend(), *operands, *options)
    assert torch.equal(out, expected)
    assert torch.equal(arg, expected_arg)
    grad = torch.randn(num_targets, F).round()  # sums of integers times signs are exact in any order
    back = (grad, arg, x.round(), None, weight.sign(), graph.csr.index, num_sources, True, True)
    for ours, plain in zip(spmm_extremum_backward(*back), _spmm_extremum_backward(torch_backend(), *back), strict=True):
        assert torch.equal(ours, plain)


def test_among_equal_values_the_first_edge_gets_the_gradient() -> None:
    edge_index = torch.tensor([[4, 0, 2, 1], [0, 0, 0, 1]])
    graph = Graph.from_edge_index(edge_index, (5, 3))
    x = torch.ones(5, 3, requires_grad=True)
    run(graph, x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0] * 3, [1] * 3, [0] * 3, [0] * 3, [1] * 3]


@pytest.mark.parametrize("name", ["random", "tall", "wide", "isolated", "empty"])
@LARGEST
def test_extremum_gradcheck(name: str, largest: bool) -> None:
    """Values lie far enough apart that the finite differences do not change the winner."""
    graph = graph_of(name)
    x = (torch.randperm(graph.num_sources * 3).double().view(-1, 3) / 7 + 1).requires_grad_()
    weight = (1 + torch.rand(graph.num_edges, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda *t: run(graph, *t, largest=largest), (x, weight))


@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("seed", [None, 1], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("keep_codes", [False, True])
@LARGEST
def test_quantized_extremum_is_that_of_the_codes(
    granularity: str, seed: int | None, keep_codes: bool, largest: bool
) -> None:
    graph, upstream = graph_of("power_law"), torch.randn(160, 33)
    tensors = inputs(graph, 33)
    options = {"granularity": granularity, "seed": seed}
    codes, scale = reference.quantize(tensors["x"], granularity=granularity, seed=seed_of(seed), stream=STREAM_INPUT)
    out, grads = gradients(
        lambda **t: run(graph, **t, **options, largest=largest, bits=8, keep_codes=keep_codes), tensors, upstream
    )
    operands = (graph.csr.indptr, graph.csr.index, codes)
    expected, arg = reference.spmm_extremum(*operands, weight=tensors["weight"], x_scale=scale, largest=largest)
    assert torch.equal(out, expected)
    index = graph.csr.index
    dx = reference.spmm_extremum_dx(index, upstream.double(), arg, 160, weight=tensors["weight"])
    kept, kept_scale = (codes, scale) if keep_codes else (tensors["x"], None)
    dweight = reference.spmm_extremum_dweight(index, upstream.double(), arg, kept, x_scale=kept_scale)
    # At most 700 edges of 33 elements end in one sum, of terms below 100.
    bound = 700 * 33 * 2.0**-24 * 100
    torch.testing.assert_close(grads["x"].double(), dx, rtol=0, atol=bound)
    torch.testing.assert_close(grads["weight"].double(), dweight, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@BITS
def test_extremum_keeps_the_type(dtype: torch.dtype, bits: int) -> None:
    """A maximum is one of its terms, so a 16-bit one is exact; rows without edges give 0, not the lowest value."""
    graph = graph_of("isolated")
    x = inputs(graph, dtype=dtype)["x"].requires_grad_()
    out = run(graph, x, bits=bits)
    out.sum().backward()
    assert out.dtype == x.grad.dtype == dtype
    wide = run(graph, x.detach().double() if bits == 0 else x.detach().float(), bits=bits)
    assert torch.equal(out.double(), wide.to(dtype).double())
    assert torch.equal(out[0], torch.zeros(7, dtype=dtype))


@pytest.mark.parametrize("scale_rows", [1, 50])
def test_rows_that_come_as_codes(scale_rows: int) -> None:
    graph = graph_of("random")
    codes = torch.randint(-127, 128, (50, 7), dtype=torch.int8)
    scale, weight = torch.rand(scale_rows) + 0.1, torch.randn(graph.num_edges, requires_grad=True)
    out = run(graph, codes, weight, x_scale=scale, bits=8)
    out.sum().backward()
    values = codes.float() * scale[:, None]
    expected, grads = gradients(lambda weight: run(graph, values, weight), {"weight": weight.detach()})
    # weight * (scale * code) against (weight * scale) * code: two roundings each.
    torch.testing.assert_close(out, expected, rtol=4 * 2.0**-24, atol=0)
    torch.testing.assert_close(weight.grad, grads["weight"], rtol=0, atol=7 * 2 * 2.0**-24 * 200)


@BITS
def test_extremum_leaves_inputs_alone_and_keeps_no_rows_without_need(bits: int) -> None:
    graph = graph_of("random")
    tensors = {name: t.requires_grad_() for name, t in inputs(graph).items()}
    assert_inputs_unchanged(lambda **t: run(graph, bits=bits, **t), tensors)
    constant = tensors | {"weight": tensors["weight"].detach()}
    kept = saved_tensors(lambda: run(graph, bits=bits, **constant))
    assert not shares_memory(tensors["x"], kept)
    assert not any(t.dtype == torch.int8 for t in kept)
    kept = saved_tensors(lambda: run(graph, bits=bits, **tensors))
    assert shares_memory(tensors["x"], kept) == (bits == 0)
    assert any(t.dtype == torch.int8 for t in kept) == (bits == 8)


@BITS
def test_the_trace_names_both_passes(bits: int) -> None:
    graph = graph_of("random")
    tensors = {name: t.requires_grad_() for name, t in inputs(graph).items()}
    with trace() as t:
        run(graph, bits=bits, **tensors).sum().backward()
    assert t.ops["spmm_extremum.forward"]["format"] == ("int8" if bits else "float32")
    assert t.ops["spmm_extremum.backward"]["format"] == "float32"
    assert t.ops["spmm_extremum.backward_dweight"]["calls"] == 1


@BITS
def test_extremum_under_autocast(bits: int) -> None:
    graph, upstream = graph_of("random"), torch.randn(50, 7)
    tensors = inputs(graph)
    out, grads = gradients(lambda **t: run(graph, bits=bits, **t), tensors, upstream)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out_mixed, grads_mixed = gradients(lambda **t: run(graph, bits=bits, **t), tensors, upstream)
    assert torch.equal(out, out_mixed)
    for name, grad in grads.items():
        assert torch.equal(grad, grads_mixed[name]), name


def test_extremum_second_order_gradient_is_refused() -> None:
    graph = graph_of("random")
    x, weight = (t.requires_grad_() for t in inputs(graph).values())
    (dx,) = torch.autograd.grad(run(graph, x, weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        dx.sum().backward()


@BITS
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_extremum_opcheck(bits: int, learned: bool, granularity: str) -> None:
    graph = graph_of("tall")
    x, weight = (t.requires_grad_() for t in inputs(graph).values())
    edges: tuple[Any, ...] = (graph.csr.indptr, graph.csr.index)
    options = (seed_of(1) if bits else None, bits, granularity, True, learned and bits > 0, None)
    opcheck(ops.spmm_extremum, (x, None, weight if learned else None, *edges, *options), compiled=granularity == "row")
    codes, scale = reference.quantize(x.detach(), granularity=granularity)
    opcheck(ops.spmm_extremum, (codes, scale, weight if learned else None, *edges, *options))


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=str)
@BITS
def test_extremum_backward_opcheck(needs: tuple[bool, bool], bits: int) -> None:
    graph = graph_of("tall")
    x, weight = inputs(graph).values()
    _, arg = reference.spmm_extremum(graph.csr.indptr, graph.csr.index, x, weight=weight)
    kept = reference.quantize(x) if bits else (x, None)
    opcheck(spmm_extremum_backward, (torch.randn(80, 7), arg, *kept, weight, graph.csr.index, 5, *needs))
