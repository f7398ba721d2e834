"""What is applied to rows before they are written: ReLU or another function, then dropout, and what remembers it.

The backward pass needs one bit an element, not the rows: whether its gradient passes. Bit ``f % 8`` of byte ``f // 8``
of a mask's row belongs to column ``f``; bits behind the last column are 0. An element is dropped if its 16 random bits,
those of the rounding's hash, are below a threshold, so a probability is a multiple of ``2**-16``.

Of ELU, whose slope has more than two values, a byte an element is kept, its slope over the largest there is.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

KINDS = ("none", "relu", "leaky_relu", "elu")
LEVELS = 255  # the code of the largest derivative

_STEPS = 1 << 16


class Activation(NamedTuple):
    """An epilogue.

    Args:
        relu: Negative values become 0.
        threshold: Elements whose 16 random bits are below it are dropped; 0 for no dropout.
        seed: Seed of the dropout, int64 ``[1]``; ``None`` without one.
        stream: Number of the seed's stream.
        mask: Where to write the bits, uint8 ``[N, ceil(F / 8)]``; ``None`` without a backward pass.
    """

    relu: bool
    threshold: int
    seed: Tensor | None
    stream: int
    mask: Tensor | None

    @property
    def factor(self) -> float:
        """What kept elements are multiplied by, ``1 / (1 - p)``."""
        return keep_factor(self.threshold)


def dropout_threshold(probability: float) -> int:
    """The threshold that comes next to a probability of dropping an element."""
    return round(probability * _STEPS)


def keep_factor(threshold: int) -> float:
    """What kept elements and their gradients are multiplied by; 0 where none is kept."""
    return _STEPS / (_STEPS - threshold) if threshold < _STEPS else 0.0


def mask_width(num_columns: int) -> int:
    """Bytes of a mask's row."""
    return (num_columns + 7) // 8


def derivative_steps(alpha: float) -> float:
    """What ELU's derivative is multiplied by for steps of which ``2**16`` are one code."""
    return LEVELS * _STEPS / max(1.0, alpha)


def derivative_size(alpha: float) -> float:
    """The derivative that one step of its code stands for."""
    return max(1.0, alpha) / LEVELS
