"""Every primitive as one plain PyTorch function.

These functions define what the primitives compute: kernels are compared with them, bit for bit where a result is an
integer or a rounded code. They are also the path where there is no kernel, so they walk over large inputs in chunks
that stay in cache, but contain no other trick. None of them carries gradients: ``qgnn.ops`` adds those.

Quantized pairs obey ``x = x_q * x_scale``. A seed is an int64 tensor of shape ``[1]``; ``None`` rounds to nearest.
"""

from qgnn.reference.activation import activation, activation_backward
from qgnn.reference.adjacency import adjacency_filter, adjacency_merge
from qgnn.reference.attention import attention, attention_backward
from qgnn.reference.attention_dot import attention_dot, attention_dot_backward
from qgnn.reference.attention_gatv2 import attention_gatv2, attention_gatv2_backward
from qgnn.reference.blocks import blocks_pack, blocks_unpack
from qgnn.reference.codes import codes_pack, codes_unpack
from qgnn.reference.dense import (
    matmul,
    matmul_dw,
    matmul_requantize,
    quantize,
    quantize_grad,
    quantize_matmul,
    quantize_matmul_requantize,
)
from qgnn.reference.edges import (
    attention_scores,
    attention_scores_backward,
    sddmm,
    softmax,
    softmax_backward,
)
from qgnn.reference.grids import quantize_dequantize, quantize_shared
from qgnn.reference.matmul_shared import matmul_shared
from qgnn.reference.sparse import (
    spmm,
    spmm_extremum,
    spmm_extremum_dweight,
    spmm_extremum_dx,
    spmm_requantize,
)

NAME = "torch"

__all__ = [
    "NAME",
    "activation",
    "activation_backward",
    "adjacency_filter",
    "adjacency_merge",
    "attention",
    "attention_backward",
    "attention_dot",
    "attention_dot_backward",
    "attention_gatv2",
    "attention_gatv2_backward",
    "attention_scores",
    "attention_scores_backward",
    "blocks_pack",
    "blocks_unpack",
    "codes_pack",
    "codes_unpack",
    "matmul",
    "matmul_dw",
    "matmul_requantize",
    "matmul_shared",
    "quantize",
    "quantize_dequantize",
    "quantize_grad",
    "quantize_matmul",
    "quantize_matmul_requantize",
    "quantize_shared",
    "sddmm",
    "softmax",
    "softmax_backward",
    "spmm",
    "spmm_extremum",
    "spmm_extremum_dweight",
    "spmm_extremum_dx",
    "spmm_requantize",
]
