"""Checks of values that a user gives, on the command line or in a file: each returns the value, or raises a ValueError
that says what was expected and what came."""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

Check = Callable[[Any], Any]

MOST = (1 << 31) - 1  # sizes and numbers of steps: so many fit whatever counts them
MOST_SEEDS = 10_000
MOST_LAYERS = 1000


def whole(minimum: int, maximum: int = MOST) -> Check:
    """A whole number from ``minimum`` to ``maximum``."""

    def check(value: Any) -> int:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < minimum or value > maximum:
            raise ValueError(f"expected a whole number from {minimum} to {maximum} (got {value!r})")
        return int(value)

    return check


def fanout(value: Any) -> int:
    """A whole number from 1 to :data:`MOST`, or ``"all"``, which is -1."""
    if value == "all":
        return -1
    try:
        return int(whole(1)(value))
    except ValueError as error:
        raise ValueError(f"expected whole numbers from 1 to {MOST}, or all (got {value!r})") from error


def number(low: float, high: float, *, low_open: bool = False, high_open: bool = False) -> Check:
    """A number between ``low`` and ``high``, each included unless open."""
    ends = f"{'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"

    def check(value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (low_open and value == low) or (high_open and value == high):
            raise ValueError(f"expected a number in {ends} (got {value!r})")
        return float(value)

    return check


def one_of(choices: Sequence[str], *, any_case: bool = True) -> Check:
    """One of some names, in small letters or capitals unless these have to be as they are."""

    def check(value: Any) -> str:
        name = value.strip().lower() if isinstance(value, str) and any_case else value
        if name not in choices:
            raise ValueError(f"expected one of {', '.join(choices)} (got {value!r}){_closest(value, choices)}")
        return str(name)

    return check


def text(value: Any) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected text (got {value!r})")
    return value


def list_of(check: Check) -> Check:
    """A list of checked values, each once; a single one is a list of itself."""

    def check_all(value: Any) -> list[Any]:
        values = value if isinstance(value, list) else [value]
        if not values:
            raise ValueError("expected at least one value (got none)")
        return list(dict.fromkeys(check(each) for each in values))

    return check_all


def _closest(value: Any, choices: Sequence[str]) -> str:
    """What an error adds to a name that is almost one of ``choices``."""
    close = get_close_matches(str(value).lower(), choices, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


# What torch takes as a seed.
SEED = whole(0, (1 << 64) - 1)
