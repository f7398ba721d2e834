"""Which module runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


def _nowhere() -> bool:
    return False


class RunningModules:
    """The modules that run in one thread between :meth:`open` and :meth:`close`, the innermost last."""

    def __init__(self) -> None:
        self._is_here = _nowhere
        self._stack: list[nn.Module] = []
        self._names: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, str]] = WeakKeyDictionary()
        self._handles: list[Any] = []

    def open(self, is_here: Callable[[], bool]) -> None:
        """Begin to watch.

        Args:
            is_here: Whether it is asked from that thread, and for the innermost block.
        """
        self._is_here = is_here
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def close(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._is_here = _nowhere  # no cycle with the block, and another thread may be about to ask
        self._stack.clear()

    def _watches(self) -> bool:
        return not torch.compiler.is_compiling() and self._is_here()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._watches():
            self._stack.append(module)

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if self._watches() and self._stack and self._stack[-1] is module:
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
