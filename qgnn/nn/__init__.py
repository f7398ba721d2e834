"""Quantized layers: PyG's, with a Q in front and a ``config``."""

from qgnn.nn.epilogue import Epilogue
from qgnn.nn.gcn_conv import QGCNConv
from qgnn.nn.gin_conv import QGINConv
from qgnn.nn.gine_conv import QGINEConv
from qgnn.nn.graph_conv import QGraphConv
from qgnn.nn.linear import QLinear
from qgnn.nn.sage_conv import QSAGEConv

__all__ = ["Epilogue", "QGCNConv", "QGINConv", "QGINEConv", "QGraphConv", "QLinear", "QSAGEConv"]
