"""Sweeps of sets that are scored otherwise: what is recorded, what identifies a run, the tables and the plot."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest

from molecules import read_chains, write_freesolv
from qgnn.cli.sweep.execute import execute, read, task_of
from qgnn.cli.sweep.journal import DONE, RUN, START, Journal, recorded_in
from qgnn.cli.sweep.plots import write_plot
from qgnn.cli.sweep.run_spec import RunSpec
from qgnn.cli.sweep.table import panels, summary, write_table
from sweep_fakes import HEADER

LINES = {"status": DONE, "commit": "c", "dirty": False}


def runs_of(dataset: str) -> list[RunSpec]:
    """The baseline and int8, of two seeds each."""
    named = [RunSpec(dataset, "gcn", "int8", "all", "none", "stochastic", seed) for seed in (0, 1)]
    return [run for int8 in named for run in (int8.baseline, int8)]


def lines_of(runs: list[RunSpec], scores: list[float], **named: str) -> dict[str, Any]:
    return {run.key: LINES | {"result": {"test_acc": score, **named}} for run, score in zip(runs, scores, strict=True)}


def test_a_run_records_its_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_chains(monkeypatch)
    write_freesolv(tmp_path / "freesolv" / "raw", 40)
    read.cache_clear()
    task_of.cache_clear()
    run = RunSpec("freesolv", "gcn", "int8", "all", "none", "stochastic", 0, (("epochs", 2), ("hidden", 8)))
    result = execute(run, str(tmp_path), "cpu")
    assert list(result) == ["metric", "test_acc", "final_loss", "best_epoch", "mean_bits", "widths"]
    assert result["metric"] == "rmse"
    read.cache_clear()
    task_of.cache_clear()


def test_rmse_is_shown_in_its_own_unit_and_its_rise_is_the_cost(tmp_path: Path) -> None:
    runs = runs_of("freesolv")
    (panel,) = panels(runs, lines_of(runs, [1.25, 1.5, 1.75, 1.875], metric="rmse"))
    assert panel.cells[("int8", "all")].text(2) == "1.688 ± 0.265 (+0.188 ± 0.062)"
    assert "fp32: 1.500 ± 0.354; test RMSE, mean" in str(summary(panel).caption)
    assert write_plot(tmp_path / "p.svg", [panel])
    assert "RMSE rise, standard error" in (tmp_path / "p.svg").read_text()


def test_a_plot_shows_what_is_lost_upwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    drawn: list[list[float]] = []
    bar = Axes.bar

    def spy(self: Axes, at: Any, height: Any, *arguments: Any, **named: Any) -> Any:
        drawn.append(list(height))
        return bar(self, at, height, *arguments, **named)

    monkeypatch.setattr(Axes, "bar", spy)
    shown = []
    for dataset, metric, scores in (("esol", "rmse", [1.0, 1.5] * 2), ("minesweeper", "roc_auc", [0.9, 0.8] * 2)):
        runs = runs_of(dataset)
        shown += panels(runs, lines_of(runs, scores, metric=metric))
    assert write_plot(tmp_path / "p.svg", shown)
    assert drawn == [pytest.approx([0.5]), pytest.approx([10.0])]
    assert "ROC-AUC drop (points), standard error" in (tmp_path / "p.svg").read_text()


def test_the_table_has_a_column_and_old_results_are_of_accuracy(tmp_path: Path) -> None:
    runs = runs_of("photo")
    lines = lines_of(runs[:2], [0.5, 0.75]) | lines_of(runs[2:], [0.5, 0.5], metric="accuracy")
    write_table(tmp_path / "t.csv", runs, lines)
    with (tmp_path / "t.csv").open() as file:
        assert [row["metric"] for row in csv.DictReader(file)] == ["", "", "accuracy", "accuracy"]
    (panel,) = panels(runs, lines)
    assert panel.cells[("int8", "all")].text(2) == "62.50 ± 17.68 (+12.50 ± 12.50)"


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_run_that_diverged_is_recorded_and_shown(tmp_path: Path, score: float) -> None:
    """As JSON, which has no number for it; a journal of before may hold one."""
    runs = runs_of("esol")
    with Journal(tmp_path / "j") as journal:
        journal.append(START, **HEADER)
        for run, rmse in zip(runs, [1.25, 1.5, 1.75, score], strict=True):
            result = {"metric": "rmse", "test_acc": rmse, "final_loss": rmse}
            journal.append(RUN, key=run.key, run=run.fields, status=DONE, result=result)
        written = journal.runs
    text = (tmp_path / "j").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert recorded_in(tmp_path / "j")[runs[3].key]["result"]["test_acc"] is None
    (tmp_path / "old").write_text(text.replace('"test_acc": null', '"test_acc": NaN'))
    for path in (tmp_path / "j", tmp_path / "old"):
        with Journal(path) as journal:
            recorded = journal.runs
        (panel,) = panels(runs, recorded)
        assert panel.cells[("int8", "all")].text(2) == "nan ± nan (+nan ± nan)"
        assert panel.baseline is not None
        assert panel.baseline._replace(differences=()).text(2) == "1.500 ± 0.354"
        assert write_plot(tmp_path / "p.svg", [panel])
        for lines in (written, recorded):
            write_table(tmp_path / "t.csv", runs, lines)
            with (tmp_path / "t.csv").open() as file:
                last = list(csv.DictReader(file))[-1]
            assert (last["test_acc"], last["final_loss"]) == ("nan", "nan"), "which is not: without a score"


def test_a_run_of_another_metric_is_another_run() -> None:
    """Where sets are scored as before, the keys of before still hold; a journal of others is of accuracy."""
    photo, minesweeper = runs_of("photo")[1], runs_of("minesweeper")[1]
    assert photo.key == "cee22848f331835721ef25f84b9b2130e473eb962ecbd29ed5eef84240184eaa"
    assert '"metric":"roc_auc"' in minesweeper.canonical
