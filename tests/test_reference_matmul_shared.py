"""The product of blocks with shared exponents, against float64 products of the decoded operands."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel_cases import UNIT, assert_within
from qgnn import reference
from shared_cases import BLOCK_SIZES, SHAPES, Operands, decoded, operands_of, options_of

SMALLEST = 2.0**-149


def assert_near_float64(o: Operands, G: int) -> None:
    """A term is exact but where it is denormal: half of the smallest number then. Each of ``blocks`` sums and the bias
    round once; 1.01 is for what errors multiply to."""
    x, w = decoded(o.x_q, o.x_exponent, G, 0), decoded(o.w_q, o.w_exponent, G, 12)
    bias = torch.zeros(()) if o.bias is None else o.bias.double()
    blocks = o.x_exponent.shape[1]
    bound = (x.abs() @ w.abs().t() + bias.abs()) * (blocks + 1) * UNIT * 1.01 + blocks * SMALLEST
    assert_within(reference.matmul_shared(*o, **options_of(G)), x @ w.t() + bias, bound)


@pytest.mark.parametrize("G", [*BLOCK_SIZES, 5, 128])
@pytest.mark.parametrize(("N", "K", "M"), SHAPES)
def test_matmul_shared_is_the_product_of_the_values(N: int, K: int, M: int, G: int) -> None:
    assert_near_float64(operands_of(N, K, M, G), G)


@given(st.data(), st.integers(1, 5), st.integers(1, 40), st.integers(1, 5), st.integers(1, 128))
def test_any_exponents_and_shape(data: st.DataObject, N: int, K: int, M: int, G: int) -> None:
    """All but those whose products overflow."""
    o = operands_of(N, K, M, G, bias=data.draw(st.booleans()))
    o.x_exponent[0], o.w_exponent[0] = data.draw(st.integers(0, 120)), data.draw(st.integers(0, 231))
    assert_near_float64(o, G)


@pytest.mark.parametrize("G", BLOCK_SIZES)
def test_float64_loses_nothing(G: int) -> None:
    """Sums of 130 terms of 16 bits with exponents 58 apart at most: they differ from float64's own by its rounding."""
    o = operands_of(7, 130, 5, G)
    x, w = decoded(o.x_q, o.x_exponent, G, 0), decoded(o.w_q, o.w_exponent, G, 12)
    y = reference.matmul_shared(*o, **options_of(G, out_dtype=torch.float64))
    assert_within(y, x @ w.t() + o.bias.double(), (x.abs() @ w.abs().t() + o.bias.abs()) * 132 * 2.0**-53)


def one(x: int, x_exponent: int, w: int, w_exponent: int, fraction_bits: int = 0) -> float:
    codes = [torch.tensor([[value]], dtype=torch.int8) for value in (x, w)]
    exponents = [torch.tensor([[value]], dtype=torch.uint8) for value in (x_exponent, w_exponent)]
    operands = (codes[0], exponents[0], codes[1], exponents[1])
    return float(reference.matmul_shared(*operands, block_size=1, fraction_bits=fraction_bits))


def test_factors_at_the_ends_of_their_range() -> None:
    assert one(3, 127, -5, 127) == -15
    assert one(3, 0, 1, 127) == 3 * 2.0**-127  # denormal
    assert one(1, 127, 1, 0, 22) == SMALLEST
    assert one(1, 254, 1, 0, 22) == 2.0**-22  # the first product keeps every digit
    assert one(3, 126, 1, 0, 22) == 2 * SMALLEST  # a tie, to even
    assert one(127, 0, 127, 0) == 0
    assert one(1, 254, 1, 127) == 2.0**127
    assert one(2, 254, 1, 127) == float("inf")
    assert one(-2, 0, 1, 254) == float("-inf")  # by the first product, though the value is -2


@pytest.mark.parametrize("G", BLOCK_SIZES)
def test_a_block_that_is_not_finite_poisons_its_row_or_column(G: int) -> None:
    o = operands_of(5, 40, 6, G)
    expected = reference.matmul_shared(*o, **options_of(G))
    o.x_exponent[2, 1], o.w_exponent[4, 0] = 255, 255
    y = reference.matmul_shared(*o, **options_of(G))
    assert y[2].isnan().all()
    assert y[:, 4].isnan().all()
    rest = torch.tensor([0, 1, 3, 4])[:, None], torch.tensor([0, 1, 2, 3, 5])
    assert torch.equal(y[rest], expected[rest])


def test_sums_are_made_in_order_of_the_blocks() -> None:
    """2^24 + 1 + 1 is 2^24 in fp32 if each 1 is added alone, and 2^24 + 2 if they are added first."""
    exponent = torch.tensor([[127 + 24, 127, 127]], dtype=torch.uint8)
    ones = torch.ones((1, 3), dtype=torch.int8)
    zeros = torch.full((1, 3), 127, dtype=torch.uint8)
    for order, expected in (([0, 1, 2], 2.0**24), ([1, 2, 0], 2.0**24 + 2)):
        y = reference.matmul_shared(ones, exponent[:, order], ones, zeros, block_size=1, fraction_bits=0)
        assert float(y) == expected


@pytest.mark.parametrize(("N", "K", "M"), [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_products_of_nothing(N: int, K: int, M: int) -> None:
    o = operands_of(N, K, M, 16)
    y = reference.matmul_shared(*o, **options_of(16))
    assert y.shape == (N, M)
    if K == 0:
        assert torch.equal(y, o.bias.expand(N, M))
