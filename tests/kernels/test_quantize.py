import pytest
import torch
from qgnn.kernels import tuning
from qgnn.kernels.memory import readable_width
from qgnn.kernels.quantize import quantize

from kernel_cases import FLOATS, LAYOUTS, SIZES, far_columns, quiet, surrounded
from qgnn import reference, rng

GRANULARITIES = {
    "row": {},
    "tensor": {"granularity": "tensor"},
    "block16": {"granularity": "block", "block_size": 16},
    "block2": {"granularity": "block", "block_size": 2},
    "block_wider": {"granularity": "block", "block_size": 128},
}


def _assert_equals_reference(x: torch.Tensor, seed: torch.Tensor | None = None, **options: object) -> torch.Tensor:
    codes, scale = quantize(x, seed=seed, **options)
    expected_codes, expected_scale = reference.quantize(x, seed=seed, **options)
    assert codes.shape == expected_codes.shape
    assert codes.dtype == torch.int8
    assert torch.equal(codes, expected_codes)
    torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0, equal_nan=True)
    return codes


@pytest.mark.parametrize("width", SIZES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("stochastic", [False, True])
def test_quantize_equals_reference(device: str, width: int, granularity: str, stochastic: bool) -> None:
    x = torch.randn(21, width, device=device) * torch.logspace(-3, 3, 21, device=device)[:, None]
    seed = rng.make_seed(7, device) if stochastic else None
    _assert_equals_reference(x, seed, stream=3, **GRANULARITIES[granularity])


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("dtype", FLOATS)
def test_quantize_equals_reference_for_every_width_of_codes_and_type(
    device: str, bits: int, dtype: torch.dtype
) -> None:
    x = torch.randn(9, 33, device=device).to(dtype)
    codes = _assert_equals_reference(x, rng.make_seed(1, device), bits=bits)
    assert codes.abs().max() == (1 << (bits - 1)) - 1  # the largest value of a row takes the largest code


def test_nearest_rounding_takes_halves_up(device: str) -> None:
    """With an absmax of 127 a code is the value itself; a step is 2^-16, and the scale is short of 1 by 2^-22."""
    half = 0.5 + 2.0**-17
    x = torch.tensor(
        [[127.0, half, 0.5 - 2.0**-15, 1.0, half - 2, -127.0, -0.5 - 2.0**-15, -half + 2.0**-14]], device=device
    )
    assert quantize(x)[0].tolist() == [[127, 1, 0, 1, -1, -127, -1, 0]]
    _assert_equals_reference(x)


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_quantize_walks_rows_that_exceed_the_registers(device: str, granularity: str) -> None:
    x = torch.randn(3, 2500, device=device)
    x[0, 2400] = 40.0  # the absmax of a row lies in its last tile
    _assert_equals_reference(x, rng.make_seed(2, device), granularity=granularity)


@pytest.mark.parametrize("width", [2500, 4096, 4097])
def test_quantize_walks_blocks_that_exceed_the_registers(device: str, width: int) -> None:
    x = torch.randn(3, width, device=device)
    x[0, 2040] = 40.0  # the absmax of a block lies in its last tile
    _assert_equals_reference(x, rng.make_seed(2, device), granularity="block", block_size=2048)


def test_quantize_of_a_block_wider_than_the_row_is_that_of_the_row(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tiles too: none beyond the end of the row."""
    groups, configure = [], tuning.quantize
    monkeypatch.setattr(tuning, "quantize", lambda group: groups.append(group) or configure(group))
    x, seed = torch.randn(5, 33, device=device), rng.make_seed(2, device)
    codes, scale = quantize(x, granularity="block", block_size=1 << 16, seed=seed)
    row_codes, row_scale = quantize(x, seed=seed)
    assert torch.equal(codes, row_codes)
    assert torch.equal(scale, row_scale[:, None])
    assert groups == [33, 33]


@pytest.mark.parametrize("block_size", [1, 5, 24])
def test_quantize_refuses_blocks_that_tiles_cannot_cover(device: str, block_size: int) -> None:
    with pytest.raises(ValueError, match=rf"'block_size' to be a power of two from 2 on \(got {block_size}\)"):
        quantize(torch.randn(3, 33, device=device), granularity="block", block_size=block_size)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("granularity", ["row", "tensor", "block16"])
def test_quantize_takes_any_strides(device: str, layout: str, granularity: str) -> None:
    x = LAYOUTS[layout](torch.randn(19, 33, device=device))
    _assert_equals_reference(x, rng.make_seed(3, device), **GRANULARITIES[granularity])


@pytest.mark.parametrize("granularity", ["row", "tensor", "block2"])
def test_quantize_finds_columns_beyond_32_bit_offsets(device: str, granularity: str) -> None:
    x = torch.randn(2, 5, device=device).half()
    _assert_equals_reference(far_columns(x), rng.make_seed(3, device), **GRANULARITIES[granularity])


def test_quantize_finds_them_in_rows_of_several_tiles(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = {**tuning.quantize(2), "BLOCK_F": 2}
    monkeypatch.setattr(tuning, "quantize", lambda group: narrow)
    x = torch.randn(2, 5, device=device).half()
    _assert_equals_reference(far_columns(x), rng.make_seed(3, device))


@pytest.mark.parametrize("width", SIZES)
def test_quantize_reads_nothing_outside_a_view(device: str, width: int) -> None:
    x = surrounded(torch.randn(11, width, device=device), float("nan"))
    _assert_equals_reference(x, rng.make_seed(4, device))


def test_quantize_takes_a_row_that_is_repeated_without_memory(device: str) -> None:
    _assert_equals_reference(torch.randn(1, 33, device=device).expand(6, 33), rng.make_seed(4, device))


def test_quantize_leaves_its_input_alone(device: str) -> None:
    x, seed = torch.randn(10, 33, device=device), rng.make_seed(5, device)
    x_before, seed_before = x.clone(), seed.clone()
    quantize(x, seed=seed, stream=2)
    assert torch.equal(x, x_before)
    assert torch.equal(seed, seed_before)


def test_rows_of_codes_start_on_vector_boundaries(device: str) -> None:
    for width, stride in [(1, 1), (7, 8), (9, 16), (32, 32), (33, 48), (130, 144)]:
        assert quantize(torch.randn(3, width, device=device))[0].stride() == (stride, 1)


def test_quantize_gives_zero_and_tiny_rows_the_scale_zero(device: str) -> None:
    x = torch.ones(5, 33, device=device)
    x[0], x[1], x[2], x[3] = 0.0, 1e-36, -1e-30, 1e-45
    codes = _assert_equals_reference(x, rng.make_seed(8, device))
    assert not codes[:4].any()
    assert not quantize(x)[1][:4].any()


@quiet
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("width", [33, 1100])
def test_quantize_keeps_poison_in_its_row(device: str, value: float, width: int) -> None:
    x = torch.randn(6, width, device=device)
    x[2, width - 2] = value
    codes, scale = quantize(x, seed=rng.make_seed(9, device))
    expected_codes, _ = reference.quantize(x, seed=rng.make_seed(9, device))
    others = [0, 1, 3, 4, 5]
    assert torch.equal(codes, expected_codes)
    assert not codes[2].any()
    assert scale[2].isnan()
    assert scale[others].isfinite().all()


@quiet
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("nan")])
def test_quantize_spreads_poison_over_a_shared_scale(device: str, value: float) -> None:
    x = torch.randn(6, 33, device=device)
    x[2, 31] = value
    assert quantize(x, granularity="tensor")[1].isnan().all()
    block_scale = quantize(x, granularity="block", block_size=16)[1]
    assert block_scale.isnan().nonzero().tolist() == [[2, 1]]


@pytest.mark.parametrize("shape", [(0, 7), (4, 0), (0, 0)])
def test_quantize_of_nothing(device: str, shape: tuple[int, int]) -> None:
    x, seed = torch.randn(shape, device=device), rng.make_seed(1, device)
    scale_shapes = {"row": shape[:1], "tensor": (1,), "block16": (shape[0], 1 if shape[1] else 0)}
    for granularity, scale_shape in scale_shapes.items():
        codes, scale = quantize(x, seed=seed, **GRANULARITIES[granularity])
        assert codes.shape == shape
        assert torch.equal(scale, torch.zeros(scale_shape, device=device))


def test_seeds_and_streams_change_codes_and_repeat_them(device: str) -> None:
    x = torch.randn(20, 33, device=device)
    codes = [
        quantize(x, seed=rng.make_seed(seed, device), stream=stream)[0] for seed, stream in [(1, 0), (2, 0), (1, 1)]
    ]
    again = quantize(x, seed=rng.make_seed(1, device))[0]
    assert torch.equal(codes[0], again)
    assert not torch.equal(codes[0], codes[1])
    assert not torch.equal(codes[0], codes[2])


def test_readable_width_stays_inside_storage_and_rows(device: str) -> None:
    buffer = torch.zeros(64, dtype=torch.int8, device=device)
    assert readable_width(buffer.as_strided((4, 10), (16, 1))) == 16
    assert readable_width(buffer.as_strided((4, 10), (16, 1), 1)) == 10  # the last row's vector would leave the storage
    assert readable_width(buffer.as_strided((4, 10), (12, 1))) == 10  # rows too close for a whole vector
    assert readable_width(buffer.as_strided((4, 10), (1, 4))) == 10
    assert readable_width(buffer.as_strided((4, 10), (0, 1))) == 10
    assert readable_width(buffer.as_strided((0, 10), (16, 1))) == 10
    assert readable_width(torch.zeros(4, 6, device=device)) == 6  # fp32: vectors of four
    assert readable_width(torch.zeros(4, 8, device=device)[:, :6]) == 8
