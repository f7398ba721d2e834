"""``qgnn::incidence_sum``: sums of the values of a node's edges, with their gradient.

The product of the incidence matrix ``B [N, E]`` with edge values. Every column of ``B`` has one entry, a 1, so its CSR
form is the pointers of the sorted graph and the permutation that sorted it: nothing else is ever made. The gradient of
an edge is the row of its node.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qgnn import trace
from qgnn.ops._backends import STREAM_INPUT, Backend
from qgnn.ops._checks import GRANULARITIES, INT8_OR_FULL, Signature
from qgnn.ops._operator import define, register_autograd
from qgnn.ops.matmul import quantize_operand


def _incidence_sum(
    backend: Backend,
    edge_x: Tensor,
    indptr: Tensor,
    order: Tensor,
    node: Tensor,
    seed: Tensor | None,
    bits: int,
    granularity: str,
) -> Tensor:
    rows, scale = edge_x, None
    if bits:
        rows, scale = quantize_operand(backend, edge_x, seed, bits, granularity, STREAM_INPUT, "forward")
    options = {"x_scale": scale, "out_dtype": edge_x.dtype}
    return backend.call("spmm", "incidence_sum.forward", indptr, order, rows, bits=bits or 8, **options)


def _fake_incidence_sum(
    edge_x: Tensor,
    indptr: Tensor,
    order: Tensor,
    node: Tensor,
    seed: Tensor | None,
    bits: int,
    granularity: str,
) -> Tensor:
    return edge_x.new_empty((indptr.shape[0] - 1, edge_x.shape[1]))


incidence_sum = define(
    "incidence_sum",
    _incidence_sum,
    "(Tensor edge_x, Tensor indptr, Tensor order, Tensor node, Tensor? seed, int bits, str granularity) -> Tensor",
    _fake_incidence_sum,
    Signature(
        {"edge_x": "E F", "indptr": "T+1", "order": "E", "node": "E"},
        choices={"bits": INT8_OR_FULL, "granularity": GRANULARITIES},
        pointers=("indptr",),
        indices={"order": "E", "node": "T"},
    ),
)


def _incidence_sum_backward(backend: Backend, grad: Tensor, node: Tensor) -> Tensor:
    edge_grad = grad.index_select(0, node)
    if trace.recording():
        fmt = str(grad.dtype).removeprefix("torch.")
        trace.report("incidence_sum.backward", fmt, "torch", (grad, node, edge_grad))
    return edge_grad


def _fake_incidence_sum_backward(grad: Tensor, node: Tensor) -> Tensor:
    return grad.new_empty((node.shape[0], grad.shape[1]))


incidence_sum_backward = define(
    "incidence_sum_backward",
    _incidence_sum_backward,
    "(Tensor grad, Tensor node) -> Tensor",
    _fake_incidence_sum_backward,
    Signature({"grad": "T F", "node": "E"}, indices={"node": "T"}),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[3])


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (node,) = ctx.saved_tensors
    return (incidence_sum_backward(grad, node), *(None,) * 6)


register_autograd(incidence_sum, _backward, setup_context=_setup_context)
