"""Attention over the edges into each target with additive scores (GAT).

    e = leaky(score_target[i] + score_source[j] + edge_score),  p = exp(e - L[i]),  w = p * keep * factor
    out[i, h, :] = sum_j w[h] * x_scale[j, h] * x[j, h, :]                          x [S, H * D], head by head
    L[i, h]      = log(sum_j exp(e[h]))                                             fp32 [N, H]

over the sources ``j`` of the edges from ``indptr[i]`` to ``indptr[i + 1]``; the backward pass is in
``attention_backward``, other scores in ``attention_gatv2`` and ``attention_dot``.

A row's edges are walked twice: for their largest score, which takes scores alone, and for the sums. That costs less
than to rescale the sums whenever a larger score is met.

Numerics: fp32, in an order that depends only on the plan and the shapes: no atomics, so results repeat bit for bit.
Dropout's bits are those of element (edge, head) of a matrix [E, H]. A NaN or an infinity reaches exactly the rows whose
edges see it. Offsets are 64-bit.

Paper: Graph Attention Networks, https://arxiv.org/abs/1710.10903

Oracle: qgnn.reference.attention
"""

from typing import Any

import torch
import triton
import triton.language as tl
from qgnn.kernels import tuning
from qgnn.kernels.attention_backward import attention_backward
from qgnn.kernels.attention_dot import attention_dot, attention_dot_backward
from qgnn.kernels.attention_gatv2 import attention_gatv2, attention_gatv2_backward
from qgnn.kernels.attention_launch import (
    check_width,
    contiguous,
    empty_out,
    empty_slots,
    head_values,
    launch_rows,
)
from qgnn.kernels.attention_tiles import (
    LOG2E,
    additive_scores,
    exponentials,
    finite_maximum,
    keep_factors,
    load_heads,
    load_tile,
    locate_columns,
    locate_row,
    merge_weighted_sums,
    scaled_sum,
    share_work,
    store_weighted_sum,
    write_row,
)
from qgnn.kernels.epilogue import dropout_arguments, leaky_relu
from qgnn.kernels.rounding import load_seed
from qgnn.kernels.spmm_plan import Plan, make_plan
from torch import Tensor

__all__ = [
    "attention",
    "attention_backward",
    "attention_dot",
    "attention_dot_backward",
    "attention_gatv2",
    "attention_gatv2_backward",
]


@triton.jit(do_not_specialize=["dropout_stream", "threshold"])
def _attention_kernel(
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
    score_target_ptr,
    score_source_ptr,
    edge_score_ptr,
    x_ptr,
    x_scale_ptr,
    dropout_seed_ptr,
    # sizes
    H: tl.constexpr,
    D: tl.constexpr,
    # strides
    stride_pn: tl.constexpr,
    stride_tn,
    stride_sn,
    stride_xn: tl.constexpr,
    stride_xf,
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
    edges twice in CSR order."""
    BLOCK_S: tl.constexpr = BLOCK_E * 2  # edges a step while only scores are looked at
    offs_h, mask_h, offs_hd, mask_hd = locate_columns(H, D, BLOCK_H, BLOCK_D)
    seed = load_seed(dropout_seed_ptr, dropout_stream) if DROPOUT else 0
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
                target = tl.load(score_target_ptr + row * stride_tn + offs_h, mask=mask_h, other=0.0).to(tl.float32)
                largest = tl.full((BLOCK_S, BLOCK_H), float("-inf"), tl.float32)
                for first in range(start, stop, BLOCK_S):
                    offs_e = first + tl.arange(0, BLOCK_S)
                    mask_e = offs_e < stop
                    source = tl.load(index_ptr + offs_e, mask=mask_e, other=0).to(tl.int64)
                    score = additive_scores(
                        target[None, :], load_heads(score_source_ptr, source, mask_e, offs_h, mask_h, stride_sn),
                        edge_score_ptr, offs_e, mask_e, offs_h, mask_h, H, HAS_EDGE,
                    )  # fmt: skip
                    e = leaky_relu(score, negative_slope)
                    largest = tl.maximum(largest, tl.where(mask_e[:, None], e, float("-inf")))
                m = tl.max(largest, axis=0)
                base = (finite_maximum(m) * LOG2E)[None, :]

                acc = tl.zeros((BLOCK_E, BLOCK_H, BLOCK_D), tl.float32)
                totals = tl.zeros((BLOCK_E, BLOCK_H), tl.float32)
                for first in range(start, stop, BLOCK_E):
                    offs_e = first + tl.arange(0, BLOCK_E)
                    mask_e = offs_e < stop
                    source = tl.load(index_ptr + offs_e, mask=mask_e, other=0).to(tl.int64)
                    score = additive_scores(
                        target[None, :], load_heads(score_source_ptr, source, mask_e, offs_h, mask_h, stride_sn),
                        edge_score_ptr, offs_e, mask_e, offs_h, mask_h, H, HAS_EDGE,
                    )  # fmt: skip
                    p = exponentials(tl.where(mask_e[:, None], leaky_relu(score, negative_slope), float("-inf")), base)
                    totals += p
                    if DROPOUT:
                        p *= keep_factors(offs_e, offs_h, seed, threshold, factor, H)
                    if HAS_SCALE:
                        p *= load_heads(x_scale_ptr, source, mask_e, offs_h, mask_h, H)
                    acc = scaled_sum(p, load_tile(x_ptr, source, mask_e, offs_hd, mask_hd, stride_xn, stride_xf), acc)
                total, y = tl.sum(totals, axis=0), tl.sum(acc, axis=0)

            if slot >= 0:
                store_weighted_sum(m, total, y, partial_ptr, slot, offs_h, mask_h, offs_hd, mask_hd, H, D, stride_pn)
            else:
                write_row(m, total, y, start, stop, row, out_ptr, lse_ptr, offs_h, mask_h, offs_hd, mask_hd, H, D)


def attention(
    indptr: Tensor,
    index: Tensor,
    score_target: Tensor,
    score_source: Tensor,
    x: Tensor,
    *,
    x_scale: Tensor | None = None,
    edge_score: Tensor | None = None,
    negative_slope: float = 0.2,
    dropout: Any = None,
    out_dtype: torch.dtype | None = None,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted sums ``[N, H * D]`` and ``L``; the parameters are those of :func:`qgnn.reference.attention`, and the
    graph's plan."""
    N, H = indptr.numel() - 1, score_target.shape[1]
    D = check_width("attention", H, x.shape[1])
    out = empty_out(N, x, out_dtype)
    lse = torch.empty((N, H), dtype=torch.float32, device=x.device)
    if out.numel() == 0:
        return out, lse.zero_()
    score_target, score_source = head_values(score_target), head_values(score_source)
    indptr = indptr.contiguous()
    with torch.cuda.device_of(x):
        plan = make_plan(indptr, index.numel()) if plan is None else plan
        arguments = {
            "out_ptr": out,
            "lse_ptr": lse,
            "indptr_ptr": indptr,
            "index_ptr": index.contiguous(),
            "score_target_ptr": score_target,
            "score_source_ptr": score_source,
            "edge_score_ptr": contiguous(edge_score),
            "x_ptr": x,
            "x_scale_ptr": contiguous(x_scale),
            "stride_tn": score_target.stride(0),
            "stride_sn": score_source.stride(0),
            "stride_xn": x.stride(0),
            "stride_xf": x.stride(1),
            "negative_slope": float(negative_slope),
            "HAS_SCALE": x_scale is not None,
            "HAS_EDGE": edge_score is not None,
            **dropout_arguments(dropout),
        }
        partial = empty_slots(plan, H, D, tiles=1, vectors=2, device=x.device)
        registers = 0 if dropout is None else tuning.ATTENTION_DROPOUT_REGISTERS
        launch_rows(_attention_kernel, plan, partial, H, D, arguments, registers=registers)
    return out, lse
