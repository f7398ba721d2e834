"""Which modules of a model are layers that can be quantized, which of them comes last, and why others are left."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch_geometric.nn import MLP, HeteroConv, Linear, MessagePassing, RGCNConv
from torch_geometric.nn.models.basic_gnn import BasicGNN

from qgnn import nn as qnn
from qgnn.nn._layer import PRODUCTS, Quantized
from qgnn.nn.linear import QLinear, QTorchLinear


def _counterparts() -> dict[type[nn.Module], type[Quantized]]:
    exported = [getattr(qnn, name) for name in qnn.__all__]
    layers: list[type[Quantized]] = [cls for cls in exported if isinstance(cls, type) and issubclass(cls, Quantized)]
    layers.append(QTorchLinear)
    return {cls.pyg: cls for cls in layers}


COUNTERPARTS = _counterparts()  # by exact type: a subclass has code of its own, which would be lost

# These hand the weights of their layers to fused kernels of torch's.
READ_BY_TORCH = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)

_NORMALIZATIONS = (
    "torch.nn.modules.batchnorm",
    "torch.nn.modules.instancenorm",
    "torch.nn.modules.normalization",
    "torch_geometric.nn.norm",
)


@dataclass(frozen=True)
class Mark:
    """What :func:`qgnn.quantize_` leaves on a module as ``module._conversion``.

    Args:
        original: The class that the module had before, if it was changed.
        former: Attributes that the module had, and that were overwritten.
        reason: Why the module is in full precision, or was left alone; ``None`` if it is quantized.
    """

    original: type[nn.Module] | None = None
    former: Mapping[str, Any] = field(default_factory=dict)
    reason: str | None = None


def mark_of(module: nn.Module) -> Mark | None:
    return vars(module).get("_conversion")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of ``torch.compile`` and of data parallelism, whose names have no prefix."""
    while True:
        if isinstance(model, OptimizedModule):
            model = model._orig_mod
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        else:
            return model


def is_layer(module: nn.Module) -> bool:
    """Whether ``module`` is quantized or can be."""
    return isinstance(module, Quantized) or type(module) in COUNTERPARTS


def is_as_converted(module: nn.Module) -> bool:
    """Whether a module still has the class that it got, so that it can have its former one back."""
    mark = mark_of(module)
    return mark is None or mark.original is None or type(module) is COUNTERPARTS[mark.original]


def own_products(layer: nn.Module) -> Iterator[nn.Module]:
    """The dense layers that are parts of a layer, whose weights its fused path reads: they are never called."""
    for name, child in layer.named_children():
        for part in child if isinstance(child, nn.ModuleList) else (child,):
            if name in PRODUCTS and type(part) in (Linear, QLinear):
                yield part


def widest_sum(layer: nn.Module) -> int:
    """The most products that a layer, or its backward pass, sums up for one value: rows or columns of its weights; of
    relations, whose rows are side by side, of all of them."""
    sizes = []
    for part in (layer, *own_products(layer)):
        originals: Any = part.parametrizations.parameters() if is_parametrized(part) else ()  # type: ignore[union-attr]
        own = (*part.parameters(recurse=False), *originals)
        sizes += [size for p in own if not is_lazy(p) and p.dim() == 2 for size in p.shape]
    if isinstance(layer, RGCNConv) and layer.num_blocks is None:
        sizes.append(layer.num_relations * layer.in_channels_l)
    return max(sizes, default=0)


def walk(module: nn.Module, *, into_left: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """``named_modules()`` without the dense layers that are parts of other layers.

    Args:
        module: The model.
        into_left: Also what is inside of modules that an earlier conversion left alone as a whole.
    """
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        yield name, module
        left = mark_of(module) is not None and not isinstance(module, Quantized)
        if isinstance(module, torch.jit.ScriptModule) or (left and not into_left):
            return
        if is_layer(module):
            seen.update(map(id, own_products(module)))
        for child_name, child in module.named_children():
            yield from visit(f"{name}.{child_name}" if name else child_name, child)

    return visit("", module)


def last_layer(module: nn.Module, *, parallel: bool = False) -> nn.Module | None:
    """The part of a model that makes its result: a layer, or several that work side by side.

    Args:
        module: The model, or a part of it.
        parallel: Whether the entries of a ``ModuleDict`` work side by side, as in what ``to_hetero`` returns.
    """
    if is_layer(module):
        return module
    if isinstance(module, READ_BY_TORCH):
        return None
    side_by_side = isinstance(module, (MessagePassing, HeteroConv)) or (parallel and isinstance(module, nn.ModuleDict))
    if side_by_side and any(is_layer(part) for _, part in walk(module, into_left=True)):
        return module
    if isinstance(module, (BasicGNN, MLP)):
        return _end_of(module)
    parts = reversed(list(module.children()))
    parallel = parallel or isinstance(module, torch.fx.GraphModule)
    return next((found for part in parts if (found := last_layer(part, parallel=parallel)) is not None), None)


def _end_of(model: BasicGNN | MLP) -> nn.Module:
    """What certainly comes last, even if it is none of our layers."""
    if isinstance(model, MLP):
        return model.lins[-1]
    return model.lin if hasattr(model, "lin") else model.convs[-1]


def feeds_softmax(root: nn.Module) -> bool:
    """Whether :func:`last_layer` knows what makes the result of a model; in others it goes by the order of modules."""
    return isinstance(root, BasicGNN) and type(root).forward is BasicGNN.forward


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern is that of a module or of one around it.

    Args:
        pattern: As in a shell, or a regular expression behind ``re:``, which may be none: ``re.error``.
        name: Name of the module, as in ``named_modules()``.
    """
    parts = name.split(".")
    names = (".".join(parts[: end + 1]) for end in range(len(parts)))
    if pattern.startswith("re:"):
        return any(re.fullmatch(pattern[3:], each) for each in names)
    return any(fnmatchcase(each, pattern) for each in names)


def why_left(module: nn.Module) -> str:
    """Why a module is none of ours."""
    mark, cls = mark_of(module), type(module)
    if mark is not None and mark.reason is not None:
        return mark.reason
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript: its code cannot be changed any more"
    if cls in COUNTERPARTS:
        return "not converted"
    if cls is nn.LazyLinear:
        return "LazyLinear: becomes a Linear in the first pass; convert the model behind it"
    base = next((base for base in cls.__mro__ if base in COUNTERPARTS), None)
    if base is not None:
        return f"{cls.__name__}: a subclass of {base.__name__}, whose own code a conversion would lose"
    if any(base.__module__.startswith(_NORMALIZATIONS) for base in cls.__mro__):
        return f"{cls.__name__}: no int8 counterpart: normalization is cheap and needs full precision"
    return f"{cls.__name__}: no quantized counterpart"


def is_listed(module: nn.Module) -> bool:
    """Whether a module that is not quantized deserves a reason: it has parameters of its own, or is a convolution."""
    own = any(parameter is not None for parameter in module._parameters.values())
    return own or mark_of(module) is not None or isinstance(module, MessagePassing) or type(module) in COUNTERPARTS
