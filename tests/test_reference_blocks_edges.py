"""``reference.blocks_pack`` with bins of given edges: the rule against a plain Python model, round trips, bias."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from block_cases import EDGES, METADATA, SEEDS, any_edges, assert_same, codes_of
from qgnn import rng
from qgnn.reference import blocks_pack, blocks_unpack
from statistics_checks import EPS, SIGMAS, z_limit

BITS = tuple(EDGES)


def model_codes(x: Tensor, low: float, factor: np.float32, edges: list[float], random: list[int]) -> list[int]:
    """The code of each value, by whole numbers of any size."""
    fixed = [int(np.float32(edge) * 65536 + np.float32(0.5)) for edge in edges]
    codes = []
    for value, bits in zip(x.tolist(), random, strict=True):
        position = int((np.float32(value) - np.float32(low)) * factor)
        code = max(c for c in range(len(edges) - 1) if fixed[c] <= position)
        width = fixed[code + 1] - fixed[code]
        codes.append(code + (position + bits * width // 65536 >= fixed[code + 1]))
    return codes


@given(st.data(), st.sampled_from(BITS), SEEDS)
def test_codes_are_the_model(data: st.DataObject, bits: int, seed: Tensor | None) -> None:
    edges, qmax = data.draw(any_edges(bits)), (1 << bits) - 1
    x = torch.tensor(data.draw(st.lists(st.floats(-3, 3, width=32), min_size=24, max_size=24)))
    packed, low, step = blocks_pack(x, bits=bits, block_size=24, seed=seed, edges=edges)
    extent = np.float32(x.max().item()) - np.float32(x.min().item())
    factor = np.float32(qmax * (1 - 2.0**-22)) / extent * np.float32(65536) if step > 0 else np.float32(0)
    random = [32768] * 24 if seed is None else rng.random_bits16(0, 1, 24, seed)[0].tolist()
    assert codes_of(packed, bits)[0].tolist() == model_codes(x, low.item(), factor, edges.tolist(), random)
    values = blocks_unpack(packed, low, step, bits=bits, size=24, edges=edges)
    assert torch.equal(values, low + step * edges[codes_of(packed, bits)[0]])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("seed", [None, 1], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("metadata_dtype", METADATA)
def test_edges_one_apart_are_bins_of_one_width(bits: int, seed: int | None, metadata_dtype: torch.dtype) -> None:
    x = torch.randn(10007) * torch.logspace(-9, 4, 10007)
    options: dict[str, Any] = {"block_size": 64, "seed": None if seed is None else rng.make_seed(seed)}
    plain = blocks_pack(x, bits=bits, metadata_dtype=metadata_dtype, **options)
    edges = torch.arange(1 << bits).float()
    assert_same(blocks_pack(x, bits=bits, metadata_dtype=metadata_dtype, edges=edges, **options), plain)
    unpack = partial(blocks_unpack, *plain, bits=bits, size=x.numel())
    assert_same([unpack(edges=edges)], [unpack()])


@given(st.data(), st.sampled_from(BITS), st.sampled_from(METADATA), SEEDS)
def test_a_round_trip_stays_in_its_bin(
    data: st.DataObject, bits: int, metadata_dtype: torch.dtype, seed: Tensor | None
) -> None:
    """A value becomes one of the edges around it, to nearest the nearer one. What rounding in fp32 moves it by, as in
    bins of one width: 2**-16 and qmax (2**-22 + 6 EPS) steps, and the decoded sum; and 2**-16 for each edge."""
    edges, qmax = data.draw(any_edges(bits)), (1 << bits) - 1
    scale = data.draw(st.sampled_from([2.0**-20, 1.0, 2.0**12]))
    values = data.draw(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=70))
    x = torch.tensor(values) * scale
    blocks = blocks_pack(x, bits=bits, block_size=16, metadata_dtype=metadata_dtype, seed=seed, edges=edges)
    restored = blocks_unpack(*blocks, bits=bits, size=len(x), edges=edges)
    low, step = (t.double().repeat_interleave(16)[: len(x)] for t in blocks[1:])
    slack = step * (2 * 2.0**-16 + qmax * (2.0**-22 + 6 * EPS)) + EPS * (low.abs() + (qmax + 1) * step) + 1e-30
    levels = low[:, None] + step[:, None] * edges.double()
    below = torch.where(levels <= x[:, None] + slack[:, None], levels, -torch.inf).amax(1)
    above = torch.where(levels >= x[:, None] - slack[:, None], levels, torch.inf).amin(1)
    assert ((restored >= below - 2 * slack) & (restored <= above + 2 * slack)).all()
    if seed is None:
        assert ((restored - x).abs() <= (x[:, None] - levels).abs().amin(1) + 2 * slack).all()


@pytest.mark.parametrize("metadata_dtype", METADATA)
@given(st.data(), st.sampled_from([2, 4]))
def test_values_on_edges_come_back_exactly(metadata_dtype: torch.dtype, data: st.DataObject, bits: int) -> None:
    """With an offset of 0 and a step of 1 a value on an edge is that edge, to nearest, if bins are 2**-14 wide."""
    widths = torch.tensor(data.draw(st.lists(st.floats(2.0**-8, 1), min_size=2**bits - 1, max_size=2**bits - 1)))
    edges = torch.cat(
        [torch.zeros(1), widths.cumsum(0)[:-1] * ((2**bits - 1) / widths.sum()), torch.tensor([2.0**bits - 1])]
    )
    x = torch.cat([edges, torch.zeros(-len(edges) % 8)])
    blocks = blocks_pack(x, bits=bits, block_size=len(x), metadata_dtype=metadata_dtype, edges=edges)
    assert torch.equal(blocks_unpack(*blocks, bits=bits, size=len(x), edges=edges), x)


@pytest.mark.parametrize("bits", [2, 4])
def test_rounding_between_edges_is_unbiased(bits: int) -> None:
    """The mean of 20,000 draws of each of 99 values; bins may be off by 2**-16 of their width, and positions by 2**-16
    of a step and by the numerator of the rounding rule."""
    edges, qmax, draws = EDGES[bits], (1 << bits) - 1, 20000
    x = torch.cat([torch.tensor([0.0, qmax]), torch.linspace(0, qmax, 101)[1:-1], torch.zeros(3)])
    blocks = blocks_pack(x.repeat(draws), bits=bits, block_size=len(x), seed=rng.make_seed(2), edges=edges)
    values = blocks_unpack(*blocks, bits=bits, size=draws * len(x), edges=edges).view(draws, -1).double()
    granted = edges.diff().max() * 2.0**-16 + 2 * 2.0**-16 + qmax * (2.0**-22 + 8 * EPS)
    error = ((values.mean(0) - x).abs() - granted).clamp_min(0)
    assert (error <= z_limit(len(x)) * values.std(0) / draws**0.5).all()


def test_variance_is_that_of_the_bins() -> None:
    """(up - x) (x - down), which unequal bins shift from the middle to the ends; each within five standard errors."""
    edges, draws = torch.tensor([0.0, 1.25, 1.75, 3.0]), 20000
    x = torch.tensor([0.0, 3.0, 0.3, 0.9, 1.5, 1.7, 2.0, 2.9])
    blocks = blocks_pack(x.repeat(draws), bits=2, block_size=8, seed=rng.make_seed(5), edges=edges)
    values = blocks_unpack(*blocks, bits=2, size=8 * draws, edges=edges).view(draws, 8).double()[:, 2:]
    below = torch.tensor([0, 0, 1.25, 1.25, 1.75, 1.75]).double()
    above = torch.tensor([1.25, 1.25, 1.75, 1.75, 3, 3]).double()
    inner = x[2:].double()
    variance = (above - inner) * (inner - below)
    squares = (values - inner) ** 2
    assert ((squares.mean(0) - variance).abs() <= SIGMAS * squares.std(0) / draws**0.5 + 1e-4).all()
