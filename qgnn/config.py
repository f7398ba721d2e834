"""QConfig: what a quantized layer does with its operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

from qgnn.formats import Blocks, Format, Int, parse

GRANULARITIES = ("row", "tensor", "block")
ROUNDINGS = ("stochastic", "nearest")
SAVES = ("int8", "fp32")

# What products and sums read has the format of the config unless it is named; results of theirs are named or exact.
OPERANDS = ("features", "weights", "activations", "messages", "output_gradient")
RESULTS = ("aggregation", "attention", "weight_gradient")
COMPONENTS = (*OPERANDS, *RESULTS)


class _Components(dict[str, Format | None]):
    """Formats by component: a dictionary that cannot be changed, and so has a hash."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("'components' of a QConfig cannot be changed; make another one with 'dataclasses.replace'")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


@dataclass(frozen=True)
class QConfig:
    """How a layer quantizes. ``config=None`` in place of a :class:`QConfig` means full precision.

    With one symmetric integer format for all operands (the default) layers run on fused integer kernels. Any other
    choice runs component by component: products of integers, and of block floating point with at most 8 bits, on the
    integer kernels; everything else on values that are rounded to the format and computed with in fp32. A trace shows
    which.

    Args:
        bits: Width of the integer codes of activations, weights and gradients, 2 to 8; ``None`` means that of ``fmt``,
            or 8. Codes below 8 bits are stored in int8 all the same.
        granularity: What shares a scale: ``"row"`` of a matrix, the whole ``"tensor"``, or a ``"block"`` of
            ``block_size`` columns of a row (in :func:`qgnn.functional.quantize`; products take rows or tensors).
            Formats with blocks of their own have these in either case.
        rounding: ``"stochastic"`` (unbiased, drawn anew each call) or ``"nearest"``. Layers in eval mode round to
            nearest, so that inference is deterministic.
        fmt: A number format from :mod:`qgnn.formats`, or its name, such as ``"msfp12"``
            (:func:`qgnn.formats.parse` lists them); ``None`` means ``Int(bits)``.
        save: What is kept for the backward pass: ``"int8"`` codes (of other formats, their codes, packed), ``"fp32"``
            for the operands themselves, or :class:`qgnn.formats.Blocks` for packed codes of the rows of products, or of
            their random projection. They are rounded at random whatever ``rounding`` says, and the forward pass is that
            of ``"int8"``. Of constants, and of rows that gradients of edge weights, of
            :func:`qgnn.functional.sddmm` and of attention read, the codes are kept. Sums with constant weights keep
            nothing.
        keep_fp32: Names of submodules that a model conversion leaves in full precision.
        block_size: Columns of a block with ``granularity="block"``.
        components: Formats, or their names, by component; ``None`` for full precision. Operands that are not named have
            ``fmt``: ``"features"`` (inputs of products that need no gradient), ``"activations"`` (those that do),
            ``"weights"``, ``"messages"`` (rows that are sent along edges), ``"output_gradient"`` (what comes back).
            Results that are not named are exact: ``"aggregation"`` (sums over neighbors), ``"attention"`` (weights
            behind the softmax), ``"weight_gradient"``.

    With ``dataclasses.replace``, a new ``fmt`` brings its own width (``None`` in place of a format 8 bits), and new
    ``bits`` are the width that ``fmt`` gets.

    Raises:
        TypeError: If a field has the wrong type.
        ValueError: If a field has an unknown value, with the values that exist, or ``bits`` is not the width of
            ``fmt``.

    Example:
        >>> conv = qgnn.nn.QGCNConv(128, 64, config=qgnn.QConfig(bits=8, rounding="nearest"))
        >>> mixed = qgnn.QConfig(components={"weights": "msfp12", "messages": None})
        >>> dataclasses.replace(mixed, fmt=qgnn.formats.Int(4)).name
        'features=int4,weights=msfp12,activations=int4,output_gradient=int4'
    """

    bits: int = None  # type: ignore[assignment]  # that of the format, or 8
    granularity: str = "row"
    rounding: str = "stochastic"
    fmt: Format | None = None
    save: str | Blocks = "int8"
    keep_fp32: tuple[str, ...] = ()
    block_size: int = field(default=128, kw_only=True)
    components: Mapping[str, Format | None] = field(default=_Components(), kw_only=True)
    # Handed on by 'dataclasses.replace', which gives every field: only what differs from these was asked for.
    _before: tuple[int, Format | None] | None = field(default=None, repr=False, compare=False, kw_only=True)

    if TYPE_CHECKING:  # arguments may be names, which fields are not

        def __init__(
            self,
            bits: int | None = None,
            granularity: str = "row",
            rounding: str = "stochastic",
            fmt: Format | str | None = None,
            save: str | Blocks = "int8",
            keep_fp32: Sequence[str] = (),
            *,
            block_size: int = 128,
            components: Mapping[str, Format | str | None] = ...,
            _before: tuple[int, Format | None] | None = None,
        ) -> None: ...

        @property
        def _formats(self) -> dict[str, Format | None]: ...  # of all components

    def __post_init__(self) -> None:
        bits, fmt = _width_and_format(self.bits, _checked_format("'fmt'", self.fmt), self._before)
        for name, choices in (("granularity", GRANULARITIES), ("rounding", ROUNDINGS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"'QConfig' expects '{name}' to be one of {choices} (got {getattr(self, name)!r})")
        if not isinstance(self.save, Blocks) and self.save not in SAVES:
            error = ValueError if isinstance(self.save, str) else TypeError
            raise error(f"'QConfig' expects 'save' to be one of {SAVES} or qgnn.formats.Blocks (got {self.save!r})")
        if not isinstance(self.keep_fp32, (tuple, list)) or not all(isinstance(name, str) for name in self.keep_fp32):
            raise TypeError(f"'QConfig' expects 'keep_fp32' to be a tuple of module names (got {self.keep_fp32!r})")
        if isinstance(self.block_size, bool) or not isinstance(self.block_size, int):
            raise TypeError(f"'QConfig' expects 'block_size' to be an int (got {type(self.block_size).__name__})")
        if self.block_size < 2 or self.block_size > 1 << 16 or self.block_size & (self.block_size - 1):
            raise ValueError(
                f"'QConfig' expects 'block_size' to be a power of two from 2 to 65536 (got {self.block_size})"
            )
        named = _checked_components(self.components)
        formats = {**dict.fromkeys(OPERANDS, fmt or Int(bits)), **dict.fromkeys(RESULTS), **named}
        shared = _shared_integer(formats)
        if named and shared is not None:  # the width that fused kernels read
            bits, fmt = shared.bits, fmt and shared
        checked = {"bits": bits, "fmt": fmt, "keep_fp32": tuple(self.keep_fp32), "components": named}
        for key, value in {**checked, "_before": (bits, fmt), "_formats": formats}.items():
            object.__setattr__(self, key, value)
        if isinstance(self.save, Blocks) and not self.is_integer:
            raise ValueError(
                f"'QConfig' expects save='int8' or 'fp32' where operands have other formats than one symmetric integer "
                f"(got {self.save!r}): products of these keep packed blocks"
            )

    @classmethod
    def only(
        cls,
        *,
        granularity: str = "row",
        rounding: str = "stochastic",
        save: str | Blocks = "int8",
        keep_fp32: Sequence[str] = (),
        block_size: int = 128,
        **components: Format | str | None,
    ) -> QConfig:
        """A config that quantizes the named components, and leaves all others in full precision.

        Args:
            granularity: As in :class:`QConfig`.
            rounding: As in :class:`QConfig`.
            save: As in :class:`QConfig`.
            keep_fp32: As in :class:`QConfig`.
            block_size: As in :class:`QConfig`.
            **components: Formats, or their names, by component.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If an argument has an unknown value, or there is no such component.

        Example:
            >>> weights_only = qgnn.QConfig.only(weights="int4", rounding="nearest")
        """
        return cls(
            granularity=granularity,
            rounding=rounding,
            save=save,
            keep_fp32=keep_fp32,
            block_size=block_size,
            components={**dict.fromkeys(OPERANDS), **components},
        )

    def format_of(self, component: str) -> Format | None:
        """The format of a component; ``None`` for full precision.

        Args:
            component: One of those that :class:`QConfig` names.

        Raises:
            ValueError: If there is no such component.
        """
        if component not in COMPONENTS:
            raise ValueError(f"'QConfig' has the components {COMPONENTS} (got {component!r})")
        return self._formats[component]

    def with_bits(self, bits: int) -> QConfig:
        """The same config with codes of another width, in each of its formats.

        Args:
            bits: The width.

        Raises:
            ValueError: If a format has no such width.
        """
        unused = self.fmt is None and all(name in self.components for name in OPERANDS)
        return replace(
            self,
            bits=self.bits if unused else bits,
            fmt=None if self.fmt is None else self.fmt.with_bits(bits),
            components={name: fmt and fmt.with_bits(bits) for name, fmt in self.components.items()},
        )

    @property
    def is_integer(self) -> bool:
        """Whether all operands are symmetric integers of ``bits``, which fused kernels take."""
        return _shared_integer(self._formats) is not None

    @property
    def name(self) -> str:
        """What is quantized, in short, as ``"int8"``, ``"msfp12"`` or ``"weights=int4"``."""
        formats = self._formats
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


def _shared_integer(formats: Mapping[str, Format | None]) -> Int | None:
    """The symmetric integers that all operands have, where results are exact; else ``None``."""
    first, *others = (formats[name] for name in OPERANDS)
    if not isinstance(first, Int) or not first.symmetric:
        return None
    # Most are one object: a compiler, for which widths may be variables, then has nothing to compare.
    if not all(fmt is first or fmt == first for fmt in others):
        return None
    return first if all(formats[name] is None for name in RESULTS) else None


def _width_and_format(
    bits: int | None, fmt: Format | None, before: tuple[int, Format | None] | None
) -> tuple[int, Format | None]:
    """The width and the format, one of which may follow from the other."""
    if before is not None:
        if bits == before[0] and fmt != before[1] and not (fmt is None and _is_symmetric(before[1])):
            bits = None
        elif bits not in (None, before[0]) and fmt is not None and fmt == before[1]:
            fmt = fmt.with_bits(bits)
    if fmt is None:
        return Int(8 if bits is None else bits).bits, None
    if bits not in (None, fmt.bits):
        raise ValueError(f"'QConfig' got bits={bits} and fmt={fmt!r}, of {fmt.bits} bits; give one of them")
    return fmt.bits, fmt


def _is_symmetric(fmt: Format | None) -> bool:
    """Whether a width says the same."""
    return isinstance(fmt, Int) and fmt.symmetric


def _checked_format(owner: str, fmt: object) -> Format | None:
    """A format, or the one of a name."""
    if fmt is None or isinstance(fmt, Format):
        return fmt
    if not isinstance(fmt, str):
        raise TypeError(f"'QConfig' expects {owner} to be a format of qgnn.formats, its name or None (got {fmt!r})")
    try:
        return parse(fmt)
    except ValueError as error:
        raise ValueError(
            f"'QConfig' expects {owner} to be a format of qgnn.formats, its name or None: {error}"
        ) from error


def _checked_components(components: object) -> _Components:
    """Formats by component in the order of :data:`COMPONENTS`."""
    if isinstance(components, _Components):
        return components
    if not isinstance(components, Mapping):
        raise TypeError(f"'QConfig' expects 'components' to be a dict of formats by component (got {components!r})")
    for name in components:
        if name not in COMPONENTS:
            raise ValueError(f"'QConfig' expects 'components' among {COMPONENTS} (got {name!r})")
    return _Components(
        {
            name: _checked_format(f"the component '{name}'", components[name])
            for name in COMPONENTS
            if name in components
        }
    )
