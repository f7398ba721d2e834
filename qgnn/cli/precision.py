"""The precisions that can be trained, and what they mean for a layer."""

import re
from typing import NamedTuple

MIN_BITS, MAX_BITS = 2, 8


class Precision(NamedTuple):
    """One column of the comparison: its name, and the width of integer codes if it is an integer one."""

    name: str
    bits: int | None = None


def parse_precision(text: str) -> Precision:
    """``fp32``, ``bf16`` or ``int2`` to ``int8``.

    Raises:
        ValueError: For anything else.
    """
    name = text.strip().lower()
    if name in ("fp32", "bf16"):
        return Precision(name)
    match = re.fullmatch(r"int(\d{1,4})", name)
    if match and MIN_BITS <= int(match[1]) <= MAX_BITS:
        return Precision(f"int{int(match[1])}", int(match[1]))
    if match:
        raise ValueError(f"expected int{MIN_BITS} to int{MAX_BITS}, since codes are stored in a byte (got {text!r})")
    raise ValueError(f"expected fp32, bf16 or int{MIN_BITS} to int{MAX_BITS} (got {text!r})")
