"""What operators require of their arguments, checked before a kernel gets their addresses.

An operator can be called by anyone, also as ``torch.ops.qgnn.*``. A :class:`Signature` lists the shapes of its tensors
in the letters of its docstrings; what an argument holds (indices, floats, codes with a scale) is known by its name,
which all operators share. Sizes, types and devices are checked in every call, of the fake too; the values of indices
once for tensors that live unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qgnn.weak_cache import cached

CSR = {"indptr": "T+1", "index": "E"}
CSC = {"indptr_t": "S+1", "index_t": "E", "order_t": "E"}
INT8_BITS = range(2, 9)
INT8_OR_FULL = (0, *INT8_BITS)  # 0: rows keep their type
GRANULARITIES = ("row", "tensor")
POSITIVE = range(1, 2**31)

MAX_TERMS = 1 << 17  # of an int32 sum of products of codes: 2^17 * 127^2 < 2^31

_INDEX_TYPES = (torch.int32, torch.int64)
_INDICES = ("indptr", "index", "indptr_t", "index_t", "order_t", "arg")
_SCALES = {"x": "x_scale", "x_target": "target_scale", "x_source": "source_scale", "hidden": "hidden_scale"}


@dataclass(frozen=True)
class Signature:
    """The arguments of an operator.

    Args:
        shapes: Of each tensor, as ``"S F"``: a letter is the same size everywhere, ``E`` the number of edges. ``"1|S"``
            is one of several shapes, ``"T+1"`` one more than ``T``, ``"H*D"`` a multiple of ``H``. Earlier arguments
            fix the letters, so an error names the later one.
        sizes: Integer arguments that fix a letter.
        choices: The values that an argument can have.
        pointers: Tensors that rise from 0 to ``E``.
        indices: Tensors whose entries count from 0 to the size of a letter.
        int32_sums: Letters that products of codes are summed over in int32.
    """

    shapes: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, Collection[Any]] = field(default_factory=dict)
    pointers: tuple[str, ...] = ()
    indices: Mapping[str, str] = field(default_factory=dict)
    int32_sums: tuple[str, ...] = ()

    def check(self, owner: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Check everything but the values of tensors, and return the size of each letter."""
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        _check_places(owner, tensors)
        _check_types(owner, tensors, arguments)
        for name, allowed in self.choices.items():
            if arguments[name] not in allowed:
                raise ValueError(f"'{owner}' expects '{name}' to be {_any_of(allowed)} (got {arguments[name]!r})")
        sizes = {letter: arguments[name] for name, letter in self.sizes.items()}
        for name, shapes in self.shapes.items():
            if name in tensors:
                _check_shape(owner, name, tensors[name], shapes, sizes)
        for letter in self.int32_sums:
            if sizes.get(letter, 0) > MAX_TERMS:
                raise ValueError(
                    f"'{owner}' sums at most {MAX_TERMS} products of codes in int32 (got {letter} = {sizes[letter]}); "
                    f"split the features"
                )
        return sizes

    def check_values(self, owner: str, arguments: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
        """Raise unless pointers and indices stay within what they point into."""
        for name in self.pointers:
            _check_once(_check_pointers, owner, name, arguments[name], int(sizes["E"]))
        for name, letter in self.indices.items():
            _check_once(_check_indices, owner, name, arguments[name], int(sizes[letter]))


def _any_of(allowed: Collection[Any]) -> str:
    if isinstance(allowed, range):
        return f"from {allowed.start} to {allowed.stop - 1}" if allowed.stop < 2**31 else f"at least {allowed.start}"
    return f"one of {tuple(allowed)}"


def _check_places(owner: str, tensors: Mapping[str, Tensor]) -> None:
    first = next(iter(tensors.values()))
    for name, t in tensors.items():
        if t.device != first.device:
            raise ValueError(
                f"'{owner}' expects '{name}' on {first.device}, where its first argument is (got {t.device})"
            )


def _check_types(owner: str, tensors: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> None:
    for name, t in tensors.items():
        if name in _INDICES:
            if t.dtype not in _INDEX_TYPES:
                raise TypeError(f"'{owner}' expects '{name}' in torch.int32 or torch.int64 (got {t.dtype})")
        elif name == "seed":
            if t.dtype != torch.int64 or tuple(t.shape) != (1,):
                raise ValueError(
                    f"'{owner}' expects 'seed' as one torch.int64, of shape [1] (got {t.dtype} of shape "
                    f"{list(t.shape)}); make it with 'qgnn.rng.make_seed'"
                )
        elif name == "packed":
            if t.dtype != torch.uint8:
                raise TypeError(f"'{owner}' expects 'packed' in torch.uint8, as 'blocks_pack' made it (got {t.dtype})")
        elif _SCALES.get(name) in tensors:
            if t.dtype != torch.int8:
                raise TypeError(f"'{owner}' expects '{name}' as int8 codes, since it has a scale (got {t.dtype})")
        elif not t.is_floating_point():
            takes_codes = _SCALES.get(name) in arguments
            hint = f"int8 codes come with '{_SCALES[name]}'" if takes_codes else f"use '{name}.float()'"
            raise TypeError(f"'{owner}' expects '{name}' in a floating-point type (got {t.dtype}); {hint}")
        elif t.dtype == torch.float64 and t.is_cuda:
            raise TypeError(f"'{owner}' expects '{name}' in at most 32 bits on a GPU (got {t.dtype})")


def _check_shape(owner: str, name: str, t: Tensor, shapes: str, sizes: dict[str, Any]) -> None:
    for shape in shapes.split("|"):
        dimensions, bound = shape.split(), dict(sizes)
        if t.dim() == len(dimensions) and all(map(_fits, dimensions, t.shape, [bound] * t.dim())):
            sizes |= bound
            return
    known = ", ".join(f"{letter} = {sizes[letter]}" for letter in sorted({c for c in shapes if c in sizes}))
    wanted = " or ".join(f"[{', '.join(shape.split())}]" for shape in shapes.split("|"))
    with_sizes = f" with {known}" if known else ""
    raise ValueError(f"'{owner}' expects '{name}' of shape {wanted}{with_sizes} (got {list(t.shape)})")


def _fits(dimension: str, size: Any, sizes: dict[str, Any]) -> bool:
    """Whether a size is what a dimension of a shape says; a new letter gets it."""
    if dimension.isdigit():
        return bool(size == int(dimension))
    if dimension.endswith("+1"):
        return bool(size >= 1) and _fits(dimension[:-2], size - 1, sizes)
    if "*" in dimension:
        times, letter = dimension.split("*")
        return bool(size % sizes[times] == 0) and _fits(letter, size // sizes[times], sizes)
    return bool(sizes.setdefault(dimension, size) == size)


def _check_once(check: Callable[[str, str, Tensor, int], None], owner: str, name: str, t: Tensor, limit: int) -> None:
    def run() -> bool:
        check(owner, name, t, limit)
        return True

    cached((t,), (check, limit), run)


def _check_pointers(owner: str, name: str, indptr: Tensor, num_edges: int) -> None:
    rises = (indptr[0] == 0) & (indptr[-1] == num_edges) & (indptr[1:] >= indptr[:-1]).all()
    if indptr.is_cuda:  # without waiting for the device
        torch._assert_async(rises, f"'{owner}' expects '{name}' to rise from 0 to the number of edges")
    elif not rises:
        raise ValueError(f"'{owner}' expects '{name}' to rise from 0 to the number of edges, {num_edges}")


def _check_indices(owner: str, name: str, index: Tensor, size: int) -> None:
    if index.is_cuda:
        inside = ((index >= 0) & (index < size)).all()
        torch._assert_async(inside, f"'{owner}' expects '{name}' to point to what is there")
    elif index.numel():
        low, high = (int(end) for end in torch.aminmax(index))
        if low < 0 or high >= size:
            worst = low if low < 0 else high
            raise ValueError(f"'{owner}' expects '{name}' from 0 to {size - 1} (got {worst})")
