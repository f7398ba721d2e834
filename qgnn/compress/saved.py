"""What stands in a graph for a tensor that a function saved: the tensor itself, or codes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """How a tensor lies over dense memory: its dimensions in the order of memory, repeated ones without repetition."""

    order: tuple[int, ...]
    shape: torch.Size

    def dense(self, t: Tensor) -> Tensor:
        """The dense tensor, a copy if there is none."""
        for dim, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
            if size > 1 and stride == 0:
                t = t.narrow(dim, 0, 1)
        return t.permute(self.order).contiguous().resolve_neg()

    def restore(self, dense: Tensor) -> Tensor:
        """The tensor that was saved, of the same strides."""
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return dense.permute(inverse).expand(self.shape)

    def extent(self, t: Tensor) -> tuple[tuple[int, int], ...]:
        """Sizes and strides in the order of memory, which views of the same elements share: transposed ones, expanded
        ones, and those with dimensions split or joined."""
        extent: list[tuple[int, int]] = []
        for dim in self.order:
            size, stride = t.shape[dim], t.stride(dim)
            if size == 1 or stride == 0:
                continue
            if extent and extent[-1][1] == size * stride:
                size *= extent.pop()[0]
            extent.append((size, stride))
        return tuple(extent)


def layout_of(t: Tensor) -> Layout:
    """The layout of a strided tensor: dimensions that do not move in memory come first, so that the last one is that of
    the columns."""

    def place(dim: int) -> tuple[bool, int]:
        moves = t.shape[dim] > 1 and t.stride(dim) != 0
        return moves, -t.stride(dim)

    return Layout(tuple(sorted(range(t.dim()), key=place)), t.shape)


class Version:
    """The version of a tensor when it was saved.

    Args:
        alias: A tensor that shares its counter of versions.
        op: The function that saved it.
    """

    __slots__ = ("_alias", "_expected", "_kind", "_op")

    def __init__(self, alias: Tensor, op: str) -> None:
        self._alias, self._expected, self._op = alias, alias._version, op
        self._kind = (alias.dtype, list(alias.shape))

    @classmethod
    def without_memory(cls, t: Tensor, op: str) -> Version:
        """Of a tensor that is not kept: any alias of it that somebody writes to has the same counter."""
        alias = t.detach()
        version = cls(alias, op)
        alias.data = t.new_empty(0)  # the counter stays
        return version

    def check(self) -> None:
        """Raise, as torch does, if somebody has written to the tensor since."""
        if self._alias._version != self._expected:
            dtype, shape = self._kind
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{dtype} {shape}], saved by '{self._op}', is at version {self._alias._version}; expected version "
                f"{self._expected} instead. Do not write to it before the backward pass, or write to a clone"
            )


def no_second_derivative(op: str) -> None:
    """Raise in a backward pass whose gradients are to have gradients."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"'compress_activations' has coded what '{op}' saved, once; a gradient of a gradient (create_graph=True) "
            f"would multiply roundings with themselves, and be biased. Keep it as it is with exclude='{op}', or call "
            f"it outside of the block"
        )


class Kept:
    """A tensor as it is, detached: the graph would keep itself alive otherwise."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, t: Tensor, op: str) -> None:
        self._tensor = t.detach()
        self._version = Version(self._tensor, op)

    def unpack(self) -> Tensor:
        """The tensor."""
        self._version.check()
        return self._tensor


class Codes:
    """What is kept in place of dense memory, which several saved tensors may share; ``kept`` may be replaced."""

    __slots__ = ("__weakref__", "_read", "kept")

    def __init__(self, kept: Any, read: Callable[[Any], Tensor]) -> None:
        self.kept, self._read = kept, read

    def values(self) -> Tensor:
        """The values of that memory."""
        return self._read(self.kept)


class Coded:
    """A saved tensor as a view of codes.

    Args:
        t: The tensor.
        codes: Codes of its memory.
        layout: How it lies over that.
        shape: Shape of the dense memory.
        op: The function that saved it.
        is_exact: Whether codes stand for the very gradient.
    """

    __slots__ = ("_codes", "_dtype", "_is_exact", "_layout", "_op", "_shape", "_version")

    def __init__(self, t: Tensor, codes: Codes, layout: Layout, shape: torch.Size, op: str, is_exact: bool) -> None:
        self._codes, self._layout, self._shape, self._dtype = codes, layout, shape, t.dtype
        self._op, self._is_exact = op, is_exact
        self._version = Version.without_memory(t, op)

    def unpack(self) -> Tensor:
        """What the codes make of it."""
        self._version.check()
        if not self._is_exact:
            no_second_derivative(self._op)
        with torch.no_grad():
            return self._layout.restore(self._codes.values().to(self._dtype).view(self._shape))
