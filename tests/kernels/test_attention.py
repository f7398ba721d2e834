from typing import Any

import pytest
import torch
from qgnn.kernels import tuning
from qgnn.kernels.attention import attention, attention_backward
from torch import Tensor
from torch.nn.functional import leaky_relu

from attention_cases import (
    CAP,
    DEGENERATE,
    Graph,
    assert_equal,
    assert_sums,
    dequantized,
    dropout,
    exact_weights,
    make_graph,
    plans,
    poisoned,
    rounded,
    rounded_as,
    score_gradients,
    weighted_sums,
    weighted_sums_t,
)
from kernel_cases import (
    FLOATS,
    UNIT,
    assert_within,
    column_major,
    quiet,
    random_codes,
    random_scales,
    surrounded,
)
from qgnn import reference
from qgnn.rng import make_seed

SLOPE = 0.2


def _operands(graph: Graph, H: int, D: int, dtype: torch.dtype = torch.int8) -> tuple[list[Tensor], dict[str, Any]]:
    device = graph.indptr.device
    scores = [2 * torch.randn(n, H, device=device) for n in (graph.num_targets, graph.num_sources)]
    if dtype == torch.int8:
        scale = random_scales(graph.num_sources * H, str(device)).view(-1, H)
        return [*scores, random_codes(graph.num_sources, H * D, str(device))], {"x_scale": scale}
    return [*scores, torch.randn(graph.num_sources, H * D, device=device).to(dtype)], {}


def _check(
    graph: Graph,
    operands: list[Tensor],
    options: dict[str, Any],
    *,
    given: dict[str, Any] | None = None,
    cap: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> None:
    """Both passes against float64, within their bounds; with hubs, twice the same. ``given`` are options of the
    backward pass."""
    score_target, score_source, x = operands
    H, (plan, both_plans) = score_target.shape[1], plans(graph, cap)
    out, lse = attention(*graph.forward, *operands, **options, out_dtype=out_dtype, **plan)
    if cap:
        assert_equal((out, lse), attention(*graph.forward, *operands, **options, out_dtype=out_dtype, **plan))

    edge, index = options.get("edge_score"), graph.index.long()
    terms = [score_target[graph.row], score_source[index], *([] if edge is None else [edge])]
    score = sum(term.double() for term in terms)
    error = (len(terms) * UNIT) * sum(term.double().abs() for term in terms)  # additions, and one for the slope
    weights = exact_weights(graph, leaky_relu(score, SLOPE), error, options.get("dropout"))
    value = dequantized(x, options.get("x_scale"), H)[index]
    assert_sums(out, weighted_sums(graph, weights, value))
    assert_within(lse, weights.lse, weights.lse_error)

    given = {"grad_bits": 0, "needs_dedge": True} | (given or {})
    grad = torch.randn_like(out.float()).to(out.dtype)
    arguments, keywords = (*graph.backward, *operands, lse, grad), {**options, **given, **both_plans}
    results = attention_backward(*arguments, **keywords)
    if cap:
        assert_equal(results, attention_backward(*arguments, **keywords))
    d_target, d_source, dx, d_edge = results
    assert (d_target.dtype, d_source.dtype, dx.dtype) == (score_target.dtype, score_source.dtype, grad.dtype)

    as_gathered = rounded_as(grad, H, given)
    assert_sums(dx, weighted_sums_t(graph, weights, as_gathered))
    de = score_gradients(graph, weights, as_gathered, value)
    slope = torch.where(score > 0, 1.0, SLOPE)
    error = slope * (de.error + 2 * UNIT * de.size)
    if given["needs_dedge"]:
        assert_within(d_edge, slope * de.value, error)
    else:
        assert d_edge is None
    error = graph.to_sources(error) + UNIT * (graph.degrees_t() + 4) * graph.to_sources(slope * de.size)
    assert_within(d_source, graph.to_sources(slope * de.value), error)

    # Of the gradient as it is; a product of two sums over the row each.
    products = dequantized(grad, None, H)[graph.row] * value
    positive = (score > 0).double()
    signs = (positive, 1 - positive)
    t_pos, t_neg = (graph.to_targets(weights.w * sign * products.sum(2)) for sign in signs)
    size_pos, size_neg = (graph.to_targets(weights.w * sign * products.abs().sum(2)) for sign in signs)
    q_pos, q_neg = (graph.to_targets(weights.p * sign) for sign in signs)
    relative = graph.to_targets(weights.relative) + UNIT * (2 * graph.degrees() + value.shape[2] + 12)
    exact = (1 - SLOPE) * (q_neg * t_pos - q_pos * t_neg)
    assert_within(d_target, exact, 2 * relative * (1 - SLOPE) * (q_neg * size_pos + q_pos * size_neg))


@pytest.mark.parametrize("cap", [None, CAP])
def test_attention_of_codes_is_within_its_error_bounds(device: str, cap: int | None) -> None:
    graph = make_graph("mixed", device)
    operands, options = _operands(graph, 3, 7)
    edge_score = torch.randn(graph.index.numel(), 3, device=device)
    given = {"grad_bits": 8, "seed": make_seed(1, device), "stream": 2}
    _check(
        graph, operands, options | {"dropout": dropout(device), "edge_score": edge_score}, cap=cap,
        given=given,
    )  # fmt: skip


@pytest.mark.parametrize(("H", "D", "bits"), [(1, 33, 4), (5, 1, 8), (4, 8, 0)])
def test_attention_of_codes_at_other_widths(device: str, H: int, D: int, bits: int) -> None:
    graph = make_graph("mixed", device, torch.int64)
    _check(graph, *_operands(graph, H, D), given={"grad_bits": bits, "needs_dedge": False})


@pytest.mark.parametrize("dtype", FLOATS)
def test_attention_of_floats_is_within_its_error_bounds(device: str, dtype: torch.dtype) -> None:
    graph = make_graph("mixed", device)
    operands, options = _operands(graph, 2, 5, dtype)
    _check(graph, operands, options | {"dropout": dropout(device)}, out_dtype=dtype)


@pytest.mark.parametrize("name", DEGENERATE)
def test_attention_takes_every_graph(device: str, name: str) -> None:
    graph = make_graph(name, device)
    _check(graph, *_operands(graph, 2, 3), given={"grad_bits": 8})


def test_heads_that_one_program_cannot_hold_are_split(device: str) -> None:
    graph = make_graph("one_edge", device)
    assert tuning.attention(3, 513)["BLOCK_H"] == 1
    _check(graph, *_operands(graph, 3, 513), given={"grad_bits": 8, "seed": make_seed(1, device)})


def test_gradient_is_rounded_as_quantize_rounds_it(device: str) -> None:
    """Equal scores and an edge a row: weights of 1, and a gradient of the source that is the target's."""
    graph, (H, D) = make_graph("only_loops", device), (3, 7)
    zeros, seed = torch.zeros(9, H, device=device), make_seed(3, device)
    x, grad = random_codes(9, H * D, device), torch.randn(9, H * D, device=device)
    for options in ({"grad_bits": 8, "seed": seed, "stream": 1}, {"grad_bits": 3}):
        _, _, dx, _ = attention_backward(
            *graph.backward, zeros, zeros, x, zeros, grad, x_scale=torch.ones_like(zeros), **options
        )
        expected = rounded(grad, H, options["grad_bits"], options.get("seed"), options.get("stream", 0))
        assert torch.equal(dx, expected.flatten(1).float())


@pytest.mark.parametrize("sign", [1, -1])
def test_rows_of_scores_of_one_sign_have_no_gradient_of_the_targets_score(device: str, sign: int) -> None:
    graph = make_graph("mixed", device)
    (target, source, x), options = _operands(graph, 3, 7)
    scores = sign * target.abs(), sign * source.abs()
    out, lse = attention(*graph.forward, *scores, x, **options)
    results = attention_backward(
        *graph.backward, *scores, x, lse, torch.randn_like(out), grad_bits=8, dropout=dropout(device), **options
    )
    assert torch.equal(results[0], torch.zeros_like(target))
    assert results[1].abs().max() > 0


def test_dropout_is_of_a_seed_and_a_stream(device: str) -> None:
    graph = make_graph("mixed", device)
    operands, options = _operands(graph, 3, 7)
    outs = [
        attention(*graph.forward, *operands, **options, dropout=dropout(device, seed=seed, stream=stream))[0]
        for seed, stream in ((1, 1), (1, 1), (2, 1), (1, 2))
    ]
    assert [torch.equal(outs[0], out) for out in outs] == [True, True, False, False]


@quiet
def test_scores_of_minus_infinity_are_those_of_a_softmax(device: str) -> None:
    """An edge without weight; a row of nothing else has NaNs, but chunks of a hub may have nothing else."""
    graph = make_graph("mixed", device)
    (target, source, x), options = _operands(graph, 2, 3)
    edge_score = torch.randn(graph.index.numel(), 2, device=device)
    edge_score[graph.row == 3] = edge_score[graph.row == 3].index_fill(
        0, torch.arange(10, device=device), float("-inf")
    )
    edge_score[graph.row == 5] = float("-inf")
    for cap in (None, CAP):
        out, lse = attention(
            *graph.forward, target, source, x, edge_score=edge_score, **options, **plans(graph, cap)[0]
        )
        expected, expected_lse = reference.attention(
            *graph.forward, target, source, x, edge_score=edge_score, **options
        )
        size = float(expected.nan_to_num().abs().max())
        torch.testing.assert_close(out, expected, equal_nan=True, rtol=1e-5, atol=1e-5 * size)
        torch.testing.assert_close(lse, expected_lse, equal_nan=True, rtol=1e-5, atol=1e-5)
        assert out[3].isfinite().all()
        assert out[5].isnan().all()


@quiet
def test_poison_reaches_the_rows_of_its_edges_and_no_other(device: str) -> None:
    graph, names = make_graph("mixed", device), ("score_target", "score_source", "x", "x_scale", "grad")
    operands, options = _operands(graph, 2, 3)
    out, lse = attention(*graph.forward, *operands, **options)
    clean_grad = torch.randn_like(out)
    clean = attention_backward(*graph.backward, *operands, lse, clean_grad, grad_bits=8, **options)
    for where in ("score_source", "x_scale", "grad"):
        inputs = dict(zip(names, (*operands, options["x_scale"], clean_grad), strict=True))
        inputs[where], hit, hit_t = poisoned(graph, inputs[where], at_target=where == "grad")
        *rows, x_scale, grad = inputs.values()
        found, found_lse = attention(*graph.forward, *rows, x_scale=x_scale)
        assert torch.equal(found.isnan().any(1), hit & (where != "grad"))
        assert where == "grad" or torch.equal(found[~hit], out[~hit])
        results = attention_backward(*graph.backward, *rows, found_lse, grad, grad_bits=8, x_scale=x_scale)
        for result, expected, reached in zip(results[:2], clean[:2], (hit, hit_t), strict=True):
            assert torch.equal(result.isnan().any(1), reached)
            assert torch.equal(result[~reached], expected[~reached])
        assert torch.equal(results[2][~hit_t], clean[2][~hit_t])


def test_attention_takes_any_strides_and_uses_nothing_outside_a_view(device: str) -> None:
    graph = make_graph("mixed", device)
    (target, source, x), options = _operands(graph, 3, 7)
    edge_score = torch.randn(graph.index.numel(), 3, device=device)
    seed = make_seed(3, device)
    expected = attention(*graph.forward, target, source, x, edge_score=edge_score, **options)
    grad = torch.randn_like(expected[0])
    given = {"grad_bits": 8, "seed": seed, "needs_dedge": True}
    expected_grads = attention_backward(
        *graph.backward, target, source, x, expected[1], grad, edge_score=edge_score, **options, **given
    )
    strided = [v.repeat_interleave(2)[::2] for v in graph.backward]
    nan = float("nan")
    for rows, grads in ((surrounded(x, 99), surrounded(grad, nan)), (column_major(x), column_major(grad))):
        operands = (surrounded(target, nan), column_major(source), rows)
        views = {"x_scale": surrounded(options["x_scale"], nan), "edge_score": column_major(edge_score)}
        out = attention(*strided[:2], *operands, **views)
        assert_equal(out, expected)
        results = attention_backward(*strided, *operands, column_major(expected[1]), grads, **views, **given)
        assert_equal(results, expected_grads)


def test_attention_refuses_heads_that_no_program_holds(device: str) -> None:
    graph = make_graph("one_edge", device)
    scores, x = torch.zeros(2, 1, device=device), torch.zeros(2, 4097, device=device)
    with pytest.raises(ValueError, match=r"'attention' expects at most 4096 columns a head.*\(got 4097\); use more"):
        attention(*graph.forward, scores, scores, x)
    with pytest.raises(ValueError, match="'attention_backward' expects at most 4096 columns"):
        attention_backward(*graph.backward, scores, scores, x, scores, x)
