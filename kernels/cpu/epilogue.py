"""ReLU and dropout behind a product or a sum in C: ``y = y * factor`` where it is above 0 and kept, else 0.

A mask keeps one bit an element, whether its gradient passes. Numerics: bit-equal to the reference.

Oracle: qgnn.reference.activation
"""

from typing import Any

from qgnn.kernels.cpu.library import launch, stream_key
from torch import Tensor

Arguments = tuple[Tensor | float | None, ...]


def activation_arguments(activation: Any) -> Arguments:
    """Mask, ReLU, threshold, seed, stream and factor of a ``qgnn.activation.Activation``, as the C functions take them;
    without one, nothing is done."""
    if activation is None:
        return (None, 0, 0, None, 0, 1.0)
    mask, relu, threshold, seed, stream, factor = (
        *(activation.mask, activation.relu, activation.threshold),
        *(activation.seed, activation.stream, activation.factor),
    )
    return (mask, int(relu), threshold, seed, stream_key(stream), factor)


def activate(y: Tensor, activation: Any, first_row: int = 0) -> None:
    """Apply an activation to contiguous fp32 rows [R, F] in place."""
    if activation is not None:
        launch("qgnn_epilogue_activate", y, *activation_arguments(activation), first_row, *y.shape)
