from typing import Any

import pytest
import torch
from qgnn.kernels.attention import attention_gatv2, attention_gatv2_backward
from torch import Tensor
from torch.nn.functional import leaky_relu

from attention_cases import (
    CAP,
    DEGENERATE,
    Graph,
    Sums,
    assert_equal,
    assert_sums,
    dequantized,
    dropout,
    exact_weights,
    make_graph,
    plans,
    poisoned,
    rounded_as,
    score_gradients,
    weighted_sums,
    weighted_sums_t,
)
from kernel_cases import UNIT, assert_within, column_major, quiet, random_codes, surrounded
from qgnn.rng import make_seed

SLOPE = 0.2


def _operands(graph: Graph, H: int, D: int, dtype: torch.dtype = torch.int8) -> tuple[list[Tensor], dict[str, Any]]:
    device = str(graph.indptr.device)
    sizes, att = (graph.num_targets, graph.num_sources), torch.randn(H, D, device=device)
    if dtype != torch.int8:
        return [*(torch.randn(n, H * D, device=device).to(dtype) for n in sizes), att], {}
    target_scale, source_scale = (0.02 * torch.rand(n, H, device=device) for n in sizes)
    codes = [random_codes(n, H * D, device) for n in sizes]
    return [*codes, att], {"target_scale": target_scale, "source_scale": source_scale}


def _check(
    graph: Graph,
    operands: list[Tensor],
    options: dict[str, Any],
    *,
    given: dict[str, Any] | None = None,
    cap: int | None = None,
) -> None:
    """Both passes against float64, within their bounds; with hubs, twice the same. ``given`` are options of the
    backward pass."""
    x_target, x_source, att = operands
    H, (plan, both_plans) = att.shape[0], plans(graph, cap)
    out, lse = attention_gatv2(*graph.forward, *operands, **options, **plan)
    if cap:
        assert_equal((out, lse), attention_gatv2(*graph.forward, *operands, **options, **plan))

    edge, index, vector = options.get("edge_x"), graph.index.long(), att.double()
    value = dequantized(x_source, options.get("source_scale"), H)[index]
    terms = [dequantized(x_target, options.get("target_scale"), H)[graph.row], value]
    terms += [] if edge is None else [dequantized(edge, None, H)]
    hidden, size = sum(terms), sum(term.abs() for term in terms)
    slope = torch.where(hidden > 0, 1.0, SLOPE)
    # A sum of D products, of two factors that are rounded up to three times.
    error = UNIT * (value.shape[2] + 3) * (vector.abs() * size).sum(2)
    weights = exact_weights(graph, (vector * leaky_relu(hidden, SLOPE)).sum(2), error, options.get("dropout"))
    assert_sums(out, weighted_sums(graph, weights, value))
    assert_within(lse, weights.lse, weights.lse_error)

    given = {"grad_bits": 0, "needs_dedge": True} | (given or {})
    grad = torch.randn_like(out.float()).to(out.dtype)
    arguments, keywords = (*graph.backward, *operands, lse, grad), {**options, **given, **both_plans}
    results = attention_gatv2_backward(*arguments, **keywords)
    if cap:
        assert_equal(results, attention_gatv2_backward(*arguments, **keywords))
    d_target, d_source, d_att, d_edge = results
    assert (d_target.dtype, d_source.dtype, d_att.dtype) == (grad.dtype, grad.dtype, att.dtype)

    as_gathered = rounded_as(grad, H, given)
    de = score_gradients(graph, weights, as_gathered, value)
    value, error, magnitude = (part[:, :, None] for part in de)
    dh, dh_size = value * vector * slope, magnitude * vector.abs()
    dh_error = error * vector.abs() + 4 * UNIT * dh_size
    if given["needs_dedge"]:
        assert_sums(d_edge, Sums(dh, dh_error, dh_size))
    else:
        assert d_edge is None
    count, count_t = graph.degrees()[:, :, None] + 6, graph.degrees_t()[:, :, None] + 6
    bound = graph.to_targets(dh_error) + UNIT * count * graph.to_targets(dh_size)
    assert_sums(d_target, Sums(graph.to_targets(dh), bound, graph.to_targets(dh_size)))
    rest = weighted_sums_t(graph, weights, as_gathered)
    bound = rest.error + graph.to_sources(dh_error) + UNIT * count_t * (rest.size + graph.to_sources(dh_size))
    assert_sums(d_source, Sums(graph.to_sources(dh) + rest.value, bound, rest.size + graph.to_sources(dh_size)))
    bound = (error + UNIT * (len(index) + 6) * magnitude) * size  # a sum over all edges
    assert_within(d_att, (value * leaky_relu(hidden, SLOPE)).sum(0), bound.sum(0))


@pytest.mark.parametrize("cap", [None, CAP])
def test_gatv2_of_codes_is_within_its_error_bounds(device: str, cap: int | None) -> None:
    graph = make_graph("mixed", device)
    operands, options = _operands(graph, 3, 7)
    options |= {"dropout": dropout(device), "edge_x": torch.randn(graph.index.numel(), 21, device=device)}
    _check(graph, operands, options, cap=cap, given={"grad_bits": 8, "seed": make_seed(1, device), "stream": 2})


@pytest.mark.parametrize(("H", "D", "bits"), [(1, 33, 4), (5, 1, 0)])
def test_gatv2_of_codes_at_other_widths(device: str, H: int, D: int, bits: int) -> None:
    graph = make_graph("mixed", device, torch.int64)
    _check(graph, *_operands(graph, H, D), given={"grad_bits": bits, "needs_dedge": False})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gatv2_of_floats_is_within_its_error_bounds(device: str, dtype: torch.dtype) -> None:
    graph = make_graph("mixed", device)
    operands, options = _operands(graph, 2, 5, dtype)
    _check(graph, operands, options | {"dropout": dropout(device)})


@pytest.mark.parametrize("name", DEGENERATE)
def test_gatv2_takes_every_graph(device: str, name: str) -> None:
    graph = make_graph(name, device)
    _check(graph, *_operands(graph, 2, 3), given={"grad_bits": 8})


def test_heads_that_one_program_cannot_hold_are_split(device: str) -> None:
    graph = make_graph("one_edge", device)
    _check(graph, *_operands(graph, 3, 260), given={"grad_bits": 8, "seed": make_seed(1, device)})


@quiet
def test_poison_reaches_the_rows_of_its_edges_and_no_other(device: str) -> None:
    graph = make_graph("mixed", device)
    (*operands, att), _ = _operands(graph, 2, 3, torch.float32)
    out, lse = attention_gatv2(*graph.forward, *operands, att)
    clean_grad = torch.randn_like(out)
    clean = attention_gatv2_backward(*graph.backward, *operands, att, lse, clean_grad, grad_bits=8)
    for where in ("target", "source", "grad"):
        inputs = dict(zip(("target", "source", "grad"), (*operands, clean_grad), strict=True))
        inputs[where], hit, hit_t = poisoned(graph, inputs[where], at_target=where != "source")
        *rows, grad = inputs.values()
        found, found_lse = attention_gatv2(*graph.forward, *rows, att)
        assert torch.equal(found.isnan().any(1), hit & (where != "grad"))
        assert where == "grad" or torch.equal(found[~hit], out[~hit])
        results = attention_gatv2_backward(*graph.backward, *rows, att, found_lse, grad, grad_bits=8)
        for result, expected, reached in zip(results[:2], clean[:2], (hit, hit_t), strict=True):
            assert torch.equal(result.isnan().any(1), reached)
            assert torch.equal(result[~reached], expected[~reached])
        assert results[2].isnan().any()


def test_gatv2_takes_any_strides_and_uses_nothing_outside_a_view(device: str) -> None:
    graph, nan = make_graph("mixed", device), float("nan")
    (target, source, att), scales = _operands(graph, 3, 7)
    edge_x = torch.randn(graph.index.numel(), 21, device=device)
    expected = attention_gatv2(*graph.forward, target, source, att, edge_x=edge_x, **scales)
    grad, given = torch.randn_like(expected[0]), {"grad_bits": 8, "needs_dedge": True}
    rows = (target, source, att, expected[1], grad)
    grads = attention_gatv2_backward(*graph.backward, *rows, edge_x=edge_x, **scales, **given)
    strided = [v.repeat_interleave(2)[::2] for v in graph.backward]
    views = {name: surrounded(scale, nan) for name, scale in scales.items()}
    for codes, floats in ((lambda x: surrounded(x, 99), lambda x: surrounded(x, nan)), (column_major, column_major)):
        inputs = (codes(target), codes(source), floats(att))
        keywords = {**views, "edge_x": floats(edge_x)}
        assert_equal(attention_gatv2(*strided[:2], *inputs, **keywords), expected)
        inputs = (*inputs, floats(expected[1]), floats(grad))
        assert_equal(attention_gatv2_backward(*strided, *inputs, **keywords, **given), grads)


def test_gatv2_refuses_heads_that_no_program_holds(device: str) -> None:
    graph, rows = make_graph("one_edge", device), torch.zeros(2, 4097, device=device)
    att = rows[:1]
    with pytest.raises(ValueError, match=r"'attention_gatv2' expects at most 4096 columns a head.*\(got 4097\)"):
        attention_gatv2(*graph.forward, rows, rows, att)
    with pytest.raises(ValueError, match="'attention_gatv2_backward' expects at most 4096 columns"):
        attention_gatv2_backward(*graph.backward, rows, rows, att, rows[:, :1], rows)
