"""``qgnn.bins.fit`` against plain NumPy and SciPy, and on distributions that are known."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from torch import Tensor

from qgnn import bins


def model(block_size: int) -> NormalDist:
    return NormalDist(0.5, -0.5 / NormalDist().inv_cdf(1 / block_size))


def places(x: Tensor, block_size: int) -> np.ndarray:
    """Every value of the whole blocks that have a range, as a share of it, in fp32 as the kernels see it."""
    rows = x.numpy()[: len(x) // block_size * block_size].reshape(-1, block_size)
    low, extent = rows.min(1, keepdims=True), np.ptp(rows, axis=1, keepdims=True)
    kept = extent[:, 0] > 0
    return ((rows - low)[kept] / extent[kept]).astype(np.float64).ravel()


@given(st.data(), st.sampled_from([4, 16, 100]))
def test_statistics_are_those_of_numpy_and_scipy(data: st.DataObject, block_size: int) -> None:
    values = st.one_of(st.floats(-4, 4, width=32), st.sampled_from([0.0, 1.0]))
    x = torch.tensor(data.draw(st.lists(values, min_size=block_size, max_size=220)))
    found_places = places(x, block_size)
    if not len(found_places):
        with pytest.raises(ValueError, match=f"expects a block of {block_size} values with a range"):
            bins.fit(x, block_size)
        return
    fit = bins.fit(x, block_size)
    end = 1 / block_size
    laws = [model(block_size).cdf, lambda t: end + (1 - 2 * end) * t]
    for law, ks, js in zip(laws, (fit.ks, fit.ks_uniform), (fit.js_bits, fit.js_uniform_bits), strict=True):
        at = [abs((found_places <= v).mean() - (1 if v == 1 else law(v))) for v in set(found_places)]
        below = [abs((found_places < v).mean() - (0 if v == 0 else law(v))) for v in set(found_places)]
        assert ks == pytest.approx(max(*at, *below), abs=1e-9)
        inner = found_places[(found_places > 0) & (found_places < 1)]
        edges = np.linspace(0, 1, 65)
        counted = [np.sum(found_places == 0), *np.histogram(inner, edges)[0], np.sum(found_places == 1)]
        expected = [end, *np.diff([law(t) for t in edges]), end]
        assert js == pytest.approx(jensenshannon(counted, expected, base=2) ** 2, abs=1e-9)
    assert fit.constant == pytest.approx(1 - len(found_places) / (len(x) // block_size * block_size))
    ranks = np.sort(found_places)
    expected = [ranks[max(math.ceil(p * len(ranks) - 1e-9) - 1, 0)] for p in bins.QUANTILES]
    assert fit.quantiles == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("block_size", [16, 2048])
def test_a_clipped_normal_fits_and_a_uniform_one_does_not(block_size: int) -> None:
    """Blocks of inner values of the model and its two ends. Kolmogorov: 1.95 / sqrt(n) is exceeded once in a thousand
    samples; the divergence of n samples in 66 cells is about 65 / (8 n ln 2), and within five deviations below twice
    that. A share of 2 / d are ends here and there."""
    blocks = 1 << 21 - block_size.bit_length()
    law, generator = model(block_size), torch.Generator().manual_seed(0)
    u = torch.rand(blocks, block_size - 2, generator=generator, dtype=torch.float64)
    normal = 0.5 + law.stdev * torch.special.ndtri((1 + (block_size - 2) * u) / block_size)
    for inner, is_model in ((normal, True), (u, False)):
        x = torch.cat([torch.zeros(blocks, 1), inner.float(), torch.ones(blocks, 1)], dim=1)
        fit = bins.fit(x * torch.rand(blocks, 1, generator=generator), block_size)
        right, wrong = [(fit.ks, fit.js_bits), (fit.ks_uniform, fit.js_uniform_bits)][:: 1 if is_model else -1]
        assert right[0] < 1.95 / x.numel() ** 0.5
        assert right[1] < 2 * 65 / (8 * x.numel() * math.log(2))
        assert wrong[0] > 0.05
        assert wrong[1] > 0.01
        if is_model:  # a standard error of the outer quantiles is 0.1 % of the range or less
            assert fit.quantiles == pytest.approx(fit.model_quantiles, abs=5e-3)


def test_blocks_without_a_range_or_a_number_are_left_out() -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    broken = torch.zeros(2, 16)
    broken[0, 3], broken[1, 3] = math.inf, math.nan
    more = torch.cat([x, torch.full((16,), 2.0), broken.flatten()])
    assert bins.fit(more, 16) == bins.fit(x, 16)._replace(constant=3 / 7)
    with pytest.raises(ValueError, match=r"'fit' expects blocks of more than two values, .* \(got 2\)"):
        bins.fit(x, 2)
