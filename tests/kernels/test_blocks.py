"""The Triton kernels of packed blocks equal the reference in every bit."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qgnn.kernels import tuning
from qgnn.kernels.blocks import blocks_pack, blocks_unpack
from torch import Tensor

from block_cases import ANY_FLOAT, BITS, EDGES, METADATA, SEEDS, any_edges, assert_same, codes_of
from kernel_cases import FLOATS, quiet
from qgnn import reference, rng

pytestmark = quiet


def check(x: Tensor, bits: int, block_size: int, **options: Any) -> tuple[Tensor, ...]:
    """Packs and unpacks ``x`` with both; the blocks."""
    options = {"bits": bits, "block_size": block_size, **options}
    blocks, expected = blocks_pack(x, **options), reference.blocks_pack(x, **options)
    assert_same(blocks, expected)
    restored = {"bits": bits, "size": x.numel(), "dtype": x.dtype, "edges": options.get("edges")}
    values, expected_values = blocks_unpack(*blocks, **restored), reference.blocks_unpack(*expected, **restored)
    exact = x.is_cuda or x.dtype != torch.bfloat16  # the interpreter cuts off what does not fit bf16
    torch.testing.assert_close(values, expected_values, rtol=0 if exact else 2.0**-7, atol=0, equal_nan=True)
    return blocks


def wide(size: int, device: str) -> Tensor:
    """Normal values over many orders of magnitude."""
    return torch.randn(size, device=device) * torch.logspace(-9, 4, size, device=device)


@pytest.mark.parametrize("block_size", [8, 24, 128, 1000])  # bytes that are a power of two, or odd, or neither
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_blocks_equal_reference(device: str, bits: int, block_size: int, stochastic: bool) -> None:
    seed = rng.make_seed(7, device) if stochastic else None
    check(wide(5003, device), bits, block_size, seed=seed, stream=3)


@pytest.mark.parametrize("metadata_dtype", METADATA)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [1, 4])
def test_blocks_equal_reference_for_every_type(
    device: str, dtype: torch.dtype, metadata_dtype: torch.dtype, bits: int
) -> None:
    check(wide(1501, device).to(dtype), bits, 40, seed=rng.make_seed(1, device), metadata_dtype=metadata_dtype)


@pytest.mark.parametrize("bits", EDGES)
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("block_size", [24, 128])
def test_given_edges_equal_reference(device: str, bits: int, stochastic: bool, block_size: int) -> None:
    seed = rng.make_seed(5, device) if stochastic else None
    check(wide(2003, device), bits, block_size, seed=seed, edges=EDGES[bits].to(device))


@pytest.mark.parametrize("size", [40_003, 65536])
@pytest.mark.parametrize("bits", [1, 2, 8])
def test_blocks_longer_than_a_tile(device: str, size: int, bits: int) -> None:
    """A tile of 2 to 16 KiB walks a block of the largest size, and 40,000 values, in part beyond its last byte."""
    x = torch.randn(size, device=device)
    x[size - 5], x[3] = 9.0, -8.0  # the extrema lie in the first tile and in the last
    for block_size in (40_000, 65536):
        assert block_size > tuning.blocks_pack(block_size, bits, 4)["BLOCK_R"] * 8 // bits
        check(x, bits, block_size, seed=rng.make_seed(2, device))


@settings(max_examples=40)
@given(st.data(), st.sampled_from(BITS), st.sampled_from(METADATA), SEEDS)
def test_any_values(data: st.DataObject, bits: int, metadata_dtype: torch.dtype, seed: Tensor | None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    block_size = 8 // bits * data.draw(st.integers(1, 9))
    largest = torch.finfo(torch.float32).max
    special = st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1e-30, largest, -largest, 65504.0, -65519.0, math.inf])
    tiny = st.floats(-(2.0**-20), 2.0**-20, width=32)
    values = data.draw(st.one_of([st.lists(kind, max_size=60) for kind in (ANY_FLOAT, special, tiny)]))
    edges = data.draw(any_edges(bits)).to(device) if bits <= 4 and data.draw(st.booleans()) else None
    x, seed = torch.tensor(values, device=device), None if seed is None else seed.to(device)
    check(x, bits, block_size, seed=seed, metadata_dtype=metadata_dtype, edges=edges)


@pytest.mark.parametrize("metadata_dtype", [torch.bfloat16, torch.float16])
def test_offsets_and_steps_are_rounded_like_the_reference(device: str, metadata_dtype: torch.dtype) -> None:
    """Every sixteenth number of the type as an offset, just above it and just below."""
    numbers = torch.arange(0, 65536, 16, dtype=torch.int32).to(torch.int16).view(metadata_dtype).float()
    numbers = numbers[numbers.isfinite()]
    low = torch.cat([numbers, numbers.nextafter(torch.tensor(9e38)), numbers.nextafter(torch.tensor(-9e38))])
    x = torch.stack([low, low + low.abs() * torch.rand(len(low))], dim=1).repeat_interleave(2, dim=1)
    check(x.to(device), 2, 4, metadata_dtype=metadata_dtype)


def test_nan_of_either_sign_and_any_payload_is_seen(device: str) -> None:
    patterns = (0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000)
    for metadata_dtype in METADATA:
        x = torch.randn(len(patterns) + 1, 32, device=device)
        for row, pattern in enumerate(patterns):
            x.view(torch.int32)[row, 17] = pattern - (1 << 32 if pattern >> 31 else 0)
        packed, low, step = check(x, 2, 32, seed=rng.make_seed(0, device), metadata_dtype=metadata_dtype)
        assert low.isnan().tolist() == step.isnan().tolist() == [True] * len(patterns) + [False]
        assert not packed[:-1].any()


VIEWS = {
    "every_third": lambda t: t[::3, 1],
    "transposed": lambda t: t.t(),
    "expanded_row": lambda t: t[:1].expand(9, -1),
    "scalar": lambda t: t[0, 0],
    "nothing": lambda t: t[:0],
}


@pytest.mark.parametrize("view", VIEWS)
def test_any_strides(device: str, view: str) -> None:
    check(VIEWS[view](torch.randn(26, 42, device=device)), 2, 16, seed=rng.make_seed(3, device))


def test_nothing_outside_is_read(device: str) -> None:
    """A view in the middle of NaN, and a tail that ends in the middle of a block."""
    surrounding = torch.full((300,), math.nan, device=device)
    x = surrounding[101:178]
    x.copy_(torch.randn(77))
    packed, low, _ = check(x, 2, 16, seed=rng.make_seed(0, device))
    assert low.isfinite().all()
    assert not codes_of(packed.cpu(), 2).flatten()[77:].any()


def test_unpack_takes_a_range_of_blocks_and_any_strides(device: str) -> None:
    x = torch.randn(9, 64, device=device)
    blocks = blocks_pack(x, bits=2, block_size=32)
    whole = blocks_unpack(*blocks, bits=2, size=x.numel()).view_as(x)
    part = [t[6:8] for t in blocks]
    assert torch.equal(blocks_unpack(*part, bits=2, size=64), whole[3])
    odd = [t[1::2] for t in blocks]
    assert torch.equal(blocks_unpack(*odd, bits=2, size=9 * 32).view(9, 32), whole[:, 32:])


@pytest.mark.parametrize("bits", [2, 8])
def test_random_bits_of_blocks_beyond_32_bits(device: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tail is a launch of its own, whose first block has any number: here one whose pairs exceed 2**32."""
    from qgnn.kernels import blocks as module

    launch, first = module._blocks_pack_kernel, 2**32 + 5

    class FarAway:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda **kwargs: launch[grid](**kwargs | {"first_block": first})

    monkeypatch.setattr(module, "_blocks_pack_kernel", FarAway())
    x, seed = torch.randn(64, device=device), rng.make_seed(3, device)
    packed, low, _ = blocks_pack(x, bits=bits, block_size=64, seed=seed)
    random = rng.random_bits16(first, 1, 64, seed)[0]
    factor = torch.tensor(((1 << bits) - 1) * (1 - 2.0**-22)).to(device) / (x.max() - x.min()) * 65536
    expected = ((x - low) * factor).int() + random >> 16
    assert codes_of(packed.cpu(), bits)[0].tolist() == expected.tolist()


def test_seeds_and_streams_change_codes_and_repeat_them(device: str) -> None:
    x = torch.randn(500, device=device)
    packed = [
        blocks_pack(x, bits=2, block_size=64, seed=rng.make_seed(seed, device), stream=stream)[0]
        for seed, stream in [(1, 0), (1, 0), (2, 0), (1, 1)]
    ]
    assert torch.equal(packed[0], packed[1])
    assert not torch.equal(packed[0], packed[2])
    assert not torch.equal(packed[0], packed[3])
