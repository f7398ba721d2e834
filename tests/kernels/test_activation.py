"""The Triton kernels of activations equal the reference, bit for bit."""

from collections.abc import Callable

import pytest
import torch
from qgnn.kernels import tuning
from qgnn.kernels.activation import activation, activation_backward
from torch import Tensor

from activation_cases import (
    KEPT,
    assert_backward_equals_reference,
    assert_forward_equals_reference,
    assert_no_code_overflows,
    backward_operands,
    dropout_of,
)
from kernel_cases import FLOATS, LAYOUTS, SIZES, far_columns, far_rows, quiet, storage_error, surrounded

NAMES = pytest.mark.parametrize("name", KEPT)
DROPOUT = pytest.mark.parametrize("p", [0.0, 0.3])


@pytest.mark.parametrize("F", [*SIZES, 600])
@NAMES
@DROPOUT
def test_activation_equals_reference(device: str, F: int, name: str, p: float) -> None:
    x, bias, residual = (2 * torch.randn(shape, device=device) for shape in ((9, F), (F,), (9, F)))
    assert_forward_equals_reference(activation, name, p, x, bias, residual)


@pytest.mark.parametrize("seed", [None, 4])
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_codes_of_derivatives_of_dropped_elements_are_zero(device: str, seed: int | None, p: float) -> None:
    x = torch.randn(40, 33, device=device)
    y, kept = assert_forward_equals_reference(activation, "elu_codes", p, x, seed=seed)
    assert not kept["derivative"][y == 0].any()
    assert bool(kept["derivative"].any()) == (p < 1)


def test_no_code_overflows(device: str) -> None:
    assert_no_code_overflows(activation, device)


@quiet
@NAMES
def test_special_values(device: str, name: str) -> None:
    """Zeros, denormals, what overflows, infinities, NaN, and where the exponential ends."""
    x = torch.tensor(
        [0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, torch.inf, -torch.inf, torch.nan, -87.5, -88.1, -1e-7, 1.0]
    )
    y, kept = assert_forward_equals_reference(activation, name, 0.0, x.expand(3, -1).to(device))
    assert y[:, 8].isnan().all()
    if name == "elu_codes":  # 1 of what is at most 1.2
        assert (kept["derivative"][:, [2, 4, 6, 8, 12]].float() - 255 / 1.2).abs().max() < 1
        assert (kept["derivative"][:, :2] == 255).all()  # the largest there is
        assert not kept["derivative"][:, [5, 7, 9, 10]].any()


@pytest.mark.parametrize("dtype", FLOATS)
@NAMES
def test_rows_of_any_type(device: str, dtype: torch.dtype, name: str) -> None:
    x, bias, residual = (torch.randn(shape, device=device).to(dtype) for shape in ((9, 33), (33,), (9, 33)))
    rounded = storage_error(dtype)
    assert_forward_equals_reference(activation, name, 0.3, x, bias.float(), residual, rounded=rounded)
    assert_forward_equals_reference(activation, name, 0.3, x, bias, rounded=rounded)
    options = {**backward_operands(name, 9, 33, device, dtype), "sum_columns": True}
    assert_backward_equals_reference(activation_backward, residual, rounded, **options)
    assert_backward_equals_reference(activation_backward, residual, **options, out_dtype=torch.float32)


@pytest.mark.parametrize("layout", [*LAYOUTS, "surrounded"])
def test_rows_of_any_strides(device: str, layout: str) -> None:
    change = LAYOUTS.get(layout, lambda t: surrounded(t, torch.nan))
    x, residual = (change(torch.randn(19, 33, device=device)) for _ in range(2))
    bias = torch.randn(66, device=device)[::2]
    assert_forward_equals_reference(activation, "relu", 0.3, x, bias, residual)
    options = {"mask": backward_operands("relu", 19, 33, device)["mask"], "sum_columns": True}
    assert_backward_equals_reference(activation_backward, x, **options)


@pytest.mark.parametrize("far", [far_columns, far_rows])
def test_rows_beyond_32_bit_offsets(device: str, far: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 5, device=device).half()
    rounded = storage_error(x.dtype)
    assert_forward_equals_reference(activation, "leaky_relu", 0.0, far(x), None, far(-2 * x), rounded=rounded)
    assert_backward_equals_reference(
        activation_backward, far(x), rounded, mask=backward_operands("relu", 2, 5, device)["mask"]
    )


@pytest.mark.parametrize("F", [*SIZES, 600])
@NAMES
@pytest.mark.parametrize("sum_columns", [False, True])
def test_activation_backward_equals_reference(device: str, F: int, name: str, sum_columns: bool) -> None:
    options = {**backward_operands(name, 21, F, device), "sum_columns": sum_columns}
    if name in ("none", "leaky_relu"):
        options["dropout"] = dropout_of(0.3, device)
    assert_backward_equals_reference(activation_backward, torch.randn(21, F, device=device), **options)


@pytest.mark.parametrize("tiles", [1, 2, 5])
def test_programs_sum_several_tiles_of_rows(device: str, monkeypatch: pytest.MonkeyPatch, tiles: int) -> None:
    """Tiles of 8 rows and 512 columns: several programs, the last of which has less to do."""
    monkeypatch.setattr(tuning, "quantize_grad_tiles", lambda *sizes: tiles)
    grad = torch.randn(60, 600, device=device)
    options = {**backward_operands("relu", 60, 600, device), "sum_columns": True}
    first = assert_backward_equals_reference(activation_backward, grad, **options)
    again = assert_backward_equals_reference(activation_backward, grad, **options)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_gradient_that_is_one_value_everywhere(device: str) -> None:
    """That of ``sum()`` has no memory of its own: both strides are 0."""
    grad = torch.ones(1, device=device).expand(300, 33)
    assert_backward_equals_reference(activation_backward, grad, mask=backward_operands("relu", 300, 33, device)["mask"])


@quiet
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_a_relu_or_dropout_removed_poisons_nothing(device: str, value: float) -> None:
    grad = torch.full((2, 33), value, device=device)
    mask = torch.zeros((2, 5), dtype=torch.uint8, device=device)
    assert not activation_backward(grad, mask)[0].any()
    assert not activation_backward(grad, dropout=dropout_of(1.0, device))[0].any()


@pytest.mark.parametrize("shape", [(0, 7), (4, 0), (0, 0)])
@NAMES
def test_nothing(device: str, shape: tuple[int, int], name: str) -> None:
    x = torch.randn(shape, device=device)
    assert assert_forward_equals_reference(activation, name, 0.3, x)[0].shape == shape
    options = {**backward_operands(name, *shape, device), "sum_columns": True}
    _, sums = assert_backward_equals_reference(activation_backward, x, **options)
    assert not sums.any()


def test_operands_are_left_alone(device: str) -> None:
    x, bias, residual = (torch.randn(shape, device=device) for shape in ((9, 33), (33,), (9, 33)))
    before = [t.clone() for t in (x, bias, residual)]
    activation(x, bias, residual, kind="elu", slope=1.0, dropout=dropout_of(0.5, device))
    activation_backward(x, residual.byte()[:, :5].contiguous())
    assert all(torch.equal(t, b) for t, b in zip((x, bias, residual), before, strict=True))
