"""Tables of number formats, made of records: memory of a step, speed of rounding and of products, and whether
an error of operands tells what becomes of the accuracy."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from .records import Record
from .summary import FORMATS, is_of_formats, machines, ms, provenance, table, times

Row = tuple[str, ...]
Groups = Sequence[Sequence[Record]]

MEMORY = ("data set", "provider", "peak MiB", "of PyG COO", "kept MiB", "features MiB")
MEMORY_NOTE = (
    "A training step of the study's GCN (two layers of 16): the most bytes of tensors that live at once, features and "
    "all, and what of them is kept for the backward pass. `emulated` rounds the same operands with torch's functions."
)
BASELINE = "pyg coo fp32"
ROUNDING = ("values", "format", "qgnn ms", "torch.round ms", "of torch.round", "torch eager ms", "over eager")
ROUNDING_NOTE = "Fake quantization in turn with a plain `torch.round` of the same tensor, and with torch's functions."
ROUND, EAGER = "ceiling: torch.round", "torch eager "
PRODUCTS = ("product", "pass", "provider", "ms", "error")
THRESHOLD, POINTS = 0.3, 1.0
BY_FORMAT = (
    *("format", "bits", "data sets", "Error_X", "of sums", "SQNR dB", "drop in points", "over 0.5 points", "over 1"),
)
BY_FORMAT_NOTE = (
    "Means over the data sets. Error_X: mean over operands of the first step (rows, weights, messages, gradients of "
    "results), element by element and as a ratio of sums. Drop: test accuracy of the converted model with nothing "
    "quantized less that of the format, means over the same seeds."
)
WIDTHS = range(8, 1, -1)
BY_DATASET = ("data set", "format", *(f"{bits} bits" for bits in WIDTHS), "seeds")
BY_DATASET_NOTE = (
    "Test accuracy of the converted model with nothing quantized less that of the format, in points, with the standard "
    "error over the seeds."
)
RESOLVED = 0.5  # points: the median standard error of a data set's drops up to which they tell a point
RULE = ("rule", "hits", "misses", "false alarms", "right rejections", "right %", "rank correlation with the drop")
RULE_NOTE = (
    f"'At most {THRESHOLD}' taken as 'drops by at most {POINTS:g} point': hits hold both, misses drop in spite of a "
    "small error, false alarms do not drop in spite of a large one. Spearman's correlation. Left out of the last two "
    f"tables, as the median standard error of their drops is more than {RESOLVED:g} points: "
)
RULES = {
    "error_x": "Error_X, mean over operands",
    "error_x_max": "Error_X, largest operand",
    "error_x_norm": "ratio of sums, mean over operands",
    "error_x_norm_max": "ratio of sums, largest operand",
}
_CASE = re.compile(r"(?P<dataset>[^/]+)(?:/.*)?/gcn/(?P<family>[a-z]+)/(?P<bits>\d)$")


class Point(NamedTuple):
    """A data set in a format of a width."""

    dataset: str
    family: str
    bits: int
    drop: float  # in points of accuracy
    errors: dict[str, float]


def memory_rows(groups: Groups) -> Iterator[Row]:
    for group in groups:
        if group[0]["suite"] != "memory" or not group[0]["case"].endswith(FORMATS):
            continue
        plain = next((r["peak_mib"] for r in group if r["provider"] == BASELINE and r["ok"]), None)
        for record in group:
            start = (record["case"].removesuffix(f"/gcn{FORMATS}"), record["provider"])
            if not record["ok"]:
                yield (*start, "failed", "", "", "")
                continue
            share = "" if plain is None else f"{record['peak_mib'] / plain:.2f}"
            sizes = (record["saved_mib"], record["metrics"]["features_mib"])
            yield (*start, f"{record['peak_mib']:.2f}", share, *(f"{size:.2f}" for size in sizes))


def rounding_rows(groups: Groups) -> Iterator[Row]:
    for group in groups:
        by_name = {record["provider"]: record for record in group}
        if group[0]["suite"] != "quantize" or ROUND not in by_name:
            continue
        values, _, name = group[0]["case"].partition("/float32/fake/")
        ours = next(r for who, r in by_name.items() if who.startswith("qgnn"))
        eager = next((r for who, r in by_name.items() if who.startswith(EAGER)), None)
        plain = by_name[ROUND]
        yield (values, name, ms(ours), ms(plain), _ratio(ours, plain), ms(eager), _ratio(eager, ours))


def _ratio(a: Record | None, b: Record | None) -> str:
    return times(a["median_ms"] / b["median_ms"]) if a and b and a["ok"] and b["ok"] else ""


def product_rows(groups: Groups) -> Iterator[Row]:
    for group in groups:
        shape, _, kind = group[0]["case"].rpartition("/")
        if group[0]["suite"] == "matmul" and kind == "formats":
            for record in group:
                error = f"{record['error']:.2g}" if record["ok"] else ""
                yield (shape, record["pass"], record["provider"], ms(record), error)


def points(groups: Groups) -> list[Point]:
    """What the suite ``threshold`` measured."""
    found = []
    for (record,) in (group for group in groups if group[0]["suite"] == "threshold" and group[0]["ok"]):
        match, errors = _CASE.match(record["case"]), record["metrics"]
        assert match is not None
        drop = 100 * (errors["fp32_acc"] - record["test_acc"])
        found.append(Point(match["dataset"], match["family"], int(match["bits"]), drop, errors))
    return found


def resolved(found: Sequence[Point]) -> list[Point]:
    """Those of data sets whose drops are certain enough to tell a point."""
    by_dataset = {p.dataset: [100 * q.errors["drop_error"] for q in found if q.dataset == p.dataset] for p in found}
    return [p for p in found if median(by_dataset[p.dataset]) <= RESOLVED]


def dataset_rows(found: Sequence[Point]) -> Iterator[Row]:
    for dataset, family in dict.fromkeys((p.dataset, p.family) for p in found):
        by_bits = {p.bits: p for p in found if (p.dataset, p.family) == (dataset, family)}
        drops = (
            f"{p.drop:+.2f} ± {100 * p.errors['drop_error']:.2f}" if (p := by_bits.get(bits)) else "" for bits in WIDTHS
        )
        yield dataset, family, *drops, str(int(min(p.errors["seeds"] for p in by_bits.values())))


def format_rows(found: Sequence[Point]) -> Iterator[Row]:
    for family in dict.fromkeys(p.family for p in found):
        for bits in sorted({p.bits for p in found if p.family == family}, reverse=True):
            chosen = [p for p in found if (p.family, p.bits) == (family, bits)]
            means = [fmean(p.errors[name] for p in chosen) for name in ("error_x", "error_x_norm")]
            dB = [p.errors["sqnr"] for p in chosen if p.errors["sqnr"] is not None]
            shares = [fmean(p.drop > limit for p in chosen) for limit in (0.5, 1.0)]
            yield (
                *(family, str(bits), str(len(chosen)), *(f"{mean:.3f}" for mean in means)),
                *(f"{fmean(dB):.1f}" if dB else "", f"{fmean(p.drop for p in chosen):+.2f}"),
                *(f"{100 * share:.0f} %" for share in shares),
            )


def rule_rows(found: Sequence[Point]) -> Iterator[Row]:
    for name, title in RULES.items():
        held = [(p.errors[name] <= THRESHOLD, p.drop <= POINTS) for p in found]
        counts = [held.count(both) for both in ((True, True), (True, False), (False, True), (False, False))]
        right = 100 * (counts[0] + counts[3]) / len(held)
        correlation = spearman([p.errors[name] for p in found], [p.drop for p in found])
        yield (title, *map(str, counts), f"{right:.0f}", f"{correlation:.2f}")


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The correlation of ranks, ties at the mean of theirs; 0 where one side is constant."""

    def centered(values: Sequence[float]) -> list[float]:
        ordered = sorted(values)
        ranks = [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]
        return [rank - (len(values) - 1) / 2 for rank in ranks]

    x, y = centered(a), centered(b)
    scale = (sum(v * v for v in x) * sum(v * v for v in y)) ** 0.5
    return sum(v * w for v, w in zip(x, y, strict=True)) / scale if scale else 0.0


def threshold_tables(groups: Groups) -> list[str]:
    found = points(groups)
    if not found:
        return []
    chosen = resolved(found)
    left_out = list(dict.fromkeys(p.dataset for p in found if p not in chosen))
    tables = [
        (BY_DATASET, dataset_rows(found), BY_DATASET_NOTE),
        (BY_FORMAT, format_rows(chosen), BY_FORMAT_NOTE),
        (RULE, rule_rows(chosen) if chosen else (), f"{RULE_NOTE}{', '.join(left_out) or 'none'}."),
    ]
    return [part for header, rows, note in tables for part in (table(header, list(rows)), note)]


def format_tables(groups: Groups) -> list[str]:
    parts = []
    for header, rows, note in (
        (MEMORY, list(memory_rows(groups)), MEMORY_NOTE),
        (ROUNDING, list(rounding_rows(groups)), ROUNDING_NOTE),
        (PRODUCTS, list(product_rows(groups)), "Products of operands in these formats, rounding included."),
    ):
        parts += [table(header, rows), note] if rows else []
    return parts


REGIONS = {"formats": format_tables, "threshold": threshold_tables}


def _is_of(name: str, group: Sequence[Record]) -> bool:
    """Whether a region shows a group of records."""
    return group[0]["suite"] == name or (name == "formats" and is_of_formats(group[0]["case"]))


def region(results: Path, name: str) -> str:
    """The tables of one region, by machine; empty without records."""
    parts = []
    for machine, groups in machines(results).items():
        if tables := REGIONS[name](groups):
            chosen = [group for group in groups if _is_of(name, group)]
            parts.append("\n\n".join((f"**{machine}**: {provenance(chosen)}", *tables)))
    return "\n\n".join(parts)
