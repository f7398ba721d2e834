"""Products whose operands have formats of their own.

Of a product ``y = x w^T`` each operand is rounded along the dimension that is summed over: ``x`` and ``w`` along the
features, for ``dx = g w`` the gradient ``g`` and ``w`` along the outputs, for ``dw = g^T x`` both along the rows. What
is kept of ``x`` for ``dw`` are packed codes: those of the forward pass where rows have a scale each, which the product
folds into ``g``; else ``x`` rounded once more, along its rows. With ``save="fp32"`` ``x`` itself is kept, and rounded
along its rows in the backward pass, so ``dw`` does not see the rounding of the forward pass. Of codes that are given
without their columns ``dw`` takes the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qgnn import ops
from qgnn.autocast import without_autocast
from qgnn.config import QConfig
from qgnn.formats import Format
from qgnn.formats._format import check_traced
from qgnn.functional._operands import Operand, has_codes, operand_of, product, round_rows, rows_of, stream_of
from qgnn.layout import Layout
from qgnn.packing import CHUNK, row_parts
from qgnn.qtensor import QTensor

# Streams of one seed, beyond those of the operators: no two roundings of a call share random bits.
_INPUT, _WEIGHT, _GRAD, _WEIGHT_T, _INPUT_T, _GRAD_T, _WEIGHT_GRAD, _PARTS = 32, 33, 34, 35, 36, 37, 38, 64

# Rows of a part at least, as a product arranges its other operand anew for each part. For the same reason they may take
# as many bytes as that operand has in fp32.
_PART = 16


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
    check_traced()
    given, values = (rows_of(x), x.origin) if isinstance(x, QTensor) else (None, x)
    rows = None if values is None else values.reshape(prod(values.shape[:-1]), values.shape[-1])
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
        return (self.rows, None, None) if q is None else q.tensors

    def with_tensors(self, *tensors: Tensor | None) -> _Kept:
        """The same with other tensors, or without any."""
        if self.codes is not None:
            return _Kept(codes=self.codes.with_tensors(*tensors))
        if self.columns is not None:
            return _Kept(columns=self.columns.with_tensors(*tensors))
        return _Kept(tensors[0] if tensors else None)


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
        ctx.plan, ctx.kept = plan, kept.with_tensors()
        ctx.x_dtype, ctx.bias_dtype = (None if t is None else t.dtype for t in (x, bias))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, seed, *tensors = ctx.saved_tensors
        run = _gradients if torch.compiler.is_compiling() else _Gradients.apply
        options = (ctx.needs_input_grad[:3], ctx.x_dtype, ctx.bias_dtype)
        return (
            *run(grad, weight, seed, ctx.plan, ctx.kept.with_tensors(*tensors), *options),
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
        reads_rows = needs_dx or kept.codes is not None  # codes of columns meet those of the gradient's columns
        g = round_rows(grad, plan.grad, plan.granularity, stream_of(seed, _GRAD)) if reads_rows else None
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
    # Each part draws random bits of its own: another length would round otherwise.
    parts = list(_parts(*x.shape)) if plan.granularity == "row" else []
    if len(parts) < 2 or _becomes_codes(plan.x):
        rows = round_rows(_wide(x), plan.x, plan.granularity, x_seed)
        y = product(rows, w, bias, "forward")
        if keep and plan.keeps_codes and rows.scale is not None:
            return y, _Kept(codes=_packed(rows, plan.x, x.dtype))
    else:
        y = x.new_empty((x.shape[0], w.num_rows), dtype=_wide(x[:0]).dtype)
        for number, part in enumerate(parts):
            rows = round_rows(_wide(x[part]), plan.x, "row", stream_of(x_seed, _PARTS + number))
            y[part] = product(rows, w, bias, "forward")
    del rows  # what is made of the columns takes its place
    if not keep or plan.x is None or not plan.keeps_codes:
        return y, _Kept(x if keep else None)
    return y, _Kept(columns=encode_columns(x, plan.x, plan.granularity, stream_of(seed, _INPUT_T)))


def _of_codes(q: QTensor, w: Operand, bias: Tensor | None) -> Tensor:
    """The product of rows that are codes already; packed ones are unpacked by parts."""
    if q.layout is None or (q.layout.bits == 8 and q.layout.mantissa_bits is None):
        return product(operand_of(q), w, bias, "forward")
    return _by_parts(q, 0, w.num_rows, lambda rows: product(rows, w, bias, "forward"))


def _by_parts(q: QTensor, dim: int, num_others: int, run: Callable[[Operand], Tensor]) -> Tensor:
    """The matrix that ``run`` makes of rows, each a row (``dim=0``) or a column, with few of them unpacked at once: no
    more bytes than the ``num_others`` rows of its other operand have in fp32, or those of :data:`CHUNK` values."""
    least = (4 if has_codes(q) else 1) * num_others
    parts = list(_parts(q.shape[0], q.shape[1], least)) if q.has_parts else []
    if len(parts) < 2:
        return run(operand_of(q))
    out: Tensor | None = None
    for part in parts:
        made = run(operand_of(q.part(part)))
        if out is None:
            out = made.new_empty((q.shape[0], made.shape[1]) if dim == 0 else (made.shape[0], q.shape[0]))
        out.narrow(dim, part.start, part.stop - part.start).copy_(made)
    assert out is not None
    return out


def encode_rows(x: Tensor, config: QConfig, seed: Tensor | None, origin: Tensor | None) -> QTensor:
    """Constant rows in the format of features, as products take them: with their columns where codes of rows do not
    serve the gradient of a weight."""
    fmt = config.format_of("features")
    if fmt is None:
        raise ValueError(
            "'quantize' expects a format for the component 'features' in 'config' (got None); give the format itself"
        )
    q = fmt.encode(x, None if config.granularity == "tensor" and fmt.scales_slices else -1, stream_of(seed, _INPUT))
    if not (fmt.is_integer and fmt.scales_slices):
        rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
        q = replace(q, columns=encode_columns(rows, fmt, config.granularity, stream_of(seed, _INPUT_T)))
    return replace(q, origin=origin)


def encode_columns(x: Tensor, fmt: Format, granularity: str, seed: Tensor | None) -> QTensor:
    """The columns of ``x`` ``[N, K]`` as codes ``[K, N]``, with scales along ``N``."""
    return fmt.encode(x.detach().t(), None if granularity == "tensor" and fmt.scales_slices else -1, seed)


def _input_grad(g: Operand | None, weight: Tensor, plan: Plan, seed: Tensor | None) -> Tensor:
    w = round_rows(_wide(weight).t(), plan.weight, "row", stream_of(seed, _WEIGHT_T))
    assert g is not None
    return product(g, w, None, "backward_dx")


def _weight_grad(grad: Tensor, g: Operand | None, kept: _Kept, plan: Plan, seed: Tensor | None) -> Tensor:
    """``dw = g^T x`` ``[M, K]``, of ``grad`` and its rounded rows ``g``."""
    x = None if kept.codes is None else operand_of(kept.codes)
    if x is not None and x.scale is not None and g is not None and g.scale is not None:
        name = g.name if g.name == x.name else f"{g.name} x {x.name}"
        dw = ops.matmul_codes_dw(g.codes, g.scale, x.codes, x.scale, name)
        return _rounded_weight_grad(dw, plan, seed)
    gt = round_rows(grad.t(), plan.grad, plan.granularity, stream_of(seed, _GRAD_T))
    columns = kept.columns
    if x is not None:
        dw = product(gt, Operand(x.name, values=x.decoded().t()), None, "backward_dw")
    elif columns is not None:
        dw = _by_parts(columns, 1, gt.num_rows, lambda rows: product(gt, rows, None, "backward_dw"))
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


def _parts(num_rows: int, width: int, least: int = 1) -> Iterator[slice]:
    """Slices of rows of at most :data:`CHUNK` values or ``least`` rows, and at least :data:`_PART` rows; one while
    compiling. Their rows are a power of two, and what is left: along the nodes of sampled batches kernels see few
    sizes."""
    if torch.compiler.is_compiling():
        return iter([slice(0, num_rows)])
    width = max(1, width)
    rows = max(_PART, 1 << max(1, least, CHUNK // width).bit_length() - 1)
    return row_parts(num_rows, width, rows * width)


def _wide(x: Tensor) -> Tensor:
    """Values in the type that products outside of kernels are computed in."""
    return x if x.dtype == torch.float64 else x.float()
