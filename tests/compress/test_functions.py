"""Every function that is coded or replaced, against float64 autograd: codes of 8 bits put an error on its gradient that
is bounded by what a step can do, and without codes there is none.

A saved tensor is decoded within a step s, a 255th of its range. Gradients are linear in saved operands, so the error of
a product is at most its gradient with s in place of the other operand and |g| in place of g. Of functions of
single elements it is |g| s with the step of the derivative.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch_geometric  # noqa: F401, puts functions of its own into torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from qgnn.compress import compress_activations
from qgnn.compress.functions import DROPOUTS, REPLACEMENTS
from qgnn.compress.policy import RULES, functions

N, K, M = 24, 16, 8


def block(**options: object) -> compress_activations:
    return compress_activations(**{"bits": 8, "min_size": 1, "metadata_dtype": torch.float32, "seed": 1, **options})


def step(t: Tensor) -> float:
    return float((t.max() - t.min()).detach()) * 1.001 / 255  # the thousandth covers fp32


class Case(NamedTuple):
    """Calls of functions of one name.

    Args:
        names: The names, all called in the same way.
        call: Calls one of them.
        shapes: Of the tensors that need gradients.
        kind: How the bound of its gradient's error is derived.
        skip: Where the function is looked for and called in another way.
    """

    names: str
    call: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...] = ((N, K),)
    kind: str = "unary"
    skip: tuple[Any, ...] = ()


C = torch.randn(N, K, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
INDEX = torch.randint(N, (N, K), generator=torch.Generator().manual_seed(2))
LABELS = torch.randint(K, (N,), generator=torch.Generator().manual_seed(3))
PAIR = ((N, K), (K, M))
SAME = ((N, K), (N, K))

CASES = [
    Case("linear", lambda f, x, w: f(x, w.t()), PAIR, "product"),
    Case("mm matmul __matmul__", lambda f, x, w: f(x, w), PAIR, "product", (torch.sparse.mm,)),
    Case("__rmatmul__", lambda f, x, w: f(w, x), PAIR, "product"),
    Case("addmm", lambda f, x, w: f(torch.ones(N, M, dtype=w.dtype), x, w), PAIR, "product", (torch.sparse.addmm,)),
    Case("addmm_", lambda f, x, w: f(torch.ones(N, M, dtype=w.dtype), x, w), PAIR, "product"),
    Case("bmm", lambda f, x, w: f(x, w), ((2, N, K), (2, K, M)), "product"),
    Case("baddbmm", lambda f, x, w: f(w.new_ones(2, N, M), x, w), ((2, N, K), (2, K, M)), "product"),
    Case("addbmm", lambda f, x, w: f(w.new_ones(N, M), x, w), ((2, N, K), (2, K, M)), "product"),
    Case("mv", lambda f, x, w: f(x, w), ((N, K), (K,)), "product"),
    Case("conv1d", lambda f, x, w: f(x, w), ((2, 3, K), (4, 3, 3)), "product"),
    Case("conv2d", lambda f, x, w: f(x, w), ((2, 3, 7, 7), (4, 3, 3, 3)), "product"),
    Case("einsum", lambda f, x, w: f("nk,km->mn", [x, w]), PAIR, "product"),
    Case("mul __mul__ __rmul__ multiply", lambda f, x, y: f(x, y), SAME, "product"),
    Case("mul_ __imul__", lambda f, x, y: f(x * 1, y), SAME, "product"),
    Case("div __truediv__ true_divide divide", lambda f, x, y: f(x, y.abs() + 1), SAME, "product"),
    Case("div_ __itruediv__", lambda f, x, y: f(x * 1, y.abs() + 1), SAME, "product"),
    Case("square exp", lambda f, x: f(x)),
    Case("exp_", lambda f, x: f(x * 1)),
    Case("pow __pow__", lambda f, x: f(x, 2)),
    Case("batch_norm", lambda f, x: f(x, None, None, training=True), kind="norm", skip=(torch.batch_norm,)),
    Case("layer_norm", lambda f, x: f(x, [K]), kind="norm"),
    Case("group_norm", lambda f, x: f(x, 2), kind="norm"),
    Case("instance_norm", lambda f, x: f(x), ((2, 3, N),), "norm", (torch.instance_norm,)),
    Case("index_select", lambda f, x: f(x, 0, INDEX[0] * 1), kind="exact"),
    Case("gather", lambda f, x: f(x, 0, INDEX * 1), kind="exact"),
    Case("scatter scatter_add", lambda f, x: f(torch.zeros_like(x), 0, INDEX * 1, x), kind="exact"),
    Case("scatter_ scatter_add_", lambda f, x: f(torch.zeros_like(x), 0, INDEX * 1, x), kind="exact"),
    Case("scatter_reduce", lambda f, x: f(torch.zeros_like(x), 0, INDEX * 1, x, "amax"), kind="exact"),
    Case("scatter_reduce_", lambda f, x: f(torch.zeros_like(x), 0, INDEX * 1, x, "mean"), kind="exact"),
    Case("index_add index_add_", lambda f, x: f(torch.zeros_like(x), 0, INDEX[:, 0] * 1, x), kind="exact"),
    Case("__getitem__", lambda f, x: f(x, (INDEX[:, 0] * 1 - N, slice(None))), kind="exact"),
    Case("embedding", lambda f, x: f(INDEX[:, 0] * 1, x * 1), kind="exact", skip=(torch.embedding,)),
    Case("relu leaky_relu hardtanh relu6", lambda f, x: f(x), kind="exact"),
    Case("relu_ leaky_relu_ hardtanh_", lambda f, x: f(x * 1), kind="exact"),
    Case("dropout", lambda f, x: f(x.float(), 0.3, True), kind="exact"),
    Case("dropout_", lambda f, x: f(x.float() * 1, 0.3, True), kind="exact"),
    Case("elu celu selu gelu silu mish sigmoid tanh softplus", lambda f, x: f(x)),
    Case("logsigmoid hardswish hardsigmoid softsign sin cos erf", lambda f, x: f(x)),
    Case("softmax", lambda f, x: f(x, 1), kind="softmax", skip=(torch.sparse.softmax,)),
    Case("cross_entropy", lambda f, x: f(x, LABELS), kind="loss"),
    Case("nll_loss", lambda f, x: f(x, LABELS), kind="loss"),
    Case("binary_cross_entropy", lambda f, x: f(x.sigmoid(), C.sigmoid()), kind="loss of sigmoid"),
    Case(
        "binary_cross_entropy_with_logits kl_div",
        lambda f, x: f(x, C.sigmoid(), reduction="sum"),
        kind="loss",
        skip=(torch.kl_div, torch.binary_cross_entropy_with_logits),
    ),
    Case("mse_loss l1_loss smooth_l1_loss huber_loss", lambda f, x: f(x, C), kind="loss"),
    Case("soft_margin_loss", lambda f, x: f(x, C.sign()), kind="loss"),
]
NAMES = [(name, case) for case in CASES for name in case.names.split()]

# The same functions with other arguments, which only torch's own modules call so; those of sparse matrices.
OTHERS = {
    *(torch.batch_norm, torch.instance_norm, torch.embedding, torch.kl_div, torch.binary_cross_entropy_with_logits),
    *(torch.sparse.mm, torch.sparse.addmm, torch.sparse.softmax),
}


def test_every_function_of_the_tables_has_a_case() -> None:
    called = {f for name, case in NAMES for f in functions(name) if f not in case.skip}
    assert (set(RULES) | set(REPLACEMENTS) | DROPOUTS) - called == OTHERS


def inputs(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in case.shapes]


def gradients(case: Case, function: Any, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor], Tensor]:
    """Result, gradients and the gradient that came in, of operands that are no leaves."""
    torch.manual_seed(5)
    y = case.call(function, *(t * 1 for t in tensors))
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=y.dtype)
    return y.detach(), list(torch.autograd.grad(y, tensors, g)), g


def bounds(case: Case, function: Any, tensors: list[Tensor], exact: list[Tensor], y: Tensor, g: Tensor) -> list[Any]:
    """The largest error that steps of 8 bits put on each gradient."""
    if case.kind == "exact":
        return [0.0]
    x = tensors[0].detach()
    if case.kind == "product":
        found = []
        for i in range(len(tensors)):  # the gradient of operand i reads the others
            ones = [t.detach() if j == i else torch.full_like(t, step(t)) for j, t in enumerate(tensors)]
            if "div" in function.__name__ and i == 0:
                found.append(1e-12)  # the denominator is kept
                continue
            if "div" in function.__name__:
                ones[1] = tensors[1].detach()
                ones[0] = torch.full_like(x, step(x))
            ones[i].requires_grad_()
            result = case.call(function, *(t * 1 for t in ones))
            found.append(torch.autograd.grad(result, ones[i], g.abs())[0].abs() * 1.001 + 1e-6)
        return found
    if case.kind == "norm":  # dx = (g - mean(g) - n mean(g n)) / sigma, with n = (x - mean) / sigma off by s
        sigma = float((exact[0].new_tensor(1.0) * x).std(dim=None)) * 0.4  # no row or column deviates less
        s, largest, mean = step(x) / sigma, float(y.abs().max()), float(g.abs().max())
        return [(2 * s * largest * mean + s * s * mean) / sigma]
    if case.kind == "softmax":  # y (g - sum(g y)), each y off by s on its own
        s = step(y)
        total = (g * y).sum(1, keepdim=True).abs()
        return [s * (g.abs() + total + g.abs().sum(1, keepdim=True) * (1 + s))]
    if case.kind == "loss":
        return [g.abs() * step(exact[0] / g) + 1e-12]
    leaf = x.requires_grad_()
    if case.kind == "loss of sigmoid":  # two functions, one after the other
        p = leaf.sigmoid()
        outer = torch.autograd.grad(F.binary_cross_entropy(q := p.detach().requires_grad_(), C.sigmoid()), q)[0]
        inner = torch.autograd.grad(p.sum(), leaf)[0]
        a, b = step(outer), step(inner)
        return [g.abs() * ((outer.abs() + a) * b + inner.abs() * a)]
    (derivative,) = torch.autograd.grad(case.call(function, leaf * 1).sum(), leaf)
    return [g.abs() * step(derivative) + 1e-12]


@pytest.mark.parametrize(("name", "case"), NAMES, ids=[name for name, _ in NAMES])
def test_gradient_is_within_what_steps_can_do(name: str, case: Case) -> None:
    for function in {f for f in functions(name) if f not in case.skip}:
        tensors = inputs(case)
        y, exact, g = gradients(case, function, tensors)
        with block() as report:
            coded_y, coded, _ = gradients(case, function, tensors)
        assert torch.equal(coded_y, y)
        entries = [t for t in report.by_tensor if t.format not in ("as it is", "shared")]
        with block(exclude="*") as kept:
            kept_y, plain, _ = gradients(case, function, tensors)
        assert torch.equal(kept_y, y)
        assert all(map(torch.equal, plain, exact))
        assert {t.format for t in kept.by_tensor} <= {"as it is", "shared"}
        for error, bound in zip(
            (a - b for a, b in zip(coded, exact, strict=True)),
            bounds(case, function, tensors, exact, y, g),
            strict=True,
        ):
            assert (error.abs() <= bound).all(), f"{function}: {float((error.abs() - bound).max())} too much"
        assert entries, f"nothing of {function} was coded"
        if case.kind not in ("exact",):
            assert any(float((a - b).abs().max()) > 0 for a, b in zip(coded, exact, strict=True))


def test_a_scaled_loss_under_autocast_to_fp16_is_that_of_fp32() -> None:
    """Its derivative, of 1 / N, is below what fp16 holds, and a scaler's factor above."""
    torch.manual_seed(0)
    x, y, w = torch.randn(60_000, 8), torch.randint(16, (60_000,)), torch.randn(8, 16, requires_grad=True)
    (exact,) = torch.autograd.grad(F.cross_entropy(x @ w, y), w)
    scale, errors = 65536.0, []
    for compressor in (nullcontext(), block(bits=8)):
        with torch.autocast("cpu", torch.float16), compressor as report:
            loss = F.cross_entropy(x @ w, y)
            (found,) = torch.autograd.grad(loss * scale, w)
        errors.append(float((found / scale - exact).norm() / exact.norm()))
    product, coded = report.by_tensor
    assert (product.op, coded.op, coded.format[:4]) == ("matmul", "cross_entropy", "int8")
    assert coded.original_bytes == 60_000 * 16 * 4 + 4  # logarithms in fp32, and their number
    assert errors[1] < 2 * errors[0] < 0.05


def test_a_loss_in_fp16_is_kept() -> None:
    x, y = torch.randn(N, K, dtype=torch.float16, requires_grad=True), torch.randint(K, (N,))
    (exact,) = torch.autograd.grad(F.cross_entropy(x * 1, y) * 1024, x)
    with block() as report:
        (found,) = torch.autograd.grad(F.cross_entropy(x * 1, y) * 1024, x)
    assert torch.equal(found, exact)
    assert {t.format for t in report.by_tensor} == {"as it is", "shared"}


def test_a_flag_that_is_a_number_and_an_argument_by_name() -> None:
    x = torch.randn(N, K, requires_grad=True)
    with block() as report:
        written = x * 1
        assert F.elu(written, 1.0, 1) is written  # type: ignore[arg-type]
        F.elu(x * 1, 1)
        F.gelu(input=x * 1)
        F.cross_entropy(input=x * 1, target=LABELS)
    kept, *coded = [(t.op, t.format[:4]) for t in report.by_tensor]
    assert kept == ("elu", "as i")
    assert coded == [(name, "int8") for name in ("elu", "gelu", "cross_entropy")]


def test_the_bit_of_nan_lets_a_gradient_through_as_torch_does() -> None:
    x = torch.tensor([[float("nan"), -1.0, 0.0, 2.0]] * N, requires_grad=True)
    for function in (F.relu, torch.relu_, F.leaky_relu, F.leaky_relu_):
        with block():
            (found,) = torch.autograd.grad(function(x * 1).sum(), x)
        (exact,) = torch.autograd.grad(function(x * 1).sum(), x)
        assert torch.equal(found, exact)


def test_functions_are_known_behind_those_that_pyg_puts_in_their_place() -> None:
    assert torch.index_select is not torch._C._VariableFunctions.index_select  # PyG's, by now
    x, index = torch.randn(N, K, requires_grad=True), torch.arange(N)
    with block() as report:
        torch.index_select(x, 0, index + 0)
    assert [t.format for t in report.by_tensor] == ["int16"]
    assert torch._C._VariableFunctions.index_select in functions("index_select")


@pytest.mark.parametrize(
    "norm", [lambda x: F.layer_norm(x, [K]), lambda x: F.group_norm(x.flatten(0, 1), 4)], ids=["layer", "group"]
)
def test_means_and_deviations_of_norms_are_kept(norm: Callable[[Tensor], Tensor]) -> None:
    """Theirs is no rounding error of one value, but one of a whole row; there are more than two of them here."""
    with block(bits=2) as report:
        norm(torch.randn(8, N, K, requires_grad=True) * 1)
    values, *statistics = report.by_tensor
    assert (values.shape[-1], values.format[:4]) == (K, "int2")
    assert [t.format for t in statistics] == ["as it is"] * 2


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(F, name) for name in ("relu", "leaky_relu", "elu", "gelu", "silu", "mish", "softplus", "tanh")},
    "sigmoid": torch.sigmoid,
    "square": torch.square,
    "sin": torch.sin,
    "half": lambda x: x / 2,
    "shift": lambda x: x - 0.25,
    "transpose": lambda x: x.t(),
    "hardtanh": lambda x: F.hardtanh(x, -0.75, 1.5),
}
EXACT = {"relu", "leaky_relu", "half", "shift", "transpose", "hardtanh"}


@settings(max_examples=60)
@given(st.lists(st.sampled_from(sorted(ELEMENTWISE)), min_size=1, max_size=6), st.integers(0, 1000))
def test_chain_keeps_its_result_and_an_error_within_its_steps(names: list[str], seed: int) -> None:
    x = torch.randn(N, K, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()

    def chain(h: Tensor) -> Tensor:
        for name in names:
            h = ELEMENTWISE[name](h)
        return h

    exact, largest = torch.ones(()), torch.ones(())  # products of derivatives, and of what they are at most
    h = x.detach()
    for name in names:
        leaf = h.requires_grad_()
        h = ELEMENTWISE[name](leaf)
        (derivative,) = torch.autograd.grad(h.sum(), leaf)
        if name == "transpose":
            exact, largest, h = exact.t(), largest.t(), h.detach()
            continue
        h = h.detach()
        exact = exact * derivative
        largest = largest * (derivative.abs() + (0.0 if name in EXACT else step(derivative)))
    with block(seed=seed):
        y = chain(x * 1)
        assert torch.equal(y.detach(), h)
        y.sum().backward()
    gradient = x.grad if exact.dim() < 2 or exact.shape == x.shape else x.grad.t()
    assert ((gradient - exact).abs() <= largest - exact.abs() + 1e-12).all()
