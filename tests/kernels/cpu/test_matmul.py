"""The native products equal the reference: bit for bit where sums are integers, within the bound of a sum elsewhere."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from qgnn.kernels.cpu import matmul as native
from qgnn.kernels.cpu.library import launch
from qgnn.kernels.cpu.matmul import ENGINES, matmul, matmul_dw, matmul_requantize
from torch import Tensor

import qgnn
from block_cases import SEEDS
from kernel_cases import (
    FLOATS,
    LAYOUTS,
    SIZES,
    UNIT,
    assert_within,
    far_columns,
    random_codes,
    random_scales,
    storage_error,
    surrounded,
)
from qgnn import reference, rng, rounding
from qgnn.rounding import MAX_INT32_TERMS

# N, K, M: single rows and columns, columns 16 and 64 at a time, K beyond what fp32 adds up exactly, several chunks
SHAPES = [
    *[(1, 1, 1), (21, 7, 33), (37, 33, 7), (130, 130, 130), (5, 300, 66), (9, 32, 300), (3, 130, 1)],
    *[(40, 256, 600), (40, 600, 256), (35, 1433, 16), (17, 1025, 5), (19, 2500, 81), (1100, 2048, 3), (600, 4, 2048)],
]
NONZEROS, INT_MM, MM = "nonzeros", "torch._int_mm", "torch.mm(fp32)"
ROUTES = [NONZEROS, INT_MM, MM]


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the products, whatever the processor and the operands would choose."""
    monkeypatch.setattr(native, "_mostly_zero", lambda codes: request.param == NONZEROS)
    monkeypatch.setattr(native, "has_vnni", lambda: request.param == INT_MM)
    monkeypatch.setattr(native, "_MIN_INTEGER_WORK", 0)
    return request.param


def operands_of(N: int, K: int, M: int, density: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x_q = random_codes(N, K, "cpu") * (torch.rand(N, K) <= density)
    return x_q, random_scales(N, "cpu"), random_codes(M, K, "cpu"), random_scales(M, "cpu")


def assert_equal(actual: Tensor | tuple[Tensor, ...], expected: Tensor | tuple[Tensor, ...]) -> None:
    """Bit for bit; a NaN equals a NaN."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("N", "K", "M"), SHAPES)
def test_matmul_equals_reference(route: str, N: int, K: int, M: int) -> None:
    operands = operands_of(N, K, M)
    assert ENGINES["matmul"](*operands) == route
    assert_equal(matmul(*operands), reference.matmul(*operands))
    bias = torch.randn(M)
    assert_equal(matmul(*operands, bias), reference.matmul(*operands, bias))


@pytest.mark.parametrize(("N", "K", "M"), SHAPES)
@pytest.mark.parametrize("stochastic", [False, True])
def test_requantized_codes_equal_reference(route: str, N: int, K: int, M: int, stochastic: bool) -> None:
    operands = operands_of(N, K, M)
    assert ENGINES["matmul_requantize"](*operands) == route
    options = {"bits": 8 if K % 2 else 5, "seed": rng.make_seed(3) if stochastic else None, "stream": 2}
    assert_equal(matmul_requantize(*operands, **options), reference.matmul_requantize(*operands, **options))


@pytest.mark.parametrize("bits", range(2, 9))
def test_requantized_codes_of_every_width(bits: int) -> None:
    operands = operands_of(9, 33, 70)
    result = matmul_requantize(*operands, bits=bits, seed=rng.make_seed(3))
    assert_equal(result, reference.matmul_requantize(*operands, bits=bits, seed=rng.make_seed(3)))
    assert result[0].abs().max() == (1 << (bits - 1)) - 1


@pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("K", [*SIZES, 1433])
def test_results_do_not_show_the_route(K: int, density: float) -> None:
    operands = operands_of(50, K, 79, density)
    assert_equal(matmul(*operands), reference.matmul(*operands))
    seed = rng.make_seed(1)
    assert_equal(matmul_requantize(*operands, seed=seed), reference.matmul_requantize(*operands, seed=seed))


@given(st.data(), st.integers(0, 9), st.integers(0, 70), st.integers(0, 70), st.sampled_from([0.03, 1.0]), SEEDS)
def test_any_shape(data: st.DataObject, N: int, K: int, M: int, density: float, seed: Tensor | None) -> None:
    operands = list(operands_of(N, K, M, density))
    for i in (1, 3):
        if operands[i].numel():
            operands[i][0] = data.draw(st.floats(width=32))  # may be NaN, inf or denormal
    bias = torch.randn(M) if data.draw(st.booleans()) else None
    assert_equal(matmul(*operands, bias), reference.matmul(*operands, bias))
    bits, stream = data.draw(st.integers(2, 8)), data.draw(st.integers(0, 5))
    options = {"bits": bits, "seed": seed, "stream": stream}
    assert_equal(matmul_requantize(*operands, **options), reference.matmul_requantize(*operands, **options))


@pytest.mark.parametrize("dtype", FLOATS)
def test_matmul_writes_every_type(dtype: torch.dtype) -> None:
    x_q, _, w_q, _ = operands_of(20, 33, 34)
    x_scale, w_scale = torch.full((20,), 1e-3), torch.full((34,), 1e-2)
    expected = reference.matmul(x_q, x_scale, w_q, w_scale)
    out = matmul(x_q, x_scale, w_q, w_scale, out_dtype=dtype)
    assert out.dtype == dtype
    assert_within(out, expected, storage_error(dtype) * expected.abs() + 2.0**-24)  # fp16 is subnormal below 2^-14


def test_products_take_one_scale_for_all_rows(route: str) -> None:
    x_q, x_scale, w_q, w_scale = operands_of(20, 33, 34)
    one = (x_q, x_scale[3:4], w_q, w_scale)
    assert_equal(matmul(*one), reference.matmul(*one))
    assert_equal(matmul_requantize(*one), reference.matmul_requantize(*one))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_take_scales_and_bias_of_16_bits(dtype: torch.dtype) -> None:
    x_q, x_scale, w_q, w_scale = operands_of(20, 33, 34)
    halves = (x_q, x_scale.to(dtype), w_q, w_scale.to(dtype), torch.randn(34).to(dtype))
    floats = [t.float() if t.is_floating_point() else t for t in halves]
    assert_equal(matmul(*halves), reference.matmul(*floats))


@pytest.mark.parametrize("low", [100, -128])
@pytest.mark.parametrize("K", [2000, MAX_INT32_TERMS])
def test_integer_sums_are_exact_beyond_24_bits(route: str, K: int, low: int) -> None:
    """Terms of up to 14 bits: fp32 would round the partial sums, int32 rounds the final one only."""
    x_q, w_q = (torch.randint(low, 128 if low > 0 else -127, (n, K), dtype=torch.int8) for n in (3, 5))
    exact = (x_q.long()[:, None] * w_q.long()[None]).sum(2)
    assert exact.min() > 2**24
    one = torch.ones(5)
    assert torch.equal(matmul(x_q, one[:1], w_q, one), exact.float())


def test_requantizing_takes_its_random_bits_from_the_row_of_the_whole_matrix() -> None:
    """A chunk's first row may be any: here its hashes are numbered beyond 32 bits."""
    first_row, R, M = (1 << 33) + 5, 3, 600
    product, ones, seed = torch.randn(R, M), torch.ones(M), rng.make_seed(4)
    scale, inverse = rounding.absmax_scale(product.abs().amax(1), 8)
    expected = rounding.round_codes(product, inverse[:, None], rng.random_bits16(first_row, R, M, seed))
    codes, out_scale = torch.empty((R, M), dtype=torch.int8), torch.empty(R)
    operands = (product, None, ones, 0, ones, seed, 0, 127, first_row, R, M)
    launch("qgnn_matmul_requantize", codes, out_scale, *operands)
    assert torch.equal(codes, expected)
    assert torch.equal(out_scale, scale)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", [matmul, matmul_requantize])
def test_products_take_any_strides(route: str, layout: str, function: Callable[..., Tensor]) -> None:
    x_q, x_scale, w_q, w_scale = operands_of(20, 33, 34)
    view = LAYOUTS[layout]
    strided = (view(x_q), x_scale.repeat_interleave(2)[::2], view(w_q), w_scale.repeat_interleave(2)[::2])
    assert_equal(function(*strided), function(x_q, x_scale, w_q, w_scale))


@pytest.mark.parametrize("far", ["x_q", "w_q"])
def test_products_find_columns_beyond_32_bit_offsets(route: str, far: str) -> None:
    x_q, x_scale, w_q, w_scale = operands_of(3, 16, 2)
    operands = (far_columns(x_q), x_scale, w_q, w_scale) if far == "x_q" else (x_q, x_scale, far_columns(w_q), w_scale)
    assert_equal(matmul(*operands), reference.matmul(x_q, x_scale, w_q, w_scale))
    assert_equal(matmul_requantize(*operands), reference.matmul_requantize(x_q, x_scale, w_q, w_scale))


@pytest.mark.parametrize("K", SIZES)
def test_products_use_nothing_outside_a_view(route: str, K: int) -> None:
    x_q, x_scale, w_q, w_scale = operands_of(19, K, 18)
    inside = (surrounded(x_q, 99), x_scale, surrounded(w_q, 77), w_scale)
    assert_equal(matmul(*inside), reference.matmul(x_q, x_scale, w_q, w_scale))
    g_q, g_scale = random_codes(19, 18, "cpu"), random_scales(19, "cpu")
    out = matmul_dw(surrounded(g_q, 55), g_scale, surrounded(x_q, 99), x_scale)
    assert torch.equal(out, matmul_dw(g_q, g_scale, x_q, x_scale))


def test_products_leave_their_inputs_alone(route: str) -> None:
    operands = (*operands_of(20, 33, 34), torch.randn(34), random_codes(20, 34, "cpu"))
    before = [x.clone() for x in operands]
    *linear, bias, g_q = operands
    matmul(*linear, bias)
    matmul_requantize(*linear, seed=rng.make_seed(1))
    matmul_dw(g_q, operands[1], *linear[:2])
    assert all(torch.equal(a, b) for a, b in zip(operands, before, strict=True))


def test_poisoned_scales_stay_in_their_row(route: str) -> None:
    x_q, x_scale, w_q, w_scale = operands_of(20, 33, 34)
    x_q[3], x_scale[3], x_scale[5] = 0, float("nan"), float("inf")
    assert_equal(matmul(x_q, x_scale, w_q, w_scale), reference.matmul(x_q, x_scale, w_q, w_scale))
    scale = matmul_requantize(x_q, x_scale, w_q, w_scale)[1]
    assert scale.isfinite().logical_not().nonzero().flatten().tolist() == [3, 5]
    w_scale[7] = float("nan")
    assert matmul_requantize(x_q, x_scale, w_q, w_scale)[1].isnan().all()
    assert_equal(matmul(x_q, x_scale, w_q, w_scale), reference.matmul(x_q, x_scale, w_q, w_scale))


@pytest.mark.parametrize(("N", "K", "M"), [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_products_of_nothing(N: int, K: int, M: int) -> None:
    operands = operands_of(N, K, M)
    bias = torch.randn(M)
    assert_equal(matmul(*operands, bias), reference.matmul(*operands, bias))
    assert_equal(matmul_requantize(*operands), reference.matmul_requantize(*operands))
    g = (random_codes(N, M, "cpu"), random_scales(N, "cpu"))
    assert torch.equal(matmul_dw(*g, *operands[:2]), torch.zeros(M, K))
    assert {name for name in ENGINES if ENGINES[name](*(operands if name != "matmul_dw" else (*g, *operands[:2])))}


def dw_bound(g_q: Tensor, g_scale: Tensor, x_q: Tensor, x_scale: Tensor) -> Tensor:
    """A term is rounded three times (the product of the scales, times g, times x) and then N are added up, each to half
    a unit in fp32; 1.01 is for what errors multiply to."""
    factor = (g_scale * x_scale).double().expand(g_q.shape[0])
    terms = (g_q.double().abs() * factor[:, None]).t() @ x_q.double().abs()
    return terms * (g_q.shape[0] + 3) * UNIT * 1.01


@pytest.mark.parametrize("density", [0.02, 1.0])
@pytest.mark.parametrize(
    ("N", "K", "M"), [(1, 1, 1), (21, 7, 33), (37, 33, 7), (130, 130, 130), (700, 32, 1), (260, 1433, 30)]
)
def test_dw_is_within_its_error_bound(N: int, K: int, M: int, density: float) -> None:
    x_q, x_scale, *_ = operands_of(N, K, 1, density)
    g_q, g_scale = random_codes(N, M, "cpu"), random_scales(N, "cpu")
    exact = (g_q.double() * (g_scale.double() * x_scale.double())[:, None]).t() @ x_q.double()
    out = matmul_dw(g_q, g_scale, x_q, x_scale)
    assert_within(out, exact, dw_bound(g_q, g_scale, x_q, x_scale))
    assert torch.equal(out, matmul_dw(g_q, g_scale, x_q, x_scale))


@given(st.integers(0, 60), st.integers(0, 40), st.integers(0, 40), st.sampled_from([0.03, 1.0]), st.booleans())
def test_dw_of_any_shape(N: int, K: int, M: int, density: float, one_scale: bool) -> None:
    x_q, x_scale, *_ = operands_of(N, K, 1, density)
    g_q, g_scale = random_codes(N, M, "cpu"), random_scales(1 if one_scale else N, "cpu")
    exact = (g_q.double() * (g_scale.double() * x_scale.double())[:, None]).t() @ x_q.double()
    assert_within(matmul_dw(g_q, g_scale, x_q, x_scale), exact, dw_bound(g_q, g_scale, x_q, x_scale))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("density", [0.02, 1.0])
def test_dw_takes_any_strides(layout: str, density: float) -> None:
    x_q, x_scale, *_ = operands_of(70, 33, 1, density)
    g_q, g_scale = random_codes(70, 34, "cpu"), random_scales(70, "cpu")
    view = LAYOUTS[layout]
    strided = (view(g_q), g_scale.repeat_interleave(2)[::2], view(x_q), x_scale.repeat_interleave(2)[::2])
    assert torch.equal(matmul_dw(*strided), matmul_dw(g_q, g_scale, x_q, x_scale))


@pytest.mark.parametrize("far", ["g_q", "x_q"])
@pytest.mark.parametrize("density", [0.0, 1.0])
def test_dw_finds_columns_beyond_32_bit_offsets(far: str, density: float) -> None:
    g_q, x_q, scale = random_codes(3, 5, "cpu"), operands_of(3, 5, 1, density)[0], random_scales(3, "cpu")
    x_q[1, 4] = 5 if density == 0 else x_q[1, 4]
    expected = matmul_dw(g_q, scale, x_q, scale)
    g_q, x_q = (far_columns(g_q), x_q) if far == "g_q" else (g_q, far_columns(x_q))
    assert torch.equal(matmul_dw(g_q, scale, x_q, scale), expected)


@pytest.mark.parametrize("density", [0.02, 1.0])
def test_dw_is_exact_with_one_scale_for_all_rows(density: float) -> None:
    x_q, quarter = operands_of(300, 10, 1, density)[0], torch.full((1,), 0.25)
    g_q = random_codes(300, 9, "cpu")
    exact = (g_q.double().t() @ x_q.double()) / 16  # every partial sum fits 24 bits
    assert torch.equal(matmul_dw(g_q, quarter, x_q, quarter).double(), exact)


@pytest.mark.parametrize("density", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("which", ["g_scale", "x_scale"])
def test_dw_shows_a_poisoned_scale(density: float, poison: float, which: str) -> None:
    """A row whose scale is NaN has only zero codes: its terms must not be skipped as zeros. 100 * 1e38 is inf."""
    x_q, g_q = operands_of(300, 10, 1, density)[0], random_codes(300, 9, "cpu")
    scales = {"g_scale": torch.ones(300), "x_scale": torch.ones(300)}
    scales[which][290] = poison
    g_q[290], x_q[290] = (100, 0) if which == "x_scale" else (100, 1)
    operands = (g_q, scales["g_scale"], x_q, scales["x_scale"])
    out, expected = matmul_dw(*operands), reference.matmul_dw(*operands)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf(), expected.isinf())
    assert not expected.isfinite().any()


@pytest.mark.parametrize("density", [0.02, 1.0])
def test_threads_change_nothing(threads: int, density: float) -> None:
    """Enough rows that both threads are at work at once; native sums of floats over rows are those of one thread."""
    operands = operands_of(20_000, 70, 90, density)
    g = (random_codes(20_000, 90, "cpu"), random_scales(20_000, "cpu"))
    assert_equal(matmul(*operands), reference.matmul(*operands))
    seed = rng.make_seed(3)
    assert_equal(matmul_requantize(*operands, seed=seed), reference.matmul_requantize(*operands, seed=seed))
    out = matmul_dw(*g, *operands[:2])
    if ENGINES["matmul_dw"](*g, *operands[:2]) == NONZEROS:
        torch.set_num_threads(1)
        assert torch.equal(out, matmul_dw(*g, *operands[:2]))


def test_the_route_follows_the_processor_and_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "has_vnni", lambda: True)
    big, small, rare = operands_of(600, 100, 100), operands_of(6, 100, 100), operands_of(600, 100, 100, 0.05)
    g = (random_codes(600, 100, "cpu"), random_scales(600, "cpu"))
    for name in ("matmul", "matmul_requantize"):
        assert [ENGINES[name](*operands) for operands in (big, small, rare)] == [INT_MM, MM, NONZEROS]
    assert [ENGINES["matmul_dw"](*g, *operands[:2]) for operands in (big, rare)] == [MM, NONZEROS]
    monkeypatch.setattr(native, "has_vnni", lambda: False)
    assert ENGINES["matmul"](*big) == MM
    assert_equal(matmul(*big), reference.matmul(*big))


@pytest.mark.parametrize("density", [0.05, 1.0])
def test_a_trace_names_the_product(density: float) -> None:
    x = (torch.rand(50, 40) < density).float().requires_grad_()
    weight = torch.randn(20, 40, requires_grad=True)
    with qgnn.trace(error=False) as record:
        qgnn.functional.linear(x, weight, config=qgnn.QConfig()).sum().backward()
    by_density = f"c/{NONZEROS if density < 0.1 else MM}"
    expected = {"matmul.forward": by_density, "matmul.backward_dx": f"c/{MM}", "matmul.backward_dw": by_density}
    assert {name: record.ops[name]["backend"] for name in expected} == expected


@pytest.mark.parametrize("N", [7, 5000])  # each row is looked at, and a sample of them
@pytest.mark.parametrize(("num_nonzeros", "route"), [(6, NONZEROS), (7, MM)])
def test_codes_of_which_a_tenth_is_not_zero_are_sparse(N: int, num_nonzeros: int, route: str) -> None:
    wide = torch.ones(N, 80, dtype=torch.int8)  # what lies beside the codes does not count
    codes = wide[:, :64].zero_()
    codes[:, 5 : 5 + num_nonzeros] = -3  # 64 / 10 is between
    assert native.ENGINES["matmul"](codes, None, torch.ones(3, 64, dtype=torch.int8)) == route
