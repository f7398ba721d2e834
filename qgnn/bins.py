"""Where codes of stochastic rounding should lie, and how many values should share a block: statistics, no data moved.

The model (Eliassen and Selvan, arXiv:2309.11856): the ``d`` values of a block are normal, and their largest and
smallest one, which become the ends 0 and ``B = 2**bits - 1`` of its range, are the quantiles ``1/d`` and ``1 - 1/d``.
In steps the values follow the clipped normal distribution CN_[1/d]: mean ``mu = B / 2``, deviation
``sigma = -mu / Phi^-1(1/d)``, and what lies outside of the range is moved to its ends. Up to two values are their
block's ends, and nothing is rounded.

A value ``h`` between the edges ``a <= h < b`` is rounded up with probability ``(h - a) / (b - a)``, which keeps its
mean; the variance is ``(h - a) (b - h)``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from qgnn.rounding import BINS, MAX_BLOCK_SIZE

SMALLEST_BLOCK = 8  # the shortest one that is whole bytes at every width
SAMPLE = 4 * MAX_BLOCK_SIZE  # values that are looked at to measure
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)

_CELLS = 64  # of a histogram between the ends of the range
_EDGE_UNIT = 2.0**-16  # kernels read edges in this unit
_NORMAL = NormalDist()


def _cdf(t: float) -> float:
    return 0.5 * math.erfc(-t * math.sqrt(0.5))  # of full relative accuracy in the lower tail


def _check(owner: str, bits: int, most: int, block_size: int, least: int = 1) -> None:
    if not isinstance(bits, int) or not least <= bits <= most:
        raise ValueError(f"'{owner}' expects 'bits' to be a whole number from {least} to {most} (got {bits})")
    if not isinstance(block_size, int) or not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(
            f"'{owner}' expects 'block_size' to be a whole number from 1 to {MAX_BLOCK_SIZE} (got {block_size})"
        )


def _half_range(block_size: int) -> float:
    """Half the range of a block of more than two values, in deviations of the values."""
    return -_NORMAL.inv_cdf(1 / block_size)


def _variance(edges: Sequence[float]) -> float:
    """E[Var] for a standard normal value: the integral of ``(t - a) (b - t)`` times its density, bin by bin."""
    return sum(b * _NORMAL.pdf(a) - a * _NORMAL.pdf(b) - (1 + a * b) * (_cdf(b) - _cdf(a)) for a, b in pairwise(edges))


def expected_variance(bits: int, block_size: int, edges: Tensor | None = None) -> float:
    r"""Variance that stochastic rounding adds to a value of a block, in squared steps, if the clipped normal is true.

    .. math::
        E[Var] = \sum_i \int_{a_{i-1}}^{a_i} (h - a_{i-1}) (a_i - h) \, \varphi\big((h - \mu) / \sigma\big) / \sigma
        \; dh

    (`Activation Compression of Graph Neural Networks using Block-wise Quantization with Improved Variance Minimization
    <https://arxiv.org/abs/2309.11856>`_), in closed form and float64. Values at the ends of the range add nothing.

    Args:
        bits: Width of a code, 1 to 8.
        block_size: Values ``d`` that share a range, 1 to 65536.
        edges: ``[2**bits]``, ascending from 0 to ``2**bits - 1``; ``None``: one apart.

    Raises:
        ValueError: For other widths, block sizes or edges.

    Example:
        >>> expected_variance(2, 64), expected_variance(2, 64, optimal_bins(2, 64))  # 0.1623, 0.1521
    """
    _check("expected_variance", bits, 8, block_size)
    last = (1 << bits) - 1
    levels = list(range(last + 1)) if edges is None else edges.tolist()
    rises = all(a < b for a, b in pairwise(levels))
    if len(levels) != last + 1 or levels[0] != 0 or levels[-1] != last or not rises:
        raise ValueError(
            f"'expected_variance' expects 'edges' of shape [{last + 1}] that rise from 0 to {last} for {bits}-bit "
            f"codes (got {levels}); make them with 'optimal_bins', or leave them out for bins of one width"
        )
    if block_size <= 2:
        return 0.0
    sigma = last / 2 / _half_range(block_size)
    return sigma**2 * _variance([(level - last / 2) / sigma for level in levels])


def predicted_variance(bits: int, block_size: int, edges: Tensor | None = None) -> float:
    """:func:`expected_variance` in units of the variance of the values: a step of the model is
    ``2 |Phi^-1(1/d)| / (2**bits - 1)`` deviations.

    The range of ``d`` normal values is longer than that on the average, by a quarter for ``d = 8`` and a twentieth for
    ``d = 1024``. Arguments and errors are those of :func:`expected_variance`.
    """
    steps = expected_variance(bits, block_size, edges)
    return steps * (2 * _half_range(block_size) / ((1 << bits) - 1)) ** 2 if block_size > 2 else 0.0


def _solve(diagonal: Sequence[float], beside: Sequence[float], right: Sequence[float]) -> list[float]:
    """The solution of a symmetric tridiagonal system."""
    pivots, sums = [diagonal[0]], [right[0]]
    for center, side, value in zip(diagonal[1:], beside, right[1:], strict=True):
        factor = side / pivots[-1]
        pivots.append(center - factor * side)
        sums.append(value - factor * sums[-1])
    found = [sums[-1] / pivots[-1]]
    for pivot, side, value in zip(pivots[-2::-1], reversed(beside), sums[-2::-1], strict=True):
        found.append((value - side * found[-1]) / pivot)
    return found[::-1]


def _optimal_edges(half_range: float, last: int) -> list[float]:
    """Edges of least variance for a standard normal value clipped to ``+-half_range``, by Newton's method.

    A bin of width w at density f adds about f w^3 / 6, so that edges of many bins follow the density f^(1/3), another
    normal one. From there no block size needs more than four iterations, all of them whole steps; from equal bins
    the Hessian is not positive definite for long blocks.
    """
    tail = _cdf(-half_range / math.sqrt(3))
    inner = [math.sqrt(3) * _NORMAL.inv_cdf(tail + (1 - 2 * tail) * i / last) for i in range(1, last)]
    moved = inner
    while max(map(abs, moved)) > 1e-9:
        edges = [-half_range, *inner, half_range]
        density, below = [_NORMAL.pdf(t) for t in edges], [_cdf(t) for t in edges]
        mass = [b - a for a, b in pairwise(below)]
        ramp = range(1, last)
        # What the bin below an edge gains as the edge rises, E[t - a], less what the one above it loses, E[b - t].
        gradient = [density[i - 1] - density[i + 1] - edges[i - 1] * mass[i - 1] - edges[i + 1] * mass[i] for i in ramp]
        curvature = [(edges[i + 1] - edges[i - 1]) * density[i] for i in ramp]
        moved = _solve(curvature, [-m for m in mass[1:-1]], gradient)
        inner = [t - step for t, step in zip(inner, moved, strict=True)]
    return [-half_range, *inner, half_range]


@cache
def _bins(bits: int, block_size: int) -> tuple[float, ...]:
    last = (1 << bits) - 1
    if block_size <= 2:
        return tuple(map(float, range(last + 1)))
    half_range = _half_range(block_size)
    edges = _optimal_edges(half_range, last)
    lower = [last / 2 * (1 + t / half_range) for t in edges[: len(edges) // 2]]
    lower = [round(level / _EDGE_UNIT) * _EDGE_UNIT for level in lower]  # then fp32 holds both halves exactly
    return (*lower, *(last - level for level in reversed(lower)))


@torch.compiler.assume_constant_result
def _constant_bins(bits: int, block_size: int) -> tuple[float, ...]:
    return _bins(bits, block_size)  # a compiler ignores caches and would trace Newton's method


def optimal_bins(bits: int, block_size: int) -> Tensor:
    r"""Edges of the bins in which stochastic rounding adds the least variance to the values of a block.

    They minimize :func:`qgnn.bins.expected_variance` (`Activation Compression of Graph Neural Networks using Block-wise
    Quantization with Improved Variance Minimization <https://arxiv.org/abs/2309.11856>`_, for 2 bits): narrower in the
    middle of the range, where a clipped normal block has most of its values. With 2 bits and blocks of 64 values they
    take 6 % of the variance, of 2048 values 23 %; with 4 bits 11 % and 36 %. Blocks of up to two values get edges one
    apart.

    Args:
        bits: Width of a code, 2 to 4.
        block_size: Values that share a range, 1 to 65536.

    Shapes:
        - **output:** float32 ``[2**bits]``, in steps, ascending from 0 to ``2**bits - 1``, symmetric, multiples of
          2**-16; a new tensor in each call, of numbers that are computed once

    Raises:
        ValueError: For other widths or block sizes.

    Example:
        >>> optimal_bins(2, 64)
        tensor([0.0000, 1.0861, 1.9139, 3.0000])
    """
    _check("optimal_bins", bits, 4, block_size, least=2)
    return torch.tensor(_constant_bins(bits, block_size), dtype=torch.float32)


def block_sizes(num_values: int) -> list[int]:
    """The block sizes to choose from: powers of two from 8 to 65536, up to the first that holds ``num_values``."""
    powers = [1 << k for k in range(SMALLEST_BLOCK.bit_length() - 1, MAX_BLOCK_SIZE.bit_length())]
    return [size for size in powers if size < 2 * max(num_values, SMALLEST_BLOCK)]


def best_block_size(
    bits: int,
    num_values: int,
    bins: str = "uniform",
    metadata_bits: int = 32,
    variances: Mapping[int, float] | None = None,
) -> int:
    r"""How many values of a tensor should share one offset and one step.

    Longer blocks store fewer offsets and steps and round more coarsely. The rule brings both to one scale, bits a
    value, by what a wider code would cost to undo the variance, and takes the :math:`G` of least

    .. math::
        J(G) = \lceil n / G \rceil (G \, b + m) / n + \log_2 Var(G) / \log_2 \rho, \qquad
        \rho = \left( \frac{2^{b+1} - 1}{2^b - 1} \right)^2

    for :math:`n` values in codes of :math:`b` bits and :math:`m` bits of metadata a block. The last block is stored
    whole, even where it is filled in part.

    Without ``variances`` the values are taken for independent normal ones of one variance
    (:func:`predicted_variance`). With 2 bits and 32 of metadata that gives 256. Heavier tails and many zeros want
    shorter blocks, rows of different sizes their own length, and bounded values the longest. Where that is to be
    expected, measure. For normal values the cost is flat: between 64 and 2048 it is within 0.16 bits a value.

    Args:
        bits: Width of a code, 1 to 8.
        num_values: Number of values of the tensor.
        bins: ``"uniform"``, or ``"optimal"`` for those of :func:`qgnn.compress.optimal_bins`.
        metadata_bits: Bits of an offset and a step.
        variances: Variance of rounding by block size, as :func:`measure_variances` finds it; the choice is among these.

    Raises:
        ValueError: For a width that there are no such bins of, for other bins, or without a block size to choose from.

    Example:
        >>> best_block_size(2, 1 << 20)
        256
    """
    _check("best_block_size", bits, 8, SMALLEST_BLOCK)
    num_values = max(num_values, 1)
    if variances is None:
        _edges_of("best_block_size", bits, bins)  # checks
        variances = {size: _predicted(bits, size, bins) for size in block_sizes(num_values)}
    if not variances:
        raise ValueError("'best_block_size' expects 'variances' of at least one block size (got none)")
    exchange_rate = 2 * math.log2(((2 << bits) - 1) / ((1 << bits) - 1))

    def cost(item: tuple[int, float]) -> float:
        size, variance = item
        stored = -(-num_values // size) * (size * bits + metadata_bits) / num_values
        return stored + math.log2(max(variance, sys.float_info.min)) / exchange_rate

    return min(variances.items(), key=cost)[0]


@cache  # 255 bins take a while, and batches of a sampler have new sizes for ever
def _predicted(bits: int, block_size: int, bins: str) -> float:
    return predicted_variance(bits, block_size, _edges_of("best_block_size", bits, bins)(block_size))


def _edges_of(owner: str, bits: int, bins: str) -> Callable[[int], Tensor | None]:
    """The edges for blocks of so many values."""
    if bins not in BINS:
        raise ValueError(f"'{owner}' expects 'bins' to be one of {BINS} (got {bins!r})")
    if bins == "uniform":
        return lambda block_size: None
    _check(owner, bits, 4, 1, least=2)
    return lambda block_size: optimal_bins(bits, block_size)


def rounding_variance(steps: Tensor, edges: Tensor | None = None) -> Tensor:
    """Variance of stochastic rounding of each of ``steps``, positions from 0 to ``2**bits - 1`` of any shape, between
    ``edges`` (``None``: whole numbers), in squared steps."""
    if edges is None:
        fraction = steps - steps.floor()
        return fraction * (1 - fraction)
    edges = edges.to(steps)
    below = torch.bucketize(steps, edges[1:-1], right=True)
    return (steps - edges[below]) * (edges[below + 1] - steps)


def block_steps(x: Tensor, bits: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Positions ``[B, G]``, in steps, of the values of the whole blocks of ``x``, and the steps ``[B, 1]``.

    Values of a block without a range have position 0, those of a block that is not finite NaN.
    """
    rows = x.detach().reshape(-1)[: x.numel() // block_size * block_size].view(-1, block_size).float()
    low, high = rows.aminmax(dim=1, keepdim=True)
    step = (high - low) / ((1 << bits) - 1)
    return ((rows - low) / torch.where(step == 0, 1, step)).clamp_(max=(1 << bits) - 1), step


@torch.no_grad()
def measure_variances(x: Tensor, bits: int, bins: str = "uniform") -> dict[int, float]:
    """Variance that stochastic rounding adds to a value of ``x``, by block size, for :func:`best_block_size`.

    It is computed from the values, in closed form, without rounding any: the mean of ``step**2 (h - a) (b - h)`` over
    up to four pieces of 65536 consecutive values. Blocks with values that are not finite are left out. Steps are not
    rounded to the type of the metadata.

    The numbers come to the host at once, which waits for the device: call it once for a tensor, not in every step.

    Args:
        x: Values in the order in which they are stored; those of a projection, where there is one.
        bits: Width of a code, 1 to 8.
        bins: ``"uniform"``, or ``"optimal"`` for those of :func:`qgnn.compress.optimal_bins`.

    Raises:
        ValueError: For a width that there are no such bins of, or for other bins.

    Example:
        >>> found = measure_variances(torch.randn(1000, 128), bits=2)
        >>> best_block_size(2, 128_000, variances=found)
    """
    _check("measure_variances", bits, 8, SMALLEST_BLOCK)
    edges = _edges_of("measure_variances", bits, bins)
    values, sizes = x.detach().reshape(-1), block_sizes(x.numel())
    if x.numel() > SAMPLE:
        pieces = values[: x.numel() // MAX_BLOCK_SIZE * MAX_BLOCK_SIZE].view(-1, MAX_BLOCK_SIZE)
        values = pieces[:: -(-len(pieces) // (SAMPLE // MAX_BLOCK_SIZE))].reshape(-1)
    found = []
    for size in sizes:
        steps, step = block_steps(values, bits, min(size, max(x.numel(), 1)))
        mean = rounding_variance(steps, edges(size)).mean(dim=1, dtype=torch.float64) * step[:, 0].double() ** 2
        found.append(mean.nanmean())
    return dict(zip(sizes, torch.stack(found).nan_to_num(nan=0.0).tolist(), strict=True))


class Fit(NamedTuple):
    """How far the values of blocks are from the clipped normal, and from a uniform distribution.

    Args:
        ks: Kolmogorov-Smirnov statistic, the largest distance of the distribution functions, against the model.
        ks_uniform: Against the uniform distribution.
        js_bits: Jensen-Shannon divergence of histograms (64 equal cells, and the two ends) against the model, 0 to 1.
        js_uniform_bits: Against the uniform distribution.
        quantiles: Those of the values at ``QUANTILES``, in shares of the range.
        model_quantiles: Those of the model.
        constant: Share of the blocks that have no range, or are not finite; they count for nothing else.
    """

    ks: float
    ks_uniform: float
    js_bits: float
    js_uniform_bits: float
    quantiles: list[float]
    model_quantiles: list[float]
    constant: float


def fit(x: Tensor, block_size: int, quantiles: Sequence[float] = QUANTILES) -> Fit:
    """Compare the values of the whole blocks of ``x``, by their place in the range of their block, with the model.

    The ends of the range count as in the model, where each has a share of ``1 / block_size``. The uniform distribution
    gets the same ends, so that only what lies between is compared. It reads the result back: not for a training step.

    Args:
        x: Values in the order in which they are stored.
        block_size: Values that share a range, 3 to 65536.
        quantiles: Probabilities of the quantiles that are returned.

    Raises:
        ValueError: For other block sizes, or if no block has a range.

    Example:
        >>> fit(torch.randn(1000, 128), 256).ks
    """
    _check("fit", 1, 1, block_size, least=1)
    if block_size <= 2:
        raise ValueError(f"'fit' expects blocks of more than two values, which are not all ends (got {block_size})")
    places, extent = block_steps(x, 1, block_size)
    places = places[((extent > 0) & extent.isfinite())[:, 0]]
    if not len(places):
        raise ValueError(f"'fit' expects a block of {block_size} values with a range (got none)")
    value, count = places.flatten().sort().values.double().unique_consecutive(return_counts=True)
    up_to, share = count.cumsum(0).double() / places.numel(), count.double() / places.numel()
    end, sigma = 1 / block_size, 0.5 / _half_range(block_size)
    cells = torch.linspace(0, 1, _CELLS + 1, dtype=torch.float64, device=value.device)
    inside = (value > 0) & (value < 1)
    cell = (value * _CELLS).long().clamp(max=_CELLS - 1)
    found = torch.zeros(_CELLS + 2, dtype=torch.float64, device=value.device)
    found.index_add_(0, torch.where(inside, cell + 1, (_CELLS + 1) * value.long()), share)

    def distances(inner: Callable[[Tensor], Tensor]) -> tuple[float, float]:
        at = torch.where(value == 1, 1.0, inner(value))
        before = torch.where(value == 0, 0.0, inner(value))
        ks = torch.maximum((up_to - at).abs(), (up_to - share - before).abs()).max()
        model = torch.nn.functional.pad(inner(cells).diff(), (1, 1), value=end)
        middle = (found + model) / 2
        js = sum((torch.xlogy(p, p / middle)).nan_to_num().sum() for p in (found, model)) / (2 * math.log(2))
        return float(ks), float(js)

    normal = distances(lambda t: torch.special.ndtr((t - 0.5) / sigma))
    uniform = distances(lambda t: end + (1 - 2 * end) * t)
    wanted = torch.tensor(quantiles, dtype=torch.float64, device=value.device)
    placed = value[torch.searchsorted(up_to, wanted).clamp(max=len(value) - 1)].tolist()
    expected = [min(max(0.5 + sigma * _NORMAL.inv_cdf(p), 0.0), 1.0) for p in quantiles]
    constant = (len(extent) - len(places)) / len(extent)
    return Fit(normal[0], uniform[0], normal[1], uniform[1], placed, expected, constant)
