"""What the kernels of attention share: who works on which row, tiles of rows by head, dropout, and the accumulators of
hubs.

A warp owns a target row (or, going back to the sources, a source row) with all of its heads, up to 1024 columns: tiles
are [edges, heads, columns of a head], and each of the edges of a step has its own sum until the row's end. The work
items are those of aggregation (``spmm_plan``). A chunk of a hub leaves its accumulators in a slot; the same kernel,
started again with ``HUBS``, takes a hub's from its slots, in their order, where it else walks edges, and ends as it
does for any row.

A slot holds tiles [H, D], then vectors [H], all fp32: those of a forward pass are the sum, then the sum of
exponentials and the largest score ``m``, which the exponents of both are relative to.

Numerics: fp32, in an order that depends only on the plan and the shapes. Scores are natural; an exponential is
``exp2(e * log2(e) - m * log2(e))`` with one rounding for the difference.
"""

import triton
import triton.language as tl
from qgnn.kernels.memory import column_offsets
from qgnn.kernels.rounding import (
    absmax_scale,
    counter_hash,
    hash_keys,
    load_seed,
    round_codes,
    row_absmax,
    to_fp32,
)
from qgnn.kernels.spmm_plan import load_item

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def share_work(counts_ptr, GROUP: tl.constexpr, HUBS: tl.constexpr):
    """``(first, end, step)`` of the items, or of the hubs, that a program deals with."""
    if HUBS:
        return tl.program_id(0), tl.load(counts_ptr + 1), tl.num_programs(0)
    else:
        return tl.program_id(0) // GROUP, tl.load(counts_ptr), tl.num_programs(0) // GROUP


@triton.jit
def locate_row(unit, items_ptr, hubs_ptr, indptr_ptr, GROUP: tl.constexpr, HUBS: tl.constexpr):
    """``(is there one, row, slot or -1, first edge, edge behind the last one)`` of the row of an item that a program
    owns; of a hub, its slots in place of edges. Of the programs that share a chunk, the first takes it all."""
    if HUBS:
        row = tl.load(hubs_ptr + unit * 3)
        start, stop = tl.load(hubs_ptr + unit * 3 + 1), tl.load(hubs_ptr + unit * 3 + 2)
        return row >= 0, row.to(tl.int64), row * 0 - 1, start, stop
    else:
        lane = tl.program_id(0) % GROUP
        row, num_rows, slot, first, last = load_item(items_ptr, unit)
        is_row = lane < num_rows
        start = tl.load(indptr_ptr + row + lane, mask=is_row, other=0)
        stop = tl.load(indptr_ptr + row + lane + 1, mask=is_row, other=0)
        start = tl.where(slot >= 0, first, start)
        stop = tl.where(slot >= 0, last, stop)
        return is_row, row.to(tl.int64) + lane, slot, start, stop


@triton.jit
def locate_columns(H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """Heads [BLOCK_H] of a program and their columns within a row [BLOCK_H, BLOCK_D], each with its mask."""
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, BLOCK_D)
    mask_h = offs_h < H
    return offs_h, mask_h, offs_h[:, None] * D + offs_d[None, :], mask_h[:, None] & (offs_d < D)[None, :]


@triton.jit
def load_tile(ptr, rows, mask_e, offs_hd, mask_hd, stride_n: tl.constexpr, stride_f):
    """fp32 [BLOCK_E, BLOCK_H, BLOCK_D] of rows (int64 [BLOCK_E]): codes without their scales, or values."""
    offs = (rows * stride_n)[:, None, None] + column_offsets(offs_hd, stride_f)[None, :, :]
    return to_fp32(tl.load(ptr + offs, mask=mask_e[:, None, None] & mask_hd[None, :, :], other=0))


@triton.jit
def load_row(ptr, row, offs_hd, mask_hd, stride_n: tl.constexpr, stride_f):
    """:func:`load_tile` of a single row: [BLOCK_H, BLOCK_D]."""
    return to_fp32(tl.load(ptr + row * stride_n + column_offsets(offs_hd, stride_f), mask=mask_hd, other=0))


@triton.jit
def load_values(
    ptr, scale_ptr, rows, mask_e, offs_h, mask_h, offs_hd, mask_hd, H: tl.constexpr, stride_n: tl.constexpr, stride_f,
    HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """:func:`load_tile`, codes times their scales."""
    x = load_tile(ptr, rows, mask_e, offs_hd, mask_hd, stride_n, stride_f)
    if HAS_SCALE:
        x *= load_heads(scale_ptr, rows, mask_e, offs_h, mask_h, H)[:, :, None]
    return x


@triton.jit
def load_row_values(
    ptr, scale_ptr, row, offs_h, mask_h, offs_hd, mask_hd, H: tl.constexpr, stride_n: tl.constexpr, stride_f,
    HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """:func:`load_values` of a single row: [BLOCK_H, BLOCK_D]."""
    x = load_row(ptr, row, offs_hd, mask_hd, stride_n, stride_f)
    if HAS_SCALE:
        x *= tl.load(scale_ptr + row * H + offs_h, mask=mask_h, other=0.0)[:, None]
    return x


@triton.jit
def load_heads(ptr, rows, mask_e, offs_h, mask_h, stride_n):
    """fp32 [BLOCK_E, BLOCK_H]: what rows (int64 [BLOCK_E]) have a value a head of."""
    offs = (rows * stride_n)[:, None] + offs_h[None, :]
    return tl.load(ptr + offs, mask=mask_e[:, None] & mask_h[None, :], other=0.0).to(tl.float32)


@triton.jit
def add_edge_rows(
    x, edge_ptr, offs_e, mask_e, offs_hd, mask_hd, stride_n: tl.constexpr, stride_f, HAS_EDGE: tl.constexpr
):
    """``x`` [BLOCK_E, BLOCK_H, BLOCK_D] and the rows of edges at positions ``offs_e``."""
    if HAS_EDGE:
        x += load_tile(edge_ptr, offs_e.to(tl.int64), mask_e, offs_hd, mask_hd, stride_n, stride_f)
    return x


@triton.jit
def load_keys_and_values(
    key_ptr,
    key_scale_ptr,
    value_ptr,
    value_scale_ptr,
    edge_ptr,
    index,
    offs_e,
    mask_e,
    offs_h,
    mask_h,
    offs_hd,
    mask_hd,
    H: tl.constexpr,
    stride_key_n: tl.constexpr,
    stride_key_f,
    stride_value_n: tl.constexpr,
    stride_value_f,
    stride_edge_n: tl.constexpr,
    stride_edge_f,
    HAS_SCALE: tl.constexpr,
    HAS_EDGE: tl.constexpr,
):
    """Keys and values of edges [BLOCK_E, BLOCK_H, BLOCK_D], and what products with either have yet to be multiplied
    by [BLOCK_E, BLOCK_H]."""
    key = load_tile(key_ptr, index, mask_e, offs_hd, mask_hd, stride_key_n, stride_key_f)
    value = load_tile(value_ptr, index, mask_e, offs_hd, mask_hd, stride_value_n, stride_value_f)
    key_scale = tl.full((offs_e.shape[0], offs_h.shape[0]), 1.0, tl.float32)
    value_scale = key_scale
    if HAS_SCALE:
        key_scale = load_heads(key_scale_ptr, index, mask_e, offs_h, mask_h, H)
        value_scale = load_heads(value_scale_ptr, index, mask_e, offs_h, mask_h, H)
    if HAS_EDGE:
        edge = load_tile(edge_ptr, offs_e.to(tl.int64), mask_e, offs_hd, mask_hd, stride_edge_n, stride_edge_f)
        key = key * key_scale[:, :, None] + edge
        value = value * value_scale[:, :, None] + edge
        key_scale = tl.full((offs_e.shape[0], offs_h.shape[0]), 1.0, tl.float32)
        value_scale = key_scale
    return key, value, key_scale, value_scale


@triton.jit
def scaled_sum(weights, tile, acc):
    """``acc + weights * tile``, the weights [BLOCK_E, BLOCK_H] being the heads'."""
    return tl.fma(tile, tl.broadcast_to(weights[:, :, None], tile.shape), acc)


@triton.jit
def exponentials(e, base):
    """``exp(e) / exp2(base)``."""
    return tl.exp2(tl.fma(e, LOG2E, tl.broadcast_to(-base, e.shape)))


@triton.jit
def additive_scores(
    target, source, edge_score_ptr, offs_e, mask_e, offs_h, mask_h, H: tl.constexpr, HAS_EDGE: tl.constexpr
):
    """Sums of both ends' scores and of those of edges at positions ``offs_e``. The order of the operands is the same in
    all passes, so that the sign is."""
    score = target + source
    if HAS_EDGE:
        score += load_heads(edge_score_ptr, offs_e.to(tl.int64), mask_e, offs_h, mask_h, H)
    return score


@triton.jit
def keep_factors(offs_e, offs_h, seed, threshold, factor, H: tl.constexpr):
    """What dropout multiplies the weights of edges (their positions in CSR order) by: [BLOCK_E, BLOCK_H].

    Two heads share a hash, and both compute it: they belong to different threads."""
    PAIRS: tl.constexpr = triton.next_power_of_2(H) // 2 if H > 2 else 1
    base = offs_e.to(tl.int64) * PAIRS
    k0, k1 = hash_keys(seed, (base >> 32).to(tl.uint32))
    low = base.to(tl.uint32)[:, None] + (offs_h // 2).to(tl.uint32)[None, :]
    bits = counter_hash(low, k0[:, None], k1[:, None]) >> ((offs_h % 2) * 16).to(tl.uint32)[None, :]
    return tl.where((bits & 0xFFFF).to(tl.int32) >= threshold, factor, 0.0)


@triton.jit
def finite_maximum(m):
    """``m`` as exponents are relative to it: of nothing but -inf they are to be -inf and not NaN, since other parts of
    a row may hold more."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def advance_maximum(m, e):
    """The largest scores after a step with scores ``e``, and what sums made before it are multiplied by: exactly 1
    where no score was larger, else an error of rounding would grow with every step."""
    largest = tl.maximum(m, e)
    return largest, tl.where(m == largest, 1.0, exponentials(m, finite_maximum(largest) * LOG2E))


@triton.jit
def merge_edges(m, total, acc):
    """``(m, total, sum)`` of a row from those of each of a step's edges."""
    largest = tl.max(m, axis=0)
    scale = exponentials(m, (finite_maximum(largest) * LOG2E)[None, :])
    return largest, tl.sum(total * scale, axis=0), tl.sum(acc * scale[:, :, None], axis=0)


@triton.jit
def row_statistics(m, total, start, stop):
    """``(1 / total, logarithm of the row's sum of exponentials)``, both 0 of a row without edges.

    A ``total`` of 0 comes from scores of nothing but -inf: as in a softmax, their weights are NaN."""
    total = tl.where(total > 0, total, float("nan"))
    has_edges = stop > start
    return tl.where(has_edges, tl.div_rn(1.0, total), 0.0), tl.where(has_edges, m + tl.log2(total) * LN2, 0.0)


@triton.jit
def normalized(mean, total):
    """A sum over a row's edges weighted by ``p``, over the sum of ``p``. That is 1 but for an error that all of a row's
    ``p`` share, for ``L`` is rounded; left in, it would show where the mean is subtracted from what it is of."""
    return tl.div_rn(mean, tl.where(total > 0, total, 1.0))


@triton.jit
def round_grad(
    grad,
    row,
    offs_h,
    seed_ptr,
    stream,
    H: tl.constexpr,
    D: tl.constexpr,
    QMAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Codes (int8) of a row of the gradient, fp32 [BLOCK_H, BLOCK_D], and a scale a head."""
    scale, inv = absmax_scale(row_absmax(grad), QMAX)
    seed = load_seed(seed_ptr, stream) if STOCHASTIC else 0
    return round_codes(grad, inv, seed, row * H + offs_h, 0, D, STOCHASTIC, BLOCK_H, BLOCK_D), scale


@triton.jit
def load_grad(
    grad_ptr,
    row,
    offs_h,
    offs_hd,
    mask_hd,
    stride_n: tl.constexpr,
    stride_f,
    seed_ptr,
    stream,
    H: tl.constexpr,
    D: tl.constexpr,
    QMAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A row of the gradient: its codes, a scale a head, and what these stand for; with ``QMAX`` 0 the row as it is."""
    grad = load_row(grad_ptr, row, offs_hd, mask_hd, stride_n, stride_f)
    if QMAX == 0:
        return grad, 1.0, grad
    else:
        codes, scale = round_grad(grad, row, offs_h, seed_ptr, stream, H, D, QMAX, STOCHASTIC, BLOCK_H, BLOCK_D)
        return codes, scale, to_fp32(codes) * scale[:, None]


@triton.jit
def sum_tiles(partial_ptr, first, last, offs_hd, mask_hd, stride_pn: tl.constexpr, BLOCK_E: tl.constexpr):
    """Sum of a tile over slots: [BLOCK_H, BLOCK_D]."""
    acc = tl.zeros((BLOCK_E, offs_hd.shape[0], offs_hd.shape[1]), tl.float32)
    for slot in range(first, last, BLOCK_E):
        offs_s = (slot + tl.arange(0, BLOCK_E)).to(tl.int64)
        acc += load_tile(partial_ptr, offs_s, offs_s < last, offs_hd, mask_hd, stride_pn, 1)
    return tl.sum(acc, axis=0)


@triton.jit
def sum_heads(partial_ptr, first, last, offs_h, mask_h, stride_pn: tl.constexpr, BLOCK_E: tl.constexpr):
    """Sum of a vector over slots: [BLOCK_H]."""
    acc = tl.zeros((BLOCK_E, offs_h.shape[0]), tl.float32)
    for slot in range(first, last, BLOCK_E):
        offs_s = (slot + tl.arange(0, BLOCK_E)).to(tl.int64)
        acc += load_heads(partial_ptr, offs_s, offs_s < last, offs_h, mask_h, stride_pn)
    return tl.sum(acc, axis=0)


@triton.jit
def merge_weighted_sums(
    partial_ptr,
    first,
    last,
    offs_h,
    mask_h,
    offs_hd,
    mask_hd,
    H: tl.constexpr,
    D: tl.constexpr,
    stride_pn: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """``(m, total, sum)`` of a hub from those of its slots in a forward pass."""
    largest = tl.full((BLOCK_E, BLOCK_H), float("-inf"), tl.float32)
    for slot in range(first, last, BLOCK_E):
        offs_s = (slot + tl.arange(0, BLOCK_E)).to(tl.int64)
        other = load_heads(partial_ptr + H * D + H, offs_s, offs_s < last, offs_h, mask_h, stride_pn)
        largest = tl.maximum(largest, tl.where((offs_s < last)[:, None], other, float("-inf")))
    m = tl.max(largest, axis=0)
    base = finite_maximum(m) * LOG2E
    acc = tl.zeros((BLOCK_E, BLOCK_H, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_E, BLOCK_H), tl.float32)
    for slot in range(first, last, BLOCK_E):
        offs_s = (slot + tl.arange(0, BLOCK_E)).to(tl.int64)
        mask_s = offs_s < last
        other = load_heads(partial_ptr + H * D + H, offs_s, mask_s, offs_h, mask_h, stride_pn)
        scale = exponentials(tl.where(mask_s[:, None], other, float("-inf")), base[None, :])
        total = tl.fma(load_heads(partial_ptr + H * D, offs_s, mask_s, offs_h, mask_h, stride_pn), scale, total)
        tile = load_tile(partial_ptr, offs_s, mask_s, offs_hd, mask_hd, stride_pn, 1)
        acc = scaled_sum(scale, tile, acc)
    return m, tl.sum(total, axis=0), tl.sum(acc, axis=0)


@triton.jit
def store_weighted_sum(
    m,
    total,
    y,
    partial_ptr,
    slot,
    offs_h,
    mask_h,
    offs_hd,
    mask_hd,
    H: tl.constexpr,
    D: tl.constexpr,
    stride_pn: tl.constexpr,
):
    """What :func:`merge_weighted_sums` reads."""
    partial = partial_ptr + slot.to(tl.int64) * stride_pn
    tl.store(partial + offs_hd, y, mask=mask_hd)
    tl.store(partial + H * D + offs_h, total, mask=mask_h)
    tl.store(partial + H * D + H + offs_h, m, mask=mask_h)


@triton.jit
def write_row(
    m, total, y, start, stop, row, out_ptr, lse_ptr, offs_h, mask_h, offs_hd, mask_hd, H: tl.constexpr, D: tl.constexpr
):
    """The end of a forward pass: a row of ``out`` and of ``L``."""
    inverse, lse = row_statistics(m, total, start, stop)
    # Nothing here is read again, unlike the rows that are gathered: those are to stay in the cache.
    out = out_ptr + row * (H * D) + offs_hd
    tl.store(out, (y * inverse[:, None]).to(out_ptr.dtype.element_ty), mask=mask_hd, eviction_policy="evict_first")
    tl.store(lse_ptr + row * H + offs_h, lse, mask=mask_h)
