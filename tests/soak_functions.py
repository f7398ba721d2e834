"""Random cases of the stateless functions for ``tests/soak.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layer_cases import Ball, conv_bounds, dense_adjacency, linear_bounds
from qgnn import Graph, QConfig, functional
from soak_draw import DTYPES, WIDTHS, Draw, assert_finite, draw_config, draw_graph, draw_values, repeated


def _passes(function: Callable[..., Tensor], **inputs: Tensor) -> Callable[[], dict[str, Tensor]]:
    """Result and gradients of a function of named tensors."""

    def run() -> dict[str, Tensor]:
        leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
        out = function(**leaves)
        upstream = upstream_of(out)
        grads = torch.autograd.grad(out, list(leaves.values()), upstream, materialize_grads=True)
        return {"out": out.detach(), **{f"d{name}": g for name, g in zip(leaves, grads, strict=True)}}

    return run


def upstream_of(out: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)


def function(draw: Draw) -> None:
    """A function with any of its options, on operands of any size."""
    run, config, bounds = draw.any_of(FUNCTIONS)(draw, draw_config(draw))
    results = repeated(run, draw.randrange(2**31))
    assert_finite(results)
    if bounds is None or (config is not None and not config.is_integer):
        return
    for name, bound in bounds().items():
        if name in results and results[name].dtype == torch.float32:
            assert bound.contains(results[name]), f"{name} is not within the bounds of quantized operands"


_Run = tuple[Callable[[], dict[str, Tensor]], QConfig | None, Callable[[], dict[str, Ball]] | None]


def _epilogue(draw: Draw) -> dict[str, Any]:
    if draw.chance(0.6):
        return {}
    return {"activation": draw.any_of((None, "relu")), "dropout": draw.any_of((0, 0.25, 0.9999, 1))}


def _linear(draw: Draw, config: QConfig | None) -> _Run:
    n, k, m = draw.size(200), draw.any_of(WIDTHS), draw.any_of(WIDTHS)
    dtype = draw.any_of(DTYPES)
    x, weight = draw_values(draw, n, k, dtype=dtype), draw_values(draw, m, k, dtype=dtype)
    epilogue, seed = _epilogue(draw), draw.rounding_seed()
    bias = {"bias": torch.randn(m).to(dtype)} if draw.chance(0.5) else {}
    run = _passes(
        lambda x, weight, bias=None: functional.linear(x, weight, bias, config=config, seed=seed, **epilogue),
        **{"x": x, "weight": weight, **bias},
    )
    if config is None or epilogue or bias or not n:
        return run, config, None
    return run, config, lambda: _of_rows(config, linear_bounds(x, weight, upstream_of(x @ weight.t()), config))


def _of_rows(config: QConfig, bounds: dict[str, Ball]) -> dict[str, Ball]:
    """Bounds by the names here; of packed rows the gradient of a weight has none."""
    named = {name.replace("lin.", ""): bound for name, bound in bounds.items()}
    return named if isinstance(config.save, str) else {name: named[name] for name in ("out", "dx")}


def _aggregation(draw: Draw, config: QConfig | None, *, product: bool) -> _Run:
    edges, S, T = draw_graph(draw, square=draw.chance(0.5))
    k, m = draw.any_of(WIDTHS), draw.any_of(WIDTHS)
    x, weight = draw_values(draw, S, k), draw_values(draw, m, k)
    heads = draw.any_of([h for h in (1, 2, 3, 8) if (m if product else k) % h == 0])
    edge_weight = torch.rand(edges.shape[1], *([heads] if heads > 1 else [])) if draw.chance(0.5) else None
    reduce = draw.any_of(("sum", "mean") if product else ("sum", "mean", "max", "min"))
    epilogue = _epilogue(draw) if reduce in ("sum", "mean") else {}
    seed, graph = draw.rounding_seed(), Graph.from_edge_index(edges, (S, T))
    options = {"reduce": reduce, "config": config, "seed": seed, **epilogue}
    if heads > 1 and reduce in ("max", "min"):
        edge_weight = None
    learn = {"edge_weight": edge_weight} if edge_weight is not None and draw.chance(0.5) else {}
    constant = {} if learn else {"edge_weight": edge_weight}
    if product:
        run = _passes(
            lambda **t: functional.graph_linear(graph, **t, **constant, **options), x=x, weight=weight, **learn
        )
    else:
        run = _passes(lambda **t: functional.spmm(graph, **t, **constant, **options), x=x, **learn)
    if config is None or epilogue or heads > 1 or reduce in ("max", "min") or not (S and T):
        return run, config, None
    matrix = dense_adjacency(edges, S, T, edge_weight)
    if reduce == "mean":
        matrix = matrix / torch.bincount(edges[1], minlength=T).clamp_min(1)[:, None]

    def bounds() -> dict[str, Ball]:
        if product:
            return _of_rows(config, conv_bounds(matrix, x, weight, upstream_of(torch.empty(T, m)), config))
        aggregate, upstream = Ball.exact(matrix), Ball.exact(upstream_of(torch.empty(T, k)))
        return {
            "out": aggregate @ Ball.exact(x).quantized(config),
            "dx": aggregate.mT @ upstream.quantized(config),
        }

    return run, config, bounds


def _spmm(draw: Draw, config: QConfig | None) -> _Run:
    return _aggregation(draw, config, product=False)


def _graph_linear(draw: Draw, config: QConfig | None) -> _Run:
    return _aggregation(draw, config, product=True)


def _incidence_sum(draw: Draw, config: QConfig | None) -> _Run:
    edges, S, T = draw_graph(draw, square=False)
    x, side, seed = (
        draw_values(draw, edges.shape[1], draw.any_of(WIDTHS)),
        draw.any_of(("source", "target")),
        draw.rounding_seed(),
    )
    options = {"num_nodes": (S, T), "config": config, "seed": seed}
    return _passes(lambda x: functional.incidence_sum(edges, x, side, **options), x=x), config, None


def _edges_of_heads(draw: Draw) -> tuple[Graph, int, int]:
    edges, S, T = draw_graph(draw, square=False)
    heads = draw.any_of((1, 2, 3, 4, 8))
    return Graph.from_edge_index(edges, (S, T)), heads, draw.any_of(WIDTHS[:11])


def _sddmm(draw: Draw, config: QConfig | None) -> _Run:
    graph, H, D = _edges_of_heads(draw)
    dtype, seed = draw.any_of(DTYPES), draw.rounding_seed()
    source, target = (draw_values(draw, n, H, D, dtype=dtype) for n in (graph.num_sources, graph.num_targets))
    op = draw.any_of(("dot", "dot", "add"))
    options = {"op": op, "config": config if op == "dot" else None, "seed": seed}
    return _passes(lambda s, t: functional.sddmm(graph, s, t, **options), s=source, t=target), config, None


def _edge_softmax(draw: Draw, config: QConfig | None) -> _Run:
    graph, H, _ = _edges_of_heads(draw)
    scores = draw_values(draw, graph.num_edges, H, dtype=draw.any_of(DTYPES))
    return _passes(lambda scores: functional.edge_softmax(graph, scores), scores=scores), config, None


def _attention_weights(draw: Draw, config: QConfig | None) -> _Run:
    graph, H, _ = _edges_of_heads(draw)
    source, target = (torch.randn(n, H) for n in (graph.num_sources, graph.num_targets))
    run = _passes(lambda s, t: functional.attention_weights(graph, s, t), s=source, t=target)
    return run, config, None


def _attention(draw: Draw, config: QConfig | None) -> _Run:
    """Attention of each kind; with features of edges or without, with dropout or without."""
    graph, H, D = _edges_of_heads(draw)
    kind, seed = draw.any_of(("attention", "attention_gatv2", "attention_dot")), draw.rounding_seed()
    if config is not None:  # its weights are never written, and so not rounded
        config = replace(config, granularity="row", components={**config.components, "attention": None})
    dtype = draw.any_of(DTYPES)

    def rows(n: int, *shape: int) -> Tensor:
        return torch.randn(n, *(shape or (H, D))).to(dtype)

    S, T = graph.num_sources, graph.num_targets
    operands = {
        "attention": lambda: {"x": rows(S), "score_source": rows(S, H), "score_target": rows(T, H)},
        "attention_gatv2": lambda: {"x_source": rows(S), "x_target": rows(T), "att": rows(H, D)},
        "attention_dot": lambda: {"query": rows(T), "key": rows(S), "value": rows(S)},
    }[kind]()
    if draw.chance(0.4):
        operands["edge_attr"] = rows(graph.num_edges, 3)
        operands["edge_weight"] = rows(H if kind == "attention" else H * D, 3)
    options = {"dropout": draw.any_of((0, 0, 0.3, 1)), "config": config, "seed": seed}
    if kind != "attention_dot":
        options["negative_slope"] = draw.any_of((0.2, 0.0, 0.01, 1.0))
    return _passes(lambda **t: getattr(functional, kind)(graph, **t, **options), **operands), config, None


def _activation(draw: Draw, config: QConfig | None) -> _Run:
    n, f, dtype, seed = draw.size(200), draw.any_of(WIDTHS), draw.any_of(DTYPES), draw.rounding_seed()
    given = {"x": draw_values(draw, n, f, dtype=dtype)}
    if draw.chance(0.5):
        given["bias"] = torch.randn(f).to(dtype)
    if draw.chance(0.5):
        given["residual"] = torch.randn(n, f).to(dtype)
    kind = draw.any_of((None, "relu", "leaky_relu", "elu"))
    options = {"kind": kind, "dropout": draw.any_of((0, 0.5)), "config": config, "seed": seed}
    options |= {"negative_slope": draw.any_of((0.01, 0.5)), "alpha": draw.any_of((1.0, 0.3, 2.0))}
    return _passes(lambda **t: functional.activation(**t, **options), **given), config, None


FUNCTIONS = (
    *(_linear, _linear, _spmm, _spmm, _graph_linear, _graph_linear, _incidence_sum, _sddmm),
    *(_edge_softmax, _attention_weights, _attention, _attention, _attention, _activation),
)
