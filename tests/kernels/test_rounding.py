import pytest
import torch
import triton
import triton.language as tl
from qgnn.kernels import rounding

from kernel_cases import SIZES
from qgnn import rng
from qgnn.rounding import absmax_scale

SEED = 0x1234567890ABCDEF  # taken as already whitened

KNOWN_HASHES = {
    0: 0x4A8A17E2,
    1: 0xAE69E16A,
    63: 0xA89D7CB3,
    64: 0xE87CF479,
    0xFFFFFFFF: 0xFDE52488,
    0x100000000: 0x4F02B414,
    0x123456789: 0xD9714318,
}


def _seed(device: str, value: int = SEED) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64, device=device)


@triton.jit(do_not_specialize=["stream"])
def _hash_kernel(out_ptr, pair_ptr, seed_ptr, stream, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    pair = tl.load(pair_ptr + offs)
    k0, k1 = rounding.hash_keys(rounding.load_seed(seed_ptr, stream), (pair >> 32).to(tl.uint32))
    tl.store(out_ptr + offs, rounding.counter_hash(pair.to(tl.uint32), k0, k1).to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["stream"])
def _bits_kernel(out_ptr, row_ptr, seed_ptr, stream, first_col, F: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    row = tl.load(row_ptr + tl.arange(0, R))
    bits = rounding.random_bits16(rounding.load_seed(seed_ptr, stream), row, first_col, F, R, C)
    tl.store(out_ptr + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :], bits)


@triton.jit
def _scale_kernel(scale_ptr, inv_ptr, absmax_ptr, QMAX: tl.constexpr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    scale, inv = rounding.absmax_scale(tl.load(absmax_ptr + offs), QMAX)
    tl.store(scale_ptr + offs, scale)
    tl.store(inv_ptr + offs, inv)


@triton.jit
def _to_float_kernel(half_ptr, single_ptr, q_ptr):
    offs = tl.arange(0, 256)
    q = tl.load(q_ptr + offs)
    tl.store(half_ptr + offs, rounding.int8_to_fp16(q))
    tl.store(single_ptr + offs, rounding.to_fp32(q))


def _hash(pairs: list[int], device: str, stream: int = 0, seed: int = SEED) -> torch.Tensor:
    pair = torch.tensor(pairs, dtype=torch.int64, device=device)
    out = torch.empty(len(pairs), dtype=torch.int32, device=device)
    _hash_kernel[(1,)](out, pair, _seed(device, seed), stream, len(pairs))
    return out


def test_hash_has_known_answers(device: str) -> None:
    pairs = [*KNOWN_HASHES, 0]
    assert [h & 0xFFFFFFFF for h in _hash(pairs, device).tolist()] == [KNOWN_HASHES[pair] for pair in pairs]


@pytest.mark.parametrize("stream", [0, 1, 2, 5])
@pytest.mark.parametrize("seed", [SEED, -1, 0, -(2**63)])
def test_hash_equals_its_torch_twin(device: str, stream: int, seed: int) -> None:
    pairs = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 + 12345, 2**62 + 7]
    expected = rng.counter_hash(torch.tensor(pairs, device=device), _seed(device, seed) ^ rng.stream_key(stream))
    assert torch.equal(_hash(pairs, device, stream, seed), expected)


@pytest.mark.parametrize("width", SIZES)
@pytest.mark.parametrize("first_row", [0, 2**31 - 3, 2**32 - 2, 2**33 + 5, 2**40])
def test_random_bits_equal_their_torch_twin_beyond_32_bit_counters(device: str, width: int, first_row: int) -> None:
    num_rows, columns = 4, max(2, triton.next_power_of_2(width))
    rows = torch.arange(first_row, first_row + num_rows, device=device)
    out = torch.empty((num_rows, columns), dtype=torch.int32, device=device)
    _run_bits(out, rows, 0, width)
    assert torch.equal(out[:, :width], rng.random_bits16(first_row, num_rows, width, _seed(device)))


def _run_bits(out: torch.Tensor, rows: torch.Tensor, first_col: int, width: int) -> None:
    _bits_kernel[(1,)](out, rows, _seed(out.device.type), 0, first_col, width, out.shape[0], out.shape[1])


def test_random_bits_of_a_tile_are_those_of_the_whole_row(device: str) -> None:
    rows = torch.arange(3, 5, device=device)
    out = torch.empty((2, 16), dtype=torch.int32, device=device)
    _run_bits(out, rows, 32, 130)
    assert torch.equal(out, rng.random_bits16(3, 2, 130, _seed(device))[:, 32:48])


@pytest.mark.parametrize("bits", range(2, 9))
def test_scales_equal_their_torch_twin(device: str, bits: int) -> None:
    inf, nan = float("inf"), float("nan")
    special = [0.0, 1e-45, 1e-36, 1e-30, 1.1e-30, 1.0, 126.99997, 3.4e38, inf, nan, -nan]
    absmax = torch.tensor([*special, *torch.logspace(-29, 38, 53).tolist()], device=device)
    assert absmax.signbit().sum() == 1  # a NaN whose bits are those of a negative integer
    scale, inv = torch.empty_like(absmax), torch.empty_like(absmax)
    _scale_kernel[(1,)](scale, inv, absmax, (1 << (bits - 1)) - 1, absmax.numel())
    expected_scale, expected_inv = absmax_scale(absmax, bits)
    torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(inv, expected_inv)


def test_codes_become_floats_exactly(device: str) -> None:
    q = torch.arange(-128, 128, dtype=torch.int8, device=device)
    half, single = (torch.empty(256, dtype=dtype, device=device) for dtype in (torch.float16, torch.float32))
    _to_float_kernel[(1,)](half, single, q)
    assert torch.equal(half, q.half())
    assert torch.equal(single, q.float())
