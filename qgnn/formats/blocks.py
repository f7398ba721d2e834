"""Block-wise packed storage."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from qgnn.rounding import BINS, BLOCK_BITS, MAX_BLOCK_SIZE, METADATA_DTYPES

_NAME = re.compile(r"int(\d{1,9})(?:-rp(\d{1,9}))?(-vm)?(?:-g(\d{1,9}))?", re.ASCII | re.IGNORECASE)


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
        """Columns R' that a matrix is projected to; 0 for no projection.

        Args:
            num_columns: Columns F of the matrix.
        """
        if self.projection is None or num_columns < 2:
            return 0
        return min(max(1, round(num_columns / self.projection)), 65535)

    def num_bytes(self, num_values: int) -> int:
        """Bytes of coded values, offsets and steps included, where the block's length is given.

        Args:
            num_values: Number of the values that are coded: of a projection those behind it.
        """
        assert self.block_size is not None
        num_blocks = -(-num_values // self.block_size)
        return num_blocks * (self.block_size * self.bits // 8 + 2 * self.metadata_dtype.itemsize)

    @property
    def bits_per_value(self) -> float:
        """Bits of one value, its share of offset and step included where the block's length is given."""
        metadata = 0.0 if self.block_size is None else 16.0 * self.metadata_dtype.itemsize / self.block_size
        return (self.bits + metadata) / (self.projection or 1)

    def __str__(self) -> str:
        """As ``int2-rp8-vm-g1024``, which :meth:`parse` takes; it leaves out the type of the metadata."""
        parts = [f"int{self.bits}", f"rp{self.projection}" if self.projection else "", "vm" * (self.bins == "optimal")]
        return "-".join(filter(None, [*parts, f"g{self.block_size}" if self.block_size else ""]))

    @classmethod
    def parse(cls, name: str) -> Blocks:
        """The format of a name, with offsets and steps in bf16.

        Args:
            name: ``int`` and the width, then where wanted ``-rp`` and the ratio of the projection, ``-vm`` for bins of
                least variance, ``-g`` and the length of a block, in this order, in small letters or capitals.

        Raises:
            ValueError: If it is no such name, or a number is outside its range.

        Example:
            >>> exact = qgnn.formats.Blocks.parse("int2-rp8-g16")  # a row of 128 columns a block, as in EXACT
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(
                f"'Blocks' expects a name such as 'int2', 'int4-vm' or 'int2-rp8-vm-g1024' (got {name!r}): int1, int2, "
                f"int4 or int8, then -rp and a ratio of projection, -vm for bins of least variance, -g and a length"
            )
        bits, projection, optimal, block_size = match.groups()
        return cls(
            bits=int(bits),
            block_size=None if block_size is None else int(block_size),
            projection=None if projection is None else int(projection),
            bins="optimal" if optimal else "uniform",
        )
