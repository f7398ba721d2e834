"""Layers with a message an edge, a few edges at a time: in float64 all of them at once would not fit."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

PIECE_VALUES = 1 << 26  # of the rows of edges in float64 at a time: 0.5 GiB, some ten of which PyG has at once


class Given(torch.nn.Module):
    """In place of a dense product: its result."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, _: Any) -> Tensor:
        return self.rows


def pieces(edge_index: Tensor, num_nodes: int, width: int) -> Iterator[tuple[slice, Tensor]]:
    """Ranges of targets, and the edges into them, so many at a time that their rows have about ``PIECE_VALUES``."""
    number = -(-edge_index.shape[1] * width // PIECE_VALUES)
    order = edge_index[1].argsort(stable=True)
    ends = edge_index[1].bincount(minlength=num_nodes).cumsum(0)
    bounds = [round(num_nodes * part / number) for part in range(number + 1)]
    for low, high in pairwise(bounds):
        first = int(ends[low - 1]) if low else 0
        yield slice(low, high), edge_index[:, order[first : int(ends[high - 1])]]
