"""One line a case, made of records alone: ours against the best rival; the tables of pages and the plots show these."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .records import Record, read
from .suites import SUITES

OURS, DEFAULT = "qgnn", "pyg coo fp32"
CEILING = "ceiling"  # a provider that does less than the work, to show what the machine allows
FP32 = ("fp32", "tf32")  # TF32 is the tensor cores' fp32

WARM = "warm"  # the pass on codes: quantization is not in its times, so nothing divides them by a rival's

SPEED = ("case", "pass", "qgnn int ms", "qgnn fp32 ms", "best rival", "ms", "PyG COO ms", "speed-up", "over COO")
MEMORY = ("case", "provider", "peak MiB", "kept MiB")
CONSTANT = ("case", "qgnn int ms, quantization left out", "qgnn fp32 ms", "best rival", "ms")
CONSTANT_TITLE = "Constant rows, quantized once: quantization is left out here"
CONSTANT_NOTE = (
    "Forward passes in which our int rows are given as codes, as constant features are. The step from fp32 rows to "
    "codes is not in our times, so they are not those of a rival's whole work, and there is no ratio."
)
AGAINST_TITLE = "What skipping zeros brings, and what integer products of this machine do"
AGAINST_NOTE = (
    "The pass `warm`, and `backward` of features that are mostly zero, leave out for everyone what is done once for "
    "constant operands: rounding them to codes, or making a sparse matrix of them."
)
AGAINST = ("case", "pass", "provider", "ms", "against", "ms", "times as fast")

# Pairs of providers that the pages have a sentence about, by the last part of the case's name.
PAIRS = {
    "mostly-zero": (
        ("qgnn int8", "qgnn all-multiplied int8"),
        ("qgnn all-multiplied int8", "torch fp32"),
        ("qgnn int8", "torch.sparse csr fp32"),
    ),
    "codes-in": (("onednn.qlinear int8", "torch fp32"), ("torch._int_mm int8", "torch fp32")),
}
# Without a speed-up: no work of ours, no types to compare, one a process, tables of its own, training, statistics, what
# the machine allows.
APART = (
    *("update", "optimizer", "memory", "overhead", "scale", "distributed", "blocksize", "accuracy", "distribution"),
    *("threshold", "device"),
)
WHOLE = ("train", "layer", "attention", "sampled")  # suites that the pages show at once; the primitives fold
COMPRESSED = "/sage/"  # in cases of the suite memory that have tables of their own
FORMATS = "/formats"  # ends such cases, and products in formats
FAKE = "/fake/"  # in cases that round to formats
_PLACES = {"--root": "DIR", "--results": "DIR", "--json": "FILE", "--plot": "FILE", "--table": "FILE"}
OWN = ("layer",)  # suites with a region of their own


def latest(records: Sequence[Record]) -> list[list[Record]]:
    """The newest measurement of each case and pass: records that were timed in turn in one process."""
    groups: dict[tuple[str, str, str], dict[str, list[Record]]] = {}
    for record in records:
        key = (record["suite"], record["case"], record["pass"])
        groups.setdefault(key, {}).setdefault(record["utc"], []).append(record)
    return [runs[max(runs)] for runs in groups.values()]


def machines(results: Path, since: str = "") -> dict[str, list[list[Record]]]:
    """The newest measurements of each machine, made at ``since`` (UTC, ISO 8601) or later. No ratio crosses a machine
    or a run."""
    by_machine: dict[str, list[Record]] = {}
    for machine, record in read(results):
        if record["utc"] < since:
            continue
        by_machine.setdefault(machine, []).append(record)
    order = {suite: number for number, suite in enumerate(SUITES)}  # what is most important comes first
    return {
        machine: sorted(latest(records), key=lambda group: order.get(group[0]["suite"], len(order)))
        for machine, records in by_machine.items()
    }


def is_of_formats(case: str) -> bool:
    """Whether a case is about number formats, which have a region of their own."""
    return case.endswith(FORMATS) or FAKE in case


def rival(group: Sequence[Record], *precisions: str) -> Record | None:
    """The fastest provider that is not ours, of these precisions if any are given."""
    others = [r for r in group if r["ok"] and not r["provider"].startswith((OURS, CEILING))]
    fitting = [r for r in others if not precisions or r["provider"].endswith(precisions)]
    return min(fitting, key=lambda record: record["median_ms"], default=None)


def copy_bandwidth(groups: Sequence[Sequence[Record]]) -> float | None:
    """Bytes a second, read and written, of the copy that the suite ``device`` measured."""
    rates = [
        1e3 * record["bytes"] / record["median_ms"]
        for group in groups
        for record in group
        if record["suite"] == "device" and record["provider"] == f"{CEILING}: copy" and record["ok"]
    ]
    return max(rates, default=None)


def shown(command: str) -> str:
    """A command without what is a matter of the machine that it ran on."""
    words = shlex.split(re.sub(rf"({'|'.join(_PLACES)})=", r"\1 ", command))
    pairs = zip(["", *words], words, strict=False)
    return shlex.join(_PLACES.get(before, word) for before, word in pairs)


def commit_of(record: Record) -> str:
    """The commit in short, and whether the code differed from it, or might have."""
    if record["commit"] is None:
        return "unknown"
    return record["commit"][:12] + {True: " (modified)", False: "", None: " (perhaps modified)"}[record["dirty"]]


def _commits(groups: Sequence[Sequence[Record]]) -> str:
    """The commit, or every commit with the suites that were measured at it."""
    cases = Counter(group[0]["suite"] for group in groups)
    suites: dict[str, Counter[str]] = {}
    for group in groups:
        suites.setdefault(commit_of(group[0]), Counter())[group[0]["suite"]] += 1
    if len(suites) == 1:
        return f"commit {next(iter(suites))}"

    def names(found: Counter[str]) -> str:
        return ", ".join(suite + ("" if count == cases[suite] else " in part") for suite, count in found.items())

    return "commits " + ", ".join(f"{commit} ({names(found)})" for commit, found in suites.items())


def provenance(groups: Sequence[Sequence[Record]]) -> str:
    records = [record for group in groups for record in group]
    versions = sorted({f"{name} {v}" for r in records for name, v in r["versions"].items() if v is not None})
    return f"{records[0]['device']}; {_commits(groups)}; {', '.join(versions)}"


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


def ms(record: Record | None) -> str:
    if record is None:
        return ""
    if not record["ok"]:
        return "failed"
    return f"{record['median_ms']:.0f}" if record["median_ms"] >= 100 else f"{record['median_ms']:.3g}"


def times(factor: float | None) -> str:
    return "" if factor is None else f"{factor:.2f}x"


def _speed_row(line: Line) -> tuple[str, ...]:
    return (
        f"{line.suite} {line.case}",
        line.pass_,
        ms(line.quantized),
        ms(line.full),
        "" if line.rival is None else line.rival["provider"],
        ms(line.rival),
        ms(line.default),
        times(line.speedup(line.best, line.rival)),
        times(line.speedup(line.best, line.default)),
    )


def _memory_row(record: Record) -> tuple[str, ...]:
    """Without the times: every provider had a process of its own, so they were not measured in turn."""
    mib = ("failed", "") if not record["ok"] else (f"{record[name]:.0f}" for name in ("peak_mib", "saved_mib"))
    return (record["case"], record["provider"], *mib)


def _constant_row(line: Line) -> tuple[str, ...]:
    rival = "" if line.rival is None else line.rival["provider"]
    return (f"{line.suite} {line.case}", ms(line.quantized), ms(line.full), rival, ms(line.rival))


def pairs(group: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    """Rows of the pairs of providers that a case was made to compare."""
    by_name = {record["provider"]: record for record in group}
    first = group[0]
    for provider, other in PAIRS.get(first["case"].rpartition("/")[2], ()):
        if provider in by_name and other in by_name:
            a, b = by_name[provider], by_name[other]
            factor = times(b["median_ms"] / a["median_ms"]) if a["ok"] and b["ok"] else ""
            yield (f"{first['suite']} {first['case']}", first["pass"], provider, ms(a), other, ms(b), factor)


def folded(title: str, *parts: str) -> str:
    """What the pages show on demand."""
    return "\n\n".join((f"<details><summary>{title}</summary>", *parts, "</details>"))


def is_shown(record: Record) -> bool:
    """Whether its case is in the tables of :func:`region`: others have regions of their own."""
    if record["suite"] == "memory":
        return COMPRESSED not in record["case"] and not record["case"].endswith(FORMATS)
    return record["suite"] not in (*APART, *OWN) and not is_of_formats(record["case"])


def region(results: Path) -> str:
    """What the pages show between its markers."""
    parts = []
    for machine, groups in machines(results).items():
        groups = [group for group in groups if is_shown(group[0])]
        if groups:
            parts.append(f"**{machine}**: {provenance(groups)}")
        speed = [line for line in lines(groups) if line.suite != "memory"]
        if whole := [_speed_row(line) for line in speed if line.suite in WHOLE]:
            parts.append(table(SPEED, whole))
        memory_groups = [group for group in groups if group[0]["suite"] == "memory"]
        if memory := [_memory_row(record) for group in memory_groups for record in group]:
            parts.append(table(MEMORY, memory))
        alone = [line for line in speed if line.suite not in WHOLE]
        if primitives := [_speed_row(line) for line in alone if line.pass_ != WARM]:
            parts.append(folded("The primitives one by one", table(SPEED, primitives)))
        if constant := [_constant_row(line) for line in alone if line.pass_ == WARM]:
            parts.append(folded(CONSTANT_TITLE, CONSTANT_NOTE, table(CONSTANT, constant)))
        if compared := [row for group in groups for row in pairs(group)]:
            parts.append(folded(AGAINST_TITLE, AGAINST_NOTE, table(AGAINST, compared)))
    return "\n\n".join(parts) if parts else "No records yet."
