"""What operators require of their arguments, checked before a kernel gets their addresses.

An operator can be called by anyone, also as ``torch.ops.qgnn.*``. A :class:`Signature` lists the shapes of its tensors
in the letters of its docstrings; what an argument holds (indices, floats, codes with a scale) is known by its name,
which all operators share. Sizes, types and devices are checked once for all arguments that are alike in these; the
values of indices once for tensors that live unchanged (a write that bypasses autograd, through ``.data`` or NumPy, is
not seen).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_true

from qgnn.rounding import MAX_INT32_TERMS
from qgnn.weak_cache import cached

CSR = {"indptr": "T+1", "index": "E"}
CSC = {"indptr_t": "S+1", "index_t": "E", "order_t": "E"}
INT8_BITS = range(2, 9)
INT8_OR_FULL = (0, *INT8_BITS)  # 0: rows keep their type
GRANULARITIES = ("row", "tensor")
POSITIVE = range(1, 2**31)

MAX_EDGE_BITS = 4  # of codes in bins of given edges: each value is compared with all of them

_INDEX_TYPES = (torch.int32, torch.int64)
_FLOAT_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INDICES = (
    *("indptr", "index", "indptr_t", "index_t", "order_t", "order", "edge_order", "node", "arg"),
    *("new_row", "new_index", "new_order", "number"),
)
_BYTES = {"packed": "'blocks_pack'", "stored": "'codes_pack'", "mask": "the forward pass"}
_SCALES = {
    **{"x": "x_scale", "x_target": "target_scale", "x_source": "source_scale", "hidden": "hidden_scale"},
    **{"query": "query_scale", "key": "key_scale", "value": "value_scale"},
    **{"weight": "weight_scale", "grad": "grad_scale"},
}
_EXPONENTS = {"x": "x_exponent", "weight": "weight_exponent"}
_TOGETHER = (
    ("edge_attr", "edge_weight", "edge_order"),
    ("packed", "low", "step", "packed_seed"),
    ("weight", "new_weight"),
)
_OF_ATTENTION = {"att": ("target_scale", "source_scale"), "query": ("query_scale", "key_scale", "value_scale")}


@dataclass(frozen=True)
class _Dimension:
    """A size of a shape: ``times`` that of a letter plus ``more``, its groups of ``per`` (a number or another letter),
    or just ``more``."""

    letter: str | None
    times: str | None = None
    more: int = 0
    per: str | None = None

    @staticmethod
    def parse(text: str) -> _Dimension:
        if text.isdigit():
            return _Dimension(None, more=int(text))
        if "/" in text:
            letter, per = text.split("/")
            return _Dimension(letter, per=per)
        times, _, letter = text.removesuffix("+1").rpartition("*")
        return _Dimension(letter, times or None, int(text.endswith("+1")))

    def fits(self, size: Any, sizes: dict[str, Any]) -> bool:
        """Whether ``size`` is right; a new letter gets its part of it."""
        if self.letter is None:
            return may_hold(size == self.more)
        if self.per is not None:
            per = int(self.per) if self.per.isdigit() else sizes[self.per]
            return may_hold(size == (sizes[self.letter] + per - 1) // per)
        if self.more:
            size = size - self.more
            if not may_hold(size >= 0):
                return False
        if self.times is not None:
            times = sizes[self.times]
            if not may_hold(times > 0) or not may_hold(size % times == 0):
                return False
            size = size // times
        return may_hold(sizes.setdefault(self.letter, size) == size)


def may_hold(condition: Any) -> bool:
    """The condition, or true where a compiler cannot know it yet: sizes that depend on data. The call itself checks."""
    return condition if isinstance(condition, bool) else guard_or_true(condition)


@dataclass(frozen=True)
class Signature:
    """The arguments of an operator.

    Args:
        shapes: Of each tensor, as ``"S F"``: a letter is the same size everywhere, ``E`` the number of edges. ``"S|1"``
            is one of several shapes, ``"T+1"`` one more than ``T``, ``"H*D"`` a multiple of ``H``, ``"F/8"`` the bytes
            of ``F`` bits, ``"K/G"`` the blocks of ``G`` columns. Earlier arguments fix the letters, so an error names
            the later one.
        sizes: Integer arguments that fix a letter.
        choices: The values that an argument can have.
        pointers: Tensors that rise from 0 to ``E``.
        indices: Tensors whose entries count from 0 to the size of a letter; those of ``arg`` may be -1, for nothing.
        edges: Tensors of bin edges that rise from 0 to ``2**bits - 1``, and the argument that is ``bits``.
        int32_sums: Letters that products of codes are summed over in int32.
        required: Tensors that cannot be left out.
        shares: Letters whose size is a multiple of another's, if that is there: ``{"F": "H"}``, columns of heads.
    """

    shapes: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, Collection[Any]] = field(default_factory=dict)
    pointers: tuple[str, ...] = ()
    indices: Mapping[str, str] = field(default_factory=dict)
    edges: Mapping[str, str] = field(default_factory=dict)
    int32_sums: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    shares: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _dimensions(self) -> dict[str, list[list[_Dimension]]]:
        return {
            name: [[_Dimension.parse(d) for d in shape.split()] for shape in shapes.split("|")]
            for name, shapes in self.shapes.items()
        }

    def check(self, owner: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Check everything but the values of tensors, and return the size of each letter."""
        for name, allowed in self.choices.items():
            if arguments[name] not in allowed:
                raise ValueError(f"'{owner}' expects '{name}' to be {_any_of(allowed)} (got {arguments[name]!r})")
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        for name in self.required:
            if name not in tensors:
                raise TypeError(f"'{owner}' expects '{name}' to be a tensor (got {arguments[name]!r})")
        device = next(iter(tensors.values())).device
        for name, t in tensors.items():
            if t.device != device:
                raise ValueError(
                    f"'{owner}' expects '{name}' on {device}, where its first argument is (got {t.device})"
                )
            _check_type(owner, name, t, arguments)
        sizes = {letter: arguments[name] for name, letter in self.sizes.items()}
        for name, shapes in self._dimensions.items():
            if name in tensors:
                self._check_shape(owner, name, tensors[name], shapes, sizes)
        _check_pairs(owner, arguments)
        for name, bits in self.edges.items():
            if name in tensors:
                _check_bins(owner, name, tensors[name], arguments[bits])
        for letter, parts in self.shares.items():
            if parts in sizes and not may_hold(sizes[letter] % sizes[parts] == 0 if sizes[parts] else False):
                raise ValueError(
                    f"'{owner}' expects {letter} to be a multiple of {parts} (got {letter} = {sizes[letter]}, "
                    f"{parts} = {sizes[parts]})"
                )
        for letter in self.int32_sums:
            if letter in sizes and not may_hold(sizes[letter] <= MAX_INT32_TERMS):
                raise ValueError(
                    f"'{owner}' sums at most {MAX_INT32_TERMS} products of codes in int32 (got {letter} = "
                    f"{sizes[letter]}); split the features"
                )
        return sizes

    def _check_shape(
        self, owner: str, name: str, t: Tensor, shapes: list[list[_Dimension]], sizes: dict[str, Any]
    ) -> None:
        num_known, actual = len(sizes), t.shape
        for shape in shapes:
            if len(actual) == len(shape) and all(d.fits(size, sizes) for d, size in zip(shape, actual, strict=True)):
                return
        text, before = self.shapes[name], list(sizes)[:num_known]
        known = ", ".join(f"{letter} = {sizes[letter]}" for letter in sorted(before) if letter in text)
        wanted = " or ".join(f"[{', '.join(shape.split())}]" for shape in text.split("|"))
        with_sizes = f" with {known}" if known else ""
        raise ValueError(f"'{owner}' expects '{name}' of shape {wanted}{with_sizes} (got {list(t.shape)})")

    def check_values(self, owner: str, arguments: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
        """Raise unless pointers and indices stay within what they point into, and edges span the codes; remembered for
        tensors unchanged."""
        for name, number in self.edges.items():
            edges, bits = arguments[name], arguments[number]
            if edges is not None:
                cached((edges,), ("checked", name, bits), partial(_check_edges, owner, name, edges, bits))
        # What has no size points into an argument that is left out.
        indices = {n: letter for n, letter in self.indices.items() if arguments[n] is not None and letter in sizes}
        names = (*self.pointers, *indices)
        if not names:
            return
        limits = tuple(int(sizes[letter]) for letter in (*("E" for _ in self.pointers), *indices.values()))

        def check() -> bool:
            for number, (name, limit) in enumerate(zip(names, limits, strict=True)):
                look = _check_pointers if number < len(self.pointers) else _check_indices
                look(owner, name, arguments[name], limit)
            return True

        cached(tuple(arguments[name] for name in names), ("checked", names, limits), check)


def _check_pairs(owner: str, arguments: Mapping[str, Any]) -> None:
    """Arguments of which one says what the other has to be."""
    for name in ("weight", "edge_weight"):
        weight, weight_t = arguments.get(name), arguments.get(f"{name}_t")
        if weight is not None and weight_t is not None and weight.dim() != weight_t.dim():
            raise ValueError(
                f"'{owner}' expects '{name}_t' of the shape of '{name}', {list(weight.shape)} (got "
                f"{list(weight_t.shape)})"
            )
    if arguments.get("x_float") is not None and arguments["x_scale"] is None:
        raise ValueError(f"'{owner}' expects 'x_float' beside codes only (got no 'x_scale'); give the rows as 'x'")
    for group in _TOGETHER:
        present = [name for name in group if name in arguments]
        if len({arguments[name] is None for name in present}) > 1:
            missing = next(name for name in present if arguments[name] is None)
            *first, last = (f"'{name}'" for name in present)
            raise ValueError(f"'{owner}' expects {', '.join(first)} and {last} together (got no '{missing}')")
    for rows, scales in _OF_ATTENTION.items():  # whose kernels read codes or floats, and round what is to become codes
        rounds = arguments.get("bits") and not owner.endswith("_backward")
        if rows in arguments and not rounds and len({arguments[name] is None for name in scales}) > 1:
            missing = next(name for name in scales if arguments[name] is None)
            raise ValueError(f"'{owner}' expects all rows as codes with scales, or none (got no '{missing}')")
        names = [name for name, scale in _SCALES.items() if scale in scales]
        types = [t.dtype for name in names if rows in arguments and (t := arguments[name]).is_floating_point()]
        if len(set(types)) > 1:
            raise TypeError(f"'{owner}' expects rows of one type (got {' and '.join(map(str, types))})")
    residual = arguments.get("residual")
    if residual is not None and residual.dtype != arguments["x"].dtype:
        raise TypeError(
            f"'{owner}' expects 'residual' in {arguments['x'].dtype}, as 'x' is (got {residual.dtype}); use "
            f"'residual.to(x.dtype)'"
        )
    if arguments.get("threshold") and arguments.get("dropout_seed", owner) is None:
        raise ValueError(
            f"'{owner}' expects 'dropout_seed' with a 'threshold' (got None); make it with 'qgnn.rng.make_seed'"
        )
    if arguments.get("projection") and arguments.get("projection_seed", owner) is None:
        raise ValueError(
            f"'{owner}' expects 'projection_seed' with a 'projection' (got None); make it with 'qgnn.rng.make_seed'"
        )


def _any_of(allowed: Collection[Any]) -> str:
    if isinstance(allowed, range):
        return f"from {allowed.start} to {allowed.stop - 1}" if allowed.stop < 2**31 else f"at least {allowed.start}"
    return f"one of {tuple(allowed)}"


def _check_type(owner: str, name: str, t: Tensor, arguments: Mapping[str, Any]) -> None:
    if name in ("mask", "derivative") and not t.is_contiguous():
        raise ValueError(f"'{owner}' expects '{name}' to be contiguous, as the forward pass made it")
    if name == "codes" or (name == "derivative" and t.dtype == torch.uint8):  # the operator says what codes may be
        return
    if name in _INDICES:
        if t.dtype not in _INDEX_TYPES:
            raise TypeError(f"'{owner}' expects '{name}' in torch.int32 or torch.int64 (got {t.dtype})")
    elif name in ("seed", "dropout_seed", "projection_seed", "packed_seed"):
        if t.dtype != torch.int64 or tuple(t.shape) != (1,):
            raise ValueError(
                f"'{owner}' expects '{name}' as one torch.int64, of shape [1] (got {t.dtype} of shape "
                f"{list(t.shape)}); make it with 'qgnn.rng.make_seed'"
            )
    elif name == "keep":
        if t.dtype != torch.bool:
            raise TypeError(f"'{owner}' expects '{name}' in torch.bool (got {t.dtype})")
    elif name in _BYTES:
        if t.dtype != torch.uint8:
            raise TypeError(f"'{owner}' expects '{name}' in torch.uint8, as {_BYTES[name]} made it (got {t.dtype})")
    elif any(arguments.get(of[name]) is not None for of in (_SCALES, _EXPONENTS) if name in of):
        if t.dtype != torch.int8:
            raise TypeError(f"'{owner}' expects '{name}' as int8 codes, since it has a scale (got {t.dtype})")
    elif name.endswith("exponent"):
        if t.dtype != torch.uint8:
            raise TypeError(f"'{owner}' expects '{name}' in torch.uint8, biased by 127 (got {t.dtype})")
    elif name == "row_factor" or name.endswith("scale"):
        rows = arguments.get("grad", arguments.get("x"))
        wide = name == "row_factor" and isinstance(rows, Tensor) and rows.dtype == torch.float64
        if t.dtype != torch.float32 and not (wide and t.dtype == torch.float64):
            raise TypeError(f"'{owner}' expects '{name}' in torch.float32 (got {t.dtype}); use '{name}.float()'")
    elif t.dtype not in _FLOAT_TYPES:
        takes_codes = _SCALES.get(name) in arguments
        hint = f"int8 codes come with '{_SCALES[name]}'" if takes_codes else f"use '{name}.float()'"
        raise TypeError(f"'{owner}' expects '{name}' in a floating-point type (got {t.dtype}); {hint}")
    elif t.dtype == torch.float64 and t.is_cuda:
        raise TypeError(f"'{owner}' expects '{name}' in at most 32 bits on a GPU (got {t.dtype})")


def _check_pointers(owner: str, name: str, indptr: Tensor, num_edges: int) -> None:
    rises = (indptr[0] == 0) & (indptr[-1] == num_edges) & (indptr[1:] >= indptr[:-1]).all()
    if indptr.is_cuda:  # without waiting for the device
        torch._assert_async(rises, f"'{owner}' expects '{name}' to rise from 0 to the number of edges")
    elif not rises:
        raise ValueError(f"'{owner}' expects '{name}' to rise from 0 to the number of edges, {num_edges}")


def _check_indices(owner: str, name: str, index: Tensor, size: int) -> None:
    lowest = -1 if name == "arg" else 0
    if index.is_cuda:
        inside = ((index >= lowest) & (index < size)).all()
        torch._assert_async(inside, f"'{owner}' expects '{name}' to point to what is there")
    elif index.numel():
        low, high = (int(end) for end in torch.aminmax(index))
        if low < lowest or high >= size:
            worst = low if low < lowest else high
            what = f"from {lowest} to {size - 1}" if size else "to be empty, as there is nothing to point to"
            raise ValueError(f"'{owner}' expects '{name}' {what} (got {worst})")


def _check_bins(owner: str, name: str, edges: Tensor, bits: int) -> None:
    if bits > MAX_EDGE_BITS:
        raise ValueError(
            f"'{owner}' expects no '{name}' with codes of more than {MAX_EDGE_BITS} bits (got 'bits' = {bits}); leave "
            f"them out for bins of one width"
        )
    if edges.dtype != torch.float32 or tuple(edges.shape) != (1 << bits,):
        raise ValueError(
            f"'{owner}' expects '{name}' in torch.float32, of shape [{1 << bits}] for {bits}-bit codes (got "
            f"{edges.dtype} of shape {list(edges.shape)})"
        )


def _check_edges(owner: str, name: str, edges: Tensor, bits: int) -> bool:
    last = (1 << bits) - 1
    spans = (edges[0] == 0) & (edges[-1] == last) & (edges.diff() >= 2.0**-16).all()  # a NaN fails
    message = f"'{owner}' expects '{name}' to rise from 0 to {last} by at least 2**-16 each"
    if edges.is_cuda:
        torch._assert_async(spans, message)
    elif not spans:
        raise ValueError(f"{message} (got {edges.tolist()})")
    return True
