from collections.abc import Callable

import pytest
import torch
from qgnn.kernels.matmul_shared import matmul_shared
from torch import Tensor

from kernel_cases import FLOATS, LAYOUTS, assert_within, far_columns, far_rows, quiet, storage_error, surrounded
from qgnn import reference
from shared_cases import BLOCK_SIZES, EXTREMES, SHAPES, assert_equal, operands_of, options_of


@pytest.mark.parametrize("G", BLOCK_SIZES)
@pytest.mark.parametrize(("N", "K", "M"), SHAPES)
def test_matmul_shared_equals_reference(device: str, N: int, K: int, M: int, G: int) -> None:
    """In every bit: dot products are exact, and sums are made in the same order."""
    o = operands_of(N, K, M, G, bias=K % 2 == 0).to(device)
    out = matmul_shared(*o, **options_of(G))
    assert_equal(out, reference.matmul_shared(*o, **options_of(G)))
    assert torch.equal(out, matmul_shared(*o, **options_of(G)))


@pytest.mark.parametrize("G", [1, 20, 64, 128])
def test_blocks_of_other_sizes(device: str, G: int) -> None:
    o = operands_of(5, 130, 3, G).to(device)
    assert_equal(matmul_shared(*o, **options_of(G)), reference.matmul_shared(*o, **options_of(G)))


@quiet
@pytest.mark.parametrize("exponents", EXTREMES)
@pytest.mark.parametrize("fraction_bits", [0, 22])
def test_extreme_exponents_equal_reference(device: str, exponents: str, fraction_bits: int) -> None:
    o = operands_of(9, 70, 11, 16, exponents).to(device)
    options = options_of(16, fraction_bits=fraction_bits)
    assert_equal(matmul_shared(*o, **options), reference.matmul_shared(*o, **options))


@pytest.mark.parametrize("G", [16, 128])
def test_the_largest_dot_products_are_exact(device: str, G: int) -> None:
    o = operands_of(3, 2 * G, 2, G, bias=False).to(device)
    o.x_q.fill_(-128)
    o.w_q.fill_(-128)
    o.w_q[1, ::3] = 127
    assert_equal(matmul_shared(*o, **options_of(G)), reference.matmul_shared(*o, **options_of(G)))


@quiet
def test_poisoned_blocks_stay_in_their_row_and_column(device: str) -> None:
    o = operands_of(20, 40, 34, 16).to(device)
    expected = reference.matmul_shared(*o, **options_of(16))
    o.x_exponent[3, 2], o.w_exponent[5, 0] = 255, 255
    expected[3], expected[:, 5] = float("nan"), float("nan")
    assert_equal(matmul_shared(*o, **options_of(16)), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_type_of_result_and_bias(device: str, dtype: torch.dtype) -> None:
    o = operands_of(20, 33, 34, 16).to(device)
    o = o._replace(bias=o.bias.to(dtype), x_exponent=o.x_exponent.fill_(127), w_exponent=o.w_exponent.fill_(127))
    expected = reference.matmul_shared(*o, **options_of(16))
    out = matmul_shared(*o, **options_of(16, out_dtype=dtype))
    assert out.dtype == dtype
    assert_within(out, expected, storage_error(dtype) * expected.abs() + 2.0**-24)  # fp16 is subnormal below 2^-14


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(device: str, layout: str) -> None:
    o, view = operands_of(20, 70, 34, 16).to(device), LAYOUTS[layout]
    strided = (*map(view, o[:4]), o.bias.repeat_interleave(2)[::2])
    assert_equal(matmul_shared(*strided, **options_of(16)), matmul_shared(*o, **options_of(16)))


@pytest.mark.parametrize("move", [far_columns, far_rows])
@pytest.mark.parametrize("far", ["x_q", "w_q"])
def test_elements_beyond_32_bit_offsets(device: str, move: Callable[[Tensor], Tensor], far: str) -> None:
    o = operands_of(3, 16, 2, 16).to(device)
    moved = o._replace(**{far: move(getattr(o, far))})
    assert_equal(matmul_shared(*moved, **options_of(16)), matmul_shared(*o, **options_of(16)))


@pytest.mark.parametrize("K", [7, 33, 130])
def test_nothing_outside_a_view_is_used(device: str, K: int) -> None:
    o = operands_of(19, K, 18, 16).to(device)
    inside = (*(surrounded(t, 99) for t in o[:4]), o.bias)
    before = [t.clone() for t in inside]
    assert_equal(matmul_shared(*inside, **options_of(16)), reference.matmul_shared(*o, **options_of(16)))
    assert all(torch.equal(a, b) for a, b in zip(inside, before, strict=True))


@pytest.mark.parametrize(("N", "K", "M"), [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_products_of_nothing(device: str, N: int, K: int, M: int) -> None:
    o = operands_of(N, K, M, 16).to(device)
    assert_equal(matmul_shared(*o, **options_of(16)), reference.matmul_shared(*o, **options_of(16)))
