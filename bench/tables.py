"""The tables of the suites that the pages show apart, made of records."""

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
SCALE = ("nodes", "edges", "provider", "ms", "ns an edge", "peak MiB", "bytes an edge", "process GiB")
SCALE_NOTE = (
    "A training step of a GCN of two layers. Peak: with the edges as they are given, 16 bytes each, and the features; "
    "process: with all libraries. An edge counts once for each direction. Huge pages are on: `THP_MEM_ALLOC_ENABLE=1`."
)
DISTRIBUTED = (
    *("data set, model", "shared", "provider", "test accuracy %", "difference", "losses apart", "MiB sent an epoch"),
    *("fewer than in fp32", "seeds"),
)
DISTRIBUTED_NOTE = (
    "Difference to one process in fp32, by seed, with its standard error. Losses apart: the distance of the losses of "
    "all epochs from those, relative to their norm, of the worst seed; who fails that check is left out. Sent: by a "
    "process in the mean; `partitioned`: rows of neighbors and their gradients; `batches`: gradients of weights."
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


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and standard deviation."""
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def difference(values: Sequence[float]) -> str:
    """Mean and its standard error."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{mean(values):+.2f}{error}"


def distributed_rows(groups: Groups) -> Rows:
    """A line a data set, way to share the work and provider, of the seeds that one process has in fp32."""
    runs: dict[str, dict[str, list[tuple[Record, float]]]] = {}
    for group in (group for group in groups if group[0]["suite"] == "distributed"):
        passed = [record for record in group if record["ok"]]
        for base in (record for record in passed if record["provider"].endswith("one process fp32")):
            case, _, _ = base["case"].rpartition("/")
            for record in passed:
                found = record, record["test_acc"] - base["test_acc"]
                runs.setdefault(case, {}).setdefault(record["provider"], []).append(found)
    for case, by_provider in sorted(runs.items()):
        for provider, pairs in by_provider.items():
            records = [record for record, _ in pairs]
            sent, full = ([r["metrics"][name] for r in records if "metrics" in r] for name in ("sent_mib", "full_mib"))
            yield (
                *case.rsplit("/", 1),
                provider,
                spread([100 * record["test_acc"] for record in records]),
                difference([100 * gap for _, gap in pairs]),
                f"{max(record['error'] for record in records):.1g}",
                *((f"{mean(sent):.2f}", times(sum(full) / sum(sent))) if sent else ("", "")),
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


def region(results: Path, suite: str, header: Sequence[str], rows: Callable[[Groups], Rows]) -> str:
    """A table a machine that has records of the suite."""
    parts = []
    for machine, groups in machines(results).items():
        groups = [group for group in groups if group[0]["suite"] == suite]
        if found := list(rows(groups)):
            parts.append(f"**{machine}**: {provenance(groups)}\n\n{table(header, found)}")
    return "\n\n".join(parts)


def layer_region(results: Path) -> str:
    return region(results, "layer", LAYER, layer_rows)


def scale_region(results: Path) -> str:
    text = region(results, "scale", SCALE, scale_rows)
    return f"{text}\n\n{SCALE_NOTE}" if text else ""


def distributed_region(results: Path) -> str:
    text = region(results, "distributed", DISTRIBUTED, distributed_rows)
    return f"{text}\n\n{DISTRIBUTED_NOTE}" if text else ""


def update_region(results: Path) -> str:
    text = region(results, "update", UPDATE, update_rows)
    return f"{text}\n\n{UPDATE_NOTE}" if text else ""
