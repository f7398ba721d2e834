"""Epilogue: what stands between two layers, applied by the first of them."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATIONS = ("relu", "leaky_relu", "elu")


@dataclass(frozen=True)
class Epilogue:
    """An activation and dropout that a layer applies to its own result, in training; in eval mode without dropout.

    Where the layer's last kernel can, it applies them in its own pass, so that the rows in front of them are never
    written, and keeps one bit a value for the backward pass. Otherwise one more pass does it.

    Args:
        activation: ``"relu"``, ``"leaky_relu"``, ``"elu"`` or ``None``.
        dropout: Probability that an element is dropped after that, in steps of ``2**-16``.
        negative_slope: Slope of the LeakyReLU below 0.
        alpha: Scale of the ELU below 0.

    Raises:
        ValueError: If the activation is unknown, or ``dropout`` no probability.

    Example:
        >>> conv = qgnn.nn.QGCNConv(128, 64, epilogue=qgnn.nn.Epilogue("relu", dropout=0.5))
    """

    activation: str | None = None
    dropout: float = 0  # an integer: torch.compile makes a symbol of a float
    negative_slope: float = 0.01
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if self.activation not in (None, *ACTIVATIONS):
            raise ValueError(
                f"'Epilogue' expects 'activation' to be one of {ACTIVATIONS} or None (got {self.activation!r})"
            )
        if not isinstance(self.dropout, (int, float)) or not 0.0 <= self.dropout <= 1.0:
            raise ValueError(f"'Epilogue' expects 'dropout' to be a probability from 0 to 1 (got {self.dropout!r})")


def check_epilogue(epilogue: object, owner: str) -> None:
    """Raise a ``TypeError`` unless ``epilogue`` is an :class:`Epilogue` or ``None``."""
    if epilogue is not None and not isinstance(epilogue, Epilogue):
        raise TypeError(
            f"'{owner}' expects 'epilogue' to be an Epilogue or None (got {epilogue!r}); "
            f"write epilogue=qgnn.nn.Epilogue('relu')"
        )
