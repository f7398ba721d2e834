"""Statistics that tests share: z-scores with limits that follow from how many of them are taken.

A check that takes ``n`` z-scores allows the largest one what only 1 set of ``n`` in a million exceeds by chance. Seeds
are fixed, so a check passes always or never; the limit says how surprising a failure is.
"""

import math
from collections.abc import Callable, Iterable
from statistics import NormalDist

import numpy as np
from torch import Tensor

SIGMAS = 5.0
EPS = 2.0**-24  # unit roundoff of fp32


def z_limit(num_scores: int) -> float:
    """Two-sided limit that the largest of ``num_scores`` standard normal values passes once in a million sets."""
    return -NormalDist().inv_cdf(0.5e-6 / num_scores)


def assert_plausible(z_scores: Iterable[float], what: str) -> None:
    scores = [float(z) for z in z_scores]
    worst = max(scores, key=abs)
    assert abs(worst) < z_limit(len(scores)), f"{what}: z = {worst:.1f} among {len(scores)} scores"


def uniformity_z(values: Tensor, num_cells: int) -> float:
    """Chi-square of integers in ``[0, num_cells)`` against the uniform distribution, as a standard normal score.

    The cube root of a chi-square over its degrees of freedom is normal to a good approximation (Wilson and Hilferty).
    """
    counts = np.bincount(values.flatten().numpy(), minlength=num_cells)
    expected = values.numel() / num_cells
    freedom = num_cells - 1
    chi_square = float(((counts - expected) ** 2).sum()) / expected
    return ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def pair_uniformity_z(first: Tensor, second: Tensor) -> float:
    """Chi-square of pairs of bytes against the uniform distribution over all 65,536 pairs."""
    return uniformity_z(first.int() * 256 + second, 65536)


def correlation_z(first: Tensor, second: Tensor) -> float:
    """Correlation of two samples of uniform 16-bit integers, as a standard normal score."""
    mean, variance = 65535 / 2, (65536**2 - 1) / 12
    products = (first.double() - mean) * (second.double() - mean)
    return float(products.mean()) / variance * math.sqrt(products.numel())


def rounding_bias_z(rounder: Callable[[Tensor, int], Tensor], steps: Tensor, num_draws: int) -> float:
    """How far the mean code lies from the value at the worst value, in standard errors.

    A rounder that truncates to 2**-16 of a step, with a scale just below the exact one so that it needs no clamp, is
    off by up to 2**-15: so much does not count as bias, and it lets a value on a code be missed once in 2**15 draws.

    Args:
        rounder: ``(steps [D, P], seed) -> codes [D, P]``, one draw an element.
        steps: Values in units of a step, ``[P]``.
        num_draws: Draws of each value.
    """
    granted = 2.0**-15
    mean = rounder(steps.expand(num_draws, -1), 0).double().mean(0)
    p = steps.double() - steps.double().floor()
    deviation = ((p * (1 - p) + granted) / num_draws).sqrt()
    return float((((mean - steps).abs() - granted).clamp_min(0) / deviation).max())


def nearest_bound(bits: int) -> float:
    """Largest error of rounding to nearest, in steps.

    Half a step, the truncation to 2**-16, and on codes up to qmax: the numerator (2**-22) and six fp32 roundings (of
    the numerator, its quotient, the product, 1 / qmax, the scale and the decoded value).
    """
    return 0.5 + 2.0**-16 + (2 ** (bits - 1) - 1) * (2.0**-22 + 6 * EPS)
