"""ReLU and dropout as the epilogue of products and sums, and their backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from qgnn.activation import Activation, mask_width
from qgnn.reference._common import compute_dtype, stream_seed
from qgnn.rng import random_bits16

_BITS = tuple(1 << bit for bit in range(8))


def _pack(passes: Tensor) -> Tensor:
    """Bits of a mask from booleans: [R, F] -> uint8 [R, ceil(F / 8)]."""
    R, F = passes.shape
    padded = torch.nn.functional.pad(passes, (0, 8 * mask_width(F) - F))
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=passes.device)
    return (padded.view(R, mask_width(F), 8) * weights).sum(2, dtype=torch.uint8)


def _unpack(mask: Tensor, num_columns: int) -> Tensor:
    """Booleans from the bits of a mask: uint8 [R, ceil(F / 8)] -> [R, F]."""
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=mask.device)
    return (mask[:, :, None] & weights).ne(0).flatten(1)[:, :num_columns]


def activate(y: Tensor, activation: Activation, first_row: int = 0) -> Tensor:
    """Rows after ReLU and dropout; their bits are written to the activation's mask.

    Args:
        y: Rows, numbered from ``first_row`` for the random bits and the mask.
        activation: What to apply.
        first_row: Number of the first row.

    Shapes:
        - **input:** ``[R, F]``
        - **output:** ``[R, F]`` of the same type
    """
    passes = ~(y <= 0) if activation.relu else torch.ones_like(y, dtype=torch.bool)  # a NaN passes
    if activation.threshold:
        R, F = y.shape
        seed = stream_seed(activation.seed, activation.stream)
        assert seed is not None
        passes &= random_bits16(first_row, R, F, seed) >= activation.threshold
    if activation.mask is not None:
        activation.mask[first_row : first_row + y.shape[0]] = _pack(passes)
    return torch.where(passes, y * activation.factor, 0)


def masked_grad(grad: Tensor, mask: Tensor, factor: float = 1.0) -> Tensor:
    """Gradient before an activation: that behind it times ``factor`` where the mask has a bit, 0 elsewhere.

    Shapes:
        - **input:** ``grad [N, F]``, ``mask`` uint8 ``[N, ceil(F / 8)]``
        - **output:** ``[N, F]`` of ``grad``'s type; the product is made in fp32 (float64 for float64 input)
    """
    value = grad.to(compute_dtype(grad)) * factor
    return torch.where(_unpack(mask, grad.shape[1]), value, 0).to(grad.dtype)
