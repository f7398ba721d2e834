"""Epilogue: what stands between two layers, applied by the first of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

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


class Fused(Epilogue):
    """What the modules behind a layer did in its model, with the numbers that these have at each call.

    Args:
        activation: A ReLU, LeakyReLU or ELU.
        dropout: A dropout behind that.
    """

    modules: tuple[Any, ...]

    def __init__(self, activation: nn.Module, dropout: nn.Module | None = None) -> None:
        object.__setattr__(self, "modules", (activation,) if dropout is None else (activation, dropout))

    @property
    def activation(self) -> str:
        kinds = {nn.ReLU: "relu", nn.LeakyReLU: "leaky_relu", nn.ELU: "elu"}
        return next(name for kind, name in kinds.items() if isinstance(self.modules[0], kind))

    @property
    def dropout(self) -> float:
        return (self.modules[1].p if len(self.modules) == 2 else 0) or 0

    @property
    def negative_slope(self) -> float:
        return getattr(self.modules[0], "negative_slope", Epilogue.negative_slope)

    @property
    def alpha(self) -> float:
        return getattr(self.modules[0], "alpha", Epilogue.alpha)


def check_epilogue(epilogue: object, owner: str) -> None:
    """Raise a ``TypeError`` unless ``epilogue`` is an :class:`Epilogue` or ``None``."""
    if epilogue is not None and not isinstance(epilogue, Epilogue):
        raise TypeError(
            f"'{owner}' expects 'epilogue' to be an Epilogue or None (got {epilogue!r}); "
            f"write epilogue=qgnn.nn.Epilogue('relu')"
        )
