"""Attention over the edges into each target with the scores of GATv2.

    hidden = x_target[i] + x_source[j] + edge_x,   e[h] = <att[h], leaky(hidden[h])>
    out[i, h, :] = sum_j w[h] * x_source[j, h, :],   L[i, h] = log(sum_j exp(e[h]))

in the words of ``attention``; the backward pass is in ``attention_gatv2_backward``. A score takes the whole row of its
source, as the sum does, so a row's edges are walked once: each of the edges of a step keeps its own largest score and
the sums relative to it.

Numerics: fp32, in an order that depends only on the plan and the shapes: no atomics. ``hidden`` is rounded as in the
plain definition, codes times scales first, so it has the same sign in all passes.

Paper: How Attentive are Graph Attention Networks?, https://arxiv.org/abs/2105.14491

Oracle: qgnn.reference.attention_gatv2
"""

from typing import Any

import torch
import triton
import triton.language as tl
from qgnn.kernels.attention_gatv2_backward import attention_gatv2_backward
from qgnn.kernels.attention_launch import (
    check_width,
    contiguous,
    empty_out,
    empty_slots,
    launch_rows,
    rows_arguments,
)
from qgnn.kernels.attention_tiles import (
    LOG2E,
    add_edge_rows,
    advance_maximum,
    exponentials,
    finite_maximum,
    keep_factors,
    load_row,
    load_row_values,
    load_values,
    locate_columns,
    locate_row,
    merge_edges,
    merge_weighted_sums,
    scaled_sum,
    share_work,
    store_weighted_sum,
    write_row,
)
from qgnn.kernels.epilogue import dropout_arguments
from qgnn.kernels.rounding import load_seed
from qgnn.kernels.spmm_plan import Plan, make_plan
from torch import Tensor

__all__ = ["attention_gatv2", "attention_gatv2_backward"]


@triton.jit(do_not_specialize=["dropout_stream", "threshold"])
def _attention_gatv2_kernel(
    # outputs
    out_ptr,
    lse_ptr,
    partial_ptr,
    # graph
    items_ptr,
    hubs_ptr,
    counts_ptr,
    indptr_ptr,
    index_ptr,
    # inputs
    target_ptr,
    target_scale_ptr,
    source_ptr,
    source_scale_ptr,
    att_ptr,
    edge_ptr,
    dropout_seed_ptr,
    # sizes
    H: tl.constexpr,
    D: tl.constexpr,
    # strides
    stride_pn: tl.constexpr,
    stride_target_n: tl.constexpr,
    stride_target_f,
    stride_source_n: tl.constexpr,
    stride_source_f,
    stride_edge_n: tl.constexpr,
    stride_edge_f,
    # scalars
    negative_slope,
    dropout_stream,
    threshold,
    factor,
    # flags
    HAS_SCALE: tl.constexpr,
    HAS_EDGE: tl.constexpr,
    DROPOUT: tl.constexpr,
    HUBS: tl.constexpr,
    # tiles
    GROUP: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program owns ``BLOCK_H`` heads of a target row of every item that comes its turn, or of a hub, and walks its
    edges in CSR order."""
    offs_h, mask_h, offs_hd, mask_hd = locate_columns(H, D, BLOCK_H, BLOCK_D)
    seed = load_seed(dropout_seed_ptr, dropout_stream) if DROPOUT else 0
    att = load_row(att_ptr, 0, offs_hd, mask_hd, 0, 1)[None, :, :]
    first_unit, end, step = share_work(counts_ptr, GROUP, HUBS)
    for unit in range(first_unit, end, step):
        is_row, row, slot, start, stop = locate_row(unit, items_ptr, hubs_ptr, indptr_ptr, GROUP, HUBS)
        if is_row:
            if HUBS:
                m, total, y = merge_weighted_sums(
                    partial_ptr, start, stop, offs_h, mask_h, offs_hd, mask_hd, H, D, stride_pn, BLOCK_E, BLOCK_H,
                    BLOCK_D,
                )  # fmt: skip
            else:
                target = load_row_values(
                    target_ptr, target_scale_ptr, row, offs_h, mask_h, offs_hd, mask_hd, H, stride_target_n,
                    stride_target_f, HAS_SCALE,
                )[None, :, :]  # fmt: skip
                largest = tl.full((BLOCK_E, BLOCK_H), float("-inf"), tl.float32)
                totals = tl.zeros((BLOCK_E, BLOCK_H), tl.float32)
                acc = tl.zeros((BLOCK_E, BLOCK_H, BLOCK_D), tl.float32)
                for first in range(start, stop, BLOCK_E):
                    offs_e = first + tl.arange(0, BLOCK_E)
                    mask_e = offs_e < stop
                    index = tl.load(index_ptr + offs_e, mask=mask_e, other=0).to(tl.int64)
                    source = load_values(
                        source_ptr, source_scale_ptr, index, mask_e, offs_h, mask_h, offs_hd, mask_hd, H,
                        stride_source_n, stride_source_f, HAS_SCALE,
                    )  # fmt: skip
                    hidden = add_edge_rows(
                        target + source, edge_ptr, offs_e, mask_e, offs_hd, mask_hd, stride_edge_n, stride_edge_f,
                        HAS_EDGE,
                    )  # fmt: skip
                    e = tl.sum(tl.where(hidden > 0, att, att * negative_slope) * hidden, axis=2)
                    e = tl.where(mask_e[:, None], e, float("-inf"))
                    largest, scale = advance_maximum(largest, e)
                    p = exponentials(e, finite_maximum(largest) * LOG2E)
                    totals = tl.fma(totals, scale, p)
                    if DROPOUT:
                        p *= keep_factors(offs_e, offs_h, seed, threshold, factor, H)
                    acc = scaled_sum(p, source, acc * scale[:, :, None])
                m, total, y = merge_edges(largest, totals, acc)

            if slot >= 0:
                store_weighted_sum(m, total, y, partial_ptr, slot, offs_h, mask_h, offs_hd, mask_hd, H, D, stride_pn)
            else:
                write_row(m, total, y, start, stop, row, out_ptr, lse_ptr, offs_h, mask_h, offs_hd, mask_hd, H, D)


def attention_gatv2(
    indptr: Tensor,
    index: Tensor,
    x_target: Tensor,
    x_source: Tensor,
    att: Tensor,
    *,
    target_scale: Tensor | None = None,
    source_scale: Tensor | None = None,
    edge_x: Tensor | None = None,
    negative_slope: float = 0.2,
    dropout: Any = None,
    out_dtype: torch.dtype | None = None,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted sums ``[N, H * D]`` and ``L``; the parameters are those of :func:`qgnn.reference.attention_gatv2`, and
    the graph's plan."""
    N, H = indptr.numel() - 1, att.shape[0]
    D = check_width("attention_gatv2", H, x_source.shape[1])
    out = empty_out(N, x_source, out_dtype)
    lse = torch.empty((N, H), dtype=torch.float32, device=x_source.device)
    if out.numel() == 0:
        return out, lse.zero_()
    indptr = indptr.contiguous()
    with torch.cuda.device_of(x_source):
        plan = make_plan(indptr, index.numel()) if plan is None else plan
        arguments = {
            "out_ptr": out,
            "lse_ptr": lse,
            "indptr_ptr": indptr,
            "index_ptr": index.contiguous(),
            "att_ptr": att.contiguous(),
            "negative_slope": float(negative_slope),
            "HAS_SCALE": source_scale is not None,
            "HAS_EDGE": edge_x is not None,
            "target_scale_ptr": contiguous(target_scale),
            "source_scale_ptr": contiguous(source_scale),
            **rows_arguments("target", x_target),
            **rows_arguments("source", x_source),
            **rows_arguments("edge", edge_x),
            **dropout_arguments(dropout),
        }
        partial = empty_slots(plan, H, D, tiles=1, vectors=2, device=x_source.device)
        launch_rows(_attention_gatv2_kernel, plan, partial, H, D, arguments)
    return out, lse
