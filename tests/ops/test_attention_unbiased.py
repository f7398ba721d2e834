"""Stochastic rounding leaves attention and its gradients without bias: means over seeds."""

import torch
from torch import Tensor

from dense import graph_of
from dense_attention import DROPOUT, KINDS, SEED, D, H, backward_op, codes_of, exact, kept_edges, operands_of
from op_checks import gradients
from qgnn import Graph, ops, rng
from statistics_checks import z_limit


def test_gradients_of_the_quantized_forward_are_unbiased() -> None:
    """... over seeds of the gradient's rounding, the codes of the forward pass held fixed."""
    graph, draws = graph_of("wide"), 400
    for kind in KINDS:
        operands = operands_of(kind, graph)
        upstream = torch.randn(graph.num_targets, H, D)
        rounded = {name: t.double() for name, t in codes_of(kind, graph, operands).items()}
        dense = exact(kind, graph, kept_edges(graph, H, DROPOUT, SEED))
        _, expected = gradients(dense, rounded, upstream.double())
        found: dict[str, list[Tensor]] = {name: [] for name in expected}
        for seed in range(draws):
            for name, grad in backward_op(kind, graph, operands, upstream, seed).items():
                found[name].append(grad.double())
        assert_mean(found, expected, exact_ones=("score_target",))


def test_int8_gat_is_unbiased() -> None:
    """... over seeds of both roundings: its scores are not made of codes, so the result is linear in them."""
    graph, draws = graph_of("wide"), 400
    operands = operands_of("attention", graph)
    upstream = torch.randn(graph.num_targets, H, D)
    factor = kept_edges(graph, H, DROPOUT, SEED)
    out, expected = gradients(
        exact("attention", graph, factor), {n: t.double() for n, t in operands.items()}, upstream.double()
    )
    expected["out"] = out
    found: dict[str, list[Tensor]] = {name: [] for name in expected}
    dropout_seed = rng.make_seed(SEED)
    for seed in range(draws):
        values, grads = gradients(
            lambda x, score_target, score_source, seed=seed: op_of_gat(
                graph, x, score_target, score_source, seed, dropout_seed
            ),
            operands,
            upstream,
        )
        for name, value in (grads | {"out": values}).items():
            found[name].append(value.double())
    assert_mean(found, expected)


def op_of_gat(graph: Graph, x: Tensor, target: Tensor, source: Tensor, seed: int, dropout_seed: Tensor) -> Tensor:
    csr, csc = graph.csr, graph.csc
    structure = (csr.indptr, csr.index, csc.indptr, csc.index, csc.order)
    options = (rng.make_seed(seed), 8, round(DROPOUT * 65536), dropout_seed, 0.2, True)
    return ops.attention(x.flatten(1), None, target, source, None, None, None, *structure, *options)[0].view(-1, H, D)


def assert_mean(found: dict[str, list[Tensor]], exact: dict[str, Tensor], exact_ones: tuple[str, ...] = ()) -> None:
    """Within 5 sigma, or what as many values as these make likely; a rounding may be off by 2**-15 of a step too."""
    limit = max(5.0, z_limit(sum(value.numel() for value in exact.values())))
    for name, expected in exact.items():
        samples = torch.stack(found[name])
        allowed = limit * samples.std(0) / len(samples) ** 0.5 + 2.0**-14 * expected.abs().max()
        assert ((samples.mean(0) - expected).abs() <= allowed).all(), name
        if name not in exact_ones:
            assert samples.std(0).max() > 0, f"{name} does not depend on the seed"
