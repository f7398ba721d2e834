"""Graph attention edge by edge in float64, with autograd: what the fused operators are compared with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from qgnn import Graph, functional, ops
from qgnn.ops import STREAM_DROPOUT
from qgnn.rng import make_seed, random_bits16, stream_key

H, D, K, SLOPE = 3, 5, 2, 0.2
DROPOUT, SEED = 0.3, 11

KINDS = ("attention", "attention_gatv2", "attention_dot")
ROWS = {
    "attention": {"x": "source"},
    "attention_gatv2": {"x_target": "target", "x_source": "source"},
    "attention_dot": {"query": "target", "key": "source", "value": "source"},
}


def operands_of(
    kind: str, graph: Graph, *, edges: bool = False, heads: int = H, width: int = D, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random operands by the names of the function ``kind``; scores deviate by about 1, as in a layer's first steps."""
    sizes = {"source": graph.num_sources, "target": graph.num_targets}
    made = {name: torch.randn(sizes[side], heads, width, dtype=dtype) for name, side in ROWS[kind].items()}
    if kind == "attention":
        made["score_target"] = torch.randn(graph.num_targets, heads, dtype=dtype)
        made["score_source"] = torch.randn(graph.num_sources, heads, dtype=dtype)
    if kind == "attention_gatv2":
        made["att"] = torch.randn(heads, width, dtype=dtype) / width**0.5
    if edges:
        made["edge_attr"] = torch.randn(graph.num_edges, K, dtype=dtype)
        rows = heads if kind == "attention" else heads * width
        made["edge_weight"] = torch.randn(rows, K, dtype=dtype) / K**0.5
    return made


def ours(kind: str, graph: Graph, **options: Any) -> Callable[..., Tensor]:
    function = getattr(functional, kind)
    return lambda **operands: function(graph, **operands, **options)


def kept_edges(graph: Graph, heads: int, dropout: float, seed: int) -> Tensor:
    """What multiplies the weight of each given edge and head, float64 [E, H]: 1 / (1 - p) of those that are kept."""
    threshold = round(dropout * 65536)
    bits = random_bits16(0, graph.num_edges, heads, make_seed(seed) ^ stream_key(STREAM_DROPOUT))
    factor = 65536 / (65536 - threshold) if threshold < 65536 else 0.0
    return graph.to_given_order((bits >= threshold).double() * factor)


def ends_of(graph: Graph) -> tuple[Tensor, Tensor]:
    """Source and target of each given edge."""
    return graph.to_given_order(graph.csr.index).long(), graph.to_given_order(graph.target).long()


def edge_weights(graph: Graph, score: Tensor) -> Tensor:
    """Softmax of [E, H] over the edges of a target."""
    _, target = ends_of(graph)
    value = score.exp()  # float64: scores up to 700
    sums = torch.zeros(graph.num_targets, score.shape[1], dtype=score.dtype).index_add(0, target, value)
    return value / sums[target]


def scores_and_values(kind: str, graph: Graph, t: dict[str, Tensor], slope: float = SLOPE) -> tuple[Tensor, Tensor]:
    """Scores [E, H] and values [E, H, D] of the given edges."""
    source, target = ends_of(graph)
    edge: Tensor | float = t["edge_attr"] @ t["edge_weight"].t() if "edge_attr" in t else 0.0
    if kind == "attention":
        score = t["score_source"][source] + t["score_target"][target] + edge
        return leaky_relu(score, slope), t["x"][source]
    if isinstance(edge, Tensor):
        edge = edge.view(graph.num_edges, *t[next(iter(ROWS[kind]))].shape[1:])
    if kind == "attention_gatv2":
        value = t["x_source"][source]
        return (leaky_relu(value + t["x_target"][target] + edge, slope) * t["att"]).sum(2), value
    query = t["query"][target]
    return (query * (t["key"][source] + edge)).sum(2) / query.shape[2] ** 0.5, t["value"][source] + edge


def exact(kind: str, graph: Graph, factor: Tensor | float = 1.0, slope: float = SLOPE) -> Callable[..., Tensor]:
    """The same function over float64 operands; ``factor`` multiplies the weights of the given edges."""

    def run(**operands: Tensor) -> Tensor:
        score, value = scores_and_values(kind, graph, operands, slope)
        return _sum_by_target(graph, (edge_weights(graph, score) * factor)[:, :, None] * value)

    return run


def _sum_by_target(graph: Graph, values: Tensor) -> Tensor:
    out = torch.zeros(graph.num_targets, *values.shape[1:], dtype=torch.float64)
    return out.index_add(0, ends_of(graph)[1], values)


def magnitudes(
    kind: str, graph: Graph, factor: Tensor, operands: dict[str, Tensor], upstream: Tensor, slope: float = SLOPE
) -> dict[str, Tensor]:
    """What the terms of the result and of each gradient come to in absolute value: where they cancel, rounding is
    relative to this and not to what is left.

    A score's gradient is made of ``p (factor t)`` and ``p D``, and enters the others as the score's derivative has it.
    """
    score, value = scores_and_values(kind, graph, operands, slope)
    p = edge_weights(graph, score)
    _, target = ends_of(graph)
    t = factor * (upstream.abs()[target] * value.abs()).sum(2)
    of_score = p * (t + _sum_by_target(graph, p * t)[target])
    leaves = {name: x.abs().requires_grad_() for name, x in operands.items()}
    scores, values = scores_and_values(kind, graph, leaves, slope=1.0)  # slopes up to 1
    terms = (of_score * scores).sum() + ((p * factor)[:, :, None] * upstream.abs()[target] * values).sum()
    grads = torch.autograd.grad(terms, list(leaves.values()))
    found = dict(zip(leaves, grads, strict=True))
    return found | {"out": _sum_by_target(graph, (p * factor)[:, :, None] * value.abs())}


def call_op(kind: str, graph: Graph, operands: dict[str, Tensor], *, keep: bool, bits: int = 8) -> tuple[Tensor, ...]:
    """The operator itself in int8, with all of its results."""
    rows = [t for name in ROWS[kind] for t in (operands[name].flatten(1), None)]
    rest = [operands[name] for name in ("score_target", "score_source", "att") if name in operands]
    csr, csc = graph.csr, graph.csc
    edges = (operands.get("edge_attr"), operands.get("edge_weight"), csr.order if "edge_attr" in operands else None)
    structure = (csr.indptr, csr.index, csc.indptr, csc.index, csc.order)
    heads = (H,) if kind == "attention_dot" else ()
    slope = () if kind == "attention_dot" else (0.2,)
    options = (make_seed(SEED), bits, round(DROPOUT * 65536), make_seed(SEED), *slope, keep)
    return getattr(ops, kind)(*rows, *rest, *edges, *structure, *heads, *options)


def codes_of(kind: str, graph: Graph, operands: dict[str, Tensor], bits: int = 8) -> dict[str, Tensor]:
    """Operands as the kernels read them: what their codes stand for. The operator returns these."""
    results = call_op(kind, graph, operands, keep=True, bits=bits)
    rounded = dict(operands)
    for number, name in enumerate(ROWS[kind]):
        codes, scale = results[2 + 2 * number], results[3 + 2 * number]
        rows = codes.view(operands[name].shape).double() * scale[:, :, None].double()
        step = scale[:, :, None].double()
        assert ((rows - operands[name].double()).abs() <= 1.001 * step).all(), name
        rounded[name] = rows
    return rounded


def backward_op(kind: str, graph: Graph, operands: dict[str, Tensor], upstream: Tensor, seed: int) -> dict[str, Tensor]:
    """Gradients of the codes of one forward pass, the gradient rounded with ``seed``."""
    _, lse, *codes = call_op(kind, graph, operands, keep=True)
    rest = [operands[name] for name in ("score_target", "score_source", "att") if name in operands]
    csr, csc = graph.csr, graph.csc
    structure = (csr.indptr, csr.index, csc.indptr, csc.index, csc.order)
    slope = () if kind == "attention_dot" else (0.2,)
    options = (make_seed(seed), 8, round(DROPOUT * 65536), make_seed(SEED), *slope, False, False)
    function = getattr(torch.ops.qgnn, f"{kind}_backward")
    results = function(upstream.flatten(1), *codes, lse, *rest, None, None, None, *structure, *options)
    names = [*ROWS[kind], *(name for name in ("score_target", "score_source", "att") if name in operands)]
    return {name: grad.view(operands[name].shape) for name, grad in zip(names, results, strict=False)}
