"""The native epilogue equals the reference, bit for bit, and so does the way back through it."""

import pytest
import torch
from qgnn.kernels.cpu.epilogue import activate
from qgnn.kernels.cpu.matmul import matmul, quantize_matmul, quantize_matmul_requantize
from qgnn.kernels.cpu.quantize import quantize_grad
from qgnn.kernels.cpu.spmm import spmm
from torch import Tensor

from graphs import GRAPHS
from kernel_cases import FLOATS, LAYOUTS, SIZES, UNIT, assert_within, csr, random_codes, random_scales, surrounded
from qgnn import reference, rng
from qgnn.activation import Activation, dropout_threshold, mask_width
from qgnn.reference.activation import activate as reference_activate

WIDTHS = [*SIZES, 8, 512, 519, 1433]  # random bits are made for 512 columns at a time
CASES = pytest.mark.parametrize(("relu", "p"), [(True, 0.0), (False, 0.3), (True, 0.3), (True, 1.0)])


def twins(num_rows: int, width: int, relu: bool, p: float) -> tuple[Activation, Activation]:
    """The same activation with a mask for each side."""
    a = Activation(relu, dropout_threshold(p), rng.make_seed(2), 6, None)
    masks = [torch.full((num_rows, mask_width(width)), 77, dtype=torch.uint8) for _ in range(2)]
    return a._replace(mask=masks[0]), a._replace(mask=masks[1])


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("width", WIDTHS)
@CASES
def test_activate_equals_reference(width: int, relu: bool, p: float) -> None:
    y = torch.randn(21, width)
    y[3], y[4], y[5] = float("nan"), 0.0, float("inf")
    ours, theirs = twins(21, width, relu, p)
    expected = reference_activate(y, theirs)
    activate(y, ours)
    assert_equal(y, expected)
    assert torch.equal(ours.mask, theirs.mask)


@CASES
def test_threads_and_chunks_change_nothing(threads: int, relu: bool, p: float) -> None:
    y, (ours, theirs) = torch.randn(1001, 133), twins(1001, 133, relu, p)
    expected = reference_activate(y, theirs)
    for first in range(0, 1001, 300):
        activate(y[first : first + 300], ours, first)
    assert_equal(y, expected)
    assert torch.equal(ours.mask, theirs.mask)
    grad = torch.randn(1001, 133)
    for actual, wanted in zip(
        quantize_grad(grad, mask=ours.mask, factor=ours.factor)[:2],
        reference.quantize_grad(grad, mask=ours.mask, factor=ours.factor)[:2],
        strict=True,
    ):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("out_dtype", FLOATS)
@CASES
def test_products_end_in_their_activation(out_dtype: torch.dtype, relu: bool, p: float) -> None:
    x, bias = torch.randn(21, 33), torch.randn(130)
    w_q, w_scale = reference.quantize(torch.randn(130, 33))
    ours, theirs = twins(21, 130, relu, p)
    options = {"seed": rng.make_seed(1), "out_dtype": out_dtype}
    actual = quantize_matmul(x, w_q, w_scale, bias, activation=ours, **options)
    expected = reference.quantize_matmul(x, w_q, w_scale, bias, activation=theirs, **options)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(ours.mask, theirs.mask)
    ours = ours._replace(mask=None)
    assert torch.equal(matmul(*actual[1:], w_q, w_scale, bias, out_dtype=out_dtype, activation=ours), actual[0])


def test_both_roundings_of_a_product_have_their_streams() -> None:
    x, (w_q, w_scale) = torch.randn(21, 33), reference.quantize(torch.randn(13, 33))
    options = {"seed": rng.make_seed(1), "stream": 4, "hidden_stream": 2, "bits": 5}
    actual = quantize_matmul_requantize(x, w_q, w_scale, **options)
    for a, b in zip(actual, reference.quantize_matmul_requantize(x, w_q, w_scale, **options), strict=True):
        assert torch.equal(a, b)
    other = quantize_matmul_requantize(x, w_q, w_scale, **options | {"hidden_stream": 3})
    assert not torch.equal(other[0], actual[0])
    assert torch.equal(other[2], actual[2])


@pytest.mark.parametrize("name", ["random", "hub", "isolated", "no_nodes"])
@pytest.mark.parametrize("width", [7, 130, 1030])
@CASES
def test_sums_end_in_their_activation(name: str, width: int, relu: bool, p: float) -> None:
    """Applied to the native sums themselves, whose last bit may differ from the reference's."""
    edge_index, N = GRAPHS[name]
    indptr, index = csr(edge_index, N, "cpu")
    operands = {"x_scale": random_scales(N, "cpu"), "bias": torch.randn(width), "row_factor": torch.rand(N)}
    x = random_codes(N, width, "cpu")
    ours, theirs = twins(N, width, relu, p)
    expected = reference_activate(spmm(indptr, index, x, **operands), theirs)
    assert torch.equal(spmm(indptr, index, x, activation=ours, **operands), expected)
    assert torch.equal(ours.mask, theirs.mask)


@pytest.mark.parametrize("heads", [1, 2, 13])
@pytest.mark.parametrize("is_int8", [False, True])
def test_each_head_has_its_weights(heads: int, is_int8: bool) -> None:
    edge_index, N = GRAPHS["power_law"]
    indptr, index = csr(edge_index, N, "cpu")
    x, scale = (random_codes(N, 26, "cpu"), random_scales(N, "cpu")) if is_int8 else (torch.randn(N, 26), None)
    operands = {"weight": torch.randn(index.numel(), heads), "x_scale": scale, "bias": torch.randn(26)}
    ours, theirs = twins(N, 26, True, 0.3)
    actual = spmm(indptr, index, x, activation=ours, **operands)
    expected = reference.spmm(indptr, index, x, activation=theirs, **operands)
    absolute = {name: None if t is None else t.abs() for name, t in operands.items()}
    magnitude = reference.spmm(indptr, index, x.double().abs(), **absolute)
    terms = indptr.diff()[:, None] + 4
    settled = expected.abs() > 8 * terms * UNIT * magnitude  # a sum near 0 may fall on either side of the ReLU
    assert_within(actual, torch.where(settled, expected, actual), 4 * terms * UNIT * magnitude)
    assert settled.any()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seed", [None, 3])
def test_quantize_grad_equals_reference(width: int, masked: bool, seed: int | None) -> None:
    grad = torch.randn(21, width) * torch.logspace(-3, 3, 21)[:, None]
    mask = torch.randint(256, (21, mask_width(width)), dtype=torch.uint8) if masked else None
    options = {"seed": None if seed is None else rng.make_seed(seed), "stream": 3, "bits": 6, "factor": 1.25}
    codes, scale, sums = quantize_grad(grad, mask=mask, sum_columns=True, **options)
    expected_codes, expected_scale, expected_sums = reference.quantize_grad(
        grad, mask=mask, sum_columns=True, **options
    )
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scale, expected_scale)
    assert_within(sums, expected_sums, 2 * 21 * UNIT * 1.25 * grad.double().abs().sum(0))
    assert quantize_grad(grad, mask=mask, **options)[2] is None


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", [*LAYOUTS, "surrounded"])
def test_gradients_of_any_type_and_layout(dtype: torch.dtype, layout: str) -> None:
    grad, mask = torch.randn(21, 33).to(dtype), torch.randint(256, (21, 5), dtype=torch.uint8)
    view = surrounded(grad, float("nan")) if layout == "surrounded" else LAYOUTS[layout](grad)
    for granularity in ("row", "tensor"):
        options = {"mask": mask, "factor": 1.5, "seed": rng.make_seed(3), "granularity": granularity}
        actual, expected = quantize_grad(view, **options), reference.quantize_grad(grad, **options)
        assert all(torch.equal(a, b) for a, b in zip(actual[:2], expected[:2], strict=True))


def test_a_dropped_nan_poisons_nothing() -> None:
    grad, mask = torch.randn(2, 8), torch.full((2, 1), 0b11111110, dtype=torch.uint8)
    grad[0, 0] = float("nan")
    codes, scale, sums = quantize_grad(grad, mask=mask, sum_columns=True)
    assert scale.isfinite().all()
    assert codes[0, 0] == 0
    assert sums.isfinite().all()
