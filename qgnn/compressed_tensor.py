"""CompressedTensor: what is kept of a tensor that only a backward pass reads again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qgnn.formats import Blocks


@dataclass(frozen=True)
class CompressedTensor:
    """Packed codes of a tensor, or of its random projection, in blocks; a plain record, no tensor subclass.

    Args:
        packed: Codes, uint8 ``[B, block_size * bits / 8]``.
        low: Offsets of the blocks ``[B]``.
        step: Steps of the blocks ``[B]``.
        blocks: The format, with the length of a block that was used.
        shape: Shape of the tensor.
        dtype: Type of the tensor.
        columns: Columns R' that it was projected to, or 0.
        projection_seed: Seed of the projection's signs, int64 ``[1]``; they are never stored.
    """

    packed: Tensor
    low: Tensor
    step: Tensor
    blocks: Blocks
    shape: torch.Size
    dtype: torch.dtype
    columns: int = 0
    projection_seed: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds."""
        kept = (self.packed, self.low, self.step, self.projection_seed)
        return tuple(t for t in kept if t is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds."""
        return sum(t.nbytes for t in self.tensors)

    def __repr__(self) -> str:
        return f"CompressedTensor({self.dtype} {tuple(self.shape)}, {self.blocks}, {self.nbytes} bytes)"
