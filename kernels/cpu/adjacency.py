"""Sorted edges with some taken out, or with others put in among them, in C.

Numerics: integers and weights are copied, so results are those of the reference, whatever the number of threads. Where
an edge stands among those that are kept is told by the bits of 64 edges and the number of those before them: less
memory than a number an edge, and mostly in cache.

Oracle: qgnn.reference.adjacency_filter, adjacency_merge
"""

import torch
from qgnn.kernels.cpu.library import launch
from torch import Tensor

_WORD = 64  # WORD in adjacency.c

Edges = tuple[Tensor, Tensor, Tensor, Tensor | None]


def _empty_edges(indptr: Tensor, num_edges: int, weight: Tensor | None) -> Edges:
    """Room for the pointers of as many rows, the index and order of each edge, and its weight if there are any."""
    pointers, index, order = (torch.empty(size, dtype=indptr.dtype) for size in (indptr.numel(), num_edges, num_edges))
    return pointers, index, order, None if weight is None else weight.new_empty(num_edges)


def adjacency_filter(
    indptr: Tensor,
    index: Tensor,
    order: Tensor,
    keep: Tensor,
    *,
    num_kept: int,
    weight: Tensor | None = None,
    number: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """``indptr [N + 1]``, ``index`` and ``order`` of the edges that stay, which they are, ``[E]``, and their weights;
    see the reference for the operands."""
    N, E = indptr.numel() - 1, index.numel()
    edges = [t.to(indptr.dtype).contiguous() for t in (indptr, index, order)]
    weight = None if weight is None else weight.detach().contiguous()
    number = None if number is None else number.to(indptr.dtype).contiguous()
    out = _empty_edges(indptr, num_kept, weight)
    kept, found = torch.empty(E, dtype=torch.bool), torch.empty(1, dtype=torch.int64)
    work = (torch.empty((E // _WORD + 1, 2), dtype=torch.int64) for _ in range(2))
    size = 0 if weight is None else weight.element_size()
    launch(
        "qgnn_adjacency_filter",
        *(*out, kept, found, *work),
        *(*edges, weight, keep.contiguous(), number),
        *(size, N, E, num_kept, indptr.dtype == torch.int64),
    )
    if int(found) != num_kept:
        raise ValueError(
            f"'qgnn::adjacency_filter' expects 'num_kept' to be the number of edges that 'keep' has, {int(found)} (got "
            f"{num_kept})"
        )
    return (*out[:3], kept, out[3])


def adjacency_merge(
    indptr: Tensor,
    index: Tensor,
    order: Tensor,
    new_row: Tensor,
    new_index: Tensor,
    new_order: Tensor,
    *,
    weight: Tensor | None = None,
    new_weight: Tensor | None = None,
) -> Edges:
    """``indptr [N + 1]``, ``index``, ``order`` and the weights of all edges; see the reference for the operands."""
    N, num_new = indptr.numel() - 1, new_row.numel()
    edges, new = (
        [t.to(indptr.dtype).contiguous() for t in tensors]
        for tensors in ((indptr, index, order), (new_row, new_index, new_order))
    )
    if weight is not None and new_weight is not None:
        weight, new_weight = weight.detach().contiguous(), new_weight.detach().to(weight.dtype).contiguous()
    out = _empty_edges(indptr, index.numel() + num_new, weight)
    size = 0 if weight is None else weight.element_size()
    launch(
        "qgnn_adjacency_merge",
        *(*out, *edges, weight, *new, new_weight),
        *(size, N, num_new, indptr.dtype == torch.int64),
    )
    return out
