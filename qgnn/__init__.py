"""qgnn: training of PyTorch Geometric models in int8, on Triton kernels.

Importing this package loads neither Triton nor a compiler; the first call on a CUDA tensor does.
"""

from qgnn import compress, data, formats, functional, metrics, nn, rng, schedule
from qgnn.compress import compress_activations
from qgnn.compressed_tensor import CompressedTensor
from qgnn.config import QConfig
from qgnn.convert import quantize_, revert_, summary
from qgnn.graph import Graph
from qgnn.qtensor import QTensor
from qgnn.trace import trace

__version__ = "0.1.0"

__all__ = [
    "CompressedTensor",
    "Graph",
    "QConfig",
    "QTensor",
    "__version__",
    "compress",
    "compress_activations",
    "data",
    "formats",
    "functional",
    "metrics",
    "nn",
    "quantize_",
    "revert_",
    "rng",
    "schedule",
    "summary",
    "trace",
]
