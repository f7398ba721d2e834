"""Products whose operands have formats of their own.

Of a product ``y = x w^T`` each operand is rounded along the dimension that is summed over: ``x`` and ``w`` along the
features, for ``dx = g w`` the gradient ``g`` and ``w`` along the outputs, for ``dw = g^T x`` both along the rows. What
is kept of ``x`` for ``dw`` are packed codes: those of the forward pass where rows have a scale each, which the product
folds into ``g``; else ``x`` rounded once more, along its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qgnn import ops
from qgnn.autocast import without_autocast
from qgnn.config import QConfig
from qgnn.formats import Format
from qgnn.functional._operands import CHUNK, Operand, operand_of, product, round_rows, stream_of
from qgnn.packing import Layout
from qgnn.qtensor import QTensor

# Streams of one seed, beyond those of the operators: no two roundings of a call share random bits.
_INPUT, _WEIGHT, _GRAD, _WEIGHT_T, _INPUT_T, _GRAD_T, _WEIGHT_GRAD, _PARTS = 32, 33, 34, 35, 36, 37, 38, 64

_PART = 16  # rows of a part at least: a product arranges its other operand anew for each part


@dataclass(frozen=True)
class Plan:
    """The formats of one product.

    Args:
        x: Of the rows.
        weight: Of the weight.
        grad: Of the gradient of the result.
        weight_grad: Of the gradient of the weight.
        granularity: What of rows and gradients shares a scale.
        keeps_codes: Whether codes are what is kept of the rows.
    """

    x: Format | None
    weight: Format | None
    grad: Format | None
    weight_grad: Format | None
    granularity: str
    keeps_codes: bool

    @property
    def is_exact(self) -> bool:
        """Whether nothing is rounded."""
        return self.x is self.weight is self.grad is self.weight_grad is None


def plan_of(config: QConfig, x: Tensor | QTensor) -> Plan:
    """The formats of a product with ``x``: constants are features, what needs a gradient is an activation."""
    values = x.origin if isinstance(x, QTensor) else x
    learns = values is not None and values.requires_grad
    return Plan(
        x=config.format_of("activations" if learns else "features"),
        weight=config.format_of("weights"),
        grad=config.format_of("output_gradient"),
        weight_grad=config.format_of("weight_gradient"),
        granularity=config.granularity,
        keeps_codes=config.keeps_codes,
    )


def mixed_linear(x: Tensor | QTensor, weight: Tensor, bias: Tensor | None, plan: Plan, seed: Tensor | None) -> Tensor:
    """``x weight^T + bias`` with operands in the formats of ``plan``, forward and backward, of ``x``'s type."""
    given, values = (x, x.origin) if isinstance(x, QTensor) else (None, x)
    rows = None if values is None else values.reshape(-1, x.shape[-1])
    if not torch.is_grad_enabled():  # of which a function is not told: it would keep rows for a gradient
        weight = weight.detach()
    y = _MixedLinear.apply(rows, weight, bias, seed, plan, given)
    return y.view(*x.shape[:-1], weight.shape[0]).to(x.dtype)


class _Kept(NamedTuple):
    """What a product keeps of its rows for the gradient of its weight.

    Args:
        rows: The rows as they are, ``[N, K]``, or nothing.
        codes: Or codes, ``[N, K]``.
        columns: Or codes of the columns, ``[K, N]``.
    """

    rows: Tensor | None = None
    codes: QTensor | None = None
    columns: QTensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        q = self.codes or self.columns
        return (self.rows, None, None) if q is None else (q.storage, q.scales, q.zero)

    def with_tensors(self, tensors: tuple[Tensor | None, ...] | None) -> _Kept:
        """The same with other tensors, or without any."""
        q = self.codes or self.columns
        if q is None:
            return _Kept(None if tensors is None else tensors[0])
        storage, scales, zero = (None,) * 3 if tensors is None else tensors
        q = replace(q, storage=storage, scales=scales, zero=zero, origin=None, columns=None)  # type: ignore[arg-type]
        return _Kept(None, q, None) if self.codes is not None else _Kept(None, None, q)


class _MixedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        seed: Tensor | None,
        plan: Plan,
        given: QTensor | None,
    ) -> Tensor:
        with without_autocast(weight.device.type):
            w = round_rows(_wide(weight), plan.weight, "row", stream_of(seed, _WEIGHT))
            if given is None:
                assert x is not None
                keep = ctx.needs_input_grad[1] and not torch.compiler.is_exporting()
                y, kept = _of_rows(x, w, bias, plan, seed, keep)
            else:
                y = _of_codes(given, w, bias)
                kept = _Kept(codes=given) if given.columns is None else _Kept(columns=given.columns)
        ctx.save_for_backward(weight, seed, *(kept.tensors if ctx.needs_input_grad[1] else ()))
        ctx.plan, ctx.kept = plan, kept.with_tensors(None)
        ctx.x_dtype, ctx.bias_dtype = (None if t is None else t.dtype for t in (x, bias))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, seed, *tensors = ctx.saved_tensors
        run = _gradients if torch.compiler.is_compiling() else _Gradients.apply
        options = (ctx.needs_input_grad[:3], ctx.x_dtype, ctx.bias_dtype)
        return (
            *run(grad, weight, seed, ctx.plan, ctx.kept.with_tensors(tuple(tensors) or None), *options),
            *(None,) * 3,
        )


def _gradients(
    grad: Tensor,
    weight: Tensor,
    seed: Tensor | None,
    plan: Plan,
    kept: _Kept,
    needs: tuple[bool, ...],
    x_dtype: torch.dtype,
    bias_dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    needs_dx, needs_dw, needs_db = needs
    with without_autocast(grad.device.type):
        g = round_rows(grad, plan.grad, plan.granularity, stream_of(seed, _GRAD))
        dx = _input_grad(g, weight, plan, seed).to(x_dtype) if needs_dx else None
        dw = _weight_grad(grad, g, kept, plan, seed).to(weight.dtype) if needs_dw else None
        db = grad.sum(0).to(bias_dtype) if needs_db else None
    return dx, dw, db


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor | None, ...]:
        return _gradients(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            "'linear' has no second derivatives, which a gradient of a gradient (create_graph=True) needs; use PyG's "
            "layer or a torch function there"
        )


def _of_rows(
    x: Tensor, w: Operand, bias: Tensor | None, plan: Plan, seed: Tensor | None, keep: bool
) -> tuple[Tensor, _Kept]:
    """The product of rows that are to be rounded, and what is kept of them."""
    x_seed = stream_of(seed, _INPUT)
    parts = list(_parts(*x.shape)) if plan.granularity == "row" else [slice(0, x.shape[0])]
    if len(parts) == 1 or _becomes_codes(plan.x):
        rows = round_rows(_wide(x), plan.x, plan.granularity, x_seed)
        y = product(rows, w, bias, "forward")
        if keep and plan.keeps_codes and rows.scale is not None:
            return y, _Kept(codes=_packed(rows, plan.x, x.dtype))
    else:
        y = x.new_empty((x.shape[0], w.num_rows), dtype=_wide(x[:0]).dtype)
        for number, part in enumerate(parts):
            rows = round_rows(_wide(x[part]), plan.x, "row", stream_of(x_seed, _PARTS + number))
            y[part] = product(rows, w, bias, "forward")
    if not keep or plan.x is None or not plan.keeps_codes:
        return y, _Kept(x if keep else None)
    return y, _Kept(columns=encode_columns(x, plan.x, plan.granularity, stream_of(seed, _INPUT_T)))


def _of_codes(q: QTensor, w: Operand, bias: Tensor | None) -> Tensor:
    """The product of rows that are codes already; those that stand for floats are decoded by parts."""
    if len(q.shape) != 2 or q.layout is None or q.layout.mantissa_bits is None:
        return product(operand_of(q), w, bias, "forward")
    products = [product(operand_of(q.part(part)), w, bias, "forward") for part in _parts(*q.shape)]
    return products[0] if len(products) == 1 else torch.cat(products)


def encode_rows(x: Tensor, config: QConfig, seed: Tensor | None, origin: Tensor | None) -> QTensor:
    """Constant rows in the format of features, as products take them: with their columns where codes of rows do not
    serve the gradient of a weight."""
    fmt = config.format_of("features")
    if fmt is None:
        raise ValueError(
            "'quantize' expects a format for the component 'features' in 'config' (got None); give the format itself"
        )
    q = fmt.encode(x, None if config.granularity == "tensor" and fmt.scales_slices else -1, stream_of(seed, _INPUT))
    if x.dim() == 2 and not (fmt.is_integer and fmt.scales_slices):
        q = replace(q, columns=encode_columns(x, fmt, config.granularity, stream_of(seed, _INPUT_T)))
    return replace(q, origin=origin)


def encode_columns(x: Tensor, fmt: Format, granularity: str, seed: Tensor | None) -> QTensor:
    """The columns of ``x`` ``[N, K]`` as codes ``[K, N]``, with scales along ``N``."""
    return fmt.encode(x.detach().t(), None if granularity == "tensor" and fmt.scales_slices else -1, seed)


def _input_grad(g: Operand, weight: Tensor, plan: Plan, seed: Tensor | None) -> Tensor:
    w = round_rows(_wide(weight).t(), plan.weight, "row", stream_of(seed, _WEIGHT_T))
    return product(g, w, None, "backward_dx")


def _weight_grad(grad: Tensor, g: Operand, kept: _Kept, plan: Plan, seed: Tensor | None) -> Tensor:
    """``dw = g^T x`` ``[M, K]``, of ``grad`` and its rounded rows ``g``."""
    if kept.codes is not None and g.scale is not None:
        x = operand_of(kept.codes)
        if x.scale is not None:
            name = g.name if g.name == x.name else f"{g.name} x {x.name}"
            dw = ops.matmul_codes_dw(g.codes, g.scale, x.codes, x.scale, name)
            return _rounded_weight_grad(dw, plan, seed)
    gt = round_rows(grad.t(), plan.grad, plan.granularity, stream_of(seed, _GRAD_T))
    columns = kept.columns
    if kept.codes is not None:
        dw = product(gt, Operand(kept.codes.name, values=_wide(kept.codes.dequantize()).t()), None, "backward_dw")
    elif columns is not None:
        parts = [operand_of(columns.part(part)) for part in _parts(*columns.shape)]
        dw = torch.cat([product(gt, part, None, "backward_dw") for part in parts], 1)
    else:
        assert kept.rows is not None
        x = round_rows(_wide(kept.rows).t(), plan.x, plan.granularity, stream_of(seed, _INPUT_T))
        dw = product(gt, x, None, "backward_dw")
    return _rounded_weight_grad(dw, plan, seed)


def _rounded_weight_grad(dw: Tensor, plan: Plan, seed: Tensor | None) -> Tensor:
    return dw if plan.weight_grad is None else plan.weight_grad.quantize(dw, -1, stream_of(seed, _WEIGHT_GRAD))


def _packed(rows: Operand, fmt: Format | None, dtype: torch.dtype) -> QTensor:
    """Codes with a scale a row as they are stored: no wider than they are."""
    assert fmt is not None
    assert rows.codes is not None
    assert rows.scale is not None
    scales = rows.scale[:, None]
    layout = Layout(fmt.bits, tuple(rows.codes.shape))
    return QTensor(layout.store(rows.codes), scales, dtype=dtype, layout=layout, name=rows.name)


def _becomes_codes(fmt: Format | None) -> bool:
    """Whether rows of it are codes for a product."""
    return fmt is None or fmt.is_integer


def _parts(num_rows: int, width: int) -> Iterator[slice]:
    """Slices of rows of at most :data:`CHUNK` values, and at least :data:`_PART` rows; one while compiling, which fuses
    what is done with them. Their number of rows is a power of two, and the last one's what is left, so that kernels see
    few sizes."""
    if torch.compiler.is_compiling() or num_rows * width <= CHUNK:
        yield slice(0, num_rows)
        return
    step = max(_PART, 1 << (CHUNK // width).bit_length() - 1) if width <= CHUNK else _PART
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _wide(x: Tensor) -> Tensor:
    """Values in the type that products outside of kernels are computed in."""
    return x if x.dtype == torch.float64 else x.float()
