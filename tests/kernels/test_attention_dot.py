import math
from typing import Any

import pytest
import torch
from qgnn.kernels.attention import attention_dot, attention_dot_backward
from torch import Tensor

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

NAMES = ("query", "key", "value")


def _operands(graph: Graph, H: int, D: int, dtype: torch.dtype = torch.int8) -> tuple[list[Tensor], dict[str, Any]]:
    device = str(graph.indptr.device)
    sizes = (graph.num_targets, graph.num_sources, graph.num_sources)
    if dtype != torch.int8:
        return [torch.randn(n, H * D, device=device).to(dtype) for n in sizes], {}
    scales = [0.02 * torch.rand(n, H, device=device) for n in sizes]
    return [random_codes(n, H * D, device) for n in sizes], {
        f"{name}_scale": scale for name, scale in zip(NAMES, scales, strict=True)
    }


def _check(
    graph: Graph,
    operands: list[Tensor],
    options: dict[str, Any],
    H: int,
    *,
    given: dict[str, Any] | None = None,
    cap: int | None = None,
) -> None:
    """Both passes against float64, within their bounds; with hubs, twice the same. ``given`` are options of the
    backward pass."""
    plan, both_plans = plans(graph, cap)
    out, lse = attention_dot(*graph.forward, *operands, heads=H, **options, **plan)
    if cap:
        assert_equal((out, lse), attention_dot(*graph.forward, *operands, heads=H, **options, **plan))

    index, root = graph.index.long(), math.sqrt(operands[0].shape[1] // H)
    rows = [dequantized(x, options.get(f"{name}_scale"), H) for name, x in zip(NAMES, operands, strict=True)]
    query, key, value = rows[0][graph.row], rows[1][index], rows[2][index]
    key_size = key.abs()
    if "edge_x" in options:
        edge = dequantized(options["edge_x"], None, H)
        key, value, key_size = key + edge, value + edge, key_size + edge.abs()
    # A sum of D products, of a factor that is rounded twice, and three scales.
    error = UNIT * (root**2 + 6) * (query.abs() * key_size).sum(2) / root
    weights = exact_weights(graph, (query * key).sum(2) / root, error, options.get("dropout"))
    assert_sums(out, weighted_sums(graph, weights, value))
    assert_within(lse, weights.lse, weights.lse_error)

    given = {"grad_bits": 0, "needs_dedge": True} | (given or {})
    grad = torch.randn_like(out.float()).to(out.dtype)
    arguments, keywords = (*graph.backward, *operands, lse, grad), {**options, **given, **both_plans}
    results = attention_dot_backward(*arguments, **keywords)
    if cap:
        assert_equal(results, attention_dot_backward(*arguments, **keywords))
    d_query, d_key, d_value, d_edge = results
    assert (d_query.dtype, d_key.dtype, d_value.dtype) == (grad.dtype,) * 3

    as_gathered = rounded_as(grad, H, given)
    of_values = weighted_sums_t(graph, weights, as_gathered)
    assert_sums(d_value, of_values)
    ds, error, size = (part[:, :, None] / root for part in score_gradients(graph, weights, as_gathered, value))
    count, count_t = graph.degrees()[:, :, None] + 8, graph.degrees_t()[:, :, None] + 8
    bound = graph.to_targets(error * key_size) + UNIT * count * graph.to_targets(size * key_size)
    assert_sums(d_query, Sums(graph.to_targets(ds * key), bound, graph.to_targets(size * key_size)))
    bound = graph.to_sources(error * query.abs()) + UNIT * count_t * graph.to_sources(size * query.abs())
    assert_sums(d_key, Sums(graph.to_sources(ds * query), bound, graph.to_sources(size * query.abs())))
    if not given["needs_dedge"]:
        assert d_edge is None
        return
    weighted = weights.w[:, :, None] * as_gathered[graph.row]
    bound = error * query.abs() + weights.relative[:, :, None] * weighted.abs()
    size = size * query.abs() + weighted.abs()
    assert_sums(d_edge, Sums(ds * query + weighted, bound + 6 * UNIT * size, size))


@pytest.mark.parametrize("cap", [None, CAP])
def test_dot_of_codes_is_within_its_error_bounds(device: str, cap: int | None) -> None:
    graph = make_graph("mixed", device)
    operands, options = _operands(graph, 3, 7)
    options |= {"dropout": dropout(device), "edge_x": torch.randn(graph.index.numel(), 21, device=device)}
    _check(graph, operands, options, 3, cap=cap, given={"grad_bits": 8, "seed": make_seed(1, device), "stream": 2})


@pytest.mark.parametrize(("H", "D", "bits"), [(1, 33, 4), (5, 1, 0)])
def test_dot_of_codes_at_other_widths(device: str, H: int, D: int, bits: int) -> None:
    graph = make_graph("mixed", device, torch.int64)
    _check(graph, *_operands(graph, H, D), H, given={"grad_bits": bits, "needs_dedge": bits == 0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dot_of_floats_is_within_its_error_bounds(device: str, dtype: torch.dtype) -> None:
    graph = make_graph("mixed", device)
    operands, options = _operands(graph, 2, 5, dtype)
    _check(graph, operands, options | {"dropout": dropout(device)}, 2)


@pytest.mark.parametrize("name", DEGENERATE)
def test_dot_takes_every_graph(device: str, name: str) -> None:
    graph = make_graph(name, device)
    _check(graph, *_operands(graph, 2, 3), 2, given={"grad_bits": 8})


def test_heads_that_one_program_cannot_hold_are_split(device: str) -> None:
    graph = make_graph("one_edge", device)
    _check(graph, *_operands(graph, 3, 260), 3, given={"grad_bits": 8, "seed": make_seed(1, device)})


@quiet
def test_scores_of_minus_infinity_are_those_of_a_softmax(device: str) -> None:
    """An edge without weight; a row of nothing else has NaNs, but steps and chunks of a row may have nothing else."""
    graph = make_graph("mixed", device)
    (query, key, value), _ = _operands(graph, 1, 2, torch.float32)
    index, position = graph.index.long(), torch.arange(graph.index.numel(), device=device)
    dead = (graph.row == 5) | ((graph.row == 3) & (position - graph.indptr.long()[graph.row] < 10))
    # A source of its own for each edge, and queries that do not turn a sign.
    query, keys, values = query.abs() + 1, key[index].masked_fill(dead[:, None], float("-inf")), value[index]
    expected, expected_lse = _softmax(graph, query, keys, values)
    for cap in (None, CAP):
        given = {} if cap is None else plans(graph, cap)[0]
        out, lse = attention_dot(graph.indptr, position, query, keys, values, **given)
        torch.testing.assert_close(out.double(), expected, equal_nan=True, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), expected_lse, equal_nan=True, rtol=1e-5, atol=1e-5)
        assert out[3].isfinite().all()
        assert out[5].isnan().all()


def _softmax(graph: Graph, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    lse = torch.zeros((len(query), 1), dtype=torch.float64, device=query.device)
    for row in graph.row.unique().tolist():
        edges = graph.row == row
        e = (keys[edges].double() @ query[row].double()) / math.sqrt(query.shape[1])
        out[row] = e.softmax(0) @ values[edges].double()
        lse[row] = torch.where(e.isfinite().any(), e.logsumexp(0), float("nan"))
    return out, lse


@quiet
def test_poison_reaches_the_rows_of_its_edges_and_no_other(device: str) -> None:
    graph = make_graph("mixed", device)
    operands, _ = _operands(graph, 2, 3, torch.float32)
    out, lse = attention_dot(*graph.forward, *operands, heads=2)
    clean_grad = torch.randn_like(out)
    clean = attention_dot_backward(*graph.backward, *operands, lse, clean_grad, grad_bits=8)
    for where in ("query", "key", "grad"):
        inputs = dict(zip((*NAMES, "grad"), (*operands, clean_grad), strict=True))
        inputs[where], hit, hit_t = poisoned(graph, inputs[where], at_target=where in ("query", "grad"))
        *rows, grad = inputs.values()
        found, found_lse = attention_dot(*graph.forward, *rows, heads=2)
        assert torch.equal(found.isnan().any(1), hit & (where != "grad"))
        assert where == "grad" or torch.equal(found[~hit], out[~hit])
        results = attention_dot_backward(*graph.backward, *rows, found_lse, grad, grad_bits=8)
        for result, expected, reached in zip(results[:2], clean[:2], (hit, hit_t), strict=True):
            assert torch.equal(result.isnan().any(1), reached)
            assert torch.equal(result[~reached], expected[~reached])
        assert torch.equal(results[2][~hit_t], clean[2][~hit_t])


def test_dot_takes_any_strides_and_uses_nothing_outside_a_view(device: str) -> None:
    graph, nan = make_graph("mixed", device), float("nan")
    operands, scales = _operands(graph, 3, 7)
    edge_x = torch.randn(graph.index.numel(), 21, device=device)
    expected = attention_dot(*graph.forward, *operands, heads=3, edge_x=edge_x, **scales)
    grad, given = torch.randn_like(expected[0]), {"grad_bits": 8, "needs_dedge": True}
    grads = attention_dot_backward(*graph.backward, *operands, expected[1], grad, edge_x=edge_x, **scales, **given)
    strided = [v.repeat_interleave(2)[::2] for v in graph.backward]
    views = {name: surrounded(scale, nan) for name, scale in scales.items()}
    for codes, floats in ((lambda x: surrounded(x, 99), lambda x: surrounded(x, nan)), (column_major, column_major)):
        inputs = [codes(x) for x in operands]
        keywords = {**views, "edge_x": floats(edge_x)}
        assert_equal(attention_dot(*strided[:2], *inputs, heads=3, **keywords), expected)
        rows = (*inputs, floats(expected[1]), floats(grad))
        assert_equal(attention_dot_backward(*strided, *rows, **keywords, **given), grads)


def test_dot_refuses_heads_that_no_program_holds(device: str) -> None:
    graph, rows = make_graph("one_edge", device), torch.zeros(2, 4097, device=device)
    with pytest.raises(ValueError, match=r"'attention_dot' expects at most 4096 columns a head.*\(got 4097\)"):
        attention_dot(*graph.forward, rows, rows, rows)
    with pytest.raises(ValueError, match="'attention_dot_backward' expects at most 4096 columns"):
        attention_dot_backward(*graph.backward, rows, rows, rows, rows[:, :1], rows)
