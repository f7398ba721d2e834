"""The tables of the suite `accuracy` pair seeds, and say how sure a difference is."""

import importlib
import sys
from pathlib import Path

import matplotlib.figure
import pytest

from bench_records import rows, write
from house import ROOT

sys.path.append(str(ROOT))  # bench is not installed; last, so that an installed qgnn is found first
pages = importlib.import_module("bench.pages")
plots = importlib.import_module("bench.plots")
report = importlib.import_module("bench.report")
scores = importlib.import_module("bench.scores")


def test_accuracy_is_compared_seed_by_seed(tmp_path: Path) -> None:
    assert "accuracy" not in dict(pages.regions(tmp_path))
    for seed, (full, quantized) in enumerate([(0.80, 0.81), (0.82, 0.82), (0.84, 0.82)]):
        write(tmp_path, "accuracy", f"cora/gcn/seed{seed}", "pyg fp32", test_acc=full)
        write(tmp_path, "accuracy", f"cora/gcn/seed{seed}", "qgnn int8", test_acc=quantized)
        write(tmp_path, "accuracy", f"cora/gcn/seed{seed}", "qgnn int4", test_acc=full - 0.4 + 0.01 * seed)
    write(tmp_path, "accuracy", "cora/gcn/seed3", "pyg fp32", test_acc=0.5)  # on its own it is no comparison
    write(tmp_path, "accuracy", "cora/gcn/seed4", "qgnn int8", test_acc=0.9)
    write(tmp_path, "accuracy", "cora/gat/seed0", "pyg fp32", test_acc=None, ok=False)
    write(tmp_path, "accuracy", "cora/gat/seed0", "qgnn int8", test_acc=0.5)
    write(tmp_path, "accuracy", "cora/gin/seed0", "pyg csr fp32", test_acc=0.5)
    write(tmp_path, "accuracy", "cora/gin/seed0", "qgnn int8", test_acc=0.48)
    found = dict(pages.regions(tmp_path))
    # Differences 1, 0, -2: mean -1/3, deviation 1.53, over the root of 3, times 4.30; -40, -39, -38: 4.30 times 0.577.
    assert rows(found["accuracy"], "cora") == [
        ["cora", "gcn", "accuracy %", "82.00 ± 2.00", "-0.33 ± 3.79", "", "", "-39.00 ± 2.48", "3"],
        ["cora", "gin", "accuracy %", "50.00", "-2.00", "", "", "", "1"],
    ]
    assert scores.NOTE in found["accuracy"]
    assert rows(found["accuracy:worst"], "qgnn") == [
        ["qgnn int8", "2", "-1.17", "96.0", "cora gin", "0"],
        ["qgnn int4", "1", "-39.00", "52.4", "cora gcn", "1"],
    ]
    text = report.markdown(tmp_path)
    assert rows(text, "cora/gin/seed0", "qgnn")[0][9] == "0.4800"
    assert rows(text, "cora", "gin", "-2.00")


def test_a_difference_of_fewer_seeds_says_so(tmp_path: Path) -> None:
    """The column of fp32 is of all seeds that others have; two times three of them are not the same three."""
    for seed, full in enumerate([0.80, 0.82, 0.84, 0.86, 0.10]):  # the last is compared with nothing
        write(tmp_path, "accuracy", f"cora/gcn/seed{seed}", "pyg fp32", test_acc=full)
        for provider, seeds in (("qgnn int8", (0, 1, 2)), ("qgnn int4", (1, 2, 3)), (scores.KEPT[1], range(4))):
            if seed in seeds:
                write(tmp_path, "accuracy", f"cora/gcn/seed{seed}", provider, test_acc=full - 0.1)
    (line,) = rows(dict(pages.regions(tmp_path))["accuracy"], "cora")
    fewer, all_ = "-10.00 ± 0.00 (n=3)", "-10.00 ± 0.00"
    assert line[3:] == ["83.00 ± 2.58", fewer, all_, "", fewer, "3 to 4"]


def test_a_record_without_a_score_says_nothing(tmp_path: Path) -> None:
    """As a training that diverged left it before that was a failure."""
    for provider, rmse in (("pyg fp32", 0.8), ("qgnn int8", None), ("qgnn int4", 0.9)):
        write(tmp_path, "accuracy", "esol/gcn/seed0", provider, metrics={"rmse": rmse, "best_epoch": 1.0})
        write(tmp_path, "accuracy", "tolokers/gcn/seed0", provider, test_acc=rmse, metrics={"roc_auc": rmse})
    found = dict(pages.regions(tmp_path))
    assert rows(found["accuracy"], "gcn") == [
        ["esol", "gcn", "RMSE", "0.800", "", "", "", "+0.100", "1"],
        ["tolokers", "gcn", "ROC-AUC %", "80.00", "", "", "", "+10.00", "1"],
    ]
    assert [row[0] for row in rows(found["accuracy:worst"], "gcn")] == ["qgnn int4"]


def test_older_records_count_where_there_are_no_others(tmp_path: Path) -> None:
    for model in ("gcn", "gin"):
        write(tmp_path, "accuracy", f"cora/{model}/fp32/seed0", "pyg coo fp32", test_acc=0.5)
        write(tmp_path, "accuracy", f"cora/{model}/int8/seed0", "qgnn int8", test_acc=0.6)
    write(tmp_path, "accuracy", "cora/gcn/seed0", "pyg fp32", test_acc=0.8)
    write(tmp_path, "accuracy", "cora/gcn/seed0", "qgnn int8", test_acc=0.81)
    found = rows(dict(pages.regions(tmp_path))["accuracy"], "cora")
    assert [row[:5] + row[8:] for row in found] == [
        ["cora", "gcn", "accuracy %", "80.00", "+1.00", "1"],
        ["cora", "gin", "accuracy %", "50.00", "+10.00", "1"],
    ]


def test_an_error_is_better_when_it_is_smaller(tmp_path: Path) -> None:
    for seed, (full, quantized) in enumerate([(0.8, 1.0), (0.8, 1.01), (0.8, 0.99)]):
        for provider, rmse in (("pyg fp32", full), ("qgnn int8", quantized), ("qgnn int4", full - 0.1)):
            write(tmp_path, "accuracy", f"esol/gcn/seed{seed}", provider, metrics={"rmse": rmse, "best_epoch": 1.0})
    found = dict(pages.regions(tmp_path))
    assert rows(found["accuracy"], "esol") == [
        ["esol", "gcn", "RMSE", "0.800 ± 0.000", "+0.200 ± 0.025", "", "", "-0.100 ± 0.000", "3"],
    ]
    assert rows(found["accuracy:worst"], "qgnn") == [
        ["qgnn int8", "1", "", "80.0", "esol gcn", "1"],
        ["qgnn int4", "1", "", "114.3", "esol gcn", "0"],
    ]


def test_an_ablation_has_a_line_for_each_set_of_rules(tmp_path: Path) -> None:
    for seed, full in enumerate([0.80, 0.82]):
        case = f"cora/gcn/ablation/seed{seed}"
        write(tmp_path, "accuracy", case, "pyg fp32", test_acc=full)
        write(tmp_path, "accuracy", case, "qgnn stochastic row fp32-last int8", test_acc=full + 0.01)
        write(tmp_path, "accuracy", case, "qgnn nearest tensor all int8", test_acc=full - 0.1)
        write(tmp_path, "accuracy", case, "qgnn nearest tensor all int4", test_acc=full - 0.2)
    found = dict(pages.regions(tmp_path))
    assert "accuracy" not in found
    assert rows(found["accuracy:ablation"], "cora") == [
        ["cora", "stochastic", "row", "fp32", "+1.00 ± 0.00", "", "2"],
        ["cora", "nearest", "tensor", "quantized", "-10.00 ± 0.00", "-20.00 ± 0.00", "2"],
    ]


def test_a_plot_has_a_mark_for_each_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    save = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, *args, **kw: (figures.append(self), save(self, *args, **kw))
    )
    write(tmp_path, "accuracy", "cora/gcn/seed0", "pyg fp32", test_acc=0.8)
    assert plots.write(tmp_path, tmp_path / "plots") == []  # nothing to compare it with
    for seed, full in enumerate([0.80, 0.82], start=1):
        for dataset, model, drop in (("cora", "gcn", 0.01), ("cora", "gat", 0.03), ("pubmed", "gin", 0.02)):
            write(tmp_path, "accuracy", f"{dataset}/{model}/seed{seed}", "pyg fp32", test_acc=full)
            write(tmp_path, "accuracy", f"{dataset}/{model}/seed{seed}", "qgnn int8", test_acc=full - drop)
        write(tmp_path, "accuracy", f"esol/gcn/seed{seed}", "pyg fp32", metrics={"rmse": 0.8})
        write(tmp_path, "accuracy", f"esol/gcn/seed{seed}", "qgnn int8", metrics={"rmse": 0.9})
    write(tmp_path, "device", "copy/1024MiB", "ceiling: copy")
    (path,) = plots.write(tmp_path, tmp_path / "plots")
    assert path.name == "some-cpu-2-threads-accuracy.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    (left,) = figure.axes  # nothing is in int4
    marks = [float(line.get_xdata()[0]) for line in left.lines if line.get_marker() in ("o", "^", "D")]
    assert marks == pytest.approx([-3, -1, -2])  # gat, gcn, gin
    assert [label.get_text() for label in left.get_yticklabels()] == ["cora", "pubmed"]


def test_steps_under_compression_have_a_plot_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {}
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, path, **_: figures.update({path.stem.split("-")[-1]: self})
    )
    for case, kept in (("cora/gcn", 60.0), ("cora/sage/64", 50.0), ("cora/sage/64/budget", 19.0)):
        write(tmp_path, "memory", case, "pyg csr fp32", peak_mib=100.0, saved_mib=kept)
    plots.write(tmp_path, tmp_path / "plots")
    drawn = {
        name: {axes.get_title(): [float(line.get_xdata()[0]) for line in axes.lines] for axes in figure.axes}
        for name, figure in figures.items()
    }
    assert drawn["memory"] == {"cora/gcn": [60.0, 100.0]}
    assert drawn["compression"] == {"cora/sage/64": [50.0, 100.0], "cora/sage/64/budget": [19.0, 100.0]}
    assert [text.get_text().strip() for text in figures["memory"].axes[0].texts] == ["60", "100"]
