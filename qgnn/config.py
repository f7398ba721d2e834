"""QConfig: what a quantized layer does with its operands."""

from __future__ import annotations

from dataclasses import dataclass, field

from qgnn.formats import Blocks, Int

GRANULARITIES = ("row", "tensor", "block")
ROUNDINGS = ("stochastic", "nearest")
SAVES = ("int8", "fp32")


@dataclass(frozen=True)
class QConfig:
    """How a layer quantizes. ``config=None`` in place of a :class:`QConfig` means full precision.

    Args:
        bits: Width of the integer codes of activations, weights and gradients, 2 to 8. Codes below 8 bits are stored in
            int8 all the same.
        granularity: What shares a scale: ``"row"`` of a matrix, the whole ``"tensor"``, or a ``"block"`` of
            ``block_size`` columns of a row (in :func:`qgnn.functional.quantize`; products take rows or tensors).
        rounding: ``"stochastic"`` (unbiased, drawn anew each call) or ``"nearest"``. Layers in eval mode round to
            nearest, so that inference is deterministic.
        fmt: A number format from :mod:`qgnn.formats`; ``None`` means ``Int(bits)``.
        save: What is kept for the backward pass: ``"int8"`` codes, ``"fp32"`` for the operands themselves, or
            :class:`qgnn.formats.Blocks` for packed codes of the rows of products, or of their random projection. They
            are rounded at random whatever ``rounding`` says, and the forward pass is that of ``"int8"``. Of
            constants, and of rows that gradients of edge weights, of :func:`qgnn.functional.sddmm` and of attention
            read, the codes are kept. Sums with constant weights keep nothing.
        keep_fp32: Names of submodules that a model conversion leaves in full precision.
        block_size: Columns of a block with ``granularity="block"``.

    Raises:
        TypeError: If a field has the wrong type.
        ValueError: If a field has an unknown value, with the values that exist.

    Example:
        >>> conv = qgnn.nn.QGCNConv(128, 64, config=qgnn.QConfig(bits=8, rounding="nearest"))
    """

    bits: int = 8
    granularity: str = "row"
    rounding: str = "stochastic"
    fmt: Int | None = None
    save: str | Blocks = "int8"
    keep_fp32: tuple[str, ...] = ()
    block_size: int = field(default=128, kw_only=True)

    def __post_init__(self) -> None:
        if self.fmt is None:
            Int(self.bits)  # checks the width
        elif not isinstance(self.fmt, Int):
            raise TypeError(f"'QConfig' expects 'fmt' to be a format of qgnn.formats or None (got {self.fmt!r})")
        elif not self.fmt.symmetric:
            raise ValueError(
                "'QConfig' expects a symmetric 'fmt' (got an asymmetric one): products need codes without zero point"
            )
        elif self.bits not in (8, self.fmt.bits):
            raise ValueError(f"'QConfig' got bits={self.bits} and fmt={self.fmt!r}; give one of them")
        else:
            object.__setattr__(self, "bits", self.fmt.bits)
        for name, choices in (("granularity", GRANULARITIES), ("rounding", ROUNDINGS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"'QConfig' expects '{name}' to be one of {choices} (got {getattr(self, name)!r})")
        if not isinstance(self.save, Blocks) and self.save not in SAVES:
            error = ValueError if isinstance(self.save, str) else TypeError
            raise error(f"'QConfig' expects 'save' to be one of {SAVES} or qgnn.formats.Blocks (got {self.save!r})")
        if not isinstance(self.keep_fp32, (tuple, list)) or not all(isinstance(name, str) for name in self.keep_fp32):
            raise TypeError(f"'QConfig' expects 'keep_fp32' to be a tuple of module names (got {self.keep_fp32!r})")
        object.__setattr__(self, "keep_fp32", tuple(self.keep_fp32))
        if isinstance(self.block_size, bool) or not isinstance(self.block_size, int):
            raise TypeError(f"'QConfig' expects 'block_size' to be an int (got {type(self.block_size).__name__})")
        if self.block_size < 2 or self.block_size > 1 << 16 or self.block_size & (self.block_size - 1):
            raise ValueError(
                f"'QConfig' expects 'block_size' to be a power of two from 2 to 65536 (got {self.block_size})"
            )

    @property
    def keeps_codes(self) -> bool:
        """Whether codes are what is kept, one way or another, and not the operands themselves."""
        return isinstance(self.save, Blocks) or self.save == "int8"

    @property
    def stochastic(self) -> bool:
        """Whether codes are rounded at random."""
        return self.rounding == "stochastic"


def check_config(config: object, owner: str) -> None:
    """Raise a ``TypeError`` unless ``config`` is a :class:`QConfig` or ``None``."""
    if config is not None and not isinstance(config, QConfig):
        raise TypeError(
            f"'{owner}' expects 'config' to be a QConfig or None (got {config!r}); "
            f"write config=qgnn.QConfig(bits=8), or config=None for full precision"
        )


def check_product_config(config: object, owner: str) -> None:
    """:func:`check_config` for what multiplies matrices: scales of blocks are not available there."""
    check_config(config, owner)
    if isinstance(config, QConfig) and config.granularity == "block":
        raise ValueError(
            f"'{owner}' expects granularity 'row' or 'tensor' (got 'block'); "
            f"scales of blocks are available in 'qgnn.functional.quantize'"
        )
