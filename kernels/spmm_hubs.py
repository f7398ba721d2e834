"""The end of every aggregation: what is applied to sums before they are written, and the sums of hubs from the partial
sums of their chunks.

Numerics: the slots of a hub are added in an order that depends only on their number, in fp32.

Oracle: qgnn.reference.spmm, spmm_requantize
"""

from typing import Any

import torch
import triton
import triton.language as tl
from qgnn.kernels import tuning
from qgnn.kernels.epilogue import finish_rows
from qgnn.kernels.rounding import absmax_scale, load_seed, round_codes, row_absmax
from qgnn.kernels.spmm_plan import Plan
from torch import Tensor


def partial_stride(num_columns: int) -> int:
    """Row stride of the buffer of partial sums: whole vectors, whatever the width."""
    return triton.cdiv(num_columns, 4) * 4


def empty_partials(plan: Plan, num_columns: int, device: torch.device) -> Tensor:
    """The buffer of partial sums of the hubs' chunks: ``[slots, partial_stride(F)]``."""
    return torch.empty((plan.num_slots, partial_stride(num_columns)), dtype=torch.float32, device=device)


@triton.jit
def write_rows(
    y,
    offs_n,
    mask_n,
    first_col,
    # outputs
    out_ptr,
    scale_ptr,
    mask_ptr,
    # epilogue
    row_factor_ptr,
    bias_ptr,
    dropout_seed_ptr,
    dropout_stream,
    threshold,
    factor,
    seed_ptr,
    stream,
    # sizes and flags
    F: tl.constexpr,
    stride_on: tl.constexpr,
    HAS_ROW_FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
    DROPOUT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    QMAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Write the sums ``y`` (fp32 [R, C], of the int64 rows ``offs_n`` and the columns from ``first_col`` on) behind
    their epilogue: as floats, or with ``QMAX`` as the codes and scales of whole rows."""
    y = finish_rows(
        y, offs_n, mask_n, first_col, row_factor_ptr, bias_ptr, mask_ptr, dropout_seed_ptr, dropout_stream, threshold,
        factor, F, HAS_ROW_FACTOR, HAS_BIAS, RELU, DROPOUT, HAS_MASK, R, C,
    )  # fmt: skip
    offs_f = first_col + tl.arange(0, C)
    out = out_ptr + offs_n[:, None] * stride_on + offs_f[None, :]
    if QMAX == 0:
        # Nothing here is read again, unlike the rows that are gathered: those are to stay in the cache.
        mask = mask_n[:, None] & (offs_f < F)[None, :]
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")
    else:
        y = tl.where((offs_f < F)[None, :], y, 0.0)  # what lies behind the rows of x must not enter the absmax
        scale, inv = absmax_scale(row_absmax(y), QMAX)
        seed = load_seed(seed_ptr, stream) if STOCHASTIC else 0
        q = round_codes(y, inv, seed, offs_n, 0, F, STOCHASTIC, R, C)
        tl.store(out, q, mask=mask_n[:, None] & (offs_f < stride_on)[None, :])  # whole vectors, whatever the width
        tl.store(scale_ptr + offs_n, scale, mask=mask_n)


@triton.jit(do_not_specialize=["stream", "dropout_stream", "threshold"])
def _spmm_hubs_kernel(
    # outputs
    out_ptr,
    scale_ptr,
    mask_ptr,
    # inputs
    partial_ptr,
    hubs_ptr,
    counts_ptr,
    # epilogue
    row_factor_ptr,
    bias_ptr,
    dropout_seed_ptr,
    dropout_stream,
    threshold,
    factor,
    seed_ptr,
    stream,
    # sizes and strides
    F: tl.constexpr,
    stride_on: tl.constexpr,
    stride_pn: tl.constexpr,
    # flags
    HAS_ROW_FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
    DROPOUT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    QMAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    # tiles
    BLOCK_S: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program owns ``BLOCK_F`` columns of the hubs that come its turn and adds their slots, ``BLOCK_S`` a step."""
    first_col = tl.program_id(1) * BLOCK_F
    offs_f = first_col + tl.arange(0, BLOCK_F)
    for hub in range(tl.program_id(0), tl.load(counts_ptr + 1), tl.num_programs(0)):
        row = tl.load(hubs_ptr + hub * 3)
        last = tl.load(hubs_ptr + hub * 3 + 2)
        acc = tl.zeros((BLOCK_S, BLOCK_F), tl.float32)
        for slot in range(tl.load(hubs_ptr + hub * 3 + 1), last, BLOCK_S):
            offs_s = slot + tl.arange(0, BLOCK_S)
            mask = (offs_s < last)[:, None] & (offs_f < stride_pn)[None, :]
            acc += tl.load(
                partial_ptr + offs_s.to(tl.int64)[:, None] * stride_pn + offs_f[None, :], mask=mask, other=0.0
            )
        y = tl.sum(acc, axis=0)[None, :]
        offs_n = row.to(tl.int64) + tl.arange(0, 1)
        write_rows(
            y, offs_n, offs_n >= 0, first_col, out_ptr, scale_ptr, mask_ptr, row_factor_ptr, bias_ptr,
            dropout_seed_ptr, dropout_stream, threshold, factor, seed_ptr, stream, F, stride_on, HAS_ROW_FACTOR,
            HAS_BIAS, RELU, DROPOUT, HAS_MASK, QMAX, STOCHASTIC, 1, BLOCK_F,
        )  # fmt: skip


def spmm_hubs(plan: Plan, partial: Tensor, output: dict[str, Any]) -> None:
    """Write the rows of the hubs. ``output`` holds the arguments of :func:`write_rows` by name."""
    if not plan.num_hub_programs:
        return
    config = tuning.spmm_hubs(output["F"], output["QMAX"] > 0)
    _spmm_hubs_kernel[(plan.num_hub_programs, triton.cdiv(output["F"], config["BLOCK_F"]))](
        partial_ptr=partial,
        hubs_ptr=plan.hubs,
        counts_ptr=plan.counts,
        stride_pn=partial.stride(0),
        **output,
        **config,
    )
