"""Activations and dropout that stand behind a layer for certain, moved into its epilogue, and back.

A module whose work was moved is replaced by a twin of the same type that passes its input through, so that whoever
reads the model sees it as before. The layer reads the twin's numbers in each call: a dropout's ``p`` can be changed.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import MLP, Sequential
from torch_geometric.nn.models.basic_gnn import BasicGNN

from qgnn.nn._layer import Quantized
from qgnn.nn.epilogue import Fused

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Moved(nn.Module):
    """Mixed into a module in front of its class, when a layer does its work."""

    original: nn.Module  # kept out of the modules

    def forward(self, x: Tensor) -> Tensor:
        return x

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), "fused")))

    def restored(self) -> nn.Module:
        """The module that this one stands in for, with the state that this one has."""
        vars(self.original).update({key: value for key, value in vars(self).items() if key != "original"})
        return self.original

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        if not memo:  # a copy of this module alone: behind it stands no layer that does its work
            return copy.deepcopy(self.restored())
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin


class MovedReLU(Moved, nn.ReLU):
    """A ReLU that the layer in front of it applies."""


class MovedLeakyReLU(Moved, nn.LeakyReLU):
    """A LeakyReLU that the layer in front of it applies."""


class MovedELU(Moved, nn.ELU):
    """An ELU that the layer in front of it applies."""


class MovedDropout(Moved, nn.Dropout):
    """Dropout that the layer in front of it applies, while that one is in training mode."""


_ACTIVATIONS: dict[type[nn.Module], type[Moved]] = {
    nn.ReLU: MovedReLU,
    nn.LeakyReLU: MovedLeakyReLU,
    nn.ELU: MovedELU,
}
_TWINS = {**_ACTIVATIONS, nn.Dropout: MovedDropout}


def _moved(module: nn.Module) -> Moved:
    cls: Any = _TWINS[type(module)]
    twin = cls.__new__(cls)
    vars(twin).update(vars(module))
    vars(twin)["original"] = module
    return twin


# What stands behind which layers: their modules, and the names of an activation and perhaps of dropout.
Chain = tuple[list[nn.Module], tuple[str, ...]]


def _in_basic_gnn(model: BasicGNN) -> Iterator[Chain]:
    if type(model).forward is not BasicGNN.forward:
        return
    layers = list(model.convs)[: None if model.jk_mode is not None else -1]
    if all(type(norm) is nn.Identity for norm in model.norms):
        yield layers, ("act", "dropout")
    elif model.act_first:
        yield layers, ("act",)


def _in_mlp(model: MLP) -> Iterator[Chain]:
    # Its dropout is a list of numbers that the model reads itself.
    if type(model).forward is MLP.forward and (
        model.act_first or all(type(norm) is nn.Identity for norm in model.norms)
    ):
        yield list(model.lins)[: len(model.norms)], ("act",)


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
            yield [modules[i]], tuple(names[i + 1 : i + 3 if with_dropout else i + 2])


def _in_pyg_sequential(model: Sequential) -> Iterator[Chain]:
    calls = model._children
    feeds = []
    for i, call in enumerate(calls[:-1]):
        read_later = any(name in call.return_names for later in calls[i + 2 :] for name in later.param_names)
        overwritten = calls[i + 1].return_names == call.return_names
        alone = len(call.return_names) == 1 and calls[i + 1].param_names == call.return_names
        feeds.append(alone and (overwritten or not read_later))
    yield from _in_order(model, [call.name for call in calls], feeds)


def _chains(model: nn.Module) -> Iterator[Chain]:
    if isinstance(model, BasicGNN):
        yield from _in_basic_gnn(model)
    elif isinstance(model, MLP):
        yield from _in_mlp(model)
    elif isinstance(model, Sequential):
        yield from _in_pyg_sequential(model)
    elif isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        names = list(model._modules)
        yield from _in_order(model, names, [True] * len(names))


def _is_watched(module: nn.Module) -> bool:
    return any(getattr(module, kind) for kind in _HOOKS)


def fuse_(root: nn.Module) -> None:
    """Move what stands behind quantized layers into their epilogues, wherever the order is certain.

    A layer that is used twice, that somebody watches with hooks, or that has an epilogue of its own stays as it is, and
    with it the layers that share its activation.
    """
    uses = Counter(id(child) for module in root.modules() for child in module._modules.values())
    for model in tuple(root.modules()):
        for layers, names in _chains(model):
            if not layers or not all(_can_fuse(layer) and uses[id(layer)] == 1 for layer in layers):
                continue
            activation, *dropout = (getattr(model, name) for name in names)
            if type(activation) not in _ACTIVATIONS or _is_watched(activation):
                continue
            if any(type(module) is not nn.Dropout or _is_watched(module) for module in dropout):
                dropout = []
            twins = [_moved(module) for module in (activation, *dropout)]
            model._modules.update(zip(names, twins, strict=False))
            for layer in layers:
                assert isinstance(layer, Quantized)
                layer.configure(layer.config, Fused(*twins))


def _can_fuse(layer: nn.Module) -> bool:
    return isinstance(layer, Quantized) and layer.epilogue is None and not _is_watched(layer)


def unfuse_(root: nn.Module) -> None:
    """Undo :func:`fuse_`."""
    for layer in root.modules():
        if isinstance(layer, Quantized) and isinstance(layer.epilogue, Fused) and not is_fused_outside(layer, root):
            layer.configure(layer.config)
    for model in tuple(root.modules()):
        for name, child in model._modules.items():
            if isinstance(child, Moved):
                model._modules[name] = child.restored()


def is_fused_outside(layer: nn.Module, root: nn.Module) -> bool:
    """Whether a layer does the work of a module that is not in ``root``."""
    if not isinstance(layer, Quantized) or not isinstance(layer.epilogue, Fused):
        return False
    inside = set(map(id, root.modules()))
    return any(id(module) not in inside for module in layer.epilogue.modules)
