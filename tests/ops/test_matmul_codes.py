"""``qgnn::matmul_codes``, ``matmul_codes_dw`` and ``matmul_shared``: products of codes against their float64 values."""

import pytest
import torch
from torch import Tensor

from dense import assert_within, random_codes, random_scale, sum_bound
from op_checks import opcheck
from qgnn import ops, trace
from qgnn.ops._backends import triton_backend
from qgnn.ops.matmul_codes import PASSES, _matmul_codes, _matmul_codes_dw, _matmul_shared
from shared_cases import decoded, operands_of

SHAPES = [(1, 1, 1), (13, 33, 7), (70, 130, 70), (0, 7, 3), (5, 0, 3), (5, 7, 0)]  # N, K, M
LAST = ("forward", "int4")
NONE = torch.tensor(0)


def rows(num_rows: int, width: int, per_tensor: bool = False) -> tuple[Tensor, Tensor]:
    return random_codes(num_rows, width), random_scale(1 if per_tensor else num_rows)


def values(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.double() * scale.double()[:, None]


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matmul_codes_is_the_product_of_its_values(shape: tuple[int, int, int], per_tensor: bool) -> None:
    """The integer sum is exact; converting it, two scales and the bias round once each."""
    N, K, M = shape
    x, w, bias = rows(N, K, per_tensor), rows(M, K, per_tensor), torch.randn(M)
    exact = values(*x) @ values(*w).t()
    assert_within(ops.matmul_codes(*x, *w, None, *LAST), exact, sum_bound(NONE, exact.abs(), 3))
    bound = sum_bound(NONE, exact.abs() + bias.double().abs(), 4)
    assert_within(ops.matmul_codes(*x, *w, bias, *LAST), exact + bias.double(), bound)


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matmul_codes_dw_is_the_product_of_its_values(shape: tuple[int, int, int], per_tensor: bool) -> None:
    """A sum over N rows in fp32, whose terms see both scales and their product."""
    N, K, M = shape
    grad, x = rows(N, M, per_tensor), rows(N, K)
    left, right = values(*grad).t(), values(*x)
    bound = sum_bound(torch.tensor(N), left.abs() @ right.abs(), 3)
    assert_within(ops.matmul_codes_dw(*grad, *x, "int4"), left @ right, bound)


@pytest.mark.parametrize("G", [16, 32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matmul_shared_is_the_product_of_its_values(shape: tuple[int, int, int], G: int) -> None:
    """Products of a block are exact, their powers of two too; sums over the blocks and the bias are fp32."""
    N, K, M = shape
    t = operands_of(N, K, M, G)
    x, w = decoded(t.x_q, t.x_exponent, G, 6), decoded(t.w_q, t.w_exponent, G, 6)
    bias = t.bias.double()
    y = ops.matmul_shared(*t, G, 12, "forward", "msfp12")
    blocks = torch.tensor(-(-K // G))
    assert_within(y, x @ w.t() + bias, sum_bound(blocks, x.abs() @ w.abs().t() + bias.abs(), 1))


@pytest.mark.parametrize("bias", [False, True])
def test_opcheck(bias: bool) -> None:
    x, w = rows(5, 33), rows(7, 33)
    opcheck(ops.matmul_codes, (*x, *w, torch.randn(7) if bias else None, *LAST), compiled=True)
    opcheck(ops.matmul_codes_dw, (*rows(5, 7), *x, "int4"), compiled=True)
    opcheck(ops.matmul_shared, (*operands_of(5, 33, 7, 16, bias=bias), 16, 12, "forward", "msfp12"), compiled=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_bias_of_another_type_changes_none(dtype: torch.dtype) -> None:
    x, w, t = rows(5, 33), rows(7, 33), operands_of(5, 33, 7, 16)
    bias = torch.randn(7).bfloat16()  # exact in all types
    results = [ops.matmul_codes(*x, *w, b, *LAST) for b in (bias.float(), bias.to(dtype))]
    torch.testing.assert_close(*results)
    results = [ops.matmul_shared(*t[:4], b, 16, 12, "forward", "msfp12") for b in (bias.float(), bias.to(dtype))]
    torch.testing.assert_close(*results)


def test_codes_in_columns_are_read_as_such() -> None:
    x, w, scale = random_codes(33, 5), random_codes(33, 7), random_scale(5)
    expected = ops.matmul_codes(x.t().contiguous(), scale, w.t().contiguous(), scale[:1], None, *LAST)
    assert torch.equal(ops.matmul_codes(x.t(), scale, w.t(), scale[:1], None, *LAST), expected)


def test_products_of_codes_have_no_derivative() -> None:
    """Neither codes nor what is beside them: a gradient that reaches one of these operators is a mistake of ours."""
    bias = torch.randn(7, requires_grad=True)
    y = ops.matmul_codes(*rows(5, 33), *rows(7, 33), bias, *LAST)
    with pytest.raises(
        NotImplementedError, match=r"^'qgnn::matmul_codes' has no derivative; give it tensors that need"
    ):
        y.sum().backward()
    y = ops.matmul_shared(*operands_of(5, 33, 7, 16)[:4], bias, 16, 12, "forward", "msfp12")
    with pytest.raises(NotImplementedError, match=r"^'qgnn::matmul_shared' has no derivative"):
        y.sum().backward()
    scale = random_scale(5).requires_grad_()
    dw = ops.matmul_codes_dw(random_codes(5, 7), scale, *rows(5, 3), "int4")
    with pytest.raises(NotImplementedError, match=r"^'qgnn::matmul_codes_dw' has no derivative"):
        dw.sum().backward()


@pytest.mark.parametrize("pass_", PASSES)
def test_a_trace_names_the_pass_and_the_format(pass_: str) -> None:
    with trace() as record:
        ops.matmul_codes(*rows(5, 33), *rows(7, 33), None, pass_, "int4 x int8")
        ops.matmul_shared(*operands_of(5, 33, 7, 16), 16, 12, pass_, "msfp12")
        ops.matmul_codes_dw(*rows(5, 7), *rows(5, 3), "int4")
    assert set(record.ops) == {f"matmul.{pass_}", "matmul.backward_dw"}
    formats = record.ops[f"matmul.{pass_}"]["formats"]
    assert formats == {"int4 x int8": 1, "msfp12": 1} | ({"int4": 1} if pass_ == "backward_dw" else {})


def test_operators_on_the_kernels(device: str) -> None:
    x, w, t = rows(5, 33), rows(7, 33), operands_of(5, 33, 7, 16)
    grad, x = (random_codes(5, 7), 0.5 + torch.rand(5)), (x[0], 0.5 + torch.rand(5))

    def there(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if t is None else t.to(device) for t in tensors)

    y = _matmul_codes(triton_backend(), *there(*x, *w, None), *LAST)
    torch.testing.assert_close(y.cpu(), ops.matmul_codes(*x, *w, None, *LAST))
    dw = _matmul_codes_dw(triton_backend(), *there(*grad, *x), "int4")
    magnitude = values(*grad).t().abs() @ values(*x).abs()
    # terms see two roundings to fp16, 2^-11 each; their factors are all alike, so that none is subnormal
    assert_within(dw.cpu(), values(*grad).t() @ values(*x), 2.0**-9 * magnitude)
    y = _matmul_shared(triton_backend(), *there(*t), 16, 12, "forward", "msfp12")
    assert torch.equal(y.cpu(), ops.matmul_shared(*t, 16, 12, "forward", "msfp12"))
