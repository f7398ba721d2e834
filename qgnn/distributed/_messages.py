"""Rows of numbers as what goes over the wire: int8 codes and the fp32 scale of each row, side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from qgnn import ops
from qgnn.rng import make_seed, splitmix64

SCALE_BYTES = 4


def encode(rows: Tensor, seed: Tensor | None) -> Tensor:
    """Codes by stochastic rounding, to nearest without a seed.

    Shapes:
        - **input:** fp32 ``[R, G]``
        - **output:** uint8 ``[R, G + 4]``
    """
    codes, scale = ops.quantize(rows, seed, 8, "row", 1)
    return torch.cat([codes.view(torch.uint8), scale.view(-1, 1).view(torch.uint8)], 1)


def decode(message: Tensor) -> Tensor:
    """The values: fp32 ``[R, G]`` of uint8 ``[R, G + 4]``."""
    codes, scale = message.split([message.shape[1] - SCALE_BYTES, SCALE_BYTES], 1)
    return codes.view(torch.int8).float().mul_(scale.clone(memory_format=torch.contiguous_format).view(torch.float32))


def seed_of(device: torch.device, *numbers: int) -> Tensor:
    """The seed of a rounding that these numbers name: independent ones for different numbers."""
    seed = 0
    for number in numbers:
        seed = splitmix64(seed ^ splitmix64(number & ((1 << 64) - 1)))
    return make_seed(seed, device)
