"""What is particular to sums on tensor cores: bytes split in registers, weights in fp16, slices, heads."""

import inspect
import re

import pytest
import torch
from qgnn.kernels import spmm_tile, tuning
from qgnn.kernels.spmm import make_plan, spmm, spmm_requantize
from torch import Tensor

from kernel_cases import LAYOUTS, assert_within, csr, dense, far_rows, quiet, random_codes, random_scales, surrounded
from qgnn import reference
from spmm_cases import GRAPH, assert_spmm_within_bound, exact_sums, graph

WORDS = 2**32


def _run_ptx(program: str, word: int) -> dict[str, int]:
    """Registers after a straight-line program of the few instructions that split words."""

    def halves(a: int, b: int) -> int:
        x, y = (torch.tensor([word & 0xFFFF, word >> 16]).to(torch.int16).view(torch.float16) for word in (a, b))
        low, high = (x - y).view(torch.int16).tolist()
        return (high & 0xFFFF) << 16 | low & 0xFFFF

    def permute(a: int, b: int, selector: int) -> int:
        source = (b << 32 | a).to_bytes(8, "little")
        return int.from_bytes(bytes(source[selector >> 4 * i & 7] for i in range(4)), "little")

    do = {"xor.b32": lambda a, b: a ^ b, "prmt.b32": permute, "mov.b32": lambda a: a, "sub.rn.f16x2": halves}
    registers = {"$2": word}
    for name, target, operands in re.findall(r"([\w.]+) (\$?\w+), (.+?);", program.split(";", 1)[1]):
        values = [registers[o] if o in registers else int(o, 16) for o in operands.split(", ")]
        registers[target] = do[name](*values)
    return registers


def test_the_machine_code_that_splits_words_equals_its_arithmetic_twin() -> None:
    program = re.search(r'"""(\{.*?\})"""', inspect.getsource(spmm_tile.split_words.fn), re.DOTALL).group(1)
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(2**31), 2**31, (500,), generator=generator).tolist()
    codes = torch.tensor(words, dtype=torch.int32).view(torch.int8).view(-1, 4).to(torch.float16)
    for word, (a, b, c, d) in zip(words, codes, strict=True):
        registers = _run_ptx(program, word % WORDS)
        low, high = (torch.tensor([registers[name] & 0xFFFF, registers[name] >> 16]) for name in ("$0", "$1"))
        assert torch.equal(low.to(torch.int16).view(torch.float16), torch.stack([a, c]))
        assert torch.equal(high.to(torch.int16).view(torch.float16), torch.stack([b, d]))


def _one_to_one(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A graph of rows with one edge each, whose results are the weights themselves in their first column."""
    index = torch.arange(len(values), dtype=torch.int32, device=values.device)
    indptr = torch.arange(len(values) + 1, dtype=torch.int32, device=values.device)
    x = torch.zeros(len(values), 32, dtype=torch.int8, device=values.device)
    x[:, 0], x[:, 1] = 1, -127
    return indptr, index, x


def test_all_256_codes_are_exact_in_every_column(device: str) -> None:
    x = torch.arange(-128, 128, device=device).to(torch.int8)[:, None].repeat(1, 34)
    x[:, 1::2] = x[:, 1::2].flip(0)
    indptr, index = (torch.arange(n, dtype=torch.int32, device=device) for n in (257, 256))
    assert torch.equal(spmm(indptr, index, x), x.float())


@pytest.mark.parametrize("name", ["hub", "power_law", "duplicates", "tall"])
@pytest.mark.parametrize("cap", [None, 64])
def test_scales_of_many_orders_stay_within_the_bound(device: str, name: str, cap: int | None) -> None:
    """Rows of e^(2 N(0, 1)), and quiet rows of 1e-12 beside them."""
    indptr, index, S, N = graph(name, device)
    scale = torch.exp(2 * torch.randn(S, device=device))
    scale[::3] *= 1e-12
    assert_spmm_within_bound(
        indptr,
        index,
        random_codes(S, 40, device),
        x_scale=scale,
        weight=torch.randn(index.numel(), device=device),
        row_factor=torch.rand(N, device=device),
        plan=None if cap is None else make_plan(indptr, index.numel(), cap=cap),
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_weights_that_grow_or_shrink_along_a_row_stay_within_the_bound(device: str, sign: int) -> None:
    """200 edges over 60 binary orders in rising or falling order, so that sums are rescaled at every step, or never."""
    E = 200
    indptr = torch.tensor([0, E // 2, E], dtype=torch.int32, device=device)
    index = torch.randint(0, 9, (E,), dtype=torch.int32, device=device)
    weight = 2.0 ** (sign * torch.linspace(-30, 30, E, device=device))
    assert_spmm_within_bound(indptr, index, random_codes(9, 32, device), weight=weight)


def test_a_quiet_item_beside_loud_ones_keeps_full_precision(device: str) -> None:
    """The power belongs to an item of 16 rows, not to the graph."""
    weight = torch.rand(48, device=device) + 0.5
    weight[16:32] *= 1e-20
    indptr, index, x = _one_to_one(weight)
    out = spmm(indptr, index, x, weight=weight)
    assert_within(out[:, 0], weight, 2.0**-11 * weight.double())
    assert_within(out[:, 1], -127 * weight.double(), 127 * 2.0**-11 * weight.double())


@pytest.mark.parametrize("exponent", [-126, -125, -113, -112, -100, 0, 100, 119, 120])
def test_powers_of_two_are_exact_over_the_range_of_fp32(device: str, exponent: int) -> None:
    """Below 2**-112 a weight loses bits to the limits of fp16, and none of a power of two down to 2**-136."""
    weight = torch.full((3,), 2.0**exponent, device=device)
    indptr, index, x = _one_to_one(weight)
    assert torch.equal(spmm(indptr, index, x, weight=weight), x.float() * weight[:, None])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scaled", [False, True])
def test_weights_may_have_16_bits(device: str, dtype: torch.dtype, scaled: bool) -> None:
    weight = torch.tensor([1.0, -0.375, 2.0**-10], device=device)
    indptr, index, x = _one_to_one(weight)
    scale = torch.full((3,), 0.25, device=device) if scaled else None
    out = spmm(indptr, index, x, weight=weight.to(dtype), x_scale=scale)
    assert torch.equal(out, spmm(indptr, index, x, weight=weight, x_scale=scale))


def test_zero_weights_give_zeros(device: str) -> None:
    indptr, index, x = _one_to_one(torch.zeros(20, device=device))
    assert torch.equal(spmm(indptr, index, x, x_scale=torch.zeros(20, device=device)), torch.zeros(20, 32).to(device))


@quiet
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", ["weight", "x_scale"])
def test_poison_of_an_edge_or_a_source_reaches_its_rows_alone(device: str, poison: float, place: str) -> None:
    indptr, index, S, _ = graph("random", device)
    x, options = (
        random_codes(S, 64, device),
        {"weight": torch.rand(200, device=device), "x_scale": random_scales(S, device)},
    )
    expected = spmm(indptr, index, x, **options)
    options[place][0] = poison  # row 0 is the one that lanes without an edge read
    out = spmm(indptr, index, x, **options)
    poisoned = torch.zeros(200, device=device)
    poisoned[(index == 0) if place == "x_scale" else torch.arange(200, device=device) == 0] = 1
    reached = dense(indptr, index, poisoned, S).sum(1) > 0
    assert reached.any()
    assert torch.equal(out[~reached], expected[~reached])
    truth = reference.spmm(indptr, index, x, **options)[reached]
    assert torch.equal(out[reached].isnan(), truth.isnan())
    assert torch.equal(out[reached].nan_to_num(0.0), truth.nan_to_num(0.0))


def test_lanes_without_an_edge_do_not_enter_the_power(device: str) -> None:
    """They read the scale of row 0, the loudest here."""
    scale = torch.full((20,), 1e-12, device=device)
    scale[0] = 1e12
    indptr, index, x = _one_to_one(scale)
    out = spmm(indptr[:4], index[1:4], x, x_scale=scale)
    assert_within(out[:, 0], scale[1:4], 2.0**-11 * scale[1:4].double())


@pytest.mark.parametrize(
    ("width", "heads", "cap"), [(64, 2, 16), (96, 3, None), (192, 2, None), (66, 2, 16), (40, 5, None), (33, 1, None)]
)
def test_weights_of_heads_stay_within_the_bound(device: str, width: int, heads: int, cap: int | None) -> None:
    indptr, index = csr(GRAPH[0], GRAPH[2], device)
    assert_spmm_within_bound(
        indptr,
        index,
        random_codes(GRAPH[1], width, device),
        weight=torch.randn(index.numel(), heads, device=device),
        x_scale=random_scales(GRAPH[1], device),
        plan=None if cap is None else make_plan(indptr, index.numel(), cap=cap),
    )


def test_weights_of_heads_serve_floats_and_codes_alike(device: str) -> None:
    indptr, index = csr(GRAPH[0], GRAPH[2], device)
    x, weight = torch.randn(GRAPH[1], 33, device=device), torch.randn(index.numel(), 3, device=device)
    assert_spmm_within_bound(indptr, index, x, weight=weight)
    codes, one = random_codes(GRAPH[1], 64, device), torch.ones(1, device=device)
    powers = 2.0 ** torch.randint(-2, 3, (index.numel(), 2), device=device)
    found = spmm_requantize(indptr, index, codes, x_scale=one, weight=powers)
    expected = reference.spmm_requantize(indptr, index, codes, x_scale=one, weight=powers)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("width", [130, 256, 300, 602])
def test_slices_of_columns_do_not_change_a_sum(device: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes that outgrow the cache are gathered in slices of 128 columns. Sums are exact here."""
    indptr, index = csr(GRAPH[0], GRAPH[2], device)
    x, scale = random_codes(GRAPH[1], width, device), 2.0 ** torch.randint(-2, 3, (GRAPH[1],), device=device)
    whole = spmm(indptr, index, x, x_scale=scale)
    monkeypatch.setattr(tuning, "l2_bytes", lambda device: 100)
    assert torch.equal(spmm(indptr, index, x, x_scale=scale), whole)
    assert torch.equal(whole, reference.spmm(indptr, index, x, x_scale=scale))


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), lambda x: surrounded(x, 99), far_rows])
def test_codes_of_any_layout_give_the_same_sums(device: str, layout: object) -> None:
    indptr, index = csr(GRAPH[0], GRAPH[2], device)
    x, scale = random_codes(GRAPH[1], 48, device), random_scales(GRAPH[1], device)
    assert torch.equal(spmm(indptr, index, layout(x), x_scale=scale), spmm(indptr, index, x, x_scale=scale))


def test_rows_that_lie_in_whole_vectors_are_not_copied(device: str) -> None:
    buffer = random_codes(9, 96, device)
    words = spmm_tile._words(buffer[1:, 16:61])
    assert words.data_ptr() == buffer[1:, 16:].data_ptr()
    assert words.shape == (8, 24)


@pytest.mark.parametrize("width", [32, 100, 512])
@pytest.mark.parametrize("stochastic", [False, True])
def test_requantized_rows_are_within_a_step_of_the_sums(device: str, width: int, stochastic: bool) -> None:
    """Half a step, or a whole one with a seed; 2**-14 of it for the scale's margin and for steps of 2**-16."""
    indptr, index = csr(GRAPH[0], GRAPH[2], device)
    options = {"weight": torch.randn(index.numel(), device=device), "x_scale": random_scales(GRAPH[1], device)}
    x, seed = random_codes(GRAPH[1], width, device), torch.tensor([5], device=device) if stochastic else None
    codes, scale = spmm_requantize(indptr, index, x, **options, seed=seed)
    again = spmm_requantize(indptr, index, x, **options, seed=seed)
    assert all(torch.equal(a, b) for a, b in zip((codes, scale), again, strict=True))
    exact, _, bound = exact_sums(indptr, index, x, **options)
    step = scale.double()[:, None]
    assert_within(codes * step, exact, 1.01 * bound + ((1.0 if stochastic else 0.5) + 2.0**-14) * step)
