"""Quantization and the dense product."""

from __future__ import annotations

from functools import partial
from math import prod

import torch
from torch import Tensor

from qgnn import ops, trace
from qgnn.autocast import without_autocast
from qgnn.config import QConfig, check_config, check_product_config
from qgnn.formats import Blocks, Format
from qgnn.functional._checks import (
    apply_epilogue,
    check_float,
    check_product,
    codes_or_rows,
    draw_seed,
    epilogue_of,
    keeps_codes,
)
from qgnn.functional._mixed import encode_rows, mixed_linear, plan_of
from qgnn.functional._packed import kept_rows, packed_rows
from qgnn.qtensor import QTensor
from qgnn.rng import make_rounding_seed


def quantize(
    x: Tensor,
    fmt_or_config: QConfig | Format | None = None,
    *,
    seed: int | Tensor | None = None,
    straight_through: bool = False,
) -> QTensor:
    """Quantize a tensor to integer codes.

    A :class:`qgnn.QConfig` uses the fused kernels, with its granularity and rounding, or the format of its component
    ``"features"`` where it has formats by component; a format of :mod:`qgnn.formats` encodes along the last dimension,
    and rounds at random only if a ``seed`` is given. Constant input features can be quantized once and passed to layers
    in place of ``x``; a config of a format with blocks then stores them twice, with blocks along either dimension,
    since the gradient of a weight sums over the rows, those of all sets ``[B, N, F]`` together.

    Args:
        x: Values.
        fmt_or_config: ``None`` means ``QConfig()``: int8, a scale a row, stochastic rounding.
        seed: Seed of stochastic rounding.
        straight_through: Whether the products and sums that take the result give ``x`` a gradient, as if it were not
            rounded: so a tensor that several of them share is quantized once, and packed once, if the config says that
            packed blocks are kept. Otherwise ``x`` is a constant.

    Shapes:
        - **input:** ``[..., F]``
        - **output:** codes ``[..., F]``, scale ``[..., 1]`` (row), ``[1, ..., 1]`` (tensor) or
          ``[..., ceil(F / block_size)]`` (block)

    Raises:
        TypeError: If ``x`` is not floating point, or ``fmt_or_config`` is neither a config nor a format.

    Example:
        >>> q = qgnn.functional.quantize(torch.randn(5, 16), qgnn.QConfig(bits=4))
        >>> (q.dequantize() - x).abs().max() <= q.scale.max()
    """
    check_float("quantize", "x", x)
    if isinstance(fmt_or_config, Format) and not straight_through:
        return fmt_or_config.encode(x, seed=seed)
    if isinstance(fmt_or_config, Format):
        raise ValueError(
            f"'quantize' passes gradients on with a config (got {fmt_or_config!r}); use 'qgnn.QConfig(fmt=...)'"
        )
    config = QConfig() if fmt_or_config is None else fmt_or_config
    check_config(config, "quantize")
    if x.dim() == 0:
        raise ValueError("'quantize' expects 'x' with at least one dimension (got a scalar)")
    rounding = draw_seed(config, seed, x)
    passes_on = straight_through and x.requires_grad and torch.is_grad_enabled()
    if not config.is_integer:
        return encode_rows(x, config, rounding, origin=x if passes_on else None)
    rows = x.detach().reshape(prod(x.shape[:-1]), x.shape[-1])
    codes, scale = ops.quantize(rows, rounding, config.bits, config.granularity, config.block_size)
    per_block = config.granularity == "block"
    leading = (1,) * (x.dim() - 1) if config.granularity == "tensor" else x.shape[:-1]
    packed = None
    if straight_through and isinstance(config.save, Blocks):
        # Drawn without gradients, too: a reentrant checkpoint repeats what was drawn in such a pass.
        packing = make_rounding_seed(seed if rounding is None else rounding, x.device)
        packed = packed_rows(rows, config.save, packing) if passes_on else None
    return QTensor(
        codes.view(x.shape),
        scale.view(*leading, scale.shape[-1] if per_block else 1),
        block_size=config.block_size if per_block else None,
        dtype=x.dtype,
        name=f"int{config.bits}",
        origin=x if passes_on else None,
        packed=packed,
    )


def dequantize(q: QTensor) -> Tensor:
    """The values that codes stand for, ``x = codes * scale (+ zero)``.

    Args:
        q: As :func:`quantize` and formats return it.

    Shapes:
        - **output:** that of the values, in the type that was quantized

    Raises:
        TypeError: If ``q`` is no :class:`qgnn.QTensor`.

    Example:
        >>> x = torch.randn(5, 16)
        >>> x_hat = qgnn.functional.dequantize(qgnn.functional.quantize(x))
    """
    if not isinstance(q, QTensor):
        raise TypeError(f"'dequantize' expects a QTensor (got {type(q).__name__})")
    return q.dequantize()


def linear(
    x: Tensor | QTensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    dropout: float = 0,  # an integer: torch.compile makes a symbol of a float
    config: QConfig | None = None,
    seed: int | Tensor | None = None,
) -> Tensor:
    r"""Dense product :math:`y = x W^{\top} + b`, forward and backward on integer operands.

    Activations and gradients get a scale a row (or one a tensor), weights one a column of the product. With stochastic
    rounding ``y`` and the gradients are unbiased. After `"Tango: Rethinking Quantization for Graph Neural Network
    Training on GPUs" <https://arxiv.org/abs/2308.00890>`_.

    With formats by component each of the three products rounds its operands along the dimension that it sums over. The
    gradient of ``weight`` sums over the rows: for it ``x`` is rounded along these, in the forward pass, where the codes
    are kept, or with ``save="fp32"`` in the backward pass. Where rows have an integer format with a scale each, their
    codes serve both products, unless ``save="fp32"``.

    Args:
        x: Input rows; a :class:`qgnn.QTensor` of row or tensor granularity is used as it is, and one of any format with
            a ``config`` that has formats by component.
        weight: As in :class:`torch.nn.Linear`.
        bias: Added in fp32.
        activation: ``"relu"`` to apply it to ``y``: with ``config`` in the product's own pass, and what is kept of it
            is one bit an element.
        dropout: Probability that an element of ``y`` is dropped after that, in steps of ``2**-16``. In evaluation, give
            0.
        config: How to quantize; ``None`` is :func:`torch.nn.functional.linear` in ``x``'s type, and a second pass for
            what is behind.
        seed: Seed of stochastic rounding and dropout.

    Shapes:
        - **input:** ``x [..., K]``, ``weight [M, K]``, ``bias [M]``; with ``config``, ``K`` and ``M`` up to 131,071,
          which int32 sums hold
        - **output:** ``[..., M]``, of ``x``'s type (of the type that was quantized, if ``x`` is a QTensor)

    Raises:
        TypeError: If ``x``, ``weight`` or ``bias`` hold no floats, or ``config`` is no QConfig.
        ValueError: If widths or devices disagree, ``activation`` is unknown, or ``dropout`` is no probability.

    Example:
        >>> y = qgnn.functional.linear(torch.randn(9, 16), torch.randn(4, 16), config=qgnn.QConfig())
    """
    check_product_config(config, "linear")
    check_product("linear", x, weight, bias)
    if config is None:
        value = _values(x) if isinstance(x, QTensor) else x
        with without_autocast(value.device.type):
            weight, bias = weight.to(value.dtype), None if bias is None else bias.to(value.dtype)
            y = torch.nn.functional.linear(value, weight, bias)
        if not torch.compiler.is_compiling() and trace.recording():
            _report_products(value, weight, bias, y)
        return apply_epilogue("linear", y, activation, dropout, seed)
    if not config.is_integer:
        plan = plan_of(config, x)
        if plan.is_exact:
            return linear(x, weight, bias, activation=activation, dropout=dropout, seed=seed)
        y = mixed_linear(x, weight, bias, plan, draw_seed(config, seed, weight))
        return apply_epilogue("linear", y, activation, dropout, seed)
    codes_or_x, scale, origin = codes_or_rows("linear", x)
    rows = codes_or_x.reshape(prod(codes_or_x.shape[:-1]), codes_or_x.shape[-1])
    x_float = None if origin is None else origin.reshape(rows.shape)
    rounding = draw_seed(config, seed, rows)
    kept = kept_rows(config, x, weight, seed if rounding is None else rounding)
    y, *_ = ops.matmul(
        rows,
        scale,
        weight,
        bias,
        rounding,
        config.bits,
        config.granularity,
        kept.packed is None and keeps_codes(config, weight),
        *epilogue_of("linear", activation, dropout, seed, rows, weight, bias, x_float),
        *kept,
        x_float,
    )
    return y.view(*codes_or_x.shape[:-1], weight.shape[0]).to(x.dtype)


def _values(x: QTensor) -> Tensor:
    """What the codes stand for, with the gradient of what they were made of."""
    value = x.dequantize()
    return value if x.origin is None else x.origin + (value - x.origin).detach()


def _report_products(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """The product in full precision, and those of its gradients when they are made."""
    report = partial(trace.report, fmt=str(y.dtype).removeprefix("torch."), backend="torch")
    report("matmul.forward", operands=(x, weight, bias, y))
    if not y.requires_grad:
        return

    def report_gradients(grad: Tensor) -> None:  # a gradient has the bytes of what it is the gradient of
        if x.requires_grad:
            report("matmul.backward_dx", operands=(grad, weight, x))
        if weight.requires_grad:
            report("matmul.backward_dw", operands=(grad, x, weight))

    y.register_hook(report_gradients)
