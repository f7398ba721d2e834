"""Sampled dense-dense product: the dot product of the two end rows of each edge of a CSR graph.

    out[e] = <x_target[i], x_source[index[e]]> * target_scale[i] * source_scale[index[e]]

for the edges ``e`` from ``indptr[i]`` to ``indptr[i + 1]`` of row ``i``.

Numerics: codes are multiplied and summed in int32, exactly (F up to 131,072), and scaled in fp32; floats are
multiplied and summed in fp32. One program writes an edge, in CSR order: deterministic. A NaN scale or value reaches
exactly the edges of its row.

Oracle: qgnn.reference.sddmm
"""

import torch
import triton
import triton.language as tl
from qgnn.kernels import tuning
from qgnn.kernels.memory import column_offsets, readable_width, scale_stride
from torch import Tensor

MAX_COLUMNS = 131_072  # 131,072 * 127 * 127 < 2**31: the longest sum that int32 holds whatever the codes


@triton.jit
def load_rows(ptr, offs_row, mask_row, offs_f, stride_n: tl.constexpr, stride_f, WIDTH: tl.constexpr):
    """Columns ``offs_f`` of the rows ``offs_row`` ([R, E]): int32 codes or fp32 values [R, E, BLOCK_F]."""
    offs = (offs_row * stride_n)[:, :, None] + column_offsets(offs_f, stride_f)[None, None, :]
    x = tl.load(ptr + offs, mask=mask_row[:, :, None] & (offs_f < WIDTH)[None, None, :], other=0)
    return x.to(tl.int32) if x.dtype == tl.int8 else x.to(tl.float32)


@triton.jit
def load_target_rows(
    ptr, offs_n, mask_n, offs_f, F: tl.constexpr, stride_n: tl.constexpr, stride_f, WIDTH: tl.constexpr
):
    """:func:`load_rows` of one row each, [R, 1, BLOCK_F], with zeros for whatever a source row may hold behind its
    end."""
    x = load_rows(ptr, offs_n[:, None], mask_n[:, None], offs_f, stride_n, stride_f, WIDTH)
    return x if WIDTH == F else tl.where((offs_f < F)[None, None, :], x, 0)


@triton.jit(do_not_specialize=["N"])
def _sddmm_kernel(
    # outputs
    out_ptr,
    # inputs
    indptr_ptr,
    index_ptr,
    x_target_ptr,
    x_source_ptr,
    target_scale_ptr,
    source_scale_ptr,
    # sizes
    N,
    F: tl.constexpr,
    TARGET_WIDTH: tl.constexpr,
    SOURCE_WIDTH: tl.constexpr,
    # strides
    stride_tn: tl.constexpr,
    stride_tf,
    stride_sn: tl.constexpr,
    stride_sf,
    stride_tsn,
    stride_ssn,
    # flags
    IS_INT8: tl.constexpr,
    HAS_TARGET_SCALE: tl.constexpr,
    HAS_SOURCE_SCALE: tl.constexpr,
    # tiles
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program owns the edges of ``ROWS`` target rows. The rows advance together, ``BLOCK_E`` edges a step; a
    target row that fits one tile is read once."""
    ONE_TILE: tl.constexpr = F <= BLOCK_F
    offs_n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask_n = offs_n < N
    start = tl.load(indptr_ptr + offs_n, mask=mask_n, other=0).to(tl.int64)
    stop = tl.load(indptr_ptr + offs_n + 1, mask=mask_n, other=0).to(tl.int64)
    if HAS_TARGET_SCALE:
        target_scale = tl.load(target_scale_ptr + offs_n * stride_tsn, mask=mask_n, other=0.0)[:, None]
    if ONE_TILE:
        offs_f = tl.arange(0, BLOCK_F)
        target = load_target_rows(x_target_ptr, offs_n, mask_n, offs_f, F, stride_tn, stride_tf, TARGET_WIDTH)

    for step in range(0, tl.max(stop - start, axis=0), BLOCK_E):
        offs_e = start[:, None] + step + tl.arange(0, BLOCK_E)[None, :]  # [ROWS, BLOCK_E]
        mask_e = offs_e < stop[:, None]
        source_row = tl.load(index_ptr + offs_e, mask=mask_e, other=0).to(tl.int64)
        if ONE_TILE:
            source = load_rows(x_source_ptr, source_row, mask_e, offs_f, stride_sn, stride_sf, SOURCE_WIDTH)
            dot = tl.sum(target * source, axis=2)
        else:
            dot = tl.zeros((ROWS, BLOCK_E), tl.int32 if IS_INT8 else tl.float32)
            for first in range(0, F, BLOCK_F):
                offs_f = first + tl.arange(0, BLOCK_F)
                target = load_target_rows(x_target_ptr, offs_n, mask_n, offs_f, F, stride_tn, stride_tf, TARGET_WIDTH)
                source = load_rows(x_source_ptr, source_row, mask_e, offs_f, stride_sn, stride_sf, SOURCE_WIDTH)
                dot += tl.sum(target * source, axis=2)
        score = dot.to(tl.float32)
        if HAS_TARGET_SCALE:
            score *= target_scale
        if HAS_SOURCE_SCALE:
            score *= tl.load(source_scale_ptr + source_row * stride_ssn, mask=mask_e, other=0.0)
        tl.store(out_ptr + offs_e, score, mask=mask_e)


def sddmm(
    indptr: Tensor,
    index: Tensor,
    x_target: Tensor,
    x_source: Tensor,
    *,
    target_scale: Tensor | None = None,
    source_scale: Tensor | None = None,
) -> Tensor:
    """Edge scores, fp32 ``[E]``; the parameters are those of :func:`qgnn.reference.sddmm`."""
    N, F = x_target.shape
    E = index.numel()
    if (x_target.dtype == torch.int8) != (x_source.dtype == torch.int8):
        raise TypeError(
            f"'sddmm' expects both operands in int8 or both in a floating-point type (got {x_target.dtype} and "
            f"{x_source.dtype})"
        )
    if F > MAX_COLUMNS and x_target.dtype == torch.int8:
        raise ValueError(
            f"'sddmm' expects at most {MAX_COLUMNS} columns of codes, the longest sum that int32 holds (got {F}); "
            f"split the columns and add the results"
        )
    out = torch.empty(E, dtype=torch.float32, device=x_target.device)
    if E == 0:
        return out
    config = tuning.sddmm(F, E // N)
    is_int8 = x_target.dtype == torch.int8
    with torch.cuda.device_of(x_target):
        _sddmm_kernel[(triton.cdiv(N, config["ROWS"]),)](
            out_ptr=out,
            indptr_ptr=indptr.contiguous(),
            index_ptr=index.contiguous(),
            x_target_ptr=x_target,
            x_source_ptr=x_source,
            target_scale_ptr=target_scale,
            source_scale_ptr=source_scale,
            N=N,
            F=F,
            # Behind a row of floats there may be a NaN, which a factor of zero does not silence.
            TARGET_WIDTH=readable_width(x_target) if is_int8 else F,
            SOURCE_WIDTH=readable_width(x_source) if is_int8 else F,
            stride_tn=x_target.stride(0),
            stride_tf=x_target.stride(1),
            stride_sn=x_source.stride(0),
            stride_sf=x_source.stride(1),
            stride_tsn=0 if target_scale is None else scale_stride(target_scale),
            stride_ssn=0 if source_scale is None else scale_stride(source_scale),
            IS_INT8=is_int8,
            HAS_TARGET_SCALE=target_scale is not None,
            HAS_SOURCE_SCALE=source_scale is not None,
            **config,
        )
    return out
