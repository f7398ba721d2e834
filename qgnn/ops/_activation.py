"""ReLU and dropout as operators take them: flags, the dropout's seed, and whether the mask is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from qgnn.activation import Activation, mask_width
from qgnn.ops._backends import STREAM_DROPOUT

SCHEMA = "bool relu, int threshold, Tensor? dropout_seed, bool keep_mask"
CHOICES = {"threshold": range((1 << 16) + 1)}


def make_activation(
    like: Tensor,
    num_rows: int,
    width: int,
    relu: bool,
    threshold: int,
    seed: Tensor | None,
    keep_mask: bool,
) -> Activation | None:
    """The epilogue with room for its mask, or ``None`` if there is nothing to apply."""
    if not (relu or threshold):
        return None
    mask = None
    if keep_mask:
        mask = torch.empty((num_rows, mask_width(width)), dtype=torch.uint8, device=like.device)
    return Activation(relu, threshold, seed, STREAM_DROPOUT, mask)


def dropout_of(threshold: int, seed: Tensor | None) -> Activation | None:
    """Dropout alone, whose mask is not kept."""
    return Activation(False, threshold, seed, STREAM_DROPOUT, None) if threshold else None


def fake_mask(like: Tensor, num_rows: int, width: int, relu: bool, threshold: int, keep_mask: bool) -> Tensor:
    """Shape of the mask that an op hands to its backward; nothing is empty in floats, as every result left out."""
    if not keep_mask or not (relu or threshold):
        return like.new_empty(0)
    return like.new_empty((num_rows, mask_width(width)), dtype=torch.uint8)


def check_mask_kept(owner: str, relu: bool, threshold: int, keep_mask: bool) -> None:
    """Raise if a backward pass would lack the mask."""
    if (relu or threshold) and not keep_mask:
        raise ValueError(f"'qgnn::{owner}' expects 'keep_mask' where its activation has a backward pass (got False)")
