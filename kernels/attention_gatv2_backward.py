"""Gradients of attention with the scores of GATv2.

    t = <G[i], x_source[j]>,   D = sum_j w t,   de = p * (keep * factor * t - D),   dh = de * att * leaky'(hidden)
    d_target[i] = sum_j dh = (1 - slope) * att * (sum_j [hidden > 0] w t - D * sum_j [hidden > 0] p)
    d_source[j] = sum_i dh + w * G[i],   d_att = sum de * leaky(hidden),   d_edge = dh

``d_target`` uses that the ``de`` of a row add up to 0; neither of its sums needs ``D``, so a target walks its edges
once. It rounds its row of the gradient first, whose codes all gradients are made of. Sources gather the rows of their
targets, the codes, and ``L`` in units of log2, ``D`` and the scales, which lie side by side. They also make ``d_att``:
each program adds up what its edges give, and these sums are added in a fixed order.

Numerics: fp32, without atomics, in an order that depends only on the plans and the shapes.

Oracle: qgnn.reference.attention_gatv2_backward
"""

from typing import Any

import torch
import triton
import triton.language as tl
from qgnn.kernels import tuning
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
    add_edge_rows,
    exponentials,
    keep_factors,
    load_grad,
    load_heads,
    load_row,
    load_row_values,
    load_tile,
    load_values,
    locate_columns,
    locate_row,
    normalized,
    scaled_sum,
    share_work,
    sum_heads,
    sum_tiles,
)
from qgnn.kernels.epilogue import dropout_arguments
from qgnn.kernels.matmul_dw import add_partials
from qgnn.kernels.rounding import load_seed
from qgnn.kernels.spmm_plan import GROUP_ROWS, Plan, make_plan
from torch import Tensor


@triton.jit(do_not_specialize=["dropout_stream", "threshold", "stream"])
def _attention_gatv2_target_kernel(
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
    target_ptr,
    target_scale_ptr,
    source_ptr,
    source_scale_ptr,
    att_ptr,
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
    stride_target_n: tl.constexpr,
    stride_target_f,
    stride_source_n: tl.constexpr,
    stride_source_f,
    stride_edge_n: tl.constexpr,
    stride_edge_f,
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
    att = load_row(att_ptr, 0, offs_hd, mask_hd, 0, 1)
    first_unit, end, step = share_work(counts_ptr, GROUP, HUBS)
    for unit in range(first_unit, end, step):
        is_row, row, slot, start, stop = locate_row(unit, items_ptr, hubs_ptr, indptr_ptr, GROUP, HUBS)
        if is_row:
            base = tl.load(lse_ptr + row * H + offs_h, mask=mask_h, other=0.0) * LOG2E
            codes, scale, grad = load_grad(
                grad_ptr, row, offs_h, offs_hd, mask_hd, stride_grad_n, stride_grad_f, seed_ptr, stream, H, D, QMAX,
                STOCHASTIC, BLOCK_H, BLOCK_D,
            )  # fmt: skip
            if HUBS:
                a = sum_tiles(partial_ptr, start, stop, offs_hd, mask_hd, stride_pn, BLOCK_E)
                b = sum_tiles(partial_ptr + H * D, start, stop, offs_hd, mask_hd, stride_pn, BLOCK_E)
                mean = sum_heads(partial_ptr + 2 * H * D, start, stop, offs_h, mask_h, stride_pn, BLOCK_E)
                total = sum_heads(partial_ptr + 2 * H * D + H, start, stop, offs_h, mask_h, stride_pn, BLOCK_E)
            else:
                target = load_row_values(
                    target_ptr, target_scale_ptr, row, offs_h, mask_h, offs_hd, mask_hd, H, stride_target_n,
                    stride_target_f, HAS_SCALE,
                )[None, :, :]  # fmt: skip
                vector = att[None, :, :]
                acc_a = tl.zeros((BLOCK_E, BLOCK_H, BLOCK_D), tl.float32)
                acc_b = acc_a
                means = tl.zeros((BLOCK_E, BLOCK_H), tl.float32)
                totals = means
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
                    e = tl.sum(tl.where(hidden > 0, vector, vector * negative_slope) * hidden, axis=2)
                    p = exponentials(tl.where(mask_e[:, None], e, float("-inf")), base[None, :])
                    totals += p
                    weighted = p * tl.sum(grad[None, :, :] * source, axis=2)
                    if DROPOUT:
                        weighted *= keep_factors(offs_e, offs_h, dropout_seed, threshold, factor, H)
                    means += weighted
                    is_positive = tl.where(hidden > 0, 1.0, 0.0)
                    acc_a = scaled_sum(weighted, is_positive, acc_a)
                    acc_b = scaled_sum(p, is_positive, acc_b)
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
                d_target = (1 - negative_slope) * att * (a - mean[:, None] * b)
                out = d_target_ptr + row * (H * D) + offs_hd
                tl.store(out, d_target.to(d_target_ptr.dtype.element_ty), mask=mask_hd, eviction_policy="evict_first")
                record = record_ptr + row * stride_rn + offs_h
                tl.store(record, base, mask=mask_h)
                tl.store(record + H, mean, mask=mask_h)
                if QMAX > 0:
                    tl.store(grad_q_ptr + row * stride_qn + offs_hd, codes, mask=mask_hd)
                    tl.store(record + 2 * H, scale, mask=mask_h)
                if HAS_SCALE:
                    own_scale = tl.load(target_scale_ptr + row * H + offs_h, mask=mask_h, other=0.0)
                    tl.store(record + 3 * H, own_scale, mask=mask_h)


@triton.jit(do_not_specialize=["dropout_stream", "threshold"])
def _attention_gatv2_source_kernel(
    # outputs
    d_source_ptr,
    d_edge_ptr,
    d_att_ptr,
    partial_ptr,
    # transposed graph
    items_ptr,
    hubs_ptr,
    counts_ptr,
    indptr_ptr,
    index_ptr,
    order_ptr,
    # inputs
    target_ptr,
    source_ptr,
    source_scale_ptr,
    att_ptr,
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
    stride_target_n: tl.constexpr,
    stride_target_f,
    stride_source_n: tl.constexpr,
    stride_source_f,
    stride_edge_n: tl.constexpr,
    stride_edge_f,
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
    edges in the order of the transposed graph. All that it walks goes into its row of ``d_att``."""
    offs_h, mask_h, offs_hd, mask_hd = locate_columns(H, D, BLOCK_H, BLOCK_D)
    dropout_seed = load_seed(dropout_seed_ptr, dropout_stream) if DROPOUT else 0
    att = load_row(att_ptr, 0, offs_hd, mask_hd, 0, 1)[None, :, :]
    acc_att = tl.zeros((BLOCK_E, BLOCK_H, BLOCK_D), tl.float32)
    first_unit, end, step = share_work(counts_ptr, GROUP, HUBS)
    for unit in range(first_unit, end, step):
        is_row, row, slot, start, stop = locate_row(unit, items_ptr, hubs_ptr, indptr_ptr, GROUP, HUBS)
        if is_row:
            if HUBS:
                d_source = sum_tiles(partial_ptr, start, stop, offs_hd, mask_hd, stride_pn, BLOCK_E)
            else:
                source = load_row_values(
                    source_ptr, source_scale_ptr, row, offs_h, mask_h, offs_hd, mask_hd, H, stride_source_n,
                    stride_source_f, HAS_SCALE,
                )[None, :, :]  # fmt: skip
                acc = tl.zeros((BLOCK_E, BLOCK_H, BLOCK_D), tl.float32)
                for first in range(start, stop, BLOCK_E):
                    offs_e = first + tl.arange(0, BLOCK_E)
                    mask_e = offs_e < stop
                    index = tl.load(index_ptr + offs_e, mask=mask_e, other=0).to(tl.int64)
                    if HAS_EDGE or NEEDS_DEDGE or DROPOUT:
                        position = tl.load(order_ptr + offs_e, mask=mask_e, other=0)
                    else:
                        position = offs_e
                    target = load_tile(target_ptr, index, mask_e, offs_hd, mask_hd, stride_target_n, stride_target_f)
                    if HAS_SCALE:
                        target *= load_heads(record_ptr + 3 * H, index, mask_e, offs_h, mask_h, stride_rn)[:, :, None]
                    hidden = add_edge_rows(
                        target + source, edge_ptr, position, mask_e, offs_hd, mask_hd, stride_edge_n, stride_edge_f,
                        HAS_EDGE,
                    )  # fmt: skip
                    vector = tl.where(hidden > 0, att, att * negative_slope)
                    base = load_heads(record_ptr, index, mask_e, offs_h, mask_h, stride_rn)
                    p = exponentials(tl.where(mask_e[:, None], tl.sum(vector * hidden, axis=2), float("-inf")), base)
                    grad = load_tile(grad_ptr, index, mask_e, offs_hd, mask_hd, stride_grad_n, stride_grad_f)
                    t = tl.sum(grad * source, axis=2)
                    weight = p
                    if HAS_GRAD_SCALE:
                        grad_scale = load_heads(record_ptr + 2 * H, index, mask_e, offs_h, mask_h, stride_rn)
                        t *= grad_scale
                        weight *= grad_scale
                    if DROPOUT:
                        keep = keep_factors(position, offs_h, dropout_seed, threshold, factor, H)
                        t *= keep
                        weight *= keep
                    de = p * (t - load_heads(record_ptr + H, index, mask_e, offs_h, mask_h, stride_rn))
                    if NEEDS_DEDGE:
                        tl.store(
                            d_edge_ptr + (position.to(tl.int64) * (H * D))[:, None, None] + offs_hd[None, :, :],
                            de[:, :, None] * vector,
                            mask=mask_e[:, None, None] & mask_hd[None, :, :],
                        )
                    acc = scaled_sum(de, vector, scaled_sum(weight, grad, acc))
                    slopes = tl.where(hidden > 0, de[:, :, None], (de * negative_slope)[:, :, None])
                    acc_att = tl.fma(slopes, hidden, acc_att)
                d_source = tl.sum(acc, axis=0)

            if slot >= 0:
                tl.store(partial_ptr + slot.to(tl.int64) * stride_pn + offs_hd, d_source, mask=mask_hd)
            else:
                out = d_source_ptr + row * (H * D) + offs_hd
                tl.store(out, d_source.to(d_source_ptr.dtype.element_ty), mask=mask_hd, eviction_policy="evict_first")
    if not HUBS:
        d_att = d_att_ptr + tl.program_id(0).to(tl.int64) * (H * D) + offs_hd
        tl.store(d_att, tl.sum(acc_att, axis=0), mask=mask_hd)


def attention_gatv2_backward(
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    index_t: Tensor,
    order_t: Tensor,
    x_target: Tensor,
    x_source: Tensor,
    att: Tensor,
    lse: Tensor,
    grad: Tensor,
    *,
    target_scale: Tensor | None = None,
    source_scale: Tensor | None = None,
    edge_x: Tensor | None = None,
    negative_slope: float = 0.2,
    dropout: Any = None,
    grad_bits: int = 0,
    seed: Tensor | None = None,
    stream: int = 0,
    needs_dedge: bool = False,
    plan: Plan | None = None,
    plan_t: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the rows, of ``att`` and of the edges' rows; the parameters are those of
    :func:`qgnn.reference.attention_gatv2_backward`, and the plans of the graph and of the transposed one."""
    N, S, E, H, device = x_target.shape[0], x_source.shape[0], index.numel(), att.shape[0], x_source.device
    D = check_width("attention_gatv2_backward", H, x_source.shape[1])
    d_target = torch.empty((N, H * D), dtype=grad.dtype, device=device)
    d_source = torch.empty((S, H * D), dtype=grad.dtype, device=device)
    d_edge = torch.empty((E, H * D), dtype=torch.float32, device=device) if needs_dedge else None
    if H * D == 0:
        return d_target, d_source, torch.zeros_like(att), d_edge
    indptr, indptr_t = indptr.contiguous(), indptr_t.contiguous()
    record = empty_records(N, 4, H, device)
    grad_q = gathered_rows(grad, grad_bits)
    common = {
        "source_scale_ptr": contiguous(source_scale),
        "att_ptr": att.contiguous(),
        "record_ptr": record,
        "stride_rn": record.stride(0),
        "negative_slope": float(negative_slope),
        "HAS_SCALE": source_scale is not None,
        "HAS_EDGE": edge_x is not None,
        **rows_arguments("target", x_target),
        **rows_arguments("source", x_source),
        **rows_arguments("edge", edge_x),
        **dropout_arguments(dropout),
    }
    of_targets = {
        "d_target_ptr": d_target,
        "indptr_ptr": indptr,
        "index_ptr": index.contiguous(),
        "target_scale_ptr": contiguous(target_scale),
        "lse_ptr": lse.contiguous(),
        **grad_arguments(grad, grad_q, grad_bits, seed, stream),
    }
    with torch.cuda.device_of(x_source):
        plan = make_plan(indptr, E) if plan is None else plan
        partial = empty_slots(plan, H, D, tiles=2, vectors=2, device=device)
        launch_rows(_attention_gatv2_target_kernel, plan, partial, H, D, {**common, **of_targets}, tiles=2)
        plan_t = make_plan(indptr_t, E) if plan_t is None else plan_t
        num_programs = min(plan_t.num_programs, tuning.ATTENTION_SUM_PROGRAMS)
        d_att = torch.empty((max(1, num_programs * GROUP_ROWS), H, D), dtype=torch.float32, device=device)
        of_sources = {
            "d_source_ptr": d_source,
            "d_edge_ptr": d_edge,
            "d_att_ptr": d_att if num_programs else d_att.zero_(),
            "indptr_ptr": indptr_t,
            "index_ptr": index_t.contiguous(),
            "order_ptr": order_t.contiguous(),
            "HAS_GRAD_SCALE": grad_bits > 0,
            "NEEDS_DEDGE": needs_dedge,
            **rows_arguments("grad", grad_q),
        }
        partial = empty_slots(plan_t, H, D, tiles=1, vectors=0, device=device)
        plan_t = plan_t._replace(num_programs=num_programs)
        launch_rows(_attention_gatv2_source_kernel, plan_t, partial, H, D, {**common, **of_sources}, tiles=2)
        return d_target, d_source, add_partials(d_att).to(att.dtype), d_edge
