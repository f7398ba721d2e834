"""The results: a tidy table with a row a run, and a summary with a row a format and a column a component."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from rich.table import Table

from qgnn.cli.errors import UsageError
from qgnn.cli.metric import ACCURACY, METRICS, Metric, deviation, or_nan
from qgnn.cli.report import plus_minus
from qgnn.cli.scheme import ALL
from qgnn.cli.sweep.journal import DONE
from qgnn.cli.sweep.run_spec import BASELINE, NONE, RunSpec

Row = dict[str, Any]

# The columns of a result, in order.
MEASURED = ("metric", "test_acc", "final_loss", "best_epoch", "mean_bits", "widths")


def columns_of(runs: Sequence[RunSpec]) -> list[str]:
    """The columns of the table: the same whichever of the runs are recorded."""
    names = [field.name for field in fields(RunSpec) if field.name != "recipe"]
    recipe = sorted({name for run in runs for name, _ in run.recipe})
    return [*names, *recipe, "status", *MEASURED, "error", "commit"]


def rows_of(runs: Sequence[RunSpec], recorded: dict[str, Row]) -> list[Row]:
    """A row for each run that is recorded, in the order of the runs. What a run lacks is ``None``.

    Times are in the journal alone, so that the table is the same whenever, and after however many kills, it is made.

    Args:
        runs: Those of the sweep.
        recorded: The lines of its journal by key.
    """
    columns, rows = columns_of(runs), []
    for run in runs:
        line = recorded.get(run.key)
        if line is not None:
            result = line.get("result") or {}
            row = {**run.fields, **dict(run.recipe), **result, "status": line["status"], "error": line.get("error")}
            row |= {name: or_nan(result[name]) for name in ("test_acc", "final_loss") if name in result}
            row["widths"] = lengths(result.get("widths") or ())
            row["commit"] = line["commit"] and line["commit"] + {True: "+", False: "", None: "?"}[line["dirty"]]
            rows.append({name: row.get(name) for name in columns})
    return rows


def lengths(widths: Sequence[int]) -> str | None:
    """The widths of the epochs as ``2x50 4x150``: for 50 epochs 2 bits, then for 150 epochs 4; ``None`` for none."""
    return " ".join(f"{bits}x{len(list(epochs))}" for bits, epochs in groupby(widths)) or None


def check_table(path: Path) -> None:
    """Raise unless the table's format is known and can be written."""
    if path.suffix not in (".csv", ".parquet"):
        raise UsageError(f"--table expects a file name that ends in .csv or .parquet (got {str(path)!r})")
    if path.suffix == ".parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise UsageError("--table needs pyarrow for .parquet: pip install pyarrow, or give a .csv") from error


def write_table(path: Path, runs: Sequence[RunSpec], recorded: dict[str, Row]) -> None:
    """Write the rows as CSV, or as parquet if the file is named so. What a run lacks stays empty.

    The file is replaced as a whole: a kill leaves the old one.

    Args:
        path: The file.
        runs: Those of the sweep.
        recorded: The lines of its journal by key.
    """
    columns, rows = columns_of(runs), rows_of(runs, recorded)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.suffix == ".parquet":
            _write_parquet(partial, columns, rows)
        else:
            with partial.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, columns, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"the table {str(path)!r} could not be written ({error.strerror})") from error


def _write_parquet(path: Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Columns have the same types whatever is recorded."""
    import pyarrow
    from pyarrow import parquet

    whole = {"seed": pyarrow.uint64(), **dict.fromkeys(("best_epoch", "epochs", "hidden", "layers"), pyarrow.int64())}
    real = dict.fromkeys(("test_acc", "final_loss", "mean_bits", "dropout", "lr", "weight_decay"), pyarrow.float64())
    types = [(name, (whole | real).get(name, pyarrow.string())) for name in columns]
    parquet.write_table(pyarrow.Table.from_pylist(list(rows), pyarrow.schema(types)), path)


class Cell(NamedTuple):
    """Seeds of one scheme.

    Args:
        scores: On the test set, as they are shown: of accuracy in percent.
        differences: To the baseline of the same seeds, of accuracy in points.
        bits: What a schedule set, in the mean over the epochs; empty without one.
        digits: How many are shown behind the point.
    """

    scores: tuple[float, ...]
    differences: tuple[float, ...]
    bits: tuple[float, ...] = ()
    digits: int = ACCURACY.digits

    def text(self, num_seeds: int, sign: str = "±") -> str:
        """As ``81.20 ± 0.51 (-0.30 ± 0.21)``, with the number of seeds if some are missing; bits on a second line."""
        digits = self.digits
        text = f"{mean(self.scores):.{digits}f}"
        if len(self.scores) > 1:
            text += f" {sign} {deviation(self.scores):.{digits}f}"
        if self.differences:
            error = standard_error(self.differences)
            text += (
                f" ({mean(self.differences):+.{digits}f}{f' {sign} {error:.{digits}f}' if error is not None else ''})"
            )
        if len(self.scores) < num_seeds:
            text += f" n={len(self.scores)}"
        return text + (f"\n{mean(self.bits):.2f} bits" if self.bits else "")


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; ``None`` of a single value."""
    return deviation(values) / len(values) ** 0.5 if len(values) > 1 else None


class Panel(NamedTuple):
    """All that was run with one model on one data set by one recipe.

    Args:
        title: Which.
        baseline: In full precision, ``None`` if that was not run.
        cells: By format (with schedule and rounding, if the sweep has several) and component.
        num_seeds: Seeds that the sweep has for it.
        metric: What its scores are.
    """

    title: str
    baseline: Cell | None
    cells: dict[tuple[str, str], Cell]
    num_seeds: int
    metric: Metric = ACCURACY

    @property
    def labels(self) -> list[str]:
        """Formats in order."""
        return list(dict.fromkeys(label for label, _ in self.cells))

    @property
    def components(self) -> list[str]:
        """Components in order."""
        return list(dict.fromkeys(component for _, component in self.cells))


def panels(runs: Sequence[RunSpec], recorded: dict[str, Row]) -> list[Panel]:
    """The results that are there, one panel for each data set, model and recipe, in the order of the runs."""
    results = {run: recorded[run.key]["result"] for run in runs if is_done(run, recorded)}
    # Runs of before there were others are of accuracy.
    metrics = {run: METRICS[result.get("metric", ACCURACY.name)] for run, result in results.items()}
    scores = {run: metrics[run].scale * or_nan(result["test_acc"]) for run, result in results.items()}
    mean_bits = {run: result["mean_bits"] for run, result in results.items() if result.get("mean_bits") is not None}
    several_roundings = len({run.rounding for run in runs} - {NONE}) > 1
    recipes = {run.recipe for run in runs}
    seeds: dict[tuple[Any, ...], set[int]] = {}
    for run in runs:
        seeds.setdefault((run.dataset, run.model, run.recipe), set()).add(run.seed)
    groups: dict[tuple[Any, ...], dict[tuple[str, str], list[RunSpec]]] = {}
    for run in results:
        label = run.format
        if run.schedule != NONE:
            label += f" {run.schedule}"
        if several_roundings and run.rounding != NONE:
            label += f" {run.rounding}"
        component = ALL if run.component == NONE and run.format != BASELINE else run.component
        groups.setdefault((run.dataset, run.model, run.recipe), {}).setdefault((label, component), []).append(run)
    made = []
    for (dataset, model, recipe), group in groups.items():
        title = f"{model.upper()} on {dataset}"
        if len(recipes) > 1:
            title += "".join(f", {name} {value}" for name, value in recipe)
        metric = next(metrics[run] for members in group.values() for run in members)
        cells = {
            place: Cell(
                tuple(scores[run] for run in members),
                tuple(scores[run] - scores[run.baseline] for run in members if run.baseline in scores),
                tuple(mean_bits[run] for run in members if run in mean_bits),
                metric.digits,
            )
            for place, members in group.items()
        }
        baseline = cells.pop((BASELINE, NONE), None)
        made.append(Panel(title, baseline, cells, len(seeds[dataset, model, recipe]), metric))
    return made


def is_done(run: RunSpec, recorded: dict[str, Row]) -> bool:
    """Whether a run is recorded, and did not fail."""
    line = recorded.get(run.key)
    return line is not None and line["status"] == DONE


def summary(panel: Panel) -> Table:
    """The panel as a table for the terminal."""
    sign, caption = plus_minus(), f"{panel.metric.heading}, mean and deviation over seeds"
    if panel.baseline is not None:
        score = panel.baseline._replace(differences=()).text(panel.num_seeds, sign)
        caption = f"{BASELINE}: {score}; {caption} (difference to {BASELINE} of the same seeds and its standard error)"
    if any(cell.bits for cell in panel.cells.values()):
        caption += "; bits: mean over epochs and seeds"
    table = Table(title=panel.title, title_justify="left", caption=caption, caption_justify="left")
    table.min_width = 60  # for the caption, which is not wider than the table
    table.add_column("format", no_wrap=True)
    for component in panel.components:
        table.add_column(component.replace("_", "\n"), justify="right")
    for label in panel.labels:
        texts = (panel.cells.get((label, component)) for component in panel.components)
        table.add_row(label, *("" if cell is None else cell.text(panel.num_seeds, sign) for cell in texts))
    return table
