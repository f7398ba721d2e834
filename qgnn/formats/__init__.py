"""Number formats: how a real value becomes a code, what codes stand for, and how many bits they take."""

from qgnn.formats._format import Format
from qgnn.formats._grid import GridFormat
from qgnn.formats.block_floating import MSFP
from qgnn.formats.blocks import Blocks
from qgnn.formats.fixed_point import FixedPoint
from qgnn.formats.float8 import Float8
from qgnn.formats.integer import Int
from qgnn.formats.microscaling import MXFP4, MXFP6, MXFP8, MXINT8
from qgnn.formats.names import parse

__all__ = [
    "MSFP",
    "MXFP4",
    "MXFP6",
    "MXFP8",
    "MXINT8",
    "Blocks",
    "FixedPoint",
    "Float8",
    "Format",
    "GridFormat",
    "Int",
    "parse",
]
