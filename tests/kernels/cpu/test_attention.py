"""Attention in C, all kinds, against the reference in float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from qgnn.kernels.cpu import attention as kernels
from qgnn.kernels.cpu import attention_dot, attention_gatv2, attention_shared
from torch import Tensor

from cpu_attention_cases import (
    ALL_GRAPHS,
    DROPOUT,
    GRAD,
    KINDS,
    Graph,
    Operands,
    assert_attention,
    backward,
    forward,
    graph_of,
    named_graph,
    operands,
)
from kernel_cases import FLOATS, surrounded
from qgnn import reference

MODULES = {"attention": kernels, "attention_gatv2": attention_gatv2, "attention_dot": attention_dot}
WIDTHS = [(1, 1), (3, 7), (1, 40), (2, 33), (8, 8), (4, 64), (2, 130)]  # H, D: blocks of all widths, and what is left

NARROW = [(H, D) for D in (4, 8, 16) for H in (1, 3, 8, 17)]  # heads of which several are taken at a time

kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("name", ALL_GRAPHS)
def test_every_graph(kind: str, name: str) -> None:
    for dtype in (torch.int32, torch.int64):
        g = named_graph(name, dtype)
        assert_attention(kind, g, operands(kind, g, 4, 16, codes=dtype == torch.int32, edges=True), **GRAD)


@kinds
@pytest.mark.parametrize(("heads", "width"), WIDTHS)
@pytest.mark.parametrize("codes", [True, False], ids=["codes", "floats"])
def test_every_width(kind: str, heads: int, width: int, codes: bool) -> None:
    """Float rows come to 1e-6 of the largest element, some 16 roundings, as errors of either sign add up."""
    g = named_graph("power_law")
    for options in ({}, {"edges": True}, {"dropout": True}):
        for rounding in ({}, GRAD):
            pairs = assert_attention(kind, g, operands(kind, g, heads, width, codes=codes, **options), **rounding)
            for actual, exact in pairs if width > 1 else ():  # of a single column, little may be left of large terms
                assert (actual - exact).abs().max() <= 1.5e-6 * exact.abs().max()


@kinds
@pytest.mark.parametrize("codes", [True, False], ids=["codes", "floats"])
def test_narrow_heads_of_all_numbers(kind: str, codes: bool) -> None:
    g = named_graph("random")
    for heads, width in NARROW:
        for options in ({}, {"edges": True, "dropout": True}):
            for rounding in ({}, GRAD):
                assert_attention(kind, g, operands(kind, g, heads, width, codes=codes, **options), **rounding)


@kinds
@pytest.mark.parametrize("codes", [True, False], ids=["codes", "floats"])
@pytest.mark.parametrize("width", [20, 8])
def test_rows_of_several_chunks(kind: str, codes: bool, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The softmax goes on from chunk to chunk, whether or not the next one has a larger score."""
    monkeypatch.setattr(attention_shared, "CHUNK", 8)
    for name in ("hub", "broadcast", "one_pair", "power_law"):
        g = named_graph(name)
        for options in ({}, {"edges": True, "dropout": True}):
            o = operands(kind, g, 3, width, codes=codes, **options)
            assert_attention(kind, g, o, **GRAD)
            assert_attention(kind, g, o)


@kinds
def test_dropout_decides_by_the_bits_of_the_matrix_of_edges_and_heads(kind: str) -> None:
    g = named_graph("power_law")
    for heads in (1, 3, 4, 6):
        o = operands(kind, g, heads, 8, dropout=True)
        assert_attention(kind, g, o, **GRAD)
        other = o.but(dropout=DROPOUT._replace(stream=5))
        assert not torch.equal(forward(kind, g, o)[0], forward(kind, g, other)[0])
    assert_attention(kind, g, o.but(dropout=DROPOUT._replace(threshold=1 << 16)), **GRAD)  # none is kept


@kinds
@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("seed", [None, torch.tensor([5])], ids=["nearest", "stochastic"])
@pytest.mark.parametrize(("heads", "width"), [(3, 17), *NARROW[1::3]])
def test_codes_of_the_gradient_are_those_of_quantize(
    kind: str, bits: int, seed: Tensor | None, heads: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    g, found = named_graph("power_law"), {}
    launch = MODULES[kind].launch

    def watched(name: str, *args: Any) -> None:
        launch(name, *args)
        found.update({(t.dtype, t.dim()): t for t in args if isinstance(t, Tensor) and name.endswith("_targets")})

    monkeypatch.setattr(MODULES[kind], "launch", watched)
    o = operands(kind, g, heads, width)
    grad = torch.randn(g.targets, heads * width) * torch.logspace(-3, 3, g.targets)[:, None]
    grad[:3, ::width] = torch.tensor([math.nan, math.inf, -0.0])[:, None]  # a row of zeros comes next
    grad[3] = 0
    backward(kind, g, o, forward(kind, g, o)[1], grad, grad_bits=bits, seed=seed, stream=3)
    codes, scale = reference.quantize(grad.view(-1, width), bits=bits, seed=seed, stream=3)
    assert torch.equal(found[torch.int8, 2].view(-1, width), codes)
    assert torch.equal(found[torch.float32, 3][:, 3].flatten().nan_to_num(-1), scale.nan_to_num(-1))  # of the records


def test_rows_whose_scores_have_one_sign_have_no_gradient_of_the_targets_score() -> None:
    g = named_graph("power_law")
    for sign, width in ((1, 32), (-1, 32), (1, 8), (-1, 8)):
        o = operands("attention", g, 4, width, codes=True, dropout=True)
        o = o._replace(args=(sign * o.args[0].abs(), sign * o.args[1].abs(), o.args[2]))
        lse = forward("attention", g, o)[1]
        for rounding in ({}, GRAD):
            d_target = backward("attention", g, o, lse, torch.randn(g.targets, 4 * width), **rounding)[0]
            assert not d_target.any()


@kinds
@pytest.mark.parametrize("special", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["target", "source", "value", "grad"])
@pytest.mark.parametrize("width", [10, 8])
def test_special_values_reach_the_rows_whose_edges_see_them(kind: str, special: float, where: str, width: int) -> None:
    g = named_graph("random")
    o = operands(kind, g, 3, width)
    grad = torch.randn(g.targets, 3 * width)
    clean = forward(kind, g, o)
    clean += backward(kind, g, o, clean[1], grad, needs_dedge=True, **GRAD)
    if where == "grad":
        grad[7, 12] = special
    else:
        of_values = 1 if kind == "attention_gatv2" else 2
        at = {"target": 0, "source": 1, "value": of_values}[where]
        o.args[at][7, o.args[at].shape[1] // 3] = special  # of head 1
        o = o._replace(exact_args=tuple(t.double() for t in o.args))
    out, lse = forward(kind, g, o)
    exact_out, exact_lse = forward(kind, g, o, reference)
    made = (out, lse, *backward(kind, g, o, lse, grad, needs_dedge=True, **GRAD))
    exact = backward(kind, g, o, exact_lse, grad.double(), reference, needs_dedge=True, **GRAD)
    touched = False
    for actual, before, expected in zip(made, clean, (exact_out, exact_lse, *exact), strict=True):
        assert torch.equal(actual.isfinite(), expected.isfinite())
        touched |= not bool(actual.isfinite().all())
        if actual.dim() == 2 and kind != "attention_gatv2":
            rows = expected.isfinite().all(1)
            unreached = rows & (actual == before).all(1)
            assert unreached.sum() >= rows.sum() // 4
    assert touched


@pytest.mark.parametrize("width", [5, 8])
def test_scores_of_minus_infinity_behave_as_in_torch(width: int) -> None:
    g = named_graph("random")
    o = operands("attention", g, 2, width, edges=True)
    o.options["edge_score"][::3] = -math.inf
    o.options["edge_score"][: int(g.indptr[2]), 0] = -math.inf  # whole rows
    o = o._replace(exact_options=o.exact_options | {"edge_score": o.options["edge_score"].double()})
    (out, lse), (exact_out, exact_lse) = forward("attention", g, o), forward("attention", g, o, reference)
    assert out.isnan().any()
    assert out.isfinite().any()
    torch.testing.assert_close(out.double(), exact_out, rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-5, equal_nan=True)


@kinds
@pytest.mark.parametrize("dtype", FLOATS)
def test_half_types_are_computed_in_fp32(kind: str, dtype: torch.dtype) -> None:
    g = named_graph("power_law")
    o = operands(kind, g, 3, 10, edges=True)
    halves = o._replace(args=tuple(t.to(dtype) for t in o.args))
    floats = o._replace(args=tuple(t.float() for t in halves.args))
    grad = torch.randn(g.targets, 30).to(dtype)
    (out, lse), (wide_out, wide_lse) = forward(kind, g, halves), forward(kind, g, floats)
    assert torch.equal(out, wide_out.to(dtype))
    assert torch.equal(lse, wide_lse)
    made = backward(kind, g, halves, lse, grad, needs_dedge=True, **GRAD)
    wide = backward(kind, g, floats, lse, grad.float(), needs_dedge=True, **GRAD)
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(made, wide, strict=True))
    assert [t.dtype for t in made] == [dtype, dtype, dtype, torch.float32]


@kinds
@pytest.mark.parametrize("codes", [True, False], ids=["codes", "floats"])
@pytest.mark.parametrize(
    "layout",
    [lambda x: surrounded(x, 99), lambda x: x.t().contiguous().t(), lambda x: x.repeat_interleave(2, dim=0)[::2]],
)
def test_any_strides(kind: str, codes: bool, layout: Callable[[Tensor], Tensor]) -> None:
    g = named_graph("power_law")
    o = operands(kind, g, 3, 10, codes=codes, edges=True)
    tensors = {name: layout(value) for name, value in o.options.items() if isinstance(value, Tensor)}
    strided = o._replace(args=tuple(layout(t) for t in o.args), options=o.options | tensors)
    h = Graph(*(t.repeat_interleave(2)[::2] for t in g[:5]), g.sources)
    grad = torch.randn(g.targets, 30)
    expected, actual = forward(kind, g, o), forward(kind, h, strided)
    expected += backward(kind, g, o, expected[1], grad, needs_dedge=True, **GRAD)
    actual += backward(kind, h, strided, layout(actual[1]), layout(grad), needs_dedge=True, **GRAD)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def results(kind: str, g: Graph, o: Operands, grad: Tensor) -> tuple[Tensor, ...]:
    made = forward(kind, g, o)
    for rounding in ({}, GRAD):
        made += backward(kind, g, o, made[1], grad, needs_dedge=True, **rounding)
    return made


@kinds
@pytest.mark.parametrize("codes", [True, False], ids=["codes", "floats"])
def test_threads_share_a_large_graph_and_change_nothing(kind: str, codes: bool) -> None:
    N, E = 900, 10_000
    target = torch.cat([torch.randint(N, (E // 2,)), torch.full((E // 2,), 17)])
    g = graph_of(torch.stack([torch.randint(N, (E,)), target]), N, N)
    o = operands(kind, g, 4, 16, codes=codes, edges=True, dropout=True)
    grad, made = torch.randn(N, 64), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        made.append(results(kind, g, o, grad))
    for other in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], other, strict=True))


@kinds
def test_rounding_follows_the_seed(kind: str) -> None:
    g = named_graph("power_law")
    o = operands(kind, g, 4, 16, codes=True)
    lse, grad = forward(kind, g, o)[1], torch.randn(g.targets, 64)
    first, again, other = (
        backward(kind, g, o, lse, grad, grad_bits=8, seed=torch.tensor([seed]))[2] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@kinds
def test_inputs_are_left_alone(kind: str) -> None:
    g = named_graph("power_law")
    o = operands(kind, g, 4, 16, codes=True, edges=True)
    grad = torch.randn(g.targets, 64)
    inputs = [*g[:5], *o.args, *(t for t in o.options.values() if isinstance(t, Tensor)), grad]
    before = [t.clone() for t in inputs]
    results(kind, g, o, grad)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
