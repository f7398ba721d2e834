"""Quantized layers: PyG's, with a Q in front and a ``config``."""

from qgnn.nn.epilogue import Epilogue
from qgnn.nn.gat_conv import QGATConv
from qgnn.nn.gatv2_conv import QGATv2Conv
from qgnn.nn.gcn_conv import QGCNConv
from qgnn.nn.linear import QLinear
from qgnn.nn.transformer_conv import QTransformerConv

__all__ = ["Epilogue", "QGATConv", "QGATv2Conv", "QGCNConv", "QLinear", "QTransformerConv"]
