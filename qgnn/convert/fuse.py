"""Activations and dropout that stand behind a layer for certain, moved into its epilogue, and back.

A module whose work was moved is replaced by a twin of the same type that passes its input through, so that whoever
reads the model sees it as before. The layer reads the twin's numbers in each call: a dropout's ``p`` can be changed.
Layers and twins share a :class:`Fused`, which says whether all of them are still where they were: if not, layers are
plain and twins do their own work again. So they are in a copy, unless it holds the model that they were found in.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations
from torch_geometric.nn import MLP, Sequential
from torch_geometric.nn.models.basic_gnn import BasicGNN

from qgnn.convert.layers import COUNTERPARTS
from qgnn.nn._layer import Quantized
from qgnn.nn.epilogue import Fused, module_at

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Moved(nn.Module):
    """Mixed into a module in front of its class, when a layer does its work."""

    original: nn.Module  # kept out of the modules
    fused: Fused

    def forward(self, x: Tensor) -> Tensor:
        return x if self.fused.is_live else super().forward(x)

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), "fused" if self.fused.is_live else "")))

    def restored(self) -> nn.Module:
        """The module that this one stands in for, with the state that this one has."""
        state = {**vars(self)}
        del state["original"], state["fused"]
        vars(self.original).update(state)
        return self.original


class MovedReLU(Moved, nn.ReLU):
    """A ReLU that the layer in front of it applies."""


class MovedLeakyReLU(Moved, nn.LeakyReLU):
    """A LeakyReLU that the layer in front of it applies."""


class MovedELU(Moved, nn.ELU):
    """An ELU that the layer in front of it applies."""


class MovedDropout(Moved, nn.Dropout):
    """Dropout that the layer in front of it applies, while this one is in training mode."""


_ACTIVATIONS: dict[type[nn.Module], type[Moved]] = {
    nn.ReLU: MovedReLU,
    nn.LeakyReLU: MovedLeakyReLU,
    nn.ELU: MovedELU,
}
_TWINS = {**_ACTIVATIONS, nn.Dropout: MovedDropout}


def _moved(module: nn.Module, fused: Fused) -> Moved:
    cls: Any = _TWINS[type(module)]
    twin = cls.__new__(cls)
    vars(twin).update(vars(module), original=module, fused=fused)
    return twin


class Memory:
    """What a model remembers of what was moved in it: a copy of the model, by ``copy`` or ``pickle``, has its own.

    Args:
        model: The model.
        fused: What its layers do.
    """

    def __init__(self, model: nn.Module, fused: tuple[Fused, ...]) -> None:
        self.model, self.fused = weakref.ref(model), fused
        for each in fused:
            each.attach(model)

    def __reduce__(self) -> tuple[Any, ...]:
        model = self.model()
        if model is None:  # a shallow copy outlived its model
            return type(None), ()
        return Memory, (model, self.fused)


class Chain(NamedTuple):
    """Where layers are in a model, and the names of an activation and perhaps of dropout that stand behind each."""

    layers: tuple[tuple[str, ...], ...]
    names: tuple[str, ...]


def _does_nothing(norms: nn.ModuleList) -> bool:
    return all(type(norm) is nn.Identity and not _is_watched(norm) for norm in norms)


def _in_basic_gnn(model: BasicGNN) -> Iterator[Chain]:
    number = len(model.convs) if model.jk_mode is not None else len(model.convs) - 1
    layers = tuple(("convs", str(i)) for i in range(number))
    if _does_nothing(model.norms):
        yield Chain(layers, ("act", "dropout"))
    elif model.act_first:
        yield Chain(layers, ("act",))


def _in_mlp(model: MLP) -> Iterator[Chain]:
    # Its dropout is a list of numbers that the model reads itself.
    if model.act_first or _does_nothing(model.norms):
        yield Chain(tuple(("lins", str(i)) for i in range(len(model.norms))), ("act",))


def _in_order(model: nn.Module, names: list[str], feeds: list[bool]) -> Iterator[Chain]:
    """Of a list of modules: each layer with the activation behind it, and the dropout behind that.

    Args:
        model: What holds the modules.
        names: Their names.
        feeds: Whether the result of each goes to the next one, and nowhere else.
    """
    modules: list[Any] = [getattr(model, name) for name in names]
    for i in range(len(modules) - 1):
        if isinstance(modules[i], Quantized) and feeds[i] and type(modules[i + 1]) in _ACTIVATIONS:
            with_dropout = i + 2 < len(modules) and feeds[i + 1] and type(modules[i + 2]) is nn.Dropout
            yield Chain(((names[i],),), tuple(names[i + 1 : i + 3 if with_dropout else i + 2]))


def _in_pyg_sequential(model: Sequential) -> Iterator[Chain]:
    calls = model._children
    feeds = []
    for i, call in enumerate(calls[:-1]):
        read_later = any(name in call.return_names for later in calls[i + 2 :] for name in later.param_names)
        overwritten = calls[i + 1].return_names == call.return_names
        alone = len(call.return_names) == 1 and calls[i + 1].param_names == call.return_names
        feeds.append(alone and (overwritten or not read_later))
    yield from _in_order(model, [call.name for call in calls], feeds)


def _runs_forward_of(model: nn.Module, cls: type[nn.Module]) -> bool:
    """Whether a model runs the code of ``cls`` and none of its own."""
    if cls is Sequential:  # generates a forward for each of its instances, and sets that of the class
        own = vars(model).get("forward")
        return type(model) is cls and (own is None or own.__module__.startswith(f"{cls.__module__}_{cls.__name__}_"))
    return isinstance(model, cls) and type(model).forward is cls.forward and "forward" not in vars(model)


def _chains(model: nn.Module) -> Iterator[Chain]:
    if _runs_forward_of(model, BasicGNN):
        yield from _in_basic_gnn(model)
    elif _runs_forward_of(model, MLP):
        yield from _in_mlp(model)
    elif _runs_forward_of(model, Sequential):
        yield from _in_pyg_sequential(model)
    elif _runs_forward_of(model, nn.Sequential):
        names = list(model._modules)
        yield from _in_order(model, names, [True] * len(names))


def _is_watched(module: nn.Module) -> bool:
    """Whether a module runs more than its class's own code."""
    return "forward" in vars(module) or any(getattr(module, kind) for kind in _HOOKS)


def _can_move(activation: nn.Module) -> bool:
    """Whether an activation is one that layers know, with numbers that they take."""
    alpha, slope = getattr(activation, "alpha", 1.0), getattr(activation, "negative_slope", 0.0)
    known = type(activation) in _ACTIVATIONS and not _is_watched(activation)
    return known and math.isfinite(slope) and math.isfinite(alpha) and alpha >= 0


def fuse_(root: nn.Module) -> None:
    """Move what stands behind quantized layers into their epilogues, wherever the order is certain.

    A layer that is used twice, that somebody watches with hooks, or that has an epilogue of its own stays as it is, and
    with it the layers that share its activation.
    """
    uses = Counter(id(child) for module in root.modules() for child in module._modules.values())
    for model in tuple(root.modules()):
        moved = []
        for places, names in _chains(model):
            layers = [module_at(model, place) for place in places]
            if not layers or not all(_can_fuse(layer) and uses[id(layer)] == 1 for layer in layers):
                continue
            modules = [module_at(model, (name,)) for name in names]
            if not _can_move(modules[0]):
                continue
            if any(type(m) is not nn.Dropout or _is_watched(m) or uses[id(m)] > 1 for m in modules[1:]):
                names, modules = names[:1], modules[:1]
            fused = Fused(places, names)
            model._modules.update((name, _moved(module, fused)) for name, module in zip(names, modules, strict=True))
            for layer in layers:
                layer.configure(layer.config, fused)
            moved.append(fused)
        if moved:
            vars(model)["_moved"] = Memory(model, tuple(moved))


def _can_fuse(layer: nn.Module) -> bool:
    """Of a subclass nobody knows what it does behind the product."""
    known = type_before_parametrizations(layer) in COUNTERPARTS.values()
    return known and layer.epilogue is None and not _is_watched(layer)


def unfuse_(root: nn.Module) -> None:
    """Undo :func:`fuse_`. What somebody put in the place of a module that was moved stays."""
    for layer in root.modules():
        if isinstance(layer, Quantized) and isinstance(layer.epilogue, Fused) and not is_fused_outside(layer, root):
            layer.configure(layer.config)
    for model in tuple(root.modules()):
        vars(model).pop("_moved", None)
        for name, child in model._modules.items():
            if isinstance(child, Moved):
                model._modules[name] = child.restored()


def is_fused_outside(layer: nn.Module, root: nn.Module) -> bool:
    """Whether a layer does the work of a module that is not in ``root``."""
    if not isinstance(layer, Quantized) or not isinstance(layer.epilogue, Fused) or not layer.epilogue.is_live:
        return False
    owner = layer.epilogue.module_at()
    return all(module is not owner for module in root.modules())
