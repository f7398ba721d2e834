"""Tables, regions of pages and plots say what the records say."""

import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from house import ROOT

sys.path.append(str(ROOT))  # bench is not installed; last, so that an installed qgnn is found first
main = importlib.import_module("bench.__main__")
plots = importlib.import_module("bench.plots")
provenance = importlib.import_module("qgnn.cli.provenance")
pages = importlib.import_module("bench.pages")
records = importlib.import_module("bench.records")
report = importlib.import_module("bench.report")
summary = importlib.import_module("bench.summary")
tables = importlib.import_module("bench.tables")

STAMP = provenance.Stamp("Some CPU, 2 threads", "0123456789abcdef", False, {"torch": "2.0", "triton": None})
BEGIN, END = pages.markers("bench")
OLD, NEW = "2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00"


def make_record(provider: str, ms: float, utc: str = NEW, **changes: object) -> dict:
    values = {"suite": "unit", "case": "a/b", "provider": provider, "pass": "forward", "median_ms": ms, "p20_ms": ms}
    values |= {"p80_ms": ms, "peak_mib": None, "saved_mib": None, "bytes": 3_000_000, "error": float("nan"), "ok": True}
    return {**records.make_record(STAMP, utc, **values), **changes}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two runs of one case, the older one below; a training step and its memory."""
    unit = [
        make_record("qgnn int8", 2.0),
        make_record("qgnn fp32", 4.0),
        make_record("torch fp32", 6.0),
        make_record("pyg coo fp32", 8.0),
        make_record("torch bf16", 3.0),
        make_record("ceiling: copy", 1.0),
        make_record("broken fp32", 1.0, ok=False, median_ms=None),
        make_record("torch fp32", 100.0, OLD),
    ]
    records.append(tmp_path / "results" / STAMP.machine / "unit.jsonl", unit)
    step = {"suite": "train", "case": "cora/gcn", "pass": "step"}
    train = [make_record("qgnn int8", 10.0, **step), make_record("pyg coo fp32", 25.0, **step)]
    records.append(tmp_path / "results" / STAMP.machine / "train.jsonl", train)
    step["suite"] = "memory"
    memory = [
        make_record("qgnn int8", 11.0, **step, peak_mib=100.0, saved_mib=50.0),
        make_record("pyg coo fp32", 12.0, **step, peak_mib=4000.0, saved_mib=80.0),
        make_record("broken", 1.0, **step, ok=False, median_ms=None),
    ]
    records.append(tmp_path / "results" / STAMP.machine / "memory.jsonl", memory)
    return tmp_path / "results"


def cells(text: str, *words: str) -> list[list[str]]:
    found = [line for line in text.splitlines() if all(word in line for word in words)]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in found]


def test_records_survive_the_file(tmp_path: Path) -> None:
    lines = [make_record("x", 1.0, provenance.now()), make_record("y", 2.0, provenance.now())]
    for line in lines:
        records.append(tmp_path / STAMP.machine / "unit.jsonl", [line])
    assert list(records.read(tmp_path)) == [("some-cpu-2-threads", line) for line in lines]
    assert lines[0]["error"] is None  # not a number in JSON either


def test_report_divides_within_the_newest_run_only(results: Path) -> None:
    text = report.markdown(results)
    assert "## some-cpu-2-threads" in text
    assert "commit 0123456789ab; torch 2.0" in text
    table = cells(text, "a/b")
    providers = ["ceiling: copy", "qgnn int8", "torch bf16", "qgnn fp32", "torch fp32", "pyg coo fp32", "broken fp32"]
    assert [line[2] for line in table] == providers
    # Against the best fp32, and the best bf16, that is not ours.
    assert [line[-2] for line in table] == ["6.00", "3.00", "2.00", "1.50", "1.00", "0.75", ""]
    assert [line[-1] for line in table] == ["3.00", "1.50", "1.00", "0.75", "0.50", "0.38", ""]
    assert table[1][5] == "1.5"  # GB/s
    assert table[-1][3] == "FAILED"
    assert report.compact(results, "2026-01-03") == "no records"
    assert "unit  a/b  forward\n  ceiling: copy" in report.compact(results, "2026-01-02")


def test_a_report_of_a_time_has_a_table_a_machine(tmp_path: Path) -> None:
    """The same case of the same moment: neither hides the other, and no ratio is of both."""
    for machine, ours, theirs in (("A CPU", 2.0, 6.0), ("B CPU", 4.0, 20.0)):
        group = [make_record(name, ms, device=machine) for name, ms in (("qgnn int8", ours), ("torch fp32", theirs))]
        group.append(make_record("ceiling: copy", ours, device=machine, suite="device", case="copy/1MiB"))
        records.append(tmp_path / machine / "unit.jsonl", group)
    first, second = report.compact(tmp_path, NEW).split("\n\n")
    for text, machine, copy, line in (
        (first, "A CPU", "1.5", "qgnn int8 +2 .*3.00"),
        (second, "B CPU", "0.75", "qgnn int8 +4 .*5.00"),
    ):
        assert text.startswith(f"{machine}; commit 0123456789ab; torch 2.0; a copy reads and writes {copy} GB/s")
        assert re.search(line, text)


def test_region_has_a_line_a_case(results: Path) -> None:
    text = summary.region(results)
    assert text.startswith("**some-cpu-2-threads**: Some CPU, 2 threads; commit 0123456789ab; torch 2.0\n")
    (line,) = cells(text, "unit a/b")
    assert line == ["unit a/b", "forward", "2", "4", "torch fp32", "6", "8", "3.00x", "4.00x"]
    (line,) = cells(text, "train cora/gcn")
    assert line == ["train cora/gcn", "step", "10", "", "pyg coo fp32", "25", "25", "2.50x", "2.50x"]
    memory = [line for line in cells(text, "cora/gcn") if line[0] == "cora/gcn"]
    assert memory == [
        ["cora/gcn", "qgnn int8", "100", "50"],  # no times: those of processes of their own do not compare
        ["cora/gcn", "pyg coo fp32", "4000", "80"],
        ["cora/gcn", "broken", "failed", ""],
    ]
    assert text.index("train cora/gcn") < text.index("<details>") < text.index("unit a/b")


def test_region_names_no_machine_and_no_commit_without_a_row(results: Path) -> None:
    elsewhere = {"suite": "threshold", "case": "cora/gcn/int/8", "pass": "step", "commit": "fedcba9876543210"}
    for machine in (STAMP.machine, "another-cpu"):
        records.append(results / machine / "threshold.jsonl", [make_record("qgnn int8", 1.0, **elsewhere)])
    text = summary.region(results)
    assert "another-cpu" not in text
    assert "fedcba" not in text
    assert f"**{STAMP.machine}**" in text


def test_region_does_not_hide_a_failure_of_ours(tmp_path: Path) -> None:
    group = [make_record("qgnn int8", 1.0, ok=False, median_ms=None), make_record("torch fp32", 6.0)]
    records.append(tmp_path / STAMP.machine / "unit.jsonl", group)
    (line,) = cells(summary.region(tmp_path), "unit a/b")
    assert line == ["unit a/b", "forward", "failed", "", "torch fp32", "6", "", "", ""]


def test_layers_have_a_table_of_their_own(results: Path) -> None:
    layer = {"suite": "layer", "case": "arxiv/synthetic/gat-layer/4x64", "pass": "step"}
    group = [make_record("qgnn int8", 2.0, **layer), make_record("qgnn fp32", 3.0, **layer)]
    group += [make_record("pyg coo fp32", 10.0, **layer), make_record("pyg coo bf16", 7.0, **layer)]
    group += [make_record("pyg csr fp32", 9.0, **layer), make_record("torch csr both ways fp32", 5.0, **layer)]
    records.append(results / STAMP.machine / "layer.jsonl", group)
    found = dict(pages.regions(results))
    (line,) = cells(found["layer"], "4x64")
    ratios = ["5.00x", "4.50x", "2.50x"]
    assert line == ["arxiv/synthetic", "gat 4x64", "2", "3", "10", "9", "7", "torch csr both ways fp32", "5", *ratios]
    assert "gat-layer" not in found["bench"]


def test_the_distribution_has_a_table_without_times(results: Path, capsys: pytest.CaptureFixture) -> None:
    metrics = {"ks": 0.0123, "ks_uniform": 0.25, "js_bits": 0.001, "js_uniform_bits": 0.125, "uniform_ratio": 1.0}
    metrics |= {"optimal_ratio": 0.9, "gain": 0.25, "predicted_gain": 0.1616, "q05_off": 0.01}
    values = {"suite": "distribution", "case": "wordnet/sage/norms.0/plain/G512", "metrics": metrics}
    path = results / STAMP.machine / "distribution.jsonl"
    failed = make_record(
        "qgnn int2", 1.0, **values | {"case": "wordnet/gat/norms.0/plain/G16", "metrics": None}, ok=False
    )
    records.append(path, [make_record("qgnn int2", 1.0, **values), failed | {"median_ms": None}])
    expected = ["0.012", "0.250", "0.001", "0.125", "1.00x", "0.90x", "25.0 %", "16.2 %"]
    (line,) = [line for line in cells(report.markdown(results), "wordnet/sage/norms.0/plain") if line[1] == "512"]
    assert line == ["wordnet/sage/norms.0/plain", "512", *expected]
    assert "norms.0" not in summary.region(results)
    report.show([record for _, record in records.read(results)])
    assert re.search(rf"norms.0/plain +512 +{' +'.join(expected)}".replace(".", r"\."), capsys.readouterr().out)


def test_best_rival_of_what_has_none_in_fp32_is_any_but_the_ceiling() -> None:
    group = [make_record("qgnn int2", 1.0), make_record("torch eager int2", 5.0), make_record("ceiling: copy", 0.5)]
    (line,) = summary.lines([group])
    assert (line.quantized["provider"], line.full, line.rival["provider"]) == ("qgnn int2", None, "torch eager int2")


def test_passes_on_constant_rows_have_a_table_without_ratios(results: Path) -> None:
    warm = {"pass": "warm"}
    group = [make_record("qgnn int8", 1.0, **warm), make_record("qgnn fp32", 3.0, **warm)]
    group += [make_record("torch csr fp32", 4.0, **warm), make_record("pyg coo fp32", 5.0, **warm)]
    records.append(results / STAMP.machine / "unit.jsonl", group)
    before, title, after = summary.region(results).partition(summary.CONSTANT_TITLE)
    assert "quantization is left out" in title
    assert "warm" not in before
    assert [line[:2] for line in cells(before, "unit a/b")] == [["unit a/b", "forward"]]
    (header,), (line,) = cells(after, "quantization left out |"), cells(after, "unit a/b")
    assert header == list(summary.CONSTANT)
    assert line == ["unit a/b", "1", "3", "torch csr fp32", "4"]
    assert [row[-2:] for row in report.rows(group)] == [("", "")] * 4  # the full tables divide neither


def test_times_of_processes_of_their_own_are_not_divided(results: Path) -> None:
    memory = [line for line in cells(report.markdown(results), "cora/gcn", "step") if line[6]]
    assert [line[2:4] for line in memory] == [["qgnn int8", "11"], ["pyg coo fp32", "12"]]
    assert [line[-2:] for line in memory] == [["", ""]] * 2


def test_pairs_of_providers_that_sentences_rest_on(tmp_path: Path) -> None:
    case = {"case": "a/mostly-zero", "pass": "warm"}
    group = [make_record("qgnn int8", 2.0, **case), make_record("qgnn all-multiplied int8", 9.0, **case)]
    group += [make_record("torch fp32", 6.0, **case, ok=False, median_ms=None)]
    records.append(tmp_path / STAMP.machine / "unit.jsonl", group)
    _, title, text = summary.region(tmp_path).partition(summary.AGAINST_TITLE)
    assert title
    assert summary.AGAINST_NOTE in text
    case["case"] = "a/codes-in"
    group = [
        make_record("onednn.qlinear int8", 2.0, **case, ok=False, median_ms=None),
        make_record("torch fp32", 6.0, **case),
    ]
    assert [row[2:] for row in summary.pairs(group)] == [("onednn.qlinear int8", "failed", "torch fp32", "6", "")]
    start = ["unit a/mostly-zero", "warm"]
    assert cells(text, "unit a/mostly-zero") == [
        [*start, "qgnn int8", "2", "qgnn all-multiplied int8", "9", "4.50x"],
        [*start, "qgnn all-multiplied int8", "9", "torch fp32", "failed", ""],
    ]


def test_provenance_names_the_suites_of_each_commit() -> None:
    def group(suite: str, commit: str | None, **changes: object) -> list[dict]:
        return [make_record("qgnn int8", 1.0, suite=suite, commit=commit, **changes)]

    one = summary.provenance([group("spmm", "a" * 40), group("matmul", "a" * 40)])
    assert one == "Some CPU, 2 threads; commit aaaaaaaaaaaa; torch 2.0"
    groups = [group("spmm", "a" * 40), group("matmul", "a" * 40), group("matmul", "b" * 40, dirty=True)]
    assert summary.commit_of(groups[0][0] | {"dirty": None}) == "aaaaaaaaaaaa (perhaps modified)"
    several = summary.provenance([*groups, group("blocks", None)])
    commits = "aaaaaaaaaaaa (spmm, matmul in part), bbbbbbbbbbbb (modified) (matmul in part), unknown (blocks)"
    assert several == f"Some CPU, 2 threads; commits {commits}; torch 2.0"


def write_trained(results: Path, name: str, **changes: object) -> None:
    """What ``qgnn train --json`` writes, as far as README shows it."""
    run = {"compress": "none", "saved_mib": 1.5, "peak_mib": 100.0}
    runs = [
        {**run, "precision": "fp32", "seed": 0, "test_acc": 0.80, "epoch_ms": 30.0},
        {**run, "precision": "fp32", "seed": 1, "test_acc": 0.82, "epoch_ms": 30.0},
        {**run, "precision": "int8", "seed": 0, "test_acc": 0.79, "epoch_ms": 12.0},
    ]
    result = {"command": f"qgnn train --dataset {name}", "machine": STAMP.device, "commit": STAMP.commit, "runs": runs}
    path = results / STAMP.machine / f"train-{name}.json"
    path.write_text(json.dumps({**result, "dirty": False, "recipe": {"epochs": 20}, **changes}))


def test_train_region_is_what_the_command_printed(results: Path) -> None:
    write_trained(results, "photo")
    write_trained(results, "cora", dirty=True)
    found = dict(pages.regions(results))
    assert list(found) == ["bench", "roofline", "train:cora", "train:photo"]
    text = found["train:photo"]
    assert cells(text, "fp32") == [["fp32 (PyG)", "81.00 ± 1.41", "30.0", "1.50", "100", "1.00x"]]
    assert cells(text, "int8") == [["int8 (qgnn)", "79.00", "12.0", "1.50", "100", "2.50x"]]
    effort = "2 seeds (± is their standard deviation), 20 epochs"
    assert text.endswith(f"\n\n`qgnn train --dataset photo`: {effort}; Some CPU, 2 threads; commit 0123456789ab")
    assert found["train:cora"].endswith("commit 0123456789ab (modified)")


def test_sass_region_has_a_line_a_main_case(results: Path) -> None:
    cases = importlib.import_module("bench.sass.cases")
    code = {"stack": 0, "registers": 96, "unit": "value", "per_element": {"total": 16.26, "imul": 1.5, "f2i": 1.0}}
    origin = {"versions": {"triton": "3.9.0"}, "commit": STAMP.commit, "dirty": False}
    lines = [
        {"case": f"{case}/sm_{arch}", "kernel": "_a_kernel", **code, "registers": registers, **origin}
        for case in (*cases.MAIN, "quantize/fp32/F100")
        for arch, registers in ((80, 64), (90, 96), (100, 128))
    ]
    (results / "sass").mkdir()
    (results / "sass" / "triton-3.9.0.json").write_text("\n".join(map(json.dumps, lines)))
    text = dict(pages.regions(results))["sass"]
    assert "| quantize/fp32/F128 | `_a_kernel` | 64 / 96 / 128 | 0 | 16.3 per value | 1.50 | 1.00 |" in text
    assert "F100" not in text
    assert text.endswith("`python -m bench sass --json FILE`: Triton 3.9.0; commit 0123456789ab")
    (results / "sass" / "triton-3.9.0.json").write_text("\n".join(map(json.dumps, lines[3:])))
    with pytest.raises(ValueError, match=re.escape(f"no records of {[lines[0]['case'].rpartition('/')[0]]}")):
        dict(pages.regions(results))


def test_roofline_region_is_the_table_of_a_layer(results: Path) -> None:
    text = dict(pages.regions(results))["roofline"]
    steps = importlib.import_module("bench.steps")
    header, *rows = steps.by_purpose(dict(steps.cases()))
    assert cells(text, "purpose") == [list(header)]
    assert cells(text, "all") == [list(rows[-1])]
    assert text.endswith("`python -m bench roofline`: arxiv/gcn-layer/256, floors of an H100")


def test_a_command_is_shown_without_the_places_of_its_machine(results: Path) -> None:
    write_trained(results, "photo", command="qgnn train --root /home/me/data --seeds 2 --json=/scratch/a.json")
    text = dict(pages.regions(results))["train:photo"]
    assert "\n\n`qgnn train --root DIR --seeds 2 --json FILE`: 2 seeds" in text


def test_a_page_is_rewritten_between_its_markers_only(results: Path, tmp_path: Path) -> None:
    write_trained(results, "photo")
    write_trained(results, "cora")  # without markers: not shown
    begin, end = pages.markers("train:photo")
    path = tmp_path / "README.md"
    path.write_text(f"before\n{begin}\n{end}\nbetween\n{BEGIN}\nold\n{END}\nafter\n")
    text = dict(pages.regions(results))
    expected = f"before\n{begin}\n{text['train:photo']}\n{end}\nbetween\n{BEGIN}\n{text['bench']}\n{END}\nafter\n"
    for _ in range(2):
        assert main.main(["report", "--results", str(results), "--pages", str(path)]) == 0
        assert path.read_text() == expected


ONE_PAIR = "expected one pair of lines '<!-- {0}:begin -->' and '<!-- {0}:end -->'"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected markers such as '<!-- bench:begin -->' (got none)"),
        (BEGIN, ONE_PAIR.format("bench")),
        (END, ONE_PAIR.format("bench")),
        (f"{END} {BEGIN}", ONE_PAIR.format("bench")),
        (f"{END} {BEGIN} {END}", ONE_PAIR.format("bench")),
        (f"{BEGIN} {END} {END}", ONE_PAIR.format("bench")),
        (f"{BEGIN} {END} <!-- train:photo:begin -->", ONE_PAIR.format("train:photo")),
        (f"{BEGIN} {END} <!-- train:photo:end -->", ONE_PAIR.format("train:photo")),
        (
            f"{BEGIN} {END} <!-- train:foto:begin --> <!-- train:foto:end -->",
            "'<!-- train:foto:begin -->' expects one of bench, roofline, train:photo; no record in",
        ),
    ],
)
def test_a_page_without_pairs_of_markers_is_left_alone(
    text: str, message: str, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_trained(results, "photo")
    path = tmp_path / "README.md"
    path.write_text(text)
    assert main.main(["report", "--results", str(results), "--pages", str(path)]) == 1
    assert path.read_text() == text
    assert f"--pages: {path}: {message}" in capsys.readouterr().err


def test_pages_show_what_the_committed_records_give() -> None:
    """Failing: run ``python -m bench report --pages``."""
    text = "".join(page.read_text(encoding="utf-8") for page in pages.PAGES)
    for name, region in pages.regions(records.RESULTS):
        begin, end = pages.markers(name)
        assert text.count(begin) == text.count(end) == 1, f"{name} is missing, or on two pages"
        assert f"{begin}\n{region}\n{end}" in text, f"{name} is not what its records say"
        text = text.replace(region, "")
    others = [line for line in text.splitlines() if line.startswith("|")]  # of words alone
    assert not [line for line in others if re.search(r"\d\.\d|\d ?(ms|%|x|MiB)\b", line)], "figures that no record made"


def test_plots_are_drawn(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main.main(["report", "--results", str(results), "--plots", str(tmp_path / "plots")]) == 0
    written = sorted((tmp_path / "plots").iterdir())
    names = [path.name.removeprefix("some-cpu-2-threads-") for path in written]
    assert names == ["memory.png", "primitives.png", "steps.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert "some-cpu-2-threads-steps.png" in capsys.readouterr().out


def test_plots_show_the_factors(results: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn = {}

    def figure_of(draw: Any, panels: Any, device: str) -> SimpleNamespace:
        return SimpleNamespace(savefig=lambda path, dpi: drawn.update({path.stem: panels}))

    monkeypatch.setattr(plots, "_panels", figure_of)
    warm = [make_record("qgnn int8", 1.0, **{"pass": "warm"}), make_record("torch fp32", 4.0, **{"pass": "warm"})]
    records.append(results / STAMP.machine / "unit.jsonl", warm)  # without quantization: no bar
    plots.write(results, tmp_path)
    primitives, steps = (drawn[f"some-cpu-2-threads-{name}"][plots.SPEED] for name in ("primitives", "steps"))
    assert [plots._factors(line) for line in primitives] == [{"quantized": 3.0, "full": 1.5}]
    assert [plots._factors(line) for line in steps] == [{"quantized": 2.5}]
    ((case, found),) = drawn["some-cpu-2-threads-memory"].items()
    assert [record["provider"] for record in found] == ["qgnn int8", "pyg coo fp32"]
    assert {record["case"] for record in found} == {case}


def test_shares_of_a_copy_are_shown_where_one_was_measured_in_the_run(results: Path) -> None:
    machine = results / STAMP.machine
    assert "of a copy" not in report.compact(results, NEW)
    copy = {"suite": "device", "case": "copy/1024MiB", "bytes": 6_000_000}
    records.append(machine / "device.jsonl", [make_record("ceiling: copy", 1.0, OLD, **copy)])
    assert "(" not in report.compact(results, NEW).partition("\n")[2]  # that of another run does not count
    records.append(machine / "device.jsonl", [make_record("ceiling: copy", 2.0, **copy)])
    first, _, table = report.compact(results, NEW).partition("\n")
    assert first.endswith("; a copy reads and writes 3 GB/s, shares of it in brackets")
    assert cells(table, "qgnn int8", "1.5 (50%)")  # 3 MB in 2 ms
    assert "%" not in report.markdown(results)


def test_what_the_machine_allows_is_no_line_of_the_pages(results: Path) -> None:
    before = summary.region(results)
    record = make_record("ceiling: int8", 1.0, suite="device", case="matmul/8192x8192x8192")
    records.append(results / STAMP.machine / "device.jsonl", [record])
    assert summary.region(results) == before
