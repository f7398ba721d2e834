"""What the rows at the two ends of each edge of a CSR graph make: their dot product, head by head, or their sum.

    out[e, h] = <x_target[i], x_source[index[e]]>_h * target_scale[i, h] * source_scale[index[e], h]
    out[e, f] = x_target[i, f] * target_scale[i, h] + x_source[index[e], f] * source_scale[index[e], h]

for the edges ``e`` from ``indptr[i]`` to ``indptr[i + 1]`` of row ``i``; a head ``h`` is one of H equal blocks of
columns. Rows are walked by the items of a plan (``spmm_plan``), so many programs share the edges of a hub.

Numerics: codes are multiplied and summed in int32, exactly (up to 131,071 columns a head), and scaled in fp32; floats
are multiplied and summed in fp32. Each operation of a sum of rows is rounded. One program writes an edge:
deterministic. A NaN scale or value reaches exactly the edges of its row. Offsets are 64-bit.

Oracle: qgnn.reference.sddmm
"""

import torch
import triton
import triton.language as tl
from qgnn.kernels import tuning
from qgnn.kernels.memory import column_offsets, head_offsets, head_scale_strides, readable_width
from qgnn.kernels.rounding import to_fp32
from qgnn.kernels.spmm_plan import GROUP_ROWS, Plan, load_item, make_plan
from qgnn.kernels.spmm_rows import lane_rows, load_lanes
from torch import Tensor


@triton.jit
def head_columns(first_head, first, D: tl.constexpr, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """``BLOCK_D`` columns, from the ``first`` on, of each of ``BLOCK_H`` heads side by side, and which exist."""
    if HEADS == 1:
        offs_f = first + tl.arange(0, BLOCK_D)
        return offs_f, offs_f < D
    else:
        flat = tl.arange(0, BLOCK_H * BLOCK_D)
        offs_d = first + flat % BLOCK_D
        offs_f = (first_head + flat // BLOCK_D) * D + offs_d
        return offs_f, (offs_d < D) & (offs_f < HEADS * D)


@triton.jit
def load_factors(ptr, offs_row, mask_row, offs_f, mask_f, stride_n: tl.constexpr, stride_f):
    """Columns ``offs_f`` of the rows ``offs_row`` ([R, E]): int32 codes or fp32 values [R, E, BLOCK_F]."""
    offs = (offs_row * stride_n)[:, :, None] + column_offsets(offs_f, stride_f)[None, None, :]
    x = tl.load(ptr + offs, mask=mask_row[:, :, None] & mask_f[None, None, :], other=0)
    return x.to(tl.int32) if x.dtype == tl.int8 else x.to(tl.float32)


@triton.jit
def load_target_factors(ptr, offs_row, mask_row, offs_f, mask_f, stride_n: tl.constexpr, stride_f, WIDTH: tl.constexpr):
    """:func:`load_factors`, of ``WIDTH`` columns if it is not 0, with zeros for whatever a source row may hold behind
    its end."""
    if WIDTH == 0:
        return load_factors(ptr, offs_row, mask_row, offs_f, mask_f, stride_n, stride_f)
    else:
        x = load_factors(ptr, offs_row, mask_row, offs_f, offs_f < WIDTH, stride_n, stride_f)
        return tl.where(mask_f[None, None, :], x, 0)


@triton.jit
def multiply_rows(
    target,
    ptr,
    offs_row,
    mask_row,
    offs_f,
    mask_f,
    stride_n: tl.constexpr,
    stride_f,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Dot products of ``target`` ([R, 1, BLOCK_F]) with the columns ``offs_f`` of the rows ``offs_row`` ([R, E]):
    [R, E, BLOCK_H], or [R, E] of a single head."""
    mask_read = mask_f if WIDTH == 0 else offs_f < WIDTH
    products = target * load_factors(ptr, offs_row, mask_row, offs_f, mask_read, stride_n, stride_f)
    if HEADS == 1:
        return tl.sum(products, axis=2)
    else:
        return tl.sum(products.reshape(R, E, BLOCK_H, BLOCK_D), axis=3)


@triton.jit
def load_scales(ptr, offs_row, mask_row, offs_h, stride_n, stride_h, HEADS: tl.constexpr):
    """Scales of rows ([R, E]) and heads: fp32 [R, E, BLOCK_H], or [R, E] of a single head."""
    if HEADS == 1:
        return tl.load(ptr + offs_row * stride_n, mask=mask_row, other=0.0).to(tl.float32)
    else:
        offs = (offs_row * stride_n)[:, :, None] + (offs_h * stride_h)[None, None, :]
        mask = mask_row[:, :, None] & (offs_h < HEADS)[None, None, :]
        return tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _sddmm_dot_kernel(
    # outputs
    out_ptr,
    # inputs
    items_ptr,
    counts_ptr,
    indptr_ptr,
    index_ptr,
    x_target_ptr,
    x_source_ptr,
    target_scale_ptr,
    source_scale_ptr,
    # sizes
    D: tl.constexpr,
    HEADS: tl.constexpr,
    TARGET_WIDTH: tl.constexpr,
    SOURCE_WIDTH: tl.constexpr,
    # strides
    stride_tn: tl.constexpr,
    stride_tf,
    stride_sn: tl.constexpr,
    stride_sf,
    stride_tsn,
    stride_tsh,
    stride_ssn,
    stride_ssh,
    # flags
    IS_INT8: tl.constexpr,
    HAS_TARGET_SCALE: tl.constexpr,
    HAS_SOURCE_SCALE: tl.constexpr,
    # tiles
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program owns ``BLOCK_H`` heads of the edges of ``ROWS`` rows of every item that comes its turn. The rows
    advance together, ``BLOCK_E`` edges a step; target rows that fit one tile are read once. Of the programs that share
    a chunk, the first takes it all."""
    ONE_TILE: tl.constexpr = D <= BLOCK_D
    PARTS: tl.constexpr = GROUP // ROWS
    pid = tl.program_id(0)
    first_head = tl.program_id(1) * BLOCK_H
    offs_h = first_head + tl.arange(0, BLOCK_H)
    offs_m = (pid % PARTS) * ROWS + tl.arange(0, ROWS)
    for item in range(pid // PARTS, tl.load(counts_ptr), tl.num_programs(0) // PARTS):
        row, num_rows, slot, first, last = load_item(items_ptr, item)
        if pid % PARTS * ROWS < num_rows:
            start, stop = load_lanes(indptr_ptr, row, num_rows, slot, first, last, offs_m, ROWS)
            offs_n, mask_n = lane_rows(row, num_rows, slot, offs_m, GROUP)
            target_row, mask_t = offs_n[:, None], mask_n[:, None]
            if HAS_TARGET_SCALE:
                target_scale = load_scales(target_scale_ptr, target_row, mask_t, offs_h, stride_tsn, stride_tsh, HEADS)
            if ONE_TILE:
                offs_f, mask_f = head_columns(first_head, 0, D, HEADS, BLOCK_H, BLOCK_D)
                target = load_target_factors(
                    x_target_ptr, target_row, mask_t, offs_f, mask_f, stride_tn, stride_tf, TARGET_WIDTH
                )
            for step in range(0, tl.max(stop - start, axis=0), BLOCK_E):
                offs_e = start[:, None] + step + tl.arange(0, BLOCK_E)[None, :]  # [ROWS, BLOCK_E]
                mask_e = offs_e < stop[:, None]
                source_row = tl.load(index_ptr + offs_e, mask=mask_e, other=0).to(tl.int64)
                if ONE_TILE:
                    dot = multiply_rows(
                        target, x_source_ptr, source_row, mask_e, offs_f, mask_f, stride_sn, stride_sf, SOURCE_WIDTH,
                        HEADS, ROWS, BLOCK_E, BLOCK_H, BLOCK_D,
                    )  # fmt: skip
                else:
                    SHAPE: tl.constexpr = (ROWS, BLOCK_E) if HEADS == 1 else (ROWS, BLOCK_E, BLOCK_H)
                    dot = tl.zeros(SHAPE, tl.int32 if IS_INT8 else tl.float32)
                    for first_col in range(0, D, BLOCK_D):
                        offs_f, mask_f = head_columns(first_head, first_col, D, HEADS, BLOCK_H, BLOCK_D)
                        target = load_target_factors(
                            x_target_ptr, target_row, mask_t, offs_f, mask_f, stride_tn, stride_tf, TARGET_WIDTH
                        )
                        dot += multiply_rows(
                            target, x_source_ptr, source_row, mask_e, offs_f, mask_f, stride_sn, stride_sf,
                            SOURCE_WIDTH, HEADS, ROWS, BLOCK_E, BLOCK_H, BLOCK_D,
                        )  # fmt: skip
                score = dot.to(tl.float32)
                if HAS_TARGET_SCALE:
                    score *= target_scale
                if HAS_SOURCE_SCALE:
                    score *= load_scales(source_scale_ptr, source_row, mask_e, offs_h, stride_ssn, stride_ssh, HEADS)
                if HEADS == 1:
                    tl.store(out_ptr + offs_e, score, mask=mask_e)
                else:
                    offs, mask = head_offsets(offs_e, mask_e, offs_h, HEADS)
                    tl.store(out_ptr + offs, score, mask=mask)


@triton.jit
def load_scaled_rows(
    ptr,
    scale_ptr,
    offs_row,
    mask_row,
    offs_f,
    F: tl.constexpr,
    HEADS: tl.constexpr,
    stride_n: tl.constexpr,
    stride_f,
    stride_scale_n,
    stride_scale_h,
    HAS_SCALE: tl.constexpr,
):
    """Columns ``offs_f`` of the rows ``offs_row`` ([R, E]) times their scales: fp32 [R, E, BLOCK_F]."""
    offs = (offs_row * stride_n)[:, :, None] + column_offsets(offs_f, stride_f)[None, None, :]
    mask = mask_row[:, :, None] & (offs_f < F)[None, None, :]
    x = to_fp32(tl.load(ptr + offs, mask=mask, other=0))
    if HAS_SCALE:
        if HEADS == 1:
            x *= tl.load(scale_ptr + offs_row * stride_scale_n, mask=mask_row, other=0.0).to(tl.float32)[:, :, None]
        else:
            offs_h = offs_f // (F // HEADS)
            offs_scale = (offs_row * stride_scale_n)[:, :, None] + (offs_h * stride_scale_h)[None, None, :]
            x *= tl.load(scale_ptr + offs_scale, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _sddmm_add_kernel(
    # outputs
    out_ptr,
    # inputs
    items_ptr,
    counts_ptr,
    indptr_ptr,
    index_ptr,
    x_target_ptr,
    x_source_ptr,
    target_scale_ptr,
    source_scale_ptr,
    # sizes
    F: tl.constexpr,
    HEADS: tl.constexpr,
    # strides
    stride_tn: tl.constexpr,
    stride_tf,
    stride_sn: tl.constexpr,
    stride_sf,
    stride_tsn,
    stride_tsh,
    stride_ssn,
    stride_ssh,
    # flags
    HAS_TARGET_SCALE: tl.constexpr,
    HAS_SOURCE_SCALE: tl.constexpr,
    # tiles
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program owns ``BLOCK_F`` columns of the edges of ``ROWS`` rows of every item that comes its turn, whose
    target rows it reads once. Of the programs that share a chunk, the first takes it all."""
    PARTS: tl.constexpr = GROUP // ROWS
    pid = tl.program_id(0)
    offs_f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    offs_m = (pid % PARTS) * ROWS + tl.arange(0, ROWS)
    for item in range(pid // PARTS, tl.load(counts_ptr), tl.num_programs(0) // PARTS):
        row, num_rows, slot, first, last = load_item(items_ptr, item)
        if pid % PARTS * ROWS < num_rows:
            start, stop = load_lanes(indptr_ptr, row, num_rows, slot, first, last, offs_m, ROWS)
            offs_n, mask_n = lane_rows(row, num_rows, slot, offs_m, GROUP)
            target = load_scaled_rows(
                x_target_ptr, target_scale_ptr, offs_n[:, None], mask_n[:, None], offs_f, F, HEADS, stride_tn,
                stride_tf, stride_tsn, stride_tsh, HAS_TARGET_SCALE,
            )  # fmt: skip
            for step in range(0, tl.max(stop - start, axis=0), BLOCK_E):
                offs_e = start[:, None] + step + tl.arange(0, BLOCK_E)[None, :]  # [ROWS, BLOCK_E]
                mask_e = offs_e < stop[:, None]
                source_row = tl.load(index_ptr + offs_e, mask=mask_e, other=0).to(tl.int64)
                source = load_scaled_rows(
                    x_source_ptr, source_scale_ptr, source_row, mask_e, offs_f, F, HEADS, stride_sn, stride_sf,
                    stride_ssn, stride_ssh, HAS_SOURCE_SCALE,
                )  # fmt: skip
                offs, mask = head_offsets(offs_e, mask_e, offs_f, F)
                # Nothing here is read again, unlike the rows that are gathered: those are to stay in the cache.
                tl.store(out_ptr + offs, target + source, mask=mask, eviction_policy="evict_first")


def sddmm(
    indptr: Tensor,
    index: Tensor,
    x_target: Tensor,
    x_source: Tensor,
    *,
    op: str = "dot",
    heads: int = 1,
    target_scale: Tensor | None = None,
    source_scale: Tensor | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """One result an edge, fp32: dots ``[E]``, with several heads ``[E, H]``, or sums ``[E, F]``; the parameters are
    those of :func:`qgnn.reference.sddmm`, and the graph's plan."""
    (N, F), E, D = x_target.shape, index.numel(), x_target.shape[1] // heads
    is_int8 = x_target.dtype == torch.int8
    if is_int8 != (x_source.dtype == torch.int8):
        raise TypeError(
            f"'sddmm' expects both operands in int8 or both in a floating-point type (got {x_target.dtype} and "
            f"{x_source.dtype})"
        )
    if D > tuning.MAX_INT32_TERMS and is_int8 and op == "dot":
        raise ValueError(
            f"'sddmm' expects at most {tuning.MAX_INT32_TERMS} columns of codes, the longest sum that int32 "
            f"holds (got {D}); split the columns and add the results"
        )
    shape = (E, F) if op == "add" else (E,) if heads == 1 else (E, heads)
    out = torch.empty(shape, dtype=torch.float32, device=x_target.device)
    if out.numel() == 0:
        return out
    config = tuning.sddmm_add(F, E // N) if op == "add" else tuning.sddmm(D, E // N, heads)
    stride_tsn, stride_tsh = head_scale_strides(target_scale)
    stride_ssn, stride_ssh = head_scale_strides(source_scale)
    with torch.cuda.device_of(x_target):
        plan = make_plan(indptr, E) if plan is None else plan
        shared = {
            "out_ptr": out,
            "items_ptr": plan.items,
            "counts_ptr": plan.counts,
            "indptr_ptr": indptr.contiguous(),
            "index_ptr": index.contiguous(),
            "x_target_ptr": x_target,
            "x_source_ptr": x_source,
            "target_scale_ptr": target_scale,
            "source_scale_ptr": source_scale,
            "HEADS": heads,
            "stride_tn": x_target.stride(0),
            "stride_tf": x_target.stride(1),
            "stride_sn": x_source.stride(0),
            "stride_sf": x_source.stride(1),
            "stride_tsn": stride_tsn,
            "stride_tsh": stride_tsh,
            "stride_ssn": stride_ssn,
            "stride_ssh": stride_ssh,
            "HAS_TARGET_SCALE": target_scale is not None,
            "HAS_SOURCE_SCALE": source_scale is not None,
            "GROUP": GROUP_ROWS,
            **config,
        }
        programs = plan.num_programs * (GROUP_ROWS // config["ROWS"])
        if op == "add":
            _sddmm_add_kernel[(programs, triton.cdiv(F, config["BLOCK_F"]))](F=F, **shared)
        else:
            # Codes of one head are read in whole vectors. Behind a row of floats there may be a NaN, which a factor of
            # zero does not silence, and behind a head there is the next one.
            in_vectors = is_int8 and heads == 1
            _sddmm_dot_kernel[(programs, triton.cdiv(heads, config["BLOCK_H"]))](
                D=D,
                TARGET_WIDTH=readable_width(x_target) if in_vectors else 0,
                SOURCE_WIDTH=readable_width(x_source) if in_vectors else 0,
                IS_INT8=is_int8,
                **shared,
            )
    return out
