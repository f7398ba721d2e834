"""Sums and extrema of neighbor rows in C.

    out[i, :] = row_factor[i] * sum_e weight[e] * x_scale[index[e]] * x[index[e], :] + bias

and its activation, over the edges ``e`` from ``indptr[i]`` to ``indptr[i + 1]``, for int8 codes ``x`` and for float
rows (16-bit ones are converted before and after). ``spmm_requantize`` rounds the rows to int8 while they are in cache.

Numerics: an element is summed in fp32 by one thread in the order of its edges, fused multiply-adds where the processor
has them; so results depend neither on the number of threads nor on the layout of ``x``. Extrema are exact.

Oracle: qgnn.reference.spmm, spmm_requantize, spmm_extremum
"""

from typing import Any

import torch
from qgnn.kernels.cpu.epilogue import activate, activation_arguments
from qgnn.kernels.cpu.library import empty_codes, empty_floats, launch, rows_of, stream_key
from qgnn.kernels.cpu.quantize import quantize
from torch import Tensor

_SLICE = 1024  # columns that spmm_requantize keeps in cache: SLICE in spmm.c


def _floats(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().float().contiguous()


def _rows(x: Tensor) -> Tensor:
    return rows_of(x, torch.int8 if x.dtype == torch.int8 else torch.float32)


def _graph(indptr: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    return indptr.contiguous(), index.to(indptr.dtype).contiguous()


def _sizes(indptr: Tensor, index: Tensor, x: Tensor, x_scale: Tensor | None) -> tuple[int, ...]:
    """N, S, E, F and stride of ``x``; whether indices have 64 bits, ``x`` holds codes, and all of it shares a scale."""
    one_scale = x_scale is not None and x_scale.numel() == 1
    sizes = (indptr.numel() - 1, x.shape[0], index.numel(), x.shape[1], x.stride(0))
    return (*sizes, index.dtype == torch.int64, x.dtype == torch.int8, one_scale)


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
) -> Tensor:
    """Weighted sum of neighbor rows, ``[N, F]``; see the reference for the operands."""
    if out_dtype is None:
        out_dtype = x.dtype if x.is_floating_point() else torch.float32
    N, F = indptr.numel() - 1, x.shape[1]
    if weight is not None and weight.dim() == 2:
        out = _spmm_heads(indptr, index, x, weight, x_scale, row_factor, bias)
        activate(out, activation)
        return out.to(out_dtype)
    out = empty_floats(N, F)
    if out.numel() == 0:
        return out.to(out_dtype)
    indptr, index = _graph(indptr, index)
    rows, x_scale = _rows(x), _floats(x_scale)
    operands = (rows, _floats(weight), x_scale, _floats(row_factor), _floats(bias))
    sizes = _sizes(indptr, index, rows, x_scale)
    launch("qgnn_spmm", out, indptr, index, *operands, *activation_arguments(activation), *sizes)
    return out.to(out_dtype)


def _spmm_heads(
    indptr: Tensor,
    index: Tensor,
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor | None,
    row_factor: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """fp32 sums with weights [E, H], head by head: each has its own columns."""
    heads, H = [], weight.shape[1]
    for h, columns in enumerate(x.tensor_split(H, dim=1)):
        own_bias = None if bias is None else bias.tensor_split(H)[h]
        options = {"x_scale": x_scale, "row_factor": row_factor, "bias": own_bias, "out_dtype": torch.float32}
        heads.append(spmm(indptr, index, columns, weight=weight[:, h], **options))
    return torch.cat(heads, dim=1)


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
) -> tuple[Tensor, Tensor]:
    """:func:`spmm` with the result rounded to codes int8 ``[N, F]`` and scale fp32 ``[N]``."""
    N, F = indptr.numel() - 1, x.shape[1]
    if F > _SLICE or (weight is not None and weight.dim() == 2):
        out = spmm(indptr, index, x, weight=weight, x_scale=x_scale, row_factor=row_factor, out_dtype=torch.float32)
        return quantize(out, bits=bits, seed=seed, stream=stream)
    if N * F == 0:
        return torch.empty((N, F), dtype=torch.int8), torch.zeros(N, dtype=torch.float32)
    codes, scale = empty_codes(N, F), empty_floats(N)
    indptr, index = _graph(indptr, index)
    rows, x_scale = _rows(x), _floats(x_scale)
    operands = (rows, _floats(weight), x_scale, _floats(row_factor), seed, stream_key(stream), (1 << (bits - 1)) - 1)
    launch("qgnn_spmm_requantize", codes, scale, indptr, index, *operands, *_sizes(indptr, index, rows, x_scale))
    return codes, scale


def spmm_extremum(
    indptr: Tensor,
    index: Tensor,
    x: Tensor,
    *,
    weight: Tensor | None = None,
    x_scale: Tensor | None = None,
    largest: bool = True,
) -> tuple[Tensor, Tensor]:
    """Element-wise maximum or minimum of neighbor rows ``[N, F]``, and the edge that each comes from."""
    N, F = indptr.numel() - 1, x.shape[1]
    out_dtype = x.dtype if x.is_floating_point() else torch.float32
    arg_dtype = index.dtype
    indptr, index = _graph(indptr, index)
    out, arg = empty_floats(N, F), torch.empty((N, F), dtype=index.dtype)
    if out.numel() == 0:
        return out.to(out_dtype), arg.to(arg_dtype)
    rows, x_scale = _rows(x), _floats(x_scale)
    operands = (rows, _floats(weight), x_scale, largest)
    launch("qgnn_spmm_extremum", out, arg, indptr, index, *operands, *_sizes(indptr, index, rows, x_scale))
    return out.to(out_dtype), arg.to(arg_dtype)


def spmm_extremum_dx(
    index: Tensor, grad: Tensor, arg: Tensor, num_sources: int, *, weight: Tensor | None = None
) -> Tensor:
    """Gradient ``[S, F]`` of the rows that :func:`spmm_extremum` chose from; threads share the work by columns."""
    N, F = grad.shape
    dx = torch.zeros((num_sources, F), dtype=torch.float32)
    rows, arg = grad.detach().float().contiguous(), arg.contiguous()
    index, is_wide = index.to(arg.dtype).contiguous(), arg.dtype == torch.int64
    launch("qgnn_spmm_extremum_dx", dx, index, rows, arg, _floats(weight), N, F, is_wide)
    return dx.to(grad.dtype)
