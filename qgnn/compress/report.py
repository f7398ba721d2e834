"""What was saved for the backward pass, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from qgnn.memory import MIB
from qgnn.tables import as_text


@dataclass
class SavedTensor:
    """One tensor that autograd saved.

    Args:
        op: The torch function that saved it.
        module: Name of the module that called it, below the outermost one; ``""`` for that one or none.
        shape: Its shape.
        dtype: Its type.
        original_bytes: What torch would keep of it: the whole memory that it lies in, or 0 if a tensor listed before
            lies there, too.
        saved_bytes: What is kept.
        format: How it is kept: ``"int2-rp8-g1024"``, ``"1 bit"``, ``"as it is"``, ``"shared"`` with one before.
    """

    op: str
    module: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    original_bytes: int = 0
    saved_bytes: int = 0
    format: str = ""


@dataclass
class Report:
    """What :class:`qgnn.compress_activations` kept of one block's forward passes; prints as a table.

    Parameters, and inputs from outside of the block, live anyway: they are kept as they are, and do not count.

    Args:
        by_tensor: What was saved, in order.
        peak_bytes: The most bytes that were in use by the end of the block: of the GPU by torch, or resident of the
            whole process (under Linux); ``None`` within the block, or where it is unknown. Reset a GPU's mark with
            :func:`torch.cuda.reset_peak_memory_stats`.
    """

    by_tensor: list[SavedTensor] = field(default_factory=list)
    peak_bytes: int | None = None

    @property
    def original_bytes(self) -> int:
        """Bytes that torch would have kept."""
        return sum(t.original_bytes for t in self.by_tensor)

    @property
    def saved_bytes(self) -> int:
        """Bytes that were kept."""
        return sum(t.saved_bytes for t in self.by_tensor)

    @property
    def ratio(self) -> float:
        """How many times smaller what was kept is; 1 if there was nothing to keep."""
        return self.original_bytes / self.saved_bytes if self.saved_bytes else 1.0

    def __str__(self) -> str:
        from rich.table import Table

        table = Table("op", "module", "shape", "format", "MiB before", "MiB kept", title="saved for backward")
        for t in self.by_tensor:
            shape = " x ".join(map(str, t.shape))
            table.add_row(t.op, t.module, shape, t.format, *_mib((t.original_bytes, t.saved_bytes)))
        table.add_section()
        total = _mib((self.original_bytes, self.saved_bytes))
        table.add_row("all", "", "", f"{self.ratio:.1f} times smaller", *total)
        if self.peak_bytes is not None:
            table.add_row("peak of all memory", "", "", "", "", f"{self.peak_bytes / MIB:.0f}")
        return as_text(table, width=120)


def _mib(sizes: Iterable[int]) -> Iterable[str]:
    return (f"{size / MIB:.3f}" for size in sizes)
