"""Codes in blocks with exponents, and what their product is exactly."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

SHAPES = [(1, 1, 1), (21, 7, 33), (6, 16, 32), (13, 33, 7), (70, 130, 70)]  # N, K, M: parts of blocks, tiles and panels
BLOCK_SIZES = [8, 16, 32]
EXTREMES = {"usual": (110, 140), "smallest": (0, 3), "largest": (250, 255), "any": (0, 256)}  # of exponents; 255 is NaN


class Operands(NamedTuple):
    """Positional arguments of ``matmul_shared``."""

    x_q: Tensor
    x_exponent: Tensor
    w_q: Tensor
    w_exponent: Tensor
    bias: Tensor | None = None

    def to(self, device: str) -> "Operands":
        return Operands(*(None if t is None else t.to(device) for t in self))


def operands_of(N: int, K: int, M: int, G: int, exponents: str = "usual", bias: bool = True) -> Operands:
    """Codes of all 8 bits, -128 among them."""

    def codes(rows: int) -> Tensor:
        return torch.randint(-128, 128, (rows, K), dtype=torch.int8)

    def powers(rows: int) -> Tensor:
        return torch.randint(*EXTREMES[exponents], (rows, -(-K // G)), dtype=torch.uint8)

    return Operands(codes(N), powers(N), codes(M), powers(M), torch.randn(M) if bias else None)


def options_of(G: int, **options: Any) -> dict[str, Any]:
    return {"block_size": G, "fraction_bits": 12, **options}


def decoded(codes: Tensor, exponent: Tensor, G: int, shift: int) -> Tensor:
    """float64 values of codes; NaN in blocks that are not finite."""
    factor = torch.tensor(2.0, dtype=torch.float64) ** (exponent.double() - 127 - shift)
    factor[exponent == 255] = float("nan")
    return codes.double() * factor.repeat_interleave(G, dim=1)[:, : codes.shape[1]]


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Bit for bit; a NaN equals a NaN."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
