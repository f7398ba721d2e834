"""Edges, weights and numbers of nodes as users give them, checked."""

from __future__ import annotations

from operator import index as as_index
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

INT32_SIZES = 2**31 - 2**12  # of nodes or edges: kernels step over the end by up to a tile


def index_dtype(*sizes: int) -> torch.dtype:
    """int32 where it holds every index; int64 while compiling, where comparing symbolic sizes would be a guard."""
    if torch.compiler.is_compiling() or max(sizes) > INT32_SIZES:
        return torch.int64
    return torch.int32


def sizes_of(num_nodes: Any) -> tuple[int, int]:
    """``(num_sources, num_targets)`` of a number of nodes or of such a pair."""
    pair: tuple[Any, ...] = tuple(num_nodes) if isinstance(num_nodes, (tuple, list)) else (num_nodes, num_nodes)
    if torch.compiler.is_compiling() and len(pair) == 2:
        return pair  # symbolic sizes: a comparison would compile anew for each graph
    try:
        num_sources, num_targets = (as_index(n) for n in pair)
    except (TypeError, ValueError):
        num_sources = num_targets = -1
    if num_sources < 0 or num_targets < 0:
        raise ValueError(
            f"'num_nodes' expects a number of nodes, or the pair (num_sources, num_targets) (got {num_nodes!r})"
        )
    return num_sources, num_targets


def plain(edge_index: Any) -> Any:
    """Edges as a tensor that knows nothing more."""
    return edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index


def check_edge_index(edge_index: Any, num_sources: int, num_targets: int) -> None:
    """Raise unless ``edge_index`` is an integer tensor ``[2, E]`` whose entries are nodes."""
    if not isinstance(edge_index, Tensor):
        raise TypeError(
            f"'edge_index' expects a tensor, EdgeIndex, sparse matrix or Graph (got {type(edge_index).__name__})"
        )
    if edge_index.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"'edge_index' expects torch.int64 node indices (got {edge_index.dtype}); "
            f"convert it with 'edge_index.long()' (an empty one: torch.empty(2, 0, dtype=torch.long))"
        )
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        transposed = edge_index.dim() == 2 and edge_index.shape[1] == 2
        hint = "; it looks transposed: pass 'edge_index.t().contiguous()'" if transposed else ""
        raise ValueError(f"'edge_index' expects the shape [2, E] (got {list(edge_index.shape)}){hint}")
    if edge_index.shape[1] == 0:
        return
    sizes = torch.tensor([[num_sources], [num_targets]], dtype=torch.int64, device=edge_index.device)
    if torch.compiler.is_compiling():
        inside = ((edge_index >= 0) & (edge_index < sizes)).all()
        torch._assert_async(inside, "'edge_index' points outside the nodes")
        return
    low, high = torch.aminmax(edge_index, dim=1)
    for row, name, size in ((0, "source", num_sources), (1, "target", num_targets)):
        if int(low[row]) < 0 or int(high[row]) >= size:
            worst = int(low[row]) if int(low[row]) < 0 else int(high[row])
            raise ValueError(
                f"'edge_index' expects {name} indices from 0 to {size - 1} (got {worst}); "
                f"check that 'x' has a row for every node ({size} rows)"
            )


def check_edge_weight(edge_weight: Tensor, num_edges: int, num_columns: int | None = None) -> Tensor:
    """Edge weights as a float vector ``[E]``; a column ``[E, 1]`` is accepted, and for rows of ``num_columns`` columns
    a weight a head, ``[E, H]``."""
    if not isinstance(edge_weight, Tensor):
        raise TypeError(f"'edge_weight' expects a tensor (got {type(edge_weight).__name__})")
    if not edge_weight.is_floating_point():
        raise ValueError(f"'edge_weight' expects a floating-point tensor (got {edge_weight.dtype})")
    if edge_weight.dim() == 2 and edge_weight.shape[1] == 1:
        edge_weight = edge_weight.squeeze(1)
    by_head = num_columns is not None and edge_weight.dim() == 2
    if edge_weight.shape[:1] != (num_edges,) or not (by_head or edge_weight.dim() == 1):
        raise ValueError(f"'edge_weight' expects one value an edge, [{num_edges}] (got {list(edge_weight.shape)})")
    if num_columns is not None and by_head and (edge_weight.shape[1] == 0 or num_columns % edge_weight.shape[1]):
        raise ValueError(
            f"'edge_weight' expects a number of heads that divides the {num_columns} columns of the rows "
            f"(got {list(edge_weight.shape)})"
        )
    return edge_weight


def check_constant(edge_weight: Tensor) -> Tensor:
    """Weights that are part of a graph: those that learn are given beside it."""
    if edge_weight.requires_grad:
        raise ValueError(
            "'Graph' expects constant edge weights (got some that need a gradient); give them to the layer or "
            "function as 'edge_weight', or detach them"
        )
    return edge_weight


def mask_of(name: str, chosen: Tensor, size: int) -> Tensor:
    """Which of ``size`` items are chosen, by a mask or by their numbers."""
    if not isinstance(chosen, Tensor) or chosen.dim() != 1 or chosen.is_floating_point():
        got = list(chosen.shape) if isinstance(chosen, Tensor) else type(chosen).__name__
        raise ValueError(f"{name!r} expects a mask [{size}] or a vector of numbers (got {got})")
    if chosen.dtype == torch.bool:
        if chosen.shape[0] != size:
            raise ValueError(f"{name!r} expects a mask [{size}] (got {list(chosen.shape)})")
        return chosen
    if chosen.numel() and not (int(chosen.min()) >= 0 and int(chosen.max()) < size):
        raise ValueError(
            f"{name!r} expects numbers from 0 to {size - 1} (got {int(chosen.min())} to {int(chosen.max())})"
        )
    mask = torch.zeros(size, dtype=torch.bool, device=chosen.device)
    mask[chosen.long()] = True
    return mask
