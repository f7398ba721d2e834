"""Parts of nodes: balanced, with few cut edges, the same each time."""

import importlib.util
import sys
from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import qgnn
from graphs import GRAPHS
from qgnn.distributed import partition_nodes
from qgnn.distributed._multilevel import merged

HAS_METIS = importlib.util.find_spec("pymetis") is not None
METHODS = [
    "multilevel",
    pytest.param("metis", marks=pytest.mark.skipif(not HAS_METIS, reason="pymetis is not installed")),
]


def num_cut(edge_index: Tensor, parts: Tensor) -> int:
    return int((parts[edge_index[0]] != parts[edge_index[1]]).sum())


def blobs(num_blobs: int, size: int) -> Tensor:
    """Dense random graphs that single edges join to a ring; their nodes are shuffled."""
    generator = torch.Generator().manual_seed(1)
    inside = torch.randint(size, (2, 8 * size, num_blobs), generator=generator)
    inside = (inside + size * torch.arange(num_blobs)).view(2, -1)
    first = size * torch.arange(num_blobs)
    edges = torch.cat([inside, torch.stack([first, first.roll(1)])], 1)
    return torch.randperm(num_blobs * size, generator=generator)[edges]


@pytest.mark.parametrize("name", GRAPHS)
def test_parts_are_balanced_and_none_is_empty(name: str) -> None:
    edge_index, num_nodes = GRAPHS[name]
    cases = ((1, 0.03), (2, 0.0), (3, 0.03), (8, 0.5))
    for num_parts, imbalance in (case for case in cases if case[0] <= num_nodes):
        parts = partition_nodes(edge_index, num_parts, num_nodes, method="multilevel", imbalance=imbalance)
        sizes = torch.bincount(parts, minlength=num_parts)
        assert (parts.dtype, parts.shape, len(sizes)) == (torch.int64, (num_nodes,), num_parts)
        assert sizes.max() <= ceil((1 + imbalance) * num_nodes / num_parts)
        assert sizes.min() >= 1
        again = partition_nodes(edge_index, num_parts, num_nodes, method="multilevel", imbalance=imbalance)
        assert torch.equal(parts, again)


@pytest.mark.parametrize("method", METHODS)
def test_few_edges_are_cut(method: str) -> None:
    """A ring of four blobs is cut at its four joints, two of them into two parts."""
    edge_index = blobs(4, 100)
    for num_parts, cut in ((2, 2), (4, 4)):
        parts = partition_nodes(edge_index, num_parts, 400, method=method)
        assert num_cut(edge_index, parts) == cut
    path = GRAPHS["path"][0]
    assert num_cut(path, partition_nodes(path, 3, 33, method=method)) == 2


def test_a_graph_without_blobs_is_cut_at_fewer_edges_than_by_chance() -> None:
    edge_index, num_nodes = GRAPHS["power_law"]
    random = torch.arange(num_nodes) % 4
    parts = partition_nodes(edge_index, 4, num_nodes, method="multilevel")
    assert num_cut(edge_index, parts) < 0.6 * num_cut(edge_index, random)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.integers(1, 60), st.integers(0, 150), st.integers(1, 9), st.integers(0, 10**6))
def test_any_graph_is_cut_within_the_bound(num_nodes: int, num_edges: int, num_parts: int, seed: int) -> None:
    num_parts = min(num_parts, num_nodes)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=torch.Generator().manual_seed(seed))
    parts = partition_nodes(edge_index, num_parts, num_nodes, method="multilevel")
    sizes = torch.bincount(parts, minlength=num_parts)
    assert len(sizes) == num_parts
    assert 1 <= sizes.min() <= sizes.max() <= ceil(1.03 * num_nodes / num_parts)


def test_edges_are_merged_by_their_ends() -> None:
    source, target = torch.tensor([[0, 1, 0, 2, 2], [1, 0, 1, 2, 0]])
    level = merged(source, target, torch.tensor([1, 2, 4, 8, 16]), torch.ones(3, dtype=torch.int64))
    assert [level.source.tolist(), level.target.tolist(), level.weight.tolist()] == [[0, 1, 2], [1, 0, 0], [5, 2, 16]]
    assert level.cut(torch.tensor([0, 1, 0])) == 7
    assert level.ties(torch.tensor([0, 1, 0]), 2).tolist() == [[0, 5], [2, 0], [16, 0]]


def test_directions_loops_and_forms_of_edges_change_nothing() -> None:
    edge_index, num_nodes = GRAPHS["power_law"]
    parts = partition_nodes(edge_index, 3, num_nodes, method="multilevel")
    loops = torch.arange(num_nodes).expand(2, -1)
    for other in (edge_index.flip(0), torch.cat([edge_index, loops], 1), edge_index.int()):
        assert torch.equal(parts, partition_nodes(other, 3, num_nodes, method="multilevel"))
    graph = qgnn.Graph.from_edge_index(edge_index, num_nodes)
    assert torch.equal(parts, partition_nodes(graph, 3, method="multilevel"))


def test_metis_is_taken_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    edge_index = blobs(2, 20)

    class Metis:
        Options = dict
        CSRAdjacency = staticmethod(lambda start, target: (start, target))

        @staticmethod
        def part_graph(num_parts: int, adjacency: tuple[Any, Any], **kwargs: object) -> tuple[int, list[int]]:
            start, target = adjacency
            assert (start[-1], len(start)) == (len(target), 41)
            return 0, [0] * 10 + [num_parts - 1] * 30

    monkeypatch.setitem(sys.modules, "pymetis", Metis)
    expected = torch.tensor([0] * 10 + [2] * 29 + [1])  # an empty part takes a node
    for method in ("auto", "metis"):
        assert torch.equal(partition_nodes(edge_index, 3, 40, method=method), expected)
    monkeypatch.setitem(sys.modules, "pymetis", None)
    ours = partition_nodes(edge_index, 3, 40, method="multilevel")
    assert torch.equal(partition_nodes(edge_index, 3, 40), ours)
    with pytest.raises(ImportError, match="'pip install pymetis', or give method='multilevel'"):
        partition_nodes(edge_index, 3, 40, method="metis")


def test_bad_arguments() -> None:
    edge_index, num_nodes = GRAPHS["random"]
    for num_parts in (0, -1, 51, 2.0, True):
        with pytest.raises(ValueError, match=rf"'num_parts' from 1 to 50, .*\(got {num_parts}\)"):
            partition_nodes(edge_index, num_parts, num_nodes)
    with pytest.raises(ValueError, match=r"'method' to be one of .*\(got 'spectral'\)"):
        partition_nodes(edge_index, 2, num_nodes, method="spectral")
    for imbalance in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"a finite 'imbalance' of at least 0"):
            partition_nodes(edge_index, 2, num_nodes, imbalance=imbalance)
    with pytest.raises(ValueError, match=r"expects 'num_nodes' where edges are no qgnn.Graph"):
        partition_nodes(edge_index, 2)
    with pytest.raises(ValueError, match=r"source indices from 0 to 9 \(got"):
        partition_nodes(edge_index, 2, 10)
