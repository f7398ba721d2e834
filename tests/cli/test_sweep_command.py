"""``qgnn sweep``: what a run trains, the tables, the plot, and what ends in one line."""

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch_geometric.data import Data

from qgnn.cli import main
from qgnn.cli.sweep import command
from qgnn.cli.sweep.execute import execute, read, task_of
from qgnn.cli.sweep.journal import DONE, FAILED, Journal
from qgnn.cli.sweep.run_spec import RunSpec
from qgnn.cli.sweep.table import Cell, panels, rows_of, summary, write_table
from qgnn.tables import as_text
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
    assert panel.cells[("int8", "all")].text(3) == "79.00 ± 0.00 (-2.00 ± 1.00) n=2"
    assert panel.cells[("int4", "weights")].text(3) == "50.00 (-30.00) n=1"
    assert (panel.labels, panel.components) == (["int8", "int4"], ["all", "weights"])
    assert list(summary(panel).columns[2].cells) == ["", "50.00 (-30.00) n=1"]
    (baseline,) = panels(runs[:3], lines)
    assert "test accuracy %, mean and deviation" in as_text(summary(baseline), 80), (
        "a caption is not broken at each word"
    )
    rows = rows_of(runs, lines)
    assert [row["status"] for row in rows] == [DONE] * 5 + [FAILED, DONE]
    assert (rows[5]["error"], rows[5]["commit"], rows[0]["commit"]) == ("E: no", "c+", "c")
    lines[runs[0].key] |= {"dirty": None}
    assert rows_of(runs, lines)[0]["commit"] == "c?", "git did not tell"
    assert Cell((80.0, 82.0), ()).text(2) == "81.00 ± 1.41"


def test_the_bits_of_a_schedule_are_in_both_tables(tmp_path: Path) -> None:
    """Also of runs recorded before there was a best epoch."""
    runs = [run_of("int8", schedule=schedule, seed=seed) for schedule in ("sdq[2,8]", "none") for seed in (0, 1)]
    widths = [[2] * 3 + [4] * 2 + [2], [2, 2, 8], [], []]
    lines: dict[str, Any] = {
        run.key: LINES | {"result": {"test_acc": 0.5, "final_loss": 1.0, "mean_bits": bits, "widths": each}}
        for run, bits, each in zip(runs, (2.5, 4.0, None, None), widths, strict=True)
    }
    lines[runs[0].key]["result"]["best_epoch"] = 7
    (panel,) = panels(runs, lines)
    assert list(summary(panel).columns[1].cells) == ["50.00 ± 0.00\n3.25 bits", "50.00 ± 0.00"]
    assert "bits: mean over epochs and seeds" in str(summary(panel).caption)
    assert "bits" not in str(summary(panels(runs[2:], lines)[0]).caption)

    write_table(tmp_path / "t.csv", runs, lines)
    with (tmp_path / "t.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = ("test_acc", "final_loss", "best_epoch", "mean_bits", "widths")
    assert [[row[name] for name in names] for row in rows] == [
        ["0.5", "1.0", "7", "2.5", "2x3 4x2 2x1"],
        ["0.5", "1.0", "", "4.0", "2x2 8x1"],
        ["0.5", "1.0", "", "", ""],
        ["0.5", "1.0", "", "", ""],
    ]


def test_columns_are_those_of_all_runs_whichever_are_recorded(tmp_path: Path) -> None:
    runs = [run_of("int8"), run_of("int4", lr=0.1, epochs=3)]
    lines = {runs[0].key: LINES | {"status": FAILED, "error": "E: no"}, runs[1].key: LINES | {"result": fake(runs[1])}}
    headers = set()
    for recorded in ({}, {runs[0].key: lines[runs[0].key]}, lines):
        write_table(tmp_path / "t.csv", runs, recorded)
        header, *rows = (tmp_path / "t.csv").read_text().splitlines()
        headers.add(header)
        assert len(rows) == len(recorded)
    assert headers == {
        "dataset,model,format,component,schedule,rounding,seed,epochs,lr,status,"
        "metric,test_acc,final_loss,best_epoch,mean_bits,widths,error,commit"
    }


def test_a_parquet_table_has_the_rows(tmp_path: Path) -> None:
    from pyarrow import parquet

    runs = [run_of("int8", seed=seed, lr=0.5) for seed in (0, (1 << 64) - 1)]
    lines = {run.key: LINES | {"result": fake(run)} for run in runs}
    write_table(tmp_path / "t.parquet", runs, lines)
    table = parquet.read_table(tmp_path / "t.parquet")
    assert table.to_pylist() == rows_of(runs, lines)
    write_table(tmp_path / "t.parquet", runs, {})
    assert parquet.read_table(tmp_path / "t.parquet").schema == table.schema, "the same whatever is recorded"


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


def _fail(runs: list[RunSpec], journal: Any, *_: Any) -> None:
    for run in runs:
        journal.append("run", key=run.key, run=run.fields, status=FAILED, error=f"E: no {run.seed}", trace="")


def row_of_all(text: str) -> list[int]:
    """The numbers in the last row of a plan."""
    (row,) = (line for line in text.splitlines() if " all " in line)
    return [int(cell) for cell in row.replace("\u2502", " ").split() if cell.isdigit()]


def test_the_command_writes_table_summary_and_plot(
    sweep: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("--limit", "4") == 0
    assert "4 of 6 runs done" in (err := capsys.readouterr().err)
    assert "2 left" in err
    assert sweep("--plot", str(tmp_path / "p.svg")) == 0
    out, err = capsys.readouterr()
    assert "6 of 6 runs done" in err
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


def test_a_dry_run_counts_what_is_left_and_leaves_nothing(
    sweep: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("--dry-run") == 0
    assert row_of_all(capsys.readouterr().out) == [6, 6, 0, 0, 6], "runs, new, done, failed, left"
    assert not (tmp_path / "out").exists()
    assert sweep("--limit", "3") == 0
    monkeypatch.setattr(command, "carry_out", _fail)
    assert sweep("--limit", "1") == 1
    capsys.readouterr()
    with Journal(tmp_path / "out" / "journal.jsonl"):  # by a sweep that goes on
        assert sweep("--dry-run") == 0
        assert row_of_all(capsys.readouterr().out) == [6, 6, 3, 1, 2]
        assert sweep("--dry-run", "--retry-failed") == 0
        assert row_of_all(capsys.readouterr().out) == [6, 6, 3, 1, 3]


def test_a_sweep_that_goes_on_elsewhere_says_so(
    sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where something runs there."""
    monkeypatch.setattr(command, "cpu_name", lambda: "A CPU")
    assert [sweep("--limit", "2") for _ in range(2)] == [0, 0]
    assert "goes on" not in capsys.readouterr().err
    monkeypatch.setattr(command, "cpu_name", lambda: "B CPU")
    assert sweep("--limit", "0") == 0
    assert "goes on" not in capsys.readouterr().err
    assert sweep() == 0
    err = capsys.readouterr().err
    assert "holds runs on A CPU, and goes on with runs on B CPU: times and rounding may differ" in err
    assert sweep() == 0, "nothing is left"
    assert "goes on" not in capsys.readouterr().err


def test_a_plot_of_nothing_says_so_and_changes_nothing_else(
    sweep: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "p.svg"
    assert sweep("--limit", "2", "--plot", str(plot)) == 0
    out, err = capsys.readouterr()
    assert "fp32: " in out
    assert "2 of 6 runs done" in err
    assert "no plot: " in err
    assert not plot.exists()
    monkeypatch.setattr(command, "carry_out", _fail)
    assert sweep("--plot", str(plot)) == 1, "of the runs that failed"
    assert "no plot: " in capsys.readouterr().err


def test_failed_runs_are_listed_with_what_to_do(
    sweep: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.toml").write_text(SPEC.replace("seeds=2", "seeds=4"))
    monkeypatch.setattr(command, "carry_out", _fail)
    assert sweep() == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "failed: gcn on photo, fp32, seed 0: E: no 0"
    assert [line.startswith("failed: gcn") for line in lines] == [True] * 10 + [False] * 2
    assert lines[10] == "failed: 2 more, in the column 'error' of the table"
    assert lines[11].endswith("results.csv; 12 failed: the same command with --retry-failed runs them again")
    assert sweep() == 1, "they are not run again, and still failed"
    monkeypatch.setattr(command, "carry_out", _carry_out)
    assert sweep("--retry-failed") == 0
    assert capsys.readouterr().err.splitlines()[-1].endswith("results.csv"), "nothing failed or is left"


def test_a_changed_file_goes_on_with_what_it_still_names(
    sweep: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A seed more and a component less. So does a new meaning of the same file, which nothing recorded has."""
    assert sweep() == 0
    assert "not in the specification" not in capsys.readouterr().err
    journal = tmp_path / "out" / "journal.jsonl"
    before = journal.read_bytes()
    (tmp_path / "s.toml").write_text("[sweep]\ndatasets=['photo']\nformats=['fp32', 'int8']\nseeds=3\n")
    for options in (["--dry-run"], []):
        assert sweep(*options) == 0
        assert "2 of the 6 runs in" in (err := capsys.readouterr().err)
        assert "are not in the specification" in err
    assert "6 of 6 runs done" in err
    assert journal.read_bytes().startswith(before)
    assert journal.read_bytes().count(b'"kind": "run"') == 8
    assert (tmp_path / "out" / "results.csv").read_text().count("weights") == 0

    monkeypatch.setattr("qgnn.cli.sweep.run_spec.KEY_VERSION", -1)
    assert sweep("--limit", "1") == 0
    err = capsys.readouterr().err
    assert "8 of the 8 runs in" in err
    assert "1 of 6 runs done" in err


def test_no_run_at_all_writes_the_tables_anew(
    sweep: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "out" / "results.csv"
    assert sweep("--limit", "0") == 0
    assert table.read_text().startswith("dataset,model,")
    assert "0 of 6 runs done" in capsys.readouterr().err
    assert sweep() == 0
    before = table.read_bytes()
    table.unlink()
    assert sweep("--limit", "0") == 0
    assert table.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "text", "expected"),
    [
        ([], SPEC + "lr = 'x'", "[sweep], lr: expected a number in (0, 100] (got 'x')"),
        (["--plot", "p.svg"], SPEC.replace("'fp32', ", ""), "--plot expects fp32 and another one among the formats"),
        (["--table", "t.xlsx"], SPEC, "--table expects a file name that ends in .csv or .parquet (got 't.xlsx')"),
        (["--table", "t.parquet"], SPEC, "--table needs pyarrow for .parquet: pip install pyarrow, or give a .csv"),
        (["--processes", "0"], SPEC, "--processes: expected a whole number from 1 to 2147483647 (got 0)"),
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
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "s.toml").write_text(text)
    assert sweep(*options) == 2
    assert not (tmp_path / "out").exists()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert expected in err
