"""ReLU, leaky ReLU, ELU and dropout, on their own and as the epilogue of products and sums, and their backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from qgnn.activation import LEVELS, Activation, mask_width
from qgnn.reference._common import compute_dtype, row_chunks, stream_seed
from qgnn.rng import random_bits16

_BITS = tuple(1 << bit for bit in range(8))
_HALF = 1 << 15
_ROUNDER = 1.5 * 2.0**23  # added to a small number, it leaves the nearest integer in the low bits
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def _pack(passes: Tensor) -> Tensor:
    """Bits of a mask from booleans: [R, F] -> uint8 [R, ceil(F / 8)]."""
    R, F = passes.shape
    padded = torch.nn.functional.pad(passes, (0, 8 * mask_width(F) - F))
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=passes.device)
    return (padded.view(R, mask_width(F), 8) * weights).sum(2, dtype=torch.uint8)


def _unpack(mask: Tensor, num_columns: int) -> Tensor:
    """Booleans from the bits of a mask: uint8 [R, ceil(F / 8)] -> [R, F]."""
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=mask.device)
    return (mask[:, :, None] & weights).ne(0).flatten(1)[:, :num_columns]


def activate(y: Tensor, activation: Activation, first_row: int = 0, factor: float | None = None) -> Tensor:
    """Rows after ReLU and dropout; their bits are written to the activation's mask.

    Args:
        y: Rows, numbered from ``first_row`` for the random bits and the mask.
        activation: What to apply.
        first_row: Number of the first row.
        factor: What kept elements are multiplied by, in place of the activation's.

    Shapes:
        - **input:** ``[R, F]``
        - **output:** ``[R, F]`` of the same type
    """
    passes = ~(y <= 0) if activation.relu else torch.ones_like(y, dtype=torch.bool)  # a NaN passes
    if activation.threshold:
        R, F = y.shape
        seed = stream_seed(activation.seed, activation.stream)
        assert seed is not None
        passes &= random_bits16(first_row, R, F, seed) >= activation.threshold
    if activation.mask is not None:
        activation.mask[first_row : first_row + y.shape[0]] = _pack(passes)
    return torch.where(passes, y * (activation.factor if factor is None else factor), 0)


def _exponential(x: Tensor) -> tuple[Tensor, Tensor]:
    """``e^x`` and ``e^x - 1`` where x is negative; of a NaN or a positive number, something.

    In float64 those of torch. Else a polynomial in plain operations, the same in Triton and C, so that codes of the
    derivative are equal in every bit: with ``x = n ln 2 + r`` and ``q = e^r - 1`` they are ``(q + 1) 2^n`` and
    ``q 2^n + (2^n - 1)``, each within 4 roundings; ``e^x`` is 0 below -87.69, where it is no normal number."""
    x = x.clamp(-88.0, 0.0)
    if x.dtype == torch.float64:
        return x.exp(), x.expm1()
    shifted = x * 1.44269504088896341 + _ROUNDER
    n = shifted - _ROUNDER
    r = (x - n * 0.693359375) - n * -2.12194440e-4  # ln 2 in two parts: the first product is exact
    p = torch.full_like(r, _EXP[0])
    for coefficient in _EXP[1:]:
        p = p * r + coefficient
    q = p * (r * r) + r
    power = ((shifted.view(torch.int32) - (0x4B400000 - 127)) << 23).view(torch.float32)
    return (q + 1.0) * power, q * power + (power - 1.0)


def _keep_derivative(
    kept: Tensor, derivative: Tensor, first_row: int, steps: float, seed: Tensor | None, stream: int
) -> None:
    """Write rows of a derivative to what is kept of it: as they are, or a byte each."""
    R, F = derivative.shape
    if kept.dtype != torch.uint8:
        kept[first_row : first_row + R] = derivative
        return
    effective = stream_seed(seed, stream)
    bits16 = _HALF if effective is None else random_bits16(first_row, R, F, effective)
    codes = ((derivative * steps).clamp_max(LEVELS << 16).to(torch.int32) + bits16) >> 16
    kept[first_row : first_row + R] = codes.to(torch.uint8)


def activation(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    kind: str = "none",
    slope: float = 0.0,
    dropout: Activation | None = None,
    mask: Tensor | None = None,
    derivative: Tensor | None = None,
    steps: float = 0.0,
    seed: Tensor | None = None,
    stream: int = 0,
) -> Tensor:
    """``drop(act(x + bias + residual))``, and what is kept of it.

    Args:
        x: Rows.
        bias: Added to each row.
        residual: Added after that.
        kind: ``"none"``, ``"relu"``, ``"leaky_relu"`` or ``"elu"``.
        slope: Of leaky ReLU below 0; of ELU, its ``alpha``.
        dropout: What drops elements, without a mask.
        mask: Where to write bits: of ReLU, and of none, where a gradient passes; of leaky ReLU, which is positive.
        derivative: Where to write ELU's, 0 where an element was dropped: in floats with the factor of dropout in it, in
            bytes without and times ``steps``, rounded to multiples of ``2**16``.
        steps: See there.
        seed: Seed of that rounding; ``None`` rounds to nearest.
        stream: Number of its stream.

    Shapes:
        - **input:** ``x [N, F]``, ``bias [F]``, ``residual [N, F]``, ``mask`` uint8 ``[N, ceil(F / 8)]``,
          ``derivative [N, F]``, uint8 or float
        - **output:** ``[N, F]`` of ``x``'s type; computed in fp32 (float64 for float64 input)
    """
    N, F = x.shape
    y = torch.empty((N, F), dtype=x.dtype, device=x.device)
    last = Activation(False, 0, None, 0, None) if dropout is None else dropout
    if kind != "leaky_relu":
        last = last._replace(relu=kind == "relu", mask=mask)
    for rows in row_chunks(N, F):
        z = x[rows].to(compute_dtype(x))
        if bias is not None:
            z = z + bias.to(z.dtype)
        if residual is not None:
            z = z + residual[rows].to(z.dtype)
        if kind == "leaky_relu":
            positive = z > 0
            z = torch.where(positive, z, z * slope)
            if mask is not None:
                mask[rows] = _pack(positive)
        elif kind == "elu":
            (grown, less_one), negative = _exponential(z), z <= 0
            if derivative is not None:
                d = torch.where(negative, grown * slope, 1.0)
                unscaled = derivative.dtype == torch.uint8
                d = activate(d, last, rows.start, factor=1.0 if unscaled else None)
                _keep_derivative(derivative, d, rows.start, steps, seed, stream)
            z = torch.where(negative, less_one * slope, z)
        y[rows] = activate(z, last, rows.start)
    return y


def activation_backward(
    grad: Tensor,
    mask: Tensor | None = None,
    derivative: Tensor | None = None,
    *,
    slope: float = 0.0,
    factor: float = 1.0,
    dropout: Activation | None = None,
    sum_columns: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradient before an activation: that behind it times ``factor`` and the derivative.

    Args:
        grad: Gradient of the activated rows.
        mask: Bits: where one is not set, the derivative is ``slope``.
        derivative: The derivative itself, or codes of it, whose size is then part of ``factor``.
        slope: 0 for ReLU, of which nothing passes, not even a NaN.
        factor: What kept elements were multiplied by.
        dropout: To be drawn again, where neither bits nor the derivative say what was dropped.
        sum_columns: Whether to return the sums of the columns, the gradient of a bias.
        out_dtype: Type of the result, that of ``grad`` if ``None``.

    Shapes:
        - **input:** ``grad [N, F]``, ``mask`` uint8 ``[N, ceil(F / 8)]``, ``derivative [N, F]``, uint8 or float
        - **output:** ``[N, F]``; sums before rounding ``[F]``, fp32 (float64 for float64 input), or ``None``
    """
    value = grad.to(compute_dtype(grad))
    value = value * (factor if derivative is None else derivative.to(value.dtype) * factor)
    if mask is not None:
        value = torch.where(_unpack(mask, grad.shape[1]), value, value * slope if slope else 0)
    if dropout is not None and dropout.threshold:
        value = activate(value, dropout, factor=1.0)
    return value.to(out_dtype or grad.dtype), value.sum(0) if sum_columns else None
