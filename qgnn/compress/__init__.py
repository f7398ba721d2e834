"""The compressor of activations: what a training step keeps for its backward pass, in a few bits a value."""

from qgnn.bins import optimal_bins
from qgnn.compress.context import compress_activations
from qgnn.compress.report import Report, SavedTensor

__all__ = ["Report", "SavedTensor", "compress_activations", "optimal_bins"]
