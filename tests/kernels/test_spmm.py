from collections.abc import Callable

import pytest
import torch
from qgnn.kernels.spmm import spmm, spmm_requantize

from graphs import RECTANGULAR
from kernel_cases import (
    FLOATS,
    LAYOUTS,
    SIZES,
    csr,
    dense,
    far_columns,
    quiet,
    random_codes,
    random_scales,
    surrounded,
)
from qgnn import reference, rng
from spmm_cases import ALL_GRAPHS, GRAPH, assert_spmm_within_bound, graph


@pytest.mark.parametrize("name", ALL_GRAPHS)
def test_spmm_is_within_its_error_bound_on_every_graph(device: str, name: str) -> None:
    indptr, index, S, N = graph(name, device)
    assert_spmm_within_bound(
        indptr,
        index,
        random_codes(S, 7, device),
        weight=torch.randn(index.numel(), device=device),
        x_scale=random_scales(S, device),
        row_factor=torch.rand(N, device=device) if N % 2 else None,
        bias=torch.randn(7, device=device) if N % 3 else None,
    )


@pytest.mark.parametrize("width", [*SIZES, 64, 256, 602])
@pytest.mark.parametrize("is_int8", [False, True])
def test_spmm_is_within_its_error_bound_at_every_width(device: str, width: int, is_int8: bool) -> None:
    indptr, index = csr(GRAPH[0], GRAPH[2], device)
    x = random_codes(GRAPH[1], width, device) if is_int8 else torch.randn(GRAPH[1], width, device=device)
    scale = random_scales(GRAPH[1], device) if is_int8 else None
    assert_spmm_within_bound(indptr, index, x, x_scale=scale, weight=torch.randn(index.numel(), device=device))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_spmm_of_floats_keeps_their_type(device: str, dtype: torch.dtype, weighted: bool, scaled: bool) -> None:
    indptr, index = csr(GRAPH[0], GRAPH[2], device)
    out = assert_spmm_within_bound(
        indptr,
        index,
        torch.randn(GRAPH[1], 33, device=device).to(dtype),
        weight=torch.randn(index.numel(), device=device) if weighted else None,
        x_scale=torch.rand(GRAPH[1], device=device) if scaled else None,
    )
    assert out.dtype == dtype


def test_spmm_takes_one_scale_for_all_rows_and_writes_the_type_asked_for(device: str) -> None:
    indptr, index = csr(GRAPH[0], GRAPH[2], device)
    scale = torch.full((1,), 0.01, device=device)
    out = assert_spmm_within_bound(
        indptr, index, random_codes(GRAPH[1], 33, device), x_scale=scale, out_dtype=torch.float16
    )
    assert out.dtype == torch.float16


def test_spmm_takes_64_bit_indices(device: str) -> None:
    x, scale = random_codes(GRAPH[1], 9, device), random_scales(GRAPH[1], device)
    narrow, wide = (
        spmm(*csr(GRAPH[0], GRAPH[2], device, dtype), x, x_scale=scale) for dtype in (torch.int32, torch.int64)
    )
    assert torch.equal(narrow, wide)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_int8", [False, True])
def test_spmm_takes_any_strides(device: str, layout: str, is_int8: bool) -> None:
    indptr, index = csr(GRAPH[0], GRAPH[2], device)
    x = random_codes(GRAPH[1], 33, device) if is_int8 else torch.randn(GRAPH[1], 33, device=device)
    scale, weight = random_scales(GRAPH[1], device), torch.randn(index.numel(), device=device)
    expected = spmm(indptr, index, x, x_scale=scale, weight=weight)
    twice = [v.repeat_interleave(2)[::2] for v in (indptr, index, scale, weight)]
    out = spmm(*twice[:2], LAYOUTS[layout](x), x_scale=twice[2], weight=twice[3])
    assert torch.equal(out, expected)


@pytest.mark.parametrize("aggregate", [spmm, spmm_requantize])
def test_aggregation_finds_columns_beyond_32_bit_offsets(device: str, aggregate: Callable[..., object]) -> None:
    indptr, index = csr(GRAPH[0], GRAPH[2], device)
    x, scale = random_codes(GRAPH[1], 5, device), random_scales(GRAPH[1], device)
    out, expected = (aggregate(indptr, index, rows, x_scale=scale) for rows in (far_columns(x), x))
    pairs = zip(out, expected, strict=True) if isinstance(out, tuple) else [(out, expected)]
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("width", SIZES)
def test_aggregation_uses_nothing_outside_a_view(device: str, width: int) -> None:
    indptr, index = csr(GRAPH[0], GRAPH[2], device)
    codes, scale = random_codes(GRAPH[1], width, device), random_scales(GRAPH[1], device)
    rows = torch.randn(GRAPH[1], width, device=device)
    assert torch.equal(spmm(indptr, index, surrounded(rows, float("nan"))), spmm(indptr, index, rows))
    for x, filler in [(codes, 99), (rows, float("nan"))]:
        out = spmm_requantize(indptr, index, surrounded(x, filler), x_scale=scale)
        expected = spmm_requantize(indptr, index, x, x_scale=scale)
        assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))


def test_aggregation_leaves_its_inputs_alone(device: str) -> None:
    indptr, index = csr(GRAPH[0], GRAPH[2], device)
    inputs = [indptr, index, random_codes(GRAPH[1], 33, device), random_scales(GRAPH[1], device)]
    before = [x.clone() for x in inputs]
    spmm(*inputs[:3], x_scale=inputs[3], bias=torch.ones(33, device=device))
    spmm_requantize(*inputs[:3], x_scale=inputs[3], seed=rng.make_seed(1, device))
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


@pytest.mark.parametrize("name", ["no_nodes", "empty", "isolated", "hub", "duplicates", "no_sources", "tall"])
@pytest.mark.parametrize("stochastic", [False, True])
def test_requantized_codes_equal_reference_on_exact_sums(device: str, name: str, stochastic: bool) -> None:
    """Scales and weights are powers of two, so that every sum is exact in whatever order it is formed."""
    indptr, index, S, N = graph(name, device)
    options = {
        "weight": 2.0 ** torch.randint(-2, 3, (index.numel(),), device=device),
        "x_scale": 2.0 ** torch.randint(-2, 3, (S,), device=device),
        "row_factor": torch.rand(N, device=device) + 0.5,
        "seed": rng.make_seed(6, device) if stochastic else None,
        "stream": 4,
        "bits": 8 if stochastic else 4,
    }
    x = random_codes(S, 33, device)
    codes, scale = spmm_requantize(indptr, index, x, **options)
    expected_codes, expected_scale = reference.spmm_requantize(indptr, index, x, **options)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize("width", [*SIZES, 600, 1030])
def test_requantized_codes_equal_reference_at_every_width(device: str, width: int) -> None:
    indptr, index = csr(RECTANGULAR["one_target"][0], 1, device)
    x, one, seed = random_codes(40, width, device), torch.ones(1, device=device), rng.make_seed(6, device)
    codes, scale = spmm_requantize(indptr, index, x, x_scale=one, seed=seed)
    expected_codes, expected_scale = reference.spmm_requantize(indptr, index, x, x_scale=one, seed=seed)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scale, expected_scale)


@quiet
def test_poison_reaches_the_rows_that_aggregate_it_and_no_other(device: str) -> None:
    indptr, index, S, N = graph("random", device)
    codes, scale = random_codes(S, 33, device), random_scales(S, device)
    rows = torch.randn(S, 33, device=device)
    expected_codes, expected_rows = spmm(indptr, index, codes, x_scale=scale), spmm(indptr, index, rows)
    reached = (dense(indptr, index, torch.ones_like(index), S)[:, 0] > 0).nonzero().flatten()
    others = torch.tensor([row for row in range(N) if row not in reached.tolist()], device=device)
    assert 0 < len(reached) < N
    # Row 0 is the one that masked lanes point at.
    codes[0], scale[0], rows[0] = 0, float("nan"), float("inf")
    rows[0, 1] = float("nan")
    out_codes, out_rows = spmm(indptr, index, codes, x_scale=scale), spmm(indptr, index, rows)
    assert out_codes[reached].isnan().all()
    assert not out_rows[reached].isfinite().any()
    assert torch.equal(out_codes[others], expected_codes[others])
    assert torch.equal(out_rows[others], expected_rows[others])
    assert (
        spmm_requantize(indptr, index, codes, x_scale=scale)[1].isnan().nonzero().flatten().tolist() == reached.tolist()
    )


@pytest.mark.parametrize("shape", [(5, 0), (0, 3), (0, 33), (5, 33)])
def test_aggregation_of_nothing(device: str, shape: tuple[int, int]) -> None:
    indptr, index = torch.zeros(5, dtype=torch.int32, device=device), torch.zeros(0, dtype=torch.int32, device=device)
    x, scale = random_codes(*shape, device), random_scales(shape[0], device)
    assert torch.equal(spmm(indptr, index, x, x_scale=scale), torch.zeros(4, shape[1], device=device))
    codes, out_scale = spmm_requantize(indptr, index, x, x_scale=scale)
    assert codes.shape == (4, shape[1])
    assert not codes.any()
    assert torch.equal(out_scale, torch.zeros(4, device=device))
