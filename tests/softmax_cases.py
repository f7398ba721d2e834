"""Softmax over edges in float64, row by row with torch's own functions, and the error bounds of fp32 results."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from statistics_checks import EPS

SLOPE = 0.2
TINY = 2.0**-149  # a step of fp32's denormals
SMALLEST = 2.0**-126  # what a GPU may flush to 0 is below


def rows_of(indptr: Tensor) -> Iterator[slice]:
    """The edges of each row that has some."""
    return (slice(start, stop) for start, stop in pairwise(indptr.tolist()) if start < stop)


def by_row(indptr: Tensor, values: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """``function`` of each row's values, stacked again."""
    rows = [function(values[edges]).expand_as(values[edges]) for edges in rows_of(indptr)]
    return torch.cat(rows) if rows else values


def exact_softmax(indptr: Tensor, scores: Tensor) -> Tensor:
    return by_row(indptr, scores.double(), lambda row: row.softmax(0))


def edge_scores(
    indptr: Tensor, index: Tensor, score_target: Tensor, score_source: Tensor, slope: float = SLOPE
) -> Tensor:
    """What attention takes the softmax of, in float64."""
    target = torch.repeat_interleave(indptr.diff().long())
    return leaky_relu(score_target.double()[target] + score_source.double()[index.long()], slope)


def degrees(indptr: Tensor) -> Tensor:
    """The number of edges in each edge's row, [E, 1]."""
    degree = indptr.diff().long()
    return torch.repeat_interleave(degree, degree).double()[:, None]


def softmax_bound(indptr: Tensor, scores: Tensor, *, score_roundings: int = 0) -> Tensor:
    """Largest error of an fp32 softmax of float64 ``scores``.

    With d the distance to the row's largest score, exp(d) is off by a relative |d| eps from rounding d and by 2 eps of
    its own; that goes for the result and, at most, for the sum. Then n - 1 additions, the reciprocal and the product.
    Scores that were rounded themselves add as many times |score| eps, twice. Denormals are off by a step.
    """
    distance = by_row(indptr, scores, lambda row: row.max(0).values - row.min(0).values)
    size = by_row(indptr, scores, lambda row: row.abs().max(0).values)
    roundings = 2 * distance + 2 * score_roundings * size + degrees(indptr) + 8
    return 1.01 * EPS * roundings * exact_softmax(indptr, scores) + 2 * TINY


def online_softmax_bound(indptr: Tensor, scores: Tensor, *, score_roundings: int = 0) -> Tensor:
    """The same for a GPU's exponential and a sum that is rescaled whenever the row's maximum grows.

    exp(d) is 2 ** (d log2 e), off by a relative 2.5 |d| eps, from rounding d, the product and the constant, and by
    4 eps of its own. Rescaling splits d into parts, as many as the maximum grows: each of them adds 5 eps, once for
    every edge at most, and three times more where sums of lanes, of parts and of chunks meet. Then n - 1 additions, a
    reciprocal of 4 eps and the product.
    """
    distance = by_row(indptr, scores, lambda row: row.max(0).values - row.min(0).values)
    size = by_row(indptr, scores, lambda row: row.abs().max(0).values)
    roundings = 5 * distance + 2 * score_roundings * size + 6 * degrees(indptr) + 30
    return 1.01 * EPS * roundings * exact_softmax(indptr, scores) + 2 * SMALLEST


def transposed(indptr: Tensor, index: Tensor, num_sources: int) -> tuple[Tensor, Tensor]:
    """``indptr`` of the transposed graph, and where each of its edges stands in the graph."""
    counts = torch.bincount(index.long(), minlength=num_sources)
    indptr_t = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return indptr_t.to(indptr.dtype), torch.argsort(index, stable=True).to(indptr.dtype)


def row_sums(indptr: Tensor, values: Tensor) -> Tensor:
    """[E, H] -> [N, H]."""
    total = values.new_zeros(len(indptr) - 1, values.shape[1])
    return total.index_add(0, torch.repeat_interleave(indptr.diff().long()), values)


def exact_backward(indptr: Tensor, out: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the scores, and its bound: n products and n - 1 additions, a difference, a product and one more
    factor, the slope of a leaky ReLU."""
    out, grad = out.double(), grad.double()
    mean = by_row(indptr, out * grad, lambda row: row.sum(0))
    size = by_row(indptr, (out * grad).abs(), lambda row: row.sum(0))
    bound = out * ((degrees(indptr) + 4) * size + 4 * grad.abs())
    return out * (grad - mean), 1.01 * EPS * bound + 2 * TINY


def exact_attention_backward(
    indptr: Tensor,
    scores: Tensor,
    out: Tensor,
    grad: Tensor,
    indptr_t: Tensor,
    order: Tensor,
    slope: float = SLOPE,
) -> list[tuple[Tensor, Tensor]]:
    """The gradients of targets' and sources' scores with their bounds: as many additions as there are edges."""
    edge, bound = exact_backward(indptr, out, grad)
    edge = torch.where(scores > 0, edge, slope * edge)
    order = order.long()
    return [
        (row_sums(pointer, e), row_sums(pointer, b + (degrees(pointer) + 1) * EPS * e.abs()) + TINY)
        for pointer, e, b in ((indptr, edge, bound), (indptr_t, edge[order], bound[order]))
    ]
