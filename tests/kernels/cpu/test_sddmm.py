"""The C edge results against the reference: bit for bit, but for dot products of floats."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qgnn.kernels.cpu.sddmm import sddmm
from torch import Tensor

from graphs import GRAPHS, RECTANGULAR
from kernel_cases import (
    FLOATS,
    LAYOUTS,
    SIZES,
    UNIT,
    assert_within,
    csr,
    far_columns,
    random_codes,
    random_scales,
    surrounded,
)
from qgnn import reference

ALL_GRAPHS = {name: (edges, n, n) for name, (edges, n) in GRAPHS.items()} | RECTANGULAR
# Widths of a head with code of their own and the others, full vectors and what they leave, and rows too long to widen.
WIDTHS = [*SIZES, 2, 8, 16, 31, 40, 64, 128, 256, 600, 4096, 5000]
INDEX_TYPES = [torch.int32, torch.int64]
OPS = pytest.mark.parametrize("op", ["dot", "add"])
KINDS = pytest.mark.parametrize("is_int8", [False, True], ids=["floats", "codes"])
GRAPH = RECTANGULAR["wide"]  # 90 edges from 60 nodes into 7

Rows = tuple[Tensor, Tensor, Tensor, Tensor]


def rows_of(graph: tuple[Tensor, int, int], width: int, is_int8: bool = True, dtype: torch.dtype = torch.int32) -> Rows:
    edge_index, S, N = graph
    target, source = (random_codes(n, width, "cpu") if is_int8 else torch.randn(n, width) for n in (N, S))
    return *csr(edge_index, N, "cpu", dtype), target, source


def scales_of(rows: Rows, heads: int = 1) -> dict[str, Tensor]:
    sizes = {"target_scale": rows[2].shape[0], "source_scale": rows[3].shape[0]}
    scales = {name: random_scales(n * heads, "cpu") for name, n in sizes.items()}
    return {name: scale.view(-1, heads) if heads > 1 else scale for name, scale in scales.items()}


def assert_dots(rows: Rows, heads: int = 1) -> None:
    """D products and D - 1 additions, each rounded once."""
    indptr, index, target, source = rows
    t, s = target.double()[torch.repeat_interleave(indptr.diff())], source.double()[index.long()]
    D = target.shape[1] // heads
    terms = (t * s).view(-1, heads, D)
    out = sddmm(*rows, heads=heads)
    assert out.dtype == torch.float32
    assert out.shape == ((index.numel(), heads) if heads > 1 else (index.numel(),))
    bound = 1.01 * (D + 1) * UNIT * terms.abs().sum(2)
    assert_within(out.view(-1, heads), terms.sum(2), bound)


def assert_equals_reference(rows: Rows, **options: Any) -> None:
    out = sddmm(*rows, **options)
    assert out.dtype == torch.float32
    assert torch.equal(out, reference.sddmm(*rows, **options))


@pytest.mark.parametrize("name", ALL_GRAPHS)
@pytest.mark.parametrize("dtype", INDEX_TYPES)
@OPS
def test_codes_equal_reference_on_every_graph(name: str, dtype: torch.dtype, op: str, threads: int) -> None:
    rows = rows_of(ALL_GRAPHS[name], 7, dtype=dtype)
    assert_equals_reference(rows, op=op, **scales_of(rows))


@pytest.mark.parametrize("name", ALL_GRAPHS)
@pytest.mark.parametrize("dtype", INDEX_TYPES)
def test_floats_on_every_graph(name: str, dtype: torch.dtype, threads: int) -> None:
    rows = rows_of(ALL_GRAPHS[name], 33, is_int8=False, dtype=dtype)
    assert_equals_reference(rows, op="add")
    assert_dots(rows)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", INDEX_TYPES)
def test_every_width(width: int, dtype: torch.dtype) -> None:
    codes = rows_of(GRAPH, width, dtype=dtype)
    for op in ("dot", "add"):
        assert_equals_reference(codes, op=op, **scales_of(codes))
    floats = rows_of(GRAPH, width, is_int8=False, dtype=dtype)
    assert_dots(floats)
    assert_equals_reference(floats, op="add")


@pytest.mark.parametrize("heads", [2, 3, 8])
@pytest.mark.parametrize("width", [1, 7, 8, 16, 32, 64, 128, 1024])
def test_every_number_of_heads(heads: int, width: int) -> None:
    codes = rows_of(GRAPH, heads * width)
    for op in ("dot", "add"):
        for scales in ({}, scales_of(codes), scales_of(codes, heads)):
            assert_equals_reference(codes, op=op, heads=heads, **scales)
    assert_dots(rows_of(GRAPH, heads * width, is_int8=False), heads)


@OPS
@KINDS
def test_one_scale_for_all_rows(op: str, is_int8: bool) -> None:
    rows = rows_of(GRAPH, 1, is_int8)  # a product of one column is rounded as in the reference
    one = torch.full((1,), 0.3)
    assert_equals_reference(rows, op=op, target_scale=one, source_scale=one)
    assert_equals_reference(rows, op=op, target_scale=one)
    assert_equals_reference(rows, op=op, source_scale=one)


@pytest.mark.parametrize("width", [2000, 4096, 4097, 70_000, 140_000])
def test_integer_dot_products_are_exact(width: int) -> None:
    """The largest codes: beyond 24 bits, where fp32 would round partial sums, and beyond the 31 of an int32."""
    target, source = torch.full((1, width), -128, dtype=torch.int8), torch.full((3, width), -128, dtype=torch.int8)
    source[1:, 0] = 1
    source[2] *= -1
    exact = (source.long() * target.long()).sum(1)
    assert (exact.abs() > 2**24).all()
    assert torch.equal(sddmm(torch.tensor([0, 3]), torch.arange(3), target, source), exact.float())


@pytest.mark.parametrize("dtype", FLOATS)
def test_half_rows_are_computed_in_fp32(dtype: torch.dtype) -> None:
    indptr, index, target, source = rows_of(GRAPH, 33, is_int8=False)
    half = indptr, index, target.to(dtype), source.to(dtype)
    wide = indptr, index, half[2].float(), half[3].float()
    for op in ("dot", "add"):
        out = sddmm(*half, op=op)
        assert out.dtype == torch.float32
        assert torch.equal(out, sddmm(*wide, op=op))


def test_scales_of_any_float_type() -> None:
    rows = rows_of(GRAPH, 7)
    scales = {name: scale.bfloat16() for name, scale in scales_of(rows).items()}
    assert torch.equal(sddmm(*rows, **scales), sddmm(*rows, **{name: s.float() for name, s in scales.items()}))


@OPS
@KINDS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout: str, is_int8: bool, op: str) -> None:
    rows = rows_of(GRAPH, 33, is_int8)
    strided = [v.repeat_interleave(2)[::2] for v in rows[:2]] + [LAYOUTS[layout](v) for v in rows[2:]]
    options: dict[str, Any] = {"op": op, "heads": 3}
    if is_int8:
        scales = scales_of(rows, 3)
        expected = sddmm(*rows, **options, **scales)
        assert torch.equal(sddmm(*strided, **options, **{k: LAYOUTS[layout](v) for k, v in scales.items()}), expected)
    assert torch.equal(sddmm(*strided, **options), sddmm(*rows, **options))


def test_index_and_indptr_of_different_types() -> None:
    indptr, index, *rows = rows_of(GRAPH, 7)
    assert torch.equal(sddmm(indptr.long(), index, *rows), sddmm(indptr, index, *rows))
    assert torch.equal(sddmm(indptr, index.long(), *rows), sddmm(indptr, index, *rows))


@pytest.mark.parametrize("far", ["target", "source"])
def test_columns_beyond_32_bit_offsets(far: str) -> None:
    indptr, index, target, source = rows_of(GRAPH, 5)
    rows = (far_columns(target), source) if far == "target" else (target, far_columns(source))
    assert torch.equal(sddmm(indptr, index, *rows), sddmm(indptr, index, target, source))


@OPS
@KINDS
@pytest.mark.parametrize("width", SIZES)
def test_nothing_outside_a_view_is_used(width: int, is_int8: bool, op: str) -> None:
    indptr, index, *rows = rows_of(GRAPH, width, is_int8)
    around = [surrounded(x, 99 if is_int8 else float("nan")) for x in rows]
    assert torch.equal(sddmm(indptr, index, *around, op=op), sddmm(indptr, index, *rows, op=op))


@OPS
def test_inputs_are_left_alone(op: str) -> None:
    rows = rows_of(GRAPH, 33)
    scales = scales_of(rows)
    inputs = [*rows, *scales.values()]
    before = [x.clone() for x in inputs]
    sddmm(*rows, op=op, **scales)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


@OPS
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_poison_reaches_the_edges_of_its_rows_and_no_other(op: str, poison: float) -> None:
    indptr, index, target, source = rows_of(GRAPH, 33, is_int8=False)
    clean = sddmm(indptr, index, target, source, op=op)
    poisoned = source.clone()
    poisoned[3, 32] = poison
    out = sddmm(indptr, index, target, poisoned, op=op)
    reached = index == 3
    assert reached.any()
    assert torch.equal(out[~reached], clean[~reached])
    expected = reference.sddmm(indptr, index, target, poisoned, op=op)[reached]
    is_finite = expected.isfinite()
    assert torch.equal(out[reached].isfinite(), is_finite)
    torch.testing.assert_close(out[reached][~is_finite], expected[~is_finite], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("heads", [1, 2])
@KINDS
def test_rows_without_columns(heads: int, is_int8: bool) -> None:
    rows = rows_of(GRAPH, 0, is_int8)
    E = rows[1].numel()
    assert torch.equal(sddmm(*rows, heads=heads), torch.zeros((E, heads) if heads > 1 else (E,)))
    assert sddmm(*rows, op="add", heads=heads).shape == (E, 0)


@pytest.mark.parametrize("codes", ["target", "source"])
def test_codes_with_floats_are_refused(codes: str) -> None:
    indptr, index, target, source = rows_of(GRAPH, 7)
    rows = (target, source.float()) if codes == "target" else (target.float(), source)
    names = r"torch\.int8 and torch\.float32" if codes == "target" else r"torch\.float32 and torch\.int8"
    with pytest.raises(TypeError, match=rf"both operands in int8 or both in a floating-point type \(got {names}\)"):
        sddmm(indptr, index, *rows)


def test_threads_share_a_large_graph() -> None:
    """Parts of rows, a hub of half the edges among them, cover every edge once."""
    N, E = 900, 40_000
    target = torch.cat([torch.randint(N, (E // 2,)), torch.full((E // 2,), 17)])
    edge_index = torch.stack([torch.randint(N, (E,)), target])
    rows = rows_of((edge_index, N, N), 32)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for op in ("dot", "add"):
                assert_equals_reference(rows, op=op, **scales_of(rows))
    finally:
        torch.set_num_threads(before)


@settings(max_examples=60)
@given(
    num_targets=st.integers(1, 12),
    num_sources=st.integers(1, 12),
    num_edges=st.integers(0, 60),
    heads=st.integers(1, 5),
    width=st.integers(1, 70),
    op=st.sampled_from(["dot", "add"]),
    seed=st.integers(0, 2**31),
)
def test_codes_equal_reference_at_any_size(
    num_targets: int, num_sources: int, num_edges: int, heads: int, width: int, op: str, seed: int
) -> None:
    torch.manual_seed(seed)
    edge_index = torch.stack([torch.randint(n, (num_edges,)) for n in (num_sources, num_targets)])
    rows = rows_of((edge_index, num_sources, num_targets), heads * width)
    assert_equals_reference(rows, op=op, heads=heads, **scales_of(rows, heads))
