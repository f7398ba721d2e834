"""The native ``blocks_pack`` and ``blocks_unpack`` equal the reference, bit for bit."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from qgnn.kernels.cpu import blocks as native
from torch import Tensor

from block_cases import ANY_FLOAT, BITS, EDGES, METADATA, SEEDS, any_edges, assert_same, codes_of
from qgnn import reference, rng
from statistics_checks import EPS

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def signs(t: Tensor) -> Tensor:
    return t.float().nan_to_num(0).signbit()  # a NaN's sign means nothing


def check(x: Tensor, bits: int, block_size: int, seed: Tensor | None = None, **options: object) -> tuple[Tensor, ...]:
    """Packs and unpacks ``x`` with both; the native blocks."""
    options = {"bits": bits, "block_size": block_size, "seed": seed, **options}
    blocks, expected = native.blocks_pack(x, **options), reference.blocks_pack(x, **options)
    assert_same(blocks, expected)
    assert_same(map(signs, blocks), map(signs, expected))
    restored = {"bits": bits, "size": x.numel(), "dtype": x.dtype, "edges": options.get("edges")}
    assert_same([native.blocks_unpack(*blocks, **restored)], [reference.blocks_unpack(*expected, **restored)])
    return blocks


@pytest.mark.parametrize("block_size", [8, 24, 64, 128, 1000, 1024, 4096])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("seed", [None, 7], ids=["nearest", "stochastic"])
def test_blocks_equal_reference(bits: int, block_size: int, seed: int | None) -> None:
    x = torch.randn(10007) * torch.logspace(-9, 9, 10007)
    check(x, bits, block_size, None if seed is None else rng.make_seed(seed), stream=3)


@pytest.mark.parametrize("metadata_dtype", METADATA)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_blocks_equal_reference_for_every_type(dtype: torch.dtype, metadata_dtype: torch.dtype, bits: int) -> None:
    x = (torch.randn(3001) * torch.logspace(-9, 4, 3001)).to(dtype)
    check(x, bits, 40, rng.make_seed(1), metadata_dtype=metadata_dtype)


@given(st.data(), st.sampled_from(BITS), st.sampled_from(METADATA), SEEDS)
def test_any_values(data: st.DataObject, bits: int, metadata_dtype: torch.dtype, seed: Tensor | None) -> None:
    block_size = 8 // bits * data.draw(st.integers(1, 9))
    near_one = st.floats(1, 1 + 2.0**-6, width=32)  # the range of a block is much smaller than its values
    tiny = st.floats(-(2.0**-20), 2.0**-20, width=32)  # around the smallest fp16 numbers
    values = data.draw(st.one_of([st.lists(kind, max_size=90) for kind in (ANY_FLOAT, near_one, tiny)]))
    check(torch.tensor(values), bits, block_size, seed, metadata_dtype=metadata_dtype)


@given(st.integers(0, 5000), st.sampled_from(BITS), st.integers(1, 300), SEEDS)
def test_any_size(size: int, bits: int, num_bytes: int, seed: Tensor | None) -> None:
    """Runs and hashes that start at odd places, and tails of every length."""
    check(torch.sin(torch.arange(size) * 0.7), bits, num_bytes * 8 // bits, seed)


def test_nan_of_either_sign_and_any_payload_is_seen() -> None:
    patterns = (0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF, 0x7F800000, 0xFF800000)
    for pattern in patterns:
        for position in (0, 17, 31):
            x = torch.randn(64)
            x.view(torch.int32)[position] = pattern - (1 << 32 if pattern >> 31 else 0)
            for metadata_dtype in METADATA:
                packed, low, step = check(x, 2, 32, rng.make_seed(0), metadata_dtype=metadata_dtype)
                assert low.isnan().tolist() == step.isnan().tolist() == [True, False]
                assert not packed[0].any()


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1e-45, -1e-30, 1e-30, 3.4e38, -3.4e38, 65504.0, 65519.0, -65519.0, 7e4, -7e4, math.pi]
)
@pytest.mark.parametrize("metadata_dtype", METADATA)
def test_constant_and_nearly_constant_blocks(value: float, metadata_dtype: torch.dtype) -> None:
    x = torch.full((64,), value)
    check(x, 4, 16, rng.make_seed(0), metadata_dtype=metadata_dtype)
    x[5], x[20], x[40] = 0.0, -0.0, 2 * x[40]
    check(x, 4, 16, rng.make_seed(0), metadata_dtype=metadata_dtype)


@pytest.mark.parametrize("metadata_dtype", [torch.bfloat16, torch.float16])
def test_offsets_and_steps_are_rounded_like_the_reference(metadata_dtype: torch.dtype) -> None:
    """Every number of the type as an offset, just above it and just below."""
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(metadata_dtype).float()
    numbers = numbers[numbers.isfinite()]
    low = torch.cat([numbers, numbers.nextafter(torch.tensor(9e38)), numbers.nextafter(torch.tensor(-9e38))])
    x = torch.stack([low, low + low.abs() * torch.rand(len(low))], dim=1).repeat_interleave(2, dim=1)
    check(x, 2, 4, metadata_dtype=metadata_dtype)


def test_largest_blocks(threads: int) -> None:
    x = torch.randn(150_001)
    for bits in BITS:
        check(x, bits, 65536, rng.make_seed(2))


def test_blocks_beyond_the_largest_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'block_size' up to 65536 \(got 65544\)"):
        native.blocks_pack(torch.randn(5), bits=2, block_size=65544)
    with pytest.raises(ValueError, match=r"'block_size' up to 65536 \(got 65540\)"):
        native.blocks_unpack(torch.zeros(1, 16385, dtype=torch.uint8), *torch.zeros(2, 1), bits=2, size=5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_the_number_of_threads(threads: int, dtype: torch.dtype) -> None:
    """Over several of the pieces that types other than fp32 are converted in."""
    x = torch.linspace(-3, 5, 300_003).sin().to(dtype)
    check(x, 2, 128, rng.make_seed(4))


VIEWS = {
    "every_third": lambda t: t[::3, 1],
    "transposed": lambda t: t.t(),
    "inner": lambda t: t[3:17, 5:20],
    "expanded_row": lambda t: t[:1].expand(9, -1),
    "expanded_value": lambda t: t[0, 0].expand(70),
    "scalar": lambda t: t[0, 0],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_strides(view: str, dtype: torch.dtype) -> None:
    check(VIEWS[view](torch.randn(26, 42).to(dtype)), 2, 16, rng.make_seed(3))


def test_unpack_takes_a_range_of_blocks_and_any_strides() -> None:
    x = torch.randn(9, 64)
    blocks = native.blocks_pack(x, bits=2, block_size=32)
    whole = native.blocks_unpack(*blocks, bits=2, size=x.numel()).view_as(x)
    for row in range(9):
        part = [t[2 * row : 2 * row + 2] for t in blocks]
        assert torch.equal(native.blocks_unpack(*part, bits=2, size=64), whole[row])
    odd = [t[1::2] for t in blocks]
    assert torch.equal(native.blocks_unpack(*odd, bits=2, size=9 * 32).view(9, 32), whole[:, 32:])
    spread = [t.repeat_interleave(2, dim=t.dim() - 1)[..., ::2] for t in blocks]
    assert torch.equal(native.blocks_unpack(*spread, bits=2, size=x.numel()).view_as(x), whole)


def test_nothing_outside_is_read_or_written() -> None:
    """A view in the middle of NaN, and a tail that ends in the middle of a block."""
    surrounding = torch.full((300,), math.nan)
    x = surrounding[100:177]
    x.copy_(torch.randn(77))
    blocks = check(x, 2, 16, rng.make_seed(0))
    assert blocks[1].isfinite().all()
    assert not codes_of(blocks[0], 2).flatten()[77:].any()


def test_inputs_are_left_alone() -> None:
    x, seed = torch.randn(500), rng.make_seed(1)
    before, seed_before = x.clone(), seed.clone()
    blocks = native.blocks_pack(x, bits=2, block_size=128, seed=seed, stream=2)
    copies = [t.clone() for t in blocks]
    native.blocks_unpack(*blocks, bits=2, size=500)
    assert torch.equal(x, before)
    assert torch.equal(seed, seed_before)
    assert_same(blocks, copies)


def test_seeds_and_streams_change_codes_and_repeat_them() -> None:
    x = torch.randn(500)
    packed = [
        native.blocks_pack(x, bits=2, block_size=64, seed=rng.make_seed(seed), stream=stream)[0]
        for seed, stream in [(1, 0), (1, 0), (2, 0), (1, 1)]
    ]
    assert torch.equal(packed[0], packed[1])
    assert not torch.equal(packed[0], packed[2])
    assert not torch.equal(packed[0], packed[3])


# --- bins of given edges


@pytest.mark.parametrize("block_size", [24, 1000, 65536])
@pytest.mark.parametrize("bits", EDGES)
@pytest.mark.parametrize("seed", [None, 7], ids=["nearest", "stochastic"])
def test_given_edges_equal_reference(bits: int, seed: int | None, block_size: int) -> None:
    x = torch.randn(10007) * torch.logspace(-9, 4, 10007)
    x[7000] = math.nan
    spread = EDGES[bits].repeat_interleave(2)[::2]
    check(x, bits, block_size, None if seed is None else rng.make_seed(seed), stream=3, edges=spread)


@given(st.data(), st.sampled_from(tuple(EDGES)), st.sampled_from(METADATA), SEEDS)
def test_any_edges(data: st.DataObject, bits: int, metadata_dtype: torch.dtype, seed: Tensor | None) -> None:
    values = data.draw(st.lists(ANY_FLOAT, max_size=60))
    check(torch.tensor(values), bits, 24, seed, metadata_dtype=metadata_dtype, edges=data.draw(any_edges(bits)))


# --- random projections


def signs_of(projection: int) -> dict[str, Any]:
    return {"projection": projection, "projection_seed": rng.make_seed(5), "projection_stream": 3}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("N", "F", "projection", "block_size"),
    [(70, 33, 8, 32), (9, 3, 1, 8), (70, 130, 40, 24), (0, 5, 8, 8), (5, 0, 8, 8), (3000, 5, 100, 1000)],
)
def test_projection_equals_reference(
    threads: int, dtype: torch.dtype, N: int, F: int, projection: int, block_size: int
) -> None:
    """Of small whole numbers: every sum is exact, in any order, and the scale rounds it once. The largest case takes
    several pieces of whole blocks and rows."""
    x, signs = torch.randint(-9, 10, (N, F)).to(dtype), signs_of(projection)
    options = {"bits": 2, "block_size": block_size, "seed": rng.make_seed(2), **signs}
    blocks = native.blocks_pack(x, **options)
    assert_same(blocks, reference.blocks_pack(x, **options))
    restored = {"bits": 2, "size": N * projection, "num_columns": F, "dtype": dtype, **signs}
    values, expected = native.blocks_unpack(*blocks, **restored), reference.blocks_unpack(*blocks, **restored)
    assert values.dtype == dtype
    # The sums of R' levels are added in another order, each with R' roundings; then one rounding to the type.
    largest = reference.blocks_unpack(*blocks, bits=2, size=N * projection).abs().amax() if N else torch.tensor(0.0)
    bound = 2 * (projection + 2) * EPS * projection**0.5 * float(largest)
    torch.testing.assert_close(values, expected, rtol=torch.finfo(dtype).eps if dtype.itemsize == 2 else 0, atol=bound)


def test_projection_is_within_its_bound() -> None:
    """A sum of F terms in fp32 is off by at most F EPS of their magnitudes, and its scale by 2; 8-bit codes to nearest
    by half a step."""
    x, signs = torch.randn(200, 130), signs_of(16)
    table = reference.blocks.projection_signs(130, *signs.values()).double()
    blocks = native.blocks_pack(x, bits=8, block_size=64, **signs)
    values = native.blocks_unpack(*blocks, bits=8, size=200 * 16).view(200, 16)
    steps = blocks[2].double().repeat_interleave(64).view(200, 16)
    own = reference.blocks.row_signs(0, 200, 130, signs["projection_seed"], signs["projection_stream"]).double()
    bound = 0.51 * steps + 132 * EPS * x.double().abs().sum(1, keepdim=True) / 4
    assert ((values - (x.double() * own) @ table / 4).abs() <= bound).all()
    restored = native.blocks_unpack(*blocks, bits=8, size=200 * 16, num_columns=130, **signs)
    exact = values.double() @ table.t() / 4 * own
    assert ((restored - exact).abs() <= 18 * EPS * values.double().abs().sum(1, keepdim=True)).all()


def test_rows_from_the_middle_have_the_signs_of_their_place() -> None:
    x, signs = torch.randn(26, 42), signs_of(16)
    packed, low, step = native.blocks_pack(x, bits=2, block_size=16, **signs)
    whole = native.blocks_unpack(packed, low, step, bits=2, size=26 * 16, num_columns=42, **signs)
    options = {"bits": 2, "size": 9 * 16, "num_columns": 42, **signs}
    part = native.blocks_unpack(packed[7:16], low[7:16], step[7:16], first_row=7, **options)
    assert torch.equal(part, whole[7:16])
    assert not torch.equal(native.blocks_unpack(packed[7:16], low[7:16], step[7:16], **options), part)


@pytest.mark.parametrize("view", ["transposed", "inner", "expanded_row"])
def test_projection_takes_any_strides(view: str) -> None:
    x, options = VIEWS[view](torch.randn(26, 42)), {"bits": 2, "block_size": 16, **signs_of(16)}
    assert_same(native.blocks_pack(x, **options), native.blocks_pack(x.contiguous(), **options))


def test_rows_of_a_projection_do_not_mix() -> None:
    x, options = torch.randn(9, 33), {"bits": 2, "block_size": 16, **signs_of(16)}
    clean = native.blocks_pack(x, **options)
    x[4, 7] = math.inf
    packed, low, step = native.blocks_pack(x, **options)
    assert low.isnan().nonzero().tolist() == step.isnan().nonzero().tolist() == [[4]]
    others = torch.arange(9) != 4
    assert_same([packed[others], low[others]], [clean[0][others], clean[1][others]])
