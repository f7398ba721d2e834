"""Tables of the compressor of activations, made of records: bytes, the gradient's variance, block lengths."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .records import Record
from .summary import COMPRESSED, folded, machines, ms, provenance, table

Row = tuple[str, ...]

# MiB on the shape of ogbn-arxiv by rows of a block, after arXiv:2309.11856: INT2 codes of two 16-wide operands a layer
# and of two 128-wide inputs of batch norm, bits for ReLU and dropout, four bytes of metadata a block.
PUBLISHED_MIB = {1: 30.47, 2: 27.89, 4: 26.60, 8: 25.95, 16: 25.72, 32: 25.60, 64: 25.56}
_ROWS = re.compile(r" int2-rp8 rows(\d+)$")
_BLOCK = re.compile(r"/(int(\d)[a-z0-9-]*)$")

SWEEP = ("G/R'", "published MiB", "MiB of the same tensors", "MiB in all", "gradient's variance")
SWEEP_NOTE = (
    "INT2 with projection 8, blocks of G/R' rows, as published; in all: with the loss's gradient. The published figure "
    "counts an operand that is the data set's features, which we do not keep. Variance: squared distance of the "
    "gradient of all parameters from the exact one over its square, mean over seeds with its standard error."
)
STEP = ("provider", "kept MiB", "MB", "peak MiB", "gradient's variance")
STEP_NOTE = "Each provider has a process of its own, whose peak is that of its steps beyond what it held before."
BUDGET_NOTE = (
    "Widths under a byte budget beside the published format of most bytes. A budget measures after a few steps of "
    "training, in a block that counts for the peak; its variance is, as all others, that of the first step, which the "
    "widths were not made for."
)
PLAIN = "pyg csr fp32"
TIMES = ("provider", "ms", "of plain PyG")
TIMES_NOTE = (
    f"The same step with all of these in turn in one process; plain is `{PLAIN}`. A byte budget's step is one that "
    "does not measure."
)
BLOCKS = (
    *("graph and model", "format", "variance at G8", "G128", "G2048", "G65536", "MiB at G8", "G65536"),
    *("G of least cost", "rule, normal values", "rule, measured"),
)
BLOCKS_NOTE = (
    "The gradient's relative variance by block length G. Least cost: the rule of `qgnn.bins.best_block_size` on that "
    "variance; beside it, what the rule chooses for the largest operand, without and with a look at its values."
)
EQUAL = ("graph and model", "EXACT's MiB", "variance", "least within them", "G", "MiB", "variance", "times less")
EQUAL_NOTE = (
    "EXACT is INT2 with projection 8 in blocks of a row, with a row's own signs. Within its bytes, the format and the "
    "length of the least variance of all that were measured. Standard errors are over seeds; the least of many has "
    "some luck."
)
EXACT, EXACT_ROWS = "int2-rp8", "qgnn rows1"  # its format, and its provider of the suite blocksize
RIVALS = ("top-k bf16", "low rank bf16", "storage bf16", "checkpoint fp32")
OPERANDS = (
    *("graph and model", "bytes of", "KiB", "qgnn: variance", "top-k: bias", "low rank: bias", "bf16: bias"),
    *("qgnn ms", "top-k ms", "low rank ms", "bf16 ms", "checkpoint ms"),
)
OPERANDS_NOTE = (
    "Operands of dense products alone, of which top-k pruning and low rank keep as many bytes as our codes, bf16 16 "
    "bits a value, and a checkpoint nothing. Variance and bias: relative squares of the error of the gradient of all "
    "parameters. A bias stays however many steps are averaged. Times are of one provider after another."
)
SHOWN = ("int2", "int2-rp8")  # formats of which the long tables tell; records have more

Groups = Sequence[Sequence[Record]]


def _variance(found: dict[str, float]) -> str:
    error = found.get("variance_error")
    return f"{found['variance']:.3g}" + (f" ± {error:.1g}" if error else "")


def _measured(record: Record) -> dict[str, float]:
    return record.get("metrics") or {}


def _is_step(group: Sequence[Record]) -> bool:
    return group[0]["suite"] == "memory" and COMPRESSED in group[0]["case"] and not _is_budget(group)


def _is_budget(group: Sequence[Record]) -> bool:
    return group[0]["suite"] == "memory" and group[0]["case"].endswith("/budget")


def _is_of(name: str, group: Sequence[Record]) -> bool:
    """Whether a region shows a group of records."""
    suite = group[0]["suite"]
    return suite == name or (name == "compress" and (suite == "overhead" or _is_step(group) or _is_budget(group)))


def sweep_rows(groups: Groups) -> Iterator[Row]:
    for group in filter(_is_step, groups):
        for record in group:
            match = _ROWS.search(record["provider"])
            if match and record["ok"] and "csr" in record["provider"]:
                found, rows = _measured(record), int(match[1])
                sizes = (found["published_mib"], record["saved_mib"])
                yield (match[1], f"{PUBLISHED_MIB[rows]:.2f}", *(f"{size:.2f}" for size in sizes), _variance(found))


def step_rows(groups: Groups) -> Iterator[Row]:
    return _provider_rows(filter(_is_step, groups))


def budget_rows(groups: Groups) -> Iterator[Row]:
    return _provider_rows(filter(_is_budget, groups))


def _provider_rows(groups: Iterable[Sequence[Record]]) -> Iterator[Row]:
    for group in groups:
        for record in group:
            if not record["ok"]:
                yield (record["provider"], "failed", "", "", "")
                continue
            found = _measured(record)
            variance = _variance(found) if found else "" if "bf16" in record["provider"] else "0"
            sizes = f"{record['saved_mib']:.1f}", f"{record['saved_mib'] * 1.048576:.1f}", f"{record['peak_mib']:.0f}"
            yield (record["provider"], *sizes, variance)


def time_rows(groups: Groups) -> Iterator[Row]:
    for group in groups:
        if group[0]["suite"] == "overhead":
            found = {record["provider"]: float(record["median_ms"]) for record in group if record["ok"]}
            plain = found.get(PLAIN)
            for record in sorted(group, key=lambda record: found.get(record["provider"], float("inf"))):
                if not record["ok"]:
                    yield (record["provider"], "failed", "")
                else:
                    ratio = "" if plain is None else f"{record['median_ms'] / plain:.2f}"
                    yield (record["provider"], ms(record), ratio)


def _blocks(groups: Groups) -> Iterator[tuple[str, str, int, dict[int, Record]]]:
    """Graph and model, format and bits of each case, and its records by block length."""
    for group in groups:
        match = _BLOCK.search(group[0]["case"])
        if group[0]["suite"] == "blocksize" and match and "/operands/" not in group[0]["case"]:
            ours = [record for record in group if record["ok"] and "block_size" in _measured(record)]
            by_length = {int(record["metrics"]["block_size"]): record for record in ours}
            if by_length:
                yield group[0]["case"][: match.start()], match[1], int(match[2]), by_length


def block_rows(groups: Groups) -> Iterator[Row]:
    from qgnn.bins import best_block_size

    for name, format_, bits, found in _blocks(groups):
        if format_ not in SHOWN:
            continue
        variances = {size: record["metrics"]["variance"] for size, record in found.items()}
        first = next(iter(found.values()))["metrics"]
        bins = "optimal" if format_.endswith("vm") else "uniform"
        least = best_block_size(bits, int(first["values"]), bins, variances=variances)
        yield (
            *(name, format_),
            *(f"{variances[size]:.3g}" if size in found else "" for size in (8, 128, 2048, 65536)),
            *(f"{found[size]['saved_mib']:.2f}" if size in found else "" for size in (8, 65536)),
            *map(str, (least, int(first["predicted_block"]), int(first["measured_block"]))),
        )


def _exact(groups: Groups) -> dict[str, Record]:
    """The record of EXACT by graph and model."""
    return {
        record["case"].removesuffix(f"/{EXACT}"): record
        for group in groups
        for record in group
        if record["case"].endswith(f"/{EXACT}") and record["provider"] == EXACT_ROWS and record["ok"]
    }


def equal_rows(groups: Groups) -> Iterator[Row]:
    by_model: dict[str, dict[tuple[str, int], Record]] = {}
    for name, format_, _, found in _blocks(groups):
        by_model.setdefault(name, {}).update({(format_, size): record for size, record in found.items()})
    for name, exact in _exact(groups).items():
        found_all = by_model.get(name, {})
        within = {key: record for key, record in found_all.items() if record["saved_mib"] <= exact["saved_mib"]}
        if not within:
            continue
        format_, size = min(within, key=lambda key: within[key]["metrics"]["variance"])
        best = within[format_, size]
        variances = [record["metrics"]["variance"] for record in (exact, best)]
        yield (
            *(name, f"{exact['saved_mib']:.2f}", _variance(exact["metrics"]), format_, str(size)),
            *(f"{best['saved_mib']:.2f}", _variance(best["metrics"]), f"{variances[0] / variances[1]:.3g}"),
        )


def operand_rows(groups: Groups) -> Iterator[Row]:
    for group in groups:
        name, _, format_ = group[0]["case"].partition("/operands/")
        if group[0]["suite"] == "blocksize" and format_ in SHOWN:
            found = {record["provider"]: record for record in group if record["ok"]}
            ours = f"qgnn {format_}"
            size = f"{1024 * found[ours]['saved_mib']:.0f}" if ours in found else ""
            errors = [(ours, "variance"), *((rival, "bias") for rival in RIVALS[:-1])]
            yield (
                *(name, format_, size),
                *(f"{found[who]['metrics'][what]:.2g}" if who in found else "failed" for who, what in errors),
                *(ms(found[who]) if who in found else "failed" for who in (ours, *RIVALS)),
            )


class Part(NamedTuple):
    """A table: its heading where it is folded, columns, rows of groups of records, and what is to be said about it."""

    title: str
    header: Row
    rows: Callable[[Groups], Iterator[Row]]
    note: str


LONG = 16  # rows, beyond which a table is folded

PARTS = {
    "compress": (
        Part("Bytes by rows of a block", SWEEP, sweep_rows, SWEEP_NOTE),
        Part("Every provider: kept bytes, peak and the gradient's variance", STEP, step_rows, STEP_NOTE),
        Part("Under a byte budget", STEP, budget_rows, BUDGET_NOTE),
        Part("Time of a step", TIMES, time_rows, TIMES_NOTE),
    ),
    "blocksize": (
        Part("EXACT's bytes, spent otherwise", EQUAL, equal_rows, EQUAL_NOTE),
        Part("Variance and bytes by length of a block", BLOCKS, block_rows, BLOCKS_NOTE),
        Part("Other ways to keep the operands of products", OPERANDS, operand_rows, OPERANDS_NOTE),
    ),
}


def _shown(part: Part, groups: Groups) -> str:
    rows = list(part.rows(groups))
    if not rows:
        return ""
    text = f"{table(part.header, rows)}\n\n{part.note}"
    return folded(part.title, text) if len(rows) > LONG else text


def region(results: Path, name: str) -> str:
    """The tables of one region, by machine; empty without records."""
    parts = []
    for machine, groups in machines(results).items():
        chosen = [group for group in groups if _is_of(name, group)]
        if tables := [text for part in PARTS[name] if (text := _shown(part, groups))]:
            parts.append("\n\n".join((f"**{machine}**: {provenance(chosen)}", *tables)))
    return "\n\n".join(parts)
