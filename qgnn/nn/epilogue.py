"""Epilogue: what stands between two layers, applied by the first of them."""

from __future__ import annotations

import weakref
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

    @property
    def is_live(self) -> bool:
        """Whether it is to be applied."""
        return True

    def drops(self, training: bool) -> float:
        """Probability that an element is dropped in this call of a layer.

        Args:
            training: Whether the layer is in training mode.
        """
        return self.dropout if training else 0


def module_at(root: nn.Module | None, path: tuple[str, ...]) -> Any:
    """The module at a place in another one, or ``None``."""
    for name in path:
        root = None if root is None else root._modules.get(name)
    return root


class Fused(Epilogue):
    """What modules behind some layers did in their model, with the numbers and the mode that these have at each call.

    It is live while all of them, layers and modules, are at their places in that model and know this very object. The
    model is not kept alive, and is not part of a copy, to which :meth:`attach` then gives the copy of the model.

    Args:
        layers: Where the layers are: names of modules, from the model inwards.
        names: Names of the activation and perhaps of the dropout behind it.
    """

    layers: tuple[tuple[str, ...], ...]
    names: tuple[str, ...]
    owner: weakref.ref[nn.Module] | None

    def __init__(self, layers: tuple[tuple[str, ...], ...], names: tuple[str, ...]) -> None:
        vars(self).update(layers=layers, names=names, owner=None)

    def attach(self, owner: nn.Module) -> None:
        """Say which model the places are in."""
        vars(self)["owner"] = weakref.ref(owner)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "owner": None}

    def module_at(self, *path: str) -> Any:
        """What is at a place in the model, or ``None``."""
        return module_at(None if self.owner is None else self.owner(), path)

    @property
    def is_live(self) -> bool:
        if any(getattr(self.module_at(name), "fused", None) is not self for name in self.names):
            return False
        return all(getattr(self.module_at(*path), "epilogue", None) is self for path in self.layers)

    def drops(self, training: bool) -> float:
        return self.dropout if len(self.names) == 2 and self.module_at(self.names[1]).training else 0

    @property
    def activation(self) -> str | None:
        kinds = {nn.ReLU: "relu", nn.LeakyReLU: "leaky_relu", nn.ELU: "elu"}
        module = self.module_at(self.names[0])
        return next((name for kind, name in kinds.items() if isinstance(module, kind)), None)

    @property
    def dropout(self) -> float:
        return getattr(self.module_at(self.names[1]), "p", 0) or 0 if len(self.names) == 2 else 0

    @property
    def negative_slope(self) -> float:
        return getattr(self.module_at(self.names[0]), "negative_slope", Epilogue.negative_slope)

    @property
    def alpha(self) -> float:
        return getattr(self.module_at(self.names[0]), "alpha", Epilogue.alpha)


def check_epilogue(epilogue: object, owner: str) -> None:
    """Raise a ``TypeError`` unless ``epilogue`` is an :class:`Epilogue` or ``None``."""
    if epilogue is not None and not isinstance(epilogue, Epilogue):
        raise TypeError(
            f"'{owner}' expects 'epilogue' to be an Epilogue or None (got {epilogue!r}); "
            f"write epilogue=qgnn.nn.Epilogue('relu')"
        )
