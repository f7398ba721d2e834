"""The table on the terminal, and the JSON."""

import json
import math
import sys
from statistics import mean, median
from typing import Any

import torch
from rich.table import Table

from qgnn.cli.metric import ACCURACY, Metric, deviation, or_nan
from qgnn.cli.recipe import Recipe
from qgnn.cli.run import Run
from qgnn.cli.task import Task


def by_precision(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The runs of each precision and compression, in the order of first appearance."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(row_name(run), []).append(run)
    return groups


def row_name(run: dict[str, Any]) -> str:
    """Its precision, and its compression if it has one."""
    return run["precision"] if run["compress"] == "none" else f"{run['precision']} + {run['compress']}"


def is_compressed(runs: list[dict[str, Any]]) -> bool:
    """Whether some run is: then the table shows apart what compression can change."""
    return any(run["compress"] != "none" for run in runs)


def summarize(runs: list[dict[str, Any]], metric: Metric = ACCURACY) -> dict[str, Any]:
    """Runs of one precision over seeds: mean and sample deviation of the metric, as shown, the median of the rest."""
    scores = [metric.scale * or_nan(run["test_acc"]) for run in runs]
    peaks = [run["peak_mib"] for run in runs if run["peak_mib"] is not None]
    return {
        "acc": mean(scores),
        "acc_dev": deviation(scores) if len(scores) > 1 else None,
        "epoch_ms": median(run["epoch_ms"] for run in runs),
        "saved_mib": median(run["saved_mib"] for run in runs),
        "peak_mib": median(peaks) if peaks else None,
    }


def table(runs: list[dict[str, Any]], caption: str = "", metric: Metric = ACCURACY) -> Table:
    """The comparison of all precisions, with speed relative to ``fp32``, which is PyG's own."""
    result = Table(caption=caption, caption_justify="left")
    result.add_column("precision", overflow="fold")  # the only one that a narrow terminal breaks
    kept = ("MiB\nkept", "without\nfeatures") if is_compressed(runs) else ("MiB kept\nfor backward",)
    score = metric.heading.replace(" ", "\n", 1)
    for heading in (score, "ms per\nepoch", *kept, "peak\nMiB", "speed vs\nPyG fp32"):
        result.add_column(heading, justify="right", no_wrap=True)
    for row in cells(runs, plus_minus(), metric):
        result.add_row(*row)
    return result


def cells(runs: list[dict[str, Any]], sign: str = "±", metric: Metric = ACCURACY) -> list[tuple[str, ...]]:
    """The text of the table's rows, ``sign`` before a deviation; of compressed runs with one column more."""
    rows = {name: summarize(group, metric) for name, group in by_precision(runs).items()}
    if is_compressed(runs):
        for name, group in by_precision(runs).items():
            rows[name]["made_mib"] = median(run["saved_mib"] - run["features_mib"] for run in group)
    fp32_ms = rows["fp32"]["epoch_ms"] if "fp32" in rows else None
    return [
        (
            name,
            f" {sign} ".join(f"{row[of]:.{metric.digits}f}" for of in ("acc", "acc_dev") if row[of] is not None),
            f"{row['epoch_ms']:.1f}",
            *(f"{row[column]:.2f}" for column in ("saved_mib", "made_mib") if column in row),
            "-" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}",
            "-" if fp32_ms is None else f"{fp32_ms / row['epoch_ms']:.2f}x",
        )
        for name, row in rows.items()
    ]


def caption(dataset: str, model: str, task: Task, recipe: Recipe, device: torch.device) -> str:
    """What was trained, where, and for how long."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, threads: {torch.get_num_threads()}"
    return (
        f"{dataset}: {task.description}; "
        f"{model.upper()}, {recipe.layers} layers, {recipe.hidden} hidden, {recipe.epochs} epochs; {where}"
    )


def plus_minus() -> str:
    """The sign, or its spelling where standard output cannot show it."""
    try:
        "±".encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return "+-"
    return "±"


def run_line(precision: str, seed: int, run: Run, metric: Metric) -> str:
    """One finished run in a line, for a log."""
    score = f"test {metric.label} {metric.text(run.test_acc)}{metric.unit}"
    return (
        f"{precision}, seed {seed}: {score}, {run.epoch_ms:.1f} ms per epoch, {run.saved_mib:.2f} MiB kept for backward"
    )


def to_json(result: dict[str, Any]) -> str:
    """The result as text, with a final newline."""
    return json.dumps(jsonable(result), indent=2, allow_nan=False) + "\n"


def jsonable(value: Any) -> Any:
    """The value with ``None`` in place of each float in it that is NaN or infinite, for which JSON has no name."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
