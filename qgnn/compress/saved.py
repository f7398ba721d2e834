"""What stands in a graph for a tensor that a function saved: the tensor itself, or codes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Layout(NamedTuple):
    """How a tensor lies over dense memory: its dimensions in the order of memory, repeated ones without repetition."""

    order: tuple[int, ...]
    shape: torch.Size

    def dense(self, t: Tensor) -> Tensor:
        """The dense tensor, a copy if there is none."""
        for dim, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
            if size > 1 and stride == 0:
                t = t.narrow(dim, 0, 1)
        return t.permute(self.order).contiguous()

    def restore(self, dense: Tensor) -> Tensor:
        """The tensor that was saved, of the same strides."""
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return dense.permute(inverse).expand(self.shape)


def layout_of(t: Tensor) -> Layout:
    """The layout of a strided tensor: dimensions that do not move in memory come first, so that the last one is that of
    the columns."""

    def place(dim: int) -> tuple[bool, int]:
        moves = t.shape[dim] > 1 and t.stride(dim) != 0
        return moves, -t.stride(dim)

    return Layout(tuple(sorted(range(t.dim()), key=place)), t.shape)


class Version:
    """The version of a tensor when it was saved. Held weakly: the tensor may go, and cannot change any more then."""

    def __init__(self, t: Tensor, op: str) -> None:
        self._owners = tuple(ref(x) for x in (t, t._base) if x is not None)
        self._expected, self._op = t._version, op
        self._kind = f"{t.type()} {list(t.shape)}" if t.layout == torch.strided else str(t.layout)

    def check(self) -> None:
        """Raise, as torch does, if somebody has written to the tensor since."""
        for owner in self._owners:
            t = owner()
            if t is not None and t._version != self._expected:
                raise RuntimeError(
                    f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{self._kind}], saved by '{self._op}', is at version {t._version}; expected version "
                    f"{self._expected} instead. Do not write to it before the backward pass, or write to a clone"
                )


class Kept:
    """A tensor as it is, detached: the graph would keep itself alive otherwise."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, t: Tensor, op: str) -> None:
        self._tensor = t.detach()
        self._version = Version(self._tensor, op)  # of one counter with the tensor's

    def unpack(self) -> Tensor:
        self._version.check()
        return self._tensor


class Codes:
    """What is kept in place of dense memory, which several saved tensors may share; ``kept`` may be replaced."""

    __slots__ = ("__weakref__", "_read", "_storage", "kept")

    def __init__(self, kept: Any, read: Callable[[Any], Tensor], storage: StorageWeakRef | None = None) -> None:
        self.kept, self._read = kept, read
        self._storage = storage  # while it is referred to, no other memory takes its identity

    def values(self) -> Tensor:
        """The values of that memory."""
        return self._read(self.kept)


class Coded:
    """A saved tensor as a view of codes."""

    __slots__ = ("_codes", "_dtype", "_layout", "_shape", "_version")

    def __init__(self, t: Tensor, codes: Codes, layout: Layout, shape: torch.Size, op: str) -> None:
        self._codes, self._layout, self._shape, self._dtype = codes, layout, shape, t.dtype
        self._version = Version(t, op)

    def unpack(self) -> Tensor:
        self._version.check()
        return self._layout.restore(self._codes.values().to(self._dtype).view(self._shape))
