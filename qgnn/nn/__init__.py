"""Quantized layers: PyG's, with a Q in front and a ``config``."""

from qgnn.nn.appnp import QAPPNP
from qgnn.nn.cheb_conv import QChebConv
from qgnn.nn.epilogue import Epilogue
from qgnn.nn.gat_conv import QGATConv
from qgnn.nn.gatv2_conv import QGATv2Conv
from qgnn.nn.gcn2_conv import QGCN2Conv
from qgnn.nn.gcn_conv import QGCNConv
from qgnn.nn.gin_conv import QGINConv
from qgnn.nn.gine_conv import QGINEConv
from qgnn.nn.graph_conv import QGraphConv
from qgnn.nn.linear import QLinear
from qgnn.nn.rgcn_conv import QRGCNConv
from qgnn.nn.sage_conv import QSAGEConv
from qgnn.nn.sg_conv import QSGConv
from qgnn.nn.transformer_conv import QTransformerConv

__all__ = [
    "QAPPNP",
    "Epilogue",
    "QChebConv",
    "QGATConv",
    "QGATv2Conv",
    "QGCN2Conv",
    "QGCNConv",
    "QGINConv",
    "QGINEConv",
    "QGraphConv",
    "QLinear",
    "QRGCNConv",
    "QSAGEConv",
    "QSGConv",
    "QTransformerConv",
]
