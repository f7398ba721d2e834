"""What the attention operators share: rows as codes, the edges' part of the scores, dropout.

Edges bring ``edge_attr`` in the order in which they were given, and ``edge_order`` that brings it into CSR order. What
enters the scores, ``edge_attr edge_weight^T``, is made in each pass and not kept: the features belong to the caller.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qgnn.ops._backends import Backend
from qgnn.ops._checks import CSC, CSR
from qgnn.ops.sddmm import codes_of_heads, fake_codes_of_heads
from qgnn.reference._common import compute_dtype

STRUCTURE = "Tensor indptr, Tensor index, Tensor indptr_t, Tensor index_t, Tensor order_t"
EDGES = "Tensor? edge_attr, Tensor? edge_weight, Tensor? edge_order"
OPTIONS = "Tensor? seed, int bits, int threshold, Tensor? dropout_seed"
EDGE_SHAPES = {"edge_attr": "E K", "edge_order": "E"}
POINTERS: dict[str, Any] = {"pointers": ("indptr",), "indices": {"index": "S", "edge_order": "E"}}
BACKWARD_SHAPES = {**CSR, **CSC}
BACKWARD_POINTERS: dict[str, Any] = {
    "pointers": ("indptr", "indptr_t"),
    "indices": {"index": "S", "index_t": "T", "order_t": "E", "edge_order": "E"},
}

Rows = tuple[Tensor, Tensor | None]


def rows_by_head(
    backend: Backend, x: Tensor, scale: Tensor | None, heads: int, seed: Tensor | None, bits: int, stream: int
) -> Rows:
    """``x`` as codes with scales [N, H] if there are ``bits``, or as it came."""
    if scale is not None or not bits:
        return x, scale
    codes, scale = codes_of_heads(backend, x, heads, seed, bits, "row", stream)
    return codes, scale.view(-1, heads)


def made(x_scale: Tensor | None, rows: Rows, keep: bool) -> tuple[Tensor | None, Tensor | None]:
    """The codes that an operator returns for its backward pass: those it made itself."""
    return rows if keep and x_scale is None and rows[1] is not None else (None, None)


def fake_made(x: Tensor, scale: Tensor | None, heads: int, bits: int, keep: bool) -> tuple[Tensor | None, ...]:
    if scale is not None or not bits or not keep:
        return None, None
    codes, scale = fake_codes_of_heads(x, heads, "row")
    return codes, scale.view(-1, heads)


def kept(x: Tensor, scale: Tensor | None, codes: Tensor, codes_scale: Tensor, bits: int) -> Rows:
    """Rows and scales that a backward pass reads: what the forward pass gathered."""
    return (codes, codes_scale) if bits and scale is None else (x, scale)


def edge_term(
    edge_attr: Tensor | None, edge_weight: Tensor | None, edge_order: Tensor | None, like: Tensor
) -> Tensor | None:
    """``edge_attr edge_weight^T`` in CSR order, of the type that sums over ``like`` are made in."""
    if edge_attr is None or edge_weight is None or edge_order is None:
        return None
    dtype = compute_dtype(like)
    return edge_attr.index_select(0, edge_order).to(dtype) @ edge_weight.to(dtype).t()


def edge_grads(
    grad: Tensor | None,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    edge_order: Tensor | None,
    needs_dattr: bool,
    needs_dweight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of both factors of :func:`edge_term`, from the term's own."""
    if grad is None or edge_attr is None or edge_weight is None or edge_order is None:
        return None, None
    d_attr = d_weight = None
    if needs_dweight:
        d_weight = (grad.t() @ edge_attr.index_select(0, edge_order).to(grad.dtype)).to(edge_weight.dtype)
    if needs_dattr:
        in_order = (grad @ edge_weight.to(grad.dtype)).to(edge_attr.dtype)
        d_attr = torch.empty_like(edge_attr).index_copy_(0, edge_order.long(), in_order)
    return d_attr, d_weight


def fake_edge_grads(
    edge_attr: Tensor | None, edge_weight: Tensor | None, needs_dattr: bool, needs_dweight: bool
) -> tuple[Tensor | None, Tensor | None]:
    return (
        torch.empty_like(edge_attr) if needs_dattr and edge_attr is not None else None,
        torch.empty_like(edge_weight) if needs_dweight and edge_weight is not None else None,
    )


def fake_lse(x: Tensor, num_rows: int, heads: int) -> Tensor:
    return x.new_empty((num_rows, heads), dtype=compute_dtype(x))


def check_kept(owner: str, bits: int, keep: bool) -> None:
    """Raise if a backward pass would lack the codes, which it could not make again from rows that changed since."""
    if bits and not keep:
        raise ValueError(f"'qgnn::{owner}' expects 'keep' where it has a backward pass (got False)")
