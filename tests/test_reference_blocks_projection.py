"""``reference.blocks_pack`` of a random projection: the signs, the products, and the mean of what is restored."""

import pytest
import torch

from block_cases import assert_same
from qgnn import rng
from qgnn.reference import blocks_pack, blocks_unpack
from qgnn.reference.blocks import projection_signs, row_signs
from statistics_checks import EPS, z_limit


@pytest.mark.parametrize("projection", [1, 8, 32, 33, 100])
def test_signs_are_the_bits_of_the_hash(projection: int) -> None:
    seed = rng.make_seed(3)
    words = -(-projection // 32)
    signs = projection_signs(7, projection, seed, 5)
    for f in range(7):
        for r in range(projection):
            word = rng.counter_hash(torch.tensor([f * words + r // 32]), seed ^ rng.stream_key(5)).item()
            assert signs[f, r] == (-1 if word >> (r % 32) & 1 else 1)


def test_signs_of_rows_are_the_bits_of_the_hash_behind_those_of_the_matrix() -> None:
    seed = rng.make_seed(3)
    own = row_signs(4, 3, 70, seed, 5)
    for n in range(3):
        for f in range(70):
            counter = (1 << 40) + (4 + n) * 4 + f // 32  # three words, in steps of a power of two
            word = rng.counter_hash(torch.tensor([counter]), seed ^ rng.stream_key(5)).item()
            assert own[n, f] == (-1 if word >> (f % 32) & 1 else 1)


def test_errors_of_rows_are_independent() -> None:
    """The error of a sum over N rows grows as their root: with the same signs in all of them it would grow as N.

    Of rows x that are equal, the mean over rows of what is restored has a variance of |x|^2 (F - 1) / (R' F) / N an
    element, over F elements; its relative deviation over 40 seeds is sqrt(2 / (40 * 32)) = 0.04, as errors of the
    elements of a seed are nearly independent.
    """
    N, F, projection = 400, 32, 4
    row, distances = torch.randn(F), []
    for number in range(40):
        options = {"projection": projection, "projection_seed": rng.make_seed(number), "projection_stream": 1}
        blocks = blocks_pack(row.expand(N, -1), bits=8, block_size=8, seed=rng.make_seed(number), **options)
        restored = blocks_unpack(*blocks, bits=8, size=N * projection, num_columns=F, **options)
        distances.append(float((restored.double().mean(0) - row).square().sum()))
    expected = float(row.square().sum()) * (F - 1) / projection / N
    assert sum(distances) / len(distances) == pytest.approx(expected, rel=5 * 0.04)


def test_signs_are_balanced_and_rows_uncorrelated() -> None:
    """A sum of n independent signs has variance n: of all, of each row, and of the products of two rows."""
    signs = projection_signs(200, 96, rng.make_seed(1), 0).double()
    assert abs(signs.sum()) < z_limit(1) * signs.numel() ** 0.5
    products = signs @ signs.t()
    assert torch.equal(products.diagonal(), torch.full((200,), 96.0, dtype=torch.float64))
    assert products.fill_diagonal_(0).abs().max() < z_limit(200 * 199 // 2) * 96**0.5
    assert signs.sum(1).abs().max() < z_limit(200) * 96**0.5
    other = projection_signs(200, 96, rng.make_seed(1), 1).double()
    assert abs((signs * other).sum()) < z_limit(1) * signs.numel() ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_projected_matrix_is_packed_and_multiplied_back(dtype: torch.dtype) -> None:
    """Against float64; a sum of F products by signs is off by at most F EPS of their magnitudes, its scale by 2."""
    N, F, projection = 9, 33, 12
    seed, x = rng.make_seed(7), torch.randn(9, 33).to(dtype)
    signs = projection_signs(F, projection, seed, 2).double()
    options = {"projection": projection, "projection_seed": seed, "projection_stream": 2}
    blocks = blocks_pack(x, bits=8, block_size=24, **options)
    own = row_signs(0, N, F, seed, 2).double()
    exact = (x.double() * own) @ signs / projection**0.5
    steps = blocks[2].double().repeat_interleave(24)[: N * projection].view(N, projection)
    values = blocks_unpack(*blocks, bits=8, size=N * projection)
    bound = 0.51 * steps + (F + 4) * EPS * x.double().abs().sum(1, keepdim=True) / projection**0.5
    assert ((values.view(N, projection) - exact).abs() <= bound).all()
    restored = blocks_unpack(*blocks, bits=8, size=N * projection, num_columns=F, **options)
    product = values.view(N, projection).double() @ signs.t() / projection**0.5 * own
    bound = (projection + 4) * EPS * values.view(N, projection).double().abs().sum(1, keepdim=True)
    assert restored.shape == (N, F)
    assert ((restored - product).abs() <= bound).all()
    assert blocks_unpack(*blocks, bits=8, size=N * projection, num_columns=F, dtype=dtype, **options).dtype == dtype


def test_the_mean_over_seeds_is_the_matrix() -> None:
    """Over the signs and the rounding, of 500 seeds."""
    x, draws = torch.randn(3, 10), []
    for number in range(500):
        options = {"projection": 8, "projection_seed": rng.make_seed(number), "projection_stream": 1}
        blocks = blocks_pack(x, bits=2, block_size=8, seed=rng.make_seed(number), **options)
        draws.append(blocks_unpack(*blocks, bits=2, size=24, num_columns=10, **options))
    samples = torch.stack(draws).double()
    assert ((samples.mean(0) - x).abs() <= z_limit(30) * samples.std(0) / len(draws) ** 0.5 + 2.0**-14).all()
    assert samples.std(0).min() > 0.1


def test_nothing_and_a_row_with_a_nan() -> None:
    options = {"projection": 8, "projection_seed": rng.make_seed(0)}
    blocks = blocks_pack(torch.randn(0, 5), bits=2, block_size=8, **options)
    assert blocks[0].shape == (0, 2)
    assert blocks_unpack(*blocks, bits=2, size=0, num_columns=5, **options).shape == (0, 5)
    x = torch.randn(4, 5)
    clean = blocks_pack(x, bits=2, block_size=8, **options)
    x[2, 1] = torch.nan
    packed, low, step = blocks_pack(x, bits=2, block_size=8, **options)
    assert low.isnan().tolist() == step.isnan().tolist() == [False, False, True, False]
    assert_same([packed[:2], low[:2]], [clean[0][:2], clean[1][:2]])
