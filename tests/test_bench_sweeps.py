"""Tables of the pages of sweeps: what their journals say."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from bench import pages
from qgnn.cli.errors import UsageError
from qgnn.cli.sweep.run_spec import RunSpec

main = importlib.import_module("bench.__main__")

START = {
    "kind": "start",
    "command": "qgnn sweep examples/two.toml --root '/home/me/my data' --table=t.csv --results /tmp/x --processes 2",
    "machine": "A CPU",
    "commit": "0123456789abcdef",
    "dirty": False,
    "device": "cpu",
}


def line(fmt: str, component: str, seed: int, accuracy: float | None, bits: float | None = None) -> str:
    run = RunSpec("cora", "gcn", fmt, component, "none" if bits is None else "sdq[2,8]", "stochastic", seed)
    run = run.baseline if fmt == "fp32" else run
    ended = {"status": "failed", "error": "E"} if accuracy is None else {"status": "done"}
    result = None if accuracy is None else {"test_acc": accuracy, "mean_bits": bits}
    return json.dumps({"kind": "run", "key": run.key, "run": run.fields, **ended, "result": result, "seconds": 30.0})


@pytest.fixture
def results(tmp_path: Path) -> Path:
    lines = [
        json.dumps(START),
        line("int4", "all", 0, 0.70),
        line("int4", "weights", 0, None),
        line("fp32", "none", 0, 0.80),
        line("int4", "weights", 1, 0.81),
        json.dumps(START | {"commit": "fedcba9876543210", "dirty": True}),
        line("int4", "all", 1, 0.72),
        line("int4", "weights", 0, 0.79),
        line("fp32", "none", 1, 0.81),
        line("int8", "all", 0, 0.8, 4.5),
    ]
    (tmp_path / "a-cpu" / "sweeps").mkdir(parents=True)
    (tmp_path / "a-cpu" / "sweeps" / "two.jsonl").write_text("".join(f"{text}\n" for text in lines))
    return tmp_path


def test_what_a_kill_left_of_a_journal_is_no_run(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = dict(pages.regions(results))
    journal = results / "a-cpu" / "sweeps" / "two.jsonl"
    content = journal.read_bytes()
    journal.write_bytes(content + line("int4", "all", 2, 0.1).encode()[:-9])
    assert dict(pages.regions(results)) == whole
    journal.write_bytes(content.replace(b'"run"', b'"ran"', 1))
    with pytest.raises(UsageError, match=r"line 2 of .*two\.jsonl' is none of a sweep's journal"):
        dict(pages.regions(results))
    page = results / "page.md"
    page.write_text("<!-- sweep:two:begin -->\n<!-- sweep:two:end -->\n")
    assert main.main(["report", "--pages", str(page), "--results", str(results)]) == 1
    assert capsys.readouterr().err.startswith("--pages: line 2 of ")


def test_a_sweep_has_a_row_a_format_and_a_column_a_component(results: Path) -> None:
    """Of a run that failed first, what came of it the second time; columns in the order of the components."""
    text = dict(pages.regions(results))["sweep:two"]
    assert text == (
        "| GCN on cora | weights | all |\n"
        "| --- | --- | --- |\n"
        "| int4 | 80.00 ± 1.41 (-0.50 ± 0.50) | 71.00 ± 1.41 (-9.50 ± 0.50) |\n"
        "| int8 sdq[2,8] |  | 80.00 (+0.00) n=1, 4.50 bits |\n\n"
        "fp32: 80.50 ± 0.71\n\n"
        "`qgnn sweep examples/two.toml --root DIR --table FILE --results DIR --processes 2`: 7 runs; test "
        "accuracy in %, mean and deviation over seeds (difference to fp32 and its standard error); A CPU; commit "
        "0123456789ab, commit fedcba987654 (modified); 3 of the 5 differences are between runs of two commits"
    )


def test_machines_and_what_is_compared_across_them_are_named(results: Path) -> None:
    """A run that failed first was compared where it came to an end; one that says more of itself counts as it says."""
    path = results / "a-cpu" / "sweeps" / "two.jsonl"
    lines = path.read_text().splitlines()
    lines[5] = json.dumps(START | {"machine": "B CPU"})
    lines[6] = json.dumps(json.loads(lines[6]) | {"dirty": True})
    path.write_text("".join(f"{text}\n" for text in lines))
    text = dict(pages.regions(results))["sweep:two"]
    assert text.endswith(
        "; A CPU, B CPU; commit 0123456789ab, commit 0123456789ab (modified); 1 of the 5 differences are between runs "
        "of two commits; 3 of the 5 differences are between runs of two machines"
    )


def test_a_page_that_cannot_be_written_stays(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "page.md", Path.open
    text = "\nold\n".join(pages.markers("sweep:two"))
    path.write_text(text)

    def full(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        file = real(self, mode, *args, **options)
        if "w" in mode:
            file.close()  # emptied as it was opened
            raise OSError(28, "No space left on device")
        return file

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(OSError, match="No space left on device"):
            pages.rewrite(path, results)
    assert path.read_text() == text
    pages.rewrite(path, results)
    assert "GCN on cora" in path.read_text()
