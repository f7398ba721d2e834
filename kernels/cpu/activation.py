"""A function of each element of a matrix and dropout behind it in C, forward and backward.

Numerics: bit-equal to the reference, ELU's exponential and the codes of its derivative too; sums of columns are added
up in 16 parts of the rows, in order. Half types are converted before and after.

Oracle: qgnn.reference.activation, activation_backward
"""

from typing import Any

import torch
from qgnn.kernels.cpu.epilogue import activation_arguments
from qgnn.kernels.cpu.library import PARTS, empty_floats, launch, rows_of, stream_key
from torch import Tensor

_KINDS = {"none": 0, "relu": 1, "leaky_relu": 2, "elu": 3}


def activation(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    kind: str = "none",
    slope: float = 0.0,
    dropout: Any = None,
    mask: Tensor | None = None,
    derivative: Tensor | None = None,
    steps: float = 0.0,
    seed: Tensor | None = None,
    stream: int = 0,
) -> Tensor:
    """``drop(act(x + bias + residual))``, [N, F] of ``x``'s type; parameters as of the reference."""
    N, F = x.shape
    y = empty_floats(N, F)
    rows = rows_of(x, torch.float32)
    other = None if residual is None else rows_of(residual, torch.float32)
    codes = derivative if derivative is not None and derivative.dtype == torch.uint8 else None
    values = None
    if derivative is not None and codes is None:
        values = derivative if derivative.dtype == torch.float32 else empty_floats(N, F)
    _, _, *drop = activation_arguments(dropout)
    launch(
        "qgnn_activation_forward",
        *(y, mask, codes, values, rows, None if bias is None else bias.detach().float().contiguous(), other),
        *(_KINDS[kind], float(slope), int(kind == "relu"), *drop),
        *(float(steps), seed, stream_key(stream), N, F, rows.stride(0), 0 if other is None else other.stride(0)),
    )
    if derivative is not None and values is not None and values is not derivative:
        derivative.copy_(values)
    return y.to(x.dtype)


def activation_backward(
    grad: Tensor,
    mask: Tensor | None = None,
    derivative: Tensor | None = None,
    *,
    slope: float = 0.0,
    factor: float = 1.0,
    dropout: Any = None,
    sum_columns: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradient before an activation, and the sums of its columns if they are wanted; parameters as of the reference."""
    N, F = grad.shape
    dx, sums = empty_floats(N, F), empty_floats(PARTS, F) if sum_columns else None
    rows = rows_of(grad, torch.float32)
    codes = derivative if derivative is not None and derivative.dtype == torch.uint8 else None
    values = None if derivative is None or codes is not None else derivative.float()
    _, _, threshold, seed, key, _ = activation_arguments(dropout)
    launch(
        "qgnn_activation_backward",
        *(dx, sums, rows, mask, codes, values, float(slope), float(factor), threshold, seed, key),
        *(N, F, rows.stride(0), PARTS),
    )
    return dx.to(out_dtype or grad.dtype), None if sums is None else sums.sum(0)
