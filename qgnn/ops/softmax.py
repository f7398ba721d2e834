"""``qgnn::softmax`` and ``qgnn::attention_scores``: softmax over the edges of each target, with gradients.

Both compute in fp32 (float64 for float64 scores). Nothing is rounded to integers: there is a value an edge and head, to
which a row of features is large. The backward pass keeps the result, not the edges' scores.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qgnn.ops._backends import Backend
from qgnn.ops._checks import CSC, CSR, Signature
from qgnn.ops._operator import define, register_autograd


def _softmax(backend: Backend, scores: Tensor, indptr: Tensor) -> Tensor:
    return backend.call("softmax", "softmax.forward", indptr, scores)


def _fake_softmax(scores: Tensor, indptr: Tensor) -> Tensor:
    return scores.new_empty(scores.shape)


softmax = define(
    "softmax",
    _softmax,
    "(Tensor scores, Tensor indptr) -> Tensor",
    _fake_softmax,
    Signature({"scores": "E H", "indptr": "T+1"}, pointers=("indptr",)),
)


def _softmax_backward(backend: Backend, grad: Tensor, out: Tensor, indptr: Tensor) -> Tensor:
    return backend.call("softmax_backward", "softmax.backward", indptr, out, grad)


def _fake_softmax_backward(grad: Tensor, out: Tensor, indptr: Tensor) -> Tensor:
    return grad.new_empty(grad.shape)


softmax_backward = define(
    "softmax_backward",
    _softmax_backward,
    "(Tensor grad, Tensor out, Tensor indptr) -> Tensor",
    _fake_softmax_backward,
    Signature({"grad": "E H", "out": "E H", "indptr": "T+1"}, pointers=("indptr",)),
)


def _setup_softmax(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output, inputs[1])


def _backward_of_softmax(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return softmax_backward(grad, *ctx.saved_tensors), None


register_autograd(softmax, _backward_of_softmax, setup_context=_setup_softmax)


def _attention_scores(
    backend: Backend,
    score_target: Tensor,
    score_source: Tensor,
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    order_t: Tensor,
    negative_slope: float,
) -> Tensor:
    operands = indptr, index, score_target, score_source
    return backend.call("attention_scores", "softmax.forward", *operands, negative_slope=negative_slope)


def _fake_attention_scores(
    score_target: Tensor,
    score_source: Tensor,
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    order_t: Tensor,
    negative_slope: float,
) -> Tensor:
    return score_target.new_empty((index.shape[0], score_target.shape[1]))


attention_scores = define(
    "attention_scores",
    _attention_scores,
    "(Tensor score_target, Tensor score_source, Tensor indptr, Tensor index, Tensor indptr_t, Tensor order_t,"
    " float negative_slope) -> Tensor",
    _fake_attention_scores,
    Signature({"score_target": "T H", "score_source": "S H", **CSR}, pointers=("indptr",), indices={"index": "S"}),
)


def _attention_scores_backward(
    backend: Backend,
    grad: Tensor,
    out: Tensor,
    score_target: Tensor,
    score_source: Tensor,
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    order_t: Tensor,
    negative_slope: float,
) -> tuple[Tensor, ...]:
    operands = indptr, index, indptr_t, order_t, score_target, score_source, out, grad
    return backend.call("attention_scores_backward", "softmax.backward", *operands, negative_slope=negative_slope)


def _fake_attention_scores_backward(
    grad: Tensor,
    out: Tensor,
    score_target: Tensor,
    score_source: Tensor,
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    order_t: Tensor,
    negative_slope: float,
) -> tuple[Tensor, ...]:
    return score_target.new_empty(score_target.shape), score_source.new_empty(score_source.shape)


attention_scores_backward = define(
    "attention_scores_backward",
    _attention_scores_backward,
    "(Tensor grad, Tensor out, Tensor score_target, Tensor score_source, Tensor indptr, Tensor index, Tensor indptr_t,"
    " Tensor order_t, float negative_slope) -> (Tensor, Tensor)",
    _fake_attention_scores_backward,
    Signature(
        {"grad": "E H", "out": "E H", "score_target": "T H", "score_source": "S H", **CSR, **CSC},
        pointers=("indptr", "indptr_t"),
        indices={"index": "S", "order_t": "E"},
    ),
)


def _setup_attention(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.negative_slope = inputs
    ctx.save_for_backward(output, *tensors)


def _backward_of_attention(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    d_target, d_source = attention_scores_backward(grad, *ctx.saved_tensors, ctx.negative_slope)
    needs_target, needs_source = ctx.needs_input_grad[:2]
    return (d_target if needs_target else None, d_source if needs_source else None, *(None,) * 5)


register_autograd(attention_scores, _backward_of_attention, setup_context=_setup_attention)
