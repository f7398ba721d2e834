"""Gradients of attention with additive scores.

    G = grad, or its codes and scales;  t = <G[i], value[j]>;  D = sum_j w t
    ds = p * (keep * factor * t - D) * leaky'(s)
    d_source[j] = sum_i ds,   dx[j] = sum_i w * G[i],   d_target[i] = sum_j ds = (1 - slope) * (q- <g, O+> - q+ <g, O->)

``O+`` is the part of ``out`` from edges with ``s > 0``, ``O-`` the rest, ``q+`` and ``q-`` the sums of their ``p``, and
``g`` the gradient as it is. So a target needs no dot product an edge, its gradient has no noise of rounding, and it is
exactly 0 where all scores of a row have one sign.

Two kernels: targets walk their edges, round their row of the gradient and write ``D``; sources walk theirs and gather
codes and what else of a target they need, which lies side by side: its score, ``L`` in units of log2, ``D`` and the
scale, a value a head each. Nothing of the size of the edges is kept.

Numerics: fp32, without atomics, in an order that depends only on the plans and the shapes. ``D`` and ``t`` are made of
the same codes, and so have no error in common that their difference would keep. Products of codes are exact in fp32,
and so are sums of 1040 of them.

Oracle: qgnn.reference.attention_backward
"""

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
    head_values,
    launch_rows,
    rows_arguments,
)
from qgnn.kernels.attention_tiles import (
    LOG2E,
    additive_scores,
    exponentials,
    keep_factors,
    load_heads,
    load_row,
    load_tile,
    locate_columns,
    locate_row,
    normalized,
    round_grad,
    scaled_sum,
    share_work,
    sum_heads,
    sum_tiles,
)
from qgnn.kernels.epilogue import dropout_arguments, leaky_relu
from qgnn.kernels.rounding import load_seed, to_fp32
from qgnn.kernels.spmm_plan import Plan, make_plan
from torch import Tensor


@triton.jit(do_not_specialize=["dropout_stream", "threshold", "stream"])
def _attention_target_kernel(
    # outputs
    d_target_ptr,
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
    score_target_ptr,
    score_source_ptr,
    edge_score_ptr,
    x_ptr,
    x_scale_ptr,
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
    stride_tn,
    stride_sn,
    stride_xn: tl.constexpr,
    stride_xf,
    stride_grad_n: tl.constexpr,
    stride_grad_f,
    # scalars
    negative_slope,
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
            target = tl.load(score_target_ptr + row * stride_tn + offs_h, mask=mask_h, other=0.0).to(tl.float32)
            base = tl.load(lse_ptr + row * H + offs_h, mask=mask_h, other=0.0) * LOG2E
            if HUBS:
                y_pos = sum_tiles(partial_ptr, start, stop, offs_hd, mask_hd, stride_pn, BLOCK_E)
                y_neg = sum_tiles(partial_ptr + H * D, start, stop, offs_hd, mask_hd, stride_pn, BLOCK_E)
                p_pos = sum_heads(partial_ptr + 2 * H * D, start, stop, offs_h, mask_h, stride_pn, BLOCK_E)
                p_neg = sum_heads(partial_ptr + 2 * H * D + H, start, stop, offs_h, mask_h, stride_pn, BLOCK_E)
            else:
                acc_pos = tl.zeros((BLOCK_E, BLOCK_H, BLOCK_D), tl.float32)
                acc_neg = acc_pos
                total_pos = tl.zeros((BLOCK_E, BLOCK_H), tl.float32)
                total_neg = total_pos
                for first in range(start, stop, BLOCK_E):
                    offs_e = first + tl.arange(0, BLOCK_E)
                    mask_e = offs_e < stop
                    source = tl.load(index_ptr + offs_e, mask=mask_e, other=0).to(tl.int64)
                    score = additive_scores(
                        target[None, :], load_heads(score_source_ptr, source, mask_e, offs_h, mask_h, stride_sn),
                        edge_score_ptr, offs_e, mask_e, offs_h, mask_h, H, HAS_EDGE,
                    )  # fmt: skip
                    e = tl.where(mask_e[:, None], leaky_relu(score, negative_slope), float("-inf"))
                    p = exponentials(e, base[None, :])
                    is_positive = score > 0
                    total_pos += tl.where(is_positive, p, 0.0)
                    total_neg += tl.where(is_positive, 0.0, p)
                    if DROPOUT:
                        p *= keep_factors(offs_e, offs_h, dropout_seed, threshold, factor, H)
                    if HAS_SCALE:
                        p *= load_heads(x_scale_ptr, source, mask_e, offs_h, mask_h, H)
                    x = load_tile(x_ptr, source, mask_e, offs_hd, mask_hd, stride_xn, stride_xf)
                    acc_pos = scaled_sum(tl.where(is_positive, p, 0.0), x, acc_pos)
                    acc_neg = scaled_sum(tl.where(is_positive, 0.0, p), x, acc_neg)
                y_pos, y_neg = tl.sum(acc_pos, axis=0), tl.sum(acc_neg, axis=0)
                p_pos, p_neg = tl.sum(total_pos, axis=0), tl.sum(total_neg, axis=0)

            if slot >= 0:
                partial = partial_ptr + slot.to(tl.int64) * stride_pn
                tl.store(partial + offs_hd, y_pos, mask=mask_hd)
                tl.store(partial + H * D + offs_hd, y_neg, mask=mask_hd)
                tl.store(partial + 2 * H * D + offs_h, p_pos, mask=mask_h)
                tl.store(partial + 2 * H * D + H + offs_h, p_neg, mask=mask_h)
            else:
                grad = load_row(grad_ptr, row, offs_hd, mask_hd, stride_grad_n, stride_grad_f)
                t_pos, t_neg = tl.sum(grad * y_pos, axis=1), tl.sum(grad * y_neg, axis=1)
                d_target = (1 - negative_slope) * (p_neg * t_pos - p_pos * t_neg)
                d_target = tl.where(stop > start, d_target, 0.0)  # a row without edges sees no NaN of its gradient
                tl.store(d_target_ptr + row * H + offs_h, d_target.to(d_target_ptr.dtype.element_ty), mask=mask_h)
                record = record_ptr + row * stride_rn + offs_h
                tl.store(record, target, mask=mask_h)
                tl.store(record + H, base, mask=mask_h)
                if QMAX == 0:
                    tl.store(record + 2 * H, normalized(t_pos + t_neg, p_pos + p_neg), mask=mask_h)
                else:
                    codes, scale = round_grad(
                        grad, row, offs_h, seed_ptr, stream, H, D, QMAX, STOCHASTIC, BLOCK_H, BLOCK_D
                    )
                    tl.store(grad_q_ptr + row * stride_qn + offs_hd, codes, mask=mask_hd)
                    t = scale * tl.sum(to_fp32(codes) * (y_pos + y_neg), axis=1)
                    tl.store(record + 2 * H, normalized(t, p_pos + p_neg), mask=mask_h)
                    tl.store(record + 3 * H, scale, mask=mask_h)


@triton.jit(do_not_specialize=["dropout_stream", "threshold"])
def _attention_source_kernel(
    # outputs
    dx_ptr,
    d_source_ptr,
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
    score_source_ptr,
    edge_score_ptr,
    x_ptr,
    x_scale_ptr,
    grad_ptr,
    record_ptr,
    dropout_seed_ptr,
    # sizes
    H: tl.constexpr,
    D: tl.constexpr,
    # strides
    stride_pn: tl.constexpr,
    stride_rn: tl.constexpr,
    stride_sn,
    stride_xn: tl.constexpr,
    stride_xf,
    stride_grad_n: tl.constexpr,
    stride_grad_f,
    # scalars
    negative_slope,
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
                dx = sum_tiles(partial_ptr, start, stop, offs_hd, mask_hd, stride_pn, BLOCK_E)
                d_source = sum_heads(partial_ptr + H * D, start, stop, offs_h, mask_h, stride_pn, BLOCK_E)
            else:
                source = tl.load(score_source_ptr + row * stride_sn + offs_h, mask=mask_h, other=0.0).to(tl.float32)
                x = load_row(x_ptr, row, offs_hd, mask_hd, stride_xn, stride_xf)[None, :, :]
                if HAS_SCALE:
                    x_scale = tl.load(x_scale_ptr + row * H + offs_h, mask=mask_h, other=0.0)[None, :]
                acc = tl.zeros((BLOCK_E, BLOCK_H, BLOCK_D), tl.float32)
                total = tl.zeros((BLOCK_E, BLOCK_H), tl.float32)
                for first in range(start, stop, BLOCK_E):
                    offs_e = first + tl.arange(0, BLOCK_E)
                    mask_e = offs_e < stop
                    target = tl.load(index_ptr + offs_e, mask=mask_e, other=0).to(tl.int64)
                    if HAS_EDGE or NEEDS_DEDGE or DROPOUT:
                        position = tl.load(order_ptr + offs_e, mask=mask_e, other=0)
                    else:
                        position = offs_e
                    score = additive_scores(
                        load_heads(record_ptr, target, mask_e, offs_h, mask_h, stride_rn), source[None, :],
                        edge_score_ptr, position, mask_e, offs_h, mask_h, H, HAS_EDGE,
                    )  # fmt: skip
                    base = load_heads(record_ptr + H, target, mask_e, offs_h, mask_h, stride_rn)
                    p = exponentials(tl.where(mask_e[:, None], leaky_relu(score, negative_slope), float("-inf")), base)
                    grad = load_tile(grad_ptr, target, mask_e, offs_hd, mask_hd, stride_grad_n, stride_grad_f)
                    t = tl.sum(grad * x, axis=2)
                    if HAS_SCALE:
                        t *= x_scale
                    weight = p
                    if HAS_GRAD_SCALE:
                        grad_scale = load_heads(record_ptr + 3 * H, target, mask_e, offs_h, mask_h, stride_rn)
                        t *= grad_scale
                        weight *= grad_scale
                    if DROPOUT:
                        keep = keep_factors(position, offs_h, dropout_seed, threshold, factor, H)
                        t *= keep
                        weight *= keep
                    ds = p * (t - load_heads(record_ptr + 2 * H, target, mask_e, offs_h, mask_h, stride_rn))
                    ds = tl.where(score > 0, ds, ds * negative_slope)
                    total += ds
                    if NEEDS_DEDGE:
                        d_edge = d_edge_ptr + position.to(tl.int64)[:, None] * H + offs_h[None, :]
                        tl.store(d_edge, ds, mask=mask_e[:, None] & mask_h[None, :])
                    acc = scaled_sum(weight, grad, acc)
                dx, d_source = tl.sum(acc, axis=0), tl.sum(total, axis=0)

            if slot >= 0:
                partial = partial_ptr + slot.to(tl.int64) * stride_pn
                tl.store(partial + offs_hd, dx, mask=mask_hd)
                tl.store(partial + H * D + offs_h, d_source, mask=mask_h)
            else:
                dx_row = dx_ptr + row * (H * D) + offs_hd
                tl.store(dx_row, dx.to(dx_ptr.dtype.element_ty), mask=mask_hd, eviction_policy="evict_first")
                tl.store(d_source_ptr + row * H + offs_h, d_source.to(d_source_ptr.dtype.element_ty), mask=mask_h)


def attention_backward(
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    score_target: Tensor,
    score_source: Tensor,
    x: Tensor,
    lse: Tensor,
    grad: Tensor,
    *,
    x_scale: Tensor | None = None,
    edge_score: Tensor | None = None,
    negative_slope: float = 0.2,
    dropout: Any = None,
    grad_bits: int = 0,
    seed: Tensor | None = None,
    stream: int = 0,
    needs_dedge: bool = False,
    plan: Plan | None = None,
    plan_t: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the scores, of the rows and of the edges' scores; the parameters are those of
    :func:`qgnn.reference.attention_backward`, and the plans of the graph and of the transposed one."""
    (N, H), S, E = score_target.shape, x.shape[0], index.numel()
    D = check_width("attention_backward", H, x.shape[1])
    d_target = torch.empty((N, H), dtype=score_target.dtype, device=x.device)
    d_source = torch.empty((S, H), dtype=score_source.dtype, device=x.device)
    dx = torch.empty((S, H * D), dtype=grad.dtype, device=x.device)
    d_edge = torch.empty((E, H), dtype=torch.float32, device=x.device) if needs_dedge else None
    if H * D == 0:
        return d_target.zero_(), d_source.zero_(), dx, None if d_edge is None else d_edge.zero_()
    score_target, score_source = head_values(score_target), head_values(score_source)
    indptr, indptr_t = indptr.contiguous(), indptr_t.contiguous()
    grad_q = gathered_rows(grad, grad_bits)
    record = empty_records(N, 4 if grad_bits else 3, H, x.device)
    common = {
        "score_source_ptr": score_source,
        "edge_score_ptr": contiguous(edge_score),
        "x_ptr": x,
        "x_scale_ptr": contiguous(x_scale),
        "record_ptr": record,
        "stride_rn": record.stride(0),
        "stride_sn": score_source.stride(0),
        "stride_xn": x.stride(0),
        "stride_xf": x.stride(1),
        "negative_slope": float(negative_slope),
        "HAS_SCALE": x_scale is not None,
        "HAS_EDGE": edge_score is not None,
        **dropout_arguments(dropout),
    }
    of_targets = {
        "d_target_ptr": d_target,
        "indptr_ptr": indptr,
        "index_ptr": index.contiguous(),
        "score_target_ptr": score_target,
        "lse_ptr": lse.contiguous(),
        "stride_tn": score_target.stride(0),
        **grad_arguments(grad, grad_q, grad_bits, seed, stream),
    }
    of_sources = {
        "dx_ptr": dx,
        "d_source_ptr": d_source,
        "d_edge_ptr": d_edge,
        "indptr_ptr": indptr_t,
        "index_ptr": index_t.contiguous(),
        "order_ptr": order_t.contiguous(),
        "HAS_GRAD_SCALE": grad_bits > 0,
        "NEEDS_DEDGE": needs_dedge,
        **rows_arguments("grad", grad_q),
    }
    with torch.cuda.device_of(x):
        plan = make_plan(indptr, E) if plan is None else plan
        partial = empty_slots(plan, H, D, tiles=2, vectors=2, device=x.device)
        launch_rows(_attention_target_kernel, plan, partial, H, D, {**common, **of_targets})
        plan_t = make_plan(indptr_t, E) if plan_t is None else plan_t
        partial = empty_slots(plan_t, H, D, tiles=1, vectors=1, device=x.device)
        launch_rows(_attention_source_kernel, plan_t, partial, H, D, {**common, **of_sources})
    return d_target, d_source, dx, d_edge
