"""QTensor: codes with the scale that gives them meaning."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qgnn.layout import FLOAT8, Layout
from qgnn.packing import CHUNK, packed_bytes, per_value, row_parts, scale_blocks_
from qgnn.rounding import MAX_BLOCK_SIZE


@dataclass(frozen=True)
class QTensor:
    """A quantized tensor, ``x = codes * scale (+ zero)``.

    A plain record of tensors, not a tensor subclass: it never enters a state dict. Products and sums that take one in
    place of a tensor hand its gradient, straight through the rounding, to ``origin``.

    Args:
        storage: What is stored of the codes: one integer or float8 number a value, or, with a ``layout`` of another
            width than 8 bits, the bytes of packed ones.
        scales: What is stored of the scales: fp32, or one byte a power of two (:attr:`torch.float8_e8m0fnu`). As many
            dimensions as ``storage``. A size of 1 means that the whole dimension shares the scale; a size of
            ``ceil(F / block_size)`` along the layout's dimension, the last one without a layout, means one scale a
            block.
        zero: The value of code 0, shaped like ``scales``; ``None`` for symmetric formats.
        block_size: Values of a block, for scales of blocks.
        dtype: The floating type that was quantized, and that :meth:`dequantize` returns.
        origin: The tensor that was quantized, where it needs a gradient; ``None`` for constants.
        packed: The :class:`qgnn.ops.Packed` rows that products keep in place of the codes, the same for all of them;
            ``None``: each its own, if any.
        layout: How codes lie in ``storage``; ``None`` for one stored number a code.
        columns: The same values once more as ``[F, N]``, with codes and scales along ``N``, all rows of several sets:
            what products of formats with blocks need for the gradient of their weight.
        name: Of the format, for traces.
    """

    storage: Tensor
    scales: Tensor
    zero: Tensor | None = None
    block_size: int | None = None
    dtype: torch.dtype = torch.float32
    origin: Tensor | None = None
    packed: Any = None
    layout: Layout | None = None
    columns: QTensor | None = None
    name: str = "int8"

    @property
    def codes(self) -> Tensor:
        """One code a value, ``storage`` itself where nothing is packed; else int8 (int16 above 8 bits), uint8 for codes
        that are not negative (int32 above 8 bits), or fp32 for floating-point codes."""
        return self.storage if self.layout is None else self.layout.load(self.storage)

    @property
    def code_dtype(self) -> torch.dtype:
        """Type of :attr:`codes`, which are not unpacked for it."""
        return self.storage.dtype if self.layout is None else self.layout.dtype

    @property
    def scale(self) -> Tensor:
        """What codes are multiplied with, in fp32; ``scales`` itself where it has that type."""
        if self.scales.dtype == torch.float32:
            return self.scales
        return self.scales.float() * 2.0 ** -(0 if self.layout is None else self.layout.fraction_bits)

    @property
    def shape(self) -> torch.Size:
        """Shape of the quantized values."""
        return self.storage.shape if self.layout is None else torch.Size(self.layout.shape)

    @property
    def device(self) -> torch.device:
        """Where codes and scales lie."""
        return self.storage.device

    def size(self, dim: int | None = None) -> torch.Size | int:
        """:attr:`shape`, or its entry ``dim``, as of a tensor.

        Args:
            dim: Number of a dimension; ``None`` for all.
        """
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Number of dimensions, as of a tensor."""
        return len(self.shape)

    def numel(self) -> int:
        """Number of values, as of a tensor."""
        return self.shape.numel()

    def unbind(self) -> tuple[QTensor, ...]:
        """Its parts along the first dimension, as of a tensor. They are not packed if that is the dimension that codes
        are packed along, or share scales of blocks along."""
        layout = self.layout
        if layout is not None and layout.dim == -len(layout.shape):
            zero = None if self.zero is None else self._per_value(self.zero)
            plain = replace(self, storage=self.codes, scales=self._per_value(self.scale), zero=zero)
            return replace(plain, block_size=None, layout=None).unbind()
        if layout is not None:
            layout = replace(layout, shape=layout.shape[1:])

        def parts(t: Tensor | None) -> tuple[Tensor | None, ...]:
            return (None,) * len(storage) if t is None else t.expand(len(storage), *t.shape[1:]).unbind()

        storage = self.storage.unbind()
        rows = zip(storage, *map(parts, (self.scales, self.zero, self.origin)), strict=True)
        return tuple(
            replace(self, storage=c, scales=s, zero=z, origin=o, packed=None, layout=layout, columns=None)
            for c, s, z, o in rows
        )

    def part(self, rows: slice) -> QTensor:
        """Some consecutive rows of a matrix.

        Args:
            rows: Which ones, without a step.

        Raises:
            ValueError: If codes or scales lie along the rows, or a step leaves some out.
        """
        layout = self.layout
        if not isinstance(rows, slice) or not self.has_parts or rows.step not in (None, 1):
            raise ValueError(f"'part' expects consecutive rows of codes along the columns (got {rows} of {self!r})")
        rows = slice(*rows.indices(int(self.shape[0])))
        if layout is not None:
            layout = replace(layout, shape=(max(0, rows.stop - rows.start), *layout.shape[1:]))

        def cut(t: Tensor | None) -> Tensor | None:
            return t if t is None or t.shape[0] == 1 < self.shape[0] else t[rows]

        storage, scales, zero = self.storage[rows], cut(self.scales), cut(self.zero)
        assert scales is not None
        return replace(self.with_tensors(storage, scales, zero), layout=layout)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """What autograd saves of it; :meth:`with_tensors` puts it together again."""
        return self.storage, self.scales, self.zero

    def with_tensors(
        self, storage: Tensor | None = None, scales: Tensor | None = None, zero: Tensor | None = None
    ) -> QTensor:
        """The same values in other tensors, or what is left of the record without any.

        Args:
            storage: In place of ``storage``.
            scales: In place of ``scales``.
            zero: In place of ``zero``.
        """
        alone = replace(self, origin=None, packed=None, columns=None)
        return replace(alone, storage=storage, scales=scales, zero=zero)  # type: ignore[arg-type]

    def index_select(self, dim: int, index: Tensor) -> QTensor:
        """Rows of a matrix in any order, as of a tensor; ``columns`` are left out.

        Args:
            dim: 0, the rows.
            index: Numbers of the rows.

        Shapes:
            - **input:** ``index [R]`` integer
            - **output:** ``[R, F]`` of ``[N, F]``

        Raises:
            ValueError: If codes or scales lie along the rows, or ``dim`` is not 0.
            IndexError: If there is no such row.
        """
        if dim != 0 or not self.has_parts:
            raise ValueError(
                f"'index_select' expects rows (dim=0) of codes along the columns (got dim={dim}, {self!r})"
            )
        layout = self.layout
        if layout is not None:
            layout = replace(layout, shape=(index.numel(), *layout.shape[1:]))

        def rows(t: Tensor | None) -> Tensor | None:
            return t if t is None or t.shape[0] == 1 < self.shape[0] else t.index_select(0, index)

        origin = rows(self.origin)
        return replace(self.with_tensors(*map(rows, self.tensors)), origin=origin, layout=layout)

    def to(self, device: torch.device | str | None = None, non_blocking: bool = False) -> QTensor:
        """The same on another device, as of a tensor: so :class:`torch_geometric.data.Data` moves it with the rest.

        Args:
            device: Where to; ``None`` leaves it where it is.
            non_blocking: Whether the host may go on while pinned memory is copied.

        Raises:
            TypeError: If ``device`` is a type of numbers: codes stay what they are.
        """
        if isinstance(device, torch.dtype):
            raise TypeError(f"'QTensor.to' expects a device (got {device}); dequantize() gives values of a type")
        return self._map(lambda t: t.to(device=device, non_blocking=non_blocking))

    def cpu(self) -> QTensor:
        """The same in the memory of the host, as of a tensor."""
        return self.to("cpu")

    def cuda(self, device: torch.device | int | str | None = None, non_blocking: bool = False) -> QTensor:
        """The same on a GPU, as of a tensor.

        Args:
            device: Which one; ``None`` for the current one.
            non_blocking: As in :meth:`to`.
        """
        return self._map(lambda t: t.cuda(device, non_blocking))

    def pin_memory(self) -> QTensor:
        """The same in pinned memory, from which copies to a GPU do not wait."""
        return self._map(lambda t: t.pin_memory())

    def _map(self, function: Callable[[Tensor], Tensor]) -> QTensor:
        tensors = [None if t is None else function(t) for t in self.tensors]
        origin = None if self.origin is None else function(self.origin)
        columns = None if self.columns is None else self.columns._map(function)
        return replace(self.with_tensors(*tensors), origin=origin, columns=columns)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points together, of ``columns`` too."""
        own = sum(t.nbytes for t in self.tensors if t is not None)
        return own if self.columns is None else own + self.columns.nbytes

    def check(self, owner: str, name: str) -> None:
        """Raise unless the fields fit together: those of a record that was put together by hand may not.

        Args:
            owner: Who was given the record, for the message.
            name: As what.

        Raises:
            TypeError: If a field has the wrong type.
            ValueError: If storage, scales or zero points have other shapes than codes and blocks have, or lie on
                different devices.
        """
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # sizes are no numbers there
            return
        what = f"'{owner}' expects '{name}' as 'quantize' or a format makes it"
        check_fields(self, _FIELDS, what)
        if not self._stores(self.storage.dtype) or not self.scales.is_floating_point():
            raise TypeError(f"{what} (got storage in {self.storage.dtype}, scales in {self.scales.dtype})")
        layout, dim, stored = self.layout, self._dim, list(self.shape)
        has_blocks = self.block_size is None or 1 <= self.block_size <= MAX_BLOCK_SIZE
        if not -len(stored) <= dim < 0 or not has_blocks:
            raise ValueError(f"{what} (got dimension {dim} of {stored}, blocks of {self.block_size})")
        width = stored[dim]
        if layout is not None and layout.bits != 8:
            stored[dim] = packed_bytes(width, layout.bits)
        scales = [(1, size) for size in self.shape]
        if self.block_size is not None:
            scales[dim] = (-(-width // self.block_size),) * 2
        fits = len(self.scales.shape) == len(scales) and all(map(operator.contains, scales, self.scales.shape))
        zero_fits = self.zero is None or self.zero.shape == self.scales.shape
        if list(self.storage.shape) != stored or not fits or not zero_fits:
            shapes = [None if t is None else list(t.shape) for t in self.tensors]
            raise ValueError(
                f"{what} (got storage {shapes[0]}, scales {shapes[1]} and zero points {shapes[2]} for values "
                f"{list(self.shape)} in blocks of {self.block_size})"
            )
        devices = {t.device for t in self.tensors if t is not None}
        if len(devices) > 1:
            raise ValueError(f"{what} (got tensors on {' and '.join(sorted(map(str, devices)))})")

    def _stores(self, dtype: torch.dtype) -> bool:
        """Whether that is a type that codes are stored in."""
        if self.layout is None:
            return not dtype.is_complex and dtype != torch.bool
        if self.layout.bits != 8:
            return dtype == torch.uint8
        if self.layout.mantissa_bits is not None:
            return dtype == FLOAT8[self.layout.mantissa_bits]
        return dtype == (torch.int8 if self.layout.signed else torch.uint8)

    def dequantize(self) -> Tensor:
        """The values that the codes stand for, of type ``dtype``; of a large tensor part by part, unless codes lie
        along its first dimension.

        Raises:
            TypeError: As :meth:`check` does.
            ValueError: As :meth:`check` does.
        """
        self.check("dequantize", "q")
        if torch.compiler.is_compiling() or not self.has_parts or self.shape.numel() <= CHUNK:
            return self._decoded()
        values = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for rows in row_parts(self.shape[0], self.shape[1:].numel(), CHUNK):
            values[rows] = self.part(rows)._decoded()
        return values

    @property
    def has_parts(self) -> bool:
        """Whether :meth:`part` cuts its rows, since neither codes nor scales of blocks lie along them."""
        return len(self.shape) > 1 and (self.layout is None or self.layout.dim != -len(self.layout.shape))

    def _decoded(self) -> Tensor:
        value = self.codes.to(torch.float32, copy=self.layout is None)  # packed codes were copied already
        if self.block_size is None:
            value *= self.scale
        else:
            scale_blocks_(value, self.scale, self.block_size, self._dim)
        if self.zero is not None:
            value += self._per_value(self.zero)
        return value.to(self.dtype)

    @property
    def _dim(self) -> int:
        return -1 if self.layout is None else self.layout.dim

    def _per_value(self, t: Tensor) -> Tensor:
        return t if self.block_size is None else per_value(t, self.block_size, self.shape[self._dim], self._dim)

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, torch.dtype]]:
        """Fields, float8 ones as bytes, and the types of these: torch writes pickles of float8 that it cannot read."""
        types = {name: t.dtype for name, t in vars(self).items() if isinstance(t, Tensor) and _is_float8(t.dtype)}
        return {**vars(self), **{name: getattr(self, name).view(torch.uint8) for name in types}}, types

    def __setstate__(self, state: tuple[dict[str, Any], dict[str, torch.dtype]]) -> None:
        fields, types = state
        self.__dict__.update({**fields, **{name: fields[name].view(dtype) for name, dtype in types.items()}})

    def __repr__(self) -> str:
        codes = str(self.storage.dtype)
        if self.layout is not None and self.layout.bits != 8:
            codes = f"{self.layout.bits}-bit {'float' if self.layout.mantissa_bits is not None else 'codes'}"
        return (
            f"QTensor({codes} {tuple(self.shape)}, scale {tuple(self.scales.shape)}, "
            f"{self.nbytes} bytes for {self.shape.numel()} values of {self.dtype})"
        )


_FIELDS: dict[str, Any] = {
    "storage": Tensor,
    "scales": Tensor,
    "zero": (Tensor, type(None)),
    "block_size": (int, type(None)),
    "dtype": torch.dtype,
    "layout": (Layout, type(None)),
    "origin": (Tensor, type(None)),
    "columns": (QTensor, type(None)),
}


def _is_float8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def check_fields(record: Any, kinds: dict[str, Any], what: str) -> None:
    """Raise a ``TypeError`` that begins with ``what`` unless the fields of a record are of these kinds, and its values
    of a floating-point type."""
    for key, kind in kinds.items():
        value = getattr(record, key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{what} (got {type(value).__name__} as its '{key}')")
    if not record.dtype.is_floating_point:
        raise TypeError(f"{what} (got values of {record.dtype})")
