from collections.abc import Callable

import pytest
import torch
from qgnn.kernels import tuning
from qgnn.kernels.matmul import matmul, matmul_dw, matmul_requantize
from torch import Tensor

from activation_cases import ACTIVATIONS, activation
from kernel_cases import (
    FLOATS,
    LAYOUTS,
    SIZES,
    assert_within,
    far_columns,
    far_rows,
    quiet,
    random_codes,
    random_scales,
    storage_error,
    surrounded,
)
from qgnn import reference, rng

# N, K, M: no multiples of 16, single rows and columns, several tiles each way, wider than one program holds
SHAPES = [(1, 1, 1), (21, 7, 33), (37, 33, 7), (130, 130, 130), (5, 300, 32), (9, 32, 300), (3, 130, 1)]


def _operands(N: int, K: int, M: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return random_codes(N, K, device), random_scales(N, device), random_codes(M, K, device), random_scales(M, device)


@pytest.mark.parametrize(("N", "K", "M"), SHAPES)
def test_matmul_equals_reference(device: str, N: int, K: int, M: int) -> None:
    operands = _operands(N, K, M, device)
    assert torch.equal(matmul(*operands), reference.matmul(*operands))
    bias = torch.randn(M, device=device)
    assert torch.equal(matmul(*operands, bias), reference.matmul(*operands, bias))


@pytest.mark.parametrize("dtype", FLOATS)
def test_matmul_writes_every_type(device: str, dtype: torch.dtype) -> None:
    x_q, _, w_q, _ = _operands(20, 33, 34, device)
    x_scale, w_scale = torch.full((20,), 1e-3, device=device), torch.full((34,), 1e-2, device=device)
    expected = reference.matmul(x_q, x_scale, w_q, w_scale)
    out = matmul(x_q, x_scale, w_q, w_scale, out_dtype=dtype)
    assert out.dtype == dtype
    assert_within(out, expected, storage_error(dtype) * expected.abs() + 2.0**-24)  # fp16 is subnormal below 2^-14


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(("N", "K", "M"), [(1, 1, 1), (21, 7, 33), (130, 33, 130), (9, 32, 300)])
def test_epilogues_of_matmul_equal_reference(device: str, name: str, N: int, K: int, M: int) -> None:
    operands = (*_operands(N, K, M, device), torch.randn(M, device=device))
    epilogue, expected_epilogue = (activation(name, N, M, device) for _ in range(2))
    out = matmul(*operands, activation=epilogue)
    assert torch.equal(out, reference.matmul(*operands, activation=expected_epilogue))
    if epilogue.mask is not None:
        assert torch.equal(epilogue.mask, expected_epilogue.mask)


def test_matmul_takes_one_scale_for_all_rows(device: str) -> None:
    x_q, x_scale, w_q, w_scale = _operands(20, 33, 34, device)
    one = x_scale[3:4]
    assert torch.equal(matmul(x_q, one, w_q, w_scale), reference.matmul(x_q, one, w_q, w_scale))
    codes, scale = matmul_requantize(x_q, one, w_q, w_scale)
    expected_codes, expected_scale = reference.matmul_requantize(x_q, one, w_q, w_scale)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scale, expected_scale)


def test_integer_sums_are_exact_beyond_24_bits(device: str) -> None:
    """Terms of up to 14 bits, 2000 of them: fp32 would round the partial sums, int32 rounds the final one only."""
    x_q, w_q = (torch.randint(100, 128, (n, 2000), dtype=torch.int8, device=device) for n in (3, 5))
    exact = (x_q.long()[:, None] * w_q.long()[None]).sum(2)
    assert exact.min() > 2**24
    one = torch.ones(5, device=device)
    assert torch.equal(matmul(x_q, one[:1], w_q, one), exact.float())


@pytest.mark.parametrize(("N", "K", "M"), SHAPES)
@pytest.mark.parametrize("stochastic", [False, True])
def test_requantized_codes_equal_reference(device: str, N: int, K: int, M: int, stochastic: bool) -> None:
    operands = _operands(N, K, M, device)
    options = {"bits": 8 if K % 2 else 5, "seed": rng.make_seed(3, device) if stochastic else None, "stream": 2}
    codes, scale = matmul_requantize(*operands, **options)
    expected_codes, expected_scale = reference.matmul_requantize(*operands, **options)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", [matmul, matmul_requantize])
def test_products_take_any_strides(device: str, layout: str, function: Callable[..., object]) -> None:
    x_q, x_scale, w_q, w_scale = _operands(20, 33, 34, device)
    view = LAYOUTS[layout]
    strided = (view(x_q), x_scale.repeat_interleave(2)[::2], view(w_q), w_scale.repeat_interleave(2)[::2])
    out, expected = function(*strided), function(x_q, x_scale, w_q, w_scale)
    pairs = zip(out, expected, strict=True) if isinstance(out, tuple) else [(out, expected)]
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("move", [far_columns, far_rows])
@pytest.mark.parametrize("far", ["x_q", "w_q"])
def test_products_find_elements_beyond_32_bit_offsets(device: str, move: Callable[[Tensor], Tensor], far: str) -> None:
    x_q, x_scale, w_q, w_scale = _operands(3, 16, 2, device)
    operands = (move(x_q), x_scale, w_q, w_scale) if far == "x_q" else (x_q, x_scale, move(w_q), w_scale)
    assert torch.equal(matmul(*operands), matmul(x_q, x_scale, w_q, w_scale))
    codes, scale = matmul_requantize(*operands)
    expected_codes, expected_scale = matmul_requantize(x_q, x_scale, w_q, w_scale)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize("K", SIZES)
def test_products_use_nothing_outside_a_view(device: str, K: int) -> None:
    x_q, x_scale, w_q, w_scale = _operands(19, K, 18, device)
    inside = (surrounded(x_q, 99), x_scale, surrounded(w_q, 77), w_scale)
    assert torch.equal(matmul(*inside), reference.matmul(x_q, x_scale, w_q, w_scale))
    g_q, g_scale = random_codes(19, 18, device), random_scales(19, device)
    out = matmul_dw(surrounded(g_q, 55), g_scale, surrounded(x_q, 99), x_scale)
    assert torch.equal(out, matmul_dw(g_q, g_scale, x_q, x_scale))


def test_products_leave_their_inputs_alone(device: str) -> None:
    operands = _operands(20, 33, 34, device)
    before = [x.clone() for x in operands]
    matmul(*operands, torch.zeros(34, device=device))
    matmul_requantize(*operands, seed=rng.make_seed(1, device))
    matmul_dw(random_codes(20, 5, device), random_scales(20, device), *operands[:2])
    assert all(torch.equal(a, b) for a, b in zip(operands, before, strict=True))


def test_poisoned_scales_stay_in_their_row(device: str) -> None:
    x_q, x_scale, w_q, w_scale = _operands(20, 33, 34, device)
    expected = matmul(x_q, x_scale, w_q, w_scale)
    x_q[3], x_scale[3] = 0, float("nan")
    out = matmul(x_q, x_scale, w_q, w_scale)
    others = [row for row in range(20) if row != 3]
    assert out[3].isnan().all()
    assert torch.equal(out[others], expected[others])
    scale = matmul_requantize(x_q, x_scale, w_q, w_scale)[1]
    assert scale.isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize(("N", "K", "M"), [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_products_of_nothing(device: str, N: int, K: int, M: int) -> None:
    operands = _operands(N, K, M, device)
    bias = torch.randn(M, device=device)
    assert torch.equal(matmul(*operands, bias), reference.matmul(*operands, bias))
    codes, scale = matmul_requantize(*operands)
    assert codes.shape == (N, M)
    assert torch.equal(scale, torch.zeros(N, device=device))
    dw = matmul_dw(random_codes(N, M, device), random_scales(N, device), *operands[:2])
    assert torch.equal(dw, torch.zeros(M, K, device=device))


@pytest.mark.parametrize("function", [matmul, matmul_requantize])
def test_products_refuse_sums_that_int32_cannot_hold(device: str, function: Callable[..., object]) -> None:
    x_q = torch.zeros((1, 1), dtype=torch.int8, device=device).expand(2, tuning.MAX_INT32_TERMS + 1)
    one = torch.ones(2, device=device)
    with pytest.raises(ValueError, match="'matmul' expects at most 131071 columns in 'x_q'"):
        function(x_q, one, x_q, one)


def _dw_bound(g_q: Tensor, g_scale: Tensor, x_q: Tensor, x_scale: Tensor) -> Tensor:
    """Two fp16 roundings of each term, to 2^-11 of it or, where fp16 is subnormal, to 2^-25 of the largest factor, and
    four of fp32, of the factors and the unit; then fp32 sums, which a tensor core may truncate."""
    factor = (g_scale * x_scale).double().expand(g_q.shape[0])
    g, x = g_q.double().abs(), x_q.double().abs()
    relative = (g * factor[:, None]).t() @ x * (2.0**-10 + 2.0**-20 + (g.shape[0] + 4) * 2.0**-23)
    return relative + factor.max() * 2.0**-25 * ((g + 1).t() @ x)


@pytest.mark.parametrize(
    ("N", "K", "M"), [(1, 1, 1), (21, 7, 33), (37, 33, 7), (130, 130, 130), (700, 32, 1), (260, 1, 300)]
)
def test_dw_is_within_its_error_bound(device: str, N: int, K: int, M: int) -> None:
    g_q, g_scale, x_q, x_scale = random_codes(N, M, device), random_scales(N, device), *_operands(N, K, 1, device)[:2]
    exact = (g_q.double() * (g_scale * x_scale).double()[:, None]).t() @ x_q.double()
    out = matmul_dw(g_q, g_scale, x_q, x_scale)
    assert_within(out, exact, _dw_bound(g_q, g_scale, x_q, x_scale))
    assert torch.equal(out, matmul_dw(g_q, g_scale, x_q, x_scale))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dw_takes_any_strides(device: str, layout: str) -> None:
    g_q, g_scale, x_q, x_scale = (
        random_codes(70, 34, device),
        random_scales(70, device),
        *_operands(70, 33, 1, device)[:2],
    )
    view = LAYOUTS[layout]
    strided = (view(g_q), g_scale.repeat_interleave(2)[::2], view(x_q), x_scale.repeat_interleave(2)[::2])
    assert torch.equal(matmul_dw(*strided), matmul_dw(g_q, g_scale, x_q, x_scale))


@pytest.mark.parametrize("move", [far_columns, far_rows])
@pytest.mark.parametrize("far", ["g_q", "x_q"])
def test_dw_finds_elements_beyond_32_bit_offsets(device: str, move: Callable[[Tensor], Tensor], far: str) -> None:
    g_q, x_q, scale = random_codes(3, 5, device), random_codes(3, 5, device), random_scales(3, device)
    expected = matmul_dw(g_q, scale, x_q, scale)
    if far == "g_q":
        g_q = move(g_q)
    else:
        x_q = move(x_q)
    assert torch.equal(matmul_dw(g_q, scale, x_q, scale), expected)


def test_dw_rounds_small_factors_to_subnormals(device: str) -> None:
    """Beside a row with the factor 1, those below 2^-14 are multiples of 2^-24, and those up to 2^-25 are zero."""
    factors = torch.tensor([2.0**-24, 1.25 * 2.0**-24, 3.5 * 2.0**-24, 2.0**-25, 1e-8], device=device)
    g_q, x_q = torch.diag(torch.full((6,), 100, device=device)).char(), torch.ones((6, 1), device=device).char()
    scale = torch.cat([factors, torch.ones(1, device=device)])
    out = matmul_dw(g_q, scale, x_q, torch.ones(1, device=device)).flatten()
    assert (out * 2.0**24).tolist() == [100.0, 100.0, 400.0, 0.0, 0.0, 100.0 * 2**24]


@quiet
@pytest.mark.parametrize("scale", [1e-20, 3e-23])
def test_dw_of_scales_whose_product_is_subnormal(device: str, scale: float) -> None:
    """Their inverse would overflow; they lose digits to a unit of 2^-126 instead."""
    g_q, x_q, scales = (
        random_codes(20, 9, device),
        random_codes(20, 10, device),
        torch.full((20,), scale, device=device),
    )
    exact = (g_q.double().t() @ x_q.double()) * scale**2
    unit = torch.full((20,), 2.0**-63, device=device)
    assert_within(matmul_dw(g_q, scales, x_q, scales), exact, _dw_bound(g_q, unit, x_q, unit))


def test_dw_is_exact_with_one_scale_for_all_rows(device: str) -> None:
    g_q, x_q, quarter = (
        random_codes(300, 9, device),
        random_codes(300, 10, device),
        torch.full((1,), 0.25, device=device),
    )
    exact = (g_q.double().t() @ x_q.double()) / 16  # every partial sum fits 24 bits
    assert torch.equal(matmul_dw(g_q, quarter, x_q, quarter).double(), exact)


def test_dw_outgrows_int32(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """134,000 * 127 * 127 > 2^31. Each block of rows and each of up to 264 chunks rounds the sum once."""
    if device == "cpu":  # the interpreter's time goes by blocks, not by rows, and it takes products of any size
        config = {**tuning.matmul_dw(1, 1, 90), "BLOCK_N": 4096, "BLOCK_M": 1, "BLOCK_K": 1}
        monkeypatch.setattr(tuning, "matmul_dw", lambda *sizes: config)
    x_q = torch.full((134_000, 1), 127, dtype=torch.int8, device=device)
    one = torch.ones(1, device=device)
    exact = torch.full((1, 1), 134_000.0 * 127 * 127, dtype=torch.float64, device=device)
    assert_within(matmul_dw(x_q, one, x_q, one), exact, exact * 300 * 2.0**-23)


def test_dw_of_zero_scales_is_zero(device: str) -> None:
    g_q, x_q, zero = random_codes(20, 9, device), random_codes(20, 10, device), torch.zeros(20, device=device)
    assert not matmul_dw(g_q, zero, x_q, zero).any()


@quiet
@pytest.mark.parametrize("other_scales", [0.0, 0.5])
def test_dw_shows_a_poisoned_scale(device: str, other_scales: float) -> None:
    g_q, x_q = random_codes(300, 9, device), random_codes(300, 10, device)
    scale = torch.full((300,), other_scales, device=device)
    poisoned = scale.clone()
    g_q[290], poisoned[290] = 0, float("nan")  # in the second chunk
    assert matmul_dw(g_q, poisoned, x_q, scale).isnan().all()
    assert matmul_dw(g_q, scale, x_q, poisoned).isnan().all()
