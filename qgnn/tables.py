"""Tables as plain text: the same in a terminal, in a file and in a notebook."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def as_text(table: Table, width: int) -> str:
    """What ``table`` looks like in ``width`` columns, without colors."""
    from rich.console import Console

    text = StringIO()
    # Left to itself, rich would show the table in a notebook and write nothing, and colors where FORCE_COLOR is set.
    Console(file=text, width=width, force_jupyter=False, force_terminal=False).print(table)
    return text.getvalue()
