"""CompressedTensor: what is kept of a tensor that only a backward pass reads again."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from qgnn.formats import Blocks
from qgnn.qtensor import check_fields


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

    def check(self, owner: str, name: str) -> None:
        """Raise unless the fields fit together: those of a record that was put together by hand may not.

        Args:
            owner: Who was given the record, for the message.
            name: As what.

        Raises:
            TypeError: If a field has the wrong type; types of values are left to who decodes them.
            ValueError: If a size is not that of the tensor's blocks.
        """
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # sizes are no numbers there
            return
        what = f"'{owner}' expects '{name}' as 'compress' makes it"
        check_fields(self, _FIELDS, what)
        size, columns = self.blocks.block_size, self.columns
        fits = columns == 0 if self.projection_seed is None else columns > 0 and len(self.shape) > 1
        if size is None or not fits:
            raise ValueError(f"{what} (got {self.blocks}, {columns} columns, seed {self.projection_seed})")
        num_values = prod(self.shape[:-1]) * columns if columns else prod(self.shape)
        num_blocks = -(-num_values // size)
        expected = [num_blocks, size * self.blocks.bits // 8]
        shapes = [list(t.shape) for t in (self.packed, self.low, self.step)]
        if shapes != [expected, [num_blocks], [num_blocks]]:
            raise ValueError(
                f"{what}: 'packed' {expected}, 'low' and 'step' [{num_blocks}] for values {list(self.shape)} (got "
                f"{', '.join(map(str, shapes))})"
            )

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


_FIELDS: dict[str, Any] = {
    "packed": Tensor,
    "low": Tensor,
    "step": Tensor,
    "blocks": Blocks,
    "shape": torch.Size,
    "dtype": torch.dtype,
    "columns": int,
    "projection_seed": (Tensor, type(None)),
}
