"""The stateless API: quantized products and aggregations as plain functions of tensors.

Each takes ``config`` (``None``: full precision) and ``seed`` (an int or an int64 tensor; ``None`` draws one from
torch's generator). Edges run from ``edge_index[0]`` (source) to ``edge_index[1]`` (target); ``graph`` may be a
:class:`qgnn.Graph` or whatever PyG takes as edges.
"""

from qgnn.functional.activation import activation
from qgnn.functional.attention import attention, attention_dot, attention_gatv2
from qgnn.functional.blocks import compress, decompress
from qgnn.functional.dense import dequantize, linear, quantize
from qgnn.functional.edges import attention_weights, edge_softmax, sddmm
from qgnn.functional.sparse import graph_linear, incidence_sum, spmm

__all__ = [
    "activation",
    "attention",
    "attention_dot",
    "attention_gatv2",
    "attention_weights",
    "compress",
    "decompress",
    "dequantize",
    "edge_softmax",
    "graph_linear",
    "incidence_sum",
    "linear",
    "quantize",
    "sddmm",
    "spmm",
]
