"""Packed blocks that a product keeps of its rows, in place of codes, for the gradient of its weight: as operators take
them, and that gradient.

``blocks_pack`` makes them before the product runs, so that several products of the same rows share them.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from qgnn.ops._backends import STREAM_UNPACKED, Backend
from qgnn.ops.blocks import PROJECTIONS, unpack_rows
from qgnn.rounding import BLOCK_BITS

SCHEMA = (
    "Tensor? packed, Tensor? low, Tensor? step, Tensor? edges, Tensor? packed_seed, int packed_bits, int projection"
)
SHAPES = {"packed": "B W", "low": "B", "step": "B"}
CHOICES = {"packed_bits": BLOCK_BITS, "projection": PROJECTIONS}
EDGES = {"edges": "packed_bits"}


class Packed(NamedTuple):
    """Packed rows as operators take them; without any tensors there are none."""

    packed: Tensor | None = None
    low: Tensor | None = None
    step: Tensor | None = None
    edges: Tensor | None = None
    packed_seed: Tensor | None = None
    packed_bits: int = 8
    projection: int = 0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The first five."""
        return self[:5]


def packed_weight_grad(
    backend: Backend, g_q: Tensor, g_scale: Tensor, kept: Packed, bits: int, num_columns: int
) -> Tensor:
    """``dw = g^T x`` in fp32 for what blocks say of ``x``.

    Unpacked rows are rounded to int8 ones, as ``x`` would have been. Beside 2-bit codes that error counts for nothing,
    some 2**-12 of their variance, and the product reads the codes of ``g`` as they are; fp32 rows would need an fp32
    copy of it.
    """
    packed, low, step, edges, packed_seed, packed_bits, projection = kept
    assert packed is not None
    assert low is not None
    assert step is not None
    assert packed_seed is not None
    rows = unpack_rows(
        backend,
        packed,
        low,
        step,
        bits=packed_bits,
        edges=edges,
        projection=projection,
        projection_seed=packed_seed if projection else None,
        num_rows=g_q.shape[0],
        num_columns=num_columns,
    )
    codes, scale = backend.call("quantize", "quantize.backward", rows, bits=8, seed=packed_seed, stream=STREAM_UNPACKED)
    return backend.call("matmul_dw", "matmul.backward_dw", g_q, g_scale, codes, scale, bits=bits)
