"""Tables of every provider, made of records alone."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from . import scores
from .numbers import threshold_tables
from .records import Record
from .summary import APART, FP32, WARM, copy_bandwidth, latest, machines, provenance, rival, table
from .tables import DISTRIBUTION, DISTRIBUTION_NOTE, distribution_rows

COLUMNS = (
    *("case", "pass", "provider", "ms", "p20-p80", "GB/s", "peak MiB", "saved MiB", "error", "accuracy"),
    *("x fp32", "x bf16"),
)


def _number(value: float | None, digits: str = ".3g") -> str:
    return "" if value is None else format(value, digits)


def rows(group: Sequence[Record], copy: float | None = None) -> list[tuple[str, ...]]:
    """Table rows of one case and pass, the fastest provider first, failures last.

    There is no ratio of times that leave quantization out, or that were not measured in turn in one process. With
    ``copy``, the bandwidth of a copy in the same run, bytes a second are shown as a share of it too.
    """
    is_fair = group[0]["pass"] != WARM and group[0]["suite"] not in APART
    rivals = [rival(group, *FP32), rival(group, "bf16")] if is_fair else [None, None]
    result = []
    for record in sorted(group, key=lambda record: (not record["ok"], record["median_ms"] or 0.0)):
        ms = record["median_ms"]
        speedups = ["" if ms is None or other is None else f"{other['median_ms'] / ms:.2f}" for other in rivals]
        result.append(
            (
                record["case"],
                record["pass"],
                record["provider"],
                f"{ms:.4g}" if record["ok"] else "FAILED",
                f"{record['p20_ms']:.3g}-{record['p80_ms']:.3g}" if record["ok"] else "",
                _bandwidth(record, copy),
                _number(record["peak_mib"]),
                _number(record["saved_mib"]),
                _number(record["error"], ".2g"),
                "" if record.get("test_acc") is None else f"{record['test_acc']:.4f}",
                *speedups,
            )
        )
    return result


def _bandwidth(record: Record, copy: float | None) -> str:
    if record["median_ms"] is None or record["bytes"] is None:
        return ""
    rate = 1e3 * record["bytes"] / record["median_ms"]
    return f"{rate / 1e9:.3g}" + (f" ({rate / copy:.0%})" if copy else "")


def text_table(groups: Sequence[Sequence[Record]], copy: float | None = None) -> str:
    """A line a case, below it one a provider; columns without a value are left out."""
    lines = [[""] * 3 + list(COLUMNS[3:])]
    for group in groups:
        first = group[0]
        lines.append([f"{first['suite']}  {first['case']}  {first['pass']}"])
        lines += [["", "", f"  {line[2]}", *line[3:]] for line in rows(group, copy)]
    used = [i for i in range(2, len(COLUMNS)) if any(line[i] for line in lines if len(line) > 1)]
    return aligned([line if len(line) == 1 else [line[i] for i in used] for line in lines])


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns of even width; a line of a single cell runs across them."""
    columns = zip(*(line for line in lines if len(line) > 1), strict=True)
    widths = [max(map(len, column)) for column in columns]
    padded = [
        line if len(line) == 1 else [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def rich_table(lines: Sequence[Sequence[str]]) -> object:
    from rich.table import Table

    result = Table(*COLUMNS)
    previous = None
    for line in lines:
        if previous not in (None, line[:2]):
            result.add_section()
        result.add_row(*(("", "", *line[2:]) if line[:2] == previous else line))
        previous = line[:2]
    return result


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
    if found := list(distribution_rows(groups)):
        print(aligned([DISTRIBUTION, *found]))


def markdown(results: Path) -> str:
    """One section a machine, one table a suite."""
    parts = []
    for machine, groups in machines(results).items():
        parts.append(f"## {machine}\n\n{provenance(groups)}")
        for suite in dict.fromkeys(group[0]["suite"] for group in groups):
            chosen = [group for group in groups if group[0]["suite"] == suite]
            parts.append(f"### {suite}\n\n{table(COLUMNS, [row for group in chosen for row in rows(group)])}")
            if suite == "accuracy":
                parts += scores.tables(chosen)
            if suite == "distribution":
                parts += [table(DISTRIBUTION, list(distribution_rows(chosen))), DISTRIBUTION_NOTE]
            if suite == "threshold":
                parts += threshold_tables(chosen)
    return "\n\n".join(parts) if parts else "no records"


def compact(results: Path, since: str) -> str:
    """The latest records made at ``since`` (UTC, ISO 8601) or later, one text table a machine."""
    parts = []
    for groups in machines(results, since).values():
        copy = copy_bandwidth(groups)
        note = f"; a copy reads and writes {copy / 1e9:.4g} GB/s, shares of it in brackets" if copy else ""
        parts.append(f"{provenance(groups)}{note}\n{text_table(groups, copy)}")
    return "\n\n".join(parts) if parts else "no records"
