"""``functional.compress`` with a random projection: the mean of what comes back, of the weight gradient made of it, and
the variance against the formula."""

from functools import cache

import pytest
import torch
from torch import Tensor

from op_checks import assert_unbiased
from qgnn.functional import compress, decompress
from statistics_checks import z_limit

F, PROJECTION = 16, 4
COLUMNS = F // PROJECTION
DRAWS = 1500


def through(x: Tensor, seed: int, bits: int = 2, bins: str = "uniform") -> Tensor:
    return decompress(compress(x, bits, 16, bins, PROJECTION, seed=seed))


@cache
def draws_of_eight_bits() -> tuple[Tensor, Tensor]:
    """A matrix, and what comes back from so many seeds, ``[DRAWS, N, F]``; the error of rounding is next to nothing."""
    x = torch.randn(5, F, generator=torch.Generator().manual_seed(1)) * torch.tensor([0.1, 1, 1, 3, 10])[:, None]
    return x, torch.stack([through(x, seed, bits=8) for seed in range(DRAWS)]).double()


@pytest.mark.parametrize("bins", ["uniform", "optimal"])
def test_the_mean_over_seeds_is_the_matrix(bins: str) -> None:
    x = 3 + torch.randn(6, F)
    assert_unbiased(lambda seed: {"x": through(x, seed, bins=bins)}, {"x": x}, 500)


@pytest.mark.parametrize("shape", [(30, F), (5, 6, F)], ids=str)
def test_the_mean_of_the_weight_gradient_is_exact(shape: tuple[int, ...]) -> None:
    """What a linear layer does with its kept input."""
    x, grad = torch.rand(shape), torch.randn(*shape[:-1], 3)

    def weight_grad(x: Tensor) -> Tensor:
        return grad.flatten(0, -2).t() @ x.flatten(0, -2)

    assert_unbiased(lambda seed: {"weight": weight_grad(through(x, seed))}, {"weight": weight_grad(x)}, 500)


def test_the_variance_is_that_of_random_signs() -> None:
    r"""Of a row, :math:`E |\hat{x} - x|^2 = |x|^2 (F - 1) / R'`: element f gets the product of each other value by two
    of R' pairs of signs, whose sum has the variance :math:`x_k^2 / R'`. Rounding to 8 bits adds at most a quarter of
    the square of a step to each value; a step is at most 2 |x|_1 / sqrt(R') / 255, and as coarse as bf16 on top."""
    x, draws = draws_of_eight_bits()
    squares = (draws - x).square()
    norm = x.double().square().sum(1)
    # Blocks of 16 hold four rows each, so that the largest row may set the step of all of them.
    step = 2 * x.double().abs().sum(1).max() / COLUMNS**0.5 / 255 * (1 + 2.0**-6)
    for samples, exact, rounding in (
        (squares.sum(2), norm * (F - 1) / COLUMNS, F * step**2 / 4),
        (squares, (norm[:, None] - x.double().square()) / COLUMNS, step**2 / 4),
    ):
        deviation = samples.std(0) / DRAWS**0.5
        limit = z_limit(exact.numel())
        assert (samples.mean(0) >= exact - limit * deviation).all()
        assert (samples.mean(0) <= exact + rounding + limit * deviation).all()
    largest = norm.argmax()
    assert F * step**2 / 4 < 0.01 * norm[largest] * (F - 1) / COLUMNS  # so that the bound says something


def test_rows_are_mixed_by_signs_of_their_own() -> None:
    """Equal rows come back different, and another seed mixes them in another way."""
    x = torch.randn(1, F).expand(4, F)
    first, second = (decompress(compress(x, 8, 4, projection=PROJECTION, seed=seed)) for seed in (1, 2))
    assert (first[1:] - first[:1]).abs().amax(1).min() > 0.1
    assert (first - second).abs().max() > 0.5


def test_a_nan_spreads_over_the_rows_of_its_block_alone() -> None:
    """Projection mixes the columns of its row, and a block of 8 codes holds two rows of four."""
    x = torch.randn(8, F)
    clean = decompress(compress(x, 2, 8, projection=PROJECTION, seed=1))
    x[3, 5] = torch.nan
    values = decompress(compress(x, 2, 8, projection=PROJECTION, seed=1))
    assert values[2:4].isnan().all()
    assert torch.equal(values[[0, 1, 4, 5, 6, 7]], clean[[0, 1, 4, 5, 6, 7]])
