"""Aggregation of rows of any type without tensor cores: for floats, and for codes of few columns.

    out[i, :] = sum_e weight[e] * x_scale[index[e]] * x[index[e], :]

Numerics: sums are fp32, made of explicit fused multiply-adds in an order that depends only on the plan and the shapes.

Oracle: qgnn.reference.spmm, spmm_requantize
"""

from typing import Any

import triton
import triton.language as tl
from qgnn.kernels import tuning
from qgnn.kernels.memory import column_offsets, readable_width
from qgnn.kernels.rounding import to_fp32
from qgnn.kernels.spmm_hubs import write_rows
from qgnn.kernels.spmm_plan import GROUP_ROWS, Plan, load_item
from torch import Tensor


@triton.jit
def load_lanes(indptr_ptr, row, num_rows, slot, first, last, offs_m, ROWS: tl.constexpr):
    """First edge and edge behind the last one of each of ``ROWS`` lanes: of the rows ``row + offs_m`` of a group, or
    of equal parts of a chunk."""
    mask_m = offs_m < num_rows
    start = tl.load(indptr_ptr + row + offs_m, mask=mask_m, other=0)
    stop = tl.load(indptr_ptr + row + offs_m + 1, mask=mask_m, other=0)
    part = (last - first + ROWS - 1) // ROWS
    part_start = first + offs_m * part
    start = tl.where(slot >= 0, part_start, start)
    stop = tl.where(slot >= 0, tl.minimum(part_start + part, last), stop)
    return start, tl.maximum(stop, start)


@triton.jit
def lane_rows(row, num_rows, slot, offs_m, GROUP: tl.constexpr):
    """The row of each lane, int64, and whether there is one: the lanes of a chunk are parts of one row."""
    return row.to(tl.int64) + tl.where(slot >= 0, 0, offs_m), offs_m < tl.where(slot >= 0, GROUP, num_rows)


@triton.jit
def aggregate_rows(
    start,
    stop,
    offs_f,
    index_ptr,
    x_ptr,
    weight_ptr,
    x_scale_ptr,
    F: tl.constexpr,
    X_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    stride_xn: tl.constexpr,
    stride_xf,
    stride_sn,
    HAS_WEIGHT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """fp32 [ROWS, BLOCK_F] sums of lanes. The lanes advance together, ``BLOCK_E`` edges a step; each of the edges of a
    step has its own sum, and these are added at the end."""
    acc = tl.zeros((ROWS, BLOCK_E, BLOCK_F), tl.float32)
    for step in range(0, tl.max(stop - start, axis=0), BLOCK_E):
        offs_e = start[:, None] + step + tl.arange(0, BLOCK_E)[None, :]  # [ROWS, BLOCK_E]
        mask_e = offs_e < stop[:, None]
        x, factor = load_messages(
            offs_e, mask_e, offs_f, index_ptr, x_ptr, weight_ptr, x_scale_ptr, F, X_WIDTH, HEADS, stride_xn, stride_xf,
            stride_sn, HAS_WEIGHT, HAS_SCALE,
        )  # fmt: skip
        if HAS_WEIGHT or HAS_SCALE:
            acc = tl.fma(x, tl.broadcast_to(factor, (ROWS, BLOCK_E, BLOCK_F)), acc)
        else:
            acc += x
    return tl.sum(acc, axis=1)


@triton.jit
def load_messages(
    offs_e,
    mask_e,
    offs_f,
    index_ptr,
    x_ptr,
    weight_ptr,
    x_scale_ptr,
    F: tl.constexpr,
    X_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    stride_xn: tl.constexpr,
    stride_xf,
    stride_sn,
    HAS_WEIGHT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """Rows of the sources of edges, fp32 [ROWS, BLOCK_E, BLOCK_F], and what to multiply them with, of a shape that
    broadcasts to theirs."""
    source = tl.load(index_ptr + offs_e, mask=mask_e, other=0).to(tl.int64)
    x = tl.load(
        x_ptr + (source * stride_xn)[:, :, None] + column_offsets(offs_f, stride_xf)[None, None, :],
        mask=mask_e[:, :, None] & (offs_f < X_WIDTH)[None, None, :],
        other=0,
    )
    if HAS_WEIGHT:
        if HEADS == 1:
            factor = tl.load(weight_ptr + offs_e, mask=mask_e, other=0.0)[:, :, None]
        else:
            factor = tl.load(
                weight_ptr + offs_e.to(tl.int64)[:, :, None] * HEADS + (offs_f // (F // HEADS))[None, None, :],
                mask=mask_e[:, :, None] & (offs_f < F)[None, None, :],
                other=0.0,
            )
        if HAS_SCALE:
            factor = tl.load(x_scale_ptr + source * stride_sn, mask=mask_e, other=0.0)[:, :, None] * factor
    elif HAS_SCALE:
        factor = tl.load(x_scale_ptr + source * stride_sn, mask=mask_e, other=0.0)[:, :, None]
    else:
        factor = 1.0
    return to_fp32(x), factor


@triton.jit(do_not_specialize=["stream", "dropout_stream", "threshold"])
def _spmm_rows_kernel(
    # outputs
    out_ptr,
    scale_ptr,
    mask_ptr,
    partial_ptr,
    # inputs
    items_ptr,
    counts_ptr,
    indptr_ptr,
    index_ptr,
    x_ptr,
    weight_ptr,
    x_scale_ptr,
    # epilogue
    row_factor_ptr,
    bias_ptr,
    dropout_seed_ptr,
    dropout_stream,
    threshold,
    factor,
    seed_ptr,
    stream,
    # sizes
    F: tl.constexpr,
    X_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    # strides
    stride_on: tl.constexpr,
    stride_pn: tl.constexpr,
    stride_xn: tl.constexpr,
    stride_xf,
    stride_sn,
    # flags
    HAS_WEIGHT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_ROW_FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
    DROPOUT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    QMAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    # tiles
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program owns ``BLOCK_F`` columns of ``ROWS`` rows of every item that comes its turn, and walks their edges
    in CSR order. Of the programs that share a chunk, the first takes it all."""
    PARTS: tl.constexpr = GROUP // ROWS
    pid = tl.program_id(0)
    first_col = tl.program_id(1) * BLOCK_F
    offs_f = first_col + tl.arange(0, BLOCK_F)
    offs_m = (pid % PARTS) * ROWS + tl.arange(0, ROWS)
    for item in range(pid // PARTS, tl.load(counts_ptr), tl.num_programs(0) // PARTS):
        row, num_rows, slot, first, last = load_item(items_ptr, item)
        if pid % PARTS * ROWS < num_rows:
            start, stop = load_lanes(indptr_ptr, row, num_rows, slot, first, last, offs_m, ROWS)
            y = aggregate_rows(
                start, stop, offs_f, index_ptr, x_ptr, weight_ptr, x_scale_ptr, F, X_WIDTH, HEADS, stride_xn, stride_xf,
                stride_sn, HAS_WEIGHT, HAS_SCALE, ROWS, BLOCK_E, BLOCK_F,
            )  # fmt: skip
            if slot >= 0:
                partial = partial_ptr + slot.to(tl.int64) * stride_pn + offs_f
                tl.store(partial, tl.sum(y, axis=0), mask=offs_f < stride_pn)
            else:
                write_rows(
                    y, row.to(tl.int64) + offs_m, offs_m < num_rows, first_col, out_ptr, scale_ptr, mask_ptr,
                    row_factor_ptr, bias_ptr, dropout_seed_ptr, dropout_stream, threshold, factor, seed_ptr, stream, F,
                    stride_on, HAS_ROW_FACTOR, HAS_BIAS, RELU, DROPOUT, HAS_MASK, QMAX, STOCHASTIC, ROWS, BLOCK_F,
                )  # fmt: skip


def spmm_rows(
    plan: Plan, partial: Tensor, x: Tensor, gather: dict[str, Any], output: dict[str, Any], config: tuning.Config
) -> None:
    """Write the rows of the groups, and the partial sums of the hubs' chunks."""
    parts = GROUP_ROWS // config["ROWS"]
    _spmm_rows_kernel[(plan.num_programs * parts, triton.cdiv(output["F"], config["BLOCK_F"]))](
        partial_ptr=partial,
        items_ptr=plan.items,
        counts_ptr=plan.counts,
        x_ptr=x,
        X_WIDTH=readable_width(x),
        stride_pn=partial.stride(0),
        stride_xn=x.stride(0),
        stride_xf=x.stride(1),
        GROUP=GROUP_ROWS,
        **gather,
        **output,
        **config,
    )
