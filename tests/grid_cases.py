"""Grids of the number formats, and values that hurt them."""

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from block_cases import ANY_FLOAT
from qgnn.rounding import Grid

GRIDS = {
    **{
        f"fixed{b}": Grid(0, True, 0, b - 1, b - 1, b - 1, -(2 ** (b - 1)), 2 ** (b - 1) - 1, False) for b in (2, 8, 16)
    },
    **{f"fixed{b}-affine": Grid(0, False, 0, 0, 0, 0, -(2 ** (b - 1)), 2 ** (b - 1) - 1, True) for b in (2, 8, 16)},
    **{f"msfp{9 + m}": Grid(16, True, 0, m, m, m, -(2**m - 1), 2**m - 1, False) for m in (1, 3, 7)},
    "mxint8": Grid(32, False, 0, 6, 7, 7, -127, 127, False),
    "mxfp8-e4m3": Grid(32, False, 8, 0, 3, -6, -448, 448, False),
    "mxfp8-e5m2": Grid(32, False, 15, 0, 2, -14, -57344, 57344, False),
    "mxfp6-e2m3": Grid(32, False, 2, 0, 3, 0, -7.5, 7.5, False),
    "mxfp6-e3m2": Grid(32, False, 4, 0, 2, -2, -28, 28, False),
    "mxfp4": Grid(32, False, 2, 0, 1, 0, -6, 6, False),
}
INTEGERS = {name: grid for name, grid in GRIDS.items() if grid.is_integer}
WIDTHS = [1, 7, 16, 33, 130]

_LARGEST = float(torch.finfo(torch.float32).max)
HURTING = st.one_of(
    ANY_FLOAT,
    st.sampled_from([0.0, -0.0, 2.0**-149, -(2.0**-127), 1.5 * 2.0**-127, 2.0**-126, _LARGEST, -_LARGEST, 2.0**127]),
    st.builds(math.ldexp, st.integers(-40, 40).map(float), st.integers(-8, 6)),  # powers of two, and ties
)


def hurting_rows(width: int) -> Tensor:
    """Rows of 43 + 38 orders of magnitude, of zeros, denormals, ties, one magnitude, and poisoned ones."""
    x = torch.randn(20, width) * torch.logspace(-43, 38.5, 20)[:, None]
    x[2], x[3, -1], x[4, 0], x[5, width // 2] = 0.0, math.nan, -math.inf, math.inf
    x[6] = torch.ldexp(torch.randint(-9, 9, (width,)).float(), torch.randint(-8, 3, (width,)))
    x[7], x[8], x[9] = 1e-40 * torch.randn(width), 2.0**-149, 2.0**-127
    x[10], x[11] = _LARGEST * torch.randn(width).sign(), -(2.0**5)
    return x


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal to the sign of a zero; a NaN equals a NaN."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    if actual.is_floating_point():
        assert torch.equal(actual.signbit() & ~actual.isnan(), expected.signbit() & ~expected.isnan())
