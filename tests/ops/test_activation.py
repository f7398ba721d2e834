"""``qgnn::activation`` and ``functional.activation``: torch's functions, their gradients, and what is kept of them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from op_checks import assert_inputs_unchanged, assert_unbiased, gradients, opcheck, saved_tensors
from qgnn import QConfig, functional, ops, rng, trace
from qgnn.activation import KINDS, dropout_threshold, keep_factor, mask_width
from qgnn.functional import activation
from qgnn.ops._backends import STREAM_DROPOUT, Backend, torch_backend, triton_backend
from qgnn.ops.activation import _activation_backward, _activation_forward, activation_backward
from qgnn.rng import random_bits16, stream_key
from statistics_checks import EPS, assert_plausible

N, WIDTH, ALPHA, SLOPE = 30, 13, 1.5, 0.2
TORCH: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "relu": F.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, SLOPE),
    "elu": lambda x: F.elu(x, ALPHA),
}
OPTIONS: dict[str, Any] = {"negative_slope": SLOPE, "alpha": ALPHA}
INT8 = QConfig()

EVERY = pytest.mark.parametrize("kind", TORCH)
DROPOUT = pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
CONFIGS = pytest.mark.parametrize("config", [None, INT8], ids=["exact", "codes"])


def operands(dtype: torch.dtype = torch.float32, num_rows: int = N) -> dict[str, Tensor]:
    """Multiples of 1/8, whose sums every type holds."""
    shapes = {"x": (num_rows, WIDTH), "bias": (WIDTH,), "residual": (num_rows, WIDTH)}
    return {name: (torch.randint(-24, 24, shape) / 8).to(dtype) for name, shape in shapes.items()}


def kept_elements(num_rows: int, p: float, seed: int) -> Tensor:
    """What dropout multiplies with, [num_rows, WIDTH]."""
    bits = random_bits16(0, num_rows, WIDTH, rng.make_seed(seed) ^ stream_key(STREAM_DROPOUT))
    threshold = dropout_threshold(p)
    return (bits >= threshold) * keep_factor(threshold)


@EVERY
@DROPOUT
@pytest.mark.parametrize("names", [("x",), ("x", "bias"), ("x", "residual"), ("x", "bias", "residual")], ids="+".join)
def test_activation_is_torchs_function_of_the_sum_and_dropout(kind: str, p: float, names: tuple[str, ...]) -> None:
    """Sums are exact. ELU is off by five roundings, torch's by three; its derivative by the same, and all are
    multiplied with the factor of dropout (rounded) and rounded once more. Sums of columns have 30 terms."""
    tensors = {name: t for name, t in operands().items() if name in names}
    upstream, kept = torch.randn(N, WIDTH), kept_elements(N, p, 3)
    out, grads = gradients(lambda **t: activation(kind=kind, dropout=p, **t, **OPTIONS, seed=3), tensors, upstream)
    expected, exact = gradients(lambda **t: TORCH[kind](sum(t.values())) * kept, tensors, upstream)
    roundings = 10 if kind == "elu" else 3
    assert ((out - expected).abs() <= roundings * EPS * expected.abs()).all()
    for name, grad in grads.items():
        size = exact[name].abs() if name != "bias" else exact["x"].abs().sum(0) * N
        assert ((grad - exact[name]).abs() <= (roundings + 1) * EPS * size).all(), name


@EVERY
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@CONFIGS
def test_types_are_kept(kind: str, dtype: torch.dtype, config: QConfig | None) -> None:
    """What is kept of ELU in a half type is rounded once, and so is each result."""
    tensors, upstream = operands(dtype), torch.randint(-24, 24, (N, WIDTH)).to(dtype) / 8
    run = lambda **t: activation(kind=kind, dropout=0.5, config=config, seed=3, **t, **OPTIONS)  # noqa: E731
    out, grads = gradients(run, tensors, upstream)
    wide, exact = gradients(run, {name: t.float() for name, t in tensors.items()}, upstream.float())
    assert out.dtype == dtype
    rounded = 16 * EPS if dtype == torch.float64 else torch.finfo(dtype).eps / 2
    torch.testing.assert_close(out.double(), wide.double(), rtol=rounded, atol=0)
    for name, grad in grads.items():
        assert grad.dtype == dtype
        bound = 2.1 * rounded * exact[name].double().abs()
        if name == "bias":  # of 30 terms, each made from what was rounded
            bound = bound + 1.1 * rounded * exact["x"].double().abs().sum(0)
        if kind == "elu" and config is not None and dtype == torch.float64:  # at a step's edge, a code may be another
            bound = bound + (1 if name != "bias" else N) * 2 * ALPHA / 255 * 3
        assert ((grad.double() - exact[name].double()).abs() <= bound).all(), name


@EVERY
@DROPOUT
def test_gradcheck(kind: str, p: float) -> None:
    leaves = [torch.randn(t.shape, dtype=torch.float64, requires_grad=True) for t in operands(num_rows=5).values()]

    def run(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return activation(x, kind, p, bias=bias, residual=residual, **OPTIONS, seed=3)

    assert torch.autograd.gradcheck(run, leaves)


@EVERY
@CONFIGS
def test_dropout_follows_the_seed_and_keeps_the_mean(kind: str, config: QConfig | None) -> None:
    x = torch.rand(400, 33) + 1
    run = lambda seed, p=0.25: activation(x.requires_grad_(), kind, p, config=config, seed=seed).detach()  # noqa: E731
    out = run(3)
    kept = out != 0
    torch.testing.assert_close(out[kept], x.detach()[kept] / 0.75)
    assert_plausible([(kept.double().mean() - 0.75) / (0.75 * 0.25 / kept.numel()) ** 0.5], "share of kept elements")
    assert torch.equal(out, run(3))
    assert not torch.equal(kept, run(4) != 0)
    assert not run(3, 1.0).any()
    linear = functional.linear(torch.eye(33)[:5], torch.ones(33, 33), dropout=0.25, config=INT8, seed=3)
    assert torch.equal(linear != 0, kept[:5])  # the bits of the fused epilogues


@settings(max_examples=40)
@given(
    st.sampled_from(list(TORCH)),
    st.integers(0, 9),
    st.integers(0, 40),
    st.sampled_from([0, 0.1, 0.9]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_gradients_fit_each_other(kind: str | None, rows: int, width: int, p: float, codes: bool, seed: int) -> None:
    """... and the result: a residual has the gradient of the rows and a bias its sum; of what was dropped there is
    none; the result is that of the function alone where nothing was dropped."""
    torch.manual_seed(seed)
    tensors = {"x": torch.randn(rows, width), "bias": torch.randn(width), "residual": torch.randn(rows, width)}
    options = {"kind": kind, "config": INT8 if codes else None, **OPTIONS}
    out, grads = gradients(lambda **t: activation(dropout=p, seed=seed, **options, **t), tensors)
    assert torch.equal(grads["x"], grads["residual"])
    size = grads["x"].double().abs().sum(0)
    assert ((grads["bias"].double() - grads["x"].double().sum(0)).abs() <= rows * EPS * size).all()
    plain = activation(**tensors, **options)
    kept = out != 0
    torch.testing.assert_close(out[kept], (plain * keep_factor(dropout_threshold(p)))[kept], rtol=2 * EPS, atol=0)
    assert not grads["x"][~kept & (plain != 0)].any()


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("alpha", [0.5, 1.0, 3.0])
def test_codes_of_a_derivative_are_off_by_less_than_a_step(rounding: str, alpha: float) -> None:
    """By half a step to nearest; SQNR: steps of max(1, alpha) / 255 are off by a variance of 1/6 of their square at
    most, uniformly met, for derivatives whose mean square is at least 0.5 on N(0, 1): more than 51 dB for alpha = 1."""
    tensors, upstream = {"x": torch.randn(2000, 33)}, torch.randn(2000, 33)
    run = lambda config: lambda x: activation(x, "elu", alpha=alpha, config=config, seed=3)  # noqa: E731
    out, exact = gradients(run(None), tensors, upstream)
    same, grads = gradients(run(QConfig(rounding=rounding)), tensors, upstream)
    assert torch.equal(out, same)
    step, error = max(1, alpha) / 255, (grads["x"] - exact["x"]).abs()
    assert (error <= upstream.abs() * step * (0.51 if rounding == "nearest" else 1.01)).all()
    assert error.max() > 0
    noise = step**2 / (12 if rounding == "nearest" else 6) * upstream.double().square().sum()
    assert error.double().square().sum() <= 1.02 * noise
    assert exact["x"].double().square().sum() >= 10**3.4 * noise


def test_gradients_of_codes_are_unbiased() -> None:
    x, bias, upstream = torch.randn(9, WIDTH), torch.randn(WIDTH), torch.randn(9, WIDTH)

    def draw(seed: int, config: QConfig | None = INT8) -> dict[str, Tensor]:
        run = lambda **t: activation(kind="elu", config=config, seed=seed, **OPTIONS, **t)  # noqa: E731
        return gradients(run, {"x": x, "bias": bias}, upstream)[1]

    assert_unbiased(draw, draw(0, None))


def test_codes_take_other_bits_than_dropout() -> None:
    """One seed serves both. Of -1, a share of the elements that are kept is rounded up that is the step's fraction."""
    tensors = {"x": torch.full((2000, 64), -1.0)}
    _, grads = gradients(lambda x: activation(x, "elu", 0.5, config=INT8, seed=5), tensors)
    code = grads["x"][grads["x"] != 0] * 255 / 2
    fraction = math.exp(-1) * 255 % 1
    up, n = (code > math.exp(-1) * 255).double().mean(), code.numel()
    assert_plausible([(up - fraction) / (fraction * (1 - fraction) / n) ** 0.5], "share of codes that are rounded up")


# --- what is kept


@EVERY
@CONFIGS
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_what_is_kept(kind: str | None, config: QConfig | None, p: float) -> None:
    """Neither the rows nor the result."""
    tensors = {name: t.bfloat16().requires_grad_() for name, t in operands().items()}
    kept = saved_tensors(lambda: activation(kind=kind, dropout=p, config=config, **tensors))
    of_elu = N * WIDTH * (2 if config is None else 1)
    expected = {None: 0, "relu": N * mask_width(WIDTH), "leaky_relu": N * mask_width(WIDTH), "elu": of_elu}[kind]
    assert sum(t.nbytes for t in kept) == expected + (8 if p else 0)


def test_a_config_may_keep_the_derivative_itself() -> None:
    x = torch.randn(N, WIDTH, requires_grad=True)
    kept = saved_tensors(lambda: activation(x, "elu", config=QConfig(save="fp32")))
    assert [(t.shape, t.dtype) for t in kept] == [(x.shape, torch.float32)]


@EVERY
def test_without_gradients_nothing_is_made_to_keep(kind: str | None) -> None:
    with trace() as t:
        activation(torch.randn(N, WIDTH), kind, config=INT8)
    assert t.ops["activation.forward"]["bytes"] == 2 * 4 * N * WIDTH


@pytest.mark.parametrize("kind", ["relu", "leaky_relu", "elu"])
def test_without_keep_there_is_no_backward_pass(kind: str) -> None:
    arguments = (torch.randn(N, WIDTH, requires_grad=True), *(None,) * 4, kind, 1.0, 0, False, False)
    with torch.no_grad():
        assert [t.numel() for t in ops.activation(*arguments)] == [N * WIDTH, 0, 0]
    with pytest.raises(ValueError, match="expects 'keep' where it has a backward pass"):
        ops.activation(*arguments)


# --- autograd


@EVERY
def test_rows_may_be_their_own_residual(kind: str | None) -> None:
    x, upstream = torch.randn(N, WIDTH), torch.randn(N, WIDTH)
    _, grads = gradients(lambda x: activation(x, kind, residual=x), {"x": x}, upstream)
    _, alone = gradients(lambda x: activation(x, kind, residual=x.detach()), {"x": x}, upstream)
    assert torch.equal(grads["x"], 2 * alone["x"])


@EVERY
@pytest.mark.parametrize("shape", [(N, WIDTH), (2, 3, WIDTH), (WIDTH,)])
def test_gradients_of_rows_and_residual_are_no_views_of_each_other(kind: str | None, shape: tuple[int, ...]) -> None:
    """They are one tensor in the backward pass. A second one adds to those there are."""
    x, residual = (torch.randn(shape, requires_grad=True) for _ in range(2))
    upstream = torch.randn(shape)
    (activation(x, kind, residual=residual) * upstream).sum().backward()
    first = x.grad.clone()
    x.grad.zero_()
    assert torch.equal(residual.grad, first)
    (activation(x, kind, residual=residual) * upstream).sum().backward()
    assert torch.equal(x.grad, first)
    assert torch.equal(residual.grad, 2 * first)


@EVERY
@pytest.mark.parametrize("name", ["x", "bias", "residual"])
def test_each_operand_may_learn_alone(kind: str | None, name: str) -> None:
    tensors, upstream = operands(), torch.randn(N, WIDTH)
    run = lambda **t: activation(kind=kind, **OPTIONS, **(tensors | t))  # noqa: E731
    _, all_of_them = gradients(run, tensors, upstream)
    _, alone = gradients(run, {name: tensors[name]}, upstream)
    assert torch.equal(alone[name], all_of_them[name])


@EVERY
def test_strided_operands_and_expanded_gradient(kind: str | None) -> None:
    tensors = operands()
    strided = {
        "x": tensors["x"].repeat_interleave(2, 0)[::2],
        "bias": tensors["bias"].repeat_interleave(2)[::2],
        "residual": tensors["residual"].t().contiguous().t(),
    }
    results = []
    for layout in (tensors, strided):
        leaves = [t.detach().requires_grad_() for t in layout.values()]
        out = activation(leaves[0], kind, 0.4, bias=leaves[1], residual=leaves[2], seed=3)
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@EVERY
@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (2, 3, 5), (5,), (2, 0, 5)])
def test_rows_of_any_dimensions(kind: str | None, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    out, grads = gradients(lambda **t: activation(kind=kind, **OPTIONS, **t), {"x": x, "bias": torch.randn(shape[-1])})
    assert out.shape == grads["x"].shape == shape
    assert grads["bias"].shape == shape[-1:]
    assert torch.equal(activation(x, kind, residual=x).flatten(), activation(x.view(-1), kind, residual=x.view(-1)))


@EVERY
def test_inputs_are_left_alone(kind: str | None) -> None:
    tensors = {name: t.requires_grad_() for name, t in operands().items()}
    assert_inputs_unchanged(lambda **t: activation(kind=kind, dropout=0.4, **t), tensors)


@EVERY
def test_second_order_gradient_is_right_or_refused(kind: str | None) -> None:
    """ELU has one; through the others, the second derivative is that of what is behind them."""
    x, message = torch.randn(N, WIDTH, requires_grad=True), "'qgnn::activation' has no second derivatives"

    def gradient(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, x, create_graph=True)[0]

    with pytest.raises(RuntimeError, match=message):
        gradient(gradient(activation(x, kind, 0.1).square().sum()).sum())
    linear = activation(x, kind).sum()
    if kind == "elu":
        with pytest.raises(RuntimeError, match=message):
            gradient(linear)
    else:
        assert not gradient(linear).requires_grad


def test_autocast_changes_nothing() -> None:
    run, tensors = lambda **t: activation(kind="elu", **t), operands()
    out, grads = gradients(run, tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed, mixed_grads = gradients(run, tensors)
    assert torch.equal(out, mixed)
    assert all(torch.equal(grads[name], mixed_grads[name]) for name in grads)


def test_a_trace_shows_forward_and_backward() -> None:
    tensors = {name: t.requires_grad_() for name, t in operands().items()}
    with trace() as t:
        activation(kind="elu", config=INT8, **tensors).sum().backward()
        functional.linear(tensors["x"], torch.randn(4, WIDTH), activation="relu").sum().backward()
    calls = {name: entry["calls"] for name, entry in t.ops.items()}
    products = {"matmul.forward": 1, "matmul.backward_dx": 1}
    assert calls == {"activation.forward": 2, "activation.backward": 2} | products
    assert {entry["format"] for entry in t.ops.values()} == {"float32"}
    rows, bits = 4 * N * WIDTH, N * mask_width(4)
    one = 3 * rows + 4 * WIDTH + rows // 4 + 8  # operands, result, codes, the seed of their rounding
    assert t.ops["activation.forward"]["bytes"] == one + 2 * 4 * N * 4 + bits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep_codes", [False, True])
def test_opcheck(kind: str, keep_codes: bool) -> None:
    tensors = [t.requires_grad_() for t in operands().values()]
    seeds = (rng.make_seed(1), rng.make_seed(2))
    opcheck(ops.activation, (*tensors, *seeds, kind, 1.5, 9, True, keep_codes), compiled=True)
    opcheck(ops.activation, (tensors[0], *(None,) * 4, kind, 1.5, 0, True, keep_codes), compiled=True)
    opcheck(ops.activation, (tensors[0][:0].detach().requires_grad_(), *(None,) * 4, kind, 1.5, 0, True, keep_codes))
    constant = [t.detach() for t in tensors]
    _, mask, derivative = ops.activation(*constant, *seeds, kind, 1.5, 9, True, keep_codes)
    kept = (mask if mask.numel() else None, derivative if derivative.numel() else None)
    opcheck(activation_backward, (constant[2], *kept, seeds[1], kind, 1.5, 9, True))


@EVERY
@CONFIGS
def test_the_kernels_agree(kind: str | None, config: QConfig | None, device: str) -> None:
    """Bit for bit, but for the sums of columns."""
    name, tensors = kind or "none", operands()

    def results(backend: Backend, place: str) -> list[Tensor]:
        x, bias, residual = (t.to(place) for t in tensors.values())
        seed, drop = rng.make_seed(1, place), rng.make_seed(2, place)
        options = (name, 1.5, dropout_threshold(0.4))
        y, mask, derivative = _activation_forward(
            backend, x, bias, residual, seed, drop, *options, True, config is not None
        )
        kept = (mask if mask.numel() else None, derivative if derivative.numel() else None)
        return [
            t.cpu()
            for t in (y, mask, derivative, *_activation_backward(backend, residual, *kept, drop, *options, True))
        ]

    (*expected, db), (*actual, db_kernel) = results(torch_backend(), "cpu"), results(triton_backend(), device)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    torch.testing.assert_close(db_kernel, db, rtol=0, atol=float(N * EPS * expected[3].abs().sum(0).max()))


def test_float64_runs_in_pytorch_on_a_gpu_as_well() -> None:
    """The kernels compute in fp32."""
    x = torch.randn(4, 5, dtype=torch.float64)
    y = triton_backend().call("activation", "activation.forward", x, kind="elu", slope=1.0)
    assert torch.equal(y, F.elu(x))


def test_a_compiled_function_is_the_same_one() -> None:
    def run(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return activation(x, "elu", 0.5, bias=bias, residual=residual, alpha=1.5, config=INT8, seed=3)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_rows in (N, N + 5):
        tensors = operands(num_rows=num_rows)
        (out, grads), (same, same_grads) = (gradients(call, tensors) for call in (run, compiled))
        assert torch.equal(out, same)
        assert all(torch.equal(grads[name], same_grads[name]) for name in grads)
