"""Number formats: how a real value becomes a code, and the arithmetic of rounding that every backend shares.

The rounding rule, bit for bit the same in Triton, C and torch::

    qmax  = 2**(bits - 1) - 1
    scale = m * (1 / qmax)                             m = max|x| of what shares the scale
    inv   = qmax * (1 - 2**-22) / m                    0 for m <= 1e-30
    code  = ((int)(x * (inv * 65536)) + r16) >> 16     r16 = 16 random bits, or 32768 for nearest

``(int)`` truncates. The numerator is a little below ``qmax``, so that ``x * inv`` cannot pass it: no clamp is needed.
The product is rounded once and then turned into an integer, so contraction into a fused multiply-add cannot change a
code. If ``m`` is not finite the scale is NaN and the codes are 0: such values poison what shares their scale and
nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qgnn.qtensor import QTensor
from qgnn.rng import make_seed, random_bits16

__all__ = ["Blocks", "Int"]

BLOCK_BITS = (1, 2, 4, 8)
MAX_BLOCK_SIZE = 1 << 16  # a longer block saves less than a thousandth of a bit a value
METADATA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BINS = ("uniform", "optimal")

_FLUSH = 1e-30  # below this the inverse scale would overflow; such values count as zero
_NEAREST = 1 << 15


def absmax_scale(absmax: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """``(scale, inverse)`` of groups whose largest magnitude is ``absmax`` (fp32, any shape)."""
    qmax = (1 << (bits - 1)) - 1
    finite = absmax < float("inf")
    live = finite & (absmax > _FLUSH)
    scale = torch.where(live, absmax * (1.0 / qmax), 0.0).masked_fill_(~finite, float("nan"))
    numerator = torch.tensor(qmax * (1 - 2.0**-22), dtype=torch.float32, device=absmax.device)
    return scale, torch.where(live, numerator / absmax, 0.0)


def round_codes(x: Tensor, inverse: Tensor, bits16: Tensor | None) -> Tensor:
    """int8 codes of ``x`` (fp32) for an ``inverse`` scale that broadcasts against it.

    Args:
        x: Values.
        inverse: Second result of :func:`absmax_scale`.
        bits16: 16 random bits an element (int32) for stochastic rounding; ``None`` rounds to nearest, halves up.
    """
    steps = (x * (inverse * 65536.0)).to(torch.int32)
    steps += _NEAREST if bits16 is None else bits16
    return steps.bitwise_right_shift_(16).to(torch.int8)


@dataclass(frozen=True)
class Int:
    """Integer codes with one scale (and, if asymmetric, one zero point) per slice.

    Args:
        bits: Width of a code, 2 to 8.
        symmetric: With ``True`` codes run from ``-(2**(bits-1) - 1)`` to ``2**(bits-1) - 1`` and 0 is exact; with
            ``False`` from 0 to ``2**bits - 1`` between the smallest and the largest value of the slice.

    Raises:
        ValueError: If ``bits`` is outside 2 to 8.

    Example:
        >>> q = qgnn.formats.Int(4).encode(torch.randn(10, 64))
        >>> q.codes.shape, q.scale.shape
        (torch.Size([10, 64]), torch.Size([10, 1]))
    """

    bits: int = 8
    symmetric: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or not isinstance(self.bits, int):
            raise TypeError(f"'Int' expects 'bits' to be an int (got {type(self.bits).__name__})")
        if not 2 <= self.bits <= 8:
            raise ValueError(
                f"'Int' expects 'bits' from 2 to 8 (got {self.bits}); wider codes do not fit an int8 kernel"
            )

    @property
    def bits_per_value(self) -> float:
        """Bits of one code; the scale of a slice (32 bits, 64 with a zero point) comes on top, once a slice."""
        return float(self.bits)

    def encode(self, x: Tensor, dim: int = -1, seed: int | Tensor | None = None) -> QTensor:
        """Quantize ``x`` with one scale per slice along ``dim``.

        Args:
            x: Values of any floating type and shape with at least one dimension.
            dim: The dimension whose values share a scale.
            seed: A seed for stochastic rounding; ``None`` rounds to nearest.

        Raises:
            TypeError: If ``x`` is not a floating-point tensor.
        """
        if not x.is_floating_point():
            raise TypeError(
                f"'Int.encode' expects a floating-point tensor (got {x.dtype}); convert it with 'x.float()'"
            )
        if x.dim() == 0:
            raise ValueError("'Int.encode' expects a tensor with at least one dimension (got a scalar)")
        values = x.detach().movedim(dim, -1).float()
        if values.numel() == 0:
            return self._encode_nothing(values, dim, x.dtype)
        rows = values.reshape(-1, values.shape[-1])
        bits16 = None
        if seed is not None:
            bits16 = random_bits16(0, rows.shape[0], rows.shape[1], make_seed(seed, x.device))
        codes, scale, zero = self._encode_rows(rows, bits16)

        def restored(t: Tensor) -> Tensor:
            return t.reshape(*values.shape[:-1], t.shape[-1]).movedim(-1, dim)

        return QTensor(restored(codes), restored(scale), None if zero is None else restored(zero), dtype=x.dtype)

    def _encode_nothing(self, values: Tensor, dim: int, dtype: torch.dtype) -> QTensor:
        scale = values.new_zeros((*values.shape[:-1], 1)).movedim(-1, dim)
        codes = values.to(torch.int8 if self.symmetric else torch.uint8).movedim(-1, dim)
        return QTensor(codes, scale, None if self.symmetric else scale.clone(), dtype=dtype)

    def _encode_rows(self, rows: Tensor, bits16: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.symmetric:
            scale, inverse = absmax_scale(rows.abs().amax(1, keepdim=True), self.bits)
            return round_codes(rows, inverse, bits16), scale, None
        low, high = rows.aminmax(dim=1, keepdim=True)
        # Codes 0 .. 2**bits - 1 are what the symmetric rule gives for one bit more on values that are never negative.
        scale, inverse = absmax_scale(high - low, self.bits + 1)
        steps = ((rows - low) * (inverse * 65536.0)).to(torch.int32)
        steps += _NEAREST if bits16 is None else bits16
        return steps.bitwise_right_shift_(16).to(torch.uint8), scale, low

    def decode(self, q: QTensor) -> Tensor:
        """The values that the codes stand for, in the type that was encoded."""
        return q.dequantize()

    def quantize(self, x: Tensor, dim: int = -1, seed: int | Tensor | None = None) -> Tensor:
        """``decode(encode(x))``: ``x`` with the error of this format."""
        return self.decode(self.encode(x, dim, seed))


@dataclass(frozen=True)
class Blocks:
    """Packed codes with an offset and a step a block of consecutive values: the storage of activations that only the
    backward pass reads.

    With blocks as long as a row it is that of EXACT (Liu et al., ICLR 2022); longer blocks and bins that minimize the
    variance are those of `"Activation Compression of Graph Neural Networks using Block-wise Quantization with Improved
    Variance Minimization" <https://arxiv.org/abs/2309.11856>`_.

    Args:
        bits: Width of a code: 1, 2, 4 or 8.
        block_size: Values of a block, at most 65,536 and whole bytes of codes; ``None`` chooses a length for the width.
        projection: Ratio F / R' of a random projection of the columns in front of the codes, at least 2, for matrices
            whose gradient it leaves unbiased; ``None`` for none.
        bins: ``"uniform"``, or ``"optimal"``: edges of :func:`qgnn.compress.optimal_bins`, for 2 and 4 bits.
        metadata_dtype: Type of offsets and steps, which are rounded to it before anything is coded.

    Raises:
        TypeError: If a field has the wrong type.
        ValueError: If a field has a value outside its range.

    Example:
        >>> exact = qgnn.formats.Blocks(bits=2, block_size=16, projection=8)
    """

    bits: int = 2
    block_size: int | None = None
    projection: int | None = None
    bins: str = "uniform"
    metadata_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for name in ("bits", "block_size", "projection"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | None) or (name == "bits" and value is None):
                raise TypeError(f"'Blocks' expects '{name}' to be an int (got {value!r})")
        if self.bits not in BLOCK_BITS:
            raise ValueError(f"'Blocks' expects 'bits' to be one of {BLOCK_BITS} (got {self.bits})")
        multiple = 8 // self.bits
        if self.block_size is not None and (not 1 <= self.block_size <= MAX_BLOCK_SIZE or self.block_size % multiple):
            raise ValueError(
                f"'Blocks' expects 'block_size' to be a multiple of {multiple} up to {MAX_BLOCK_SIZE}, for whole bytes "
                f"of {self.bits}-bit codes (got {self.block_size})"
            )
        if self.projection is not None and self.projection < 2:
            raise ValueError(
                f"'Blocks' expects 'projection' to be a ratio of at least 2, or None (got {self.projection})"
            )
        if self.bins not in BINS:
            raise ValueError(f"'Blocks' expects 'bins' to be one of {BINS} (got {self.bins!r})")
        if self.bins == "optimal" and self.bits not in (2, 4):
            raise ValueError(
                f"'Blocks' expects bins='uniform' for {self.bits}-bit codes (got 'optimal'): one bit has no edge to "
                f"choose, and 8 bits have bins so narrow that the choice changes nothing"
            )
        if self.metadata_dtype not in METADATA_DTYPES:
            raise TypeError(
                f"'Blocks' expects 'metadata_dtype' to be torch.float32, torch.bfloat16 or torch.float16 (got "
                f"{self.metadata_dtype!r})"
            )

    def columns(self, num_columns: int) -> int:
        """Columns R' that a matrix of ``num_columns`` is projected to; 0 for no projection."""
        if self.projection is None or num_columns < 2:
            return 0
        return min(max(1, round(num_columns / self.projection)), 65535)

    def num_bytes(self, num_values: int) -> int:
        """Bytes of so many coded values, where the block's length is given."""
        assert self.block_size is not None
        num_blocks = -(-num_values // self.block_size)
        return num_blocks * (self.block_size * self.bits // 8 + 2 * self.metadata_dtype.itemsize)

    @property
    def bits_per_value(self) -> float:
        """Bits of one value, its share of offset and step included where the block's length is given."""
        metadata = 0.0 if self.block_size is None else 16.0 * self.metadata_dtype.itemsize / self.block_size
        return (self.bits + metadata) / (self.projection or 1)

    def __str__(self) -> str:
        """As ``int2-rp8-vm/G1024``, the names of the command line with the block's length."""
        parts = [f"int{self.bits}", f"rp{self.projection}" if self.projection else "", "vm" * (self.bins == "optimal")]
        return "-".join(filter(None, parts)) + (f"/G{self.block_size}" if self.block_size else "")
