"""The C sums and extrema of neighbor rows against exact sums, and against the reference where results are codes."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qgnn.kernels.cpu.spmm import spmm, spmm_extremum, spmm_extremum_dx, spmm_requantize
from torch import Tensor

from graphs import GRAPHS, RECTANGULAR
from kernel_cases import (
    FLOATS,
    LAYOUTS,
    SIZES,
    UNIT,
    assert_within,
    csr,
    dense,
    far_columns,
    random_codes,
    random_scales,
    storage_error,
    surrounded,
)
from qgnn import reference, rng

ALL_GRAPHS = {name: (edges, n, n) for name, (edges, n) in GRAPHS.items()} | RECTANGULAR
# Blocks of 64, 32, 16 and 8 columns and what they leave, and beyond the 1024 columns that are gathered at a time.
WIDTHS = [*SIZES, 3, 8, 15, 16, 40, 47, 64, 72, 96, 256, 600, 1024, 1030]
INDEX_TYPES = [torch.int32, torch.int64]
KINDS = pytest.mark.parametrize("is_int8", [False, True], ids=["floats", "codes"])
GRAPH = RECTANGULAR["wide"]  # 90 edges from 60 nodes into 7

Operands = dict[str, Tensor]


@pytest.fixture(params=[1, 2], ids=["one_thread", "two_threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def graph_of(name: str, dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor, int, int]:
    edge_index, S, N = ALL_GRAPHS[name]
    return *csr(edge_index, N, "cpu", dtype), S, N


def random_rows(S: int, F: int, is_int8: bool) -> Tensor:
    return random_codes(S, F, "cpu") if is_int8 else torch.randn(S, F)


def random_operands(indptr: Tensor, index: Tensor, S: int, F: int, is_int8: bool) -> tuple[Tensor, Operands]:
    """Rows, and everything that may come with them."""
    N = indptr.numel() - 1
    options = {"weight": torch.randn(index.numel()), "row_factor": torch.rand(N), "bias": torch.randn(F)}
    return random_rows(S, F, is_int8), options | {"x_scale": random_scales(S, "cpu")}


def assert_sums(indptr: Tensor, index: Tensor, x: Tensor, **options: Any) -> Tensor:
    """A row of d terms takes d multiply-adds of at most two roundings, and four more roundings: scale times weight, row
    factor, bias, result."""
    out = spmm(indptr, index, x, **options)
    N, E = indptr.numel() - 1, index.numel()
    ones = {"weight": torch.ones(E), "x_scale": torch.ones(1), "row_factor": torch.ones(N), "bias": torch.zeros(1)}
    given = ones | {name: t for name, t in options.items() if isinstance(t, Tensor)}
    exact, magnitude = (
        dense(indptr, index, f(given["weight"]) * f(given["x_scale"]).expand(x.shape[0])[index.long()], x.shape[0])
        @ f(x)
        * f(given["row_factor"])[:, None]
        + f(given["bias"])
        for f in (Tensor.double, lambda t: t.double().abs())
    )
    roundings = 2 * indptr.diff()[:, None] + 4
    subnormal = torch.finfo(out.dtype).smallest_normal * torch.finfo(out.dtype).eps
    bound = roundings * 1.01 * UNIT * magnitude + storage_error(out.dtype) * magnitude + subnormal / 2
    assert_within(out, exact, bound)
    return out


@pytest.mark.parametrize("name", ALL_GRAPHS)
@pytest.mark.parametrize("dtype", INDEX_TYPES)
@KINDS
def test_spmm_is_within_its_error_bound_on_every_graph(name: str, dtype: torch.dtype, is_int8: bool) -> None:
    indptr, index, S, _ = graph_of(name, dtype)
    x, options = random_operands(indptr, index, S, 7, is_int8)
    assert_sums(indptr, index, x, **options)


@pytest.mark.parametrize("width", WIDTHS)
@KINDS
def test_spmm_is_within_its_error_bound_at_every_width(width: int, is_int8: bool) -> None:
    indptr, index, S, _ = graph_of("wide")
    x, options = random_operands(indptr, index, S, width, is_int8)
    assert_sums(indptr, index, x, **options)


@pytest.mark.parametrize("given_names", [(), ("weight",), ("x_scale",), ("row_factor", "bias")], ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_spmm_options_and_types(given_names: tuple[str, ...], dtype: torch.dtype) -> None:
    indptr, index, S, _ = graph_of("power_law")
    x, options = random_operands(indptr, index, S, 33, False)
    out = assert_sums(indptr, index, x.to(dtype), **{name: options[name] for name in given_names})
    assert out.dtype == dtype


def test_spmm_takes_one_scale_for_all_rows_and_writes_the_type_asked_for() -> None:
    indptr, index, S, _ = graph_of("wide")
    out = assert_sums(indptr, index, random_codes(S, 33, "cpu"), x_scale=torch.tensor([0.01]), out_dtype=torch.float16)
    assert out.dtype == torch.float16


@settings(max_examples=60)
@given(
    st.integers(1, 30), st.integers(1, 30), st.integers(0, 200), st.integers(1, 150), st.integers(0, 20), st.booleans()
)
def test_spmm_any_shape(S: int, N: int, E: int, F: int, gap: int, is_int8: bool) -> None:
    """Rows that lie `gap` elements apart in a buffer that ends with the last of them."""
    indptr, index = csr(torch.stack([torch.randint(n, (E,)) for n in (S, N)]), N, "cpu")
    x, options = random_operands(indptr, index, S, F, is_int8)
    buffer = torch.zeros(S * (F + gap) - gap, dtype=x.dtype)
    view = buffer.as_strided((S, F), (F + gap, 1)).copy_(x)
    out = assert_sums(indptr, index, view, **options)
    assert torch.equal(out, spmm(indptr, index, x, **options))


def assert_every_result_equal(first: list[Tensor], second: list[Tensor]) -> None:
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def every_result(indptr: Tensor, index: Tensor, x: Tensor, options: Operands) -> list[Tensor]:
    """Everything that is made of `x`, with a fixed seed."""
    edges = {name: options[name] for name in ("weight", "x_scale")}
    rows = edges | {"row_factor": options["row_factor"]}
    minimum, arg = spmm_extremum(indptr, index, x, **edges, largest=False)
    return [
        spmm(indptr, index, x, **options),
        *spmm_requantize(indptr, index, x, **rows, seed=rng.make_seed(3)),
        *spmm_extremum(indptr, index, x, **edges),
        minimum,
        arg,
        spmm_extremum_dx(index, minimum, arg, x.shape[0], weight=edges["weight"]),
    ]


def hub_graph(num_edges: int, S: int, N: int) -> tuple[Tensor, Tensor]:
    """Row 3 has that many edges, the others a few each."""
    hub = torch.stack([torch.randint(S, (num_edges,)), torch.full((num_edges,), 3)])
    rest = torch.stack([torch.randint(S, (5 * N,)), torch.randint(N, (5 * N,))])
    return csr(torch.cat([hub, rest], dim=1), N, "cpu")


@pytest.mark.parametrize("width", [7, 130])
@KINDS
def test_results_do_not_depend_on_the_number_of_threads(width: int, is_int8: bool, threads: int) -> None:
    """A graph large enough to be shared, with a hub whose columns are."""
    indptr, index = hub_graph(20_000, 500, 3000)
    x, options = random_operands(indptr, index, 500, width, is_int8)
    results = every_result(indptr, index, x, options)
    torch.set_num_threads(3)
    assert_every_result_equal(every_result(indptr, index, x, options), results)


@KINDS
def test_a_hub_is_summed_within_its_error_bound(is_int8: bool, threads: int) -> None:
    indptr, index = hub_graph(20_000, 500, 300)
    x, options = random_operands(indptr, index, 500, 130, is_int8)
    assert_sums(indptr, index, x, **options)


_AT_THE_END_OF_A_PAGE = """
import ctypes, mmap, torch
from qgnn.kernels.cpu.spmm import spmm
page = mmap.PAGESIZE
memory = mmap.mmap(-1, 2 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
buffer = torch.frombuffer(memory, dtype=torch.uint8)
forbidden = ctypes.c_void_p(buffer.data_ptr() + page)
assert ctypes.CDLL(None).mprotect(forbidden, ctypes.c_size_t(page), 0) == 0
indptr, index = torch.tensor([0, 1, 6]), torch.tensor([2, 2, 1, 2, 0, 2])
for dtype, size in ((torch.int8, 1), (torch.float32, 4)):
    for width in (1, 7, 9, 33, 40, 75):
        x = buffer[page - 3 * width * size : page].view(dtype).view(3, width).fill_(2)
        assert torch.equal(spmm(indptr, index, x), torch.tensor([[2.0], [10.0]]).expand(2, width))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="protects a page of memory by a call of Linux")
def test_nothing_behind_the_last_row_is_read() -> None:
    """In a process of its own: a read of the page that follows would end it."""
    result = subprocess.run([sys.executable, "-c", _AT_THE_END_OF_A_PAGE], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("layout", LAYOUTS)
@KINDS
def test_results_do_not_depend_on_strides(layout: str, is_int8: bool) -> None:
    indptr, index, S, _ = graph_of("wide")
    x, options = random_operands(indptr, index, S, 33, is_int8)
    expected = every_result(indptr, index, x, options)
    indptr, index, *values = (v.repeat_interleave(2)[::2] for v in (indptr, index, *options.values()))
    options = dict(zip(options, values, strict=True))
    assert_every_result_equal(every_result(indptr, index, LAYOUTS[layout](x), options), expected)


@KINDS
def test_results_do_not_depend_on_the_index_type(is_int8: bool) -> None:
    graphs = [graph_of("power_law", dtype)[:2] for dtype in INDEX_TYPES]
    x, options = random_operands(*graphs[0], 160, 33, is_int8)
    narrow, wide = (every_result(*graph, x, options) for graph in graphs)
    assert [t.dtype for t in wide if not t.is_floating_point()] == [torch.int8, torch.int64, torch.int64]
    assert_every_result_equal(narrow, [t.to(n.dtype) for t, n in zip(wide, narrow, strict=True)])


def test_aggregation_finds_columns_beyond_32_bit_offsets() -> None:
    indptr, index, S, _ = graph_of("wide")
    x, options = random_operands(indptr, index, S, 5, True)
    expected = every_result(indptr, index, x, options)
    assert_every_result_equal(every_result(indptr, index, far_columns(x), options), expected)


def test_aggregation_finds_rows_beyond_32_bit_offsets() -> None:
    """Only the pages of the values take memory."""
    indptr, index = csr(torch.tensor([[0, 1, 2, 2], [0, 0, 0, 1]]), 2, "cpu")
    x, options = random_operands(indptr, index, 3, 40, True)
    stride = 2**31 // 2 + 1
    view = torch.tensor([], dtype=torch.int8).set_(torch.UntypedStorage(2 * stride + 40), 0, x.shape, (stride, 1))
    expected = every_result(indptr, index, x, options)
    assert_every_result_equal(every_result(indptr, index, view.copy_(x), options), expected)


@pytest.mark.parametrize("width", [*SIZES, 40, 72])
@KINDS
def test_aggregation_uses_nothing_outside_a_view(width: int, is_int8: bool) -> None:
    indptr, index, S, _ = graph_of("wide")
    x, options = random_operands(indptr, index, S, width, is_int8)
    expected = every_result(indptr, index, x, options)
    view = surrounded(x, 99 if is_int8 else float("nan"))
    assert_every_result_equal(every_result(indptr, index, view, options), expected)


def test_aggregation_leaves_its_inputs_alone() -> None:
    indptr, index, S, _ = graph_of("wide")
    x, options = random_operands(indptr, index, S, 33, False)
    inputs = [indptr, index, x, *options.values()]
    before = [t.clone() for t in inputs]
    every_result(indptr, index, x, options)
    assert_every_result_equal(inputs, before)


@pytest.mark.parametrize("name", ALL_GRAPHS)
@pytest.mark.parametrize("stochastic", [False, True])
@KINDS
def test_requantized_codes_are_those_of_the_sums(name: str, stochastic: bool, is_int8: bool) -> None:
    indptr, index, S, _ = graph_of(name)
    x, options = random_operands(indptr, index, S, 33, is_int8)
    del options["bias"]
    rule = {"bits": 8 if stochastic else 4, "seed": rng.make_seed(6) if stochastic else None, "stream": 4}
    codes, scale = spmm_requantize(indptr, index, x, **options, **rule)
    expected_codes, expected_scale = reference.quantize(spmm(indptr, index, x, **options), **rule)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize("width", WIDTHS)
def test_requantized_codes_equal_the_reference_on_exact_sums(width: int) -> None:
    """With weights and scales that are powers of two every sum is exact, whatever made it."""
    indptr, index, S, N = graph_of("power_law")
    options = {
        "weight": 2.0 ** torch.randint(-2, 3, (index.numel(),)),
        "x_scale": 2.0 ** torch.randint(-2, 3, (S,)),
        "row_factor": torch.rand(N),
        "seed": rng.make_seed(6),
    }
    x = random_codes(S, width, "cpu")
    results, expected = (f(indptr, index, x, **options) for f in (spmm_requantize, reference.spmm_requantize))
    assert_every_result_equal(list(results), list(expected))


def assert_extremum_equals_reference(indptr: Tensor, index: Tensor, x: Tensor, **options: Any) -> None:
    for largest in (True, False):
        out, arg = spmm_extremum(indptr, index, x, **options, largest=largest)
        expected, expected_arg = reference.spmm_extremum(indptr, index, x, **options, largest=largest)
        assert out.dtype == expected.dtype
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(arg, expected_arg)


@pytest.mark.parametrize("name", ALL_GRAPHS)
@pytest.mark.parametrize("dtype", INDEX_TYPES)
@KINDS
def test_extremum_equals_reference_on_every_graph(name: str, dtype: torch.dtype, is_int8: bool) -> None:
    """Few different values, so that most extrema are shared by several edges."""
    indptr, index, S, _ = graph_of(name, dtype)
    x = torch.randint(-2, 3, (S, 7)).to(torch.int8 if is_int8 else torch.float32)
    weight = torch.randint(-2, 3, (index.numel(),)).float()
    assert_extremum_equals_reference(indptr, index, x, weight=weight, x_scale=torch.full((1,), 0.5))


@pytest.mark.parametrize("width", WIDTHS)
@KINDS
def test_extremum_equals_reference_at_every_width(width: int, is_int8: bool) -> None:
    indptr, index, S, _ = graph_of("wide")
    x, options = random_operands(indptr, index, S, width, is_int8)
    assert_extremum_equals_reference(indptr, index, x, weight=options["weight"], x_scale=options["x_scale"])


@pytest.mark.parametrize("dtype", FLOATS)
def test_extremum_of_floats_keeps_their_type(dtype: torch.dtype) -> None:
    indptr, index, S, _ = graph_of("wide")
    assert_extremum_equals_reference(indptr, index, torch.randn(S, 33).to(dtype))


def test_extremum_lets_the_first_nan_win_and_compares_infinities() -> None:
    indptr, index = torch.tensor([0, 4, 7, 7]), torch.tensor([0, 1, 2, 3, 0, 0, 1])
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1, inf, -inf, nan], [nan, -inf, -inf, nan], [nan, inf, -inf, inf], [2, nan, -inf, 1]])
    out, arg = spmm_extremum(indptr, index, x)
    assert_extremum_equals_reference(indptr, index, x)
    assert arg.tolist() == [[1, 3, 0, 0], [6, 4, 4, 4], [-1, -1, -1, -1]]
    assert out[1, 1:3].tolist() == [inf, -inf]
    assert torch.equal(out[2], torch.zeros(4))


@pytest.mark.parametrize("dtype", INDEX_TYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_extremum_gradient_equals_reference(dtype: torch.dtype, weighted: bool, threads: int) -> None:
    indptr, index, S, N = graph_of("power_law", dtype)
    weight = torch.randn(index.numel()) if weighted else None
    _, arg = spmm_extremum(indptr, index, torch.randn(S, 300), weight=weight)
    grad = torch.randn(N, 300)
    dx, expected = (f(index, grad, arg, S, weight=weight) for f in (spmm_extremum_dx, reference.spmm_extremum_dx))
    # Either adds the at most E terms of an element in any order; the product with the weight is one more rounding.
    magnitude = reference.spmm_extremum_dx(index, grad.abs(), arg, S, weight=None if weight is None else weight.abs())
    assert_within(dx, expected, 2 * 1.01 * (index.numel() + 1) * UNIT * magnitude)


@KINDS
def test_poison_reaches_the_rows_that_aggregate_it_and_no_other(is_int8: bool) -> None:
    indptr, index, S, N = graph_of("random")
    x, scale = random_rows(S, 33, is_int8), random_scales(S, "cpu")
    clean = spmm(indptr, index, x, x_scale=scale)
    reached = dense(indptr, index, torch.ones_like(index), S)[:, S - 1] > 0  # the row that a padded load would leave
    assert 0 < reached.sum() < N
    if is_int8:
        scale[S - 1] = float("nan")
    else:
        x[S - 1] = float("inf")
    out = spmm(indptr, index, x, x_scale=scale)
    assert not out[reached].isfinite().any()
    assert torch.equal(out[~reached], clean[~reached])
    codes, out_scale = spmm_requantize(indptr, index, x, x_scale=scale)
    assert torch.equal(out_scale.isnan(), reached)
    assert not codes[reached].any()
    assert torch.equal(spmm_extremum(indptr, index, x, x_scale=scale)[0].isfinite().all(1), ~reached)


@pytest.mark.parametrize("shape", [(5, 0), (0, 3)])
def test_aggregation_of_nothing(shape: tuple[int, int]) -> None:
    indptr, index = torch.zeros(5, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    x, scale = random_codes(*shape, "cpu"), random_scales(shape[0], "cpu")
    assert torch.equal(spmm(indptr, index, x, x_scale=scale), torch.zeros(4, shape[1]))
    codes, out_scale = spmm_requantize(indptr, index, x, x_scale=scale)
    assert codes.shape == (4, shape[1])
    assert not codes.any()
    assert torch.equal(out_scale, torch.zeros(4))
    out, arg = spmm_extremum(indptr, index, x, x_scale=scale)
    assert torch.equal(out, torch.zeros(4, shape[1]))
    assert torch.equal(arg, torch.full((4, shape[1]), -1, dtype=torch.int32))
    assert torch.equal(spmm_extremum_dx(index, out, arg, shape[0]), torch.zeros(shape))
