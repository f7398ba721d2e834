"""``qgnn::graph_linear``: dense product, then neighbor sum, with int8 rows in between in both directions.

``out = A (x w^T) + bias``. The product hands int8 rows and scales straight to the aggregation; backward, the transposed
aggregation hands int8 rows to the products of ``dx`` and ``dw``. Integer tensors carry no gradient, which is why the
pair is one op. Bytes decide here: rows cross the border at one byte a value instead of four.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qgnn.ops import _activation, _packed
from qgnn.ops._backends import STREAM_GRAD_HIDDEN, STREAM_HIDDEN, STREAM_INPUT, STREAM_WEIGHT, Backend, fresh
from qgnn.ops._checks import CSC, CSR, GRANULARITIES, INT8_BITS, Signature
from qgnn.ops._operator import define, register_autograd
from qgnn.ops._packed import Packed
from qgnn.ops.matmul import (
    fake_db,
    fake_kept,
    float_dtype,
    input_grad,
    needs_rows_grad,
    quantize_gradient,
    quantize_operand,
    quantize_weight,
    saved_input,
    weight_grad,
    with_rows_grad,
)
from qgnn.ops.spmm import edge_weight_grad, fold_row_factor, transposed_weight


def _requantized(
    backend: Backend,
    primitive: str,
    pass_: str,
    operands: tuple[Tensor, ...],
    seed: Tensor | None,
    bits: int,
    granularity: str,
    stream: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Result of ``matmul`` or ``spmm`` as codes: rounded in the kernel's epilogue where a row has its own scale."""
    name = f"{primitive}.{pass_}"
    if granularity == "row":
        return backend.call(f"{primitive}_requantize", name, *operands, bits=bits, seed=seed, stream=stream, **options)
    rows = backend.call(primitive, name, *operands, bits=bits, **options)
    return quantize_operand(backend, rows, seed, bits, granularity, stream, pass_)


def _graph_linear(
    backend: Backend,
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    edge_weight: Tensor | None,
    edge_weight_t: Tensor | None,
    row_factor: Tensor | None,
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    seed: Tensor | None,
    bits: int,
    granularity: str,
    keep_codes: bool,
    keep_hidden: bool,
    relu: bool,
    threshold: int,
    dropout_seed: Tensor | None,
    keep_mask: bool,
    packed: Tensor | None,
    low: Tensor | None,
    step: Tensor | None,
    edges: Tensor | None,
    packed_seed: Tensor | None,
    packed_bits: int,
    projection: int,
    x_float: Tensor | None,
) -> tuple[Tensor, ...]:
    T, M = indptr.shape[0] - 1, weight.shape[0]
    activation = _activation.make_activation(x, T, M, relu, threshold, dropout_seed, keep_mask)
    made_codes = keep_codes and x_scale is None
    w_q, w_scale = quantize_weight(backend, weight, seed, bits, STREAM_WEIGHT, "forward")
    if x_scale is None and granularity == "row":
        options: dict[str, Any] = {"bits": bits, "seed": seed, "stream": STREAM_INPUT, "hidden_stream": STREAM_HIDDEN}
        made = backend.call("quantize_matmul_requantize", "matmul.forward", x, w_q, w_scale, **options)
        h_q, h_scale, x_q, x_scale = made
    else:
        x_q = x
        if x_scale is None:
            x_q, x_scale = quantize_operand(backend, x, seed, bits, granularity, STREAM_INPUT, "forward")
        operands = (x_q, x_scale, w_q, w_scale)
        h_q, h_scale = _requantized(backend, "matmul", "forward", operands, seed, bits, granularity, STREAM_HIDDEN)
    out = backend.call(
        "spmm",
        "spmm.forward",
        indptr,
        index,
        h_q,
        bits=bits,
        weight=edge_weight,
        x_scale=h_scale,
        row_factor=row_factor,
        bias=bias,
        out_dtype=float_dtype(x, x_float, weight.dtype),
        activation=activation,
    )
    kept_x = (x_q, x_scale) if made_codes else (None, None)
    kept_hidden = (h_q, h_scale) if keep_hidden else (None, None)
    return fresh(x, (out, *kept_x, *kept_hidden, None if activation is None else activation.mask))


def _fake_graph_linear(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    edge_weight: Tensor | None,
    edge_weight_t: Tensor | None,
    row_factor: Tensor | None,
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    seed: Tensor | None,
    bits: int,
    granularity: str,
    keep_codes: bool,
    keep_hidden: bool,
    relu: bool,
    threshold: int,
    dropout_seed: Tensor | None,
    keep_mask: bool,
    packed: Tensor | None,
    low: Tensor | None,
    step: Tensor | None,
    edges: Tensor | None,
    packed_seed: Tensor | None,
    packed_bits: int,
    projection: int,
    x_float: Tensor | None,
) -> tuple[Tensor, ...]:
    out_dtype = float_dtype(x, x_float, weight.dtype)
    out = x.new_empty((indptr.shape[0] - 1, weight.shape[0]), dtype=out_dtype)
    hidden = x.new_empty((x.shape[0], weight.shape[0]))
    mask = _activation.fake_mask(x, indptr.shape[0] - 1, weight.shape[0], relu, threshold, keep_mask)
    kept_x, kept_hidden = (x, x_scale, granularity, keep_codes), (hidden, None, granularity, keep_hidden)
    return (out, *fake_kept(*kept_x), *fake_kept(*kept_hidden), mask)


graph_linear = define(
    "graph_linear",
    _graph_linear,
    "(Tensor x, Tensor? x_scale, Tensor weight, Tensor? bias, Tensor? edge_weight, Tensor? edge_weight_t,"
    " Tensor? row_factor, Tensor indptr, Tensor index, Tensor indptr_t, Tensor index_t, Tensor order_t, Tensor? seed,"
    f" int bits, str granularity, bool keep_codes, bool keep_hidden, {_activation.SCHEMA},"
    f" {_packed.SCHEMA}, Tensor? x_float) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_graph_linear,
    Signature(
        {
            **{"x": "S K", **CSR, "x_scale": "S|1", "x_float": "S K", "weight": "M K", "bias": "M"},
            **{"edge_weight": "E|E H", "edge_weight_t": "E|E H", "row_factor": "T", **_packed.SHAPES},
        },
        choices={"bits": INT8_BITS, "granularity": GRANULARITIES, **_activation.CHOICES, **_packed.CHOICES},
        edges=_packed.EDGES,
        pointers=("indptr",),
        indices={"index": "S"},
        int32_sums=("K",),
        shares={"M": "H"},
    ),
)


def _graph_linear_backward(
    backend: Backend,
    grad: Tensor,
    mask: Tensor | None,
    x: Tensor | None,
    x_scale: Tensor | None,
    weight: Tensor,
    hidden: Tensor | None,
    hidden_scale: Tensor | None,
    edge_weight: Tensor | None,
    edge_weight_t: Tensor | None,
    row_factor: Tensor | None,
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    seed: Tensor | None,
    packed: Tensor | None,
    low: Tensor | None,
    step: Tensor | None,
    edges: Tensor | None,
    packed_seed: Tensor | None,
    packed_bits: int,
    projection: int,
    bits: int,
    granularity: str,
    threshold: int,
    needs_dx: bool,
    needs_dw: bool,
    needs_dedge: bool,
    needs_db: bool,
) -> tuple[Tensor, ...]:
    g_q, g_scale, db = quantize_gradient(backend, grad, mask, threshold, seed, bits, granularity, needs_db)
    folded_scale = fold_row_factor(g_scale, row_factor)
    dx = dw = dedge = None
    if needs_dx or needs_dw:
        dh_q, dh_scale = _requantized(
            backend,
            "spmm",
            "backward",
            (indptr_t, index_t, g_q),
            seed,
            bits,
            granularity,
            STREAM_GRAD_HIDDEN,
            weight=transposed_weight(edge_weight, edge_weight_t, order_t),
            x_scale=folded_scale,
        )
        if needs_dx:
            dx = input_grad(backend, dh_q, dh_scale, weight, seed, bits, grad.dtype)
        if needs_dw:
            kept = Packed(packed, low, step, edges, packed_seed, packed_bits, projection)
            dw = weight_grad(backend, dh_q, dh_scale, x, x_scale, weight, kept, bits)
    if needs_dedge and hidden is not None and edge_weight is not None:
        target, source = (g_q, folded_scale), (hidden, hidden_scale)
        dedge = edge_weight_grad(backend, indptr, index, target, source, bits, edge_weight)
    return fresh(grad, (dx, dw, dedge, db))


def _fake_graph_linear_backward(
    grad: Tensor,
    mask: Tensor | None,
    x: Tensor | None,
    x_scale: Tensor | None,
    weight: Tensor,
    hidden: Tensor | None,
    hidden_scale: Tensor | None,
    edge_weight: Tensor | None,
    edge_weight_t: Tensor | None,
    row_factor: Tensor | None,
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    seed: Tensor | None,
    packed: Tensor | None,
    low: Tensor | None,
    step: Tensor | None,
    edges: Tensor | None,
    packed_seed: Tensor | None,
    packed_bits: int,
    projection: int,
    bits: int,
    granularity: str,
    threshold: int,
    needs_dx: bool,
    needs_dw: bool,
    needs_dedge: bool,
    needs_db: bool,
) -> tuple[Tensor, ...]:
    dx = grad.new_empty((indptr_t.shape[0] - 1, weight.shape[1])) if needs_dx else grad.new_empty(0)
    dw = weight.new_empty(weight.shape) if needs_dw else grad.new_empty(0)
    dedge = grad.new_empty(0)
    if needs_dedge and edge_weight is not None:
        dedge = edge_weight.new_empty(edge_weight.shape)
    return dx, dw, dedge, fake_db(grad, needs_db)


graph_linear_backward = define(
    "graph_linear_backward",
    _graph_linear_backward,
    "(Tensor grad, Tensor? mask, Tensor? x, Tensor? x_scale, Tensor weight, Tensor? hidden, Tensor? hidden_scale,"
    " Tensor? edge_weight, Tensor? edge_weight_t, Tensor? row_factor, Tensor indptr, Tensor index, Tensor indptr_t,"
    f" Tensor index_t, Tensor order_t, Tensor? seed, {_packed.SCHEMA}, int bits, str granularity, int threshold,"
    " bool needs_dx, bool needs_dw, bool needs_dedge, bool needs_db) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_graph_linear_backward,
    Signature(
        {
            **{"grad": "T M", "weight": "M K", **CSR, **CSC, "x": "S K", "x_scale": "S|1", "mask": "T M/8"},
            **{"hidden": "S M", "hidden_scale": "S|1"},
            **{"edge_weight": "E|E H", "edge_weight_t": "E|E H", "row_factor": "T", **_packed.SHAPES},
        },
        choices={"bits": INT8_BITS, "granularity": GRANULARITIES, **_activation.CHOICES, **_packed.CHOICES},
        edges=_packed.EDGES,
        pointers=("indptr", "indptr_t"),
        indices={"index": "S", "index_t": "T", "order_t": "E"},
        int32_sums=("M",),
        shares={"M": "H"},
    ),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, bias, edge_weight, edge_weight_t, row_factor, *rest = inputs
    *graph, seed, bits, granularity, keep_codes, _, relu, threshold, _, keep_mask = rest[:-8]
    _, x_q, codes_scale, hidden, hidden_scale, mask = output
    _activation.check_mask_kept("graph_linear", relu, threshold, keep_mask)
    ctx.mark_non_differentiable(x_q, codes_scale, hidden, hidden_scale, mask)
    ctx.set_materialize_grads(False)
    *kept_x, kept = saved_input(inputs, x_q, codes_scale, keep_codes, Packed(*rest[-8:-1]))
    learns_edges = edge_weight is not None and edge_weight.requires_grad
    kept_hidden = (hidden, hidden_scale) if learns_edges else (None, None)
    kept_mask = mask if relu or threshold else None
    ctx.save_for_backward(
        *(kept_mask, *kept_x, weight, *kept_hidden, edge_weight, edge_weight_t, row_factor, *graph, seed),
        *kept.tensors,
    )
    ctx.options = (kept.packed_bits, kept.projection, bits, granularity, threshold)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 29
    _, _, needs_dw, needs_db, needs_dedge = ctx.needs_input_grad[:5]
    needs = (needs_rows_grad(ctx), needs_dw, needs_dedge, needs_db)
    dx, dw, dedge, db = graph_linear_backward(grad, *ctx.saved_tensors, *ctx.options, *needs)
    return with_rows_grad(
        ctx,
        dx,
        dw if needs_dw else None,
        db.to(ctx.bias_dtype) if needs_db else None,
        dedge if needs_dedge else None,
        *(None,) * 23,
    )


register_autograd(graph_linear, _backward, setup_context=_setup_context)
