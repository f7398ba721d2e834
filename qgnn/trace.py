"""What really ran: a record of each primitive, its operand format and the backend that served it.

Ops report here from inside the code that does the work, so a row in a trace is a call that happened, not one that was
asked for. Outside a ``trace()`` block reporting costs one attribute lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qgnn.tables import as_text

__all__ = ["Trace", "trace"]

# Process-wide, not per thread: on CUDA the backward pass runs in autograd's own threads.
_running: list[Trace] = []


@dataclass
class _Row:
    calls: int = 0
    bytes: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    backends: dict[str, int] = field(default_factory=dict)
    errors: list[Tensor] = field(default_factory=list)


class Trace:
    """The record of a :func:`qgnn.trace` block.

    Args:
        error: Whether errors of quantization are measured.

    Example:
        >>> with qgnn.trace() as t:
        ...     model(x, edge_index).sum().backward()
        >>> print(t)
    """

    def __init__(self, error: bool = True) -> None:
        self.measures_error = error
        self._rows: dict[str, _Row] = {}

    @property
    def ops(self) -> dict[str, dict[str, Any]]:
        """``{"spmm.forward": {"calls", "format", "backend", "bytes", "error"}, ...}``.

        ``format`` is the type of the operands (``"int8"``, ``"int4"``, ``"float32"``, ...), several joined by ``+``,
        the most frequent first; ``bytes`` what the operands and results occupy, each call counted; ``error`` the
        relative Frobenius error of the codes made, averaged over calls, or ``None``.
        """
        joined = lambda counts: "+".join(sorted(counts, key=lambda name: -counts[name]))  # noqa: E731
        return {
            name: {
                "calls": row.calls,
                "format": joined(row.formats),
                "backend": joined(row.backends),
                "bytes": row.bytes,
                "error": float(torch.stack(row.errors).mean()) if row.errors else None,
                "formats": dict(row.formats),
            }
            for name, row in self._rows.items()
        }

    def _add(self, name: str, fmt: str, backend: str, num_bytes: int, error: Tensor | None) -> None:
        row = self._rows.setdefault(name, _Row())
        row.calls += 1
        row.bytes += num_bytes
        row.formats[fmt] = row.formats.get(fmt, 0) + 1
        row.backends[backend] = row.backends.get(backend, 0) + 1
        if error is not None:
            row.errors.append(error)

    def __str__(self) -> str:
        from rich.table import Column, Table

        backend = Column("backend", overflow="fold")  # several have no space between them to break at
        table = Table("op", "calls", "format", backend, "MiB", "error", title="qgnn trace")
        for name, op in self.ops.items():
            error = "" if op["error"] is None else f"{op['error']:.4f}"
            formats = ", ".join(f"{fmt} x{count}" for fmt, count in op["formats"].items())
            table.add_row(name, str(op["calls"]), formats, op["backend"], f"{op['bytes'] / 2**20:.2f}", error)
        return as_text(table, width=100)

    def __repr__(self) -> str:
        return f"Trace({sum(row.calls for row in self._rows.values())} calls of {len(self._rows)} ops)"


@contextmanager
def trace(error: bool = True) -> Iterator[Trace]:
    """Record which primitives run inside the block, in which format and on which backend.

    Args:
        error: Measure the error of each quantization (one more pass over the values).

    Yields:
        A :class:`qgnn.trace.Trace`; read ``.ops`` or print it.
    """
    record = Trace(error)
    _running.append(record)
    try:
        yield record
    finally:
        _running.remove(record)


def recording() -> bool:
    """Whether any trace is open."""
    return bool(_running)


def report(
    name: str, fmt: str, backend: str, operands: Iterable[object], error: Callable[[], Tensor] | None = None
) -> None:
    """Add one call to every open trace. ``operands`` are what it read and wrote; ``error`` measures its error."""
    num_bytes = sum(value.nbytes for value in operands if isinstance(value, Tensor))
    measured = error() if error is not None and any(record.measures_error for record in _running) else None
    for record in _running:
        record._add(name, fmt, backend, num_bytes, measured if record.measures_error else None)
