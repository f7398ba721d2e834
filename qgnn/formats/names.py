"""Formats by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import NamedTuple

from qgnn.formats._format import Format
from qgnn.formats.block_floating import MSFP
from qgnn.formats.fixed_point import FixedPoint
from qgnn.formats.float8 import Float8
from qgnn.formats.integer import Int
from qgnn.formats.microscaling import MXFP4, MXFP6, MXFP8, MXINT8


class _Family(NamedTuple):
    """Formats whose names begin alike."""

    stem: str
    rest: str  # of a name, a regular expression
    make: Callable[..., Format]  # of its groups
    names: str


_FAMILIES = (
    _Family(
        *("int", r"(\d{1,9})(-affine)?", lambda bits, affine: Int(int(bits), affine is None)),
        "int2 to int8 (also with -affine)",
    ),
    _Family(
        *("fixed", r"(\d{1,9})(-affine)?", lambda bits, affine: FixedPoint(int(bits), affine is not None)),
        "fixed2 to fixed16 (also with -affine)",
    ),
    _Family(
        *("msfp", r"(\d{1,9})(?:-g(\d{1,9}))?", lambda number, size: MSFP(int(number) - 9, int(size or 16))),
        "msfp10 to msfp16 (also with -g and the length of a block, a power of two from 2 to 128)",
    ),
    _Family("mxint8", "", MXINT8, "mxint8"),
    _Family("mxfp8", "-(e4m3|e5m2)", MXFP8, "mxfp8-e4m3 or mxfp8-e5m2"),
    _Family("mxfp6", "-(e2m3|e3m2)", MXFP6, "mxfp6-e2m3 or mxfp6-e3m2"),
    _Family("mxfp4", "", MXFP4, "mxfp4"),
    _Family("fp8", "-(e4m3|e5m2)", Float8, "fp8-e4m3 or fp8-e5m2"),
)

# All names but those with another length of blocks: among these the closest one is looked for.
NAMES = (
    *(f"int{bits}{affine}" for affine in ("", "-affine") for bits in range(2, 9)),
    *(f"fixed{bits}{affine}" for affine in ("", "-affine") for bits in range(2, 17)),
    *(f"msfp{number}" for number in range(10, 17)),
    *("mxint8", "mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp4", "fp8-e4m3", "fp8-e5m2"),
)


def parse(name: str) -> Format:
    """The format of a name, the ``str`` of that format.

    Args:
        name: ``int2`` to ``int8``, ``fixed2`` to ``fixed16`` (both also with ``-affine``), ``msfp10`` to ``msfp16``
            (also with ``-g`` and the length of a block), ``mxint8``, ``mxfp8-e4m3``, ``mxfp8-e5m2``, ``mxfp6-e2m3``,
            ``mxfp6-e3m2``, ``mxfp4``, ``fp8-e4m3`` or ``fp8-e5m2``, in small letters or capitals.

    Raises:
        TypeError: If it is no string.
        ValueError: If it is no such name, or a number is outside its range.

    Example:
        >>> qgnn.formats.parse("msfp12-g32")
        MSFP(mantissa_bits=3, block_size=32)
    """
    if not isinstance(name, str):
        raise TypeError(f"'parse' expects the name of a format (got {type(name).__name__})")
    lower = name.lower()
    for stem, rest, make, names in _FAMILIES:
        if lower.startswith(stem):
            error = ValueError(f"'parse' expects {names} (got {name!r})")
            match = re.fullmatch(stem + rest, lower, re.ASCII)
            if match is None:
                raise error
            try:
                return make(*match.groups())
            except ValueError as cause:  # it speaks of a field, which a name does not show
                raise error from cause
    close = get_close_matches(lower, NAMES, n=1)
    raise ValueError(
        f"'parse' expects the name of a format (got {name!r}): {', '.join(family.names for family in _FAMILIES)}"
        + (f"; did you mean {close[0]!r}?" if close else "")
    )
