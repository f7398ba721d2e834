"""Results remembered for as long as the tensors that they were made from live unchanged."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

_T = TypeVar("_T")


@dataclass
class _Entry:
    others: tuple[Any, ...]  # weak references to the tensors besides the key
    storages: tuple[Any, ...]  # and to the storages of all: while they are held, no other has their addresses
    states: tuple[Hashable, ...]
    value: Any

    def serves(self, tensors: tuple[Tensor, ...], states: tuple[Hashable, ...]) -> bool:
        same = all(other() is t for other, t in zip(self.others, tensors[1:], strict=True))
        return same and self.states == states


_entries: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _state(t: Tensor) -> Hashable:
    """What changes when somebody writes to a tensor (its version) or swaps its data (where and how it lies)."""
    place = (t.untyped_storage()._cdata, t.data_ptr(), t.stride()) if t.layout == torch.strided else None
    return t._version, place, t.shape, t.dtype, t.device


def lasting() -> AbstractContextManager[Any]:
    """Where tensors are made that outlive the call: not in inference mode, whose tensors no backward pass may keep."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())  # leaving inference mode would turn gradients on
    return stack


def is_recorded(t: Tensor) -> bool:
    """Whether a CUDA graph is being made: what is made of ``t`` now lies in the graph's own memory, which is filled at
    each replay, from whatever the memory of ``t`` holds by then."""
    return not torch.compiler.is_compiling() and t.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_traced(t: Tensor) -> bool:
    return isinstance(t, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(t)


def _may_be_cached(tensors: tuple[Any, ...]) -> bool:
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or not all(isinstance(t, Tensor) for t in tensors):
        return False
    return not any(t.is_inference() or t.requires_grad or _is_traced(t) for t in tensors)


def remembered(tensors: tuple[Any, ...], key: Hashable) -> Any:
    """What :func:`cached` would serve, or ``None`` where it would build."""
    if not _may_be_cached(tensors):
        return None
    entry = _entries.get(tensors[0], {}).get((key, tuple(id(t) for t in tensors[1:])))
    serves = entry is not None and entry.serves(tensors, tuple(_state(t) for t in tensors))
    return entry.value if serves else None


def cached(tensors: tuple[Any, ...], key: Hashable, build: Callable[[], _T]) -> _T:
    """``build()``, remembered while all of ``tensors`` live unchanged.

    Writes that bypass autograd's version counter (through ``.data`` or a NumPy view) are not noticed. Tensors that need
    a gradient, inference tensors and tensors seen by a compiler or tracer are never cached. While a CUDA graph is made,
    what is remembered already is served, and nothing new is remembered.

    Args:
        tensors: What the result is made from; the first one owns the entry.
        key: What else the result depends on.
        build: Makes the result; it must not hold on to the given tensors themselves.
    """
    if not _may_be_cached(tensors):
        return build()
    states = tuple(_state(t) for t in tensors)
    entries = _entries.setdefault(tensors[0], {})
    full_key = (key, tuple(id(t) for t in tensors[1:]))
    entry = entries.get(full_key)
    if entry is not None and entry.serves(tensors, states):
        return entry.value
    if is_recorded(tensors[0]):
        return build()
    # Other threads may do the same: the list is made in one step, and what is gone already is no error.
    for stale, e in list(entries.items()):
        if e.states[0] != states[0] or any(other() is None for other in e.others):
            entries.pop(stale, None)
    with lasting():
        value = build()
    storages = tuple(StorageWeakRef(t.untyped_storage()) for t in tensors if t.layout == torch.strided)
    entries[full_key] = _Entry(tuple(ref(t) for t in tensors[1:]), storages, states, value)
    return value
