"""Element-wise maximum or minimum over the neighbors of a node, and the edge that each element comes from.

    out[i, f] = max_e weight[e] * x_scale[index[e]] * x[index[e], f]          arg[i, f] = the edge e

over the edges ``e`` from ``indptr[i]`` to ``indptr[i + 1]``. Among equal values the first edge wins, and over all of
them the first NaN. A row without edges gives 0 and -1.

Numerics: messages are fp32 products, in the reference's order; which one wins does not depend on the order of
comparisons. A minimum is the maximum of the negated values. Long rows are cut as in sums (``spmm_plan``).

Oracle: qgnn.reference.spmm_extremum
"""

import torch
import triton
import triton.language as tl
from qgnn.kernels import tuning
from qgnn.kernels.memory import readable_width, scale_stride
from qgnn.kernels.spmm_hubs import partial_stride
from qgnn.kernels.spmm_plan import GROUP_ROWS, Plan, load_item, make_plan
from qgnn.kernels.spmm_rows import load_lanes, load_messages
from torch import Tensor


@triton.jit
def keep_larger(best, edge, value, value_edge, mask):
    """The running maximum and its edge (-1 for none yet) after a later ``value``: one that is equal does not win, and
    a NaN is never replaced."""
    wins = mask & ((edge < 0) | ((best == best) & ((value <= best) == 0)))
    return tl.where(wins, value, best), tl.where(wins, value_edge, edge)


@triton.jit
def largest_along(best, edge, axis: tl.constexpr):
    """The largest of several maxima along an axis, with the first of the edges it comes from."""
    NONE: tl.constexpr = 0x7FFFFFFF if edge.dtype == tl.int32 else 0x7FFFFFFFFFFFFFFF
    is_nan = best != best
    first_nan = tl.min(tl.where(is_nan, edge, NONE), axis=axis)
    value = tl.max(tl.where(is_nan | (edge < 0), float("-inf"), best), axis=axis)
    wins = (best == tl.expand_dims(value, axis)) & (edge >= 0)
    first = tl.min(tl.where(wins, edge, NONE), axis=axis)
    first = tl.where(first_nan < NONE, first_nan, first)
    return tl.where(first_nan < NONE, float("nan"), value), tl.where(first < NONE, first, -1)


@triton.jit
def write_extremum(best, edge, offs, mask, out_ptr, arg_ptr, LARGEST: tl.constexpr):
    value = tl.where(edge < 0, 0.0, best if LARGEST else -best)
    tl.store(out_ptr + offs, value.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(arg_ptr + offs, edge.to(arg_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _spmm_extremum_kernel(
    # outputs
    out_ptr,
    arg_ptr,
    partial_ptr,
    partial_edge_ptr,
    # inputs
    items_ptr,
    counts_ptr,
    indptr_ptr,
    index_ptr,
    x_ptr,
    weight_ptr,
    x_scale_ptr,
    # sizes
    F: tl.constexpr,
    X_WIDTH: tl.constexpr,
    # strides
    stride_pn: tl.constexpr,
    stride_xn: tl.constexpr,
    stride_xf,
    stride_sn,
    # flags
    HAS_WEIGHT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    LARGEST: tl.constexpr,
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
    offs_f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    offs_m = (pid % PARTS) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK_E)[None, :]
    for item in range(pid // PARTS, tl.load(counts_ptr), tl.num_programs(0) // PARTS):
        row, num_rows, slot, first, last = load_item(items_ptr, item)
        if pid % PARTS * ROWS < num_rows:
            start, stop = load_lanes(indptr_ptr, row, num_rows, slot, first, last, offs_m, ROWS)
            best = tl.full((ROWS, BLOCK_E, BLOCK_F), float("-inf"), tl.float32)
            place = tl.full((ROWS, BLOCK_E, BLOCK_F), -1, tl.int32)  # of the edge in its lane
            for step in range(0, tl.max(stop - start, axis=0).to(tl.int32), BLOCK_E):
                offs_e = start[:, None] + step + lane  # [ROWS, BLOCK_E]
                mask_e = offs_e < stop[:, None]
                x, factor = load_messages(
                    offs_e, mask_e, offs_f, index_ptr, x_ptr, weight_ptr, x_scale_ptr, F, X_WIDTH, 1, stride_xn,
                    stride_xf, stride_sn, HAS_WEIGHT, HAS_SCALE,
                )  # fmt: skip
                value = x * factor if LARGEST else -(x * factor)
                best, place = keep_larger(best, place, value, (step + lane)[:, :, None], mask_e[:, :, None])
            row_best, row_place = largest_along(best, place, 1)
            row_edge = tl.where(row_place < 0, -1, start[:, None] + row_place)
            if slot >= 0:
                chunk_best, chunk_edge = largest_along(row_best, row_edge, 0)
                offs = slot.to(tl.int64) * stride_pn + offs_f
                tl.store(partial_ptr + offs, chunk_best, mask=offs_f < stride_pn)
                tl.store(partial_edge_ptr + offs, chunk_edge, mask=offs_f < stride_pn)
            else:
                offs_out = (row.to(tl.int64) + offs_m)[:, None] * F + offs_f[None, :]
                mask = (offs_m < num_rows)[:, None] & (offs_f < F)[None, :]
                write_extremum(row_best, row_edge, offs_out, mask, out_ptr, arg_ptr, LARGEST)


@triton.jit
def _spmm_extremum_hubs_kernel(
    # outputs
    out_ptr,
    arg_ptr,
    # inputs
    partial_ptr,
    partial_edge_ptr,
    hubs_ptr,
    counts_ptr,
    # sizes and strides
    F: tl.constexpr,
    stride_pn: tl.constexpr,
    # flags
    LARGEST: tl.constexpr,
    # tiles
    BLOCK_S: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program owns ``BLOCK_F`` columns of the hubs that come its turn and walks their slots in order."""
    offs_f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    for hub in range(tl.program_id(0), tl.load(counts_ptr + 1), tl.num_programs(0)):
        row = tl.load(hubs_ptr + hub * 3).to(tl.int64)
        last = tl.load(hubs_ptr + hub * 3 + 2)
        best = tl.full((BLOCK_S, BLOCK_F), float("-inf"), tl.float32)
        edge = tl.full((BLOCK_S, BLOCK_F), -1, partial_edge_ptr.dtype.element_ty)
        for slot in range(tl.load(hubs_ptr + hub * 3 + 1), last, BLOCK_S):
            offs_s = slot + tl.arange(0, BLOCK_S)
            offs = offs_s.to(tl.int64)[:, None] * stride_pn + offs_f[None, :]
            mask = (offs_s < last)[:, None] & (offs_f < stride_pn)[None, :]
            value = tl.load(partial_ptr + offs, mask=mask, other=0.0)
            best, edge = keep_larger(best, edge, value, tl.load(partial_edge_ptr + offs, mask=mask, other=0), mask)
        hub_best, hub_edge = largest_along(best, edge, 0)
        write_extremum(hub_best, hub_edge, row * F + offs_f, offs_f < F, out_ptr, arg_ptr, LARGEST)


def spmm_extremum(
    indptr: Tensor,
    index: Tensor,
    x: Tensor,
    *,
    weight: Tensor | None = None,
    x_scale: Tensor | None = None,
    largest: bool = True,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """Values and edges ``[N, F]``; the parameters are those of :func:`qgnn.reference.spmm_extremum`, and the graph's
    plan."""
    N, E, F = indptr.numel() - 1, index.numel(), x.shape[1]
    out_dtype = x.dtype if x.is_floating_point() else torch.float32
    out = torch.empty((N, F), dtype=out_dtype, device=x.device)
    arg = torch.empty((N, F), dtype=index.dtype, device=x.device)
    if out.numel() == 0:
        return out, arg
    config = tuning.spmm_extremum(F, E // N)
    parts = GROUP_ROWS // config["ROWS"]
    with torch.cuda.device_of(x):
        plan = make_plan(indptr, E) if plan is None else plan
        partial = torch.empty((plan.num_slots, partial_stride(F)), dtype=torch.float32, device=x.device)
        partial_edge = torch.empty(partial.shape, dtype=indptr.dtype, device=x.device)
        shared = {
            "out_ptr": out,
            "arg_ptr": arg,
            "partial_ptr": partial,
            "partial_edge_ptr": partial_edge,
            "counts_ptr": plan.counts,
            "F": F,
            "stride_pn": partial.stride(0),
            "LARGEST": largest,
        }
        _spmm_extremum_kernel[(plan.num_programs * parts, triton.cdiv(F, config["BLOCK_F"]))](
            items_ptr=plan.items,
            indptr_ptr=indptr.contiguous(),
            index_ptr=index.contiguous(),
            x_ptr=x,
            weight_ptr=None if weight is None else weight.contiguous(),
            x_scale_ptr=x_scale,
            X_WIDTH=readable_width(x),
            stride_xn=x.stride(0),
            stride_xf=x.stride(1),
            stride_sn=0 if x_scale is None else scale_stride(x_scale),
            HAS_WEIGHT=weight is not None,
            HAS_SCALE=x_scale is not None,
            GROUP=GROUP_ROWS,
            **shared,
            **config,
        )
        if plan.num_hub_programs:
            config = tuning.spmm_extremum_hubs(F)
            _spmm_extremum_hubs_kernel[(plan.num_hub_programs, triton.cdiv(F, config["BLOCK_F"]))](
                hubs_ptr=plan.hubs, **shared, **config
            )
    return out, arg
