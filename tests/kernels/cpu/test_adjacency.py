"""Edges taken out of sorted ones and put in among them, in C: equal to the reference in every array."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from qgnn.kernels.cpu.adjacency import adjacency_filter, adjacency_merge
from torch import Tensor

from graphs import GRAPHS, RECTANGULAR
from qgnn import reference
from qgnn.adjacency import sort_by

ALL_GRAPHS = {name: (edges, n, n) for name, (edges, n) in GRAPHS.items()} | RECTANGULAR
INDEX_TYPES = pytest.mark.parametrize("dtype", [torch.int32, torch.int64])


def edges_of(graph: tuple[Tensor, int, int], dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor, Tensor]:
    edge_index, _, N = graph
    source, target = edge_index.to(dtype)
    adjacency = sort_by(target, source, N)
    return adjacency.indptr, adjacency.index, adjacency.order


def split(graph: tuple[Tensor, int, int], is_new: Tensor, dtype: torch.dtype = torch.int32) -> tuple[Tensor, ...]:
    """The edges without new ones, and the rows, other ends and places of these."""
    edge_index, S, N = graph
    old, new = (edges_of((edge_index[:, mask], S, N), dtype) for mask in (~is_new, is_new))
    place, new_place = (mask.nonzero().view(-1).to(dtype) for mask in (~is_new, is_new))
    new_row = torch.repeat_interleave(new[0].diff()).to(dtype)
    return *old[:2], place[old[2]], new_row, new[1], new_place[new[2]]


def assert_equal(function: Any, operands: tuple[Tensor, ...], **options: Any) -> None:
    results, expected = function(*operands, **options), getattr(reference, function.__name__)(*operands, **options)
    for result, value in zip(results, expected, strict=True):
        assert (result is None) == (value is None)
        assert result is None or (result.dtype == value.dtype and torch.equal(result, value))


@pytest.mark.parametrize("name", ALL_GRAPHS)
@INDEX_TYPES
def test_every_graph(name: str, dtype: torch.dtype, threads: int) -> None:
    graph = ALL_GRAPHS[name]
    edges = edges_of(graph, dtype)
    for share in (0.0, 0.5, 0.98, 1.0):
        some = torch.rand(len(edges[1])) < share
        for number in (None, torch.randperm(graph[1])):
            assert_equal(adjacency_filter, (*edges, some), num_kept=int(some.sum()), number=number)
        assert_equal(adjacency_merge, split(graph, some, dtype))


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_every_type(weight_dtype: torch.dtype, threads: int) -> None:
    graph = ALL_GRAPHS["power_law"]
    edges, weight = edges_of(graph), torch.randn(700).to(weight_dtype)
    for some in (torch.rand(700) < 0.9, torch.ones(700).bool()):
        num = int(some.sum())
        assert_equal(adjacency_filter, (*edges, some), num_kept=num, weight=weight)
        options = {"weight": weight[: 700 - num], "new_weight": torch.randn(num)}
        assert_equal(adjacency_merge, split(graph, some), **options)


def test_threads_share_a_large_graph() -> None:
    """Parts of edges and rows, a hub of half the edges among them, cover every edge once."""
    N, E = 900, 60_000
    target = torch.cat([torch.randint(N, (E // 2,)), torch.full((E // 2,), 17)])
    graph = torch.stack([torch.randint(N, (E,)), target]), N, N
    some, weight = torch.rand(E) < 0.97, torch.randn(E)
    num = int(some.sum())
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert_equal(adjacency_filter, (*edges_of(graph), some), num_kept=num, weight=weight)
            assert_equal(adjacency_merge, split(graph, ~some), weight=weight[:num], new_weight=weight[num:])
    finally:
        torch.set_num_threads(before)


def test_any_strides_and_types_of_indices() -> None:
    graph = ALL_GRAPHS["random"]
    keep = torch.rand(200) < 0.8
    for function, operands in (
        (adjacency_filter, (*edges_of(graph), keep)),
        (adjacency_merge, split(graph, ~keep)),
    ):
        is_filter = function is adjacency_filter
        weight, new_weight = torch.randn(len(operands[1])), torch.randn(200 - len(operands[1])).double()
        options = {"num_kept": int(keep.sum())} if is_filter else {"new_weight": new_weight}
        strided = [t.repeat_interleave(2)[::2] for t in (*operands, weight)]
        assert_equal(function, tuple(strided[:-1]), weight=strided[-1], **options)
        assert_equal(function, (operands[0].long(), *operands[1:]), weight=weight, **options)


def test_inputs_are_left_alone() -> None:
    graph, keep, weight = ALL_GRAPHS["random"], torch.arange(200) % 2 == 0, torch.randn(200)
    edges, merged = edges_of(graph), split(graph, keep)
    inputs = (*edges, *merged, keep, weight)
    before = [t.clone() for t in inputs]
    adjacency_filter(*edges, keep, num_kept=100, weight=weight)
    adjacency_merge(*merged, weight=weight[:100], new_weight=weight[100:])
    assert all(map(torch.equal, inputs, before))


@pytest.mark.parametrize("num_kept", [0, 99, 101, 200])
def test_another_number_of_edges_is_refused(num_kept: int) -> None:
    keep = torch.arange(200) % 2 == 0
    with pytest.raises(ValueError, match=rf"'num_kept' to be the number of edges .*, 100 \(got {num_kept}\)"):
        adjacency_filter(*edges_of(ALL_GRAPHS["random"]), keep, num_kept=num_kept)


@given(st.integers(1, 12), st.integers(0, 200), st.floats(0, 1), st.integers(0, 2**31))
def test_any_size(N: int, E: int, share: float, seed: int) -> None:
    torch.manual_seed(seed)
    graph, some, weight = (torch.randint(N, (2, E)), N, N), torch.rand(E) < share, torch.randn(E)
    num = int(some.sum())
    assert_equal(adjacency_filter, (*edges_of(graph), some), num_kept=num, weight=weight)
    assert_equal(adjacency_merge, split(graph, some), weight=weight[num:], new_weight=weight[:num])
