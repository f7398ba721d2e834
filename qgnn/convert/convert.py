"""quantize_ and revert_: a layer becomes a quantized one by a change of its class."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeVar

import torch
from torch import nn

from qgnn.config import QConfig, check_product_config
from qgnn.convert.fuse import fuse_, is_fused_outside, unfuse_
from qgnn.convert.layers import (
    COUNTERPARTS,
    Mark,
    is_layer,
    is_listed,
    last_layer,
    mark_of,
    matches,
    own_products,
    unwrapped,
    walk,
    why_left,
)
from qgnn.nn._layer import Quantized

Model = TypeVar("Model", bound=nn.Module)
Filter = Callable[[nn.Module, str], bool]
Configs = Mapping[str, "QConfig | None"]


@dataclass
class _Step:
    """What becomes of one layer: quantized, in full precision for a ``reason``, or left alone for one."""

    name: str
    layer: Any  # a module, whose class and attributes change
    config: QConfig | None = None
    reason: str | None = None
    left: bool = False


def quantize_(
    model: Model,
    config: QConfig | Configs | None,
    filter_fn: Filter | None = None,
    *,
    keep_last: bool = True,
    fuse: bool = True,
) -> Model:
    """Make the layers of a model quantized ones, in place.

    Each layer of PyG's that has a counterpart in :mod:`qgnn.nn`, and each :class:`torch.nn.Linear`, changes its class.
    Parameters, buffers, hooks, the names in the state dict and the state of an optimizer stay what they are, so that
    this can be done before, during and after a training. A second call configures a model anew.

    The layer that makes the result, which a softmax over classes reads, stays in full precision, after `"Tango:
    Rethinking Quantization for Graph Neural Network Training on GPUs" <https://arxiv.org/abs/2308.00890>`_: in a
    ``BasicGNN`` its ``lin`` or last convolution, in other models the last layer in the order of ``named_modules()``.
    In full precision layers run on the same fused kernels.

    A ReLU, LeakyReLU or ELU behind a layer, and dropout behind that, are moved into the layer where the order is
    certain: in a ``BasicGNN``, a ``Sequential`` of torch's or PyG's, and an ``MLP`` of PyG's, whose dropout stays where
    it is. Such a layer returns what the activation returned before, and draws what it drops by other random numbers;
    it drops while the layer is in training mode. Layers with hooks, and activations with hooks, are not touched. A copy
    of a layer alone (as ``to_hetero`` makes them) is one without the activation. Use :func:`revert_` before you replace
    modules in such a model.

    Args:
        model: A module, or one in a wrapper of ``torch.compile``, ``DataParallel`` or ``DistributedDataParallel``.
        config: How to quantize: for all layers, or by patterns of their names, of which the first one that matches
            counts: ``{"convs.0": None, "*": QConfig()}``. A pattern is one of a shell (``"convs.*"``), or a regular
            expression behind ``re:``, and stands for all that is inside a module, too. ``None`` is full precision
            through the same kernels; what no pattern matches is left alone. ``QConfig.keep_fp32`` lists patterns of
            layers in full precision.
        filter_fn: ``filter_fn(layer, name)`` says whether a layer is converted; others are left alone with all that is
            inside them.
        keep_last: Whether the layer that makes the result stays in full precision, unless ``config`` has an entry of
            exactly its name. A layer given as ``model`` is quantized all the same.
        fuse: Whether to move activations and dropout into the layers in front of them.

    Returns:
        ``model``. :func:`summary` lists what became of each of its modules.

    Raises:
        TypeError: If ``model`` is no module that can be changed, or ``config`` is of another type.
        ValueError: If there is nothing to convert, or a pattern matches nothing.

    Example:
        >>> model = torch_geometric.nn.GAT(128, 64, num_layers=3, out_channels=40)
        >>> qgnn.quantize_(model, qgnn.QConfig(bits=8))
        >>> print(qgnn.summary(model))
    """
    configs = _checked(config)
    root = _checked_root(model, "quantize_")
    steps = list(_plan(root, configs, filter_fn, keep_last))
    if all(step.left for step in steps):
        raise ValueError(f"'quantize_' expects a model with layers to convert (got {_found(root, steps)})")
    _check_whole(root, {step.name: step.layer for step in steps if step.left}, "quantize_")
    unfuse_(root)
    for step in steps:
        _apply(step)
    if fuse:
        fuse_(root)
    return model


def revert_(model: Model) -> Model:
    """Undo :func:`quantize_`, in place: classes, activations and dropout are as they were, parameters as they are.

    Layers that were built as quantized ones stay as they are.

    Args:
        model: What was given to :func:`quantize_`, or a part of it.

    Returns:
        ``model``.

    Raises:
        TypeError: If ``model`` is no module.
        ValueError: If ``model`` is a layer that applies an activation of a model around it.

    Example:
        >>> qgnn.revert_(qgnn.quantize_(model, qgnn.QConfig()))
    """
    root = _checked_root(model, "revert_")
    _check_whole(root, dict(root.named_modules()), "revert_")
    unfuse_(root)
    for module in root.modules():
        _restore(module)
    return model


def _checked(config: object) -> Configs:
    if config is None or isinstance(config, QConfig):
        config = {"*": config}
    if not isinstance(config, Mapping) or not all(isinstance(pattern, str) for pattern in config):
        raise TypeError(
            f"'quantize_' expects 'config' to be a QConfig, None or a dict of them by name pattern (got {config!r}); "
            f"write config=qgnn.QConfig(bits=8)"
        )
    for each in config.values():
        check_product_config(each, "quantize_")
    return config


def _checked_root(model: object, owner: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(f"'{owner}' expects 'model' to be a torch.nn.Module (got {type(model).__name__})")
    root = unwrapped(model)
    if isinstance(root, torch.jit.ScriptModule):
        raise TypeError(
            f"'{owner}' expects a model whose layers can be changed (got a TorchScript module); "
            f"convert the model before it is compiled by TorchScript"
        )
    return root


def _check_whole(root: nn.Module, reverted: dict[str, nn.Module], owner: str) -> None:
    for name, layer in reverted.items():
        if is_fused_outside(layer, root):
            raise ValueError(
                f"'{owner}' expects a whole model to undo a conversion (got a part, whose layer "
                f"{name or type(layer).__name__!r} applies the activation of a model around it); give that model"
            )


def _plan(root: nn.Module, configs: Configs, filter_fn: Filter | None, keep_last: bool) -> Iterator[_Step]:
    modules = list(walk(root, into_left=True))
    _check_patterns(configs, modules)
    last = last_layer(root) if keep_last else None
    in_last = set() if last is None or last is root else {id(module) for module in last.modules()}
    excluded: set[int] = set()
    for name, module in modules:
        if not is_layer(module) or id(module) in excluded:
            continue
        if filter_fn is not None and not filter_fn(module, name):
            excluded.update(map(id, module.modules()))
            yield _Step(name, module, reason="left alone by filter_fn", left=True)
            continue
        pattern = next((pattern for pattern in configs if matches(pattern, name)), None)
        if pattern is None:
            yield _Step(name, module, reason="matched by no pattern of config", left=True)
            continue
        yield _step(name, module, configs, pattern, id(module) in in_last)


def _step(name: str, layer: nn.Module, configs: Configs, pattern: str, is_last: bool) -> _Step:
    config = configs[pattern]
    if config is None:
        return _Step(name, layer, reason="config is None")
    if any(matches(kept, name) for kept in config.keep_fp32):
        return _Step(name, layer, reason="in keep_fp32")
    if is_last and name not in configs:
        return _Step(name, layer, reason="feeds the class softmax (keep_last)")
    probe = copy.copy(layer)
    try:
        _configure(probe, config)
    except ValueError as error:  # what a layer offers in full precision alone
        return _Step(name, layer, reason=str(error))
    return _Step(name, layer, config)


def _check_patterns(configs: Configs, modules: list[tuple[str, nn.Module]]) -> None:
    layers = [name for name, module in modules if is_layer(module)]
    names = [name for name, _ in modules]
    kept = [pattern for config in configs.values() if config is not None for pattern in config.keep_fp32]
    for pattern, candidates, kind in [*((p, layers, "layer") for p in configs), *((p, names, "module") for p in kept)]:
        if candidates and not any(matches(pattern, name) for name in candidates):
            close = get_close_matches(pattern, candidates, n=3, cutoff=0) or candidates[:3]
            raise ValueError(
                f"'quantize_' expects patterns that match (got {pattern!r}, which matches no {kind}); "
                f"the closest names are {', '.join(map(repr, close))}"
            )


def _found(root: nn.Module, steps: list[_Step]) -> str:
    reasons = [f"{type(step.layer).__name__}: {step.reason}" for step in steps]
    excluded = {id(module) for step in steps for module in step.layer.modules()}
    others = (module for _, module in walk(root) if is_listed(module) and id(module) not in excluded)
    reasons += [why_left(module) for module in others if not is_layer(module)]
    counts = Counter(reasons)
    listed = "; ".join(f"{reason} (x{count})" if count > 1 else reason for reason, count in counts.items())
    return listed or f"{type(root).__name__}, which has no parameters"


def _apply(step: _Step) -> None:
    if step.left:
        for part in step.layer.modules():
            _restore(part)
        step.layer._conversion = Mark(reason=step.reason)
        return
    for product in own_products(step.layer):
        _restore(product)
    mark = mark_of(step.layer) or Mark()
    original, added = _configure(step.layer, step.config)
    if original is not None:
        mark = Mark(original, added)
    step.layer._conversion = replace(mark, reason=step.reason)


def _configure(layer: Any, config: QConfig | None) -> tuple[type[nn.Module] | None, tuple[str, ...]]:
    """Make ``layer`` quantized; returns the class that it had if that changed, and the attributes that it got."""
    if isinstance(layer, Quantized):
        layer.configure(config, layer.epilogue)
        return None, ()
    before, original = set(vars(layer)), type(layer)
    layer.__class__ = COUNTERPARTS[original]
    if original is nn.Linear:
        layer.in_channels, layer.out_channels = layer.in_features, layer.out_features
        layer.weight_initializer = layer.bias_initializer = None
    layer.configure(config)
    return original, tuple(sorted(set(vars(layer)) - before))


def _restore(module: nn.Module) -> None:
    mark = vars(module).pop("_conversion", None)
    if mark is not None and mark.original is not None:
        for name in mark.added:
            vars(module).pop(name, None)
        module.__class__ = mark.original
