"""The native activations equal the reference, bit for bit, types and layouts included."""

import pytest
import torch
from qgnn.kernels.cpu.activation import activation, activation_backward

from activation_cases import (
    KEPT,
    assert_backward_equals_reference,
    assert_forward_equals_reference,
    assert_no_code_overflows,
    backward_operands,
    dropout_of,
)
from kernel_cases import FLOATS, LAYOUTS, SIZES, surrounded

WIDTHS = [*SIZES, 8, 512, 519, 1433]  # rows are dealt with in blocks of 512 columns
NAMES = pytest.mark.parametrize("name", KEPT)


@pytest.mark.parametrize("F", WIDTHS)
@NAMES
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_activation_equals_reference(F: int, name: str, p: float) -> None:
    x, bias, residual = (2 * torch.randn(shape) for shape in ((21, F), (F,), (21, F)))
    x[3], x[4], x[5], x[6] = float("nan"), 0.0, float("inf"), -float("inf")
    for seed in (None, 3):
        assert_forward_equals_reference(activation, name, p, x, bias, residual, seed)
    assert_forward_equals_reference(activation, name, p, x)


def test_no_code_overflows() -> None:
    assert_no_code_overflows(activation, "cpu")


@pytest.mark.parametrize("F", WIDTHS)
@NAMES
@pytest.mark.parametrize("sum_columns", [False, True])
def test_activation_backward_equals_reference(F: int, name: str, sum_columns: bool) -> None:
    options = {**backward_operands(name, 21, F, "cpu"), "sum_columns": sum_columns}
    if name in ("none", "leaky_relu"):
        options["dropout"] = dropout_of(0.3, "cpu")
    assert_backward_equals_reference(activation_backward, torch.randn(21, F), **options)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", [*LAYOUTS, "surrounded"])
@NAMES
def test_rows_of_any_type_and_layout(dtype: torch.dtype, layout: str, name: str) -> None:
    change = LAYOUTS.get(layout, lambda t: surrounded(t, torch.nan))
    x, bias, residual = (torch.randn(shape).to(dtype) for shape in ((21, 33), (33,), (21, 33)))
    assert_forward_equals_reference(activation, name, 0.3, change(x), bias, change(residual))
    options = {**backward_operands(name, 21, 33, "cpu", dtype), "sum_columns": True}
    assert_backward_equals_reference(activation_backward, change(x), **options)


@NAMES
def test_threads_change_nothing(threads: int, name: str) -> None:
    x = torch.randn(1001, 133)
    assert_forward_equals_reference(activation, name, 0.3, x, None, x)
    options = {**backward_operands(name, 1001, 133, "cpu"), "sum_columns": True}
    _, sums = assert_backward_equals_reference(activation_backward, x, **options)
    torch.set_num_threads(1)
    assert torch.equal(sums, activation_backward(x, factor=1 / 0.6, **options)[1])


@pytest.mark.parametrize("shape", [(0, 7), (4, 0), (0, 0)])
@NAMES
def test_nothing(shape: tuple[int, int], name: str) -> None:
    x = torch.randn(shape)
    assert assert_forward_equals_reference(activation, name, 0.3, x)[0].shape == shape
    options = {**backward_operands(name, *shape, "cpu"), "sum_columns": True}
    assert_backward_equals_reference(activation_backward, x, **options)
