"""The tables of the suites that README shows apart, made of records: layers, and the accuracy of models."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev

from qgnn.memory import MIB

from .records import Record
from .summary import lines, machines, ms, provenance, table, times

Groups = Sequence[Sequence[Record]]
Rows = Iterator[tuple[str, ...]]

LAYER = (
    *("graph", "layer", "qgnn int8 ms", "qgnn fp32 ms", "PyG COO ms", "PyG CSR ms", "PyG COO bf16 ms"),
    *("best fp32 rival", "ms", "over COO", "over CSR", "over the best fp32"),
)
ACCURACY = ("data set", "model", "PyG fp32 %", "qgnn int8 %", "difference", "seeds")
ACCURACY_NOTE = (
    "Test accuracy at the best validation epoch, mean and standard deviation over the seeds. A seed gives both the "
    "same first weights: the difference in points is the mean of those of the seeds, with its standard error. "
    "A seed counts where both were measured at one commit."
)
SCALE = ("nodes", "edges", "provider", "ms", "ns an edge", "peak MiB", "bytes an edge", "process GiB")
SCALE_NOTE = (
    "A training step of a GCN of two layers. Peak: beyond the edges as they are given; process: with these, the "
    "features and all libraries. An edge counts once for each direction."
)
UPDATE = ("graph", "change of 1 %", "qgnn update ms", "qgnn rebuild ms", "PyG ms", "over a rebuild", "over PyG")
UPDATE_NOTE = (
    "Both orders of the edges behind the change. Who rebuilds changes the list of edges first; PyG: "
    "`EdgeIndex.sort_by`, in the faster of int32 and int64."
)
DISTRIBUTION = (
    *("tensor", "block", "KS", "KS uniform", "JS bits", "JS uniform", "variance, uniform bins", "optimal bins"),
    *("optimal lower by", "predicted"),
)
DISTRIBUTION_NOTE = (
    "Distance of the values of blocks from the clipped normal and from a uniform distribution between the same ends: "
    "Kolmogorov-Smirnov, and Jensen-Shannon in bits. Variance of stochastic rounding in squared steps, as a multiple "
    "of what the clipped normal predicts; and how much lower that of the values is in optimal bins."
)


def layer_rows(groups: Groups) -> Rows:
    for group in groups:
        if group[0]["suite"] != "layer":
            continue
        (line,) = lines([group])
        by_name = {record["provider"]: record for record in group}
        csr, bf16 = (by_name.get(name) for name in ("pyg csr fp32", "pyg coo bf16"))
        graph, layer, size = line.case.rsplit("/", 2)
        yield (
            graph,
            f"{layer.removesuffix('-layer')} {size}",
            *map(ms, (line.quantized, line.full, line.default, csr, bf16)),
            "" if line.rival is None else line.rival["provider"],
            ms(line.rival),
            *(times(line.speedup(line.best, other)) for other in (line.default, csr, line.rival)),
        )


def accuracy_rows(groups: Groups) -> Rows:
    """A line a data set and model, of the seeds that both precisions have at one commit."""
    runs: dict[str, dict[tuple[str, str], dict[str, float]]] = {}
    for (record,) in (group for group in groups if group[0]["suite"] == "accuracy" and group[0]["ok"]):
        model, precision, seed = record["case"].rsplit("/", 2)
        runs.setdefault(model, {}).setdefault((seed, record["commit"]), {})[precision] = 100 * record["test_acc"]
    for model, by_seed in sorted(runs.items()):
        pairs = [(found["fp32"], found["int8"]) for found in by_seed.values() if len(found) == 2]
        if pairs:
            full, quantized = zip(*pairs, strict=True)
            differences = [b - a for a, b in pairs]
            spread = [f" ± {stdev(values):.2f}" if len(pairs) > 1 else "" for values in (full, quantized)]
            error = f" ± {stdev(differences) / len(pairs) ** 0.5:.2f}" if len(pairs) > 1 else ""
            yield (
                *model.rsplit("/", 1),
                f"{mean(full):.2f}{spread[0]}",
                f"{mean(quantized):.2f}{spread[1]}",
                f"{mean(differences):+.2f}{error}",
                str(len(pairs)),
            )


def scale_rows(groups: Groups) -> Rows:
    """A line a size and provider, by size."""
    found = [record for group in groups if group[0]["suite"] == "scale" for record in group if record["ok"]]
    for record in sorted(found, key=lambda record: record["metrics"]["edges"]):
        edges = record["metrics"]["edges"]
        process = record["metrics"].get("process_mib")
        yield (
            *(record["case"].split("/")[0].removeprefix("N"), f"{edges:.0f}", record["provider"], ms(record)),
            *(f"{1e6 * record['median_ms'] / edges:.1f}", f"{record['peak_mib']:.0f}"),
            *(f"{record['peak_mib'] * MIB / edges:.0f}", "" if process is None else f"{process / 1024:.1f}"),
        )


def update_rows(groups: Groups) -> Rows:
    """A line a change."""
    for group in groups:
        if group[0]["suite"] == "update":
            (line,) = lines([group])
            by_name = {record["provider"]: record for record in group}
            ours, rebuilt = (by_name.get(f"qgnn {name} int32") for name in ("update", "rebuild"))
            found = (line.speedup(ours, other) for other in (rebuilt, line.rival))
            yield (*line.case.rsplit("/", 1), ms(ours), ms(rebuilt), ms(line.rival), *map(times, found))


def distribution_rows(groups: Groups) -> Rows:
    """A line a tensor and block size, of the newest measurement."""
    for (record,) in (group for group in groups if group[0]["suite"] == "distribution" and group[0]["ok"]):
        tensor, _, block = record["case"].rpartition("/G")
        found = record["metrics"]
        yield (
            *(tensor, block),
            *(f"{found[name]:.3f}" for name in ("ks", "ks_uniform", "js_bits", "js_uniform_bits")),
            *(f"{found[name]:.2f}x" for name in ("uniform_ratio", "optimal_ratio")),
            *(f"{100 * found[name]:.1f} %" for name in ("gain", "predicted_gain")),
        )


def _region(results: Path, suite: str, header: Sequence[str], rows: Callable[[Groups], Rows]) -> str:
    """A table a machine that has records of the suite."""
    parts = []
    for machine, groups in machines(results).items():
        groups = [group for group in groups if group[0]["suite"] == suite]
        if found := list(rows(groups)):
            parts.append(f"**{machine}**: {provenance(groups)}\n\n{table(header, found)}")
    return "\n\n".join(parts)


def layer_region(results: Path) -> str:
    return _region(results, "layer", LAYER, layer_rows)


def accuracy_region(results: Path) -> str:
    text = _region(results, "accuracy", ACCURACY, accuracy_rows)
    return f"{text}\n\n{ACCURACY_NOTE}" if text else ""


def scale_region(results: Path) -> str:
    text = _region(results, "scale", SCALE, scale_rows)
    return f"{text}\n\n{SCALE_NOTE}" if text else ""


def update_region(results: Path) -> str:
    text = _region(results, "update", UPDATE, update_rows)
    return f"{text}\n\n{UPDATE_NOTE}" if text else ""
