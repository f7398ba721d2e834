"""Edges in the order of one of their ends, and values of edges from one order to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Adjacency:
    """Edges sorted by one end.

    Args:
        indptr: First edge of each row, ``[N + 1]``.
        index: The other end of each edge, ``[E]``.
        order: Where each edge stood before the sort, ``[E]``: in the given edges for CSR, in CSR for CSC.
    """

    indptr: Tensor
    index: Tensor
    order: Tensor

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.indptr.shape[0] - 1

    def to(self, target: torch.device | torch.dtype | str) -> Adjacency:
        """The same edges on another device, or in another type of indices.

        Args:
            target: A device, or an integer type.
        """
        return Adjacency(self.indptr.to(target), self.index.to(target), self.order.to(target))


def sort_by(row: Tensor, index: Tensor, num_rows: int) -> Adjacency:
    """Stable sort of edges by ``row``: edges of a row keep their order, so sums are the same from run to run."""
    sorted_row, order = torch.sort(row, stable=True)
    bounds = torch.arange(num_rows + 1, device=row.device, dtype=row.dtype)
    indptr = torch.searchsorted(sorted_row, bounds)
    return Adjacency(indptr.to(row.dtype), index.index_select(0, order), order.to(row.dtype))


class Permutation(torch.autograd.Function):
    """Rows in another order. Its gradient is the opposite permutation, a gather, where torch would add at indices."""

    @staticmethod
    def forward(values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        return values.index_select(0, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return Permutation.apply(grad, inverse, order), None, None
