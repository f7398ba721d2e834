"""``qgnn::adjacency_filter`` and ``adjacency_merge``: sorted edges with some taken out, or with others put in.

They copy what a rebuild would sort. Indices carry no gradient, and neither do the constant weights of a graph.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qgnn.ops._backends import Backend, fresh
from qgnn.ops._checks import CSR, Signature
from qgnn.ops._operator import define


def _call(backend: Backend, primitive: str, indptr: Tensor, *operands: Tensor, **options: Any) -> tuple[Tensor, ...]:
    format_name = str(indptr.dtype).removeprefix("torch.")
    results = backend.call(primitive, f"{primitive}.forward", indptr, *operands, format_name=format_name, **options)
    return fresh(options["weight"] if options["weight"] is not None else indptr, results)


def _adjacency_filter(
    backend: Backend,
    indptr: Tensor,
    index: Tensor,
    order: Tensor,
    keep: Tensor,
    weight: Tensor | None,
    number: Tensor | None,
    num_kept: int,
) -> tuple[Tensor, ...]:
    if num_kept < 0:
        raise ValueError(f"'qgnn::adjacency_filter' expects 'num_kept' to be at least 0 (got {num_kept})")
    options = {"num_kept": num_kept, "weight": weight, "number": number}
    return _call(backend, "adjacency_filter", indptr, index, order, keep, **options)


def _fake_adjacency_filter(
    indptr: Tensor,
    index: Tensor,
    order: Tensor,
    keep: Tensor,
    weight: Tensor | None,
    number: Tensor | None,
    num_kept: int,
) -> tuple[Tensor, ...]:
    left = indptr.new_empty(indptr.shape), indptr.new_empty(num_kept), indptr.new_empty(num_kept)
    left_weight = indptr.new_empty(0) if weight is None else weight.new_empty(num_kept)
    return (*left, keep.new_empty(keep.shape), left_weight)


adjacency_filter = define(
    "adjacency_filter",
    _adjacency_filter,
    "(Tensor indptr, Tensor index, Tensor order, Tensor keep, Tensor? weight, Tensor? number, SymInt num_kept)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_adjacency_filter,
    Signature(
        {**CSR, "order": "E", "keep": "E", "weight": "E", "number": "S"},
        pointers=("indptr",),
        indices={"order": "E", "index": "S"},
    ),
)


def _adjacency_merge(
    backend: Backend,
    indptr: Tensor,
    index: Tensor,
    order: Tensor,
    weight: Tensor | None,
    new_row: Tensor,
    new_index: Tensor,
    new_order: Tensor,
    new_weight: Tensor | None,
) -> tuple[Tensor, ...]:
    operands = (indptr, index, order, new_row, new_index, new_order)
    return _call(backend, "adjacency_merge", *operands, weight=weight, new_weight=new_weight)


def _fake_adjacency_merge(
    indptr: Tensor,
    index: Tensor,
    order: Tensor,
    weight: Tensor | None,
    new_row: Tensor,
    new_index: Tensor,
    new_order: Tensor,
    new_weight: Tensor | None,
) -> tuple[Tensor, ...]:
    num_edges = index.shape[0] + new_row.shape[0]
    all_weights = indptr.new_empty(0) if weight is None else weight.new_empty(num_edges)
    return indptr.new_empty(indptr.shape), indptr.new_empty(num_edges), indptr.new_empty(num_edges), all_weights


adjacency_merge = define(
    "adjacency_merge",
    _adjacency_merge,
    "(Tensor indptr, Tensor index, Tensor order, Tensor? weight, Tensor new_row, Tensor new_index, Tensor new_order,"
    " Tensor? new_weight) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_adjacency_merge,
    Signature(
        {
            **{**CSR, "order": "E", "weight": "E"},
            **{"new_row": "A", "new_index": "A", "new_order": "A", "new_weight": "A"},
        },
        pointers=("indptr",),
        indices={"new_row": "T"},
    ),
)
