"""Quantized layers: PyG's, with a Q in front and a ``config``."""

from qgnn.nn.appnp import QAPPNP
from qgnn.nn.cheb_conv import QChebConv
from qgnn.nn.epilogue import Epilogue
from qgnn.nn.gcn2_conv import QGCN2Conv
from qgnn.nn.gcn_conv import QGCNConv
from qgnn.nn.gin_conv import QGINConv
from qgnn.nn.gine_conv import QGINEConv
from qgnn.nn.graph_conv import QGraphConv
from qgnn.nn.linear import QLinear
from qgnn.nn.rgcn_conv import QRGCNConv
from qgnn.nn.sage_conv import QSAGEConv
from qgnn.nn.sg_conv import QSGConv

__all__ = [
    "QAPPNP",
    "Epilogue",
    "QChebConv",
    "QGCN2Conv",
    "QGCNConv",
    "QGINConv",
    "QGINEConv",
    "QGraphConv",
    "QLinear",
    "QRGCNConv",
    "QSAGEConv",
    "QSGConv",
]
