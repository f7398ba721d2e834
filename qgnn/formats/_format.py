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

    @property
    @abstractmethod
    def bits(self) -> int:
        """Width of a code, sign included."""

    @property
    @abstractmethod
    def bits_per_value(self) -> float:
        """Bits of a code, and its share of what a block of fixed length keeps; what a slice keeps comes on top."""

    @property
    def memory_density(self) -> float:
        """Values in the bytes of one fp32 number: ``32 / bits_per_value``."""
        return 32 / self.bits_per_value

    @property
    def arithmetic_density(self) -> float | None:
        """Multiply-accumulate units in the area of one of fp32, as published by `Rouhani et al. (NeurIPS 2020)
        <https://proceedings.neurips.cc/paper/2020/hash/747e32ab0fea7fbd2ad9ec03daa3f840-Abstract.html>`_; ``None`` for
        formats that they give no number of."""
        return None

    def encode(self, x: Tensor, dim: int = -1, seed: int | Tensor | None = None) -> QTensor:
        raise NotImplementedError

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


def check_width(owner: str, name: str, value: object, low: int, high: int, why: str = "") -> None:
    """Raise unless ``value`` is an integer from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"'{owner}' expects '{name}' to be an int (got {type(value).__name__})")
    if not low <= value <= high:
        raise ValueError(f"'{owner}' expects '{name}' from {low} to {high} (got {value}){why}")


def check_kind(owner: str, kind: object, kinds: tuple[str, ...]) -> None:
    """Raise unless ``kind`` is one of ``kinds``."""
    if kind not in kinds:
        error = ValueError if isinstance(kind, str) else TypeError
        raise error(f"'{owner}' expects 'kind' to be one of {kinds} (got {kind!r})")


def only_width(fmt: Format, bits: int) -> Format:
    """``fmt``, which exists in one width, if that is the one asked for."""
    if bits != fmt.bits:
        raise ValueError(
            f"'{fmt}' has codes of {fmt.bits} bits only (got {bits}); formats with a choice of widths are Int, FixedPoint "
            f"and MSFP"
        )
    return fmt
