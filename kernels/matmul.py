"""Dense products of int8 codes.

    matmul                      y [N, M] = (x_q w_q^T) * x_scale * w_scale + bias, then ReLU and dropout, with
                                x_q [N, K] and w_q [M, K]
    matmul_requantize           the same without what follows the scales, rounded to int8 rows with a scale each
    quantize_matmul             x_q, x_scale = quantize(x), then matmul
    quantize_matmul_requantize  x_q, x_scale = quantize(x), then matmul_requantize

The last two are one kernel where that fits (``qgnn.kernels.quantize_matmul``). ``matmul_dw``, the product that
contracts over rows, has its kernels in ``qgnn.kernels.matmul_dw``.

Numerics: integers are summed in int32, exactly (K up to 131,071); scales and bias are applied in fp32, one rounding
each. The row scale of ``x`` does not enter requantized codes, only their scale. A NaN scale reaches exactly its own
row.

Oracle: qgnn.reference.matmul, matmul_requantize, quantize_matmul, quantize_matmul_requantize
"""

from typing import Any

import torch
import triton
import triton.language as tl
from qgnn.kernels import tuning
from qgnn.kernels.epilogue import epilogue_arguments, finish_rows
from qgnn.kernels.matmul_dw import matmul_dw
from qgnn.kernels.memory import VECTOR_BYTES, code_stride, column_offsets, empty_codes, readable_width, scale_stride
from qgnn.kernels.quantize import quantize
from qgnn.kernels.quantize_matmul import quantize_matmul_fused, quantize_matmul_requantize_fused
from qgnn.kernels.rounding import absmax_scale, load_seed, round_codes, row_absmax
from torch import Tensor

__all__ = ["matmul", "matmul_dw", "matmul_requantize", "quantize_matmul", "quantize_matmul_requantize"]


@triton.jit
def accumulate_int8(
    x_ptr,
    w_ptr,
    offs_n,
    offs_m,
    N,
    M: tl.constexpr,
    X_WIDTH: tl.constexpr,
    W_WIDTH: tl.constexpr,
    stride_xn: tl.constexpr,
    stride_xk,
    stride_wm: tl.constexpr,
    stride_wk,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Exact int32 [BLOCK_N, BLOCK_M] tile of x_q w_q^T. Columns of ``x`` beyond K meet zeros (or nothing) in ``w``."""
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    x_row = x_ptr + offs_n[:, None] * stride_xn
    w_row = w_ptr + offs_m[None, :].to(tl.int64) * stride_wm
    for k in range(0, W_WIDTH, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        mask_x = (offs_n < N)[:, None] & (offs_k < X_WIDTH)[None, :]
        mask_w = (offs_k < W_WIDTH)[:, None] & (offs_m < M)[None, :]
        x = tl.load(x_row + column_offsets(offs_k, stride_xk)[None, :], mask=mask_x, other=0)
        w = tl.load(w_row + column_offsets(offs_k, stride_wk)[:, None], mask=mask_w, other=0)
        acc = tl.dot(x, w, acc, out_dtype=tl.int32)
    return acc


@triton.jit(do_not_specialize=["N", "dropout_stream", "threshold", "factor"])
def _matmul_kernel(
    # outputs
    out_ptr,
    mask_ptr,
    # inputs
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    row_factor_ptr,
    bias_ptr,
    dropout_seed_ptr,
    # sizes
    N,
    M: tl.constexpr,
    X_WIDTH: tl.constexpr,
    W_WIDTH: tl.constexpr,
    # strides
    stride_xn: tl.constexpr,
    stride_xk,
    stride_sn,
    stride_wm: tl.constexpr,
    stride_wk,
    # scalars
    dropout_stream,
    threshold,
    factor,
    # flags
    HAS_X_SCALE: tl.constexpr,
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
    """One program owns a [BLOCK_N, BLOCK_M] tile of the output. Programs walk along output rows first, so that those
    which read the same rows of ``x`` run together."""
    NUM_M: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    offs_n = (pid // NUM_M).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = (pid % NUM_M) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_n = offs_n < N
    mask_m = offs_m < M

    acc = accumulate_int8(
        x_ptr, w_ptr, offs_n, offs_m, N, M, X_WIDTH, W_WIDTH,
        stride_xn, stride_xk, stride_wm, stride_wk, BLOCK_N, BLOCK_M, BLOCK_K,
    )  # fmt: skip
    y = acc.to(tl.float32)
    if HAS_X_SCALE:
        y *= tl.load(x_scale_ptr + offs_n * stride_sn, mask=mask_n, other=0.0)[:, None]
    y *= tl.load(w_scale_ptr + offs_m, mask=mask_m, other=0.0)[None, :]
    y = finish_rows(
        y, offs_n, mask_n, (pid % NUM_M) * BLOCK_M, row_factor_ptr, bias_ptr, mask_ptr, dropout_seed_ptr,
        dropout_stream, threshold, factor, M, HAS_ROW_FACTOR, HAS_BIAS, RELU, DROPOUT, HAS_MASK, BLOCK_N, BLOCK_M,
    )  # fmt: skip

    mask = mask_n[:, None] & mask_m[None, :]
    tl.store(out_ptr + offs_n[:, None] * M + offs_m[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


def _operands(x_q: Tensor, w_q: Tensor) -> tuple[Tensor, dict[str, int]]:
    """The weight codes with rows of whole zero-padded vectors, and the sizes and strides of both operands."""
    K = x_q.shape[1]
    if K > tuning.MAX_INT32_TERMS:
        raise ValueError(
            f"'matmul' expects at most {tuning.MAX_INT32_TERMS} columns in 'x_q', the longest sum that int32 "
            f"holds (got {K}); split the columns and add the products"
        )
    if K % VECTOR_BYTES and w_q.numel():
        w_q = torch.nn.functional.pad(w_q, (0, code_stride(K) - K))
    return w_q, {
        "N": x_q.shape[0],
        "M": w_q.shape[0],
        "X_WIDTH": readable_width(x_q),
        "W_WIDTH": w_q.shape[1],
        "stride_xn": x_q.stride(0),
        "stride_xk": x_q.stride(1),
        "stride_wm": w_q.stride(0),
        "stride_wk": w_q.stride(1),
    }


def _matmul(
    x_q: Tensor,
    x_scale: Tensor | None,
    w_q: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    activation: Any = None,
) -> Tensor:
    N, M = x_q.shape[0], w_q.shape[0]
    out = torch.empty((N, M), dtype=out_dtype, device=x_q.device)
    if out.numel() == 0:
        return out
    with torch.cuda.device_of(x_q):
        w_q, sizes = _operands(x_q, w_q)
        config = tuning.matmul(sizes["W_WIDTH"], M)
        _matmul_kernel[(triton.cdiv(N, config["BLOCK_N"]) * triton.cdiv(M, config["BLOCK_M"]),)](
            out_ptr=out,
            x_ptr=x_q,
            x_scale_ptr=x_scale,
            w_ptr=w_q,
            w_scale_ptr=w_scale.contiguous(),
            **epilogue_arguments(activation, bias=bias),
            **sizes,
            stride_sn=0 if x_scale is None else scale_stride(x_scale),
            HAS_X_SCALE=x_scale is not None,
            **config,
        )
    return out


def matmul(
    x_q: Tensor,
    x_scale: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.float32,
    activation: Any = None,
) -> Tensor:
    """``x w^T + bias`` and what follows it, in ``out_dtype``; the parameters are those of
    :func:`qgnn.reference.matmul`."""
    return _matmul(x_q, x_scale, w_q, w_scale, bias, out_dtype, activation)


@triton.jit(do_not_specialize=["N", "stream"])
def _matmul_requantize_kernel(
    # outputs
    q_ptr,
    scale_ptr,
    # inputs
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    seed_ptr,
    # sizes
    N,
    M: tl.constexpr,
    X_WIDTH: tl.constexpr,
    W_WIDTH: tl.constexpr,
    # strides
    stride_qn: tl.constexpr,
    stride_xn: tl.constexpr,
    stride_xk,
    stride_sn,
    stride_wm: tl.constexpr,
    stride_wk,
    # scalars
    stream,
    # flags
    QMAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    # tiles
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program owns ``BLOCK_N`` whole output rows."""
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    mask_n = offs_n < N

    acc = accumulate_int8(
        x_ptr, w_ptr, offs_n, offs_m, N, M, X_WIDTH, W_WIDTH,
        stride_xn, stride_xk, stride_wm, stride_wk, BLOCK_N, BLOCK_M, BLOCK_K,
    )  # fmt: skip
    y = acc.to(tl.float32) * tl.load(w_scale_ptr + offs_m, mask=offs_m < M, other=0.0)[None, :]
    scale, inv = absmax_scale(row_absmax(y), QMAX)
    seed = load_seed(seed_ptr, stream) if STOCHASTIC else 0
    q = round_codes(y, inv, seed, offs_n, 0, M, STOCHASTIC, BLOCK_N, BLOCK_M)
    scale *= tl.load(x_scale_ptr + offs_n * stride_sn, mask=mask_n, other=0.0)

    mask = mask_n[:, None] & (offs_m < stride_qn)[None, :]  # whole vectors, whatever the width
    tl.store(q_ptr + offs_n[:, None] * stride_qn + offs_m[None, :], q, mask=mask)
    tl.store(scale_ptr + offs_n, scale, mask=mask_n)


def matmul_requantize(
    x_q: Tensor,
    x_scale: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    *,
    bits: int = 8,
    seed: Tensor | None = None,
    stream: int = 0,
) -> tuple[Tensor, Tensor]:
    """Codes and row scales of ``x w^T``; the parameters are those of :func:`qgnn.reference.matmul_requantize`.

    Rows of more than 256 outputs do not fit the registers of one program: their product is written in fp32 and
    rounded by a second kernel, to the same codes."""
    N, M = x_q.shape[0], w_q.shape[0]
    if M > tuning.REQUANTIZE_MAX_OUTPUTS:
        codes, scale = quantize(_matmul(x_q, None, w_q, w_scale), bits=bits, seed=seed, stream=stream)
        return codes, scale.mul_(x_scale)
    codes = empty_codes(N, M, x_q.device)
    if codes.numel() == 0:
        return codes, torch.zeros(N, dtype=torch.float32, device=x_q.device)
    scale = torch.empty(N, dtype=torch.float32, device=x_q.device)
    with torch.cuda.device_of(x_q):
        w_q, sizes = _operands(x_q, w_q)
        config = tuning.matmul_requantize(sizes["W_WIDTH"], M)
        _matmul_requantize_kernel[(triton.cdiv(N, config["BLOCK_N"]),)](
            q_ptr=codes,
            scale_ptr=scale,
            x_ptr=x_q,
            x_scale_ptr=x_scale,
            w_ptr=w_q,
            w_scale_ptr=w_scale.contiguous(),
            seed_ptr=seed,
            **sizes,
            stride_qn=code_stride(M),
            stride_sn=scale_stride(x_scale),
            stream=stream,
            QMAX=(1 << (bits - 1)) - 1,
            STOCHASTIC=seed is not None,
            **config,
        )
    return codes, scale


def quantize_matmul(
    x: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    *,
    bits: int = 8,
    seed: Tensor | None = None,
    stream: int = 0,
    out_dtype: torch.dtype = torch.float32,
    activation: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(y, x_q, x_scale)``; the parameters are those of :func:`qgnn.reference.quantize_matmul`.

    Up to 512 columns, one kernel reads ``x`` and writes its codes and the result. Wider rows do not fit the registers
    of one program, so the codes are made by one kernel and read back by another: of fp32 rows that moves
    ``4 N K + N K + N K`` bytes beside the result, where a kernel that reads ``x`` twice, for its absmax and for its
    codes, would move ``4 N K + 4 N K + N K``."""
    config = tuning.quantize_matmul(x.shape[1], w_q.shape[0])
    if config is not None and x.numel() and w_q.numel():
        return quantize_matmul_fused(
            x, w_q, w_scale, bias,
            bits=bits, seed=seed, stream=stream, out_dtype=out_dtype, activation=activation, config=config,
        )  # fmt: skip
    x_q, x_scale = quantize(x, bits=bits, seed=seed, stream=stream)
    return _matmul(x_q, x_scale, w_q, w_scale, bias, out_dtype, activation), x_q, x_scale


def quantize_matmul_requantize(
    x: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    *,
    bits: int = 8,
    seed: Tensor | None = None,
    stream: int = 0,
    hidden_stream: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(h_q, h_scale, x_q, x_scale)``; the parameters are those of :func:`qgnn.reference.quantize_matmul_requantize`.

    One kernel where rows of ``x``, rows of the output and the weight fit one program
    (:func:`qgnn.kernels.tuning.quantize_matmul_requantize`): of fp32 rows it moves ``4 N K + N K + N M`` bytes. Two
    kernels, :func:`qgnn.kernels.quantize.quantize` and :func:`matmul_requantize`, read ``N K`` more; and rows of more
    than 256 outputs are written and read in fp32, ``8 N M`` more."""
    config = tuning.quantize_matmul_requantize(x.shape[1], w_q.shape[0])
    if config is not None and x.numel() and w_q.numel():
        return quantize_matmul_requantize_fused(
            x, w_q, w_scale, bits=bits, seed=seed, stream=stream, hidden_stream=hidden_stream, config=config
        )
    x_q, x_scale = quantize(x, bits=bits, seed=seed, stream=stream)
    hidden = matmul_requantize(x_q, x_scale, w_q, w_scale, bits=bits, seed=seed, stream=hidden_stream)
    return (*hidden, x_q, x_scale)
