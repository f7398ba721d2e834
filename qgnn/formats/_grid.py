"""Formats whose values lie on a :class:`qgnn.rounding.Grid`."""

from __future__ import annotations

from abc import abstractmethod

from qgnn.formats._format import Format
from qgnn.rounding import Grid


class GridFormat(Format):
    """A format whose values lie on a :class:`qgnn.rounding.Grid`."""

    @property
    @abstractmethod
    def grid(self) -> Grid:
        """The values of a block."""
