"""Epilogues that the kernel tests share."""

import torch
from torch import Tensor

from qgnn import rng
from qgnn.activation import Activation, dropout_threshold, mask_width

# ReLU, the probability of dropping an element, and whether the bits are kept
ACTIVATIONS = {
    "relu": (True, 0.0, True),
    "dropout": (False, 0.3, True),
    "relu_dropout": (True, 0.5, True),
    "relu_dropout_no_mask": (True, 0.5, False),
    "drop_everything": (True, 1.0, True),
}


def activation(name: str, num_rows: int, num_columns: int, device: str, seed: int = 5) -> Activation:
    """An epilogue whose mask holds bits that none would write."""
    relu, probability, keeps_mask = ACTIVATIONS[name]
    shape = (num_rows, mask_width(num_columns))
    return Activation(
        relu=relu,
        threshold=dropout_threshold(probability),
        seed=rng.make_seed(seed, device) if probability else None,
        stream=2,
        mask=torch.full(shape, 0xA5, dtype=torch.uint8, device=device) if keeps_mask else None,
    )


def random_mask(num_rows: int, num_columns: int, device: str) -> Tensor:
    """Bits of a mask; those behind the last column are 0."""
    bits = torch.rand(num_rows, 8 * mask_width(num_columns), device=device) < 0.5
    bits[:, num_columns:] = False
    weights = 1 << torch.arange(8, device=device)
    return (bits.view(num_rows, mask_width(num_columns), 8) * weights).sum(2).to(torch.uint8)
