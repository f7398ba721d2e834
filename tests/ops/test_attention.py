"""``qgnn::attention`` and its kin: values and every gradient against float64 autograd, and what is easily got wrong."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dense import CASES, graph_of
from dense_attention import (
    DROPOUT,
    KINDS,
    ROWS,
    SEED,
    D,
    H,
    call_op,
    codes_of,
    exact,
    kept_edges,
    magnitudes,
    operands_of,
    ours,
)
from op_checks import assert_inputs_unchanged, gradients, opcheck, saved_tensors, shares_memory
from qgnn import Graph, QConfig, ops, reference, rng, trace
from qgnn.ops import _backends
from qgnn.ops._backends import STREAM_GRAD, torch_backend


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], sizes: dict[str, Tensor]) -> None:
    """Within 1e-6 of the largest sum of absolute terms, which is the largest element where nothing cancels.

    A sum of 280 edges errs by some 17 half ulps of 6e-8 where each adds its own at random, 2.5e-7; exponential and
    logarithm of scores up to 10 cost as much."""
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        if value.numel():
            error = (found[name].double() - value).abs().max() / sizes[name].max().clamp_min(1e-30)
            assert error <= 1e-6, f"{name}: {error:.3g}"


def compare(kind: str, graph: Graph, operands: dict[str, Tensor], dropout: float, slope: float = 0.2) -> None:
    shape = operands[next(iter(ROWS[kind]))].shape[1:]
    upstream, factor = torch.randn(graph.num_targets, *shape), kept_edges(graph, shape[0], dropout, SEED)
    slopes = {} if kind == "attention_dot" else {"negative_slope": slope}
    out, grads = gradients(ours(kind, graph, dropout=dropout, seed=SEED, **slopes), operands, upstream)
    wide, upstream = {name: t.double() for name, t in operands.items()}, upstream.double()
    expected, expected_grads = gradients(exact(kind, graph, factor, slope), wide, upstream)
    sizes = magnitudes(kind, graph, factor, wide, upstream, slope)
    assert_close(grads | {"out": out}, expected_grads | {"out": expected}, sizes)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_on_every_graph(kind: str, name: str) -> None:
    graph = graph_of(name)
    compare(kind, graph, operands_of(kind, graph, edges=True), DROPOUT)


@pytest.mark.parametrize("dropout", [0.0, 1.0])
@pytest.mark.parametrize(("heads", "width"), [(1, 1), (1, 33), (4, 64), (8, 8), (5, 7)])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_of_every_shape(kind: str, heads: int, width: int, dropout: float) -> None:
    graph = graph_of("power_law")
    compare(kind, graph, operands_of(kind, graph, heads=heads, width=width), dropout)


@pytest.mark.parametrize("slope", [-0.5, 0.0, 0.7, 1.0])
@pytest.mark.parametrize("kind", ["attention", "attention_gatv2"])
def test_values_and_gradients_of_every_slope(kind: str, slope: float) -> None:
    graph = graph_of("power_law")
    compare(kind, graph, operands_of(kind, graph, edges=True), DROPOUT, slope)


def rounded_gradient(upstream: Tensor, bits: int) -> Tensor:
    """The gradient as the backward pass gathers it."""
    rows = upstream.reshape(-1, upstream.shape[2])
    codes, scale = reference.quantize(rows, bits=bits, seed=rng.make_seed(SEED), stream=STREAM_GRAD)
    return (codes.double() * scale.double()[:, None]).view(upstream.shape)


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("name", ["power_law", "hub", "broadcast", "isolated", "one_pair", "tall", "wide"])
@pytest.mark.parametrize("kind", KINDS)
def test_int8_is_exact_on_the_rounded_operands(kind: str, name: str, edges: bool) -> None:
    """Its only errors are those of the codes: of the rows forward, of the gradient backward. The gradient of GAT's
    target scores is that of the gradient before it was rounded."""
    graph, bits = graph_of(name), 4 if edges else 8
    operands = operands_of(kind, graph, edges=edges)
    upstream = torch.randn(graph.num_targets, H, D)
    run = ours(kind, graph, dropout=DROPOUT, config=QConfig(bits=bits), seed=SEED)
    out, grads = gradients(run, operands, upstream)
    factor = kept_edges(graph, H, DROPOUT, SEED)
    dense = exact(kind, graph, factor)
    rounded = {name: t.double() for name, t in codes_of(kind, graph, operands, bits).items()}
    expected, expected_grads = gradients(dense, rounded, rounded_gradient(upstream, bits))
    if kind == "attention":
        expected_grads["score_target"] = gradients(dense, rounded, upstream.double())[1]["score_target"]
    sizes = magnitudes(kind, graph, factor, rounded, upstream.double())
    assert_close(grads | {"out": out}, expected_grads | {"out": expected}, sizes)


@pytest.mark.parametrize("config", [None, QConfig()])
@pytest.mark.parametrize("kind", KINDS)
def test_a_dropped_edge_keeps_the_gradient_of_its_score(kind: str, config: QConfig | None) -> None:
    """Its weight is gone, but its score is part of the sum that the others are divided by."""
    graph = graph_of("wide")
    operands = operands_of(kind, graph, edges=True)
    operands["edge_attr"], operands["edge_weight"] = (
        torch.zeros(graph.num_edges, 1),
        torch.randn(operands["edge_weight"].shape[0], 1),
    )
    dropped = (kept_edges(graph, H, 0.5, SEED) == 0).all(1)
    assert dropped.any()
    run = ours(kind, graph, dropout=0.5, config=config, seed=SEED)
    _, grads = gradients(run, operands, torch.randn(graph.num_targets, H, D))
    assert (grads["edge_attr"][dropped] != 0).all()


@pytest.mark.parametrize("rounding", ["stochastic", "nearest", None])
def test_scores_of_one_sign_give_the_target_no_gradient(rounding: str | None) -> None:
    """Where all of a row's scores have one slope, moving them all moves nothing: exactly 0, whatever is rounded."""
    graph = graph_of("power_law")
    operands = operands_of("attention", graph)
    operands["score_source"], sign = operands["score_source"].abs(), torch.randn(graph.num_targets).sign()
    operands["score_target"] = torch.where(sign[:, None] > 0, 0.1, -9.0).expand(-1, H).clone()
    config = None if rounding is None else QConfig(rounding=rounding)
    run = ours("attention", graph, dropout=DROPOUT, config=config, seed=SEED)
    _, grads = gradients(run, operands, torch.randn(graph.num_targets, H, D))
    assert torch.equal(grads["score_target"], torch.zeros_like(grads["score_target"]))
    assert (grads["score_source"].abs().sum(1) > 0).any()


def test_score_gradients_of_a_row_cancel() -> None:
    """With one slope they sum to 0, as far as fp32 goes: ``D`` is made of the codes that ``t`` is made of. Made of the
    gradient before rounding, the sum would be as large as the rounding, thousands of times the bound."""
    graph = graph_of("power_law")
    operands = operands_of("attention", graph) | {"edge_weight": torch.eye(H)}
    operands["edge_attr"] = torch.zeros(graph.num_edges, H)
    run = ours("attention", graph, negative_slope=1.0, dropout=DROPOUT, config=QConfig(), seed=SEED)
    _, grads = gradients(run, operands, torch.randn(graph.num_targets, H, D))
    by_edge = graph.to_csr_order(grads["edge_attr"])
    sums, sizes = (reference.spmm(graph.csr.indptr, torch.arange(len(t)).int(), t) for t in (by_edge, by_edge.abs()))
    assert (sums.abs() <= 1e-5 * sizes.amax()).all()
    assert sizes.amax() > 0.1


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("config", [None, QConfig()])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_size_of_edges_is_kept(kind: str, config: QConfig | None, edges: bool) -> None:
    """... but what the caller gave: the graph, and the features of edges as they came."""
    nodes = torch.arange(40)
    graph = Graph.from_edge_index(torch.cartesian_prod(nodes, nodes).t().contiguous(), 40)
    operands = {name: t.requires_grad_() for name, t in operands_of(kind, graph, edges=edges).items()}
    given = [*operands.values(), graph.csr.indptr, graph.csr.index, graph.csr.order]
    given += [graph.csc.indptr, graph.csc.index, graph.csc.order]
    run = ours(kind, graph, dropout=DROPOUT, config=config, seed=SEED)
    made = [t for t in saved_tensors(lambda: run(**operands)) if not shares_memory(t, given)]
    assert all(t.numel() < graph.num_edges * H for t in made)
    numbers = 4 * graph.num_targets * H  # the logarithm
    rows = sum(operands[name].numel() + 4 * len(operands[name]) * H for name in ROWS[kind]) if config else 0
    seeds = 8 * (2 if config else 1)
    assert sum(t.nbytes for t in made) == numbers + rows + seeds


@pytest.mark.parametrize("config", [None, QConfig()])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_kept_beside_what_autograd_counts(kind: str, config: QConfig | None) -> None:
    graph = graph_of("random")
    operands = {name: t.requires_grad_() for name, t in operands_of(kind, graph, edges=True).items()}
    node = ours(kind, graph, dropout=DROPOUT, config=config, seed=SEED)(**operands).grad_fn
    while "attention" not in type(node).__name__.lower():
        node = node.next_functions[0][0]
    held = [value for values in vars(node).values() for value in (values if isinstance(values, tuple) else (values,))]
    assert not any(isinstance(value, Tensor) for value in held)
    with pytest.raises(ValueError, match=rf"'qgnn::{kind}' expects 'keep' where it has a backward pass"):
        call_op(kind, graph, operands, keep=False)


@pytest.mark.parametrize("kind", ["attention_gatv2", "attention_dot"])
def test_operands_are_rounded_independently_of_each_other(kind: str) -> None:
    """The same rows in every place have other codes in each."""
    graph = graph_of("random")
    rows = torch.randn(graph.num_sources, H, D)
    operands = operands_of(kind, graph) | dict.fromkeys(ROWS[kind], rows)
    codes = call_op(kind, graph, operands, keep=True)[2::2]
    assert len({tuple(c.flatten().tolist()) for c in codes}) == len(ROWS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind: str) -> None:
    graph = graph_of("random")
    for config in (None, QConfig()):
        operands = {name: t.requires_grad_() for name, t in operands_of(kind, graph, edges=True).items()}
        recorded: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            op = getattr(ops, kind)
            patch.setattr(ops, kind, lambda *args, op=op, recorded=recorded: (recorded.append(args), op(*args))[1])
            ours(kind, graph, dropout=DROPOUT, config=config, seed=SEED)(**operands)
        opcheck(
            op,
            tuple(t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in recorded[0]),
            compiled=True,
        )


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind: str) -> None:
    graph = graph_of("tall")
    operands = operands_of(kind, graph, edges=True, dtype=torch.float64)
    names = list(operands)
    leaves = [t.requires_grad_() for t in operands.values()]
    run = ours(kind, graph, dropout=DROPOUT, seed=SEED)
    assert torch.autograd.gradcheck(lambda *t: run(**dict(zip(names, t, strict=True))), leaves, fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_stay_as_they_are_and_seeds_decide(kind: str) -> None:
    graph = graph_of("power_law")
    operands = {name: t.requires_grad_() for name, t in operands_of(kind, graph, edges=True).items()}
    assert_inputs_unchanged(ours(kind, graph, dropout=DROPOUT, config=QConfig(), seed=SEED), operands)
    upstream = torch.randn(graph.num_targets, H, D)
    results = []
    for seed in (SEED, SEED, SEED + 1):
        out, grads = gradients(ours(kind, graph, dropout=DROPOUT, config=QConfig(), seed=seed), operands, upstream)
        results.append([out, *grads.values()])
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(results[0], results[2], strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("config", [None, QConfig(rounding="nearest")])
@pytest.mark.parametrize("kind", KINDS)
def test_half_types_round_once(kind: str, config: QConfig | None, dtype: torch.dtype) -> None:
    """Operands and results are rounded to the type, everything in between is fp32."""
    graph = graph_of("random")
    operands = {name: t.to(dtype) for name, t in operands_of(kind, graph, edges=True).items()}
    upstream = torch.randn(graph.num_targets, H, D).to(dtype)
    run = ours(kind, graph, config=config)
    out, grads = gradients(run, operands, upstream)
    wide = {name: t.float() for name, t in operands.items()}
    expected, expected_grads = gradients(run, wide, upstream.float())
    for name, value in (expected_grads | {"out": expected}).items():
        found = out if name == "out" else grads[name]
        assert found.dtype == dtype, name
        torch.testing.assert_close(
            found, value.to(dtype), rtol=0, atol=float(torch.finfo(dtype).eps * value.abs().max())
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_reaches_only_the_rows_that_see_it(kind: str) -> None:
    graph = graph_of("isolated")
    operands = operands_of(kind, graph)
    name = {"attention": "score_source", "attention_gatv2": "x_source", "attention_dot": "key"}[kind]
    operands[name][5] = torch.nan
    out = ours(kind, graph)(**operands)
    sees = torch.zeros(graph.num_targets, dtype=torch.bool)
    sees[graph.target[graph.csr.index == 5].long()] = True
    assert torch.equal(out.isnan().all(2).all(1), sees)
    assert torch.equal(out.isnan().any(2).any(1), sees)


@pytest.mark.parametrize("kind", KINDS)
def test_large_scores_do_not_overflow(kind: str) -> None:
    graph = graph_of("random")
    operands = operands_of(kind, graph)
    name = {"attention": "score_source", "attention_gatv2": "att", "attention_dot": "query"}[kind]
    operands[name] *= 1e4
    out, grads = gradients(ours(kind, graph), operands)
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_of_large_scores_does_not_tilt_the_gradients(kind: str) -> None:
    """Equal scores of 512 have equal weights, but the logarithm of their sum is rounded by up to 3e-5, and all weights
    of a row with it. What the scores' gradients of a row sum to would be as far from 0."""
    graph = graph_of("wide")
    operands = operands_of(kind, graph)
    if kind == "attention":
        operands["score_source"][:] = 512.0
        operands["score_target"][:] = 0.0
    else:
        rows = {"attention_gatv2": ("x_target", "x_source"), "attention_dot": ("query", "key")}[kind]
        for name in rows:
            operands[name][:] = operands[name][:1].abs() + 1.0
        target, source = (operands[name] for name in rows)
        if kind == "attention_dot":
            target *= 512.0 * D**0.5 / (target[:1] * source[:1]).sum(2, keepdim=True)
        else:
            operands["att"] = 512.0 / D / (target[0] + source[0])
    upstream = torch.randn(graph.num_targets, H, D)
    _, grads = gradients(ours(kind, graph), operands, upstream)
    wide = {name: t.double() for name, t in operands.items()}
    factor = torch.ones(graph.num_edges, H, dtype=torch.float64)
    name = {"attention": "score_source", "attention_gatv2": "att", "attention_dot": "query"}[kind]
    found = grads[name].sum(0) if kind == "attention" else grads[name]
    assert found.abs().max() <= 5e-6 * magnitudes(kind, graph, factor, wide, upstream.double())[name].max()


@pytest.mark.parametrize("config", [None, QConfig()])
@pytest.mark.parametrize("kind", KINDS)
def test_trace_names_what_ran(kind: str, config: QConfig | None) -> None:
    graph = graph_of("random")
    with trace() as t:
        gradients(ours(kind, graph, config=config), operands_of(kind, graph))
    for name in ("attention.forward", "attention.backward"):
        assert t.ops[name]["format"] == ("float32" if config is None else "int8")
        assert t.ops[name]["backend"] == _backends.cpu_backend().name
    assert ("quantize.forward" in t.ops) == (config is not None)


def test_float64_runs_in_torch() -> None:
    graph = graph_of("random")
    with trace() as t:
        ours("attention", graph)(**operands_of("attention", graph, dtype=torch.float64))
    assert t.ops["attention.forward"]["backend"] == torch_backend().name


@settings(max_examples=40)
@given(st.data())
def test_weights_of_a_target_sum_to_one(data: st.DataObject) -> None:
    """Equal rows come out as they are, whatever the graph, the scores and the kind; without edges comes 0."""
    num_sources, num_targets, E = (data.draw(st.integers(low, high)) for low, high in ((1, 9), (1, 9), (0, 40)))
    heads, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 20))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    edge_index = torch.stack([torch.randint(num_sources, (E,)), torch.randint(num_targets, (E,))])
    graph = Graph.from_edge_index(edge_index, (num_sources, num_targets))
    kind = data.draw(st.sampled_from(KINDS))
    operands = operands_of(kind, graph, heads=heads, width=width)
    row = torch.randn(heads, width)
    values = list(ROWS[kind])[-1]
    operands[values] = row.expand(num_sources, -1, -1).clone()
    out = ours(kind, graph)(**operands)
    expected = row * (graph.csr.indptr.diff() > 0)[:, None, None]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
