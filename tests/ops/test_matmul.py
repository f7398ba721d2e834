"""``qgnn::matmul``: forward and both gradients against the dense product of the codes they were computed from."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dense import WIDTHS, assert_within, seed_of, sum_bound
from op_checks import (
    PLAIN_PRODUCT,
    assert_inputs_unchanged,
    assert_unbiased,
    gradients,
    opcheck,
    saved_tensors,
    shares_memory,
)
from qgnn import ops, reference, rng
from qgnn.ops._backends import STREAM_GRAD, STREAM_INPUT, STREAM_WEIGHT, STREAM_WEIGHT_T, torch_backend, triton_backend
from qgnn.ops.matmul import _matmul, _matmul_backward, matmul_backward

N, K, M = 13, 33, 7


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    x_scale: Tensor | None = None,
    seed: int | None = 1,
    bits: int = 8,
    granularity: str = "row",
    keep_codes: bool = True,
) -> Tensor:
    return ops.matmul(x, x_scale, weight, bias, seed_of(seed), bits, granularity, keep_codes, *PLAIN_PRODUCT)[0]


def dequantized(t: Tensor, stream: int, seed: int | None, bits: int = 8, granularity: str = "row") -> Tensor:
    """float64 values of the codes that the operator makes of an operand."""
    codes, scale = reference.quantize(t, bits=bits, granularity=granularity, seed=seed_of(seed), stream=stream)
    return codes.double() * scale.double()[:, None]


def inputs(n: int = N, k: int = K, m: int = M) -> dict[str, Tensor]:
    return {"x": torch.randn(n, k), "weight": torch.randn(m, k), "bias": torch.randn(m)}


def check_against_codes(
    given_inputs: dict[str, Tensor], upstream: Tensor, *, keep_codes: bool = True, **options: Any
) -> None:
    """Every result lies within the rounding error of the float64 product of the very codes it is made of."""
    x, weight, bias = (t.detach() for t in given_inputs.values())
    y, grads = gradients(lambda **t: run(**t, keep_codes=keep_codes, **options), given_inputs, upstream)
    seed, bits, granularity = options.get("seed", 1), options.get("bits", 8), options.get("granularity", "row")
    x_hat = dequantized(x, STREAM_INPUT, seed, bits, granularity)
    w_hat = dequantized(weight, STREAM_WEIGHT, seed, bits)
    g_hat = dequantized(upstream, STREAM_GRAD, seed, bits, granularity)
    wt_hat = dequantized(weight.t(), STREAM_WEIGHT_T, seed, bits)
    none = torch.tensor(0)
    product = x_hat @ w_hat.t()
    assert_within(y, product + bias.double(), sum_bound(none, product.abs() + bias.abs(), 4))
    dx = g_hat @ wt_hat.t()
    assert_within(grads["x"], dx, sum_bound(none, dx.abs(), 4))
    kept = x_hat if keep_codes else x.double()
    rows = torch.tensor(len(x))
    assert_within(grads["weight"], g_hat.t() @ kept, sum_bound(rows, g_hat.abs().t() @ kept.abs(), 3))
    assert_within(grads["bias"], upstream.double().sum(0), sum_bound(rows, upstream.double().abs().sum(0), 0))


@pytest.mark.parametrize("n", [1, 33])
@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("m", [1, 7, 33])
def test_matmul_is_the_product_of_its_codes(n: int, k: int, m: int) -> None:
    check_against_codes(inputs(n, k, m), torch.randn(n, m))


@pytest.mark.parametrize("seed", [None, 1], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("keep_codes", [False, True])
def test_matmul_options(seed: int | None, granularity: str, bits: int, keep_codes: bool) -> None:
    options = {"seed": seed, "granularity": granularity, "bits": bits, "keep_codes": keep_codes}
    check_against_codes(inputs(), torch.randn(N, M), **options)


@settings(max_examples=30)
@given(st.integers(0, 20), st.integers(1, 40), st.integers(1, 10), st.integers(-12, 12), st.integers(-12, 12))
def test_matmul_any_shape_and_magnitude(n: int, k: int, m: int, power_x: int, power_g: int) -> None:
    tensors = inputs(n, k, m)
    tensors["x"] *= 10.0**power_x
    check_against_codes(tensors, torch.randn(n, m) * 10.0**power_g)


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_matmul_gradients_have_their_own_scale(factor: float) -> None:
    """A gradient far larger or smaller than the forward rows; the forward's scale would clip it or flush it."""
    tensors, upstream = inputs(), torch.randn(N, M) * factor
    _, grads = gradients(run, tensors, upstream)
    exact_x, exact_w = upstream @ tensors["weight"], upstream.t() @ tensors["x"]
    assert (grads["x"] - exact_x).norm() < 0.03 * exact_x.norm()
    assert (grads["weight"] - exact_w).norm() < 0.03 * exact_w.norm()


def test_matmul_is_unbiased() -> None:
    """Two bits and operands of one width: operands that shared random bits would show in the weight's gradient."""
    tensors, upstream = inputs(N, M, M), torch.randn(N, M)
    x, weight, bias = (t.double() for t in tensors.values())

    def draw(seed: int) -> dict[str, Tensor]:
        y, grads = gradients(lambda **t: run(**t, seed=seed, bits=2), tensors, upstream)
        return {"y": y, "x": grads["x"], "weight": grads["weight"]}

    exact = {"y": x @ weight.t() + bias, "x": upstream.double() @ weight, "weight": upstream.double().t() @ x}
    assert_unbiased(draw, exact)


def test_matmul_seeds() -> None:
    tensors, upstream = inputs(), torch.randn(N, M)
    results = [gradients(lambda seed=seed, **t: run(**t, seed=seed), tensors, upstream) for seed in (1, 1, 2)]
    (y, grads), (y_again, grads_again), (y_other, grads_other) = results
    assert torch.equal(y, y_again)
    assert not torch.equal(y, y_other)
    for name in ("x", "weight"):
        assert torch.equal(grads[name], grads_again[name])
        assert not torch.equal(grads[name], grads_other[name])


@pytest.mark.parametrize("per_tensor", [False, True])
def test_matmul_of_given_codes(per_tensor: bool) -> None:
    """Codes that were made before are used as they are, forward and for the weight's gradient."""
    tensors, upstream = inputs(), torch.randn(N, M)
    granularity = "tensor" if per_tensor else "row"
    x_q, x_scale = reference.quantize(tensors["x"], granularity=granularity)
    y, grads = gradients(lambda **t: run(**t, x_scale=x_scale), tensors | {"x": x_q}, upstream)
    x_hat = x_q.double() * x_scale.double()[:, None]
    product = x_hat @ dequantized(tensors["weight"], STREAM_WEIGHT, 1).t()
    bound = sum_bound(torch.tensor(0), product.abs() + tensors["bias"].abs(), 4)
    assert_within(y, product + tensors["bias"].double(), bound)
    g_hat = dequantized(upstream, STREAM_GRAD, 1)
    assert set(grads) == {"weight", "bias"}
    assert_within(grads["weight"], g_hat.t() @ x_hat, sum_bound(torch.tensor(N), g_hat.abs().t() @ x_hat.abs(), 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_matmul_keeps_the_type(dtype: torch.dtype) -> None:
    tensors, upstream = {k: v.to(dtype) for k, v in inputs().items()}, torch.randn(N, M).to(dtype)
    y, grads = gradients(run, tensors, upstream)
    expected, expected_grads = gradients(run, {k: v.float() for k, v in tensors.items()}, upstream.float())
    assert y.dtype == dtype
    assert torch.equal(y, expected.to(dtype))
    for name, grad in grads.items():
        assert grad.dtype == dtype
        if name == "bias" and dtype == torch.float64:  # summed in float64: exact where the fp32 sum is not
            torch.testing.assert_close(grad, upstream.sum(0))
        else:
            assert torch.equal(grad, expected_grads[name].to(dtype)), name


@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_matmul_single_gradients(wanted: str) -> None:
    tensors, upstream = inputs(), torch.randn(N, M)
    _, all_grads = gradients(run, tensors, upstream)
    leaf = tensors[wanted].requires_grad_()
    (grad,) = torch.autograd.grad(run(**tensors), leaf, upstream)
    assert torch.equal(grad, all_grads[wanted])


@pytest.mark.parametrize(("n", "k", "m"), [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_matmul_empty(n: int, k: int, m: int, granularity: str) -> None:
    tensors = inputs(n, k, m)
    y, grads = gradients(lambda **t: run(**t, granularity=granularity), tensors)
    assert torch.equal(y, tensors["bias"].expand(n, m))
    assert torch.equal(grads["x"], torch.zeros(n, k))
    assert torch.equal(grads["weight"], torch.zeros(m, k))
    assert torch.equal(grads["bias"], torch.full((m,), float(n)))


def test_matmul_strided_inputs_and_expanded_gradient() -> None:
    x, weight = torch.randn(2 * N, 2 * K)[::2, ::2], torch.randn(K, M).t()
    y, grads = gradients(run, {"x": x, "weight": weight})
    leaves = [x.clone().requires_grad_(), weight.contiguous().clone().requires_grad_()]
    expected = run(*leaves)
    expected.sum().backward()  # an upstream gradient with strides of 0
    assert torch.equal(y, expected)
    assert torch.equal(grads["x"], leaves[0].grad)
    assert torch.equal(grads["weight"], leaves[1].grad)


def test_matmul_leaves_its_inputs_alone() -> None:
    assert_inputs_unchanged(run, {name: t.requires_grad_() for name, t in inputs().items()})


@pytest.mark.parametrize("keep_codes", [False, True])
def test_matmul_saves_codes_or_the_input(keep_codes: bool) -> None:
    tensors = {name: t.requires_grad_() for name, t in inputs().items()}
    kept = saved_tensors(lambda: run(**tensors, keep_codes=keep_codes))
    assert shares_memory(tensors["x"], kept) != keep_codes
    assert any(t.dtype == torch.int8 and t.shape == (N, K) for t in kept) == keep_codes
    frozen = tensors | {"weight": tensors["weight"].detach()}
    kept = saved_tensors(lambda: run(**frozen, keep_codes=keep_codes))
    assert not shares_memory(tensors["x"], kept)
    assert all(t.shape != (N, K) for t in kept)  # a frozen weight needs nothing of x


def test_matmul_second_order_gradient_is_refused() -> None:
    x, weight = (t.requires_grad_() for t in list(inputs().values())[:2])
    (dx,) = torch.autograd.grad(run(x, weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        dx.sum().backward()


def test_matmul_under_autocast() -> None:
    """The product of codes is exact: a lower precision of the surroundings must not reach into it."""
    tensors, upstream = inputs(), torch.randn(N, M)
    y, grads = gradients(run, tensors, upstream)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_mixed, grads_mixed = gradients(run, tensors, upstream)
    assert torch.equal(y, y_mixed)
    for name, grad in grads.items():
        assert torch.equal(grad, grads_mixed[name]), name


@pytest.mark.parametrize("given_codes", [False, True])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("keep_codes", [False, True])
def test_matmul_opcheck(given_codes: bool, granularity: str, keep_codes: bool) -> None:
    x, weight, bias = inputs().values()
    x_scale = None
    if given_codes:
        x, x_scale = reference.quantize(x, granularity=granularity)
    else:
        x.requires_grad_()
    args = (x, x_scale, weight.requires_grad_(), bias.requires_grad_(), rng.make_seed(1), 8, granularity, keep_codes)
    opcheck(ops.matmul, (*args, *PLAIN_PRODUCT), compiled=granularity == "row")


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, False)], ids=str)
@pytest.mark.parametrize("kept_codes", [False, True])
def test_matmul_backward_opcheck(needs: tuple[bool, bool, bool], kept_codes: bool) -> None:
    x, weight, _ = inputs().values()
    x, x_scale = reference.quantize(x) if kept_codes else (x, None)
    kept = (None, x, x_scale, weight)
    opcheck(matmul_backward, (torch.randn(N, M), *kept, rng.make_seed(1), *ops.Packed(), 8, "row", 0, *needs))


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_matmul_on_the_kernels(granularity: str, device: str) -> None:
    """The operator over the Triton kernels: the same integers, hence the same products; sums over rows differ by the
    fp16 factor that the kernel folds in (2**-10 of each term)."""
    x, weight, bias = (t.to(device) for t in inputs().values())
    seed, grad = rng.make_seed(1, device), torch.randn(N, M, device=device)
    results = []
    for backend, move in ((torch_backend(), torch.Tensor.cpu), (triton_backend(), lambda t: t)):
        forward_args = (move(x), None, move(weight), move(bias), move(seed), 8, granularity, True)
        y, x_q, x_scale, _ = _matmul(backend, *forward_args, *PLAIN_PRODUCT)
        backward_args = (move(grad), None, x_q, x_scale, move(weight), move(seed), *ops.Packed(), 8, granularity, 0)
        back = _matmul_backward(backend, *backward_args, True, True, True)
        results.append([t.cpu() for t in (y, x_q, x_scale, *back)])
    (y, *codes, dx, dw, db), (y_kernel, *codes_kernel, dx_kernel, dw_kernel, db_kernel) = results
    assert all(torch.equal(a, b) for a, b in zip(codes, codes_kernel, strict=True))
    torch.testing.assert_close(y_kernel, y, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dx_kernel, dx, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(db_kernel, db, rtol=1e-6, atol=1e-5)
    terms = grad.abs().cpu().double().t() @ x.abs().cpu().double()
    assert_within(dw_kernel, dw.double(), 2.0**-9 * terms)
