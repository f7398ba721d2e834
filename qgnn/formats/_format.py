"""What every number format offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from qgnn.layout import Layout
from qgnn.packing import packed_bytes
from qgnn.qtensor import QTensor
from qgnn.reference._common import row_chunks
from qgnn.rng import make_seed

TRACES_FORMATS = torch.__version__ >= "2.12"  # whether torch.compile takes frozen data classes for constants

Encoded = tuple[Tensor, Tensor, Tensor | None]
AnyFormat = TypeVar("AnyFormat", bound="Format")


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
        """Values in the bytes of one fp32 number, ``32 / bits_per_value``."""
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

    def encode(self, x: Tensor, dim: int | None = -1, seed: int | Tensor | None = None) -> QTensor:
        """Quantize ``x``, with scales of slices or of blocks along ``dim``. Codes are constants, without a gradient:
        :meth:`quantize` and :func:`qgnn.functional.quantize` pass one on.

        Beside what is stored, packed codes pass through one or two bytes a value (four for affine ones above 8 bits),
        and slices that do not lie in rows through a copy; all else is made by parts of 2**20 values.

        Args:
            x: Values of any floating type and shape with at least one dimension. Scales are fp32: what is beyond its
                range is infinite.
            dim: The dimension along which values share a scale: that over which a product sums. Packed codes fill
                whole bytes along it. ``None``, for formats without blocks: one scale for the whole tensor.
            seed: A seed for stochastic rounding; ``None`` rounds to nearest.

        Raises:
            TypeError: If ``x`` is not a floating-point tensor.
            ValueError: If ``x`` is a scalar, or ``dim`` is ``None`` for a format with blocks.
            IndexError: If ``x`` has no such ``dim``.
        """
        name = name_of(self)  # first: it may refuse to be traced
        moved, rows = self._rows("encode", x.detach() if isinstance(x, Tensor) else x, dim)
        codes, scales, zero = self._encode_rows(rows, None if seed is None else make_seed(seed, x.device))
        from_end = -1 if dim is None else dim - x.dim() * (dim >= 0)
        layout = self._layout(tuple(x.shape), from_end)
        storage = _stored(codes.view(x.shape).flatten(0, -2) if dim is None and x.dim() > 1 else codes, layout)

        def restored(t: Tensor) -> Tensor:
            return t.reshape(*moved.shape[:-1], t.shape[-1]).movedim(-1, from_end)

        def restored_scale(t: Tensor) -> Tensor:
            return t.reshape((1,) * x.dim()) if dim is None else restored(t)

        return QTensor(
            restored(storage),
            restored_scale(scales),
            None if zero is None else restored_scale(zero),
            block_size=self._block_size,
            dtype=x.dtype,
            layout=layout,
            name=name,
        )

    def _rows(self, name: str, x: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
        """``x`` with the dimension that scales lie along as its last one, and as a matrix."""
        owner = f"{type(self).__name__}.{name}"
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"'{owner}' expects a floating-point tensor (got {kind}); convert it with 'x.float()'")
        if x.dim() == 0:
            raise ValueError(f"'{owner}' expects a tensor with at least one dimension (got a scalar)")
        if dim is None and not self.scales_slices:
            raise ValueError(f"'{owner}' expects the 'dim' that its blocks lie along (got None); give dim=-1")
        if dim is not None and not -x.dim() <= dim < x.dim():
            raise IndexError(f"'{owner}' expects 'dim' from {-x.dim()} to {x.dim() - 1} (got {dim})")
        moved = x if dim is None else x.movedim(dim, -1)
        return moved, moved.reshape(1, -1) if dim is None else moved.reshape(prod(moved.shape[:-1]), moved.shape[-1])

    @property
    def _block_size(self) -> int | None:
        """Values that share a scale; ``None`` for slices."""
        return None

    @abstractmethod
    def _layout(self, shape: tuple[int, ...], dim: int) -> Layout:
        """How codes of values of a shape, along a dimension counted from the end, are stored."""

    @abstractmethod
    def _encode_rows(self, rows: Tensor, seed: Tensor | None) -> Encoded:
        """Codes ``[R, F]`` (integers, or the values of floating-point ones), scales ``[R, B]`` as they are stored, and
        zero points of a matrix."""

    @abstractmethod
    def with_bits(self, bits: int) -> Format:
        """The same format with codes of another width.

        Args:
            bits: The width.

        Raises:
            ValueError: If there is no such format.
        """

    @abstractmethod
    def __str__(self) -> str:
        """The name that :func:`qgnn.formats.parse` takes."""

    def decode(self, q: QTensor) -> Tensor:
        """The values that the codes stand for, in the type that was encoded.

        Args:
            q: As :meth:`encode` returns it.
        """
        return q.dequantize()

    def quantize(self, x: Tensor, dim: int | None = -1, seed: int | Tensor | None = None) -> Tensor:
        """Fake quantization: the values of ``decode(encode(x))``, with the gradient of the identity.

        Args:
            x: Values of any floating type and shape with at least one dimension.
            dim: As in :meth:`encode`.
            seed: As in :meth:`encode`.

        Raises:
            TypeError: If ``x`` is not a floating-point tensor.
            ValueError: If ``x`` is a scalar, or ``dim`` is ``None`` for a format with blocks.
            IndexError: If ``x`` has no such ``dim``.
        """
        return _StraightThrough.apply(x, self, dim, seed)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: Format, dim: int | None, seed: int | Tensor | None) -> Tensor:
        return fmt.decode(fmt.encode(x, dim, seed))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None


def check_traced() -> None:
    """Raise inside a compiler that cannot trace formats, which then leaves the call to eager code if it may."""
    if torch.compiler.is_compiling() and not TRACES_FORMATS:
        raise NotImplementedError(
            "number formats expect torch 2.12 or newer inside a whole graph of torch.compile (got torch "
            f"{torch.__version__}); leave 'fullgraph' out, or give all operands one width, QConfig(bits=...)"
        )


def name_of(fmt: Format) -> str:
    """The name of a format, for traces."""
    check_traced()
    return _constant_name(fmt)


@torch.compiler.assume_constant_result  # a compiler may take widths for variables, of which it makes no strings
def _constant_name(fmt: Format) -> str:
    return str(fmt)


def _stored(codes: Tensor, layout: Layout) -> Tensor:
    """Codes as they are stored; by parts those of which a copy in another type is packed."""
    parts, is_packed_as_is = list(row_chunks(*codes.shape)), codes.dtype in (torch.int8, torch.uint8, torch.int16)
    if layout.bits == 8 or is_packed_as_is or len(parts) < 2:
        return layout.store(codes)
    stored = codes.new_empty((codes.shape[0], packed_bytes(codes.shape[1], layout.bits)), dtype=torch.uint8)
    for part in parts:
        stored[part] = layout.store(codes[part])
    return stored


def check_width(owner: str, name: str, value: object, low: int, high: int, why: str = "") -> None:
    """Raise unless ``value`` is an integer from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"'{owner}' expects '{name}' to be an int (got {type(value).__name__})")
    if not low <= value <= high:
        raise ValueError(f"'{owner}' expects '{name}' from {low} to {high} (got {value}){why}")


def check_flag(owner: str, name: str, value: object) -> None:
    """Raise unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"'{owner}' expects '{name}' to be a bool (got {type(value).__name__})")


def check_kind(owner: str, kind: object, kinds: tuple[str, ...]) -> None:
    """Raise unless ``kind`` is one of ``kinds``."""
    if kind not in kinds:
        error = ValueError if isinstance(kind, str) else TypeError
        raise error(f"'{owner}' expects 'kind' to be one of {kinds} (got {kind!r})")


def only_width(fmt: AnyFormat, bits: int) -> AnyFormat:
    """``fmt``, which exists in one width, if that is the one asked for."""
    if bits != fmt.bits:
        raise ValueError(
            f"'{fmt}' has codes of {fmt.bits} bits only (got {bits}); formats with a choice of widths are Int, "
            f"FixedPoint and MSFP"
        )
    return fmt
