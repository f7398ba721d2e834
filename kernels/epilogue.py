"""What a product or a sum applies to a tile of fp32 rows before it writes them, and the backward pass of that.

    y = row_factor[i] * y + bias[f];   y = relu(y);   y = y * factor where it is kept, else 0

The mask has one bit an element, whether its gradient passes: bit ``f % 8`` of byte ``f // 8`` of a row. An element is
dropped if its 16 random bits, those of the rounding's hash, are below a threshold.

Numerics: fp32; a NaN passes the ReLU. Codes, bits and results are equal in every bit to the plain PyTorch definition.

Oracle: qgnn.reference.activation
"""

from typing import Any

import triton
import triton.language as tl
from qgnn.kernels.rounding import load_seed, random_bits16
from torch import Tensor


@triton.jit
def leaky_relu(x, slope):
    return tl.where(x > 0, x, x * slope)


@triton.jit
def finish_rows(
    y,
    offs_n,
    mask_n,
    first_col,
    row_factor_ptr,
    bias_ptr,
    mask_ptr,
    dropout_seed_ptr,
    dropout_stream,
    threshold,
    factor,
    F: tl.constexpr,
    HAS_ROW_FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
    DROPOUT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """The tile ``y`` (fp32 [R, C], of rows ``offs_n`` and the columns from ``first_col`` on) behind its epilogue; the
    bits of its mask are stored. With a mask, ``C`` and ``first_col`` are multiples of 8."""
    offs_f = first_col + tl.arange(0, C)
    if HAS_ROW_FACTOR:
        y *= tl.load(row_factor_ptr + offs_n, mask=mask_n, other=0.0)[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_f, mask=offs_f < F, other=0.0).to(tl.float32)[None, :]
    if RELU or DROPOUT:
        passes = (offs_f < F)[None, :]
        if RELU:
            passes = passes & ((y <= 0.0) == 0)  # a NaN passes
        if DROPOUT:
            seed = load_seed(dropout_seed_ptr, dropout_stream)
            passes = passes & (random_bits16(seed, offs_n, first_col, F, R, C) >= threshold)
            y *= factor
        passes = tl.broadcast_to(passes, (R, C))
        if HAS_MASK:
            store_mask(mask_ptr, passes, offs_n, mask_n, first_col, F, R, C)
        y = tl.where(passes, y, 0.0)
    return y


@triton.jit
def store_mask(mask_ptr, passes, offs_n, mask_n, first_col, F: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """The bits of a tile (bool [R, C]). ``C`` and ``first_col`` are multiples of 8."""
    WIDTH: tl.constexpr = (F + 7) // 8
    offs_byte = first_col // 8 + tl.arange(0, C // 8)
    # A choice between constants: bits that are shifted into place become 8-bit shifts, five instructions each.
    bits = tl.where(passes.reshape(R, C // 8, 8), (1 << tl.arange(0, 8))[None, None, :], 0)
    tl.store(
        mask_ptr + offs_n[:, None] * WIDTH + offs_byte[None, :],
        tl.sum(bits, axis=2).to(tl.uint8),
        mask=mask_n[:, None] & (offs_byte < WIDTH)[None, :],
    )


@triton.jit
def load_mask(mask_ptr, offs_n, mask_n, first_col, F: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Which gradients of a tile pass: bool [R, C]. ``C`` and ``first_col`` are multiples of 8."""
    WIDTH: tl.constexpr = (F + 7) // 8
    offs_byte = first_col // 8 + tl.arange(0, C // 8)
    byte = tl.load(
        mask_ptr + offs_n[:, None] * WIDTH + offs_byte[None, :],
        mask=mask_n[:, None] & (offs_byte < WIDTH)[None, :],
        other=0,
    ).to(tl.int32)
    return ((byte[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1).reshape(R, C) != 0


def dropout_arguments(dropout: Any) -> dict[str, Any]:
    """The keyword arguments of a kernel that drops what it reads or makes, of a :class:`qgnn.activation.Activation` or
    ``None``."""
    threshold = 0 if dropout is None else dropout.threshold
    return {
        "dropout_seed_ptr": dropout.seed if threshold else None,
        "dropout_stream": dropout.stream if threshold else 0,
        "threshold": threshold,
        "factor": float(dropout.factor) if threshold else 1.0,
        "DROPOUT": threshold > 0,
    }


def epilogue_arguments(activation: Any, *, bias: Tensor | None, row_factor: Tensor | None = None) -> dict[str, Any]:
    """The keyword arguments of a kernel that ends in :func:`finish_rows`, but for sizes and tiles.

    ``activation`` is a :class:`qgnn.activation.Activation` or ``None``."""
    mask = None if activation is None else activation.mask
    return {
        **dropout_arguments(activation),
        "row_factor_ptr": None if row_factor is None else row_factor.contiguous(),
        "bias_ptr": None if bias is None else bias.contiguous(),
        "mask_ptr": mask,
        "HAS_ROW_FACTOR": row_factor is not None,
        "HAS_BIAS": bias is not None,
        "RELU": activation is not None and activation.relu,
        "HAS_MASK": mask is not None,
    }
