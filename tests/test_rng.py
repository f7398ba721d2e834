"""Seeds and the counter hash: known answers, an independent implementation, and statistics."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qgnn import QConfig, functional, rng
from qgnn.formats import Blocks
from qgnn.rng import make_rounding_seed, make_seed, rounding_from
from statistics_checks import assert_plausible, correlation_z, pair_uniformity_z, uniformity_z, z_limit

M32, M64 = 2**32 - 1, 2**64 - 1
SEED = 0x1234567890ABCDEF
KNOWN_HASHES = {
    0: 0x4A8A17E2,
    1: 0xAE69E16A,
    63: 0xA89D7CB3,
    64: 0xE87CF479,
    2**32 - 1: 0xFDE52488,
    2**32: 0x4F02B414,
    0x123456789: 0xD9714318,
}
WIDTHS = (1, 2, 3, 7, 32, 33, 130)
U64 = st.integers(0, M64)


def signed(value: int) -> int:
    return value - 2**64 if value >> 63 else value


def int_hash(pair: int, seed: int) -> int:
    """The hash over Python integers, from its definition."""
    low, high = pair & M32, pair >> 32
    k0 = (seed + high * 0x9E3779B9) & M32
    k1 = (seed >> 32) ^ (high * 0x85EBCA6B & M32)
    h = (low * 0x9E3779B9 + k0) & M32
    h = (h ^ h >> 16) * 0x7FEB352D & M32
    h = (h ^ h >> 15 ^ k1) * 0x846CA68B & M32
    return h ^ h >> 16


def torch_hash(pairs: list[int], seed: int) -> list[int]:
    counters = torch.tensor([signed(p) for p in pairs])
    return [h & M32 for h in rng.counter_hash(counters, torch.tensor([signed(seed)])).tolist()]


# --- the hash


@pytest.mark.parametrize(("pair", "expected"), KNOWN_HASHES.items(), ids=hex)
def test_counter_hash_known_answer(pair: int, expected: int) -> None:
    assert torch_hash([pair], SEED) == [expected]
    assert int_hash(pair, SEED) == expected


@given(st.lists(U64, min_size=1, max_size=20), U64)
def test_counter_hash_equals_integer_arithmetic(pairs: list[int], seed: int) -> None:
    assert torch_hash(pairs, seed) == [int_hash(p, seed) for p in pairs]


def test_counter_hash_keeps_shape_and_type() -> None:
    hashes = rng.counter_hash(torch.arange(24).reshape(2, 3, 4), torch.tensor([SEED]))
    assert hashes.shape == (2, 3, 4)
    assert hashes.dtype == torch.int32
    flat = rng.counter_hash(torch.arange(24), torch.tensor([SEED]))
    assert torch.equal(hashes.flatten(), flat)
    assert rng.counter_hash(torch.empty(0, dtype=torch.int64), torch.tensor([SEED])).shape == (0,)


# --- bits of matrix elements


def element_bits(row: int, col: int, width: int, seed: int) -> int:
    pairs_per_row = 1
    while 2 * pairs_per_row < width:
        pairs_per_row *= 2
    h = int_hash((row * pairs_per_row + col // 2) & M64, seed)
    return h >> 16 if col % 2 else h & 0xFFFF


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("first_row", [0, 5, 2**26 - 1, 2**31 - 1, 2**32 - 2, 2**40 + 3])
def test_random_bits16_equal_the_hash_of_each_position(width: int, first_row: int) -> None:
    """The last first rows put the counter far beyond 2**32, and some blocks of rows straddle that border."""
    bits = rng.random_bits16(first_row, 3, width, torch.tensor([SEED]))
    assert bits.dtype == torch.int32
    expected = [[element_bits(first_row + r, c, width, SEED) for c in range(width)] for r in range(3)]
    assert bits.tolist() == expected


@given(st.integers(0, 2**50), st.integers(0, 4), st.integers(0, 70), U64)
def test_random_bits16_any_shape(first_row: int, num_rows: int, width: int, seed: int) -> None:
    bits = rng.random_bits16(first_row, num_rows, width, torch.tensor([signed(seed)]))
    assert bits.shape == (num_rows, width)
    expected = [[element_bits(first_row + r, c, width, seed) for c in range(width)] for r in range(num_rows)]
    assert bits.flatten().tolist() == [value for row in expected for value in row]


@pytest.mark.parametrize("width", WIDTHS)
def test_random_bits16_of_a_chunk_are_those_of_the_whole(width: int) -> None:
    seed = torch.tensor([SEED])
    whole = rng.random_bits16(0, 50, width, seed)
    assert torch.equal(rng.random_bits16(17, 20, width, seed), whole[17:37])


# --- seeds


def test_splitmix64_known_answers() -> None:
    """The published first outputs of the generator started at 0 and at 1234567; step n of it starts at n increments."""
    increment = 0x9E3779B97F4A7C15
    started_at_zero = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [rng.splitmix64(n * increment & M64) for n in range(3)] == started_at_zero
    started_at_1234567 = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [rng.splitmix64((1234567 + n * increment) & M64) for n in range(3)] == started_at_1234567


@given(U64, U64)
def test_splitmix64_is_one_to_one(a: int, b: int) -> None:
    assert 0 <= rng.splitmix64(a) <= M64
    assert (rng.splitmix64(a) == rng.splitmix64(b)) == (a == b)


@pytest.mark.parametrize("number", [0, 1, -1, 2**63, 2**64 - 1, 12345678901234567890])
def test_make_seed_whitens_an_int(number: int) -> None:
    seed = rng.make_seed(number)
    assert (seed.dtype, seed.shape) == (torch.int64, (1,))
    assert seed.item() == signed(rng.splitmix64(number & M64))


def test_make_seed_of_an_int_copies_nothing_from_the_host() -> None:
    """A copy to a GPU would wait for it. Another device stands for one: its tensors have no values."""
    called = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func)
            return func(*args, **(kwargs or {}))

    with Noted():
        rng.make_seed(3, "meta")
    assert called == [torch.ops.aten.full.default]


def test_make_seed_none_follows_torch_manual_seed() -> None:
    torch.manual_seed(7)
    first, second = rng.make_seed(), rng.make_seed(None)
    assert (first.dtype, first.shape) == (torch.int64, (1,))
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(rng.make_seed(), first)
    assert torch.equal(rng.make_seed(), second)
    torch.manual_seed(8)
    assert not torch.equal(rng.make_seed(), first)


def test_make_seed_none_draws_all_64_bits() -> None:
    draws = torch.cat([rng.make_seed() for _ in range(200)])
    ones = torch.stack([(draws >> bit & 1).double().mean() for bit in range(64)])
    assert_plausible(((ones - 0.5) / (0.25 / 200) ** 0.5).tolist(), "ones in each bit of drawn seeds")


def test_make_seed_takes_a_tensor_as_it_is() -> None:
    given_seed = torch.tensor(-5)
    seed = rng.make_seed(given_seed)
    assert seed.shape == (1,)
    assert seed.item() == -5
    made = rng.make_seed(3)
    assert rng.make_seed(made).data_ptr() == made.data_ptr()


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (True, r"'seed' expects an int, an int64 tensor or None \(got bool\)"),
        (1.5, r"'seed' expects an int, an int64 tensor or None \(got float\)"),
        ("7", r"\(got str\)"),
        (torch.tensor([1, 2]), r"one element \(got torch.int64 of shape \(2,\)\); make one with"),
        (torch.tensor([1.0]), r"'seed' expects an int64 tensor .*\(got torch.float32"),
        (torch.tensor([1], dtype=torch.int32), r"\(got torch.int32 of shape \(1,\)\)"),
        (torch.empty(0, dtype=torch.int64), r"of shape \(0,\)"),
    ],
    ids=["bool", "float", "str", "two", "float_tensor", "int32", "empty"],
)
def test_make_seed_rejects(seed: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        rng.make_seed(seed)


def test_stream_keys() -> None:
    assert rng.stream_key(0) == 0
    assert rng.stream_key(1) == 0x5BF0363585EBCA6B
    assert rng.stream_key(2) == signed(2 * 0x5BF0363585EBCA6B)
    keys = [rng.stream_key(n) for n in range(64)]
    assert len(set(keys)) == 64
    assert all(-(2**63) <= key < 2**63 for key in keys)


# --- statistics


NUM_SAMPLES = 1 << 20  # 16 in each of 65,536 cells
NUM_SEEDS = 6


@pytest.fixture(scope="module")
def whitened() -> list[Tensor]:
    """Hashes of the first counters under the user's seeds 0, 1, ..."""
    return [hashes_of(rng.make_seed(number)) for number in range(NUM_SEEDS)]


def hashes_of(seed: Tensor, first: int = 0) -> Tensor:
    return rng.counter_hash(torch.arange(first, first + NUM_SAMPLES), seed)


def octets(h: Tensor) -> Tensor:
    """The four bytes of each hash, lowest first: [4, NUM_SAMPLES]."""
    return h.view(torch.uint8).view(-1, 4).t()


def halves(h: Tensor) -> Tensor:
    """The bits of the even and of the odd column: [2, NUM_SAMPLES]."""
    return h.view(torch.uint16).to(torch.int32).view(-1, 2).t()


def cross_seed_scores(hashes: list[Tensor]) -> list[float]:
    """The third byte: the one that shows correlated seeds most clearly."""
    return [pair_uniformity_z(octets(a)[2], octets(b)[2]) for a, b in itertools.combinations(hashes, 2)]


def test_hash_bytes_are_uniform(whitened: list[Tensor]) -> None:
    assert_plausible([uniformity_z(byte, 256) for h in whitened for byte in octets(h)], "bytes of the hash")


def test_hash_halves_are_uniform(whitened: list[Tensor]) -> None:
    assert_plausible([uniformity_z(half, 65536) for h in whitened for half in halves(h)], "16-bit halves")


@pytest.mark.parametrize("first", [2**31 - NUM_SAMPLES // 2, 2**32 - NUM_SAMPLES // 2, 5 * 2**40])
def test_hash_is_uniform_far_out(first: int) -> None:
    hashes = [hashes_of(rng.make_seed(number), first) for number in range(2)]
    assert_plausible([uniformity_z(half, 65536) for h in hashes for half in halves(h)], f"halves from {first}")


@pytest.mark.parametrize("lag", [1, 2, 16, 64, 1024])
def test_hash_serial_pairs_are_independent(whitened: list[Tensor], lag: int) -> None:
    """Lags of powers of two are the same column of neighboring rows."""
    scores, correlations = [], []
    for h in whitened[:2]:
        for i, j in itertools.product((0, 2), repeat=2):
            scores.append(pair_uniformity_z(octets(h)[i][:-lag], octets(h)[j][lag:]))
        for i, j in itertools.product((0, 1), repeat=2):
            correlations.append(correlation_z(halves(h)[i][:-lag], halves(h)[j][lag:]))
    assert_plausible(scores, f"pairs of bytes {lag} apart")
    assert_plausible(correlations, f"serial correlation {lag} apart")


def test_halves_of_one_hash_are_independent(whitened: list[Tensor]) -> None:
    """Two neighboring columns share a hash."""
    for low, high in ((0, 2), (1, 3)):
        scores = [pair_uniformity_z(octets(h)[low], octets(h)[high]) for h in whitened]
        assert_plausible(scores, f"bytes {low} and {high}")
    assert_plausible([correlation_z(*halves(h)) for h in whitened], "correlation of the halves")


def test_consecutive_user_seeds_are_independent(whitened: list[Tensor]) -> None:
    assert_plausible(cross_seed_scores(whitened), "pairs of bytes across seeds")
    scores = [
        correlation_z(x, y)
        for a, b in itertools.combinations(whitened[:4], 2)
        for x, y in zip(halves(a), halves(b), strict=True)
    ]
    assert_plausible(scores, "correlation across seeds")


def test_consecutive_raw_seeds_are_not_independent() -> None:
    """What the whitening is for: the same check fails without it, and so is sharp enough to notice its absence."""
    scores = cross_seed_scores([hashes_of(torch.tensor([number])) for number in range(NUM_SEEDS)])
    assert max(scores) > 1.5 * z_limit(len(scores))


def test_streams_of_a_seed_are_independent() -> None:
    seed = rng.make_seed(0)
    hashes = [hashes_of(seed ^ rng.stream_key(stream)) for stream in range(6)]
    assert_plausible(cross_seed_scores(hashes), "pairs of bytes across streams")


def test_streams_of_different_seeds_are_independent() -> None:
    hashes = [hashes_of(rng.make_seed(number) ^ rng.stream_key(stream)) for number, stream in ((0, 1), (1, 0), (1, 1))]
    assert_plausible(cross_seed_scores(hashes), "pairs of bytes across seeds and streams")


def test_hash_avalanche() -> None:
    """A flipped bit of the counter flips each output bit with probability 1/2.

    Two multiplications mix well, not perfectly: deviations up to 0.01 are real, and harmless to rounding. The limit is
    that plus the sampling error.
    """
    num_counters = 1 << 12
    counters = torch.randint(-(2**62), 2**62, (num_counters,), generator=torch.Generator().manual_seed(1))
    seed = rng.make_seed(0)
    hashes = rng.counter_hash(counters, seed)
    out_bit = torch.arange(32, dtype=torch.int32)[:, None]
    limit = 0.01 + z_limit(64 * 32) * 0.5 / num_counters**0.5
    for bit in range(64):
        changed = hashes ^ rng.counter_hash(counters ^ signed(1 << bit), seed)
        flipped = (changed >> out_bit & 1).double().mean(1)
        assert (flipped - 0.5).abs().max() < limit, f"bit {bit} of the counter"


def test_rounding_draws_from_its_own_generator_and_dropout_does_not() -> None:
    x, weight = torch.randn(8, 16), torch.randn(4, 16, requires_grad=True)
    configs = [QConfig(), QConfig(fmt="msfp12"), QConfig(rounding="nearest", save=Blocks(2))]

    def draw(config: QConfig) -> None:
        functional.linear(x, weight, config=config).sum().backward()
        functional.activation(x, dropout=0.5)

    torch.manual_seed(0)
    draw(QConfig())
    assert not torch.equal(torch.get_rng_state(), _state_behind_dropout_alone(x)), "else nothing below could fail"
    generator = torch.Generator().manual_seed(1)
    for config in configs:
        before = generator.get_state()
        with rounding_from(generator):
            torch.manual_seed(0)
            draw(config)
        assert not torch.equal(generator.get_state(), before)
        assert torch.equal(torch.get_rng_state(), _state_behind_dropout_alone(x))


def _state_behind_dropout_alone(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    functional.activation(x, dropout=0.5)
    return torch.get_rng_state()


def test_rounding_from_ends_with_its_block_and_takes_nothing_else() -> None:
    with pytest.raises(ZeroDivisionError), rounding_from(torch.Generator()):
        _ = 1 / 0
    torch.manual_seed(3)
    first = make_rounding_seed(None, torch.device("cpu"))
    torch.manual_seed(3)
    assert torch.equal(make_seed(), first), "again from the default generator"
    with pytest.raises(TypeError, match=r"'rounding_from' expects a torch.Generator \(got int\)"), rounding_from(5):
        pass
