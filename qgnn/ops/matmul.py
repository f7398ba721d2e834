"""``qgnn::matmul``: the quantized dense product ``y = x w^T + bias`` with both gradients.

Forward, operands and both gradients are int8; sums are int32 (``dw``: fp32, since it contracts over rows of different
scale); scales, bias and the results are floating point. Gradients are quantized with a scale of their own. ReLU and
dropout may follow in the product's epilogue; what is kept of them is one bit an element. What is kept of ``x`` for
``dw`` is its codes, ``x`` itself, or packed blocks that were made of it before (``qgnn.ops.Packed``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qgnn import trace
from qgnn.activation import keep_factor
from qgnn.ops import _activation, _packed
from qgnn.ops._backends import STREAM_GRAD, STREAM_INPUT, STREAM_WEIGHT, STREAM_WEIGHT_T, Backend, fake_codes, fresh
from qgnn.ops._checks import GRANULARITIES, INT8_BITS, Signature
from qgnn.ops._operator import define, register_autograd
from qgnn.ops._packed import Packed, packed_weight_grad
from qgnn.reference._common import compute_dtype


def float_dtype(x: Tensor, x_float: Tensor | None, otherwise: torch.dtype) -> torch.dtype:
    """Type of the result for rows ``x``: theirs, or that of the rows that codes were made of, if it is known."""
    rows = x if x_float is None else x_float
    return rows.dtype if rows.is_floating_point() else otherwise


def needs_rows_grad(ctx: Any) -> bool:
    """Whether the rows of an operator whose arguments are ``(x, x_scale, ..., x_float)`` need a gradient."""
    return ctx.needs_input_grad[0] or ctx.needs_input_grad[-1]


def with_rows_grad(ctx: Any, dx: Tensor | None, *others: Any) -> tuple[Any, ...]:
    """The gradients of such an operator: that of the rows goes to ``x_float`` where ``x`` are their codes."""
    of_x, of_codes = ctx.needs_input_grad[0], ctx.needs_input_grad[-1]
    return (dx if of_x else None, None, *others, dx if of_codes else None)


def quantize_operand(
    backend: Backend, x: Tensor, seed: Tensor | None, bits: int, granularity: str, stream: int, pass_: str
) -> tuple[Tensor, Tensor]:
    """Codes and scale of a product's operand."""
    name = f"quantize.{pass_}"
    return backend.call("quantize", name, x, bits=bits, granularity=granularity, seed=seed, stream=stream)


def quantize_weight(
    backend: Backend, weight: Tensor, seed: Tensor | None, bits: int, stream: int, pass_: str
) -> tuple[Tensor, Tensor]:
    """Codes of a weight with one scale a column of the product, whatever the granularity of activations is."""
    return quantize_operand(backend, weight, seed, bits, "row", stream, pass_)


def input_grad(
    backend: Backend, g_q: Tensor, g_scale: Tensor, weight: Tensor, seed: Tensor | None, bits: int, dtype: torch.dtype
) -> Tensor:
    """``dx = g w``: a product over the outputs, hence with codes of the transposed weight."""
    wt_q, wt_scale = quantize_weight(backend, weight.t(), seed, bits, STREAM_WEIGHT_T, "backward")
    return backend.call("matmul", "matmul.backward_dx", g_q, g_scale, wt_q, wt_scale, bits=bits, out_dtype=dtype)


def weight_grad(
    backend: Backend,
    g_q: Tensor,
    g_scale: Tensor,
    x: Tensor | None,
    x_scale: Tensor | None,
    weight: Tensor,
    kept: Packed,
    bits: int,
) -> Tensor | None:
    """``dw = g^T x``, a sum in fp32, from what was kept of ``x``: codes, packed blocks, ``x`` itself, or nothing."""
    if kept.packed is not None:
        dw = packed_weight_grad(backend, g_q, g_scale, kept, bits, weight.shape[1])
    elif x is None:
        return None
    elif x_scale is not None:
        dw = backend.call("matmul_dw", "matmul.backward_dw", g_q, g_scale, x, x_scale, bits=bits)
    else:
        dw = (g_q.float() * g_scale[:, None]).t() @ x.float()
        trace.report("matmul.backward_dw", "float32", "torch", (g_q, g_scale, x, dw))
    return dw.to(weight.dtype)


def quantize_gradient(
    backend: Backend,
    grad: Tensor,
    mask: Tensor | None,
    threshold: int,
    seed: Tensor | None,
    bits: int,
    granularity: str,
    sum_columns: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes and scale of the gradient in front of an activation, and its column sums: one read of the gradient."""
    if mask is None and not sum_columns:
        return (*quantize_operand(backend, grad, seed, bits, granularity, STREAM_GRAD, "backward"), None)
    return backend.call(
        "quantize_grad",
        "quantize.backward",
        grad,
        bits=bits,
        granularity=granularity,
        seed=seed,
        stream=STREAM_GRAD,
        mask=mask,
        factor=keep_factor(threshold),
        sum_columns=sum_columns,
    )


def masked_gradient(backend: Backend, grad: Tensor, mask: Tensor | None, threshold: int) -> Tensor:
    """The gradient in front of an activation, in its own type."""
    if mask is None:
        return grad
    factor = keep_factor(threshold)
    return backend.call("activation_backward", "activation.backward", grad, mask=mask, factor=factor)[0]


def _matmul(
    backend: Backend,
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    bits: int,
    granularity: str,
    keep_codes: bool,
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
    N, M = x.shape[0], weight.shape[0]
    activation = _activation.make_activation(x, N, M, relu, threshold, dropout_seed, keep_mask)
    out_dtype = float_dtype(x, x_float, weight.dtype)
    options: dict[str, Any] = {"bits": bits, "out_dtype": out_dtype, "activation": activation}
    w_q, w_scale = quantize_weight(backend, weight, seed, bits, STREAM_WEIGHT, "forward")
    made_codes = keep_codes and x_scale is None
    if x_scale is None and granularity == "row":
        options |= {"seed": seed, "stream": STREAM_INPUT}
        y, x_q, x_scale = backend.call("quantize_matmul", "matmul.forward", x, w_q, w_scale, bias, **options)
    else:
        x_q = x
        if x_scale is None:
            x_q, x_scale = quantize_operand(backend, x, seed, bits, granularity, STREAM_INPUT, "forward")
        y = backend.call("matmul", "matmul.forward", x_q, x_scale, w_q, w_scale, bias, **options)
    mask = None if activation is None else activation.mask
    return fresh(x, (y, x_q if made_codes else None, x_scale if made_codes else None, mask))


def fake_kept(x: Tensor, x_scale: Tensor | None, granularity: str, keep_codes: bool) -> tuple[Tensor, Tensor]:
    """Shapes of the codes and scale that an op hands to its backward."""
    if not keep_codes or x_scale is not None:
        return x.new_empty(0), x.new_empty(0)
    scale_rows = 1 if granularity == "tensor" else x.shape[0]
    return fake_codes(x, *x.shape), x.new_empty(scale_rows, dtype=torch.float32)


def _fake_matmul(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    bits: int,
    granularity: str,
    keep_codes: bool,
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
    y = x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)
    mask = _activation.fake_mask(x, x.shape[0], weight.shape[0], relu, threshold, keep_mask)
    return (y, *fake_kept(x, x_scale, granularity, keep_codes), mask)


matmul = define(
    "matmul",
    _matmul,
    "(Tensor x, Tensor? x_scale, Tensor weight, Tensor? bias, Tensor? seed, int bits, str granularity, bool keep_codes,"
    f" {_activation.SCHEMA}, {_packed.SCHEMA}, Tensor? x_float) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_matmul,
    Signature(
        {"x": "N K", "x_scale": "N|1", "x_float": "N K", "weight": "M K", "bias": "M", **_packed.SHAPES},
        choices={"bits": INT8_BITS, "granularity": GRANULARITIES, **_activation.CHOICES, **_packed.CHOICES},
        edges=_packed.EDGES,
        int32_sums=("K",),
    ),
)


def _matmul_backward(
    backend: Backend,
    grad: Tensor,
    mask: Tensor | None,
    x: Tensor | None,
    x_scale: Tensor | None,
    weight: Tensor,
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
    needs_db: bool,
) -> tuple[Tensor, ...]:
    g_q, g_scale, db = quantize_gradient(backend, grad, mask, threshold, seed, bits, granularity, needs_db)
    dx = input_grad(backend, g_q, g_scale, weight, seed, bits, grad.dtype) if needs_dx else None
    kept = _packed.Packed(packed, low, step, edges, packed_seed, packed_bits, projection)
    dw = weight_grad(backend, g_q, g_scale, x, x_scale, weight, kept, bits) if needs_dw else None
    return fresh(grad, (dx, dw, db))


def fake_db(grad: Tensor, needs_db: bool) -> Tensor:
    """Shape and type of the gradient of a bias before it gets the bias' type."""
    return grad.new_empty(grad.shape[1], dtype=compute_dtype(grad)) if needs_db else grad.new_empty(0)


def _fake_matmul_backward(
    grad: Tensor,
    mask: Tensor | None,
    x: Tensor | None,
    x_scale: Tensor | None,
    weight: Tensor,
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
    needs_db: bool,
) -> tuple[Tensor, ...]:
    dx = grad.new_empty((grad.shape[0], weight.shape[1])) if needs_dx else grad.new_empty(0)
    dw = weight.new_empty(weight.shape) if needs_dw else grad.new_empty(0)
    return dx, dw, fake_db(grad, needs_db)


matmul_backward = define(
    "matmul_backward",
    _matmul_backward,
    "(Tensor grad, Tensor? mask, Tensor? x, Tensor? x_scale, Tensor weight, Tensor? seed,"
    f" {_packed.SCHEMA}, int bits, str granularity,"
    " int threshold, bool needs_dx, bool needs_dw, bool needs_db) -> (Tensor, Tensor, Tensor)",
    _fake_matmul_backward,
    Signature(
        {"grad": "N M", "weight": "M K", "x": "N K", "x_scale": "N|1", "mask": "N M/8", **_packed.SHAPES},
        choices={"bits": INT8_BITS, "granularity": GRANULARITIES, **_activation.CHOICES, **_packed.CHOICES},
        edges=_packed.EDGES,
        int32_sums=("M",),
    ),
)


def saved_input(
    inputs: tuple[Any, ...], x_q: Tensor, codes_scale: Tensor, keep_codes: bool, kept: Packed
) -> tuple[Any, Any, Packed]:
    """What an op keeps of its input ``(x, x_scale, weight, ...)`` for the gradient of the weight: packed blocks that
    were given, codes made here, codes that were given, or ``x`` itself."""
    x, x_scale, weight = inputs[:3]
    if not weight.requires_grad:
        return None, None, Packed()
    if kept.packed is not None:
        return None, None, kept
    return (*((x_q, codes_scale) if keep_codes and x_scale is None else (x, x_scale)), kept)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, bias, seed, bits, granularity, keep_codes, relu, threshold, _, keep_mask, *packed, _ = inputs
    _, x_q, codes_scale, mask = output
    _activation.check_mask_kept("matmul", relu, threshold, keep_mask)
    ctx.mark_non_differentiable(x_q, codes_scale, mask)
    ctx.set_materialize_grads(False)
    *kept_x, kept = saved_input(inputs, x_q, codes_scale, keep_codes, Packed(*packed))
    kept_mask = mask if relu or threshold else None
    ctx.save_for_backward(kept_mask, *kept_x, weight, seed, *kept.tensors)
    ctx.options = (kept.packed_bits, kept.projection, bits, granularity, threshold)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 20
    _, _, needs_dw, needs_db = ctx.needs_input_grad[:4]
    needs_dx = needs_rows_grad(ctx)
    dx, dw, db = matmul_backward(grad, *ctx.saved_tensors, *ctx.options, needs_dx, needs_dw, needs_db)
    return with_rows_grad(
        ctx,
        dx,
        dw if needs_dw else None,
        db.to(ctx.bias_dtype) if needs_db else None,
        *(None,) * 15,
    )


register_autograd(matmul, _backward, setup_context=_setup_context)
