"""Sparse aggregation over a CSR graph, for int8 rows with scales and for float rows.

    out[i, :] = row_factor[i] * sum_e weight[e] * x_scale[index[e]] * x[index[e], :] + bias

over the edges ``e`` from ``indptr[i]`` to ``indptr[i + 1]``, then ReLU and dropout. ``spmm_requantize`` rounds the
result (without bias) to int8 rows with a scale each. Weights may differ by head, a block of columns.

Codes of 32 columns and more are summed on tensor cores (``spmm_tile``), all else by fused multiply-adds
(``spmm_rows``); both walk the items of a plan (``spmm_plan``), and the partial sums of long rows are added by a second
kernel (``spmm_hubs``).

Numerics: sums are fp32, in an order that depends only on the graph and the shapes: no atomics, so results repeat bit
for bit. On tensor cores the products of weight and scale are rounded to fp16. ``row_factor`` is applied after the sum.
A NaN scale or value reaches exactly the rows that aggregate it. Offsets are 64-bit.

Oracle: qgnn.reference.spmm, spmm_requantize
"""

from typing import Any

import torch
from qgnn.kernels import tuning
from qgnn.kernels.epilogue import epilogue_arguments
from qgnn.kernels.memory import code_stride, empty_codes, scale_stride
from qgnn.kernels.quantize import quantize
from qgnn.kernels.spmm_extremum import spmm_extremum
from qgnn.kernels.spmm_hubs import empty_partials, spmm_hubs
from qgnn.kernels.spmm_plan import Plan, make_plan
from qgnn.kernels.spmm_rows import spmm_rows
from qgnn.kernels.spmm_tile import spmm_tile
from torch import Tensor

__all__ = ["Plan", "make_plan", "spmm", "spmm_extremum", "spmm_requantize"]


def _aggregate(
    indptr: Tensor,
    index: Tensor,
    x: Tensor,
    weight: Tensor | None,
    x_scale: Tensor | None,
    plan: Plan | None,
    output: dict[str, Any],
) -> None:
    """Aggregate into the tensors of ``output``, the arguments of ``write_rows``."""
    N, E, F = indptr.numel() - 1, index.numel(), x.shape[1]
    heads = 1 if weight is None or weight.dim() == 1 else weight.shape[1]
    gather = {
        "indptr_ptr": indptr.contiguous(),
        "index_ptr": index.contiguous(),
        "weight_ptr": None if weight is None else weight.contiguous(),
        "x_scale_ptr": x_scale,
        "HEADS": heads,
        "stride_sn": 0 if x_scale is None else scale_stride(x_scale),
        "HAS_WEIGHT": weight is not None,
        "HAS_SCALE": x_scale is not None,
    }
    whole_rows = output["QMAX"] > 0
    strategy = tuning.spmm_strategy(
        F, x.dtype, heads=heads, whole_rows=whole_rows, code_bytes=x.numel(), l2_bytes=tuning.l2_bytes(x.device)
    )
    with torch.cuda.device_of(x):
        plan = make_plan(indptr, E) if plan is None else plan
        partial = empty_partials(plan, F, x.device)
        if strategy.on_tensor_cores and E > 0:
            spmm_tile(plan, partial, x, gather, output, strategy.block_f)
        else:
            config = tuning.spmm_rows(F, E // N, has_mask=output["HAS_MASK"])
            spmm_rows(plan, partial, x, gather, output, config)
        spmm_hubs(plan, partial, output)


def spmm(
    indptr: Tensor,
    index: Tensor,
    x: Tensor,
    *,
    weight: Tensor | None = None,
    x_scale: Tensor | None = None,
    row_factor: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    activation: Any = None,
    plan: Plan | None = None,
) -> Tensor:
    """Aggregated rows ``[N, F]``; the parameters are those of :func:`qgnn.reference.spmm`, and the graph's plan."""
    N, F = indptr.numel() - 1, x.shape[1]
    if out_dtype is None:
        out_dtype = x.dtype if x.is_floating_point() else torch.float32
    out = torch.empty((N, F), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    output = {
        "out_ptr": out,
        "scale_ptr": None,
        "seed_ptr": None,
        "stream": 0,
        "F": F,
        "stride_on": F,
        "QMAX": 0,
        "STOCHASTIC": False,
        **epilogue_arguments(activation, bias=bias, row_factor=row_factor),
    }
    _aggregate(indptr, index, x, weight, x_scale, plan, output)
    return out


def spmm_requantize(
    indptr: Tensor,
    index: Tensor,
    x: Tensor,
    *,
    weight: Tensor | None = None,
    x_scale: Tensor | None = None,
    row_factor: Tensor | None = None,
    bits: int = 8,
    seed: Tensor | None = None,
    stream: int = 0,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes and row scales of the aggregation; the parameters are those of :func:`qgnn.reference.spmm_requantize`, and
    the graph's plan.

    Rows that one program cannot hold, since they are too wide or of several heads, are written in fp32 and rounded by
    a second kernel."""
    N, F = indptr.numel() - 1, x.shape[1]
    if F > tuning.SPMM_REQUANTIZE_MAX_COLUMNS or (weight is not None and weight.dim() == 2 and weight.shape[1] > 1):
        rows = spmm(
            indptr, index, x, weight=weight, x_scale=x_scale, row_factor=row_factor, out_dtype=torch.float32, plan=plan
        )
        return quantize(rows, bits=bits, seed=seed, stream=stream)
    codes = empty_codes(N, F, x.device)
    if codes.numel() == 0:
        return codes, torch.zeros(N, dtype=torch.float32, device=x.device)
    scale = torch.empty(N, dtype=torch.float32, device=x.device)
    output = {
        "out_ptr": codes,
        "scale_ptr": scale,
        "seed_ptr": seed,
        "stream": stream,
        "F": F,
        "stride_on": code_stride(F),
        "QMAX": (1 << (bits - 1)) - 1,
        "STOCHASTIC": seed is not None,
        **epilogue_arguments(None, bias=None, row_factor=row_factor),
    }
    _aggregate(indptr, index, x, weight, x_scale, plan, output)
    return codes, scale
