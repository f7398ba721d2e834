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
from qgnn.memory import peak_bytes
from qgnn.rng import make_seed
from qgnn.rounding import MAX_BLOCK_SIZE


@dataclass(slots=True)
class Op:
    """A call of a torch function.

    Args:
        function: The function; ``None``: one that is unknown.
        args: Its arguments.
        kwargs: Its keyword arguments.
        number: Number of the call within the block.
        ours: Whether it stands for a function of torch's, which would save something else.
        own_rule: What may become of what our code saves in that case.
        entries: The lines of the report that it made.
        ready: What stands for the tensors that it saves, in order, where that is made already.
    """

    function: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    number: int = 0
    ours: bool = False
    own_rule: Rule | None = None
    entries: list[SavedTensor] = field(default_factory=list)
    ready: list[Coded] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What a report calls it."""
        return "?" if self.function is None else name_of(self.function)

    @property
    def rule(self) -> Rule | None:
        """What may become of what it saves; ``None``: it is kept."""
        return self.own_rule if self.ours else rule_of(self.function, self.args, self.kwargs)

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


def _is_cast_leaf(base: Tensor) -> bool:
    """Whether it is a leaf in another type: a weight under autocast."""
    node = base.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    source = node.next_functions[0][0]
    return source is not None and source.name() == "torch::autograd::AccumulateGrad"


_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)  # of one piece of memory, if they are strided


def has_storage(t: Tensor) -> bool:
    """Whether a tensor lies in one piece of memory; sparse ones do not."""
    return t.layout == torch.strided and type(t) in _PLAIN


def has_columns(t: Tensor) -> bool:
    """Whether values are more than one number a row: weights of edges and nodes are small beside rows, and scale whole
    ones, so that they are kept."""
    return sum(size > 1 for size in t.shape) > 1


def same_storage(a: Tensor, b: Any) -> bool:
    """Whether two tensors lie in one piece of memory."""
    if not isinstance(b, Tensor) or not has_storage(a) or not has_storage(b):
        return False
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def tensors_in(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    """Tensors among arguments, in the lists among them, and those that one of a subclass is made of."""
    for a in arguments:
        if isinstance(a, Tensor):
            yield a
            if type(a) not in _PLAIN and hasattr(a, "__tensor_flatten__"):
                yield from tensors_in(tuple(getattr(a, name) for name in a.__tensor_flatten__()[0]))
        elif isinstance(a, (tuple, list)):
            yield from tensors_in(tuple(t for t in a if isinstance(t, Tensor)))


def name_of(function: Any) -> str:
    """What a report calls a torch function."""
    if isinstance(function, torch._ops.OpOverload):
        return function._schema.name
    return str(getattr(function, "__name__", function)).strip("_")


def index_dtype(index: Tensor, op: Op) -> torch.dtype | None:
    """The narrowest type that holds indices into any operand of a function, negative ones included."""
    largest = max((size for t in op.operands() for size in t.shape), default=0)
    for dtype in (torch.int16, torch.int32):
        if largest <= torch.iinfo(dtype).max and index.dtype in (torch.int32, torch.int64) and index.dtype != dtype:
            return dtype
    return None


class Recorder:
    """State between entering and leaving a block, in one thread.

    Args:
        formats: Chooses the formats of its tensors.
        seeds: Seeds of its roundings.
        min_size: Tensors of fewer values are kept as they are.
        module_name: Name of the module that runs.
    """

    def __init__(self, formats: Formats, seeds: Iterator[int], min_size: int, module_name: Callable[[], str]) -> None:
        self.report = Report()
        self.seeds = seeds
        self._formats, self._module_name = formats, module_name
        self._min_size = min_size
        self._device = torch.device("cpu")  # of what was saved last
        self._numbers = itertools.count(1)
        self._op = Op(None)
        self._made = Storages()  # of constants that the block makes
        self._counted, self._kept = Storages(), Storages()
        self._codes: WeakValueDictionary[Any, Codes] = WeakValueDictionary()

    def is_in_charge(self) -> bool:
        """Whether its hooks would get what is saved now: not in other threads, nor under hooks set within the block."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return hooks is not None and hooks[0] == self.pack

    def end(self) -> None:
        """The block ends."""
        self.report.peak_bytes = peak_bytes(self._device)

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a torch function: what is saved meanwhile is its."""
        outer, op = self._op, Op(function, args, kwargs, next(self._numbers))
        self._op = op
        try:
            result = function(*args, **kwargs)
        finally:
            self._op = outer
        if isinstance(result, (Tensor, tuple, list)):
            self._remember_made(result, op)
        return result

    @contextmanager
    def standing_for(self, function: Any, rule: Rule | None = None) -> Iterator[Op]:
        """While code of ours does what a torch function would."""
        outer = self._op
        self._op = Op(function, number=next(self._numbers), ours=True, own_rule=rule)
        try:
            yield self._op
        finally:
            self._op = outer

    def _remember_made(self, result: Any, op: Op) -> None:
        """Tell constants that the block makes from those that were there before, and from views of them."""
        for t in tensors_in((result,)):
            if t.requires_grad or not has_storage(t) or t in self._made:
                continue
            if all(not _base(x).is_leaf for x in op.operands() if same_storage(t, x)):
                self._made.add(t)

    def seed(self, device: torch.device) -> Tensor:
        """A new seed."""
        return make_seed(next(self.seeds), device)

    def takes(self, function: Any, x: Any) -> bool:
        """Whether what a function would save of ``x`` is worth the work, and not excluded."""
        if not isinstance(x, Tensor) or not x.requires_grad or not has_storage(x):
            return False
        if x.numel() < self._min_size or not x.dim() or not x.is_floating_point():
            return False
        return not self._formats.excludes(SavedTensor(name_of(function), self._module_name(), tuple(x.shape), x.dtype))

    # ---- the hooks

    def pack(self, t: Tensor) -> Kept | Coded:
        """What stands for a tensor that a function saves."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            op = self._op
            if op.ready:
                return op.ready.pop(0)
            if not has_storage(t) or self.lives_anyway(t):
                return Kept(t, op.name)
            entry = self.enter(op, t)
            return self._code(t, op, entry) or self._keep(t, entry)

    @staticmethod
    def unpack(saved: Kept | Coded) -> Tensor:
        """The tensor, or what codes make of it."""
        with torch._C.DisableTorchFunction():
            return saved.unpack()

    def lives_anyway(self, t: Tensor) -> bool:
        """Whether it is a parameter, or a constant from outside of the block."""
        base = _base(t)
        if not base.is_leaf:
            return False
        if base.requires_grad:
            return True
        # What no argument holds was made by the function itself. Of other code, the arguments are unknown.
        given = self._op.number == 0 or any(same_storage(t, x) and _base(x).is_leaf for x in self._op.operands())
        return given and t not in self._made

    # ---- the report

    def enter(self, op: Op, t: Tensor, original: int | None = None) -> SavedTensor:
        """A new line for ``t``, with the bytes that torch would keep."""
        if original is None:
            original = 0 if op.ours else self.original_bytes(t)
        entry = SavedTensor(op.name, self._module_name(), tuple(t.shape), t.dtype, original)
        self._device = t.device
        self.report.by_tensor.append(entry)
        op.entries.append(entry)
        return entry

    def original_bytes(self, t: Tensor, is_result: bool = False) -> int:
        """Bytes of the memory that torch would keep for ``t``; 0 if they are counted already, or live anyway."""
        is_new = has_storage(t) and (is_result or not self.lives_anyway(t)) and self._counted.add(t)
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
        if rule is None or t.numel() < self._min_size or self._formats.excludes(entry):
            return None
        if same_storage(t, rule.exact_argument(op.args, op.kwargs)) or _is_cast_leaf(_base(t)):
            return None
        if rule.is_statistic(t, op.args, op.kwargs):
            return None
        layout = layout_of(t)
        dense = layout.dense(t)
        recipe = self._recipe(dense, rule, op, entry)
        if recipe is None:
            return None
        kind, make = recipe
        is_exact = rule.indices or rule.two_valued is not None
        shares = rule.indices or (rule.multiplies and op.leads_to_leaves(t))
        # No other memory takes this identity: the account refers to it weakly.
        place = (t.untyped_storage()._cdata, t.storage_offset(), layout.extent(t), t.dtype, t.is_neg(), t._version)
        key = (*place, kind, 0 if shares else op.number)
        codes = self._codes.get(key)
        if codes is None:
            codes = self._codes[key] = make()
        else:
            entry.format = "shared"
        return Coded(t, codes, layout, dense.shape, op.name, is_exact)

    def roundings(self, t: Tensor, op: Op, entry: SavedTensor, count: int) -> list[Coded]:
        """So many codes of ``t``, which has columns, each rounded on its own."""
        assert op.own_rule is not None
        layout = layout_of(t)
        dense = layout.dense(t)
        blocks = self._formats.choose(entry, dense, op.own_rule)
        return [Coded(t, self.code(dense, blocks, entry), layout, dense.shape, op.name, False) for _ in range(count)]

    def _recipe(
        self, dense: Tensor, rule: Rule, op: Op, entry: SavedTensor
    ) -> tuple[Hashable, Callable[[], Codes]] | None:
        """What tells this way to keep values from others, and what makes codes; ``None`` for no way."""
        if rule.indices:
            dtype = index_dtype(dense, op)
            return None if dtype is None else (dtype, partial(self._narrow, dense, dtype, entry))
        if rule.two_valued is not None:
            two_valued = rule.two_valued
            return two_valued, lambda: self._one_bit(two_valued(dense, op.args, op.kwargs), entry)
        blocks = self.format(dense, rule, entry)
        return None if blocks is None else (blocks.projection, partial(self.code, dense, blocks, entry))

    def format(self, dense: Tensor, rule: Rule, entry: SavedTensor) -> Blocks | None:
        """The format for these values; ``None`` to keep them."""
        return self._formats.choose(entry, dense, rule) if has_columns(dense) and dense.is_floating_point() else None

    @staticmethod
    def _narrow(dense: Tensor, dtype: torch.dtype, entry: SavedTensor) -> Codes:
        narrow = dense.to(dtype)
        entry.saved_bytes, entry.format = narrow.nbytes, str(dtype).removeprefix("torch.")
        return Codes(narrow, lambda kept: kept)

    @staticmethod
    def _one_bit(values: Tensor, entry: SavedTensor) -> Codes:
        block_size = min(MAX_BLOCK_SIZE, -(-values.numel() // 8) * 8 or 8)
        compressed = pack(values, Blocks(bits=1, block_size=block_size, metadata_dtype=torch.float32), None)
        entry.saved_bytes, entry.format = compressed.nbytes, "1 bit"
        return Codes(compressed, decompress)

    def code(self, values: Tensor, blocks: Blocks, entry: SavedTensor) -> Codes:
        """Codes of values, entered in the report."""
        compressed = pack(values, blocks, self.seed(values.device))
        entry.saved_bytes += compressed.nbytes
        entry.format = str(compressed.blocks)
        codes = Codes(compressed, decompress)
        self._formats.made(codes)
        return codes
