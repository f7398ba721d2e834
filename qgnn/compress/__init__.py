"""The compressor of activations and gradients: what a training step keeps, in a few bits a value.

- :class:`qgnn.compress_activations`: what autograd keeps of an eager model, with its :class:`Report` of each
  :class:`SavedTensor`;
- :class:`GradientAccumulator`: sums of the gradients of micro-batches;
- :func:`optimal_bins`: the edges between which codes add the least variance.

Codes of single tensors are made by :func:`qgnn.functional.compress`; layers of :mod:`qgnn.nn` keep them with
``QConfig(save=qgnn.formats.Blocks(...))``.

What an optimizer keeps is served by torchao (``pip install torchao``), whose ``torchao.optim.AdamW8bit`` and
``AdamW4bit`` take the parameters of PyG's layers and of ours, before or after ``qgnn.quantize_``. They go through
torch.compile, and code tensors of at least 4,096 values that are whole blocks of 256 (of 128 with 4 bits): other ones
stay in fp32. bitsandbytes' ``AdamW8bit`` codes all of at least 4,096 values.
"""

from qgnn.bins import optimal_bins
from qgnn.compress.context import compress_activations
from qgnn.compress.gradients import GradientAccumulator
from qgnn.compress.report import Report, SavedTensor

__all__ = ["GradientAccumulator", "Report", "SavedTensor", "compress_activations", "optimal_bins"]
