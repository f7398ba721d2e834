"""Graphs, operands, float64 results and error bounds that the tests of attention share.

A bound is made of relative errors of the weights ``p`` and of what sums of so many terms round, times sums of absolute
values: with ``u`` the unit roundoff, a sum of n terms is off by at most n u of the sum of their absolute values.
"""

from typing import Any, NamedTuple

import torch
from qgnn.kernels.spmm_plan import Plan, make_plan
from torch import Tensor

from graphs import GRAPHS, RECTANGULAR
from kernel_cases import UNIT, assert_within, csr, storage_error
from qgnn import reference
from qgnn.activation import Activation, dropout_threshold
from qgnn.rng import make_seed, random_bits16, stream_key


def _mixed() -> tuple[Tensor, int, int]:
    """Ten sources, twelve targets: rows without edges at both ends, parallel edges, a row of 22 edges into target 3 and
    one of 11 out of source 9."""
    generator = torch.Generator().manual_seed(9)
    source = torch.cat([torch.randint(10, (22,), generator=generator), torch.full((8,), 9), torch.tensor([1, 1, 4, 5])])
    target = torch.cat([torch.full((22,), 3), torch.arange(2, 10), torch.tensor([5, 5, 9, 10])])
    return torch.stack([source, target]), 10, 12


GRAPH_OF = {name: (edges, n, n) for name, (edges, n) in GRAPHS.items()} | RECTANGULAR | {"mixed": _mixed()}
DEGENERATE = ["no_nodes", "no_targets", "no_sources", "no_edges", "one_node_loop", "one_pair"]
CAP = 4  # of plans whose hubs are rows of more than four edges


class Graph(NamedTuple):
    """A graph, its transpose, and the row of each edge."""

    indptr: Tensor
    index: Tensor
    indptr_t: Tensor
    index_t: Tensor
    order_t: Tensor
    row: Tensor
    num_targets: int
    num_sources: int

    @property
    def forward(self) -> tuple[Tensor, Tensor]:
        return self[:2]

    @property
    def backward(self) -> tuple[Tensor, ...]:
        return self[:5]

    def to_targets(self, edge_values: Tensor) -> Tensor:
        return edge_values.new_zeros((self.num_targets, *edge_values.shape[1:])).index_add(0, self.row, edge_values)

    def to_sources(self, edge_values: Tensor) -> Tensor:
        out = edge_values.new_zeros((self.num_sources, *edge_values.shape[1:]))
        return out.index_add(0, self.index.long(), edge_values)

    def row_maximum(self, edge_values: Tensor) -> Tensor:
        """The largest value of each edge's row, at every edge."""
        out = edge_values.new_zeros((self.num_targets, edge_values.shape[1]))
        rows = self.row[:, None].expand_as(edge_values)
        return out.scatter_reduce(0, rows, edge_values, "amax", include_self=False)[self.row]

    def degrees(self) -> Tensor:
        """Edges into each target, [N, 1]."""
        return self.indptr.diff().double()[:, None]

    def degrees_t(self) -> Tensor:
        return self.indptr_t.diff().double()[:, None]


def make_graph(name: str, device: str, dtype: torch.dtype = torch.int32) -> Graph:
    edge_index, S, N = GRAPH_OF[name]
    indptr, index = csr(edge_index, N, device, dtype)
    row = torch.repeat_interleave(indptr.diff().long(), output_size=index.numel())
    order_t = torch.argsort(index.long(), stable=True)
    counts = torch.bincount(index.long(), minlength=S)[:S]
    indptr_t = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(dtype)
    return Graph(indptr, index, indptr_t, row[order_t].to(dtype), order_t.to(dtype), row, N, S)


def dropout(device: str, probability: float = 0.4, seed: int = 5, stream: int = 3) -> Activation:
    return Activation(False, dropout_threshold(probability), make_seed(seed, device), stream, None)


def dequantized(x: Tensor, scale: Tensor | None, heads: int) -> Tensor:
    """float64 [N, H, D], rounded as fp32 rounds a code times its scale."""
    rows = x.float().view(x.shape[0], heads, x.shape[1] // max(1, heads))
    return (rows if scale is None else rows * scale[:, :, None]).double()


def rounded(grad: Tensor, heads: int, bits: int, seed: Tensor | None, stream: int) -> Tensor:
    """The gradient as it is gathered, [N, H, D] in float64."""
    width = grad.shape[1] // heads
    groups = grad.float().reshape(-1, width)
    if bits:
        codes, scale = reference.quantize(groups, bits=bits, seed=seed, stream=stream)
        groups = codes.float() * scale[:, None]
    return groups.double().view(grad.shape[0], heads, width)


class Weights(NamedTuple):
    """``p`` and ``w`` of edges in float64, [E, H], the relative error of fp32's, ``L`` [N, H] and its error."""

    p: Tensor
    w: Tensor
    relative: Tensor
    lse: Tensor
    lse_error: Tensor


def exact_weights(graph: Graph, e: Tensor, error: Tensor, drop: Activation | None) -> Weights:
    """From float64 scores and a bound of the errors of fp32 ones.

    The exponent is off by the errors of the score and of what it is relative to (the largest score, or ``L``): of both
    scores, of ``L``'s sum of n exponentials, and four roundings of numbers up to the largest of |e| and |L|, one of
    which is the product with log2(e), 1.45 at most. The exponential, the sum of n and the quotient add n + 8."""
    largest, degree = graph.row_maximum(e), graph.degrees()
    total = graph.to_targets((e - largest).exp())
    first = e.new_zeros((graph.num_targets, e.shape[1])).index_copy(0, graph.row, largest)
    lse = torch.where(degree > 0, first + total.log(), 0.0)
    p = (e - lse[graph.row]).exp()
    size = torch.maximum(graph.row_maximum(e.abs()), lse[graph.row].abs())
    relative = 2 * graph.row_maximum(error) + UNIT * (6 * size + 2 * degree[graph.row] + 8)
    lse_error = e.new_zeros(lse.shape).index_copy(0, graph.row, relative)
    factor = torch.ones_like(p)
    if drop is not None and drop.seed is not None:
        bits = random_bits16(0, p.shape[0], p.shape[1], drop.seed ^ stream_key(drop.stream))
        factor = (bits >= drop.threshold).double() * drop.factor
    return Weights(p, p * factor, 1.01 * relative, lse, 1.01 * lse_error)


class ScoreGradients(NamedTuple):
    """``de`` [E, H] in float64, a bound of the error of fp32's, and a bound of its size."""

    value: Tensor
    error: Tensor
    size: Tensor


def score_gradients(graph: Graph, weights: Weights, grad: Tensor, value: Tensor) -> ScoreGradients:
    """From the gradient [N, H, D] and the edges' values [E, H, D]: ``t`` sums D products (and is scaled three times),
    ``D`` sums n of those times a weight."""
    width, degree = value.shape[2], graph.degrees()[graph.row]
    ends = grad[graph.row] * value
    keep = torch.where(weights.p > 0, weights.w / weights.p, 0.0)
    t, t_size = keep * ends.sum(2), keep * ends.abs().sum(2)
    mean = graph.to_targets(weights.p * t)[graph.row]
    mean_size = graph.to_targets(weights.p * t_size)[graph.row]
    mean_error = graph.to_targets(weights.p * t_size * weights.relative)[graph.row]
    size = weights.p * (t_size + mean_size)
    error = weights.relative * size + weights.p * mean_error + UNIT * (width + degree + 12) * size
    return ScoreGradients(weights.p * (t - mean), 1.01 * error, size)


class Sums(NamedTuple):
    """Weighted sums [N, H, D] in float64, a bound of the error of fp32's, and sums of absolute values."""

    value: Tensor
    error: Tensor
    size: Tensor


def weighted_sums(graph: Graph, weights: Weights, value: Tensor) -> Sums:
    """Over the edges into targets: n terms, and six roundings of weights, scales and the quotient."""
    weight = weights.w[:, :, None]
    size = graph.to_targets(weight * value.abs())
    error = graph.to_targets(weight * weights.relative[:, :, None] * value.abs())
    error += UNIT * (graph.degrees()[:, :, None] + 6) * size
    return Sums(graph.to_targets(weight * value), 1.01 * error, size)


def weighted_sums_t(graph: Graph, weights: Weights, grad: Tensor) -> Sums:
    """Over the edges out of sources, of rows of the gradient [N, H, D]."""
    weight, value = weights.w[:, :, None], grad[graph.row]
    size = graph.to_sources(weight * value.abs())
    error = graph.to_sources(weight * weights.relative[:, :, None] * value.abs())
    error += UNIT * (graph.degrees_t()[:, :, None] + 6) * size
    return Sums(graph.to_sources(weight * value), 1.01 * error, size)


def assert_sums(actual: Tensor, sums: Sums) -> None:
    bound = sums.error + storage_error(actual.dtype) * sums.size
    assert_within(actual, sums.value.flatten(1), bound.flatten(1))


def plans(graph: Graph, cap: int | None) -> tuple[dict[str, Plan], dict[str, Plan]]:
    """The plans that a forward and a backward pass take; with a ``cap``, both have hubs."""
    plan, plan_t = (make_plan(indptr, graph.index.numel(), cap=cap) for indptr in (graph.indptr, graph.indptr_t))
    assert cap is None or min(plan.num_hub_programs, plan_t.num_hub_programs) > 0
    return {"plan": plan}, {"plan": plan, "plan_t": plan_t}


def assert_equal(results: tuple[Tensor | None, ...], others: tuple[Tensor | None, ...]) -> None:
    """Bit for bit."""
    for a, b in zip(results, others, strict=True):
        assert a is b is None or torch.equal(a, b)


def rounded_as(grad: Tensor, heads: int, given: dict[str, Any]) -> Tensor:
    """:func:`rounded`, of the arguments of a backward pass."""
    return rounded(grad, heads, given["grad_bits"], given.get("seed"), given.get("stream", 0))


def poisoned(graph: Graph, x: Tensor, *, at_target: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` with NaNs in row 0, where masked edges point and which has no edges as a target of the graph ``mixed``, and
    of a target in row 3; the targets whose edges see them, and the sources with an edge into one of those."""
    x = x.clone()
    x[[0, 3] if at_target else [0]] = float("nan")
    hit = torch.zeros(graph.num_targets, dtype=torch.bool, device=x.device)
    hit[3 if at_target else graph.row[graph.index == 0]] = True
    hit_t = torch.zeros(graph.num_sources, dtype=torch.bool, device=x.device)
    hit_t[graph.index[hit[graph.row]].long()] = True
    return x, hit, hit_t
