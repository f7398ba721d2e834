"""Absmax quantization with stochastic rounding in C.

Numerics: bit-equal to the reference. A row is read once from memory: its maximum is found and its codes are made while
it lies in the first-level cache.

Of a gradient, ``quantize_grad`` also makes the way back through an activation and the sums of the columns, the gradient
of a bias, in the same pass; these sums are added up in 16 parts of the rows, in order.

Oracle: qgnn.reference.quantize, quantize_grad
"""

import torch
from qgnn.kernels.cpu.activation import activation_backward
from qgnn.kernels.cpu.library import PARTS, empty_codes, empty_floats, launch, rows_of, stream_key
from torch import Tensor


def quantize(
    x: Tensor,
    *,
    bits: int = 8,
    granularity: str = "row",
    block_size: int = 128,
    seed: Tensor | None = None,
    stream: int = 0,
) -> tuple[Tensor, Tensor]:
    """Codes int8 ``[N, F]`` and scale fp32 (``[N]``, ``[1]`` or ``[N, ceil(F / block_size)]``) of a matrix."""
    N, F = x.shape
    codes = empty_codes(N, F)
    if granularity == "block":
        scale_shape: tuple[int, ...] = (N, -(-F // block_size))
    else:
        scale_shape = (1,) if granularity == "tensor" else (N,)
    if x.numel() == 0:
        return codes, torch.zeros(scale_shape, dtype=torch.float32)
    scale = empty_floats(*scale_shape)
    x = rows_of(x, torch.float32)
    operands = (codes, scale, x, seed, stream_key(stream), (1 << (bits - 1)) - 1, N, F, x.stride(0))
    if granularity == "tensor":
        launch("qgnn_quantize_tensor", *operands)
    else:
        launch("qgnn_quantize_groups", *operands, min(block_size, F) if granularity == "block" else F)
    return codes, scale


def quantize_grad(
    grad: Tensor,
    *,
    bits: int = 8,
    granularity: str = "row",
    seed: Tensor | None = None,
    stream: int = 0,
    mask: Tensor | None = None,
    factor: float = 1.0,
    sum_columns: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes and scale of the gradient before an activation, and the sums of its columns if they are wanted."""
    N, F = grad.shape
    if granularity != "row" or N * F == 0:
        wide = grad.float()
        if mask is not None:
            wide, _ = activation_backward(wide, mask, factor=factor)
        codes, scale = quantize(wide, bits=bits, granularity=granularity, seed=seed, stream=stream)
        return codes, scale, wide.sum(0) if sum_columns else None
    codes, scale = empty_codes(N, F), empty_floats(N)
    sums = empty_floats(PARTS, F) if sum_columns else None
    rows, work = rows_of(grad, torch.float32), empty_floats(PARTS, F)
    rule = (seed, stream_key(stream), (1 << (bits - 1)) - 1)
    sizes = (N, F, rows.stride(0), PARTS)
    launch("qgnn_quantize_grad", codes, scale, sums, work, rows, mask, float(factor), *rule, *sizes)
    return codes, scale, None if sums is None else sums.sum(0)
