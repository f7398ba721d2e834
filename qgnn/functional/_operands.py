"""The two sides of a product in formats of their own, and the kernel that multiplies them.

A product sums over the columns of both sides. Rows of integers with a scale each meet in the int8 kernels, blocks of
integers with shared exponents in theirs; any other pair is multiplied in fp32, by the values that codes stand for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from math import prod

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from qgnn import ops, trace
from qgnn.formats import Format, Int
from qgnn.formats._format import name_of
from qgnn.packing import scale_blocks_
from qgnn.qtensor import QTensor
from qgnn.rng import stream_key
from qgnn.rounding import MAX_INT32_TERMS, Grid, shared_scale


@dataclass  # not frozen, of which torch.compile before 2.12 makes no values
class Operand:
    """One side of a product: values, codes with a scale a row, or codes with an exponent a block.

    Args:
        name: Of the format.
        values: ``[R, C]``.
        codes: int8 ``[R, C]``.
        scale: fp32 ``[R]`` or ``[1]``.
        exponent: uint8 ``[R, ceil(C / grid.block_size)]``, biased by 127.
        grid: Of the exponents.
    """

    name: str
    values: Tensor | None = None
    codes: Tensor | None = None
    scale: Tensor | None = None
    exponent: Tensor | None = None
    grid: Grid | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows ``R``."""
        return (self.codes if self.values is None else self.values).shape[0]  # type: ignore[union-attr]

    def decoded(self) -> Tensor:
        """The values that it stands for."""
        if self.values is not None:
            return self.values
        assert self.codes is not None
        if self.scale is not None:
            return self.codes.float().mul_(self.scale[:, None])
        assert self.exponent is not None
        assert self.grid is not None
        scale = shared_scale(self.exponent, self.grid.fraction_bits)
        return scale_blocks_(self.codes.float(), scale, self.grid.block_size)


def stream_of(seed: Tensor | None, stream: int) -> Tensor | None:
    """The seed of an independent rounding."""
    return None if seed is None else seed ^ stream_key(stream)


def round_rows(rows: Tensor, fmt: Format | None, granularity: str, seed: Tensor | None) -> Operand:
    """``rows`` ``[R, C]`` in a format, with scales of rows (or one), or of blocks of columns."""
    if fmt is None:
        return Operand(_type(rows), values=rows)
    per_tensor = granularity == "tensor"
    if isinstance(fmt, Int) and fmt.symmetric:
        codes, scale = ops.quantize(rows, seed, fmt.bits, granularity, 1)
        return Operand(name_of(fmt), codes=codes, scale=scale)
    grid = getattr(fmt, "grid", None)
    if grid is not None and grid.is_integer:
        flat = rows.reshape(1, -1) if per_tensor and not grid.block_size else rows
        codes, exponent = ops.quantize_shared(flat, seed, 0, *grid)
        if grid.block_size:
            return Operand(name_of(fmt), codes=codes, exponent=exponent, grid=grid)
        return Operand(
            name_of(fmt), codes=codes.view(rows.shape), scale=shared_scale(exponent, grid.fraction_bits).view(-1)
        )
    return Operand(
        name_of(fmt), values=fmt.quantize(rows.float(), None if per_tensor and fmt.scales_slices else -1, seed)
    )


def operand_of(q: QTensor) -> Operand:
    """Rows ``[R, C]`` that are codes already, with scales of rows or of blocks of columns."""
    if not has_codes(q):
        return Operand(q.name, values=decoded(q))
    if q.block_size is None:
        return Operand(q.name, codes=q.codes, scale=q.scale.reshape(-1))
    assert q.layout is not None
    grid = Grid(q.block_size, False, 0, q.layout.fraction_bits, 0, 0, 0, 0, False)
    return Operand(q.name, codes=q.codes, exponent=q.scales.view(torch.uint8), grid=grid)


def has_codes(q: QTensor) -> bool:
    """Whether integer kernels multiply the codes of such rows; otherwise they are decoded."""
    if q.zero is not None or q.code_dtype != torch.int8:
        return False
    if q.block_size is None:
        return q.scales.shape[-1] == 1
    return q.layout is not None and q.layout.dim == -1


def decoded(q: QTensor) -> Tensor:
    """The values of codes, in the type that products outside of kernels are computed in."""
    return (q if q.dtype == torch.float64 else replace(q, dtype=torch.float32)).dequantize()


def rows_of(q: QTensor) -> QTensor:
    """Codes ``[..., C]`` as those of a matrix."""
    lead, layout = q.shape[:-1], q.layout
    if len(lead) == 1:
        return q
    if layout is not None and layout.dim != -1:
        raise ValueError(
            f"'linear' expects codes of more than two dimensions to lie along the last one (got {q!r}, along dimension "
            f"{layout.dim}); encode with dim=-1"
        )

    num_rows = prod(lead)

    def flat(t: Tensor) -> Tensor:
        shared = prod(t.shape[:-1]) == 1
        return t.reshape(1, -1) if shared else t.expand(*lead, -1).reshape(num_rows, t.shape[-1])

    if layout is not None:
        layout = replace(layout, shape=(num_rows, q.shape[-1]))
    zero = None if q.zero is None else flat(q.zero)
    return replace(q, storage=flat(q.storage), scales=flat(q.scales), zero=zero, origin=None, layout=layout)


def product(a: Operand, b: Operand, bias: Tensor | None, pass_: str) -> Tensor:
    """``a b^T + bias`` in fp32, ``[R, C]`` and ``[M, C]`` to ``[R, M]``."""
    name = a.name if a.name == b.name else f"{a.name} x {b.name}"
    if a.scale is not None and b.scale is not None:
        return _codes_product(a, b, bias, pass_, name)
    if a.grid is not None and b.grid is not None and a.grid.block_size == b.grid.block_size:
        fraction_bits = a.grid.fraction_bits + b.grid.fraction_bits
        blocks = (a.codes, a.exponent, b.codes, b.exponent)
        return ops.matmul_shared(*blocks, bias, a.grid.block_size, fraction_bits, pass_, name)
    left, right = a.decoded(), b.decoded()
    out = torch.nn.functional.linear(left, right.to(left.dtype), None if bias is None else bias.to(left.dtype))
    if not torch.compiler.is_compiling() and trace.recording():
        trace.report(f"matmul.{pass_}", f"{name} in {_type(out)}", "torch", (left, right, bias, out))
    return out


def _codes_product(a: Operand, b: Operand, bias: Tensor | None, pass_: str, name: str) -> Tensor:
    """By parts of as many columns as int32 sums hold; those of the gradient of a weight are the rows of a graph."""
    assert a.codes is not None
    assert b.codes is not None
    num_columns = a.codes.shape[1]
    if not guard_or_false(num_columns > MAX_INT32_TERMS):
        return ops.matmul_codes(a.codes, a.scale, b.codes, b.scale, bias, pass_, name)
    parts = []
    for start in range(0, num_columns, MAX_INT32_TERMS):
        left, right = (codes[:, start : start + MAX_INT32_TERMS].contiguous() for codes in (a.codes, b.codes))
        parts.append(ops.matmul_codes(left, a.scale, right, b.scale, None if start else bias, pass_, name))
    return reduce(Tensor.add_, parts)


def _type(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")
