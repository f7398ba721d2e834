"""A model of PyG's layers made a quantized one in place, back again, and a table of what became of each module."""

from qgnn.convert.convert import quantize_, revert_
from qgnn.convert.summary import Row, Summary, summary

__all__ = ["Row", "Summary", "quantize_", "revert_", "summary"]
