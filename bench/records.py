"""Records: one JSON line a measurement, with the commit, the machine and the versions that it belongs to."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qgnn.data.disk import append_whole, lock, shorten, whole_lines

if TYPE_CHECKING:
    from qgnn.cli.provenance import Stamp

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"

FIELDS = (
    *("suite", "case", "provider", "pass", "median_ms", "p20_ms", "p80_ms", "peak_mib", "saved_mib", "bytes"),
    *("error", "ok", "device", "commit", "dirty", "versions", "utc"),
)

Record = dict[str, Any]


def until(records: Sequence[Record], stamp: "Stamp", end: "Stamp") -> list[Record]:
    """Records made under ``stamp``, marked as those of a modified checkout if anything has changed since."""
    return [{**record, "dirty": stamp.until(end).dirty} for record in records]


def is_of_a_commit(stamp: "Stamp") -> bool:
    """Whether the code is that of a commit, so that what has been measured need not be again."""
    return stamp.commit is not None and stamp.dirty is False


def finished(results: Path, suite: str, stamp: "Stamp") -> set[tuple[str, str]]:
    """Cases and passes of a suite that this machine, commit and these versions have measured, each provider's last time
    with success; none where the code is not that of a commit."""
    if not is_of_a_commit(stamp):
        return set()
    origin = (stamp.machine, suite, stamp.commit, False, stamp.versions)
    ok = {
        (record["case"], record["pass"], record["provider"]): record["ok"]
        for machine, record in read(results)
        if (machine, *(record[field] for field in ("suite", "commit", "dirty", "versions"))) == origin
    }
    return {key[:2] for key in ok} - {key[:2] for key, is_ok in ok.items() if not is_ok}


def make_record(
    stamp: "Stamp",
    utc: str,
    test_acc: float | None = None,
    metrics: Mapping[str, float] | None = None,
    **values: Any,
) -> Record:
    """A record with every field, in order; a number that is not finite becomes null.

    Whatever trained a model has its test accuracy, 0 to 1, behind them; what was measured besides, ``metrics``.
    """
    values |= {"device": stamp.device, "commit": stamp.commit, "dirty": stamp.dirty}
    values |= {"versions": stamp.versions, "utc": utc}
    if set(values) != set(FIELDS):
        raise ValueError(f"a record has the fields {FIELDS} (got {tuple(values)})")

    def clean(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.6g}") if math.isfinite(value) else None
        return value

    record = {field: clean(values[field]) for field in FIELDS}
    if test_acc is not None:
        record["test_acc"] = clean(test_acc)
    if metrics is not None:
        record["metrics"] = {name: clean(value) for name, value in metrics.items()}
    return record


def append(path: Path, records: Iterable[Record]) -> None:
    """Append records; they are on the disk when this returns. What a kill left behind the whole lines is cut away.

    Raises:
        OSError: If there is no space, or the disk fails; the file then holds what it held.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        lock(file, wait=True)
        _, keep = whole_lines(path.read_bytes(), _parse)
        shorten(file, keep)
        append_whole(file, path, b"".join(json.dumps(record).encode() + b"\n" for record in records))
    finally:
        os.close(file)


def read(results: Path) -> Iterator[tuple[str, Record]]:
    """Every record under ``results``, with the machine it was made on; without what a kill left behind whole lines.

    Raises:
        ValueError: If a line before the last is none of ours.
    """
    for path in sorted(results.glob("*/*.jsonl")):
        lines, _ = whole_lines(path.read_bytes(), _parse)
        for number, record in enumerate(lines, start=1):
            if record is None:
                raise ValueError(f"line {number} of {str(path)!r} is no record; restore the file, or delete the line")
            yield path.parent.name, record


def _parse(line: bytes) -> Record | None:
    """The record, or ``None`` if it is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
