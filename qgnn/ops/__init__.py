"""The primitives as PyTorch operators: schema, fake, CPU, CUDA and autograd of each, side by side.

Importing this package registers them under ``torch.ops.qgnn``; Triton is imported at the first call with a CUDA tensor.
"""

from qgnn.ops._backends import STREAM_DROPOUT
from qgnn.ops._packed import Packed
from qgnn.ops.activation import activation
from qgnn.ops.adjacency import adjacency_filter, adjacency_merge
from qgnn.ops.attention import attention
from qgnn.ops.attention_dot import attention_dot
from qgnn.ops.attention_gatv2 import attention_gatv2
from qgnn.ops.blocks import blocks_pack, blocks_unpack
from qgnn.ops.codes import codes_pack, codes_unpack
from qgnn.ops.graph_linear import graph_linear
from qgnn.ops.matmul import matmul
from qgnn.ops.matmul_codes import matmul_codes, matmul_codes_dw, matmul_shared
from qgnn.ops.quantize import quantize
from qgnn.ops.quantize_grid import quantize_dequantize, quantize_shared
from qgnn.ops.sddmm import sddmm
from qgnn.ops.softmax import attention_scores, softmax
from qgnn.ops.spmm import spmm
from qgnn.ops.spmm_extremum import spmm_extremum
from qgnn.ops.spmm_incidence import incidence_sum

__all__ = [
    "STREAM_DROPOUT",
    "Packed",
    "activation",
    "adjacency_filter",
    "adjacency_merge",
    "attention",
    "attention_dot",
    "attention_gatv2",
    "attention_scores",
    "blocks_pack",
    "blocks_unpack",
    "codes_pack",
    "codes_unpack",
    "graph_linear",
    "incidence_sum",
    "matmul",
    "matmul_codes",
    "matmul_codes_dw",
    "matmul_shared",
    "quantize",
    "quantize_dequantize",
    "quantize_shared",
    "sddmm",
    "softmax",
    "spmm",
    "spmm_extremum",
]
