"""Gradients of attention with scaled dot products as scores.

    t = <G[i], value[j] + edge_x>,   D = sum_j w t,   ds = p * (keep * factor * t - D) / sqrt(D columns)
    d_query[i] = sum_j ds * (key[j] + edge_x) = (sum_j w t * (key[j] + edge_x) - D * sum_j p * (key[j] + edge_x)) / sqrt
    d_key[j] = sum_i ds * query[i],   d_value[j] = sum_i w * G[i],   d_edge = ds * query[i] + w * G[i]

The two sums of ``d_query`` do not need ``D``, so a target walks its edges once. It rounds its row of the gradient
first, whose codes all gradients are made of. Sources gather the rows of their targets, the codes, and ``L`` in units of
log2, ``D`` and the scales, which lie side by side.

Numerics: fp32, without atomics, in an order that depends only on the plans and the shapes. Without ``edge_x``, codes
are multiplied as they are, exactly, as are sums of 1040 products, and scales come after.

Oracle: qgnn.reference.attention_dot_backward
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from qgnn.kernels.attention_launch import (
    check_width,
    contiguous,
    empty_records,
    empty_slots,
    gathered_rows,
    grad_arguments,
    launch_rows,
    rows_arguments,
)
from qgnn.kernels.attention_tiles import (
    LOG2E,
    exponentials,
    keep_factors,
    load_grad,
    load_heads,
    load_keys_and_values,
    load_row,
    load_tile,
    locate_columns,
    locate_row,
    normalized,
    scaled_sum,
    share_work,
    sum_heads,
    sum_tiles,
)
from qgnn.kernels.epilogue import dropout_arguments
from qgnn.kernels.rounding import load_seed, to_fp32
from qgnn.kernels.spmm_plan import Plan, make_plan
from torch import Tensor


@triton.jit(do_not_specialize=["dropout_stream", "threshold", "stream"])
def _attention_dot_target_kernel(
    # outputs
    d_query_ptr,
    grad_q_ptr,
    record_ptr,
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
    lse_ptr,
    grad_ptr,
    dropout_seed_ptr,
    seed_ptr,
    # sizes
    H: tl.constexpr,
    D: tl.constexpr,
    # strides
    stride_pn: tl.constexpr,
    stride_rn: tl.constexpr,
    stride_qn: tl.constexpr,
    stride_query_n: tl.constexpr,
    stride_query_f,
    stride_key_n: tl.constexpr,
    stride_key_f,
    stride_value_n: tl.constexpr,
    stride_value_f,
    stride_edge_n: tl.constexpr,
    stride_edge_f,
    stride_grad_n: tl.constexpr,
    stride_grad_f,
    # scalars
    score_factor,
    dropout_stream,
    threshold,
    factor,
    stream,
    # flags
    HAS_SCALE: tl.constexpr,
    HAS_EDGE: tl.constexpr,
    DROPOUT: tl.constexpr,
    QMAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
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
    dropout_seed = load_seed(dropout_seed_ptr, dropout_stream) if DROPOUT else 0
    first_unit, end, step = share_work(counts_ptr, GROUP, HUBS)
    for unit in range(first_unit, end, step):
        is_row, row, slot, start, stop = locate_row(unit, items_ptr, hubs_ptr, indptr_ptr, GROUP, HUBS)
        if is_row:
            base = tl.load(lse_ptr + row * H + offs_h, mask=mask_h, other=0.0) * LOG2E
            codes, grad_scale, _ = load_grad(
                grad_ptr, row, offs_h, offs_hd, mask_hd, stride_grad_n, stride_grad_f, seed_ptr, stream, H, D, QMAX,
                STOCHASTIC, BLOCK_H, BLOCK_D,
            )  # fmt: skip
            query_factor = tl.full((BLOCK_H,), 1.0, tl.float32) * score_factor
            if HAS_SCALE:
                query_factor *= tl.load(query_scale_ptr + row * H + offs_h, mask=mask_h, other=0.0)
            if HUBS:
                a = sum_tiles(partial_ptr, start, stop, offs_hd, mask_hd, stride_pn, BLOCK_E)
                b = sum_tiles(partial_ptr + H * D, start, stop, offs_hd, mask_hd, stride_pn, BLOCK_E)
                mean = sum_heads(partial_ptr + 2 * H * D, start, stop, offs_h, mask_h, stride_pn, BLOCK_E)
                total = sum_heads(partial_ptr + 2 * H * D + H, start, stop, offs_h, mask_h, stride_pn, BLOCK_E)
            else:
                query = load_row(query_ptr, row, offs_hd, mask_hd, stride_query_n, stride_query_f)[None, :, :]
                grad = to_fp32(codes)[None, :, :]
                acc_a = tl.zeros((BLOCK_E, BLOCK_H, BLOCK_D), tl.float32)
                acc_b = acc_a
                means = tl.zeros((BLOCK_E, BLOCK_H), tl.float32)
                totals = means
                for first in range(start, stop, BLOCK_E):
                    offs_e = first + tl.arange(0, BLOCK_E)
                    mask_e = offs_e < stop
                    index = tl.load(index_ptr + offs_e, mask=mask_e, other=0).to(tl.int64)
                    key, value, key_scale, value_scale = load_keys_and_values(
                        key_ptr, key_scale_ptr, value_ptr, value_scale_ptr, edge_ptr, index, offs_e, mask_e, offs_h,
                        mask_h, offs_hd, mask_hd, H, stride_key_n, stride_key_f, stride_value_n, stride_value_f,
                        stride_edge_n, stride_edge_f, HAS_SCALE, HAS_EDGE,
                    )  # fmt: skip
                    e = tl.sum(query * key, axis=2) * query_factor[None, :] * key_scale
                    t = tl.sum(grad * value, axis=2) * value_scale
                    if QMAX > 0:
                        t *= grad_scale[None, :]
                    p = exponentials(tl.where(mask_e[:, None], e, float("-inf")), base[None, :])
                    totals += p
                    weighted = p * t
                    if DROPOUT:
                        weighted *= keep_factors(offs_e, offs_h, dropout_seed, threshold, factor, H)
                    means += weighted
                    acc_a = scaled_sum(weighted * key_scale, key, acc_a)
                    acc_b = scaled_sum(p * key_scale, key, acc_b)
                a, b = tl.sum(acc_a, axis=0), tl.sum(acc_b, axis=0)
                mean, total = tl.sum(means, axis=0), tl.sum(totals, axis=0)

            if slot >= 0:
                partial = partial_ptr + slot.to(tl.int64) * stride_pn
                tl.store(partial + offs_hd, a, mask=mask_hd)
                tl.store(partial + H * D + offs_hd, b, mask=mask_hd)
                tl.store(partial + 2 * H * D + offs_h, mean, mask=mask_h)
                tl.store(partial + 2 * H * D + H + offs_h, total, mask=mask_h)
            else:
                mean = normalized(mean, total)
                d_query = (a - mean[:, None] * b) * score_factor
                out = d_query_ptr + row * (H * D) + offs_hd
                tl.store(out, d_query.to(d_query_ptr.dtype.element_ty), mask=mask_hd, eviction_policy="evict_first")
                record = record_ptr + row * stride_rn + offs_h
                tl.store(record, base, mask=mask_h)
                tl.store(record + H, mean, mask=mask_h)
                tl.store(record + 2 * H, query_factor, mask=mask_h)
                if QMAX > 0:
                    tl.store(grad_q_ptr + row * stride_qn + offs_hd, codes, mask=mask_hd)
                    tl.store(record + 3 * H, grad_scale, mask=mask_h)


@triton.jit(do_not_specialize=["dropout_stream", "threshold"])
def _attention_dot_source_kernel(
    # outputs
    d_key_ptr,
    d_value_ptr,
    d_edge_ptr,
    partial_ptr,
    # transposed graph
    items_ptr,
    hubs_ptr,
    counts_ptr,
    indptr_ptr,
    index_ptr,
    order_ptr,
    # inputs
    query_ptr,
    key_ptr,
    key_scale_ptr,
    value_ptr,
    value_scale_ptr,
    edge_ptr,
    grad_ptr,
    record_ptr,
    dropout_seed_ptr,
    # sizes
    H: tl.constexpr,
    D: tl.constexpr,
    # strides
    stride_pn: tl.constexpr,
    stride_rn: tl.constexpr,
    stride_query_n: tl.constexpr,
    stride_query_f,
    stride_key_n: tl.constexpr,
    stride_key_f,
    stride_value_n: tl.constexpr,
    stride_value_f,
    stride_edge_n: tl.constexpr,
    stride_edge_f,
    stride_grad_n: tl.constexpr,
    stride_grad_f,
    # scalars
    dropout_stream,
    threshold,
    factor,
    # flags
    HAS_SCALE: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr,
    HAS_EDGE: tl.constexpr,
    NEEDS_DEDGE: tl.constexpr,
    DROPOUT: tl.constexpr,
    HUBS: tl.constexpr,
    # tiles
    GROUP: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program owns ``BLOCK_H`` heads of a source row of every item that comes its turn, or of a hub, and walks its
    edges in the order of the transposed graph."""
    offs_h, mask_h, offs_hd, mask_hd = locate_columns(H, D, BLOCK_H, BLOCK_D)
    dropout_seed = load_seed(dropout_seed_ptr, dropout_stream) if DROPOUT else 0
    first_unit, end, step = share_work(counts_ptr, GROUP, HUBS)
    for unit in range(first_unit, end, step):
        is_row, row, slot, start, stop = locate_row(unit, items_ptr, hubs_ptr, indptr_ptr, GROUP, HUBS)
        if is_row:
            if HUBS:
                d_key = sum_tiles(partial_ptr, start, stop, offs_hd, mask_hd, stride_pn, BLOCK_E)
                d_value = sum_tiles(partial_ptr + H * D, start, stop, offs_hd, mask_hd, stride_pn, BLOCK_E)
            else:
                key = load_row(key_ptr, row, offs_hd, mask_hd, stride_key_n, stride_key_f)
                value = load_row(value_ptr, row, offs_hd, mask_hd, stride_value_n, stride_value_f)
                if HAS_SCALE:
                    key_scale = tl.load(key_scale_ptr + row * H + offs_h, mask=mask_h, other=0.0)
                    value_scale = tl.load(value_scale_ptr + row * H + offs_h, mask=mask_h, other=0.0)
                    if HAS_EDGE:
                        key *= key_scale[:, None]
                        value *= value_scale[:, None]
                acc_key = tl.zeros((BLOCK_E, BLOCK_H, BLOCK_D), tl.float32)
                acc_value = acc_key
                for first in range(start, stop, BLOCK_E):
                    offs_e = first + tl.arange(0, BLOCK_E)
                    mask_e = offs_e < stop
                    index = tl.load(index_ptr + offs_e, mask=mask_e, other=0).to(tl.int64)
                    if HAS_EDGE or NEEDS_DEDGE or DROPOUT:
                        position = tl.load(order_ptr + offs_e, mask=mask_e, other=0)
                    query = load_tile(query_ptr, index, mask_e, offs_hd, mask_hd, stride_query_n, stride_query_f)
                    grad = load_tile(grad_ptr, index, mask_e, offs_hd, mask_hd, stride_grad_n, stride_grad_f)
                    if HAS_EDGE:
                        edge = load_tile(
                            edge_ptr, position.to(tl.int64), mask_e, offs_hd, mask_hd, stride_edge_n, stride_edge_f
                        )
                        e = tl.sum(query * (key[None, :, :] + edge), axis=2)
                        t = tl.sum(grad * (value[None, :, :] + edge), axis=2)
                    else:
                        e = tl.sum(query * key[None, :, :], axis=2)
                        t = tl.sum(grad * value[None, :, :], axis=2)
                    query_factor = load_heads(record_ptr + 2 * H, index, mask_e, offs_h, mask_h, stride_rn)
                    e *= query_factor
                    if HAS_SCALE and not HAS_EDGE:
                        e *= key_scale[None, :]
                        t *= value_scale[None, :]
                    base = load_heads(record_ptr, index, mask_e, offs_h, mask_h, stride_rn)
                    p = exponentials(tl.where(mask_e[:, None], e, float("-inf")), base)
                    weight = p
                    if HAS_GRAD_SCALE:
                        grad_scale = load_heads(record_ptr + 3 * H, index, mask_e, offs_h, mask_h, stride_rn)
                        t *= grad_scale
                        weight *= grad_scale
                    if DROPOUT:
                        keep = keep_factors(position, offs_h, dropout_seed, threshold, factor, H)
                        t *= keep
                        weight *= keep
                    de = p * (t - load_heads(record_ptr + H, index, mask_e, offs_h, mask_h, stride_rn)) * query_factor
                    if NEEDS_DEDGE:
                        tl.store(
                            d_edge_ptr + (position.to(tl.int64) * (H * D))[:, None, None] + offs_hd[None, :, :],
                            scaled_sum(weight, grad, de[:, :, None] * query),
                            mask=mask_e[:, None, None] & mask_hd[None, :, :],
                        )
                    acc_key = scaled_sum(de, query, acc_key)
                    acc_value = scaled_sum(weight, grad, acc_value)
                d_key, d_value = tl.sum(acc_key, axis=0), tl.sum(acc_value, axis=0)

            if slot >= 0:
                partial = partial_ptr + slot.to(tl.int64) * stride_pn
                tl.store(partial + offs_hd, d_key, mask=mask_hd)
                tl.store(partial + H * D + offs_hd, d_value, mask=mask_hd)
            else:
                offs = row * (H * D) + offs_hd
                d_key, d_value = d_key.to(d_key_ptr.dtype.element_ty), d_value.to(d_value_ptr.dtype.element_ty)
                tl.store(d_key_ptr + offs, d_key, mask=mask_hd, eviction_policy="evict_first")
                tl.store(d_value_ptr + offs, d_value, mask=mask_hd, eviction_policy="evict_first")


def attention_dot_backward(
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    grad: Tensor,
    *,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    edge_x: Tensor | None = None,
    dropout: Any = None,
    grad_bits: int = 0,
    seed: Tensor | None = None,
    stream: int = 0,
    needs_dedge: bool = False,
    plan: Plan | None = None,
    plan_t: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the rows and of the edges' rows; the parameters are those of
    :func:`qgnn.reference.attention_dot_backward`, and the plans of the graph and of the transposed one."""
    (N, H), S, E, device = lse.shape, value.shape[0], index.numel(), value.device
    D = check_width("attention_dot_backward", H, value.shape[1])
    d_query = torch.empty((N, H * D), dtype=grad.dtype, device=device)
    d_key, d_value = (torch.empty((S, H * D), dtype=grad.dtype, device=device) for _ in range(2))
    d_edge = torch.empty((E, H * D), dtype=torch.float32, device=device) if needs_dedge else None
    if H * D == 0:
        return d_query, d_key, d_value, d_edge
    indptr, indptr_t = indptr.contiguous(), indptr_t.contiguous()
    record = empty_records(N, 4 if grad_bits else 3, H, device)
    grad_q = gathered_rows(grad, grad_bits)
    common = {
        "key_scale_ptr": contiguous(key_scale),
        "value_scale_ptr": contiguous(value_scale),
        "record_ptr": record,
        "stride_rn": record.stride(0),
        "HAS_SCALE": value_scale is not None,
        "HAS_EDGE": edge_x is not None,
        **rows_arguments("query", query),
        **rows_arguments("key", key),
        **rows_arguments("value", value),
        **rows_arguments("edge", edge_x),
        **dropout_arguments(dropout),
    }
    of_targets = {
        "d_query_ptr": d_query,
        "indptr_ptr": indptr,
        "index_ptr": index.contiguous(),
        "query_scale_ptr": contiguous(query_scale),
        "lse_ptr": lse.contiguous(),
        "score_factor": 1 / math.sqrt(D),
        **grad_arguments(grad, grad_q, grad_bits, seed, stream),
    }
    of_sources = {
        "d_key_ptr": d_key,
        "d_value_ptr": d_value,
        "d_edge_ptr": d_edge,
        "indptr_ptr": indptr_t,
        "index_ptr": index_t.contiguous(),
        "order_ptr": order_t.contiguous(),
        "HAS_GRAD_SCALE": grad_bits > 0,
        "NEEDS_DEDGE": needs_dedge,
        **rows_arguments("grad", grad_q),
    }
    with torch.cuda.device_of(value):
        plan = make_plan(indptr, E) if plan is None else plan
        partial = empty_slots(plan, H, D, tiles=2, vectors=2, device=device)
        launch_rows(_attention_dot_target_kernel, plan, partial, H, D, {**common, **of_targets}, tiles=2)
        plan_t = make_plan(indptr_t, E) if plan_t is None else plan_t
        partial = empty_slots(plan_t, H, D, tiles=2, vectors=0, device=device)
        launch_rows(_attention_dot_source_kernel, plan_t, partial, H, D, {**common, **of_sources}, tiles=2)
    return d_query, d_key, d_value, d_edge
