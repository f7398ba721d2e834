"""The primitives as PyTorch operators: schema, fake, CPU, CUDA and autograd of each, side by side.

Importing this package registers them under ``torch.ops.qgnn``; Triton is imported at the first call with a CUDA tensor.
"""

from qgnn.ops.graph_linear import graph_linear
from qgnn.ops.matmul import matmul
from qgnn.ops.quantize import quantize
from qgnn.ops.spmm import spmm

__all__ = ["graph_linear", "matmul", "quantize", "spmm"]
