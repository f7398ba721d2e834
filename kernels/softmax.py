"""Softmax over the edges of each row of a CSR graph, head by head, and the attention weights of GAT, made with the
scores themselves.

    out[e] = exp(s[e] - m) / sum_k exp(s[k] - m)      m = max_k s[k]
    s[e] = scores[e]      or      leaky_relu(score_target[i] + score_source[index[e]])

over the edges ``k`` from ``indptr[i]`` to ``indptr[i + 1]`` of the row ``i`` of ``e``; ``[E, H]``, an edge's heads side
by side. The edges of a row are walked twice: for its maximum and its sum, which is rescaled whenever the maximum grows,
and for the results. Of a hub, a row of more edges than the plan's cap (``spmm_plan``), each chunk leaves its maximum
and its sum in a slot, and a second kernel, whose programs each merge the hub's slots, writes the results.

Numerics: fp32; half types are converted first. Sums are made in an order that depends only on the graph and the shapes:
no atomics. A NaN, an inf or nothing but -inf among the scores of a head of a row makes all its results NaN, as in
``torch.softmax``, and reaches no other. Results below 2**-126 may be flushed to 0. Offsets are 64-bit.

Oracle: qgnn.reference.softmax, attention_scores
"""

from typing import Any

import torch
import triton
import triton.language as tl
from qgnn.kernels import tuning
from qgnn.kernels.epilogue import leaky_relu
from qgnn.kernels.memory import head_offsets
from qgnn.kernels.softmax_backward import attention_scores_backward, softmax_backward
from qgnn.kernels.softmax_edges import load_node_scores, node_scores
from qgnn.kernels.spmm_plan import GROUP_ROWS, Plan, load_item, make_plan
from qgnn.kernels.spmm_rows import lane_rows, load_lanes
from torch import Tensor

__all__ = ["attention_scores", "attention_scores_backward", "softmax", "softmax_backward"]


@triton.jit
def load_scores(
    offs_e,
    mask_e,
    offs_h,
    target,
    score_ptr,
    index_ptr,
    score_source_ptr,
    slope,
    H: tl.constexpr,
    FROM_NODES: tl.constexpr,
):
    """Scores of edges, fp32 [ROWS, BLOCK_E, BLOCK_H], -inf where there is none; and where they belong in [E, H]."""
    offs, mask = head_offsets(offs_e, mask_e, offs_h, H)
    if FROM_NODES:
        score = leaky_relu(node_scores(offs_e, mask_e, offs_h, target, index_ptr, score_source_ptr, H), slope)
        score = tl.where(mask, score, float("-inf"))
    else:
        score = tl.load(score_ptr + offs, mask=mask, other=float("-inf")).to(tl.float32)
    return score, offs, mask


@triton.jit
def finite_floor(largest):
    """What to subtract from scores: their maximum, but nothing from those that are all -inf, or are none."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def merge_sums(largest, total, other_largest, other_total):
    """The maximum of two sets of scores, and the sum of their exponentials beside it."""
    merged = tl.maximum(largest, other_largest)
    floor = finite_floor(merged)
    return merged, tl.fma(total, tl.exp(largest - floor), other_total * tl.exp(other_largest - floor))


@triton.jit
def fold_sums(largest, total, axis: tl.constexpr):
    """:func:`merge_sums` along an axis."""
    folded = tl.max(largest, axis=axis)
    return folded, tl.sum(total * tl.exp(largest - tl.expand_dims(finite_floor(folded), axis)), axis=axis)


@triton.jit
def sum_exponentials(
    start,
    stop,
    offs_h,
    target,
    score_ptr,
    index_ptr,
    score_source_ptr,
    slope,
    H: tl.constexpr,
    FROM_NODES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Maxima of lanes and the sums of exponentials beside them, [ROWS, BLOCK_H]. Each of the ``BLOCK_E`` edges of a
    step has its own."""
    largest = tl.full((ROWS, BLOCK_E, BLOCK_H), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, BLOCK_E, BLOCK_H), tl.float32)
    for step in range(0, tl.max(stop - start, axis=0), BLOCK_E):
        offs_e = start[:, None] + step + tl.arange(0, BLOCK_E)[None, :]
        score, _, _ = load_scores(
            offs_e, offs_e < stop[:, None], offs_h, target, score_ptr, index_ptr, score_source_ptr, slope, H, FROM_NODES
        )
        grown = tl.maximum(largest, score)
        floor = finite_floor(grown)
        total = tl.fma(total, tl.exp(largest - floor), tl.exp(score - floor))
        largest = grown
    return fold_sums(largest, total, 1)


@triton.jit
def write_softmax(
    start,
    stop,
    largest,
    total,
    offs_h,
    target,
    out_ptr,
    score_ptr,
    index_ptr,
    score_source_ptr,
    slope,
    H: tl.constexpr,
    FROM_NODES: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    floor = finite_floor(largest)[:, None, :]
    is_none = total == 0.0  # all scores are -inf
    inverse = tl.where(is_none, float("nan"), 1.0 / tl.where(is_none, 1.0, total))[:, None, :]
    for step in range(0, tl.max(stop - start, axis=0), BLOCK_E):
        offs_e = start[:, None] + step + tl.arange(0, BLOCK_E)[None, :]
        score, offs, mask = load_scores(
            offs_e, offs_e < stop[:, None], offs_h, target, score_ptr, index_ptr, score_source_ptr, slope, H, FROM_NODES
        )
        tl.store(out_ptr + offs, (tl.exp(score - floor) * inverse).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_rows_kernel(
    # outputs
    out_ptr,
    partial_ptr,
    # inputs
    items_ptr,
    counts_ptr,
    indptr_ptr,
    index_ptr,
    score_ptr,
    score_target_ptr,
    score_source_ptr,
    # sizes, scalars, flags
    H: tl.constexpr,
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
            offs_n, mask_n = lane_rows(row, num_rows, slot, offs_m, GROUP)
            target = load_node_scores(score_target_ptr, offs_n, mask_n, offs_h, H, FROM_NODES)
            largest, total = sum_exponentials(
                start, stop, offs_h, target, score_ptr, index_ptr, score_source_ptr, slope, H, FROM_NODES, ROWS,
                BLOCK_E, BLOCK_H,
            )  # fmt: skip
            if slot >= 0:
                chunk_largest, chunk_total = fold_sums(largest, total, 0)
                offs_p = slot.to(tl.int64) * 2 * H + offs_h
                tl.store(partial_ptr + offs_p, chunk_largest, mask=offs_h < H)
                tl.store(partial_ptr + offs_p + H, chunk_total, mask=offs_h < H)
            else:
                write_softmax(
                    start, stop, largest, total, offs_h, target, out_ptr, score_ptr, index_ptr, score_source_ptr, slope,
                    H, FROM_NODES, BLOCK_E,
                )  # fmt: skip


@triton.jit
def _softmax_hubs_kernel(
    # outputs
    out_ptr,
    # inputs
    partial_ptr,
    items_ptr,
    hubs_ptr,
    counts_ptr,
    index_ptr,
    score_ptr,
    score_target_ptr,
    score_source_ptr,
    # sizes, scalars, flags
    H: tl.constexpr,
    slope,
    FROM_NODES: tl.constexpr,
    # tiles
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """The programs of a hub share its chunks; each of them merges all its slots, ``BLOCK_S`` a step."""
    offs_h = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    for hub in range(tl.program_id(0), tl.load(counts_ptr + 1), tl.num_programs(0)):
        row = tl.load(hubs_ptr + hub * 3)
        first_slot = tl.load(hubs_ptr + hub * 3 + 1)
        last_slot = tl.load(hubs_ptr + hub * 3 + 2)
        largest = tl.full((BLOCK_S, BLOCK_H), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_S, BLOCK_H), tl.float32)
        for slot in range(first_slot, last_slot, BLOCK_S):
            offs_s = slot + tl.arange(0, BLOCK_S)
            mask = (offs_s < last_slot)[:, None] & (offs_h < H)[None, :]
            partial = partial_ptr + offs_s.to(tl.int64)[:, None] * 2 * H + offs_h[None, :]
            slot_largest = tl.load(partial, mask=mask, other=float("-inf"))
            slot_total = tl.load(partial + H, mask=mask, other=0.0)
            largest, total = merge_sums(largest, total, slot_largest, slot_total)
        hub_largest, hub_total = fold_sums(largest, total, 0)
        offs_n = row + tl.arange(0, 1)
        target = load_node_scores(score_target_ptr, offs_n, offs_n >= 0, offs_h, H, FROM_NODES)
        for slot in range(first_slot + tl.program_id(1), last_slot, tl.num_programs(1)):
            _, _, _, first, last = load_item(items_ptr, slot)  # chunks are the first items, in the order of slots
            write_softmax(
                first + tl.arange(0, 1), last + tl.arange(0, 1), hub_largest[None, :], hub_total[None, :], offs_h,
                target, out_ptr, score_ptr, index_ptr, score_source_ptr, slope, H, FROM_NODES, BLOCK_E,
            )  # fmt: skip


def _softmax(
    indptr: Tensor, num_edges: int, out: Tensor, plan: Plan | None, scores: dict[str, Any], slope: float
) -> Tensor:
    N, H = indptr.numel() - 1, out.shape[1]
    if out.numel() == 0:
        return out
    config = tuning.softmax(H, num_edges // N)
    with torch.cuda.device_of(out):
        plan = make_plan(indptr, num_edges) if plan is None else plan
        partial = torch.empty((plan.num_slots, 2, H), dtype=torch.float32, device=out.device)
        shared = {
            "out_ptr": out,
            "partial_ptr": partial,
            "items_ptr": plan.items,
            "counts_ptr": plan.counts,
            "H": H,
            "slope": slope,
            **scores,
        }
        _softmax_rows_kernel[(plan.num_programs * (GROUP_ROWS // config["ROWS"]), triton.cdiv(H, config["BLOCK_H"]))](
            indptr_ptr=indptr.contiguous(), GROUP=GROUP_ROWS, **shared, **config
        )
        if plan.num_hub_programs:
            config = tuning.softmax_hubs(H)
            grid = *tuning.softmax_hubs_programs(plan.num_hub_programs), triton.cdiv(H, config["BLOCK_H"])
            _softmax_hubs_kernel[grid](hubs_ptr=plan.hubs, **shared, **config)
    return out


def softmax(indptr: Tensor, scores: Tensor, *, plan: Plan | None = None) -> Tensor:
    """Softmax over the edges of each row, ``[E, H]``; the parameters are those of :func:`qgnn.reference.softmax`, and
    the graph's plan."""
    out = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    operands = {
        "index_ptr": None,
        "score_ptr": scores.contiguous(),
        "score_target_ptr": None,
        "score_source_ptr": None,
        "FROM_NODES": False,
    }
    return _softmax(indptr, scores.shape[0], out, plan, operands, 1.0)


def attention_scores(
    indptr: Tensor,
    index: Tensor,
    score_target: Tensor,
    score_source: Tensor,
    *,
    negative_slope: float = 0.2,
    plan: Plan | None = None,
) -> Tensor:
    """Attention weights ``[E, H]``; the parameters are those of :func:`qgnn.reference.attention_scores`, and the
    graph's plan."""
    E, H = index.numel(), score_target.shape[1]
    out = torch.empty((E, H), dtype=score_target.dtype, device=score_target.device)
    operands = {
        "index_ptr": index.contiguous(),
        "score_ptr": None,
        "score_target_ptr": score_target.contiguous(),
        "score_source_ptr": score_source.contiguous(),
        "FROM_NODES": True,
    }
    return _softmax(indptr, E, out, plan, operands, float(negative_slope))
