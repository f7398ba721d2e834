"""What one run computes in: the format of each component, a schedule of widths, and what is kept for backward."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from qgnn import formats
from qgnn.cli.compression import NO_COMPRESSION, Compression, parse_compression
from qgnn.config import QConfig
from qgnn.schedule import ActiveSchedule, PlateauSchedule, Schedule, StaticSchedule

FULL_PRECISION = ("fp32", "bf16")
ALL = "all"  # every component

_SCHEDULE = re.compile(r"(sdq|adq|plateau)\[(\d{1,2}(?:,\d{1,2})*)\]")


@dataclass(frozen=True)
class Scheme:
    """What one run computes in, and the name under which it appears.

    Args:
        name: As :func:`parse_scheme` takes it; schemes that differ in their compression alone share it.
        config: How layers quantize; ``None`` for PyG's own layers in full precision.
        bf16: Whether PyG's layers run under torch's autocast.
        compression: How what is kept for the backward pass is compressed.
        schedule: How the width of ``config`` changes from epoch to epoch, or that of ``compression`` if there is no
            ``config``: as :func:`parse_schedule` takes it.
        keep_last: Whether the last layer, which makes the logits, stays in full precision.

    Example:
        >>> Scheme.from_parts("msfp12", component="weights").name
        'msfp12:weights'
    """

    name: str
    config: QConfig | None = None
    bf16: bool = False
    compression: Compression = NO_COMPRESSION
    schedule: str | None = None
    keep_last: bool = True

    @classmethod
    def from_parts(
        cls, format: str = "fp32", component: str = ALL, schedule: str | None = None, compress: str = "none"
    ) -> Scheme:
        """The scheme of these names.

        Args:
            format: ``fp32``, ``bf16``, or a name of :func:`qgnn.formats.parse`.
            component: ``all``, or the one component of :class:`qgnn.QConfig` that is quantized.
            schedule: A name of :func:`parse_schedule`, or ``None`` for one width.
            compress: ``none``, or a name of :meth:`qgnn.formats.Blocks.parse`.

        Raises:
            ValueError: If there is no such name, or the parts do not go together.
        """
        text = ":".join([format, *([] if component == ALL else [component]), *([schedule] if schedule else [])])
        return parse_scheme(text).with_compression(parse_compression(compress))

    def with_compression(self, compression: Compression) -> Scheme:
        """The same with another compression.

        Raises:
            ValueError: If there is nothing whose width the schedule could change, or no such width.
        """
        for bits in () if self.schedule is None else parse_schedule(self.schedule)[1]:
            if self.config is not None:
                self.config.with_bits(bits)
            elif compression.blocks is not None:
                compression.with_bits(bits)
            else:
                raise ValueError(
                    f"the schedule of {self.name!r} expects codes whose width it can change; put a format such as int8 "
                    f"in place of {self.name.partition(':')[0]}, or compress what is kept for backward"
                )
        return replace(self, compression=compression)

    def make_schedule(self, model: nn.Module, compressed: Any, epochs: int) -> Schedule | None:
        """What sets the widths of the epochs, if any: of the model's layers, or of the compressor in front of them.

        Args:
            model: The model, converted by ``config`` if there is one.
            compressed: What :attr:`compression` made for its training steps.
            epochs: The length of the training.
        """
        if self.schedule is None:
            return None
        kind, widths = parse_schedule(self.schedule)
        target = compressed if self.config is None else model
        if kind == "sdq":
            return StaticSchedule(target, widths, epochs)
        start, stop = widths
        return (ActiveSchedule if kind == "adq" else PlateauSchedule)(target, start, stop)

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """What a forward pass runs in: torch's autocast for ``bf16``, nothing for the others."""
        if self.bf16:
            return torch.autocast(device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()


# The converted model with nothing quantized: what runs in number formats are compared with, seed by seed.
UNQUANTIZED = Scheme("fp32", QConfig.only())


def parse_scheme(text: str) -> Scheme:
    """The scheme of a name: a format, then where wanted a component and a schedule, with colons between them.

    Args:
        text: Such as ``fp32``, ``int8``, ``msfp12:weights``, ``int8:adq[2,8]`` or ``fixed8:messages:sdq[4,8]``.

    Raises:
        ValueError: If it is no such name.
    """
    format, *others = (part.strip() for part in text.strip().lower().split(":"))
    schedules = [part.replace(" ", "") for part in others if "[" in part]
    components = [part for part in others if "[" not in part and part != ALL]
    if len(schedules) > 1 or len(components) > 1:
        raise ValueError(f"expected FORMAT, FORMAT:COMPONENT, FORMAT:SCHEDULE or all three parts (got {text!r})")
    for schedule in schedules:
        parse_schedule(schedule)
    if format in FULL_PRECISION:
        if components:
            raise ValueError(f"expected a number format in front of the component {components[0]!r} (got {text!r})")
        return Scheme(":".join([format, *schedules]), bf16=format == "bf16", schedule="".join(schedules) or None)
    fmt = parse_format(format)
    config = _only(components[0], fmt) if components else QConfig(fmt=fmt)
    scheme = Scheme(":".join([str(fmt), *components, *schedules]), config, schedule="".join(schedules) or None)
    return scheme.with_compression(NO_COMPRESSION)  # checks the widths


def parse_schedule(text: str) -> tuple[str, tuple[int, ...]]:
    """The kind and the widths of a schedule.

    Args:
        text: ``sdq[2,4,6,8]`` for equal shares of the epochs at these widths; ``adq[2,8]`` or ``plateau[2,8]`` for
            widths that grow from 2 to 8 whenever the loss stands still, by the rule of
            :class:`qgnn.schedule.ActiveSchedule` or :class:`qgnn.schedule.PlateauSchedule`.

    Raises:
        ValueError: If it is no such name.
    """
    match = _SCHEDULE.fullmatch(text)
    widths = tuple(int(bits) for bits in match[2].split(",")) if match else ()
    if match and (match[1] == "sdq" or (len(widths) == 2 and widths[0] < widths[1])):
        return match[1], widths
    raise ValueError(
        f"expected a schedule such as sdq[2,4,6,8], or adq[2,8] or plateau[2,8] from the smaller to the larger width "
        f"(got {text!r})"
    )


def parse_format(name: str) -> formats.Format:
    """:func:`qgnn.formats.parse`, with an error that names full precision, too."""
    try:
        return formats.parse(name)
    except ValueError as error:
        raise ValueError(f"expected fp32, bf16 or a number format (got {name!r}): {error}") from error


def _only(component: str, fmt: formats.Format) -> QConfig:
    named: dict[str, Any] = {component: fmt}
    return QConfig.only(**named)
