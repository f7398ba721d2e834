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

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers of at most 8 bits without a zero point, which integer kernels multiply."""
        return False

    @property
    def scales_slices(self) -> bool:
        """Whether a slice, or with ``dim=None`` a tensor, has one scale; otherwise blocks of fixed length do."""
        return self._block_size is None

    def encode(self, x: Tensor, dim: int = -1, seed: int | Tensor | None = None) -> QTensor:
        """Quantize ``x``, with scales of slices or of blocks along ``dim``.

        Temporaries stay below about 64 MiB, however large ``x`` is, but for slices that are longer than that, and for
        a copy where ``dim`` is neither the first nor the last of several dimensions.

        Args:
            x: Values of any floating type and shape with at least one dimension.
            dim: The dimension along which values share a scale: that over which a product sums. Packed codes fill
                whole bytes along it.
            seed: A seed for stochastic rounding; ``None`` rounds to nearest.

        Raises:
            TypeError: If ``x`` is not a floating-point tensor.
            ValueError: If ``x`` is a scalar.
        """
        owner = f"{type(self).__name__}.encode"
        if not x.is_floating_point():
            raise TypeError(f"'{owner}' expects a floating-point tensor (got {x.dtype}); convert it with 'x.float()'")
        if x.dim() == 0:
            raise ValueError(f"'{owner}' expects a tensor with at least one dimension (got a scalar)")
        values = x.detach().movedim(dim, -1)
        rows = values.reshape(prod(values.shape[:-1]), values.shape[-1])
        from_end = dim if dim < 0 else dim - x.dim()
        layout = self._layout(tuple(x.shape), from_end)
        storage, scales, zero = self._encode(rows, layout, None if seed is None else make_seed(seed, x.device))

        def restored(t: Tensor) -> Tensor:
            return t.reshape(*values.shape[:-1], t.shape[-1]).movedim(-1, from_end)

        return QTensor(
            restored(storage),
            restored(scales),
            None if zero is None else restored(zero),
            block_size=self._block_size,
            dtype=x.dtype,
            layout=layout,
        )

    def _encode(self, rows: Tensor, layout: Layout, seed: Tensor | None) -> Encoded:
        """What is stored of a matrix."""
        R, F = rows.shape
        if rows.numel() == 0:  # its types and widths are those of a matrix that has elements
            storage, scales, zero = self._encode(rows.new_zeros(1, 1), layout, None)
            width = scales.shape[1] if self._block_size is None else 0

            def nothing(t: Tensor, columns: int) -> Tensor:
                return t.new_zeros(1, dtype=t.dtype)

        step = max(1, _CHUNK // F)
        parts = []
        for first in range(0, R, step):
            part = rows[first : first + step].float()
            bits16 = None if seed is None else random_bits16(first, part.shape[0], F, seed)
            codes, scales, zero = self._encode_rows(part, bits16)
            parts.append((layout.store(codes), scales, zero))

    @property
    def _block_size(self) -> int | None:
        """Values that share a scale; ``None`` for slices."""
        return None

    @abstractmethod
    def _layout(self, shape: tuple[int, ...], dim: int) -> Layout:
        """How codes of values of a shape, along a dimension counted from the end, are stored."""

    @abstractmethod
    def _encode_rows(self, rows: Tensor, bits16: Tensor | None) -> Encoded:
        """Codes ``[R, F]`` (integers, or the values of floating-point ones, of any type), scales ``[R, B]`` as they are
        stored, and zero points, of fp32 rows with at least one element."""

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
