"""Which module runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class RunningModules:
    """The modules that run in one thread between :meth:`open` and :meth:`close`, the innermost last.

    Args:
        is_here: Whether it is asked from that thread, and for the innermost block.
    """

    def __init__(self, is_here: Callable[[], bool]) -> None:
        self._is_here = is_here
        self._stack: list[nn.Module] = []
        self._names: dict[int, dict[int, str]] = {}  # of modules, by the outermost one
        self._handles: list[Any] = []

    def open(self) -> None:
        """Begin to watch."""
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def close(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._stack.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._is_here():
            self._stack.append(module)

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if self._is_here() and self._stack and self._stack[-1] is module:
            self._stack.pop()

    def __contains__(self, module: nn.Module) -> bool:
        return any(running is module for running in self._stack)

    def name(self) -> str:
        """Name of the innermost module below the outermost one; ``""`` for that one, or none."""
        if not self._stack:
            return ""
        outermost, innermost = self._stack[0], self._stack[-1]
        names = self._names.get(id(outermost))
        if names is None:
            names = self._names[id(outermost)] = {id(module): name for name, module in outermost.named_modules()}
        return names.get(id(innermost), type(innermost).__name__)
