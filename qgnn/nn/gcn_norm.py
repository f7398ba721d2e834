"""Self-loops and symmetric normalization, with PyG's results and finite gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def add_self_loops(
    edge_index: Tensor, edge_weight: Tensor, num_nodes: int, fill_value: float, mode: str, fixed_shape: bool = False
) -> tuple[Tensor, Tensor]:
    """Append a self-loop to every node.

    Args:
        edge_index: Edges, ``[2, E]``.
        edge_weight: Their weights, ``[E]``.
        num_nodes: Number of nodes ``N``.
        fill_value: Weight of a new self-loop.
        mode: What happens to self-loops that exist: ``"remaining"`` moves the weight of (the last copy of) each into
            the new one, ``"replace"`` drops them, ``"append"`` keeps them beside the new ones.
        fixed_shape: Leave moved and dropped self-loops in place with weight 0, so that shapes do not depend on data.
    """
    source, target = edge_index[0], edge_index[1]
    node = torch.arange(num_nodes, dtype=edge_index.dtype, device=edge_index.device)
    loop_weight = edge_weight.new_full((num_nodes,), fill_value)
    is_loop = source == target
    if mode != "replace":
        slot = torch.where(is_loop, source, num_nodes).long()  # what is no self-loop goes to a spare slot
        slots = torch.nn.functional.pad(loop_weight, (0, 1))
        write = slots.scatter if mode == "remaining" else slots.index_add
        loop_weight = write(0, slot, edge_weight)[:num_nodes]
    if fixed_shape:
        edge_weight = edge_weight.masked_fill(is_loop, 0.0)
    else:
        edge_index, edge_weight = edge_index[:, ~is_loop], edge_weight[~is_loop]
    return torch.cat([edge_index, node.expand(2, -1)], dim=1), torch.cat([edge_weight, loop_weight])


def gcn_norm(edge_index: Tensor, edge_weight: Tensor, num_nodes: int) -> Tensor:
    r"""Symmetric normalization :math:`w_{ji} / \sqrt{d_j d_i}`, :math:`d_i` the sum of the weights into :math:`i`.

    A node of degree 0 gets factor 0, with a finite gradient: the power is taken of 1 in its place. A negative degree
    gives NaN, in the rows that it reaches.
    """
    source, target = edge_index[0], edge_index[1]
    degree = edge_weight.new_zeros(num_nodes).index_add(0, target, edge_weight)
    isolated = degree == 0
    factor = degree.masked_fill(isolated, 1.0).pow(-0.5).masked_fill(isolated, 0.0)
    return factor[source] * edge_weight * factor[target]
