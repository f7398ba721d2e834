"""The compressor: what a training step keeps, in packed codes."""

from qgnn.compress.gradients import GradientAccumulator

__all__ = ["GradientAccumulator"]
