"""One block under :class:`qgnn.compress_activations`: what its functions save, and what is kept of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from qgnn.compress.choice import Formats
from qgnn.compress.policy import Rule, rule_of
from qgnn.compress.report import Report, SavedTensor
from qgnn.compress.saved import Coded, Codes, Kept, layout_of
from qgnn.formats import Blocks
from qgnn.functional.blocks import decompress, pack
from qgnn.rng import make_seed

ONE_BIT = Blocks(bits=1, block_size=1 << 16, metadata_dtype=torch.float32)


@dataclass
class Op:
    """A call of a torch function.

    Args:
        name: Its name.
        rule: What may become of what it saves; ``None``: it is kept.
        args: Its arguments.
        kwargs: Its keyword arguments.
        number: Number of the call within the block.
        ours: Whether it stands for a function of torch's, which would save something else.
        entries: The lines of the report that it made.
    """

    name: str
    rule: Rule | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int
    ours: bool = False
    entries: list[SavedTensor] = field(default_factory=list)

    def operands(self) -> Iterator[Tensor]:
        """The tensors among its arguments."""
        return tensors_in((*self.args, *self.kwargs.values()))

    def leads_to_leaves(self, t: Tensor) -> bool:
        """Whether a saved ``t`` serves gradients of leaves alone: of all operands but the one that it is."""
        others = [x for x in self.operands() if x.requires_grad]
        twins = [x for x in others if same_storage(x, t)]
        return len(twins) <= 1 and all(_base(x).is_leaf for x in others if not same_storage(x, t))


class Storages:
    """A set of storages, by identity, which stays unique while they are referred to weakly."""

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}

    def add(self, t: Tensor) -> bool:
        """Whether the storage of ``t`` is new."""
        storage = StorageWeakRef(t.untyped_storage())
        return self._known.setdefault(storage.cdata, storage) is storage

    def __contains__(self, t: Tensor) -> bool:
        return t.untyped_storage()._cdata in self._known


def _base(t: Tensor) -> Tensor:
    return t if t._base is None else t._base


def has_storage(t: Tensor) -> bool:
    """Whether a tensor lies in one piece of memory; sparse ones do not."""
    return t.layout == torch.strided and type(t) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie in one piece of memory."""
    return has_storage(a) and has_storage(b) and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def tensors_in(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    """Tensors among arguments, and in the lists among them."""
    for a in arguments:
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, (tuple, list)):
            yield from (t for t in a if isinstance(t, Tensor))


def name_of(function: Any) -> str:
    """What a report calls a torch function."""
    if isinstance(function, torch._ops.OpOverload):
        return function._schema.name
    return str(getattr(function, "__name__", function)).strip("_")


def index_dtype(index: Tensor, op: Op) -> torch.dtype | None:
    """The narrowest type that holds indices into any operand of a function, negative ones included."""
    largest = max((size for t in op.operands() for size in t.shape), default=0)
    for dtype in (torch.int16, torch.int32):
        if not index.is_floating_point() and largest <= torch.iinfo(dtype).max < torch.iinfo(index.dtype).max:
            return dtype
    return None


class Session:
    """State between entering and leaving a block, in one thread.

    Args:
        formats: Chooses the formats of its tensors.
        seed: What the seeds of its roundings are counted from.
        min_size: Tensors of fewer values are kept as they are.
        module_name: Name of the module that runs.
    """

    def __init__(self, formats: Formats, seed: int, min_size: int, module_name: Callable[[], str]) -> None:
        self.report = Report()
        self._formats, self._seeds, self._module_name = formats, itertools.count(seed), module_name
        self._min_size = min_size
        self._numbers = itertools.count(1)
        self._op = Op("?", None, (), {}, 0)
        self._made = Storages()  # of constants that the block makes
        self._counted, self._kept = Storages(), Storages()
        self._codes: WeakValueDictionary[Any, Codes] = WeakValueDictionary()

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a torch function: what is saved meanwhile is its."""
        outer = self._op
        self._op = Op(name_of(function), rule_of(function, args, kwargs), args, kwargs, next(self._numbers))
        try:
            result = function(*args, **kwargs)
            self._remember_made(result)
        finally:
            self._op = outer
        return result

    @contextmanager
    def standing_for(self, function: Any, rule: Rule | None = None) -> Iterator[Op]:
        """While code of ours does what a torch function would."""
        outer, self._op = self._op, Op(name_of(function), rule, (), {}, next(self._numbers), ours=True)
        try:
            yield self._op
        finally:
            self._op = outer

    def _remember_made(self, result: Any) -> None:
        """Tell constants that the block makes from those that were there before, and from views of them."""
        for t in tensors_in((result,)):
            if not t.requires_grad and has_storage(t) and not any(same_storage(t, x) for x in self._op.operands()):
                self._made.add(t)

    def seed(self, device: torch.device) -> Tensor:
        """A new seed."""
        return make_seed(next(self._seeds), device)

    def takes(self, x: Any) -> bool:
        """Whether what a function would save of ``x`` is worth the work."""
        return isinstance(x, Tensor) and has_storage(x) and x.requires_grad and x.numel() >= self._min_size

    # ---- the hooks

    def pack(self, t: Tensor) -> Kept | Coded:
        """What stands for a tensor that a function saves."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            op = self._op
            if not has_storage(t) or self._lives_anyway(t):
                return Kept(t, op.name)
            entry = self.enter(op, t)
            return self._code(t, op, entry) or self._keep(t, entry)

    @staticmethod
    def unpack(saved: Kept | Coded) -> Tensor:
        """The tensor, or what codes make of it."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            return saved.unpack()

    def _lives_anyway(self, t: Tensor) -> bool:
        """Whether it is a parameter, or a constant from outside of the block."""
        base = _base(t)
        if not base.is_leaf or t in self._made:
            return False
        # What no argument holds was made by the function itself. Of other code, the arguments are unknown.
        return base.requires_grad or self._op.number == 0 or any(same_storage(t, x) for x in self._op.operands())

    # ---- the report

    def enter(self, op: Op, t: Tensor, original: int | None = None) -> SavedTensor:
        """A new line for ``t``, with the bytes that torch would keep."""
        if original is None:
            original = 0 if op.ours else self.original_bytes(t)
        entry = SavedTensor(op.name, self._module_name(), tuple(t.shape), t.dtype, original, 0, "")
        self.report.by_tensor.append(entry)
        op.entries.append(entry)
        return entry

    def original_bytes(self, t: Tensor, is_result: bool = False) -> int:
        """Bytes of the memory that torch would keep for ``t``; 0 if they are counted already, or live anyway."""
        is_new = has_storage(t) and (is_result or not self._lives_anyway(t)) and self._counted.add(t)
        return t.untyped_storage().nbytes() if is_new else 0

    # ---- tensors and codes

    def _keep(self, t: Tensor, entry: SavedTensor) -> Kept:
        is_new = self._kept.add(t)
        entry.saved_bytes = t.untyped_storage().nbytes() if is_new else 0
        entry.format = "as it is" if is_new else "shared"
        return Kept(t, entry.op)

    def _code(self, t: Tensor, op: Op, entry: SavedTensor) -> Coded | None:
        """Codes of ``t``, or ``None`` if it has to be kept."""
        rule = op.rule
        if rule is None or t.numel() < self._min_size or rule.keeps(t, op.args):
            return None
        layout = layout_of(t)
        dense = layout.dense(t)
        recipe = self._recipe(dense, rule, op, entry)
        if recipe is None:
            return None
        kind, make = recipe
        storage = StorageWeakRef(t.untyped_storage())
        is_exact = rule.indices or rule.two_valued is not None
        shares = is_exact or (rule.multiplies and op.leads_to_leaves(t))
        place = (storage.cdata, t.storage_offset(), t.numel(), t.dtype, t._version)
        key = (*place, kind, 0 if shares else op.number)
        codes = self._codes.get(key)
        if codes is None:
            codes = self._codes[key] = make(storage)
        else:
            entry.format = "shared"
        return Coded(t, codes, layout, dense.shape, op.name)

    def _recipe(
        self, dense: Tensor, rule: Rule, op: Op, entry: SavedTensor
    ) -> tuple[Hashable, Callable[[StorageWeakRef], Codes]] | None:
        """What tells this way to keep values from others, and what makes codes; ``None`` for no way."""
        if rule.indices:
            dtype = index_dtype(dense, op)
            return None if dtype is None else (dtype, partial(self._narrow, dense, dtype, entry))
        if rule.two_valued is not None:
            two_valued = rule.two_valued
            return two_valued, lambda storage: self.code(two_valued(dense, op.args, op.kwargs), ONE_BIT, entry, storage)
        blocks = self.format(dense, rule, entry)
        return None if blocks is None else (blocks.projection, partial(self.code, dense, blocks, entry))

    def format(self, dense: Tensor, rule: Rule, entry: SavedTensor) -> Blocks | None:
        """The format for these values; ``None`` to keep them."""
        # Of one column, or none: weights of edges and nodes. They are small beside rows, and scale whole rows.
        has_columns = sum(size > 1 for size in dense.shape) > 1
        return self._formats.choose(entry, dense, rule) if has_columns and dense.is_floating_point() else None

    @staticmethod
    def _narrow(dense: Tensor, dtype: torch.dtype, entry: SavedTensor, storage: StorageWeakRef) -> Codes:
        narrow = dense.to(dtype)
        entry.saved_bytes, entry.format = narrow.nbytes, str(dtype).removeprefix("torch.")
        return Codes(narrow, lambda kept: kept, storage)

    def code(self, values: Tensor, blocks: Blocks, entry: SavedTensor, storage: StorageWeakRef | None = None) -> Codes:
        """Codes of values, entered in the report."""
        is_bits = blocks is ONE_BIT
        compressed = pack(values, blocks, None if is_bits else self.seed(values.device))
        entry.saved_bytes += compressed.nbytes
        entry.format = "1 bit" if is_bits else str(compressed.blocks)
        codes = Codes(compressed, decompress, storage)
        if not is_bits:
            self._formats.made(codes)
        return codes
