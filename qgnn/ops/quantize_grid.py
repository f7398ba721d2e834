"""``qgnn::quantize_dequantize``: the values of a grid that those of a matrix become; its gradient passes unchanged.
``qgnn::quantize_shared``: their codes, on a grid of integers, which carry no gradient.

The numbers of a :class:`qgnn.rounding.Grid` are arguments of their own, in its order: ``op(x, seed, stream, *grid)``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from qgnn.ops._backends import Backend, fake_codes
from qgnn.ops._checks import Signature
from qgnn.ops._operator import define, register_autograd
from qgnn.rounding import Grid

_LARGEST = 65536
_ARGUMENTS = (
    "(Tensor x, Tensor? seed, int stream, int block_size, bool round_up, int max_exponent, int fraction_bits, "
    "int mantissa_bits, int min_exponent, float low, float high, bool affine)"
)
_SIGNATURE = Signature(
    {"x": "R C"},
    # Within these, both parts of a split power of two are normal numbers, and steps that are not clamped fit 23 bits.
    choices={
        "stream": range(2**31 - 1),
        "block_size": range(2**31 - 1),
        "max_exponent": range(32),
        "fraction_bits": range(17),
        "mantissa_bits": range(17),
        "min_exponent": range(-16, 17),
    },
)


def _grid_of(owner: str, numbers: tuple[Any, ...]) -> Grid:
    grid = Grid(*numbers)
    if not -_LARGEST <= grid.low <= 0 < grid.high <= _LARGEST:  # a NaN fails
        raise ValueError(
            f"'qgnn::{owner}' expects 'low' from {-_LARGEST} to 0 and 'high' above 0 and up to {_LARGEST} (got "
            f"{grid.low} and {grid.high})"
        )
    if owner == "quantize_shared" and not grid.is_integer:
        raise ValueError(
            f"'qgnn::quantize_shared' expects a grid of integers of at most 8 bits with a shared power of two (got "
            f"{grid}); use 'qgnn::quantize_dequantize'"
        )
    return grid


def _call(owner: str, traced: str, backend: Backend, x: Tensor, seed: Tensor | None, stream: int, *numbers: Any) -> Any:
    grid = _grid_of(owner, numbers)
    return backend.call(owner, traced, x, grid=grid, seed=seed, stream=stream, format_name=grid.name)


_quantize_dequantize = partial(_call, "quantize_dequantize", "quantize.dequantize")
_quantize_shared = partial(_call, "quantize_shared", "quantize.shared")


def _fake_quantize_dequantize(x: Tensor, seed: Tensor | None, stream: int, *numbers: Any) -> Tensor:
    _grid_of("quantize_dequantize", numbers)
    return x.new_empty(x.shape)


quantize_dequantize = define(
    "quantize_dequantize",
    _quantize_dequantize,
    f"{_ARGUMENTS} -> Tensor",
    _fake_quantize_dequantize,
    _SIGNATURE,
)


def _straight_through(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (grad, None, None, *(None for _ in Grid._fields))


register_autograd(quantize_dequantize, _straight_through)


def _fake_quantize_shared(x: Tensor, seed: Tensor | None, stream: int, *numbers: Any) -> tuple[Tensor, Tensor]:
    size = _grid_of("quantize_shared", numbers).block_size
    num_rows, width = x.shape
    num_blocks = (width + size - 1) // size if size else 1
    return fake_codes(x, num_rows, width), x.new_empty((num_rows, num_blocks), dtype=torch.uint8)


quantize_shared = define(
    "quantize_shared",
    _quantize_shared,
    f"{_ARGUMENTS} -> (Tensor, Tensor)",
    _fake_quantize_shared,
    _SIGNATURE,
)
