"""Edges taken out of sorted ones and put in among them, against a sort of the changed edges."""

import pytest
import torch
from torch import Tensor

from graphs import GRAPHS, RECTANGULAR
from qgnn import reference
from qgnn.adjacency import Adjacency, sort_by

ALL_GRAPHS = {name: (edges, n, n) for name, (edges, n) in GRAPHS.items()} | RECTANGULAR


def sorted_edges(edge_index: Tensor, num_rows: int, weight: Tensor) -> tuple[Adjacency, Tensor]:
    adjacency = sort_by(edge_index[1], edge_index[0], num_rows)
    return adjacency, weight[adjacency.order]


def parts(adjacency: Adjacency) -> tuple[Tensor, Tensor, Tensor]:
    return adjacency.indptr, adjacency.index, adjacency.order


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", ALL_GRAPHS)
def test_a_filter_leaves_what_a_sort_of_the_rest_gives(name: str, share: float) -> None:
    edge_index, S, N = ALL_GRAPHS[name]
    weight, keep, number = torch.rand(edge_index.shape[1]), torch.rand(edge_index.shape[1]) < share, torch.randperm(S)
    adjacency, sorted_weight = sorted_edges(edge_index, N, weight)
    *left, kept, left_weight = reference.adjacency_filter(
        *parts(adjacency), keep, num_kept=int(keep.sum()), weight=sorted_weight, number=number
    )
    renamed = torch.stack([number[edge_index[0]], edge_index[1]])
    expected, expected_weight = sorted_edges(renamed[:, keep], N, weight[keep])
    assert all(map(torch.equal, left, parts(expected)))
    assert torch.equal(kept, keep[adjacency.order])
    assert torch.equal(left_weight, expected_weight)


@pytest.mark.parametrize("name", ALL_GRAPHS)
def test_a_merge_gives_what_a_sort_of_all_edges_gives(name: str) -> None:
    """Any edges are the new ones, not only the last."""
    edge_index, _, N = ALL_GRAPHS[name]
    weight, is_new = torch.rand(edge_index.shape[1]), torch.rand(edge_index.shape[1]) < 0.4
    old, old_weight = sorted_edges(edge_index[:, ~is_new], N, weight[~is_new])
    new, new_weight = sorted_edges(edge_index[:, is_new], N, weight[is_new])
    place, new_place = (mask.nonzero().view(-1) for mask in (~is_new, is_new))
    new_row = torch.repeat_interleave(new.indptr.diff())
    *merged, merged_weight = reference.adjacency_merge(
        *(old.indptr, old.index, place[old.order], new_row, new.index, new_place[new.order]),
        weight=old_weight,
        new_weight=new_weight,
    )
    expected, expected_weight = sorted_edges(edge_index, N, weight)
    assert all(map(torch.equal, merged, parts(expected)))
    assert torch.equal(merged_weight, expected_weight)
