"""Packed blocks that products keep of their rows, by ``QConfig.save``."""

from __future__ import annotations

import torch
from torch import Tensor

from qgnn import ops
from qgnn.config import QConfig
from qgnn.formats import Blocks
from qgnn.functional.blocks import MANY, edges_of, pack, with_block_size
from qgnn.qtensor import QTensor
from qgnn.rng import make_rounding_seed


def packed_rows(x: Tensor, blocks: Blocks, seed: int | Tensor | None) -> ops.Packed:
    """What products keep of the rows ``x`` in place of codes.

    A length of blocks that is left open is that for large tensors: a compiler does not know the number of rows.
    """
    blocks = with_block_size(blocks, MANY)
    seed = make_rounding_seed(seed, x.device)
    c = pack(x, blocks, seed)
    return ops.Packed(c.packed, c.low, c.step, edges_of(blocks, x.device), seed, blocks.bits, c.columns)


def kept_rows(config: QConfig, x: Tensor | QTensor, weight: Tensor, seed: int | Tensor | None) -> ops.Packed:
    """The packed rows that a product keeps for the gradient of ``weight``, as operators take them. Codes of a constant
    stay as they are: they live anyway."""
    rows, packed = (x.origin, x.packed) if isinstance(x, QTensor) else (x, None)
    if rows is None or not isinstance(config.save, Blocks):
        return ops.Packed()
    if packed is None:  # drawn without gradients, too: a reentrant checkpoint repeats what was drawn in such a pass
        seed = make_rounding_seed(seed, weight.device)
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return ops.Packed()
    return packed_rows(rows, config.save, seed) if packed is None else packed
