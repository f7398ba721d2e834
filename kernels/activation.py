"""A function of each element of a matrix and dropout behind it: each operand is read once, the result written once.

    y = drop(act(x + bias + residual))        x, residual [N, F] fp32, fp16 or bf16, any strides; bias [F] -> y [N, F]
    dx = grad * factor * derivative           and the sums of its columns before rounding, fp32 [F]

What remembers the function is a bit an element (uint8 [N, ceil(F / 8)]) or, of ELU, its derivative [N, F]: in floats
with dropout's factor in it, or as codes without: uint8, ``derivative * steps`` rounded to multiples of ``2**16``.

Numerics: fp32. Results, bits and codes are equal in every bit to the plain PyTorch definition: the exponential is a
polynomial in operations that are never fused. Sums are deterministic: each program adds its rows, then their results
are added in a fixed order.

Oracle: qgnn.reference.activation, activation_backward
"""

from typing import Any

import torch
import triton
import triton.language as tl
from qgnn.kernels import tuning
from qgnn.kernels.epilogue import dropout_arguments, load_mask, store_mask
from qgnn.kernels.matmul_dw import add_partials
from qgnn.kernels.memory import column_offsets
from qgnn.kernels.rounding import load_seed, random_bits16
from torch import Tensor

_MOST_STEPS = tl.constexpr(255 * 65536.0)


@triton.jit
def exponential(x):
    """``e^x`` and ``e^x - 1`` of what is negative of ``x`` (fp32, any shape), as the reference has them."""
    x = tl.maximum(tl.minimum(x, 0.0), -88.0)
    shifted = x * 1.44269504088896341 + 12582912.0  # leaves the nearest integer in the low bits
    n = shifted - 12582912.0
    r = (x - n * 0.693359375) - n * -2.12194440e-4
    p = 1.9875691500e-4
    p = p * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    q = p * (r * r) + r
    power = ((shifted.to(tl.int32, bitcast=True) - (0x4B400000 - 127)) << 23).to(tl.float32, bitcast=True)
    return (q + 1.0) * power, q * power + (power - 1.0)


@triton.jit(do_not_specialize=["N", "dropout_stream", "threshold", "factor", "slope", "steps", "stream"])
def _activation_kernel(
    # outputs
    y_ptr,
    mask_ptr,
    derivative_ptr,
    # inputs
    x_ptr,
    bias_ptr,
    residual_ptr,
    dropout_seed_ptr,
    seed_ptr,
    # sizes
    N,
    F: tl.constexpr,
    # strides
    stride_xn: tl.constexpr,
    stride_xf,
    stride_rn: tl.constexpr,
    stride_rf,
    # scalars
    dropout_stream,
    threshold,
    factor,
    slope,
    steps,
    stream,
    # flags
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DROPOUT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_DERIVATIVE: tl.constexpr,
    AS_CODES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    # tiles
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program owns a [BLOCK_N, BLOCK_F] tile."""
    NUM_F: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    pid = tl.program_id(0)
    offs_n = (pid // NUM_F).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = (pid % NUM_F) * BLOCK_F
    offs_f = first + tl.arange(0, BLOCK_F)
    mask_n, mask_f = offs_n < N, offs_f < F
    mask = mask_n[:, None] & mask_f[None, :]
    offs = offs_n[:, None] * F + offs_f[None, :]

    x_row = x_ptr + offs_n[:, None] * stride_xn
    y = tl.load(x_row + column_offsets(offs_f, stride_xf)[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_f, mask=mask_f, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        residual_row = residual_ptr + offs_n[:, None] * stride_rn
        columns = column_offsets(offs_f, stride_rf)[None, :]
        y += tl.load(residual_row + columns, mask=mask, other=0.0).to(tl.float32)

    passes = tl.broadcast_to(mask_f[None, :], (BLOCK_N, BLOCK_F))
    if DROPOUT:
        seed = load_seed(dropout_seed_ptr, dropout_stream)
        passes = passes & (random_bits16(seed, offs_n, first, F, BLOCK_N, BLOCK_F) >= threshold)
    if KIND == "relu":
        passes = passes & ((y <= 0.0) == 0)  # a NaN passes
        if HAS_MASK:
            store_mask(mask_ptr, passes, offs_n, mask_n, first, F, BLOCK_N, BLOCK_F)
    if KIND == "leaky_relu":
        positive = (y > 0.0) & mask_f[None, :]
        if HAS_MASK:
            store_mask(mask_ptr, positive, offs_n, mask_n, first, F, BLOCK_N, BLOCK_F)
        y = tl.where(positive, y, y * slope)
    if KIND == "elu":
        grown, less_one = exponential(y)
        negative = y <= 0.0  # of a NaN the derivative is 1
        if HAS_DERIVATIVE:
            derivative = tl.where(negative, grown * slope, 1.0)
            if AS_CODES:
                scaled = tl.minimum(tl.where(passes, derivative * steps, 0.0), _MOST_STEPS).to(tl.int32)
                if STOCHASTIC:
                    scaled += random_bits16(load_seed(seed_ptr, stream), offs_n, first, F, BLOCK_N, BLOCK_F)
                else:
                    scaled += 32768
                tl.store(derivative_ptr + offs, (scaled >> 16).to(tl.uint8), mask=mask)
            else:
                derivative = tl.where(passes, derivative * factor, 0.0)
                tl.store(derivative_ptr + offs, derivative.to(derivative_ptr.dtype.element_ty), mask=mask)
        y = tl.where(negative, less_one * slope, y)
    if DROPOUT:
        y *= factor
    if DROPOUT or KIND == "relu":
        y = tl.where(passes, y, 0.0)
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


def activation(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    kind: str = "none",
    slope: float = 0.0,
    dropout: Any = None,
    mask: Tensor | None = None,
    derivative: Tensor | None = None,
    steps: float = 0.0,
    seed: Tensor | None = None,
    stream: int = 0,
) -> Tensor:
    """``drop(act(x + bias + residual))``; the parameters are those of :func:`qgnn.reference.activation`."""
    N, F = x.shape
    y = torch.empty((N, F), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    config = tuning.activation(F)
    with torch.cuda.device_of(x):
        _activation_kernel[(triton.cdiv(N, config["BLOCK_N"]) * triton.cdiv(F, config["BLOCK_F"]),)](
            y_ptr=y,
            mask_ptr=mask,
            derivative_ptr=derivative,
            x_ptr=x,
            bias_ptr=None if bias is None else bias.contiguous(),
            residual_ptr=residual,
            seed_ptr=seed,
            N=N,
            F=F,
            stride_xn=x.stride(0),
            stride_xf=x.stride(1),
            stride_rn=0 if residual is None else residual.stride(0),
            stride_rf=0 if residual is None else residual.stride(1),
            slope=float(slope),
            steps=float(steps),
            stream=stream,
            KIND=kind,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            HAS_MASK=mask is not None,
            HAS_DERIVATIVE=derivative is not None,
            AS_CODES=derivative is not None and derivative.dtype == torch.uint8,
            STOCHASTIC=seed is not None,
            **dropout_arguments(dropout),
            **config,
        )
    return y


@triton.jit(do_not_specialize=["N", "TILES", "dropout_stream", "threshold", "factor", "slope"])
def _activation_backward_kernel(
    # outputs
    dx_ptr,
    partial_ptr,
    # inputs
    grad_ptr,
    mask_ptr,
    derivative_ptr,
    dropout_seed_ptr,
    # sizes
    N,
    F: tl.constexpr,
    TILES,
    # strides
    stride_gn: tl.constexpr,
    stride_gf,
    # scalars
    dropout_stream,
    threshold,
    factor,
    slope,
    # flags
    HAS_MASK: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    HAS_DERIVATIVE: tl.constexpr,
    DROPOUT: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
    # tiles
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program owns ``TILES`` tiles of ``BLOCK_N`` rows of the same ``BLOCK_F`` columns and walks them in ascending
    order. It writes one row of partial sums, so that those are few beside the gradient."""
    NUM_F: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    pid = tl.program_id(0)
    part = (pid // NUM_F).to(tl.int64)
    first = (pid % NUM_F) * BLOCK_F
    offs_f = first + tl.arange(0, BLOCK_F)
    mask_f = offs_f < F
    columns = column_offsets(offs_f, stride_gf)
    seed = load_seed(dropout_seed_ptr, dropout_stream) if DROPOUT else 0
    total = tl.zeros((BLOCK_N, BLOCK_F), tl.float32)
    for tile in range(0, TILES):
        offs_n = (part * TILES + tile) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N
        mask = mask_n[:, None] & mask_f[None, :]
        offs = offs_n[:, None] * F + offs_f[None, :]
        grad_row = grad_ptr + offs_n[:, None] * stride_gn
        dx = tl.load(grad_row + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_DERIVATIVE:
            dx *= tl.load(derivative_ptr + offs, mask=mask, other=0).to(tl.float32) * factor
        else:
            dx *= factor
        if HAS_MASK:
            passes = load_mask(mask_ptr, offs_n, mask_n, first, F, BLOCK_N, BLOCK_F)
            dx = tl.where(passes, dx, dx * slope if HAS_SLOPE else 0.0)
        if DROPOUT:
            dx = tl.where(random_bits16(seed, offs_n, first, F, BLOCK_N, BLOCK_F) >= threshold, dx, 0.0)
        if SUM_COLUMNS:
            total += dx
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if SUM_COLUMNS:
        tl.store(partial_ptr + part * F + offs_f, tl.sum(total, axis=0), mask=mask_f)


def activation_backward(
    grad: Tensor,
    mask: Tensor | None = None,
    derivative: Tensor | None = None,
    *,
    slope: float = 0.0,
    factor: float = 1.0,
    dropout: Any = None,
    sum_columns: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradient before an activation, and the sums of its columns if they are wanted; the parameters are those of
    :func:`qgnn.reference.activation_backward`."""
    N, F = grad.shape
    dx = torch.empty((N, F), dtype=out_dtype or grad.dtype, device=grad.device)
    if dx.numel() == 0:
        return dx, torch.zeros(F, dtype=torch.float32, device=grad.device) if sum_columns else None
    config = tuning.activation(F)
    tiles = tuning.quantize_grad_tiles(N, config["BLOCK_N"]) if sum_columns else 1
    parts = triton.cdiv(N, tiles * config["BLOCK_N"])
    partial = torch.empty((parts, F), dtype=torch.float32, device=grad.device) if sum_columns else None
    with torch.cuda.device_of(grad):
        _activation_backward_kernel[(parts * triton.cdiv(F, config["BLOCK_F"]),)](
            dx_ptr=dx,
            partial_ptr=partial,
            grad_ptr=grad,
            mask_ptr=mask,
            derivative_ptr=derivative,
            N=N,
            F=F,
            TILES=tiles,
            stride_gn=grad.stride(0),
            stride_gf=grad.stride(1),
            slope=float(slope),
            HAS_MASK=mask is not None,
            HAS_SLOPE=slope != 0,
            HAS_DERIVATIVE=derivative is not None,
            SUM_COLUMNS=sum_columns,
            **{**dropout_arguments(dropout), "factor": float(factor)},
            **config,
        )
        return dx, None if partial is None else add_partials(partial)
