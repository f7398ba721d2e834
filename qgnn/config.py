"""QConfig: what a quantized layer does with its operands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeGuard

from qgnn.formats import Blocks, Format, Int

GRANULARITIES = ("row", "tensor", "block")
ROUNDINGS = ("stochastic", "nearest")
SAVES = ("int8", "fp32")

# What products and sums read has the format of the config unless it is named; results of theirs are named or exact.
OPERANDS = ("features", "weights", "activations", "messages", "output_gradient")
RESULTS = ("aggregation", "attention", "weight_gradient")
COMPONENTS = (*OPERANDS, *RESULTS)


@dataclass(frozen=True)
class QConfig:
    """How a layer quantizes. ``config=None`` in place of a :class:`QConfig` means full precision.

    With one symmetric integer format for all operands (the default) layers run on fused integer kernels. Any other
    choice runs component by component: products of integers, and of block floating point with at most 8 bits, on the
    integer kernels; everything else on values that are rounded to the format and computed with in fp32. A trace shows
    which.

    Args:
        bits: Width of the integer codes of activations, weights and gradients, 2 to 8. Codes below 8 bits are stored in
            int8 all the same.
        granularity: What shares a scale: ``"row"`` of a matrix, the whole ``"tensor"``, or a ``"block"`` of
            ``block_size`` columns of a row (in :func:`qgnn.functional.quantize`; products take rows or tensors).
            Formats with blocks of their own have these in either case.
        rounding: ``"stochastic"`` (unbiased, drawn anew each call) or ``"nearest"``. Layers in eval mode round to
            nearest, so that inference is deterministic.
        fmt: A number format from :mod:`qgnn.formats`; ``None`` means ``Int(bits)``.
        save: What is kept for the backward pass: ``"int8"`` codes (of other formats, their codes, packed), ``"fp32"``
            for the operands themselves, or :class:`qgnn.formats.Blocks` for packed codes of the rows of products, or of
            their random projection. They are rounded at random whatever ``rounding`` says, and the forward pass is that
            of ``"int8"``. Of constants, and of rows that gradients of edge weights, of
            :func:`qgnn.functional.sddmm` and of attention read, the codes are kept. Sums with constant weights keep
            nothing.
        keep_fp32: Names of submodules that a model conversion leaves in full precision.
        block_size: Columns of a block with ``granularity="block"``.
        components: Formats by component, ``None`` for full precision. Operands that are not named have ``fmt``:
            ``"features"`` (inputs of products that need no gradient), ``"activations"`` (those that do),
            ``"weights"``, ``"messages"`` (rows that are sent along edges), ``"output_gradient"`` (what comes back).
            Results that are not named are exact: ``"aggregation"`` (sums over neighbors), ``"attention"`` (weights
            behind the softmax), ``"weight_gradient"``.

    Raises:
        TypeError: If a field has the wrong type.
        ValueError: If a field has an unknown value, with the values that exist.

    Example:
        >>> conv = qgnn.nn.QGCNConv(128, 64, config=qgnn.QConfig(bits=8, rounding="nearest"))
        >>> mixed = qgnn.QConfig(components={"weights": qgnn.formats.MSFP(3), "messages": None})
    """

    bits: int = 8
    granularity: str = "row"
    rounding: str = "stochastic"
    fmt: Format | None = None
    save: str | Blocks = "int8"
    keep_fp32: tuple[str, ...] = ()
    block_size: int = field(default=128, kw_only=True)
    components: tuple[tuple[str, Format | None], ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if self.fmt is None:
            Int(self.bits)  # checks the width
        elif not isinstance(self.fmt, Format):
            raise TypeError(f"'QConfig' expects 'fmt' to be a format of qgnn.formats or None (got {self.fmt!r})")
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
        object.__setattr__(self, "components", _checked_components(self.components))
        shared = self.format_of("features")
        if self.components and shared is not None and self.is_integer:  # the width that fused kernels read
            object.__setattr__(self, "bits", shared.bits)
        if isinstance(self.save, Blocks) and not self.is_integer:
            raise ValueError(
                f"'QConfig' expects save='int8' or 'fp32' where operands have other formats than one symmetric integer "
                f"(got {self.save!r}): products of these keep packed blocks"
            )

    @classmethod
    def only(cls, *, rounding: str = "stochastic", granularity: str = "row", **components: Format | None) -> QConfig:
        """A config that quantizes the named components, and leaves all others in full precision.

        Args:
            rounding: As in :class:`QConfig`.
            granularity: As in :class:`QConfig`.
            **components: Formats by component.

        Example:
            >>> weights_only = qgnn.QConfig.only(weights=qgnn.formats.Int(4))
        """
        exact = dict.fromkeys(OPERANDS)
        return cls(granularity=granularity, rounding=rounding, components=_items(exact | components))

    def format_of(self, component: str) -> Format | None:
        """The format of a component, one of :data:`COMPONENTS`; ``None`` for full precision."""
        for name, fmt in self.components:
            if name == component:
                return fmt
        if component in OPERANDS:
            return self.fmt or Int(self.bits)
        if component in RESULTS:
            return None
        raise ValueError(f"'QConfig' has the components {COMPONENTS} (got {component!r})")

    def with_bits(self, bits: int) -> QConfig:
        """The same config with codes of another width, in each of its formats.

        Raises:
            ValueError: If a format has no such width.
        """
        named = {name for name, _ in self.components}
        return replace(
            self,
            bits=self.bits if self.fmt is None and named.issuperset(OPERANDS) else bits,
            fmt=None if self.fmt is None else self.fmt.with_bits(bits),
            components=tuple((name, fmt and fmt.with_bits(bits)) for name, fmt in self.components),
        )

    @property
    def is_integer(self) -> bool:
        """Whether all operands are symmetric integers of :attr:`bits`, which fused kernels take."""
        if not self.components:
            return self.fmt is None or _is_symmetric(self.fmt)
        first, *others = (self.format_of(name) for name in OPERANDS)
        exact = all(self.format_of(name) is None for name in RESULTS)
        return exact and _is_symmetric(first) and all(fmt == first for fmt in others)

    @property
    def name(self) -> str:
        """What is quantized, in short: ``"int8"``, ``"msfp12"``, ``"weights=int4"``."""
        formats = {name: self.format_of(name) for name in COMPONENTS}
        default = formats["features"]
        if all(formats[name] == default for name in OPERANDS) and all(formats[name] is None for name in RESULTS):
            return "fp32" if default is None else str(default)
        return ",".join(f"{name}={fmt}" for name, fmt in formats.items() if fmt is not None) or "fp32"

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


def _is_symmetric(fmt: Format | None) -> TypeGuard[Int]:
    return isinstance(fmt, Int) and fmt.symmetric


def _items(components: Mapping[str, Format | None]) -> tuple[tuple[str, Format | None], ...]:
    return tuple(components.items())


def _checked_components(
    components: Mapping[str, Format | None] | Iterable[tuple[str, Format | None]],
) -> tuple[tuple[str, Format | None], ...]:
    """Formats by component in the order of :data:`COMPONENTS`."""
    try:
        given = dict(components)
    except (TypeError, ValueError):
        raise TypeError(
            f"'QConfig' expects 'components' to be a dict of formats by component (got {components!r})"
        ) from None
    for name, fmt in given.items():
        if name not in COMPONENTS:
            raise ValueError(f"'QConfig' expects 'components' among {COMPONENTS} (got {name!r})")
        if fmt is not None and not isinstance(fmt, Format):
            raise TypeError(
                f"'QConfig' expects a format of qgnn.formats or None for the component '{name}' (got {fmt!r})"
            )
    return tuple((name, given[name]) for name in COMPONENTS if name in given)
