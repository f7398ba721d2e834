"""Codes that know what they were made of: products and sums take the codes, and the rows get the gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphs import GRAPHS
from layer_cases import kept_bytes
from op_arguments import arguments_of
from op_checks import opcheck
from qgnn import QConfig, QTensor, functional
from qgnn.formats import Int

EDGES, N = GRAPHS["random"]
K, M = 6, 12

Call = Callable[..., Tensor]


def linear(x: Tensor | QTensor, weight: Tensor, **options: Any) -> Tensor:
    return functional.linear(x, weight, **options)


def spmm(x: Tensor | QTensor, weight: Tensor, **options: Any) -> Tensor:
    return functional.spmm(EDGES, x, weight[0, 0].expand(EDGES.shape[1]), **options)


def graph_linear(x: Tensor | QTensor, weight: Tensor, **options: Any) -> Tensor:
    return functional.graph_linear(EDGES, x, weight, **options)


def maximum(x: Tensor | QTensor, weight: Tensor, **options: Any) -> Tensor:
    return functional.spmm(EDGES, x, weight[0, 0].expand(EDGES.shape[1]), "max", **options)


CALLS = [linear, spmm, graph_linear, maximum]
ALL = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
OPERATORS = ["matmul", "spmm", "graph_linear", "spmm_extremum"]


def gradients(call: Call, x: Tensor | QTensor, leaf: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """The result, and the gradients of the rows and the weight."""
    out = call(x, weight, **options)
    upstream = torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype)
    return (out.detach(), *torch.autograd.grad(out, (leaf, weight), upstream))


@ALL
@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_codes_pass_on_the_gradient_that_the_rows_would_get(call: Call, rounding: str, granularity: str) -> None:
    config = QConfig(rounding=rounding, granularity=granularity)
    x, weight = torch.randn(N, K, requires_grad=True), torch.randn(M, K, requires_grad=True)
    q = functional.quantize(x, config, seed=5, straight_through=True)
    assert q.origin is x
    actual = gradients(call, q, x, weight, config=config, seed=5)
    expected = gradients(call, x, x, weight, config=config, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@ALL
def test_codes_pass_on_a_gradient_in_full_precision(call: Call) -> None:
    x, weight = torch.randn(N, K, requires_grad=True), torch.randn(M, K, requires_grad=True)
    q = functional.quantize(x, straight_through=True)
    leaf = q.dequantize().requires_grad_()
    actual, expected = gradients(call, q, x, weight), gradients(call, leaf, leaf, weight)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


@ALL
def test_codes_of_half_rows_give_half_results(call: Call) -> None:
    x = torch.randn(N, K, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(M, K, requires_grad=True)
    q = functional.quantize(x, straight_through=True)
    for config in (None, QConfig()):
        out, dx, dweight = gradients(call, q, x, weight, config=config)
        assert (out.dtype, dx.dtype, dweight.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


@ALL
def test_codes_of_constants_have_no_gradient(call: Call) -> None:
    x, weight = torch.randn(N, K, requires_grad=True), torch.randn(M, K, requires_grad=True)
    for q in (functional.quantize(x), functional.quantize(x.detach(), straight_through=True)):
        assert q.origin is None
        out = call(q, weight, config=QConfig())
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            torch.autograd.grad(out.sum(), x)
    with torch.no_grad():
        assert functional.quantize(x, straight_through=True).origin is None


def test_two_products_of_one_set_of_codes_add_their_gradients() -> None:
    x = torch.randn(3, N, K, requires_grad=True)
    first, second = torch.randn(2, M, K).unbind()
    config = QConfig(rounding="nearest")
    q = functional.quantize(x, config, straight_through=True)
    both = functional.linear(q, first, config=config) + functional.linear(q, second, config=config)
    apart = functional.linear(x, first, config=config) + functional.linear(x, second, config=config)
    assert torch.equal(both, apart)
    upstream = torch.randn_like(both)
    assert torch.equal(*(torch.autograd.grad(y, x, upstream)[0] for y in (both, apart)))


def test_codes_are_kept_in_place_of_their_rows() -> None:
    x, weight = torch.randn(N, 64, requires_grad=True), torch.randn(M, 64, requires_grad=True)
    q = functional.quantize(x, straight_through=True)
    ignore = (weight, q.codes, q.scale)
    assert kept_bytes(lambda: functional.linear(q, weight, config=QConfig()), ignore) == 8  # the seed


def test_a_format_passes_no_gradient_on() -> None:
    x = torch.randn(N, K, requires_grad=True)
    with pytest.raises(ValueError, match="'quantize' passes gradients on with a config"):
        functional.quantize(x, Int(8), straight_through=True)


def with_origin(name: str) -> dict[str, Any]:
    arguments = arguments_of(name)
    x = arguments["x"].requires_grad_()
    codes = torch.randint(-127, 128, x.shape, dtype=torch.int8)
    return {**arguments, "x": codes, "x_scale": torch.rand(x.shape[0]), "x_float": x}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_know_the_origin_of_codes(name: str) -> None:
    arguments = with_origin(name)
    for key in ("weight", "bias"):
        if arguments.get(key) is not None:
            arguments[key].requires_grad_()
    opcheck(getattr(torch.ops.qgnn, name), tuple(arguments.values()))


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_refuse_an_origin_without_codes(name: str) -> None:
    x = arguments_of(name)["x"]
    with pytest.raises(ValueError, match=rf"'qgnn::{name}' expects 'x_float' beside codes only \(got no 'x_scale'\)"):
        getattr(torch.ops.qgnn, name)(**arguments_of(name) | {"x_float": x})
    with pytest.raises(ValueError, match=rf"'qgnn::{name}' expects 'x_float' of shape "):
        getattr(torch.ops.qgnn, name)(**with_origin(name) | {"x_float": x[1:].requires_grad_()})
