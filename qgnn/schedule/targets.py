"""What a schedule sets the width of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from qgnn.compress import compress_activations
from qgnn.config import QConfig
from qgnn.nn._layer import Quantized

Target = nn.Module | compress_activations | Callable[[int], Any]
Targets = Target | Iterable[Target]


def _configs(model: nn.Module, bits: int) -> list[tuple[Quantized, QConfig]]:
    """The quantized layers of a model, each with its config in another width."""
    layers = [(m, m.config) for m in model.modules() if isinstance(m, Quantized)]
    return [(layer, config.with_bits(bits)) for layer, config in layers if config is not None]


def check_width(target: Target, bits: int) -> None:
    """Raise a ``ValueError`` unless ``target`` has this width, as far as can be known."""
    if isinstance(target, nn.Module):
        if not _configs(target, bits):
            raise ValueError(
                f"A schedule expects a model with quantized layers (got a {type(target).__name__} without any); "
                f"convert it with 'qgnn.quantize_(model, qgnn.QConfig())' first"
            )
    elif isinstance(target, compress_activations):
        before = target.bits
        target.bits = bits  # raises
        target.bits = before


def set_width(target: Target, bits: int) -> None:
    if isinstance(target, nn.Module):
        for layer, config in _configs(target, bits):
            layer.config = config
    elif isinstance(target, compress_activations):
        target.bits = bits
    else:
        target(bits)


def checked_targets(owner: str, target: Any) -> list[Target]:
    targets = list(target) if isinstance(target, (list, tuple)) else [target]
    for each in targets:
        if isinstance(each, type) or not callable(each):
            raise TypeError(
                f"'{owner}' expects a model, a 'qgnn.compress_activations', a function of the width, or a list of "
                f"these (got {each!r})"
            )
    if not targets:
        raise ValueError(f"'{owner}' expects at least one target (got an empty list)")
    return targets
