"""QTensor: integer codes with the scale that gives them meaning."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class QTensor:
    """A quantized tensor, ``x = codes * scale (+ zero)``.

    A plain record of tensors, not a tensor subclass: it never enters a state dict. Products and sums that take one in
    place of a tensor hand its gradient, straight through the rounding, to :attr:`origin`.

    Args:
        codes: Integer codes, one a value.
        scale: fp32, as many dimensions as ``codes``. A size of 1 means that the whole dimension shares the scale;
            a last dimension of ``ceil(F / block_size)`` means one scale a block of columns.
        zero: The value of code 0, shaped like ``scale``; ``None`` for symmetric formats.
        block_size: Columns of a block, for scales of blocks.
        dtype: The floating type that was quantized, and that :meth:`dequantize` returns.
        origin: The tensor that was quantized, where it needs a gradient; ``None`` for constants.
        packed: The :class:`qgnn.ops.Packed` rows that products keep in place of the codes, the same for all of them;
            ``None``: each its own, if any.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    block_size: int | None = None
    dtype: torch.dtype = torch.float32
    origin: Tensor | None = None
    packed: Any = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the quantized values."""
        return self.codes.shape

    def size(self, dim: int | None = None) -> torch.Size | int:
        """:attr:`shape`, or its entry ``dim``, as of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def unbind(self) -> tuple[QTensor, ...]:
        """Its parts along the first dimension, as of a tensor."""

        def parts(t: Tensor | None) -> tuple[Tensor | None, ...]:
            return (None,) * len(codes) if t is None else t.expand(len(codes), *t.shape[1:]).unbind()

        codes = self.codes.unbind()
        rows = zip(codes, *map(parts, (self.scale, self.zero, self.origin)), strict=True)
        return tuple(replace(self, codes=c, scale=s, zero=z, origin=o, packed=None) for c, s, z, o in rows)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points together."""
        return sum(t.nbytes for t in (self.codes, self.scale, self.zero) if t is not None)

    def dequantize(self) -> Tensor:
        """The values that the codes stand for, of type :attr:`dtype`."""
        value = self.codes.float() * self._per_value(self.scale)
        if self.zero is not None:
            value += self._per_value(self.zero)
        return value.to(self.dtype)

    def _per_value(self, t: Tensor) -> Tensor:
        if self.block_size is None:
            return t
        return t.repeat_interleave(self.block_size, dim=-1)[..., : self.codes.shape[-1]]

    def __repr__(self) -> str:
        return (
            f"QTensor({self.codes.dtype} {tuple(self.shape)}, scale {tuple(self.scale.shape)}, "
            f"{self.nbytes} bytes for {self.codes.numel()} values of {self.dtype})"
        )
