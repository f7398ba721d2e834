"""The compressor of activations and gradients: what a training step keeps, in a few bits a value."""

from qgnn.bins import optimal_bins
from qgnn.compress.context import compress_activations
from qgnn.compress.gradients import GradientAccumulator
from qgnn.compress.report import Report, SavedTensor

__all__ = ["GradientAccumulator", "Report", "SavedTensor", "compress_activations", "optimal_bins"]
