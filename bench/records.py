"""Records: one JSON line a measurement, with the commit, the machine and the versions that it belongs to."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def finished(results: Path, suite: str, stamp: "Stamp") -> set[tuple[str, str]]:
    """Cases and passes of a suite that this machine, commit and these versions have measured, each provider's last time
    with success; none unless the code is known to be that of the commit."""
    if stamp.commit is None or stamp.dirty is not False:
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
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def read(results: Path) -> Iterator[tuple[str, Record]]:
    """Every record under ``results``, with the machine it was made on."""
    for path in sorted(results.glob("*/*.jsonl")):
        for line in path.read_text().splitlines():
            yield path.parent.name, json.loads(line)
