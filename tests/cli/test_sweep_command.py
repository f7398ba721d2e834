"""``qgnn sweep``: what a run trains, the tables, the plot, and what ends in one line."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch_geometric.data import Data

from qgnn.cli import main
from qgnn.cli.sweep import command
from qgnn.cli.sweep.execute import execute, read, task_of
from qgnn.cli.sweep.journal import DONE, FAILED
from qgnn.cli.sweep.run_spec import RunSpec
from qgnn.cli.sweep.table import Cell, panels, rows_of, summary
from sweep_fakes import fake

LINES = {"status": DONE, "commit": "c", "dirty": False}


def run_of(fmt: str, component: str = "all", schedule: str = "none", seed: int = 0, **recipe: Any) -> RunSpec:
    run = RunSpec("photo", "gcn", fmt, component, schedule, "stochastic", seed, tuple(sorted(recipe.items())))
    return run.baseline if fmt == "fp32" else run


@pytest.fixture
def loss_of(tiny: Data) -> Any:
    """The final loss of a short training on the tiny data set."""
    read.cache_clear()
    task_of.cache_clear()
    yield lambda *parts: execute(run_of(*parts, epochs=4, hidden=16, layers=3), None, "cpu")["final_loss"]
    read.cache_clear()
    task_of.cache_clear()


def test_equal_runs_have_equal_results(loss_of: Any) -> None:
    assert loss_of("int4") == loss_of("int4") != loss_of("fp32")


def test_components_and_formats_differ_in_what_they_train(loss_of: Any) -> None:
    """Equal losses to the last bit mean that something was not quantized as it was named."""
    parts = [(fmt, component) for fmt in ("int4", "msfp12") for component in ("all", "weights", "messages")]
    losses = {part: loss_of(*part) for part in [("fp32", "all"), *parts]}
    assert len(set(losses.values())) == len(losses), losses


def test_a_schedule_that_nothing_follows_is_no_result(loss_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = command.execute.__globals__["paired_run"]
    monkeypatch.setitem(command.execute.__globals__, "paired_run", lambda *a, **k: real(*a, **k)._replace(widths=()))
    with pytest.raises(RuntimeError, match=r"the schedule sdq\[2,8\] set no width"):
        loss_of("int8", "all", "sdq[2,8]")


def test_rows_and_panels_compare_with_the_baseline_of_the_same_seed() -> None:
    runs = [run_of(fmt, seed=seed) for fmt in ("fp32", "int8") for seed in (0, 1, 2)] + [run_of("int4", "weights")]
    accuracies = [0.80, 0.82, 0.90, 0.79, 0.79, None, 0.5]
    lines = {run.key: LINES | {"result": {"test_acc": acc}} for run, acc in zip(runs, accuracies, strict=True)}
    lines[runs[5].key] = {"status": FAILED, "error": "E: no", "commit": "c", "dirty": True}
    (panel,) = panels(runs, lines)
    assert panel.title == "GCN on photo"
    assert panel.cells[("int8", "all")].differences == pytest.approx((-1.0, -3.0)), "of seeds that both have"
    assert panel.cells[("int8", "all")].text(3) == "79.00 ± 0.00 (-2.00) n=2"
    assert panel.cells[("int4", "weights")].text(3) == "50.00 (-30.00) n=1"
    assert (panel.labels, panel.components) == (["int8", "int4"], ["all", "weights"])
    assert list(summary(panel).columns[2].cells) == ["", "50.00 (-30.00) n=1"]
    rows = rows_of(runs, lines)
    assert [row["status"] for row in rows] == [DONE] * 5 + [FAILED, DONE]
    assert (rows[5]["error"], rows[5]["commit"], rows[0]["commit"]) == ("E: no", "c+", "c")
    assert Cell((80.0, 82.0), ()).text(2) == "81.00 ± 1.41"


SPEC = "[sweep]\ndatasets=['photo']\nformats=['fp32', 'int8']\ncomponents=['all', 'weights']\nseeds=2\n"


@pytest.fixture
def sweep(tmp_path: Path, tiny: Data, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command on runs that train nothing."""
    monkeypatch.setattr(command, "carry_out", _carry_out)
    (tmp_path / "s.toml").write_text(SPEC)
    read.cache_clear()
    return lambda *options: main(["sweep", str(tmp_path / "s.toml"), "--results", str(tmp_path / "out"), *options])


def _carry_out(runs: list[RunSpec], journal: Any, *_: Any) -> None:
    for run in runs:
        journal.append("run", key=run.key, run=run.fields, status=DONE, result=fake(run))


def test_the_command_writes_table_summary_and_plot(
    sweep: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("--limit", "4") == 0
    assert "4 of 6 runs in" in (err := capsys.readouterr().err)
    assert "2 left" in err
    assert sweep("--plot", str(tmp_path / "p.svg")) == 0
    out, err = capsys.readouterr()
    assert "6 of 6 runs in" in err
    assert "GCN on photo" in out
    assert "accuracy drop" in (tmp_path / "p.svg").read_text()
    with (tmp_path / "out" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["format"], row["component"], row["seed"]) for row in rows] == [
        *(("fp32", "none", seed) for seed in "01"),
        *(("int8", component, seed) for component in ("all", "weights") for seed in "01"),
    ]
    before = (tmp_path / "out" / "journal.jsonl").read_bytes()
    assert sweep() == 0
    assert (tmp_path / "out" / "journal.jsonl").read_bytes() == before, "nothing was missing"


def test_a_dry_run_counts_and_leaves_nothing(
    sweep: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("--dry-run") == 0
    assert "6" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "text", "expected"),
    [
        ([], SPEC + "lr = 'x'", "[sweep], lr: expected a number in (0, 100] (got 'x')"),
        (["--plot", "p.svg"], SPEC.replace("'fp32', ", ""), "--plot expects fp32 and another one among the formats"),
        (["--processes", "0"], SPEC, "--processes: expected a whole number of at least 1 (got 0)"),
    ],
)
def test_what_the_user_can_put_right_is_one_line(
    sweep: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    text: str,
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text(text)
    assert sweep(*options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert expected in err
