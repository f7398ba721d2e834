"""The arithmetic of rounding that every backend shares: how a real value becomes a code.

Integers with a scale of their own, bit for bit the same in Triton, C and torch::

    qmax  = 2**(bits - 1) - 1
    scale = m * (1 / qmax)                             m = max|x| of what shares the scale
    inv   = qmax * (1 - 2**-22) / m                    0 for m <= 1e-30
    code  = ((int)(x * (inv * 65536)) + r16) >> 16     r16 = 16 random bits, or 32768 for nearest

``(int)`` truncates. The numerator is a little below ``qmax``, so that ``x * inv`` cannot pass it: no clamp is needed.
The product is rounded once and then turned into an integer, so contraction into a fused multiply-add cannot change a
code. If ``m`` is not finite the scale is NaN and the codes are 0: such values poison what shares their scale and
nothing else.

Values with a shared power of two, and affine ones, follow a :class:`Grid`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_BITS = (1, 2, 4, 8)
MAX_BLOCK_SIZE = 1 << 16  # a longer block saves less than a thousandth of a bit a value
METADATA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BINS = ("uniform", "optimal")

MAX_INT32_TERMS = 2**17 - 1  # of a sum of products of codes: (2**17 - 1) * 128 * 128 < 2**31

FLUSH = 1e-30  # below this the inverse scale would overflow; such values count as zero
_NEAREST = 1 << 15

# Exponents that blocks share, as they are stored: a byte, of which the largest stands for NaN.
EXPONENT_BIAS, NAN_EXPONENT = 127, 255
# What products of such blocks compute exactly: 128 products of two bytes, 2**21, are a sum that fp32 holds, and so does
# it the smallest factor, 2**(0 - 127 - 22).
MAX_SHARED_BLOCK_SIZE, MAX_SHARED_FRACTION_BITS = 128, 22


def absmax_scale(absmax: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """``(scale, inverse)`` of groups whose largest magnitude is ``absmax`` (fp32, any shape)."""
    qmax = (1 << (bits - 1)) - 1
    finite = absmax < float("inf")
    live = finite & (absmax > FLUSH)
    scale = torch.where(live, absmax * (1.0 / qmax), 0.0).masked_fill_(~finite, float("nan"))
    numerator = torch.full_like(absmax, qmax * (1 - 2.0**-22))
    return scale, torch.where(live, numerator / absmax, 0.0)


def round_codes(x: Tensor, inverse: Tensor, bits16: Tensor | None, dtype: torch.dtype = torch.int8) -> Tensor:
    """Codes of ``x`` (fp32) for an ``inverse`` scale that broadcasts against it.

    Args:
        x: Values.
        inverse: Second result of :func:`absmax_scale`.
        bits16: 16 random bits an element (int32) for stochastic rounding; ``None`` rounds to nearest, halves up.
        dtype: Integer type of the result.
    """
    steps = (x * (inverse * 65536.0)).to(torch.int32)
    steps += _NEAREST if bits16 is None else bits16
    return steps.bitwise_right_shift_(16).to(dtype)


class Grid(NamedTuple):
    """The numbers that a block of values can become.

    With ``affine=False`` all scales are powers of two. Of a block whose largest magnitude is ``m``,
    ``E = floor(log2 m)`` (``ceil`` with ``round_up``)::

        shared = clamp(E - max_exponent, -127, 127)     -127 for m = 0
        unit   = 2**(shared - fraction_bits)
        t      = x / unit                               exact
        step   = 2**(max(floor(log2|t|), min_exponent) - mantissa_bits)
        y      = clamp(step * round(t / step), low, high) * unit

    Integers are the case ``min_exponent = mantissa_bits``: ``step`` is 1 for all ``|t| < 2**(mantissa_bits + 1)``.
    With ``affine=True`` (all in fp32, each operation rounded once)::

        a, b   = min(x), max(x)
        inv    = (high - low) / (b - a)                 0 for b - a <= 1e-30
        code   = clamp(round((x - a) * inv), 0, high - low)
        y      = code * ((b - a) / (high - low)) + a

    ``round`` is to nearest, halves to even; or, with random bits ``r16``, the floor, and one more where
    ``(int)(fraction * 65536) + r16 >= 65536``. A block with an infinity or NaN, or whose ``b - a`` overflows, becomes
    NaN as a whole.

    Args:
        block_size: Consecutive columns that share a scale; 0 for a whole row. The last block of a row may be shorter.
        round_up: Whether ``log2 m`` is rounded up.
        max_exponent: Exponent of the largest element.
        fraction_bits: Bits of an element behind the point.
        mantissa_bits: Bits behind the leading one of an element.
        min_exponent: Exponent below which elements are as coarse as at it.
        low: Smallest element.
        high: Largest element.
        affine: Whether a block runs from its smallest to its largest value.
    """

    block_size: int
    round_up: bool
    max_exponent: int
    fraction_bits: int
    mantissa_bits: int
    min_exponent: int
    low: float
    high: float
    affine: bool

    @property
    def is_uniform(self) -> bool:
        """Whether elements are integers with a shared power of two, so that ``step`` is 1 unless the clamp decides."""
        return (
            not self.affine
            and self.min_exponent == self.mantissa_bits
            and max(-self.low, self.high) <= 2 ** (self.mantissa_bits + 1)
        )

    @property
    def is_integer(self) -> bool:
        """Whether elements are integers of at most 8 bits with a shared power of two."""
        return self.is_uniform and self.low >= -128 and self.high <= 127

    @property
    def name(self) -> str:
        """The name of the format whose values these are, such as ``fixed8``, ``msfp12`` or ``mxfp8-e4m3``."""
        bits = 1 + int(self.high).bit_length()
        if self.affine:
            name, usual = f"fixed{bits}-affine", 0
        elif not self.is_uniform:  # of the exponents, biased, 0 stands for those below min_exponent
            exponent_bits = 1 + (1 - self.min_exponent).bit_length()
            bits = 1 + exponent_bits + self.mantissa_bits
            name, usual = f"mxfp{bits}" + f"-e{exponent_bits}m{self.mantissa_bits}" * (bits > 4), 32
        elif self.block_size == 0:
            name, usual = f"fixed{bits}", 0
        elif self.round_up:
            name, usual = f"msfp{8 + bits}", 16
        else:
            name, usual = f"mxint{bits}", 32
        return name if self.block_size == usual else f"{name}-g{self.block_size}"


def power_of_two(exponent: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``2.0**exponent``, exactly, of integers from -126 to 127."""
    if dtype == torch.float64:
        return (exponent.long() + 1023).bitwise_left_shift_(52).view(torch.float64)
    return (exponent.int() + 127).bitwise_left_shift_(23).view(torch.float32)


def scale_by_power_(x: Tensor, exponent: Tensor) -> Tensor:
    """``x * 2**exponent`` in place, for integers from -252 to 254: in two steps, as one factor may not be a normal
    number."""
    half = exponent >> 1
    return x.mul_(power_of_two(half, x.dtype)).mul_(power_of_two(exponent - half, x.dtype))


def shared_scale(exponent: Tensor, fraction_bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The factors of codes whose blocks have these exponents (uint8, 255 for NaN), as ``quantize_shared`` makes them.
    All are exact: the smallest fp32 one is a denormal."""
    power = exponent.int() - (EXPONENT_BIAS + fraction_bits)
    scale = scale_by_power_(torch.ones_like(exponent, dtype=dtype), power)
    return scale.masked_fill_(exponent == NAN_EXPONENT, float("nan"))
