"""Attention over the edges into each target with scaled dot products as scores.

    e[h] = <query[i, h], key[j, h] + edge_x[h]> / sqrt(D)
    out[i, h, :] = sum_j w[h] * (value[j, h, :] + edge_x[h, :]),   L[i, h] = log(sum_j exp(e[h]))

in the words of ``attention``; the backward pass is in ``attention_dot_backward``. A row's edges are walked once: each
of the edges of a step keeps its own largest score and the sums relative to it.

Numerics: fp32, in an order that depends only on the plan and the shapes: no atomics. Without ``edge_x``, codes are
multiplied as they are, exactly, as are sums of 1040 products, and scales come after.

Paper: Attention Is All You Need, https://arxiv.org/abs/1706.03762

Oracle: qgnn.reference.attention_dot
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from qgnn.kernels import tuning
from qgnn.kernels.attention_dot_backward import attention_dot_backward
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
    advance_maximum,
    exponentials,
    finite_maximum,
    keep_factors,
    load_keys_and_values,
    load_row,
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

__all__ = ["attention_dot", "attention_dot_backward"]


@triton.jit(do_not_specialize=["dropout_stream", "threshold"])
def _attention_dot_kernel(
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
    query_ptr,
    query_scale_ptr,
    key_ptr,
    key_scale_ptr,
    value_ptr,
    value_scale_ptr,
    edge_ptr,
    dropout_seed_ptr,
    # sizes
    H: tl.constexpr,
    D: tl.constexpr,
    # strides
    stride_pn: tl.constexpr,
    stride_query_n: tl.constexpr,
    stride_query_f,
    stride_key_n: tl.constexpr,
    stride_key_f,
    stride_value_n: tl.constexpr,
    stride_value_f,
    stride_edge_n: tl.constexpr,
    stride_edge_f,
    # scalars
    score_factor,
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
                query = load_row(query_ptr, row, offs_hd, mask_hd, stride_query_n, stride_query_f)[None, :, :]
                query_factor = tl.full((1, BLOCK_H), 1.0, tl.float32) * score_factor
                if HAS_SCALE:
                    query_factor *= tl.load(query_scale_ptr + row * H + offs_h, mask=mask_h, other=0.0)[None, :]
                largest = tl.full((BLOCK_E, BLOCK_H), float("-inf"), tl.float32)
                totals = tl.zeros((BLOCK_E, BLOCK_H), tl.float32)
                acc = tl.zeros((BLOCK_E, BLOCK_H, BLOCK_D), tl.float32)
                for first in range(start, stop, BLOCK_E):
                    offs_e = first + tl.arange(0, BLOCK_E)
                    mask_e = offs_e < stop
                    index = tl.load(index_ptr + offs_e, mask=mask_e, other=0).to(tl.int64)
                    key, value, key_scale, value_scale = load_keys_and_values(
                        key_ptr, key_scale_ptr, value_ptr, value_scale_ptr, edge_ptr, index, offs_e, mask_e, offs_h,
                        mask_h, offs_hd, mask_hd, H, stride_key_n, stride_key_f, stride_value_n, stride_value_f,
                        stride_edge_n, stride_edge_f, HAS_SCALE, HAS_EDGE,
                    )  # fmt: skip
                    e = tl.sum(query * key, axis=2) * query_factor * key_scale
                    e = tl.where(mask_e[:, None], e, float("-inf"))
                    largest, scale = advance_maximum(largest, e)
                    p = exponentials(e, finite_maximum(largest) * LOG2E)
                    totals = tl.fma(totals, scale, p)
                    if DROPOUT:
                        p *= keep_factors(offs_e, offs_h, seed, threshold, factor, H)
                    acc = scaled_sum(p * value_scale, value, acc * scale[:, :, None])
                m, total, y = merge_edges(largest, totals, acc)

            if slot >= 0:
                store_weighted_sum(m, total, y, partial_ptr, slot, offs_h, mask_h, offs_hd, mask_hd, H, D, stride_pn)
            else:
                write_row(m, total, y, start, stop, row, out_ptr, lse_ptr, offs_h, mask_h, offs_hd, mask_hd, H, D)


def attention_dot(
    indptr: Tensor,
    index: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    heads: int = 1,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    edge_x: Tensor | None = None,
    dropout: Any = None,
    out_dtype: torch.dtype | None = None,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted sums ``[N, H * D]`` and ``L``; the parameters are those of :func:`qgnn.reference.attention_dot`, and the
    graph's plan."""
    N = indptr.numel() - 1
    D = check_width("attention_dot", heads, value.shape[1])
    out = empty_out(N, value, out_dtype)
    lse = torch.empty((N, heads), dtype=torch.float32, device=value.device)
    if out.numel() == 0:
        return out, lse.zero_()
    indptr = indptr.contiguous()
    with torch.cuda.device_of(value):
        plan = make_plan(indptr, index.numel()) if plan is None else plan
        arguments = {
            "out_ptr": out,
            "lse_ptr": lse,
            "indptr_ptr": indptr,
            "index_ptr": index.contiguous(),
            "query_scale_ptr": contiguous(query_scale),
            "key_scale_ptr": contiguous(key_scale),
            "value_scale_ptr": contiguous(value_scale),
            "score_factor": 1 / math.sqrt(D),
            "HAS_SCALE": value_scale is not None,
            "HAS_EDGE": edge_x is not None,
            **rows_arguments("query", query),
            **rows_arguments("key", key),
            **rows_arguments("value", value),
            **rows_arguments("edge", edge_x),
            **dropout_arguments(dropout),
        }
        partial = empty_slots(plan, heads, D, tiles=1, vectors=2, device=value.device)
        registers = tuning.ATTENTION_DOT_REGISTERS
        launch_rows(_attention_dot_kernel, plan, partial, heads, D, arguments, registers=registers)
    return out, lse
