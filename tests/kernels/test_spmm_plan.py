import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from qgnn.kernels.spmm_plan import GROUP_ROWS, Plan, default_cap, make_plan
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

DEGREES = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 9), st.integers(0, 60)), min_size=1, max_size=70)


def _indptr(degrees: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *degrees]).cumsum(0).to(dtype)


def _items(plan: Plan) -> list[list[int]]:
    return plan.items[: int(plan.counts[0])].tolist()


@given(degrees=DEGREES, cap=st.sampled_from([1, 4, 8, 64]))
def test_items_cover_every_edge_and_every_row_once(degrees: list[int], cap: int) -> None:
    indptr = _indptr(degrees)
    plan = make_plan(indptr, int(indptr[-1]), cap=cap)
    edges: list[int] = []
    rows: list[int] = []
    slots: dict[int, list[int]] = {}
    for row, num_rows, first, last in _items(plan):
        edges += range(first, last)
        if num_rows < 0:
            slots.setdefault(row, []).append(-1 - num_rows)
            assert 0 < last - first <= cap
        else:
            rows += range(row, row + num_rows)
            assert 0 < num_rows <= GROUP_ROWS
            assert row // GROUP_ROWS == (row + num_rows - 1) // GROUP_ROWS
            assert last - first < 5 * cap
            assert (first, last) == (indptr[row], indptr[row + num_rows])
    assert sorted(edges) == list(range(int(indptr[-1])))
    hubs = plan.hubs[: int(plan.counts[1])].tolist()
    assert {row: list(range(first, last)) for row, first, last in hubs} == slots
    assert [row for row, _, _ in hubs] == [row for row, degree in enumerate(degrees) if degree > cap]
    assert sorted(rows + list(slots)) == list(range(len(degrees)))


@given(degrees=DEGREES, cap=st.sampled_from([1, 4, 8, 64]))
def test_tensors_are_large_enough_and_what_is_not_used_is_empty(degrees: list[int], cap: int) -> None:
    indptr = _indptr(degrees)
    plan = make_plan(indptr, int(indptr[-1]), cap=cap)
    num_items, num_hubs = plan.counts.tolist()
    assert num_items <= plan.items.shape[0]
    assert num_hubs <= plan.hubs.shape[0]
    assert not plan.items[num_items:].any()
    used = [-1 - num_rows for _, num_rows, _, _ in _items(plan) if num_rows < 0]
    assert used == list(range(len(used)))  # in the order of items: they come first
    assert len(used) <= plan.num_slots
    assert 1 <= plan.num_programs <= max(1, plan.items.shape[0])
    assert (plan.num_hub_programs > 0) >= (num_hubs > 0)


def test_chunks_come_first() -> None:
    indptr = _indptr([3, 3, 200, 3, 70])
    chunks = [num_rows < 0 for _, num_rows, _, _ in _items(make_plan(indptr, int(indptr[-1]), cap=64))]
    assert chunks == sorted(chunks, reverse=True)
    assert sum(chunks) == 4 + 2


def test_groups_of_many_edges_are_cut() -> None:
    indptr = _indptr([60] * 16)
    items = _items(make_plan(indptr, 960, cap=64))
    assert [num_rows for _, num_rows, _, _ in items] == [5, 4, 4, 3]  # at 256, 512 and 768 edges


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_plan_has_the_type_of_its_graph(dtype: torch.dtype) -> None:
    plan = make_plan(_indptr([1, 300], dtype), 301)
    assert {t.dtype for t in plan[:3]} == {dtype}


def test_a_graph_without_nodes_has_an_empty_plan() -> None:
    plan = make_plan(torch.zeros(1, dtype=torch.int64), 0)
    assert plan.counts.tolist() == [0, 0]
    assert plan.num_programs == plan.num_slots == 0


def test_a_plan_is_made_without_waiting_for_the_device() -> None:
    """Values of fake tensors do not exist: whatever needs one, or a size that depends on one, raises."""
    with FakeTensorMode():
        plan = make_plan(torch.empty(1001, dtype=torch.int32), 50_000)
    real = make_plan(torch.arange(1001, dtype=torch.int32) * 50, 50_000)
    assert [t.shape for t in plan[:3]] == [t.shape for t in real[:3]]
    assert plan[3:] == real[3:]


@given(num_rows=st.integers(1, 10**8), mean_degree=st.floats(0, 1000))
def test_slots_are_few_beside_rows_or_edges(num_rows: int, mean_degree: float) -> None:
    num_edges = int(num_rows * mean_degree)
    cap = default_cap(num_rows, num_edges)
    assert cap >= 256
    assert cap & (cap - 1) == 0
    assert num_edges // cap + num_edges // (cap + 1) <= max(num_rows / 4, num_edges / 2048)
