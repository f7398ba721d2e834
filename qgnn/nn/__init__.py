"""Quantized layers: PyG's, with a Q in front and a ``config``."""

from qgnn.nn.epilogue import Epilogue
from qgnn.nn.gcn_conv import QGCNConv
from qgnn.nn.linear import QLinear

__all__ = ["Epilogue", "QGCNConv", "QLinear"]
