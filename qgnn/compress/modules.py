"""Which module runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


def _nowhere() -> bool:
    return False


class RunningModules:
    """The modules that run in one thread between :meth:`open` and :meth:`close`, the innermost last."""

    def __init__(self) -> None:
        self._is_here = _nowhere
        self._stack: list[nn.Module] = []
        self._names: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, str]] = WeakKeyDictionary()

    def open(self, is_here: Callable[[], bool]) -> None:
        """Begin to watch.

        Args:
            is_here: Whether it is asked from that thread, and for the innermost block.
        """
        self._is_here = is_here
        with _lock:
            _open.append(self)
            if len(_open) == 1:
                _hook()

    def close(self) -> None:
        """Watch no longer."""
        with _lock:
            _open[:] = [other for other in _open if other is not self]
            if not _open:
                _unhook()
        self._is_here = _nowhere  # no cycle with the block, and another thread may be about to ask
        self._stack.clear()

    def enter(self, module: nn.Module) -> None:
        """A module begins to run, in whatever thread."""
        if self._is_here():
            self._stack.append(module)

    def leave(self, module: nn.Module) -> None:
        """A module has run."""
        if self._is_here() and self._stack and self._stack[-1] is module:
            self._stack.pop()

    def __contains__(self, module: nn.Module) -> bool:
        return any(running is module for running in self._stack)

    def name(self) -> str:
        """Name of the innermost module below the outermost one; ``""`` for that one, or none."""
        if not self._stack:
            return ""
        outermost, innermost = self._stack[0], self._stack[-1]
        names = self._names.get(outermost)
        if names is None:
            modules = {module: name for name, module in outermost.named_modules()}
            names = self._names[outermost] = WeakKeyDictionary(modules)
        return names.get(innermost, type(innermost).__name__)


# A compiler guards on the keys and functions of hooks for all modules: another key in each block would be another
# compilation. So all blocks share two hooks, which come back under the keys that they had.
_open: list[RunningModules] = []
_lock = threading.Lock()
_keys: list[int] = []


def _enter(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        for running in tuple(_open):
            running.enter(module)


def _leave(module: nn.Module, args: Any, result: Any) -> None:
    if not torch.compiler.is_compiling():
        for running in tuple(_open):
            running.leave(module)


def _hook() -> None:
    if not _keys:
        before = register_module_forward_pre_hook(_enter)
        _keys.extend((before.id, register_module_forward_hook(_leave, always_call=True).id))
    torch_module._global_forward_pre_hooks[_keys[0]] = _enter
    torch_module._global_forward_hooks[_keys[1]] = _leave
    torch_module._global_forward_hooks_always_called[_keys[1]] = True


def _unhook() -> None:
    torch_module._global_forward_pre_hooks.pop(_keys[0], None)
    for hooks in (torch_module._global_forward_hooks, torch_module._global_forward_hooks_always_called):
        hooks.pop(_keys[1], None)
