from collections.abc import Callable

import pytest
import torch
from qgnn.kernels import matmul as matmul_module
from qgnn.kernels import tuning
from qgnn.kernels.matmul import quantize_matmul, quantize_matmul_requantize
from qgnn.kernels.quantize import quantize
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

# N, K, M: single rows and columns, several tiles of rows and of outputs, rows that fit no program, weights that do not
SHAPES = [(1, 1, 1), (21, 7, 33), (70, 33, 7), (67, 100, 130), (5, 512, 32), (3, 513, 9), (9, 32, 300), (2, 300, 256)]


def _operands(N: int, K: int, M: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(N, K, device=device) * torch.logspace(-3, 3, N, device=device)[:, None]
    return x, random_codes(M, K, device), random_scales(M, device)


def _assert_equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("N", "K", "M"), SHAPES)
@pytest.mark.parametrize("stochastic", [False, True])
def test_quantize_matmul_equals_reference(device: str, N: int, K: int, M: int, stochastic: bool) -> None:
    operands = (*_operands(N, K, M, device), torch.randn(M, device=device) if K % 2 else None)
    options = {"bits": 8 if K % 2 else 5, "seed": rng.make_seed(3, device) if stochastic else None, "stream": 4}
    epilogue, expected_epilogue = (activation("relu_dropout", N, M, device) for _ in range(2))
    out = quantize_matmul(*operands, **options, activation=epilogue)
    _assert_equal(out, reference.quantize_matmul(*operands, **options, activation=expected_epilogue))
    assert torch.equal(epilogue.mask, expected_epilogue.mask)
    _assert_equal(quantize_matmul(*operands, **options), reference.quantize_matmul(*operands, **options))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("M", SIZES)
def test_every_epilogue_equals_reference(device: str, name: str, M: int) -> None:
    operands = (*_operands(9, 33, M, device), torch.randn(M, device=device))
    epilogue, expected_epilogue = (activation(name, 9, M, device) for _ in range(2))
    out = quantize_matmul(*operands, activation=epilogue)
    _assert_equal(out, reference.quantize_matmul(*operands, activation=expected_epilogue))
    if epilogue.mask is not None:
        assert torch.equal(epilogue.mask, expected_epilogue.mask)


@pytest.mark.parametrize(("N", "K", "M"), SHAPES)
@pytest.mark.parametrize("stochastic", [False, True])
def test_quantize_matmul_requantize_equals_reference(device: str, N: int, K: int, M: int, stochastic: bool) -> None:
    operands = _operands(N, K, M, device)
    options = {"bits": 8 if K % 2 else 5, "seed": rng.make_seed(3, device) if stochastic else None}
    out = quantize_matmul_requantize(*operands, **options, stream=4, hidden_stream=1)
    _assert_equal(out, reference.quantize_matmul_requantize(*operands, **options, stream=4, hidden_stream=1))


@pytest.mark.parametrize(("N", "K", "M"), SHAPES)
def test_one_kernel_gives_the_results_of_two(
    device: str, monkeypatch: pytest.MonkeyPatch, N: int, K: int, M: int
) -> None:
    x, w_q, w_scale = _operands(N, K, M, device)
    seed = rng.make_seed(3, device)
    calls = [
        lambda: quantize_matmul(x, w_q, w_scale, seed=seed, stream=1),
        lambda: quantize_matmul_requantize(x, w_q, w_scale, seed=seed, stream=1, hidden_stream=2),
    ]
    chosen = [call() for call in calls]
    _assert_equal(chosen[0][1:], quantize(x, seed=seed, stream=1))
    for name in ("quantize_matmul", "quantize_matmul_requantize"):
        monkeypatch.setattr(tuning, name, lambda *sizes: None)
    for call, expected in zip(calls, chosen, strict=True):
        _assert_equal(call(), expected)


def test_rows_that_fit_take_one_kernel(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operands = _operands(3, 128, 256, device)
    wide = _operands(3, tuning.FUSED_MAX_INPUTS + 1, 16, device)
    monkeypatch.delattr(matmul_module, "quantize")
    quantize_matmul(*operands)
    quantize_matmul_requantize(*operands)
    for function in (quantize_matmul, quantize_matmul_requantize):
        with pytest.raises(NameError, match="quantize"):
            function(*wide)


@pytest.mark.parametrize("dtype", FLOATS)
def test_fused_products_read_and_write_every_type(device: str, dtype: torch.dtype) -> None:
    x = torch.randn(20, 33, device=device).to(dtype)
    w_q, w_scale = random_codes(34, 33, device), torch.full((34,), 1e-2, device=device)
    expected, *expected_rest = reference.quantize_matmul(x, w_q, w_scale)
    out, *rest = quantize_matmul(x, w_q, w_scale, out_dtype=dtype)
    assert out.dtype == dtype
    assert_within(out, expected, storage_error(dtype) * expected.abs() + 2.0**-24)  # fp16 is subnormal below 2^-14
    _assert_equal(tuple(rest), tuple(expected_rest))
    out = quantize_matmul_requantize(x, w_q, w_scale)
    _assert_equal(out, reference.quantize_matmul_requantize(x, w_q, w_scale))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", [quantize_matmul, quantize_matmul_requantize])
def test_fused_products_take_any_strides(device: str, layout: str, function: Callable[..., tuple[Tensor, ...]]) -> None:
    x, w_q, w_scale = _operands(20, 33, 34, device)
    view, seed = LAYOUTS[layout], rng.make_seed(3, device)
    strided = function(view(x), view(w_q), w_scale.repeat_interleave(2)[::2], seed=seed)
    _assert_equal(strided, function(x, w_q, w_scale, seed=seed))


@pytest.mark.parametrize("far", [far_columns, far_rows])
@pytest.mark.parametrize("function", [quantize_matmul, quantize_matmul_requantize])
def test_fused_products_find_elements_beyond_32_bit_offsets(
    device: str, far: Callable[[Tensor], Tensor], function: Callable[..., tuple[Tensor, ...]]
) -> None:
    x, w_q, w_scale = torch.randn(3, 5, device=device).half(), random_codes(2, 5, device), random_scales(2, device)
    expected = function(x, w_q, w_scale)
    _assert_equal(function(far(x), w_q, w_scale), expected)
    _assert_equal(function(x, far(w_q), w_scale), expected)


@pytest.mark.parametrize("K", SIZES)
@pytest.mark.parametrize("function", [quantize_matmul, quantize_matmul_requantize])
def test_fused_products_use_nothing_outside_a_view(
    device: str, K: int, function: Callable[..., tuple[Tensor, ...]]
) -> None:
    x, w_q, w_scale = _operands(19, K, 18, device)
    inside = (surrounded(x, float("nan")), surrounded(w_q, 77), w_scale)
    _assert_equal(function(*inside), function(x, w_q, w_scale))


def test_fused_products_leave_their_inputs_alone(device: str) -> None:
    operands, seed = _operands(20, 33, 34, device), rng.make_seed(1, device)
    before = [x.clone() for x in (*operands, seed)]
    quantize_matmul(*operands, torch.zeros(34, device=device), seed=seed)
    quantize_matmul_requantize(*operands, seed=seed)
    assert all(torch.equal(a, b) for a, b in zip((*operands, seed), before, strict=True))


@quiet
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_fused_products_keep_poison_in_its_row(device: str, value: float) -> None:
    x, w_q, w_scale = _operands(6, 33, 34, device)
    clean, clean_q, _ = quantize_matmul(x, w_q, w_scale)
    clean_hidden = quantize_matmul_requantize(x, w_q, w_scale)[0]
    x[2, 31] = value
    others = [0, 1, 3, 4, 5]
    epilogue = activation("relu", 6, 34, device)
    out, x_q, x_scale = quantize_matmul(x, w_q, w_scale, activation=epilogue)
    assert out[2].isnan().all()
    assert torch.equal(out[others], clean[others].relu())
    assert torch.equal(x_q[others], clean_q[others])
    assert not x_q[2].any()
    assert x_scale.isnan().nonzero().tolist() == [[2]]
    assert epilogue.mask[2].tolist() == [255, 255, 255, 255, 3]  # a NaN passes, and so does its gradient
    hidden, hidden_scale, _, _ = quantize_matmul_requantize(x, w_q, w_scale)
    assert torch.equal(hidden[others], clean_hidden[others])
    assert hidden_scale.isnan().nonzero().tolist() == [[2]]


def test_rows_of_zeros_have_the_scale_zero(device: str) -> None:
    x, w_q, w_scale = _operands(5, 33, 34, device)
    x[1], x[3] = 0.0, 1e-36
    bias = torch.randn(34, device=device)
    out, x_q, x_scale = quantize_matmul(x, w_q, w_scale, bias, seed=rng.make_seed(8, device))
    assert torch.equal(out[[1, 3]], bias.expand(2, 34))
    assert not x_q[[1, 3]].any()
    assert not x_scale[[1, 3]].any()
    hidden, hidden_scale, _, _ = quantize_matmul_requantize(x, w_q, w_scale, seed=rng.make_seed(8, device))
    assert not hidden[[1, 3]].any()
    assert not hidden_scale[[1, 3]].any()


@pytest.mark.parametrize(("N", "K", "M"), [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_fused_products_of_nothing(device: str, N: int, K: int, M: int) -> None:
    operands, bias, seed = _operands(N, K, M, device), torch.randn(M, device=device), rng.make_seed(1, device)
    epilogue, expected_epilogue = (activation("relu_dropout", N, M, device) for _ in range(2))
    out = quantize_matmul(*operands, bias, seed=seed, activation=epilogue)
    _assert_equal(out, reference.quantize_matmul(*operands, bias, seed=seed, activation=expected_epilogue))
    assert torch.equal(epilogue.mask, expected_epilogue.mask)
    hidden = quantize_matmul_requantize(*operands, seed=seed)
    _assert_equal(hidden, reference.quantize_matmul_requantize(*operands, seed=seed))


def test_seeds_and_streams_of_fused_products_change_codes_and_repeat_them(device: str) -> None:
    x, w_q, w_scale = _operands(20, 33, 34, device)

    def run(seed: int, stream: int, hidden_stream: int) -> tuple[Tensor, ...]:
        return quantize_matmul_requantize(
            x, w_q, w_scale, seed=rng.make_seed(seed, device), stream=stream, hidden_stream=hidden_stream
        )

    base = run(1, 0, 1)
    _assert_equal(run(1, 0, 1), base)
    other_seed, other_stream, other_hidden = run(2, 0, 1), run(1, 5, 1), run(1, 0, 5)
    assert not torch.equal(other_seed[2], base[2])
    assert not torch.equal(other_stream[2], base[2])
    assert torch.equal(other_hidden[2], base[2])
    assert not torch.equal(other_hidden[0], base[0])


def test_seeds_of_dropout_change_what_is_kept_and_not_the_codes(device: str) -> None:
    operands = _operands(20, 33, 34, device)
    epilogues = [activation("dropout", 20, 34, device, seed=seed) for seed in (1, 2)]
    codes = [quantize_matmul(*operands, activation=epilogue)[1] for epilogue in epilogues]
    assert not torch.equal(epilogues[0].mask, epilogues[1].mask)
    assert torch.equal(*codes)
