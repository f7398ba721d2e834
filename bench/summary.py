"""One line a case, made of records alone: ours against the best rival; README's tables and the plots show these."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .records import Record, read
from .suites import SUITES

OURS, DEFAULT = "qgnn", "pyg coo fp32"
CEILING = "ceiling"  # a provider that does less than the work, to show what the machine allows
FP32 = ("fp32", "tf32")  # TF32 is the tensor cores' fp32

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
SPEED = ("case", "pass", "qgnn int ms", "qgnn fp32 ms", "best rival", "ms", "PyG COO ms", "speed-up", "over COO")
MEMORY = ("case", "provider", "peak MiB", "kept MiB", "ms a step")
WHOLE = ("train", "layer")  # suites that README shows at once; the primitives fold


def latest(records: Sequence[Record]) -> list[list[Record]]:
    """The newest measurement of each case and pass: records that were timed in turn in one process."""
    groups: dict[tuple[str, str, str], dict[str, list[Record]]] = {}
    for record in records:
        key = (record["suite"], record["case"], record["pass"])
        groups.setdefault(key, {}).setdefault(record["utc"], []).append(record)
    return [runs[max(runs)] for runs in groups.values()]


def machines(results: Path) -> dict[str, list[list[Record]]]:
    """The newest measurements of each machine. No ratio crosses a machine or a run."""
    by_machine: dict[str, list[Record]] = {}
    for machine, record in read(results):
        by_machine.setdefault(machine, []).append(record)
    order = {suite: number for number, suite in enumerate(SUITES)}  # what is most important comes first
    return {
        machine: sorted(latest(records), key=lambda group: order.get(group[0]["suite"], len(order)))
        for machine, records in by_machine.items()
    }


def rival(group: Sequence[Record], *precisions: str) -> Record | None:
    """The fastest provider that is not ours, of these precisions if any are given."""
    others = [r for r in group if r["ok"] and not r["provider"].startswith((OURS, CEILING))]
    fitting = [r for r in others if not precisions or r["provider"].endswith(precisions)]
    return min(fitting, key=lambda record: record["median_ms"], default=None)


def provenance(groups: Sequence[Sequence[Record]]) -> str:
    records = [record for group in groups for record in group]
    commits = sorted({f"{(r['commit'] or 'unknown')[:12]}{' (modified)' if r['dirty'] else ''}" for r in records})
    versions = sorted({f"{name} {version}" for r in records for name, version in r["versions"].items()})
    return f"{records[0]['device']}; commit {', '.join(commits)}; {', '.join(versions)}"


@dataclass(frozen=True)
class Line:
    """A case and pass: ours on codes, ours in fp32, the best fp32 rival (or any, if there is none), PyG's default."""

    suite: str
    case: str
    pass_: str
    quantized: Record | None
    full: Record | None
    rival: Record | None
    default: Record | None

    def speedup(self, ours: Record | None, other: Record | None) -> float | None:
        """How many times as fast ``ours`` is."""
        if ours is None or other is None or not (ours["ok"] and other["ok"]):
            return None
        return other["median_ms"] / ours["median_ms"]

    @property
    def best(self) -> Record | None:
        """What a line is about: codes, where there are any."""
        return self.full if self.quantized is None else self.quantized


def lines(groups: Sequence[Sequence[Record]]) -> Iterator[Line]:
    for group in groups:
        first = group[0]
        ours = [r for r in group if r["provider"].startswith(OURS)]
        yield Line(
            first["suite"],
            first["case"],
            first["pass"],
            next((r for r in ours if not r["provider"].endswith("fp32")), None),
            next((r for r in ours if r["provider"].endswith("fp32")), None),
            rival(group, *FP32) or rival(group),
            next((r for r in group if r["provider"] == DEFAULT), None),
        )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def _ms(record: Record | None) -> str:
    if record is None:
        return ""
    if not record["ok"]:
        return "failed"
    return f"{record['median_ms']:.0f}" if record["median_ms"] >= 100 else f"{record['median_ms']:.3g}"


def _times(factor: float | None) -> str:
    return "" if factor is None else f"{factor:.2f}x"


def _speed_row(line: Line) -> tuple[str, ...]:
    return (
        f"{line.suite} {line.case}",
        line.pass_,
        _ms(line.quantized),
        _ms(line.full),
        "" if line.rival is None else line.rival["provider"],
        _ms(line.rival),
        _ms(line.default),
        _times(line.speedup(line.best, line.rival)),
        _times(line.speedup(line.best, line.default)),
    )


def _memory_row(record: Record) -> tuple[str, ...]:
    mib = ("", "") if not record["ok"] else (f"{record[name]:.0f}" for name in ("peak_mib", "saved_mib"))
    return (record["case"], record["provider"], *mib, _ms(record))


def region(results: Path) -> str:
    """What README shows between its markers."""
    parts = []
    for machine, groups in machines(results).items():
        parts.append(f"**{machine}**: {provenance(groups)}")
        speed = [line for line in lines(groups) if line.suite != "memory"]
        if whole := [_speed_row(line) for line in speed if line.suite in WHOLE]:
            parts.append(table(SPEED, whole))
        if memory := [_memory_row(record) for group in groups if group[0]["suite"] == "memory" for record in group]:
            parts.append(table(MEMORY, memory))
        if primitives := [_speed_row(line) for line in speed if line.suite not in WHOLE]:
            folded = table(SPEED, primitives)
            parts.append(f"<details><summary>The primitives one by one</summary>\n\n{folded}\n\n</details>")
    return "\n\n".join(parts) if parts else "No records yet."


def rewrite(readme: Path, results: Path) -> None:
    """Put the tables between the markers of a file.

    Raises:
        ValueError: If the file has not exactly one pair of markers.
    """
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in after:
        raise ValueError(f"{readme} has to have one pair of lines '{BEGIN}' and '{END}'")
    readme.write_text(f"{before}{BEGIN}\n{region(results)}\n{END}{after}", encoding="utf-8")
