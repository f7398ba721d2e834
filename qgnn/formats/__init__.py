"""Number formats: how a real value becomes a code, what codes stand for, and how many bits they take."""

from qgnn.formats._format import Format
from qgnn.formats.blocks import Blocks
from qgnn.formats.integer import Int

__all__ = ["Blocks", "Format", "Int"]
