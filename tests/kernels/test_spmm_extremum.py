import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qgnn.kernels.spmm import make_plan, spmm_extremum
from torch import Tensor

from kernel_cases import FLOATS, LAYOUTS, SIZES, csr, far_columns, quiet, random_codes, random_scales
from qgnn import reference
from spmm_cases import ALL_GRAPHS, GRAPH, graph


def _assert_equals_reference(
    indptr: Tensor, index: Tensor, x: Tensor, cap: int | None = None, **options: object
) -> None:
    """Messages are single products, so values and edges are the reference's, bit for bit."""
    plan = None if cap is None else make_plan(indptr, index.numel(), cap=cap)
    out, arg = spmm_extremum(indptr, index, x, **options, plan=plan)
    expected_out, expected_arg = reference.spmm_extremum(indptr, index, x, **options)
    assert out.dtype == expected_out.dtype
    assert arg.dtype == expected_arg.dtype
    assert torch.equal(arg, expected_arg)
    assert torch.equal(out.isnan(), expected_out.isnan())
    assert torch.equal(out.nan_to_num(1e9), expected_out.nan_to_num(1e9))


@pytest.mark.parametrize("name", ALL_GRAPHS)
def test_extremum_equals_reference_on_every_graph(device: str, name: str) -> None:
    indptr, index, S, _ = graph(name, device)
    _assert_equals_reference(
        indptr,
        index,
        random_codes(S, 7, device),
        weight=torch.randn(index.numel(), device=device),
        x_scale=random_scales(S, device),
        largest=index.numel() % 2 == 0,
    )


@pytest.mark.parametrize("width", [*SIZES, 300])
@pytest.mark.parametrize("is_int8", [True, False])
def test_extremum_equals_reference_at_every_width(device: str, width: int, is_int8: bool) -> None:
    indptr, index = csr(GRAPH[0], GRAPH[2], device)
    x = random_codes(GRAPH[1], width, device) if is_int8 else torch.randn(GRAPH[1], width, device=device)
    _assert_equals_reference(indptr, index, x, x_scale=random_scales(1, device) if is_int8 else None, largest=is_int8)


@pytest.mark.parametrize("dtype", FLOATS)
def test_extremum_of_floats_keeps_their_type(device: str, dtype: torch.dtype) -> None:
    indptr, index = csr(GRAPH[0], GRAPH[2], device)
    _assert_equals_reference(indptr, index, torch.randn(GRAPH[1], 33, device=device).to(dtype))


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_first_of_equal_values_wins_in_chunks_too(device: str, largest: bool, dtype: torch.dtype) -> None:
    """Values of a handful of integers: nearly every element has several edges to choose from."""
    indptr, index, S, _ = graph("hub", device, dtype)
    x = torch.randint(-2, 3, (S, 5), device=device).float()
    weight = torch.randint(-1, 2, (index.numel(),), device=device).float()
    for cap in (None, 64):
        _assert_equals_reference(indptr, index, x, cap, weight=weight, largest=largest)


VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-40, float("inf"), -float("inf"), float("nan")])


@quiet
@settings(max_examples=12)
@given(
    values=st.lists(VALUES, min_size=1, max_size=20),
    num_rows=st.integers(1, 3),
    cap=st.sampled_from([4, 256]),
    largest=st.booleans(),
    scaled=st.booleans(),
)
def test_infinities_and_nan_follow_the_reference(
    values: list[float], num_rows: int, cap: int, largest: bool, scaled: bool
) -> None:
    """Rows share the edges evenly; the last one gets none of the rest."""
    E = len(values)
    indptr = torch.tensor([min(row * (E // num_rows + 1), E) for row in range(num_rows + 1)] + [E], dtype=torch.int32)
    x = torch.tensor(values)[:, None].repeat(1, 2)
    x[:, 1] = -x[:, 0]
    weight = torch.full((E,), -1.0) if scaled else None
    _assert_equals_reference(indptr, torch.arange(E, dtype=torch.int32), x, cap, weight=weight, largest=largest)


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), far_columns])
def test_extremum_takes_any_strides(device: str, layout: object) -> None:
    indptr, index = csr(GRAPH[0], GRAPH[2], device)
    x, weight = torch.randn(GRAPH[1], 5, device=device), torch.randn(index.numel(), device=device)
    twice = [v.repeat_interleave(2)[::2] for v in (indptr, index, weight)]
    found = spmm_extremum(*twice[:2], layout(x), weight=twice[2])
    expected = spmm_extremum(indptr, index, x, weight=weight)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("shape", [(5, 0), (0, 3)])
def test_extremum_of_nothing(device: str, shape: tuple[int, int]) -> None:
    indptr, index = torch.zeros(5, dtype=torch.int32, device=device), torch.zeros(0, dtype=torch.int32, device=device)
    _assert_equals_reference(indptr, index, torch.zeros(shape, device=device))
