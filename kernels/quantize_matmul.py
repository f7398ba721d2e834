"""Rows rounded to int8 codes and multiplied while they are in registers.

    quantize_matmul_fused             x_q, x_scale = quantize(x);  y [N, M] = (x_q w_q^T) * x_scale * w_scale + bias,
                                      then ReLU and dropout, with x [N, K] fp32, fp16 or bf16 and w_q [M, K]
    quantize_matmul_requantize_fused  the same without what follows the scales, rounded to int8 rows again

``x`` is read once, and its codes are written once for the backward pass and not read back. One program holds whole rows
of ``x``, at most 512 columns. :mod:`qgnn.kernels.matmul` has the functions that choose between these and two kernels.

Numerics: those of ``qgnn.kernels.quantize`` and ``qgnn.kernels.matmul``, equal in every bit.

Oracle: qgnn.reference.quantize_matmul, quantize_matmul_requantize
"""

from typing import Any

import torch
import triton
import triton.language as tl
from qgnn.kernels.epilogue import epilogue_arguments, finish_rows
from qgnn.kernels.memory import code_stride, column_offsets, empty_codes, readable_width
from qgnn.kernels.rounding import absmax_scale, load_seed, round_codes, row_absmax
from torch import Tensor


@triton.jit
def quantize_rows(
    q_ptr,
    scale_ptr,
    x_ptr,
    seed_ptr,
    stream,
    offs_n,
    mask_n,
    stride_xk,
    F: tl.constexpr,
    stride_qn: tl.constexpr,
    stride_xn: tl.constexpr,
    QMAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Codes (int8 [R, C], 0 beyond the last column) and scales (fp32 [R]) of whole rows of ``x``; both are stored."""
    offs_f = tl.arange(0, C)
    mask = mask_n[:, None] & (offs_f < F)[None, :]
    x_row = x_ptr + offs_n[:, None] * stride_xn
    x = tl.load(x_row + column_offsets(offs_f, stride_xk)[None, :], mask=mask, other=0.0).to(tl.float32)
    scale, inv = absmax_scale(row_absmax(x), QMAX)
    seed = load_seed(seed_ptr, stream) if STOCHASTIC else 0
    q = round_codes(x, inv, seed, offs_n, 0, F, STOCHASTIC, R, C)
    # What ends the row may write into the gap behind it: whole vectors, whatever the width.
    tl.store(
        q_ptr + offs_n[:, None] * stride_qn + offs_f[None, :], q, mask=mask_n[:, None] & (offs_f < stride_qn)[None, :]
    )
    tl.store(scale_ptr + offs_n, scale, mask=mask_n)
    return q, scale


@triton.jit
def load_weight(
    w_ptr,
    offs_m,
    stride_wk,
    M: tl.constexpr,
    W_WIDTH: tl.constexpr,
    stride_wm: tl.constexpr,
    C: tl.constexpr,
):
    """int8 [C, BLOCK_M]: rows ``offs_m`` of the weight, transposed. What lies beyond the columns of ``x`` meets its
    codes 0."""
    offs_k = tl.arange(0, C)
    return tl.load(
        w_ptr + offs_m[None, :].to(tl.int64) * stride_wm + column_offsets(offs_k, stride_wk)[:, None],
        mask=(offs_k < W_WIDTH)[:, None] & (offs_m < M)[None, :],
        other=0,
    )


@triton.jit(do_not_specialize=["N", "stream", "dropout_stream", "threshold", "factor"])
def _quantize_matmul_kernel(
    # outputs
    out_ptr,
    q_ptr,
    scale_ptr,
    mask_ptr,
    # inputs
    x_ptr,
    w_ptr,
    w_scale_ptr,
    row_factor_ptr,
    bias_ptr,
    seed_ptr,
    dropout_seed_ptr,
    # sizes
    N,
    M: tl.constexpr,
    K: tl.constexpr,
    W_WIDTH: tl.constexpr,
    # strides
    stride_qn: tl.constexpr,
    stride_xn: tl.constexpr,
    stride_xk,
    stride_wm: tl.constexpr,
    stride_wk,
    # scalars
    stream,
    dropout_stream,
    threshold,
    factor,
    # flags
    QMAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HAS_ROW_FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
    DROPOUT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    # tiles
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program owns ``BLOCK_N`` rows: it rounds them, then walks the output in tiles of ``BLOCK_M`` columns.

    The weight is loaded behind the codes: earlier, it would take the registers that rounding needs."""
    NUM_M: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    q, scale = quantize_rows(
        q_ptr, scale_ptr, x_ptr, seed_ptr, stream, offs_n, mask_n, stride_xk,
        K, stride_qn, stride_xn, QMAX, STOCHASTIC, BLOCK_N, BLOCK_K,
    )  # fmt: skip

    for tile in tl.range(0, NUM_M, num_stages=1):
        offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        w = load_weight(w_ptr, offs_m, stride_wk, M, W_WIDTH, stride_wm, BLOCK_K)
        y = tl.dot(q, w, out_dtype=tl.int32).to(tl.float32)  # [BLOCK_N, BLOCK_M]
        y = y * scale[:, None] * tl.load(w_scale_ptr + offs_m, mask=mask_m, other=0.0)[None, :]
        y = finish_rows(
            y, offs_n, mask_n, tile * BLOCK_M, row_factor_ptr, bias_ptr, mask_ptr, dropout_seed_ptr, dropout_stream,
            threshold, factor, M, HAS_ROW_FACTOR, HAS_BIAS, RELU, DROPOUT, HAS_MASK, BLOCK_N, BLOCK_M,
        )  # fmt: skip
        mask = mask_n[:, None] & mask_m[None, :]
        tl.store(out_ptr + offs_n[:, None] * M + offs_m[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


def _operands(x: Tensor, w_q: Tensor, w_scale: Tensor, bits: int, seed: Tensor | None, stream: int) -> dict[str, Any]:
    """The arguments that both kernels share; codes and scales of ``x`` are allocated."""
    N, K = x.shape
    return {
        "q_ptr": empty_codes(N, K, x.device),
        "scale_ptr": torch.empty(N, dtype=torch.float32, device=x.device),
        "x_ptr": x,
        "w_ptr": w_q,
        "w_scale_ptr": w_scale.contiguous(),
        "seed_ptr": seed,
        "N": N,
        "M": w_q.shape[0],
        "K": K,
        "W_WIDTH": readable_width(w_q),
        "stride_qn": code_stride(K),
        "stride_xn": x.stride(0),
        "stride_xk": x.stride(1),
        "stride_wm": w_q.stride(0),
        "stride_wk": w_q.stride(1),
        "stream": stream,
        "QMAX": (1 << (bits - 1)) - 1,
        "STOCHASTIC": seed is not None,
    }


def quantize_matmul_fused(
    x: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    *,
    bits: int,
    seed: Tensor | None,
    stream: int,
    out_dtype: torch.dtype,
    activation: Any,
    config: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """``(y, x_q, x_scale)`` of operands that are not empty, with the tiles of ``config``."""
    with torch.cuda.device_of(x):
        operands = _operands(x, w_q, w_scale, bits, seed, stream)
        out = torch.empty((x.shape[0], w_q.shape[0]), dtype=out_dtype, device=x.device)
        _quantize_matmul_kernel[(triton.cdiv(x.shape[0], config["BLOCK_N"]),)](
            out_ptr=out, **operands, **epilogue_arguments(activation, bias=bias), **config
        )
    return out, operands["q_ptr"], operands["scale_ptr"]


@triton.jit(do_not_specialize=["N", "stream", "hidden_stream"])
def _quantize_matmul_requantize_kernel(
    # outputs
    hidden_ptr,
    hidden_scale_ptr,
    q_ptr,
    scale_ptr,
    # inputs
    x_ptr,
    w_ptr,
    w_scale_ptr,
    seed_ptr,
    # sizes
    N,
    M: tl.constexpr,
    K: tl.constexpr,
    W_WIDTH: tl.constexpr,
    # strides
    stride_hn: tl.constexpr,
    stride_qn: tl.constexpr,
    stride_xn: tl.constexpr,
    stride_xk,
    stride_wm: tl.constexpr,
    stride_wk,
    # scalars
    stream,
    hidden_stream,
    # flags
    QMAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    # tiles
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program owns ``BLOCK_N`` whole rows of the input and of the output."""
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    mask_n = offs_n < N
    q, scale = quantize_rows(
        q_ptr, scale_ptr, x_ptr, seed_ptr, stream, offs_n, mask_n, stride_xk,
        K, stride_qn, stride_xn, QMAX, STOCHASTIC, BLOCK_N, BLOCK_K,
    )  # fmt: skip

    w = load_weight(w_ptr, offs_m, stride_wk, M, W_WIDTH, stride_wm, BLOCK_K)
    y = tl.dot(q, w, out_dtype=tl.int32).to(tl.float32)  # [BLOCK_N, BLOCK_M]
    y *= tl.load(w_scale_ptr + offs_m, mask=offs_m < M, other=0.0)[None, :]
    hidden_scale, inv = absmax_scale(row_absmax(y), QMAX)
    seed = load_seed(seed_ptr, hidden_stream) if STOCHASTIC else 0
    hidden = round_codes(y, inv, seed, offs_n, 0, M, STOCHASTIC, BLOCK_N, BLOCK_M)

    mask = mask_n[:, None] & (offs_m < stride_hn)[None, :]  # whole vectors, whatever the width
    tl.store(hidden_ptr + offs_n[:, None] * stride_hn + offs_m[None, :], hidden, mask=mask)
    tl.store(hidden_scale_ptr + offs_n, hidden_scale * scale, mask=mask_n)


def quantize_matmul_requantize_fused(
    x: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    *,
    bits: int,
    seed: Tensor | None,
    stream: int,
    hidden_stream: int,
    config: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(h_q, h_scale, x_q, x_scale)`` of operands that are not empty, with the tiles of ``config``."""
    N, M = x.shape[0], w_q.shape[0]
    with torch.cuda.device_of(x):
        operands = _operands(x, w_q, w_scale, bits, seed, stream)
        hidden = empty_codes(N, M, x.device)
        hidden_scale = torch.empty(N, dtype=torch.float32, device=x.device)
        _quantize_matmul_requantize_kernel[(triton.cdiv(N, config["BLOCK_N"]),)](
            hidden_ptr=hidden,
            hidden_scale_ptr=hidden_scale,
            **operands,
            stride_hn=code_stride(M),
            hidden_stream=hidden_stream,
            **config,
        )
    return hidden, hidden_scale, operands["q_ptr"], operands["scale_ptr"]
