"""Errors of quantization, and the widths that keep them small.

- :func:`error_x`, :func:`sqnr`, :func:`bias` and :func:`cosine` compare values with what became of them. They are
  computed in fp64 and stay on the device, as tensors without dimensions.
- :func:`select_bits` and :func:`select_bits_per_layer` choose widths by the first of them, after `"Tango: Rethinking
  Quantization for Graph Neural Network Training on GPUs" <https://arxiv.org/abs/2308.00890>`_; :func:`apply_bits` gives
  them to a model.
"""

from qgnn.metrics.errors import bias, cosine, error_x, sqnr
from qgnn.metrics.selection import apply_bits, select_bits, select_bits_per_layer

__all__ = ["apply_bits", "bias", "cosine", "error_x", "select_bits", "select_bits_per_layer", "sqnr"]
