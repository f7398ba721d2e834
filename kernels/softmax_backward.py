"""Gradients of the softmax over the edges of each row of a CSR graph, and of the attention weights of GAT.

    dx[e] = out[e] * (grad[e] - D)      D = sum_k out[k] * grad[k]
    ds[e] = dx[e] * leaky_relu'(score_target[i] + score_source[index[e]])
    d_target[i] = sum_k ds[k]           d_source[j] = sum of ds[e] over the edges e with index[e] = j

over the edges ``k`` of the row ``i`` of ``e``; ``[E, H]``. The edges of a row are walked twice, for D and for the
gradient. The chunks of a hub leave their share of D in slots, and a second kernel, whose programs each add the hub's
slots, writes its edges' gradients and the chunks' shares of ``d_target``, which ``spmm_hubs`` adds. ``d_source`` is a
sum over the transposed graph: ``spmm`` of ``ds``, whose rows are edges.

Numerics: fp32; half types are converted first. Sums are made in an order that depends only on the graphs and the
shapes: no atomics. A NaN reaches the edges of its row and what sums them. Offsets are 64-bit.

Oracle: qgnn.reference.softmax_backward, attention_scores_backward
"""

from typing import Any

import torch
import triton
import triton.language as tl
from qgnn.kernels import tuning
from qgnn.kernels.epilogue import epilogue_arguments
from qgnn.kernels.memory import head_offsets
from qgnn.kernels.softmax_edges import load_node_scores, node_scores
from qgnn.kernels.spmm import spmm
from qgnn.kernels.spmm_hubs import empty_partials, spmm_hubs
from qgnn.kernels.spmm_plan import GROUP_ROWS, Plan, load_item, make_plan
from qgnn.kernels.spmm_rows import load_lanes
from torch import Tensor


@triton.jit
def sum_products(
    start,
    stop,
    offs_h,
    out_ptr,
    grad_ptr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sums of ``out * grad`` over lanes, fp32 [ROWS, BLOCK_H]."""
    acc = tl.zeros((ROWS, BLOCK_E, BLOCK_H), tl.float32)
    for step in range(0, tl.max(stop - start, axis=0), BLOCK_E):
        offs_e = start[:, None] + step + tl.arange(0, BLOCK_E)[None, :]
        offs, mask = head_offsets(offs_e, offs_e < stop[:, None], offs_h, H)
        out = tl.load(out_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        acc = tl.fma(out, tl.load(grad_ptr + offs, mask=mask, other=0.0).to(tl.float32), acc)
    return tl.sum(acc, axis=1)


@triton.jit
def write_gradient(
    start,
    stop,
    mean,
    offs_h,
    target,
    dx_ptr,
    out_ptr,
    grad_ptr,
    index_ptr,
    score_source_ptr,
    slope,
    H: tl.constexpr,
    FROM_NODES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Writes the gradients of the lanes' scores; their sums, [ROWS, BLOCK_H]."""
    acc = tl.zeros((ROWS, BLOCK_E, BLOCK_H), tl.float32)
    for step in range(0, tl.max(stop - start, axis=0), BLOCK_E):
        offs_e = start[:, None] + step + tl.arange(0, BLOCK_E)[None, :]
        mask_e = offs_e < stop[:, None]
        offs, mask = head_offsets(offs_e, mask_e, offs_h, H)
        out = tl.load(out_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dx = out * (grad - mean[:, None, :])
        if FROM_NODES:
            score = node_scores(offs_e, mask_e, offs_h, target, index_ptr, score_source_ptr, H)
            dx = tl.where(score > 0.0, dx, dx * slope)
            acc += tl.where(mask, dx, 0.0)  # D of a lane without edges may be a NaN
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    return tl.sum(acc, axis=1)


@triton.jit
def _softmax_backward_rows_kernel(
    # outputs
    dx_ptr,
    d_target_ptr,
    partial_ptr,
    # inputs
    items_ptr,
    counts_ptr,
    indptr_ptr,
    index_ptr,
    score_target_ptr,
    score_source_ptr,
    out_ptr,
    grad_ptr,
    # sizes, strides, scalars, flags
    H: tl.constexpr,
    stride_pn: tl.constexpr,
    slope,
    FROM_NODES: tl.constexpr,
    # tiles
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program owns ``BLOCK_H`` heads of ``ROWS`` rows of every item that comes its turn. Of the programs that share
    a chunk, the first takes it all."""
    PARTS: tl.constexpr = GROUP // ROWS
    pid = tl.program_id(0)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_m = (pid % PARTS) * ROWS + tl.arange(0, ROWS)
    for item in range(pid // PARTS, tl.load(counts_ptr), tl.num_programs(0) // PARTS):
        row, num_rows, slot, first, last = load_item(items_ptr, item)
        if pid % PARTS * ROWS < num_rows:
            start, stop = load_lanes(indptr_ptr, row, num_rows, slot, first, last, offs_m, ROWS)
            mean = sum_products(start, stop, offs_h, out_ptr, grad_ptr, H, ROWS, BLOCK_E, BLOCK_H)
            if slot >= 0:
                partial = partial_ptr + slot.to(tl.int64) * stride_pn + offs_h
                tl.store(partial, tl.sum(mean, axis=0), mask=offs_h < H)
            else:
                offs_n, mask_n = row + offs_m, offs_m < num_rows
                target = load_node_scores(score_target_ptr, offs_n, mask_n, offs_h, H, FROM_NODES)
                total = write_gradient(
                    start, stop, mean, offs_h, target, dx_ptr, out_ptr, grad_ptr, index_ptr, score_source_ptr, slope, H,
                    FROM_NODES, ROWS, BLOCK_E, BLOCK_H,
                )  # fmt: skip
                if FROM_NODES:
                    d_target = d_target_ptr + offs_n.to(tl.int64)[:, None] * H + offs_h[None, :]
                    mask = mask_n[:, None] & (offs_h < H)[None, :]
                    tl.store(d_target, total.to(d_target_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_backward_hubs_kernel(
    # outputs
    dx_ptr,
    partial_target_ptr,
    # inputs
    partial_ptr,
    items_ptr,
    hubs_ptr,
    counts_ptr,
    index_ptr,
    score_target_ptr,
    score_source_ptr,
    out_ptr,
    grad_ptr,
    # sizes, strides, scalars, flags
    H: tl.constexpr,
    stride_pn: tl.constexpr,
    slope,
    FROM_NODES: tl.constexpr,
    # tiles
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """The programs of a hub share its chunks; each of them adds all its slots, ``BLOCK_S`` a step."""
    offs_h = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    for hub in range(tl.program_id(0), tl.load(counts_ptr + 1), tl.num_programs(0)):
        row = tl.load(hubs_ptr + hub * 3)
        first_slot = tl.load(hubs_ptr + hub * 3 + 1)
        last_slot = tl.load(hubs_ptr + hub * 3 + 2)
        acc = tl.zeros((BLOCK_S, BLOCK_H), tl.float32)
        for slot in range(first_slot, last_slot, BLOCK_S):
            offs_s = slot + tl.arange(0, BLOCK_S)
            mask = (offs_s < last_slot)[:, None] & (offs_h < H)[None, :]
            acc += tl.load(
                partial_ptr + offs_s.to(tl.int64)[:, None] * stride_pn + offs_h[None, :], mask=mask, other=0.0
            )
        mean = tl.sum(acc, axis=0)[None, :]
        offs_n = row + tl.arange(0, 1)
        target = load_node_scores(score_target_ptr, offs_n, offs_n >= 0, offs_h, H, FROM_NODES)
        for slot in range(first_slot + tl.program_id(1), last_slot, tl.num_programs(1)):
            _, _, _, first, last = load_item(items_ptr, slot)  # chunks are the first items, in the order of slots
            total = write_gradient(
                first + tl.arange(0, 1), last + tl.arange(0, 1), mean, offs_h, target, dx_ptr, out_ptr, grad_ptr,
                index_ptr, score_source_ptr, slope, H, FROM_NODES, 1, BLOCK_E, BLOCK_H,
            )  # fmt: skip
            if FROM_NODES:
                offs_s = (slot + tl.arange(0, 1)).to(tl.int64)
                partial = partial_target_ptr + offs_s[:, None] * stride_pn + offs_h[None, :]
                tl.store(partial, total, mask=(offs_h < stride_pn)[None, :])


def _softmax_backward(
    indptr: Tensor,
    dx: Tensor,
    d_target: Tensor | None,
    out: Tensor,
    grad: Tensor,
    plan: Plan | None,
    scores: dict[str, Any],
    slope: float,
) -> None:
    N, (E, H) = indptr.numel() - 1, dx.shape
    config = tuning.softmax(H, E // N)
    with torch.cuda.device_of(dx):
        plan = make_plan(indptr, E) if plan is None else plan
        partial = empty_partials(plan, H, dx.device)
        shared = {
            "dx_ptr": dx,
            "partial_ptr": partial,
            "items_ptr": plan.items,
            "counts_ptr": plan.counts,
            "out_ptr": out.contiguous(),
            "grad_ptr": grad.contiguous(),
            "H": H,
            "stride_pn": partial.stride(0),
            "slope": slope,
            "FROM_NODES": d_target is not None,
            **scores,
        }
        grid = plan.num_programs * (GROUP_ROWS // config["ROWS"]), triton.cdiv(H, config["BLOCK_H"])
        _softmax_backward_rows_kernel[grid](
            d_target_ptr=d_target, indptr_ptr=indptr.contiguous(), GROUP=GROUP_ROWS, **shared, **config
        )
        if plan.num_hub_programs:
            config = tuning.softmax_hubs(H)
            partial_target = None if d_target is None else empty_partials(plan, H, dx.device)
            grid = *tuning.softmax_hubs_programs(plan.num_hub_programs), triton.cdiv(H, config["BLOCK_H"])
            _softmax_backward_hubs_kernel[grid](
                partial_target_ptr=partial_target, hubs_ptr=plan.hubs, **shared, **config
            )
            if d_target is not None:
                spmm_hubs(plan, partial_target, rows_of_sums(d_target))


def rows_of_sums(out: Tensor) -> dict[str, Any]:
    """What :func:`spmm_hubs` is to do with its sums: write them to the rows of ``out`` as they are."""
    return {
        "out_ptr": out,
        "scale_ptr": None,
        "seed_ptr": None,
        "stream": 0,
        "F": out.shape[1],
        "stride_on": out.stride(0),
        "QMAX": 0,
        "STOCHASTIC": False,
        **epilogue_arguments(None, bias=None),
    }


def softmax_backward(indptr: Tensor, out: Tensor, grad: Tensor, *, plan: Plan | None = None) -> Tensor:
    """Gradient of the scores, ``[E, H]``; the parameters are those of :func:`qgnn.reference.softmax_backward`, and the
    graph's plan."""
    dx = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    if dx.numel():
        scores = {"index_ptr": None, "score_target_ptr": None, "score_source_ptr": None}
        _softmax_backward(indptr, dx, None, out, grad, plan, scores, 1.0)
    return dx


def attention_scores_backward(
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    order_t: Tensor,
    score_target: Tensor,
    score_source: Tensor,
    out: Tensor,
    grad: Tensor,
    *,
    negative_slope: float = 0.2,
    plan: Plan | None = None,
    plan_t: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of both scores, ``[N, H]`` and ``[S, H]``; the parameters are those of
    :func:`qgnn.reference.attention_scores_backward`, and the plans of the graph and of the transposed one."""
    if grad.numel() == 0:
        return torch.zeros_like(score_target), torch.zeros_like(score_source)
    edge_grad = torch.empty(grad.shape, dtype=torch.float32, device=grad.device)
    d_target = torch.empty(score_target.shape, dtype=score_target.dtype, device=grad.device)
    scores = {
        "index_ptr": index.contiguous(),
        "score_target_ptr": score_target.contiguous(),
        "score_source_ptr": score_source.contiguous(),
    }
    _softmax_backward(indptr, edge_grad, d_target, out, grad, plan, scores, float(negative_slope))
    return d_target, spmm(indptr_t, order_t, edge_grad, out_dtype=score_source.dtype, plan=plan_t)
