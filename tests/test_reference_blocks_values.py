"""``reference.blocks_pack`` and ``blocks_unpack``: sizes, layouts, types, seeds, and values that hurt."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from block_cases import ANY_FLOAT, BITS, METADATA, SEEDS, assert_same, codes_of
from qgnn import rng
from qgnn.reference import _common, blocks_pack, blocks_unpack


def unpack(blocks: tuple[Tensor, ...], bits: int, size: int) -> Tensor:
    return blocks_unpack(*blocks, bits=bits, size=size)


# --- sizes


@given(st.integers(0, 300), st.sampled_from(BITS), st.integers(1, 20), st.sampled_from(METADATA), SEEDS)
def test_any_size(size: int, bits: int, num_bytes: int, dtype: torch.dtype, seed: Tensor | None) -> None:
    block_size = num_bytes * 8 // bits
    num_blocks = math.ceil(size / block_size)
    packed, low, step = blocks_pack(
        torch.linspace(-1, 5, size), bits=bits, block_size=block_size, metadata_dtype=dtype, seed=seed
    )
    assert packed.shape == (num_blocks, num_bytes)
    assert 8 * packed.nbytes == bits * num_blocks * block_size
    assert low.shape == step.shape == (num_blocks,)
    assert low.dtype == step.dtype == dtype
    assert not codes_of(packed, bits).flatten()[size:].any()
    assert unpack((packed, low, step), bits, size).shape == (size,)


@pytest.mark.parametrize("tail", [1, 5, 31])
def test_the_tail_counts_for_what_it_holds_alone(tail: int) -> None:
    x = 5 + torch.rand(32 + tail)
    _, low, step = blocks_pack(x, bits=4, block_size=32)
    assert low[1] == x[32:].min()
    assert step[1] == (x[32:].max() - x[32:].min()) * (1 / 15)


def test_blocks_unpack_one_by_one() -> None:
    """A row that is a whole number of blocks can be read alone."""
    x = torch.randn(9, 64)
    packed, low, step = blocks_pack(x, bits=2, block_size=32, seed=rng.make_seed(0))
    whole = unpack((packed, low, step), 2, x.numel()).view_as(x)
    for row in range(9):
        blocks = slice(2 * row, 2 * row + 2)
        assert torch.equal(unpack((packed[blocks], low[blocks], step[blocks]), 2, 64), whole[row])


@pytest.mark.parametrize("size", [64, 100, 333])
def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    x, seed = torch.randn(size), rng.make_seed(1)
    expected = blocks_pack(x, bits=2, block_size=16, seed=seed)
    values = unpack(expected, 2, size)
    monkeypatch.setattr(_common, "CHUNK_ELEMENTS", 48)
    chunked = blocks_pack(x, bits=2, block_size=16, seed=seed)
    assert_same(chunked, expected)
    assert torch.equal(unpack(chunked, 2, size), values)


@pytest.mark.parametrize("view", [lambda t: t[::3, 1], lambda t: t.t(), lambda t: t[:1].expand(9, -1)])
def test_values_are_taken_in_row_major_order(view: Callable[[Tensor], Tensor]) -> None:
    x = view(torch.randn(26, 42))
    pack = partial(blocks_pack, bits=4, block_size=8)
    assert_same(pack(x), pack(x.contiguous().view(-1)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_are_converted(dtype: torch.dtype) -> None:
    x = (torch.randn(77) * 3).to(dtype)
    blocks = blocks_pack(x, bits=2, block_size=16, seed=rng.make_seed(0))
    expected = blocks_pack(x.float(), bits=2, block_size=16, seed=rng.make_seed(0))
    assert_same(blocks, expected)
    values = blocks_unpack(*blocks, bits=2, size=77, dtype=dtype)
    assert torch.equal(values, unpack(blocks, 2, 77).to(dtype))


# --- seeds


def test_seeds_and_streams() -> None:
    x, seed = torch.randn(500), rng.make_seed(1)
    pack = partial(blocks_pack, x, bits=4, block_size=32)
    (packed, low, step), again = pack(seed=seed), pack(seed=seed)
    assert torch.equal(packed, again[0])
    for other in (pack(seed=rng.make_seed(2)), pack(seed=seed, stream=1)):
        assert torch.equal(torch.stack(other[1:]), torch.stack([low, step]))
        assert not torch.equal(other[0], packed)
        assert (codes_of(other[0], 4) - codes_of(packed, 4)).abs().max() == 1
    assert torch.equal(pack(seed=seed, stream=1)[0], pack(seed=seed ^ rng.stream_key(1))[0])


# --- values that hurt


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("dtype", METADATA)
def test_poison_stays_in_its_block(poison: float, dtype: torch.dtype) -> None:
    x = torch.randn(70)
    pack = partial(blocks_pack, bits=2, block_size=16, metadata_dtype=dtype, seed=rng.make_seed(0))
    clean = unpack(pack(x), 2, 70)
    for position in (0, 20, 69):
        sick_x = x.clone()
        sick_x[position] = poison
        packed, low, step = pack(sick_x)
        block = position // 16
        expected = clean.clone()
        expected[16 * block : 16 * block + 16] = math.nan
        assert not packed[block].any()
        assert low[block].isnan()
        assert step[block].isnan()
        assert_same([unpack((packed, low, step), 2, 70)], [expected])


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3e38, 1e-45, 65504.0, -7.0], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_constant_blocks_are_exact(value: float, bits: int) -> None:
    x = torch.full((40,), value)
    for seed in (None, rng.make_seed(0)):
        packed, low, step = blocks_pack(x, bits=bits, block_size=16, seed=seed)
        assert not packed.any()
        assert not step.any()
        assert torch.equal(unpack((packed, low, step), bits, 40), x)


def test_zeros_of_both_signs_are_zero() -> None:
    x = torch.tensor([0.0, -0.0, 0.0, -0.0])
    for values in (x, -x, x[:1].expand(4), x[1:2].expand(4)):
        for dtype in METADATA:
            packed, low, step = blocks_pack(values, bits=2, block_size=4, metadata_dtype=dtype)
            assert packed.item() == 0
            assert not low.signbit()
            assert not step.signbit()


@pytest.mark.parametrize("dtype", METADATA)
def test_what_the_metadata_cannot_hold_is_nan(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([[-3.4e38, 3.4e38], [0.0, largest], [-largest, 0.0], [largest, largest], [1.0, 2.0]])
    x = x.repeat_interleave(4, dim=1)
    blocks = blocks_pack(x, bits=1, block_size=8, metadata_dtype=dtype)
    assert blocks[1].isnan().tolist() == [True, False, False, False, False]
    assert torch.equal(unpack(blocks, 1, x.numel()).view_as(x)[1:], x[1:])


def test_fp16_metadata_of_large_values() -> None:
    """Offsets below the smallest fp16 number poison, those above the largest are rounded down to it."""
    x = torch.tensor([[-70000.0, -70000.0], [70000.0, 70000.0], [0.0, 70000.0]]).repeat_interleave(4, dim=1)
    _, low, step = blocks_pack(x, bits=1, block_size=8, metadata_dtype=torch.float16)
    expected = torch.tensor([[math.nan, 65504, math.nan], [math.nan, 4496, math.nan]], dtype=torch.float16)
    assert_same((low, step), expected)


@given(st.lists(st.lists(ANY_FLOAT, min_size=8, max_size=8), min_size=1, max_size=5), st.sampled_from(METADATA), SEEDS)
def test_blocks_are_independent(values: list[list[float]], dtype: torch.dtype, seed: Tensor | None) -> None:
    """What a block holds, whatever it is, changes nothing in the others."""
    x = torch.tensor(values)
    pack = partial(blocks_pack, bits=2, block_size=8, metadata_dtype=dtype, seed=seed)
    together = pack(x)
    for row in range(len(x)):
        alone = torch.zeros_like(x)
        alone[row] = x[row]
        assert_same([t[row] for t in pack(alone)], [t[row] for t in together])
    if dtype == torch.float32:
        assert torch.equal(together[1].isfinite(), (x.amax(1) - x.amin(1)).isfinite())


def test_inputs_are_left_alone() -> None:
    x, seed = torch.randn(50), rng.make_seed(1)
    before, seed_before = x.clone(), seed.clone()
    blocks = blocks_pack(x, bits=2, block_size=8, seed=seed, stream=2)
    copies = [t.clone() for t in blocks]
    unpack(blocks, 2, 50)
    assert torch.equal(x, before)
    assert torch.equal(seed, seed_before)
    assert_same(blocks, copies)


def test_every_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """With allocations full of 255 and NaN nothing changes."""
    x, empty = torch.randn(77), torch.empty
    expected = blocks_pack(x, bits=2, block_size=16)
    values = unpack(expected, 2, 77)

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        t = empty(*args, **kwargs)
        return t.fill_(math.nan if t.is_floating_point() else 255)

    monkeypatch.setattr(torch, "empty", poisoned)
    blocks = blocks_pack(x, bits=2, block_size=16)
    assert_same(blocks, expected)
    assert torch.equal(unpack(blocks, 2, 77), values)
