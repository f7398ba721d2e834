"""What every number format offers."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from qgnn.qtensor import QTensor


class Format(ABC):
    """A number format: how values become codes and what codes stand for.

    Formats are frozen dataclasses. Their ``str`` is a short name, such as ``int8``, ``msfp12`` or ``mxfp4``, which
    :func:`qgnn.formats.parse` takes.
    """

    bits: int  # width of a code, sign included

    @property
    @abstractmethod
    def bits_per_value(self) -> float:
        """Bits of a code, and its share of what a block of fixed length keeps; what a slice keeps comes on top."""

    @abstractmethod
    def encode(self, x: Tensor, dim: int = -1, seed: int | Tensor | None = None) -> QTensor:
        """Quantize ``x``, with scales of slices or of blocks along ``dim``.

        Args:
            x: Values of any floating type and shape with at least one dimension.
            dim: The dimension along which values share a scale: that over which a product sums.
            seed: A seed for stochastic rounding; ``None`` rounds to nearest.

        Raises:
            TypeError: If ``x`` is not a floating-point tensor.
        """

    @abstractmethod
    def with_bits(self, bits: int) -> Format:
        """The same format with codes of another width.

        Raises:
            ValueError: If there is no such format.
        """

    @abstractmethod
    def __str__(self) -> str:
        """The name that :func:`qgnn.formats.parse` takes."""

    def decode(self, q: QTensor) -> Tensor:
        """The values that the codes stand for, in the type that was encoded."""
        return q.dequantize()

    def quantize(self, x: Tensor, dim: int = -1, seed: int | Tensor | None = None) -> Tensor:
        """``decode(encode(x))``: ``x`` with the error of this format."""
        return self.decode(self.encode(x, dim, seed))
