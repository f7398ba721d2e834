from collections.abc import Callable

import pytest
import torch
from qgnn.kernels import tuning
from qgnn.kernels.matmul_dw import add_partials
from qgnn.kernels.quantize import quantize_grad
from torch import Tensor

from activation_cases import random_mask
from kernel_cases import (
    FLOATS,
    LAYOUTS,
    SIZES,
    UNIT,
    assert_within,
    far_columns,
    far_rows,
    quiet,
    surrounded,
)
from qgnn import reference, rng

FACTOR = 1 / 0.6


def _gradient(N: int, F: int, device: str) -> Tensor:
    return torch.randn(N, F, device=device) * torch.logspace(-3, 3, N, device=device)[:, None]


def _assert_equals_reference(grad: Tensor, mask: Tensor | None, **options: object) -> tuple[Tensor, ...]:
    """Codes and scales in every bit; sums of N fp32 values to within N - 1 roundings, in whatever order."""
    factor = 1.0 if mask is None else FACTOR
    result = quantize_grad(grad, mask=mask, factor=factor, **options)
    codes, scale, sums = reference.quantize_grad(grad, mask=mask, factor=factor, **options)
    assert torch.equal(result[0], codes)
    torch.testing.assert_close(result[1], scale, rtol=0, atol=0, equal_nan=True)
    if sums is None:
        assert result[2] is None
    else:
        wide = grad.float() if mask is None else reference.activation_backward(grad.float(), mask, factor=factor)[0]
        assert result[2].dtype == torch.float32
        assert result[2].shape == sums.shape
        assert_within(result[2], wide.double().sum(0), grad.shape[0] * UNIT * wide.double().abs().sum(0))
    return result


@pytest.mark.parametrize("F", SIZES)
@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("sum_columns", [False, True])
@pytest.mark.parametrize("has_mask", [False, True])
def test_quantize_grad_equals_reference(
    device: str, F: int, granularity: str, sum_columns: bool, has_mask: bool
) -> None:
    grad = _gradient(21, F, device)
    mask = random_mask(21, F, device) if has_mask else None
    options = {"granularity": granularity, "sum_columns": sum_columns, "seed": rng.make_seed(7, device), "stream": 3}
    _assert_equals_reference(grad, mask, **options)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantize_grad_rounds_no_masked_value_before_its_code(
    device: str, dtype: torch.dtype, granularity: str, bits: int
) -> None:
    """The product with the factor stays fp32, whatever the gradient's type."""
    grad = torch.randn(9, 33, device=device).to(dtype)
    _assert_equals_reference(grad, random_mask(9, 33, device), granularity=granularity, bits=bits, sum_columns=True)


@pytest.mark.parametrize("tiles", [1, 2, 5])
def test_programs_sum_several_tiles_of_rows(device: str, monkeypatch: pytest.MonkeyPatch, tiles: int) -> None:
    """Tiles of 16 rows at this width: several programs, the last of which has less to do."""
    monkeypatch.setattr(tuning, "quantize_grad_tiles", lambda *sizes: tiles)
    grad, mask = _gradient(300, 130, device), random_mask(300, 130, device)
    result = _assert_equals_reference(grad, mask, seed=rng.make_seed(1, device), sum_columns=True)
    again = quantize_grad(grad, mask=mask, factor=FACTOR, seed=rng.make_seed(1, device), sum_columns=True)
    assert all(torch.equal(a, b) for a, b in zip(result, again, strict=True))


def test_gradients_wider_than_a_program_give_the_same_codes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grad, mask, seed = _gradient(9, 130, device), random_mask(9, 130, device), rng.make_seed(2, device)
    expected = quantize_grad(grad, mask=mask, factor=FACTOR, seed=seed)
    monkeypatch.setattr(tuning, "QUANTIZE_GRAD_MAX_COLUMNS", 129)
    monkeypatch.delattr(tuning, "quantize_grad")
    result = _assert_equals_reference(grad, mask, seed=seed, sum_columns=True)
    assert torch.equal(result[0], expected[0])
    assert torch.equal(result[1], expected[1])


def test_quantize_grad_holds_rows_of_4096_columns(device: str) -> None:
    grad = _gradient(2, 4096, device)
    grad[0, 4095] = 5e3  # the absmax of a row is its last element
    _assert_equals_reference(grad, random_mask(2, 4096, device), seed=rng.make_seed(2, device), sum_columns=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_any_strides(device: str, layout: str) -> None:
    grad = LAYOUTS[layout](_gradient(19, 33, device))
    mask = random_mask(19, 33, device)
    _assert_equals_reference(grad, mask, seed=rng.make_seed(3, device), sum_columns=True)


def test_a_gradient_that_is_one_value_everywhere(device: str) -> None:
    """That of ``sum()`` has no memory of its own: both strides are 0."""
    grad = torch.ones(1, device=device).expand(300, 33)
    _assert_equals_reference(grad, random_mask(300, 33, device), sum_columns=True)


@pytest.mark.parametrize("far", [far_columns, far_rows])
def test_gradients_beyond_32_bit_offsets(device: str, far: Callable[[Tensor], Tensor]) -> None:
    grad, mask = far(torch.randn(2, 5, device=device).half()), random_mask(2, 5, device)
    _assert_equals_reference(grad, mask, sum_columns=True)


@pytest.mark.parametrize("F", SIZES)
def test_gradients_are_read_inside_a_view(device: str, F: int) -> None:
    grad, mask = surrounded(_gradient(11, F, device), float("nan")), random_mask(11, F, device)
    _assert_equals_reference(grad, mask, sum_columns=True)


def test_gradients_and_masks_are_left_alone(device: str) -> None:
    grad, mask = _gradient(9, 33, device), random_mask(9, 33, device)
    before = grad.clone(), mask.clone()
    quantize_grad(grad, mask=mask, factor=FACTOR, sum_columns=True)
    assert torch.equal(grad, before[0])
    assert torch.equal(mask, before[1])


@quiet
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_poison_in_a_gradient_stays_in_its_row_and_column(device: str, value: float) -> None:
    grad, mask = _gradient(6, 33, device), random_mask(6, 33, device)
    mask[2] = 0xFF
    mask[4] = 0
    grad[2, 31] = value
    grad[4, 5] = value  # what the activation dropped poisons nothing
    codes, scale, sums = quantize_grad(grad, mask=mask, factor=FACTOR, sum_columns=True)
    assert not codes[[2, 4]].any()
    assert scale.isnan().nonzero().tolist() == [[2]]
    assert scale[4] == 0
    assert (~sums.isfinite()).nonzero().tolist() == [[31]]


def test_rows_that_pass_no_gradient_have_the_scale_zero(device: str) -> None:
    grad, mask = torch.ones(5, 33, device=device), torch.zeros((5, 5), dtype=torch.uint8, device=device)
    codes, scale, sums = quantize_grad(grad, mask=mask, seed=rng.make_seed(1, device), sum_columns=True)
    assert not codes.any()
    assert not scale.any()
    assert not sums.any()


@pytest.mark.parametrize("shape", [(0, 7), (4, 0), (0, 0)])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_gradients_of_nothing(device: str, shape: tuple[int, int], granularity: str) -> None:
    grad, mask = torch.randn(shape, device=device), random_mask(*shape, device)
    result = _assert_equals_reference(grad, mask, granularity=granularity, sum_columns=True)
    assert result[0].shape == shape


def test_seeds_and_streams_change_codes_of_gradients(device: str) -> None:
    grad, mask = _gradient(20, 33, device), random_mask(20, 33, device)
    codes = [
        quantize_grad(grad, mask=mask, seed=rng.make_seed(seed, device), stream=stream)[0]
        for seed, stream in [(1, 0), (1, 0), (2, 0), (1, 1)]
    ]
    assert torch.equal(codes[0], codes[1])
    assert not torch.equal(codes[0], codes[2])
    assert not torch.equal(codes[0], codes[3])


@pytest.mark.parametrize(("splits", "shape"), [(1, (3, 5)), (7, (3,)), (132, (33, 7)), (1056, (1,)), (3, (300, 300))])
def test_partial_results_are_added(device: str, splits: int, shape: tuple[int, ...]) -> None:
    partial = torch.randint(-1000, 1000, (splits, *shape), device=device).float()  # every sum fits 24 bits
    assert torch.equal(add_partials(partial), partial.double().sum(0).float())
