"""quantize_ and revert_: a layer becomes a quantized one by a change of its class."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeVar

import torch
from torch import nn

from qgnn.config import QConfig, check_product_config
from qgnn.convert.fuse import fuse_, is_fused_outside, unfuse_
from qgnn.convert.layers import (
    COUNTERPARTS,
    READ_BY_TORCH,
    Mark,
    feeds_softmax,
    is_as_converted,
    is_layer,
    is_listed,
    last_layer,
    mark_of,
    matches,
    own_products,
    unwrapped,
    walk,
    why_left,
    widest_sum,
)
from qgnn.nn._layer import Quantized
from qgnn.rounding import MAX_INT32_TERMS

Model = TypeVar("Model", bound=nn.Module)
Filter = Callable[[nn.Module, str], bool]
Configs = Mapping[str, "QConfig | None"]

_CONFIGURED = ("config", "epilogue", "takes_activations")  # all that a layer gets


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
    ``BasicGNN`` its ``lin`` or last convolution, in other models the last layer in the order of ``named_modules()``,
    with those beside it in a ``HeteroConv`` or behind ``to_hetero``. In full precision layers run on the same fused
    kernels.

    A ReLU, LeakyReLU or ELU behind a layer, and dropout behind that, are moved into the layer where the order is
    certain: in a ``BasicGNN``, a ``Sequential`` of torch's or PyG's, and an ``MLP`` of PyG's, whose dropout stays where
    it is. The modules stay in their places and pass on what they get. So code that calls ``model.convs[0]`` or
    ``sequential[0]`` itself, and hooks that it registers on a layer after the conversion, see rows behind the
    activation and the dropout; ``BasicGNN.inference_per_layer``, which PyG runs without dropout, drops if the model's
    dropout module is in training mode. With ``fuse=False`` every module returns what it returned before.

    Dropout draws other random numbers than torch's, and drops while its module, not the layer, is in training mode.
    Layers, activations and dropout with hooks are not touched. If one of the modules or layers is replaced later, the
    others of its chain do their own work again, as they do in a copy, by ``copy`` or ``pickle``, that holds less than
    the model that they were found in.

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
        ValueError: If there is nothing to convert, a pattern matches nothing or is no regular expression, or the class
            of a layer to be left alone was changed since a former conversion: then nothing is changed.

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
    left = {step.name: step.layer for step in steps if step.left}
    _check_whole(root, left, "quantize_")
    for step in steps:
        _check_classes(step.name, step.layer.modules() if step.left else own_products(step.layer), "quantize_")
    unfuse_(root)
    for step in steps:
        _apply(step)
    if fuse:
        fuse_(root)
    return model


def revert_(model: Model) -> Model:
    """Undo :func:`quantize_`, in place: classes, activations and dropout are as they were, parameters as they are.

    Layers that were built as quantized ones get back the config that they had.

    Args:
        model: What was given to :func:`quantize_`, or a part of it.

    Returns:
        ``model``.

    Raises:
        TypeError: If ``model`` is no module.
        ValueError: If ``model`` is a layer that applies an activation of a model around it, or the class of a layer
            was changed since, as by a parametrization: then nothing is undone.

    Example:
        >>> qgnn.revert_(qgnn.quantize_(model, qgnn.QConfig()))
    """
    root = _checked_root(model, "revert_")
    _check_whole(root, dict(root.named_modules()), "revert_")
    for name, module in root.named_modules():
        _check_classes(name, (module,), "revert_")
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


def _check_classes(name: str, modules: Iterable[nn.Module], owner: str) -> None:
    for module in modules:
        if not is_as_converted(module):
            raise ValueError(
                f"'{owner}' expects layers of the classes that 'quantize_' gave them (got a {type(module).__name__} in "
                f"{name!r}); remove its parametrizations or wrappers first"
            )


def _plan(root: nn.Module, configs: Configs, filter_fn: Filter | None, keep_last: bool) -> Iterator[_Step]:
    modules = list(walk(root, into_left=True))
    _check_patterns(configs, modules)
    last = last_layer(root) if keep_last else None
    in_last = set() if last is None or last is root else {id(module) for module in last.modules()}
    last_reason = f"{'feeds the class softmax' if feeds_softmax(root) else 'last of the layers'} (keep_last)"
    excluded: set[int] = set()
    reader: dict[int, str] = {}
    for name, module in modules:
        if isinstance(module, READ_BY_TORCH):
            reader.update((id(part), type(module).__name__) for part in module.modules())
        if not is_layer(module) or id(module) in excluded:
            continue
        if id(module) in reader:
            reason = f"part of a {reader[id(module)]}, whose fast path reads its weights instead of calling it"
            yield _Step(name, module, reason=reason, left=True)
            continue
        if any(parameter.dtype.is_complex for parameter in module.parameters()):
            excluded.update(map(id, module.modules()))
            yield _Step(name, module, reason="complex weights", left=True)
            continue
        if "forward" in vars(module) and not isinstance(module, Quantized):
            excluded.update(map(id, module.modules()))
            yield _Step(name, module, reason="somebody replaced its forward", left=True)
            continue
        if filter_fn is not None and not filter_fn(module, name):
            excluded.update(map(id, module.modules()))
            yield _Step(name, module, reason="left alone by filter_fn", left=True)
            continue
        pattern = next((pattern for pattern in configs if matches(pattern, name)), None)
        if pattern is None:
            yield _Step(name, module, reason="matched by no pattern of config", left=True)
            continue
        yield _step(name, module, configs, pattern, last_reason if id(module) in in_last else None)


def _step(name: str, layer: nn.Module, configs: Configs, pattern: str, last: str | None) -> _Step:
    config = configs[pattern]
    if config is None:
        return _Step(name, layer, reason="config is None")
    if any(matches(kept, name) for kept in config.keep_fp32):
        return _Step(name, layer, reason="in keep_fp32")
    if last is not None and name not in configs:
        return _Step(name, layer, reason=last)
    if config.is_integer and widest_sum(layer) > MAX_INT32_TERMS:
        return _Step(name, layer, reason=f"sums of more than {MAX_INT32_TERMS:,} products, which int32 does not hold")
    probe = type(layer).__new__(type(layer))  # copy.copy refuses parametrized layers
    vars(probe).update(vars(layer))
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
        try:
            matches(pattern, "")
        except re.error as error:
            raise ValueError(
                f"'quantize_' expects a regular expression behind 're:' (got {pattern!r}: {error})"
            ) from None
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
    layer = step.layer
    if step.left:
        for part in layer.modules():
            _restore(part)
        mark = _mark(layer) if isinstance(layer, Quantized) else Mark()
    else:
        for product in own_products(layer):
            _restore(product)
        known = mark_of(layer)
        mark = known if known is not None and isinstance(layer, Quantized) else _mark(layer)
        _configure(layer, step.config)
    layer._conversion = replace(mark, reason=step.reason)


def _mark(layer: Any) -> Mark:
    if isinstance(layer, Quantized):
        return Mark(former={"config": layer.config})
    return Mark(type(layer), {name: vars(layer)[name] for name in _CONFIGURED if name in vars(layer)})


def _configure(layer: Any, config: QConfig | None) -> None:
    if isinstance(layer, Quantized):
        layer.configure(config, layer.epilogue)
    else:
        layer.__class__ = COUNTERPARTS[type(layer)]
        layer.configure(config)


def _restore(module: nn.Module) -> None:
    mark = vars(module).pop("_conversion", None)
    if mark is None:
        return
    if mark.original is not None:
        for name in _CONFIGURED:
            vars(module).pop(name, None)
        module.__class__ = mark.original
    vars(module).update(mark.former)
