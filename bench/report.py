"""Tables made of records alone."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from .records import Record, read

COLUMNS = ("case", "pass", "provider", "ms", "p20-p80", "GB/s", "peak MiB", "saved MiB", "error", "x fp32", "x bf16")


def latest(records: Sequence[Record]) -> list[list[Record]]:
    """The newest measurement of each case and pass: records that were timed in turn in one process."""
    groups: dict[tuple[str, str, str], dict[str, list[Record]]] = {}
    for record in records:
        key = (record["suite"], record["case"], record["pass"])
        groups.setdefault(key, {}).setdefault(record["utc"], []).append(record)
    return [runs[max(runs)] for runs in groups.values()]


def _rival(group: Sequence[Record], precision: str) -> Record | None:
    """The fastest provider of that precision that is not ours; TF32 is the tensor cores' fp32."""
    endings = ("fp32", "tf32") if precision == "fp32" else (precision,)
    names = [r for r in group if r["ok"] and r["provider"].endswith(endings) and not r["provider"].startswith("qgnn")]
    return min(names, key=lambda record: record["median_ms"], default=None)


def _number(value: float | None, digits: str = ".3g") -> str:
    return "" if value is None else format(value, digits)


def rows(group: Sequence[Record]) -> list[tuple[str, ...]]:
    """Table rows of one case and pass, the fastest provider first, failures last."""
    rivals = [_rival(group, precision) for precision in ("fp32", "bf16")]
    result = []
    for record in sorted(group, key=lambda record: (not record["ok"], record["median_ms"] or 0.0)):
        ms = record["median_ms"]
        speedups = ["" if ms is None or rival is None else f"{rival['median_ms'] / ms:.2f}" for rival in rivals]
        result.append(
            (
                record["case"],
                record["pass"],
                record["provider"],
                f"{ms:.4g}" if record["ok"] else "FAILED",
                f"{record['p20_ms']:.3g}-{record['p80_ms']:.3g}" if record["ok"] else "",
                "" if ms is None or record["bytes"] is None else f"{record['bytes'] / ms / 1e6:.3g}",
                _number(record["peak_mib"]),
                _number(record["saved_mib"]),
                _number(record["error"], ".2g"),
                *speedups,
            )
        )
    return result


def text_table(groups: Sequence[Sequence[Record]]) -> str:
    """A line a case, below it one a provider; columns without a value are left out."""
    table = [[""] * 3 + list(COLUMNS[3:])]
    for group in groups:
        first = group[0]
        table.append([f"{first['suite']}  {first['case']}  {first['pass']}"])
        table += [["", "", f"  {line[2]}", *line[3:]] for line in rows(group)]
    full = [line for line in table if len(line) > 1]
    used = [i for i in range(2, len(COLUMNS)) if any(line[i] for line in full)]
    width = {i: max(len(line[i]) for line in full) for i in used}
    padded = [line if len(line) == 1 else [line[i].ljust(width[i]) for i in used] for line in table]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def rich_table(lines: Sequence[Sequence[str]]) -> object:
    from rich.table import Table

    table = Table(*COLUMNS)
    previous = None
    for line in lines:
        if previous not in (None, line[:2]):
            table.add_section()
        table.add_row(*(("", "", *line[2:]) if line[:2] == previous else line))
        previous = line[:2]
    return table


def show(records: Sequence[Record]) -> None:
    """A table on the terminal: rich's, or plain text where it is not installed or the output is no terminal."""
    groups = latest(records)
    if not groups:
        print("no records")
    elif importlib.util.find_spec("rich") and sys.stdout.isatty():
        from rich.console import Console

        Console().print(rich_table([row for group in groups for row in rows(group)]))
    else:
        print(text_table(groups))


def _provenance(records: Sequence[Record]) -> str:
    commits = sorted({f"{(r['commit'] or 'unknown')[:12]}{' (modified)' if r['dirty'] else ''}" for r in records})
    versions = sorted({f"{name} {version}" for r in records for name, version in r["versions"].items()})
    return f"{records[0]['device']}; commit {', '.join(commits)}; {', '.join(versions)}"


def markdown(results: Path) -> str:
    """One section a machine, one table a suite. No ratio crosses a machine or a run."""
    by_machine: dict[str, list[Record]] = {}
    for machine, record in read(results):
        by_machine.setdefault(machine, []).append(record)
    parts = []
    for machine, records in by_machine.items():
        groups = latest(records)
        used = [record for group in groups for record in group]
        parts.append(f"## {machine}\n\n{_provenance(used)}")
        for suite in dict.fromkeys(record["suite"] for record in used):
            lines = [row for group in groups if group[0]["suite"] == suite for row in rows(group)]
            table = [COLUMNS, ["---"] * len(COLUMNS), *lines]
            parts.append(f"### {suite}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in table))
    return "\n\n".join(parts) if parts else "no records"


def compact(results: Path, since: str) -> str:
    """The latest records made at ``since`` (UTC, ISO 8601) or later as one text table."""
    groups = latest([record for _, record in read(results) if record["utc"] >= since])
    return f"{_provenance(groups[0])}\n{text_table(groups)}" if groups else "no records"
