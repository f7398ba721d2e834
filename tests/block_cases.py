"""What the tests of packed blocks share."""

from collections.abc import Iterable

import torch
from hypothesis import strategies as st
from torch import Tensor

from qgnn import rng
from statistics_checks import EPS

BITS = (1, 2, 4, 8)
METADATA = (torch.float32, torch.bfloat16, torch.float16)
ANY_FLOAT = st.floats(width=32, allow_nan=True, allow_infinity=True)
SEEDS = st.one_of(st.none(), st.integers(0, 2**64 - 1).map(rng.make_seed))


def assert_same(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Tensors of the same types and values; a NaN equals a NaN."""
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def codes_of(packed: Tensor, bits: int) -> Tensor:
    """Codes ``[B, G]`` in the order of the values, by the definition of the layout, one at a time."""
    run = packed.shape[1]
    codes = [
        [(row[k % run] >> (bits * (k // run))) & ((1 << bits) - 1) for k in range(run * 8 // bits)]
        for row in packed.tolist()
    ]
    return torch.tensor(codes, dtype=torch.int64).view(len(codes), run * 8 // bits)


def error_bound(low: Tensor, step: Tensor, bits: int, nearest: bool) -> Tensor:
    """Largest error of a value after packing and unpacking, one a block.

    One step, or half of one to nearest; the truncation to 2**-16 of a step; and on up to qmax steps the numerator
    (2**-22) and six fp32 roundings (1 / qmax, the step, the difference, the quotient, the product, the decoded one).
    The decoded sum rounds once more, relative to the value. Ranges up to 1e-30 count as zero.
    """
    qmax, low, step = 2**bits - 1, low.double(), step.double()
    steps = (0.5 if nearest else 1.0) + 2.0**-16 + qmax * (2.0**-22 + 6 * EPS)
    return step * steps + EPS * (low.abs() + (qmax + 1) * step) + 1e-30


# Edges of bins of very different widths, the smallest one that there may be among them.
EDGES = {
    1: torch.tensor([0.0, 1.0]),
    2: torch.tensor([0, 1.1394, 1.8606, 3]),
    4: torch.tensor([0, 2.0**-16, 0.5, 1, 2, 2.001, 3.7, 5, 8, 9, 9.25, 9.5, 12, 13, 14.999, 15]),
}


@st.composite
def any_edges(draw: st.DrawFn, bits: int) -> Tensor:
    """Edges that the operators take."""
    last = (1 << bits) - 1
    inner = st.integers(1, last * 65536 - 1)
    between = sorted(draw(st.lists(inner, min_size=last - 1, max_size=last - 1, unique=True)))
    return torch.tensor([0, *between, last * 65536]) / 65536
