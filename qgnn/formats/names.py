"""Formats by name."""

from __future__ import annotations

import re
from collections.abc import Callable

from qgnn.formats._format import Format
from qgnn.formats.block_floating import MSFP
from qgnn.formats.fixed_point import FixedPoint
from qgnn.formats.float8 import Float8
from qgnn.formats.integer import Int
from qgnn.formats.microscaling import MXFP4, MXFP6, MXFP8, MXINT8

_NAMES: tuple[tuple[str, Callable[..., Format]], ...] = (
    (r"int(\d{1,9})(-affine)?", lambda bits, affine: Int(int(bits), affine is None)),
    (r"fixed(\d{1,9})(-affine)?", lambda bits, affine: FixedPoint(int(bits), affine is not None)),
    (r"msfp(\d{1,9})(?:-g(\d{1,9}))?", lambda number, length: MSFP(int(number) - 9, int(length or 16))),
    (r"mxint8", MXINT8),
    (r"mxfp8-(e4m3|e5m2)", MXFP8),
    (r"mxfp6-(e2m3|e3m2)", MXFP6),
    (r"mxfp4", MXFP4),
    (r"fp8-(e4m3|e5m2)", Float8),
)


def parse(name: str) -> Format:
    """The format of a name, the ``str`` of that format.

    Args:
        name: ``int2`` to ``int8``, ``fixed2`` to ``fixed16`` (both also with ``-affine``), ``msfp10`` to ``msfp16``
            (also with ``-g`` and the length of a block), ``mxint8``, ``mxfp8-e4m3``, ``mxfp8-e5m2``, ``mxfp6-e2m3``,
            ``mxfp6-e3m2``, ``mxfp4``, ``fp8-e4m3`` or ``fp8-e5m2``.

    Raises:
        TypeError: If it is no string.
        ValueError: If it is no such name, or a number is outside its range.

    Example:
        >>> qgnn.formats.parse("msfp12-g32")
        MSFP(mantissa_bits=3, block_size=32)
    """
    if not isinstance(name, str):
        raise TypeError(f"'parse' expects the name of a format (got {type(name).__name__})")
    for pattern, make in _NAMES:
        if match := re.fullmatch(pattern, name, re.ASCII):
            return make(*match.groups())
    raise ValueError(
        f"'parse' expects the name of a format (got {name!r}): int2 to int8 or fixed2 to fixed16, both also with "
        f"-affine, msfp10 to msfp16, also with -g and a length, mxint8, mxfp8-e4m3, mxfp8-e5m2, mxfp6-e2m3, "
        f"mxfp6-e3m2, mxfp4, fp8-e4m3 or fp8-e5m2"
    )
