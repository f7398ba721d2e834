"""Absmax quantization with stochastic rounding in C.

Numerics: bit-equal to the reference. A row is read once from memory: its maximum is found and its codes are made while
it lies in the first-level cache.

Oracle: qgnn.reference.quantize
"""

import torch
from qgnn.kernels.cpu.library import empty_codes, launch, rows_of, stream_key
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
        return codes, torch.zeros(scale_shape)
    scale = torch.empty(scale_shape)
    x = rows_of(x, torch.float32)
    operands = (codes, scale, x, seed, stream_key(stream), (1 << (bits - 1)) - 1, N, F, x.stride(0))
    if granularity == "tensor":
        launch("qgnn_quantize_tensor", *operands)
    else:
        launch("qgnn_quantize_groups", *operands, min(block_size, F) if granularity == "block" else F)
    return codes, scale
