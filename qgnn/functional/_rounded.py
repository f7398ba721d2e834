"""Sums and attention whose components have formats of their own: what is rounded before and behind the kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qgnn.config import QConfig
from qgnn.formats import Format, Int
from qgnn.formats._format import name_of
from qgnn.functional._checks import draw_seed
from qgnn.functional._operands import round_rows, stream_of
from qgnn.qtensor import QTensor

# Streams of one seed, beyond those of operators and products.
_MESSAGES, _AGGREGATION, _ATTENTION, _GRADIENT, _OWN_NODES = 40, 48, 49, 50, 51


def own_nodes_seed(config: QConfig | None, seed: int | Tensor | None, x: Tensor | QTensor) -> Tensor | None:
    """The seed of the sum over a part's own nodes, whose rows another product of the call may have made."""
    like = x.scale if isinstance(x, QTensor) else x
    return None if config is None else stream_of(draw_seed(config, seed, like), _OWN_NODES)


def slices(fmt: Format, granularity: str, dim: int = -1) -> int | None:
    """The dimension that a format's scales lie along: ``None`` for one of the tensor."""
    return None if granularity == "tensor" and fmt.scales_slices else dim


def rounded(x: Tensor, fmt: Format | None, granularity: str, seed: Tensor | None, dim: int = -1) -> Tensor:
    """The values of ``x`` in a format, of its type, with a gradient as if they were not rounded."""
    return x if fmt is None else fmt.quantize(x, slices(fmt, granularity, dim), seed)


def message_rows(
    x: Tensor | QTensor, config: QConfig, seed: Tensor | None, number: int = 0
) -> tuple[Tensor | QTensor, QConfig | None]:
    """Rows ``[N, F]`` or ``[N, H, D]`` in the format of messages, as kernels gather them, and the config of these.

    Codes with a scale a row are gathered as they are; so is their gradient, where both are symmetric integers. Rows of
    other formats are rounded values. Rows that are codes already are left alone, but for constants that were rounded
    for products.

    Args:
        x: Rows.
        config: The components' formats.
        seed: Of the call.
        number: Tells apart the roundings of a call's operands.
    """
    fmt, grad = config.format_of("messages"), config.format_of("output_gradient")
    if isinstance(x, QTensor):
        if x.origin is None:
            return (x, None) if is_row_coded(x) else (x.dequantize(), None)
        x = x.origin
    kernel = None
    if grad is not None and _is_int(grad) and _is_int(fmt):
        kernel = replace(config, fmt=grad, bits=grad.bits, components={})
    if fmt is None or not fmt.is_integer or x.dim() != 2:
        return rounded(x, fmt, config.granularity, stream_of(seed, _MESSAGES + number)), None
    rows = round_rows(x.detach(), fmt, config.granularity, stream_of(seed, _MESSAGES + number))
    if rows.scale is None:
        return rounded(x, fmt, config.granularity, stream_of(seed, _MESSAGES + number)), None
    origin = x if x.requires_grad and torch.is_grad_enabled() else None
    assert rows.codes is not None
    return QTensor(rows.codes, rows.scale[:, None], dtype=x.dtype, origin=origin, name=name_of(fmt)), kernel


def is_row_coded(q: QTensor) -> bool:
    """Whether codes are integers of at most 8 bits with a scale a row, or one, which kernels gather."""
    return q.zero is None and q.block_size is None and q.code_dtype == torch.int8


def aggregated(y: Tensor, config: QConfig, seed: Tensor | None, *, with_gradient: bool) -> Tensor:
    """A sum over neighbors in its format, whose gradient is rounded if the kernel behind does not do so itself."""
    if with_gradient:
        y = round_gradient(y, config, seed)
    return rounded(y, config.format_of("aggregation"), config.granularity, stream_of(seed, _AGGREGATION))


def round_gradient(y: Tensor, config: QConfig, seed: Tensor | None) -> Tensor:
    """``y``, whose gradient is rounded to the format of output gradients."""
    fmt = config.format_of("output_gradient")
    if fmt is None or not (y.requires_grad and torch.is_grad_enabled()):
        return y
    return _RoundGradient.apply(y, fmt, slices(fmt, config.granularity), stream_of(seed, _GRADIENT))


def attention_config(config: QConfig) -> QConfig | None:
    """The config of fused attention kernels, which round rows and gradients to one integer; ``None`` if it is none."""
    if config.is_integer:
        return config
    fmt, grad = config.format_of("messages"), config.format_of("output_gradient")
    if fmt != grad or not _is_int(fmt) or config.format_of("aggregation") is not None:
        return None
    assert fmt is not None
    return replace(config, fmt=fmt, bits=fmt.bits, components={})


def rounded_attention(weights: Tensor, config: QConfig, seed: Tensor | None) -> Tensor:
    """Attention weights ``[E, H]``, sorted by target, in their format: scales lie along the edges, over which a target
    sums."""
    fmt = config.format_of("attention")
    return weights if fmt is None else fmt.quantize(weights, 0, stream_of(seed, _ATTENTION))


class _RoundGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, fmt: Format, dim: int | None, seed: Tensor | None) -> Tensor:
        ctx.fmt, ctx.dim = fmt, dim
        ctx.save_for_backward(seed)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (seed,) = ctx.saved_tensors
        return ctx.fmt.quantize(grad, ctx.dim, seed), None, None, None


def _is_int(fmt: Format | None) -> bool:
    return isinstance(fmt, Int) and fmt.symmetric
