"""What every number format offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from qgnn.packing import Layout
from qgnn.qtensor import QTensor
from qgnn.reference._common import row_chunks
from qgnn.rng import make_seed, random_bits16

_Format = TypeVar("_Format", bound="Format")
Encoded: TypeAlias = tuple[Tensor, Tensor, Tensor | None]  # codes or what is stored of them, scales, zero points


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

    def encode(self, x: Tensor, dim: int | None = -1, seed: int | Tensor | None = None) -> QTensor:
        """Quantize ``x``, with scales of slices or of blocks along ``dim``.

        Temporaries stay below 64 MiB, however large ``x`` is, but for slices longer than that, and for a copy of ``x``
        where ``dim`` is not its last dimension.

        Args:
            x: Values of any floating type and shape with at least one dimension.
            dim: The dimension along which values share a scale: that over which a product sums. Packed codes fill
                whole bytes along it. ``None``, for formats without blocks: one scale for the whole tensor.
            seed: A seed for stochastic rounding; ``None`` rounds to nearest.

        Raises:
            TypeError: If ``x`` is not a floating-point tensor.
            ValueError: If ``x`` is a scalar, or blocks have no dimension to lie along.
        """
        values = self._slices(x, dim, "encode").detach()
        layout = self._layout(tuple(x.shape), -1 if dim is None else dim if dim < 0 else dim - x.dim())
        lead = values.shape[:-1]
        rows = values.reshape(prod(lead), values.shape[-1])
        storage, *shared = self._encode_matrix(rows, layout, dim is not None, seed)

        def restored(t: Tensor, lead: tuple[int, ...]) -> Tensor:
            return t.view(*lead, t.shape[1]).movedim(-1, layout.dim)

        sharing = (1,) * len(lead) if dim is None else lead
        scales, zero = (None if t is None else restored(t, sharing) for t in shared)
        assert scales is not None
        return QTensor(restored(storage, lead), scales, zero, self._block_size, x.dtype, layout=layout)

    def _slices(self, x: Tensor, dim: int | None, caller: str) -> Tensor:
        """``x``, checked, with the values that share scales along its last dimension."""
        owner = f"{type(self).__name__}.{caller}"
        if not x.is_floating_point():
            raise TypeError(f"'{owner}' expects a floating-point tensor (got {x.dtype}); convert it with 'x.float()'")
        if x.dim() == 0:
            raise ValueError(f"'{owner}' expects a tensor with at least one dimension (got a scalar)")
        if dim is None and self._block_size is not None:
            raise ValueError(f"'{owner}' expects 'dim', along which blocks lie (got None)")
        return x if dim is None else x.movedim(dim, -1)

    def _encode_matrix(self, rows: Tensor, layout: Layout, by_row: bool, seed: int | Tensor | None) -> Encoded:
        """What is stored of a matrix, with scales of its rows or of all of it."""
        R, F = rows.shape
        if rows.numel() == 0:  # of the types that one element has
            codes, scales, zero = self._encode_rows(torch.zeros(1, 1, device=rows.device), None)
            storage = layout.store(codes.expand(1, F))
            shape = (R if by_row else 1, 1 if self._block_size is None else -(-F // self._block_size))
            scales, zero = scales.new_zeros(shape), None if zero is None else zero.new_zeros(shape)
            return storage.new_zeros((R, storage.shape[1])), scales, zero
        key = None if seed is None else make_seed(seed, rows.device)
        if not by_row:
            bits16 = None if key is None else random_bits16(0, 1, R * F, key)
            codes, scales, zero = self._encode_rows(rows.reshape(1, R * F).float(), bits16)
            return layout.store(codes.view(R, F)), scales, zero
        whole: list[Any] = []
        for part in row_chunks(R, F):
            num_rows = part.stop - part.start
            bits16 = None if key is None else random_bits16(part.start, num_rows, F, key)
            codes, scales, zero = self._encode_rows(rows[part].float(), bits16)
            pieces = (layout.store(codes), scales, zero)
            if num_rows == R:
                return pieces
            whole = whole or [None if t is None else t.new_empty((R, t.shape[1])) for t in pieces]
            for stored, piece in zip(whole, pieces, strict=True):
                if piece is not None:
                    stored[part] = piece
        storage, scales, zero = whole
        return storage, scales, zero

    @property
    def _block_size(self) -> int | None:
        """Values that share a scale; ``None`` for slices."""
        return None

    @abstractmethod
    def _layout(self, shape: tuple[int, ...], dim: int) -> Layout:
        """How codes of values of a shape, along a dimension counted from the end, are stored."""

    @abstractmethod
    def _encode_rows(self, rows: Tensor, bits16: Tensor | None) -> Encoded:
        """Codes ``[R, F]`` (integers, or the values that floating-point ones stand for), scales ``[R, B]`` and zero
        points as they are stored, of fp32 rows with at least one element."""

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

    def quantize(self, x: Tensor, dim: int | None = -1, seed: int | Tensor | None = None) -> Tensor:
        """``decode(encode(x))``: ``x`` with the error of this format. The gradient passes straight through.

        Args:
            x: As of :meth:`encode`.
            dim: As of :meth:`encode`.
            seed: As of :meth:`encode`.
        """
        return _StraightThrough.apply(x, self, dim, seed)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: Format, dim: int | None, seed: int | Tensor | None) -> Tensor:
        return fmt.decode(fmt.encode(x, dim, seed))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None


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


def only_width(fmt: _Format, bits: int) -> _Format:
    """``fmt``, which exists in one width, if that is the one asked for."""
    if bits != fmt.bits:
        raise ValueError(
            f"'{fmt}' has codes of {fmt.bits} bits only (got {bits}); formats with a choice of widths are Int, "
            f"FixedPoint and MSFP"
        )
    return fmt
