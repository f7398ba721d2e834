"""ReLU and dropout in the epilogue of operators: what they give is that of the plain operator and an activation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dense import CASES, graph_of
from op_checks import gradients, opcheck, saved_tensors, spmm_structure
from qgnn import Graph, ops, reference, rng
from qgnn.activation import Activation, dropout_threshold, mask_width
from qgnn.ops._backends import STREAM_DROPOUT, torch_backend, triton_backend
from qgnn.ops.graph_linear import _graph_linear
from qgnn.ops.matmul import _matmul, quantize_gradient
from qgnn.ops.spmm import _spmm
from qgnn.reference.activation import activate

K, M = 9, 11
Run = Callable[..., Tensor]


def of_product(epilogue: tuple[Any, ...]) -> tuple[Any, ...]:
    """The last arguments of an operator that could keep packed rows."""
    return (*epilogue[:-1], *ops.Packed(), None)


def matmul(graph: Graph, epilogue: tuple[Any, ...], bits: int = 8, granularity: str = "row") -> Run:
    options = (rng.make_seed(1), bits, granularity, True)
    return lambda x, weight, bias: ops.matmul(x, None, weight, bias, *options, *of_product(epilogue))[0]


def spmm(graph: Graph, epilogue: tuple[Any, ...], bits: int = 8, granularity: str = "row") -> Run:
    structure = spmm_structure(graph)
    options = (rng.make_seed(1) if bits else None, bits, granularity, bits > 0)
    rows = lambda x, weight, bias: (x, None, weight, None, graph.mean_factor, bias)  # noqa: E731
    return lambda x, weight, bias: ops.spmm(*rows(x, weight, bias), *structure, *options, *epilogue)[0]


def graph_linear(graph: Graph, epilogue: tuple[Any, ...], bits: int = 8, granularity: str = "row") -> Run:
    structure = spmm_structure(graph)
    options = (rng.make_seed(1), bits, granularity, True, False)
    operands = lambda x, weight, bias: (x, None, weight, bias, None, None, graph.mean_factor)  # noqa: E731
    options = (*options, *of_product(epilogue))
    return lambda x, weight, bias: ops.graph_linear(*operands(x, weight, bias), *structure, *options)[0]


def inputs(op: Any, graph: Graph) -> dict[str, Tensor]:
    if op is spmm:
        return {"x": torch.randn(graph.num_sources, M), "weight": torch.randn(graph.num_edges), "bias": torch.randn(M)}
    return {"x": torch.randn(graph.num_sources, K), "weight": torch.randn(M, K), "bias": torch.randn(M)}


def epilogue_of(relu: bool, p: float, keep_mask: bool = True) -> tuple[Any, ...]:
    threshold = dropout_threshold(p)
    return (relu, threshold, rng.make_seed(4) if threshold else None, keep_mask, None)


def check(op: Any, graph: Graph, relu: bool, p: float, **options: Any) -> None:
    """Forward and gradients, bit for bit: the plain operator, an activation behind it, its mask on the gradient."""
    tensors = inputs(op, graph)
    plain = op(graph, epilogue_of(False, 0.0), **options)
    y, _ = gradients(plain, tensors)
    mask = torch.zeros(y.shape[0], mask_width(M), dtype=torch.uint8)
    a = Activation(relu, dropout_threshold(p), rng.make_seed(4), STREAM_DROPOUT, mask)
    expected, upstream = activate(y, a), torch.randn_like(y)
    _, wanted = gradients(plain, tensors, reference.activation_backward(upstream, mask, factor=a.factor)[0])
    out, grads = gradients(op(graph, epilogue_of(relu, p), **options), tensors, upstream)
    assert torch.equal(out, expected)
    for name, grad in grads.items():
        if name != "bias":
            assert torch.equal(grad, wanted[name]), name
    # Sums of a column in parts of the rows, or in one go: of at most 160 terms, each near 1.
    torch.testing.assert_close(grads["bias"], wanted["bias"], rtol=0, atol=1.01 * 160 * 160 * 4 * 2.0**-24)


OPS = pytest.mark.parametrize("op", [matmul, spmm, graph_linear])
EPILOGUES = pytest.mark.parametrize(("relu", "p"), [(True, 0.0), (False, 0.4), (True, 0.4), (True, 1.0)])


@OPS
@EPILOGUES
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_epilogue_is_an_activation_behind_the_operator(op: Any, relu: bool, p: float, granularity: str) -> None:
    check(op, graph_of("random"), relu, p, granularity=granularity)


@pytest.mark.parametrize("name", CASES)
@OPS
def test_epilogue_on_every_graph(op: Any, name: str) -> None:
    check(op, graph_of(name), True, 0.4)


@EPILOGUES
def test_epilogue_of_full_precision_rows(relu: bool, p: float) -> None:
    check(spmm, graph_of("power_law"), relu, p, bits=0)


@settings(max_examples=20)
@given(st.integers(1, 30), st.integers(0, 60), st.booleans(), st.sampled_from([0.0, 0.1, 0.9]), st.integers(2, 8))
def test_epilogue_any_graph(num_nodes: int, num_edges: int, relu: bool, p: float, bits: int) -> None:
    graph = Graph.from_edge_index(torch.randint(num_nodes, (2, num_edges)), num_nodes)
    for op in (matmul, spmm, graph_linear):
        check(op, graph, relu, p, bits=bits)


@OPS
def test_a_bit_an_element_is_what_is_kept(op: Any) -> None:
    """Neither the rows behind the operator nor their ReLU: only mask, codes and what belongs to the graph."""
    graph = graph_of("random")
    tensors = {name: t.requires_grad_() for name, t in inputs(op, graph).items()}
    kept = saved_tensors(lambda: op(graph, epilogue_of(True, 0.5))(**tensors))
    assert [tuple(t.shape) for t in kept if t.dtype == torch.uint8] == [(50, mask_width(M))]
    assert not [t for t in kept if t.dtype == torch.float32 and t.shape == (50, M)]


@OPS
def test_without_a_mask_there_is_no_backward_pass(op: Any) -> None:
    graph = graph_of("random")
    tensors = inputs(op, graph)
    run = op(graph, epilogue_of(True, 0.5, keep_mask=False))
    with torch.no_grad():
        out = run(**tensors)
    assert torch.equal(out, op(graph, epilogue_of(True, 0.5))(**tensors))
    with pytest.raises(ValueError, match="expects 'keep_mask' where its activation has a backward pass"):
        run(**{name: t.requires_grad_() for name, t in tensors.items()})


@OPS
def test_dropout_needs_a_seed(op: Any) -> None:
    graph = graph_of("random")
    with pytest.raises(ValueError, match=r"expects 'dropout_seed' with a 'threshold' \(got None\)"):
        op(graph, (False, 9, None, True, None))(**inputs(op, graph))


@OPS
@EPILOGUES
def test_epilogue_opcheck(op: Any, relu: bool, p: float) -> None:
    graph = graph_of("tall")
    tensors = [t.requires_grad_() for t in inputs(op, graph).values()]
    seed, epilogue, structure = rng.make_seed(1), epilogue_of(relu, p), spmm_structure(graph)
    x, weight, bias = tensors
    if op is matmul:
        opcheck(ops.matmul, (x, None, weight, bias, seed, 8, "row", True, *of_product(epilogue)), compiled=True)
    elif op is spmm:
        rows = (x, None, weight, None, graph.mean_factor, bias)
        opcheck(ops.spmm, (*rows, *structure, seed, 8, "row", True, *epilogue), compiled=True)
    else:
        rows = (x, None, weight, bias, None, None, graph.mean_factor)
        opcheck(
            ops.graph_linear, (*rows, *structure, seed, 8, "row", True, False, *of_product(epilogue)), compiled=True
        )


@OPS
@EPILOGUES
def test_epilogue_on_the_kernels(op: Any, relu: bool, p: float, device: str) -> None:
    """The operators over the Triton kernels. Products are exact, so are their epilogues; sums of an aggregation may
    fall on the other side of 0, but no element that is clearly positive or negative does."""
    graph = graph_of("isolated")
    tensors, threshold = inputs(op, graph), dropout_threshold(p)
    results = []
    for backend, place in ((torch_backend(), "cpu"), (triton_backend(), device)):
        x, weight, bias = (t.to(place) for t in tensors.values())
        structure, factor = [t.to(place) for t in spmm_structure(graph)], graph.mean_factor.to(place)
        seed, dropout_seed = rng.make_seed(1, place), rng.make_seed(4, place)
        epilogue = (relu, threshold, dropout_seed, True, None)
        if op is matmul:
            y, _, _, mask = _matmul(backend, x, None, weight, bias, seed, 8, "row", True, *of_product(epilogue))
        elif op is spmm:
            rows = (x, None, weight, None, factor, bias)
            y, _, _, mask = _spmm(backend, *rows, *structure, seed, 8, "row", True, *epilogue)
        else:
            rows = (x, None, weight, bias, None, None, factor)
            options = (seed, 8, "row", True, False, *of_product(epilogue))
            y, *_, mask = _graph_linear(backend, *rows, *structure, *options)
        g_q, g_scale, db = quantize_gradient(backend, y, mask, threshold, seed, 8, "row", True)
        results.append([t.cpu() for t in (y, mask, g_q, g_scale, db)])
    (y, mask, *back), (y_kernel, mask_kernel, *back_kernel) = results
    if op is matmul:
        torch.testing.assert_close(y_kernel, y, rtol=1e-6, atol=1e-6)
        assert torch.equal(mask, mask_kernel)
    settled = (y.abs() > 0.01) | (y_kernel.abs() > 0.01)  # fp16 weights: 2**-11 of sums below 16
    assert torch.equal((y != 0) & settled, (y_kernel != 0) & settled)
    assert (y - y_kernel).norm() <= 2.0**-11 * y.norm() + 1e-6
    for ours, kernels in zip(back[1:], back_kernel[1:], strict=True):
        assert (ours - kernels).norm() <= 2.0**-9 * ours.norm() + 1e-6
