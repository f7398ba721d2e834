"""Sparse aggregation over a CSR graph, for int8 rows with scales and for float rows.

    out[i, :] = row_factor[i] * sum_e weight[e] * x_scale[index[e]] * x[index[e], :] + bias

over the edges ``e`` from ``indptr[i]`` to ``indptr[i + 1]``. ``spmm_requantize`` rounds the result (without bias) to
int8 rows with a scale each.

Numerics: one program sums a whole output row in fp32 with explicit fused multiply-adds, in an order that depends only
on the shapes: no atomics, so results repeat bit for bit. ``row_factor`` is applied after the sum. A NaN scale or
value reaches exactly the rows that aggregate it. Offsets are 64-bit.

Oracle: qgnn.reference.spmm, spmm_requantize
"""

import torch
import triton
import triton.language as tl
from qgnn.kernels import tuning
from qgnn.kernels.memory import code_stride, column_offsets, empty_codes, readable_width, scale_stride
from qgnn.kernels.quantize import quantize
from qgnn.kernels.rounding import absmax_scale, load_seed, round_codes, row_absmax, to_fp32
from torch import Tensor


@triton.jit
def aggregate_rows(
    indptr_ptr,
    index_ptr,
    x_ptr,
    weight_ptr,
    x_scale_ptr,
    offs_n,
    offs_f,
    N,
    X_WIDTH: tl.constexpr,
    stride_xn: tl.constexpr,
    stride_xf,
    stride_sn,
    HAS_WEIGHT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """fp32 [ROWS, BLOCK_F] sums. The rows advance together, ``BLOCK_E`` edges a step; each of the ``BLOCK_E`` lanes
    of a row keeps its own sum, and these are added at the end."""
    mask_n = offs_n < N
    start = tl.load(indptr_ptr + offs_n, mask=mask_n, other=0).to(tl.int64)
    stop = tl.load(indptr_ptr + offs_n + 1, mask=mask_n, other=0).to(tl.int64)
    acc = tl.zeros((ROWS, BLOCK_E, BLOCK_F), tl.float32)
    for step in range(0, tl.max(stop - start, axis=0), BLOCK_E):
        offs_e = start[:, None] + step + tl.arange(0, BLOCK_E)[None, :]  # [ROWS, BLOCK_E]
        mask_e = offs_e < stop[:, None]
        source = tl.load(index_ptr + offs_e, mask=mask_e, other=0).to(tl.int64)
        x = tl.load(
            x_ptr + (source * stride_xn)[:, :, None] + column_offsets(offs_f, stride_xf)[None, None, :],
            mask=mask_e[:, :, None] & (offs_f < X_WIDTH)[None, None, :],
            other=0,
        )  # [ROWS, BLOCK_E, BLOCK_F]
        if HAS_WEIGHT or HAS_SCALE:
            if HAS_SCALE:
                factor = tl.load(x_scale_ptr + source * stride_sn, mask=mask_e, other=0.0)
                if HAS_WEIGHT:
                    factor *= tl.load(weight_ptr + offs_e, mask=mask_e, other=0.0)
            else:
                factor = tl.load(weight_ptr + offs_e, mask=mask_e, other=0.0)
            acc = tl.fma(to_fp32(x), tl.broadcast_to(factor[:, :, None], (ROWS, BLOCK_E, BLOCK_F)), acc)
        else:
            acc += to_fp32(x)
    return tl.sum(acc, axis=1)


@triton.jit(do_not_specialize=["N"])
def _spmm_kernel(
    # outputs
    out_ptr,
    # inputs
    indptr_ptr,
    index_ptr,
    x_ptr,
    weight_ptr,
    x_scale_ptr,
    row_factor_ptr,
    bias_ptr,
    # sizes
    N,
    F: tl.constexpr,
    X_WIDTH: tl.constexpr,
    # strides
    stride_xn: tl.constexpr,
    stride_xf,
    stride_sn,
    # flags
    HAS_WEIGHT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_ROW_FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    # tiles
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program owns ``BLOCK_F`` columns of ``ROWS`` output rows and walks their edges in CSR order."""
    NUM_F: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    pid = tl.program_id(0).to(tl.int64)
    offs_n = (pid // NUM_F) * ROWS + tl.arange(0, ROWS)
    offs_f = (pid % NUM_F) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask_n = offs_n < N

    y = aggregate_rows(
        indptr_ptr, index_ptr, x_ptr, weight_ptr, x_scale_ptr, offs_n, offs_f, N, X_WIDTH,
        stride_xn, stride_xf, stride_sn, HAS_WEIGHT, HAS_SCALE, ROWS, BLOCK_E, BLOCK_F,
    )  # fmt: skip
    if HAS_ROW_FACTOR:
        y *= tl.load(row_factor_ptr + offs_n, mask=mask_n, other=0.0)[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_f, mask=offs_f < F, other=0.0).to(tl.float32)[None, :]

    mask = mask_n[:, None] & (offs_f < F)[None, :]
    tl.store(out_ptr + offs_n[:, None] * F + offs_f[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


def _gather_arguments(
    indptr: Tensor, index: Tensor, x: Tensor, weight: Tensor | None, x_scale: Tensor | None
) -> dict[str, object]:
    """The arguments that both aggregations pass on to :func:`aggregate_rows`."""
    return {
        "indptr_ptr": indptr.contiguous(),
        "index_ptr": index.contiguous(),
        "x_ptr": x,
        "weight_ptr": None if weight is None else weight.contiguous(),
        "x_scale_ptr": x_scale,
        "N": indptr.numel() - 1,
        "F": x.shape[1],
        "X_WIDTH": readable_width(x),
        "stride_xn": x.stride(0),
        "stride_xf": x.stride(1),
        "stride_sn": 0 if x_scale is None else scale_stride(x_scale),
        "HAS_WEIGHT": weight is not None,
        "HAS_SCALE": x_scale is not None,
    }


def spmm(
    indptr: Tensor,
    index: Tensor,
    x: Tensor,
    *,
    weight: Tensor | None = None,
    x_scale: Tensor | None = None,
    row_factor: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Aggregated rows ``[N, F]``; the parameters are those of :func:`qgnn.reference.spmm`."""
    N, F = indptr.numel() - 1, x.shape[1]
    if out_dtype is None:
        out_dtype = x.dtype if x.is_floating_point() else torch.float32
    out = torch.empty((N, F), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    config = tuning.spmm(F, index.numel() // N)
    with torch.cuda.device_of(x):
        _spmm_kernel[(triton.cdiv(N, config["ROWS"]) * triton.cdiv(F, config["BLOCK_F"]),)](
            out_ptr=out,
            **_gather_arguments(indptr, index, x, weight, x_scale),
            row_factor_ptr=None if row_factor is None else row_factor.contiguous(),
            bias_ptr=None if bias is None else bias.contiguous(),
            HAS_ROW_FACTOR=row_factor is not None,
            HAS_BIAS=bias is not None,
            **config,
        )
    return out


@triton.jit(do_not_specialize=["N", "stream"])
def _spmm_requantize_kernel(
    # outputs
    q_ptr,
    scale_ptr,
    # inputs
    indptr_ptr,
    index_ptr,
    x_ptr,
    weight_ptr,
    x_scale_ptr,
    row_factor_ptr,
    seed_ptr,
    # sizes
    N,
    F: tl.constexpr,
    X_WIDTH: tl.constexpr,
    # strides
    stride_qn: tl.constexpr,
    stride_xn: tl.constexpr,
    stride_xf,
    stride_sn,
    # scalars
    stream,
    # flags
    QMAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_ROW_FACTOR: tl.constexpr,
    # tiles
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program owns ``ROWS`` whole output rows and walks their edges in CSR order."""
    offs_n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs_f = tl.arange(0, BLOCK_F)
    mask_n = offs_n < N

    y = aggregate_rows(
        indptr_ptr, index_ptr, x_ptr, weight_ptr, x_scale_ptr, offs_n, offs_f, N, X_WIDTH,
        stride_xn, stride_xf, stride_sn, HAS_WEIGHT, HAS_SCALE, ROWS, BLOCK_E, BLOCK_F,
    )  # fmt: skip
    if HAS_ROW_FACTOR:
        y *= tl.load(row_factor_ptr + offs_n, mask=mask_n, other=0.0)[:, None]
    y = tl.where((offs_f < F)[None, :], y, 0.0)  # sums of what lies behind the rows of x must not enter the absmax
    scale, inv = absmax_scale(row_absmax(y), QMAX)
    seed = load_seed(seed_ptr, stream) if STOCHASTIC else 0
    q = round_codes(y, inv, seed, offs_n, 0, F, STOCHASTIC, ROWS, BLOCK_F)

    mask = mask_n[:, None] & (offs_f < stride_qn)[None, :]  # whole vectors, whatever the width
    tl.store(q_ptr + offs_n[:, None] * stride_qn + offs_f[None, :], q, mask=mask)
    tl.store(scale_ptr + offs_n, scale, mask=mask_n)


def spmm_requantize(
    indptr: Tensor,
    index: Tensor,
    x: Tensor,
    *,
    weight: Tensor | None = None,
    x_scale: Tensor | None = None,
    row_factor: Tensor | None = None,
    bits: int = 8,
    seed: Tensor | None = None,
    stream: int = 0,
) -> tuple[Tensor, Tensor]:
    """Codes and row scales of the aggregation; the parameters are those of :func:`qgnn.reference.spmm_requantize`.

    Rows of more than 1024 columns do not fit the registers of one program: they are written in fp32 and rounded by a
    second kernel."""
    N, F = indptr.numel() - 1, x.shape[1]
    if F > tuning.SPMM_REQUANTIZE_MAX_COLUMNS:
        rows = spmm(indptr, index, x, weight=weight, x_scale=x_scale, row_factor=row_factor, out_dtype=torch.float32)
        return quantize(rows, bits=bits, seed=seed, stream=stream)
    codes = empty_codes(N, F, x.device)
    if codes.numel() == 0:
        return codes, torch.zeros(N, dtype=torch.float32, device=x.device)
    scale = torch.empty(N, dtype=torch.float32, device=x.device)
    config = tuning.spmm_requantize(F, index.numel() // N)
    with torch.cuda.device_of(x):
        _spmm_requantize_kernel[(triton.cdiv(N, config["ROWS"]),)](
            q_ptr=codes,
            scale_ptr=scale,
            **_gather_arguments(indptr, index, x, weight, x_scale),
            row_factor_ptr=None if row_factor is None else row_factor.contiguous(),
            seed_ptr=seed,
            stride_qn=code_stride(F),
            stream=stream,
            QMAX=(1 << (bits - 1)) - 1,
            STOCHASTIC=seed is not None,
            HAS_ROW_FACTOR=row_factor is not None,
            **config,
        )
    return codes, scale
