"""The benchmarks still run: the GPU script rehearsed on the CPU with every suite, and the command line."""

import importlib
import json
import os
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

import qgnn
from house import ROOT

sys.path.append(str(ROOT))  # bench is not installed; last, so that an installed qgnn is found first
inputs = importlib.import_module("bench.suites.inputs")
main = importlib.import_module("bench.__main__")
matmul = importlib.import_module("bench.suites.matmul")
provenance = importlib.import_module("qgnn.cli.provenance")
recipe = importlib.import_module("qgnn.cli.recipe")
records = importlib.import_module("bench.records")
sanitize = importlib.import_module("bench.sanitize")
sass_cases = importlib.import_module("bench.sass.cases")
suites = importlib.import_module("bench.suites")


def gpu_script(out: Path, test: Path | str, suites: str, **variables: str) -> subprocess.CompletedProcess:
    """bench/gpu.sh as on a machine without a GPU, with one small test file in place of the kernels' tests."""
    environment = {**os.environ, "PYTHON": sys.executable, "TESTS": str(test), "CUDA_VISIBLE_DEVICES": "", **variables}
    environment |= {"SUITES": suites, "OMP_NUM_THREADS": "1"}  # tiny shapes: threads would only wait for each other
    command = ["bash", str(ROOT / "bench" / "gpu.sh"), str(out), "1800"]  # seconds: a busy machine must not end it
    return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess, Path]:
    folder = tmp_path_factory.mktemp("rehearsal")
    test = folder / "test_small.py"
    test.write_text("def test_passes(): pass\n")
    return gpu_script(folder / "out", test, f"{','.join(suites.SUITES)} sanitize"), folder / "out"


def test_rehearsal_passes_and_ends_in_the_table(rehearsal: tuple[subprocess.CompletedProcess, Path]) -> None:
    result, _ = rehearsal
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed" in result.stdout
    table, last = result.stdout.strip().rsplit("\n", 1)
    assert last.startswith("all passed in ")
    assert "FAILED" not in table
    assert re.search(r"^== sanitize: exit status 0 .*\n.*\n\d+ cases ran$", table, re.MULTILINE)
    assert re.search(r"; a copy reads and writes \S+ GB/s", table)
    assert re.search(r"^  ceiling: copy .* \(100%\)", table, re.MULTILINE)
    for suite in suites.SUITES:
        assert re.search(rf"^{suite}  \S+  (forward|backward|step|warm)\n  .*\d", table, re.MULTILINE)


def suite_records(rehearsal: tuple[subprocess.CompletedProcess, Path], suite: str) -> list[dict]:
    (path,) = rehearsal[1].glob(f"*/{suite}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


KEEPING = (
    "layer",
    "train",
    "attention",
    "activation",
    "optimizer",
    "memory",
    "blocksize",
)  # suites that count kept bytes


@pytest.mark.parametrize("suite", suites.SUITES)
def test_rehearsal_writes_whole_records(rehearsal: tuple[subprocess.CompletedProcess, Path], suite: str) -> None:
    (path,) = rehearsal[1].glob(f"*/{suite}.jsonl")
    for record in suite_records(rehearsal, suite):
        around_pyg = suite == "memory" and " pyg " in record["provider"]
        in_format = suite == "memory" and record["case"].endswith("/formats")
        of_two = "two processes" in record["provider"]
        has_metrics = suite in ("accuracy", "blocksize", "distribution", "scale", "threshold")
        has_metrics |= around_pyg or in_format or of_two
        trains = suite in ("accuracy", "distributed", "threshold") or (
            suite == "optimizer" and "/seed" in record["case"]
        )
        more = ["test_acc"] * trains + ["metrics"] * has_metrics
        assert tuple(record) == (*records.FIELDS, *more)
        assert 0 <= record.get("test_acc", 0) <= 1
        assert record["ok"] is True
        assert record["suite"] == suite
        assert record["pass"] in ("forward", "backward", "step", "warm")
        assert 0 < record["p20_ms"] <= record["median_ms"] <= record["p80_ms"]
        is_coarse = "gatv2-layer" in record["case"] or re.search("msfp12|int4$", record["provider"])
        assert 0 <= record["error"] < (0.3 if is_coarse else 0.15)
        assert re.sub(r"[^a-z0-9]+", "-", record["device"].lower()) == path.parent.name
        assert {"python", "qgnn", "torch", "torch_geometric", "triton"} <= set(record["versions"])
        assert datetime.fromisoformat(record["utc"]).utcoffset().total_seconds() == 0
        assert (record["saved_mib"] is not None) == (suite in KEEPING)
        in_processes = suite in ("memory", "scale")  # a CPU counts it for a whole process only
        assert (record["peak_mib"] is not None) == in_processes


ALONE = ("device", "distributed", "distribution", "threshold")  # suites without a rival


@pytest.mark.parametrize("suite", [suite for suite in suites.SUITES if suite not in ALONE])
def test_every_case_has_ours_and_a_rival(rehearsal: tuple[subprocess.CompletedProcess, Path], suite: str) -> None:
    providers: dict[tuple[str, str], set[str]] = {}
    for record in suite_records(rehearsal, suite):
        if "/adamw" in record["case"]:  # of libraries alone
            continue
        case = re.sub("/(fp32|int8)/seed", "/seed", record["case"])  # a case of `accuracy` is the run of one of them
        providers.setdefault((case, record["pass"]), set()).add(record["provider"])
    for names in providers.values():
        assert any(name.startswith("qgnn") for name in names)
        assert any(not name.startswith(("qgnn", "ceiling")) for name in names)


def test_memory_of_a_step_holds_what_it_keeps(rehearsal: tuple[subprocess.CompletedProcess, Path]) -> None:
    for record in suite_records(rehearsal, "memory"):
        assert record["peak_mib"] > record["saved_mib"] > 0.05


@pytest.mark.parametrize(
    ("tool", "status", "said"),
    [
        (None, 0, "compute-sanitizer: not on this machine, memory accesses were not checked"),
        ('echo "$*"', 0, "-m bench.sanitize"),
        ("echo Invalid __global__ write; exit 86", 1, "failed: sanitize (exit status 86)"),
    ],
)
def test_script_uses_the_sanitizer_where_it_is(tmp_path: Path, tool: str | None, status: int, said: str) -> None:
    """On what says that it has a GPU: a python that answers so, and a stand-in for the tool, or none."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\n[[ "$2" == *is_available* ]] && echo cuda && exit\nexec {sys.executable} "$@"\n')
    sanitizer = tmp_path / "sanitizer"
    sanitizer.write_text(f"#!/bin/bash\n{tool}\n")
    for path in (python, sanitizer):
        path.chmod(0o755)
    variables = {"PYTHON": str(python), "SANITIZER": "" if tool is None else str(sanitizer)}
    result = gpu_script(tmp_path / "out", "", "sanitize", **variables)
    assert result.returncode == status, result.stdout + result.stderr
    assert said in result.stdout


def test_the_sanitizer_sees_the_sums_of_hubs() -> None:
    """The second kernel of an aggregation is launched whenever there may be a hub, and does nothing without one."""
    launched: list[tuple[str, int]] = []
    cases = sass_cases.make_cases(torch.device("cpu"), sanitize.NUM_ROWS)

    def record(kernel: InterpretedFunction, *args: object, counts_ptr: object = None, **kwargs: object) -> None:
        if counts_ptr is not None:
            launched.append((kernel.fn.__name__, int(counts_ptr[1])))

    with patch.object(InterpretedFunction, "run", record):
        for name in sorted(sass_cases.MAIN):
            cases[name]()
    assert {name for name, num_hubs in launched if num_hubs} >= {"_spmm_hubs_kernel", "_spmm_extremum_hubs_kernel"}


# Machines to measure on may have none of these.
OPTIONAL = ("rich", "scipy", "matplotlib", "torch_scatter", "torch_sparse", "torchao", "dgl", "ogb", "pandas", "xdist")
PROBE = f"""
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys({OPTIONAL}))
import bench
for module in pkgutil.walk_packages(bench.__path__, "bench."):
    if module.name not in ("bench.sass.__main__", "bench.__main__"):
        importlib.import_module(module.name)
from bench.__main__ import main
sys.exit(main(["softmax", "--device", "cpu", "--quick"]))
"""


def test_suites_need_no_optional_package() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((*sys.path, str(ROOT)))}
    result = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "torch_scatter fp32: not available" in result.stderr


def test_the_cache_is_read_whole_by_every_program() -> None:
    read_l2 = importlib.import_module("bench.read_l2")
    x = torch.randn(3 * read_l2.BLOCK)
    assert torch.allclose(read_l2.read(x, 5), x.sum().expand(5), rtol=0, atol=1e-6 * float(x.abs().sum()))


def test_script_reports_a_failed_test(tmp_path: Path) -> None:
    test = tmp_path / "test_small.py"
    test.write_text("def test_fails(): assert False\n")
    result = gpu_script(tmp_path / "out", test, "")
    assert result.returncode == 1
    assert "test_fails" in result.stdout
    assert result.stdout.rstrip().endswith("failed: tests (exit status 1)")


def test_command_line_rejects_what_it_cannot_do(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main.torch.cuda, "is_available", lambda: False)
    for arguments, message in (
        (["spmm", "--device", "cuda"], "torch sees no CUDA device here; use --device cpu"),
        (["spmm", "report"], "'report' stands alone"),
        (["nonsense"], "invalid choice: 'nonsense'"),
    ):
        with pytest.raises(SystemExit) as exit_:
            main.main(arguments)
        assert exit_.value.code == 2
        assert message in capsys.readouterr().err


def test_a_run_records_only_where_it_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(main, "RESULTS", tmp_path / "results")
    arguments = ["softmax", "--device", "cpu", "--quick", "--json", str(tmp_path / "run.json")]
    for _ in range(2):  # the file of a run holds that run alone
        assert main.main(arguments) == 0
    written = [json.loads(line) for line in (tmp_path / "run.json").read_text().splitlines()]
    assert {record["provider"] for record in written} >= {"qgnn fp32", "pyg coo fp32"}
    assert len({(record["case"], record["pass"], record["provider"]) for record in written}) == len(written)
    assert not (tmp_path / "results").exists()  # quick numbers are no results
    assert main.main([*arguments, "--results", str(tmp_path / "elsewhere")]) == 0
    assert list((tmp_path / "elsewhere").glob("*/softmax.jsonl"))
    assert "softmax  arxiv/synthetic/x0.005/H4/" in capsys.readouterr().out


def test_a_run_measures_the_cases_that_are_asked_for(tmp_path: Path) -> None:
    prefix = "arxiv/synthetic/x0.005/H4/edge"
    assert main.main(["softmax", "--quick", "--case", prefix, "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*/softmax.jsonl")
    cases = [json.loads(line)["case"] for line in path.read_text().splitlines()]
    assert set(cases) == {f"{prefix}_softmax"}


def test_a_run_whose_checkout_changes_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stamps of the start and of the first case agree; a commit comes before the second case ends."""
    before = provenance.Stamp("Some CPU", "a" * 40, False, {"torch": "2.0"})
    after = provenance.Stamp("Some CPU", "b" * 40, False, {"torch": "2.0"})
    stamps = iter([before, before])
    monkeypatch.setattr(provenance, "make_stamp", lambda device: next(stamps, after))
    options = ["--device", "cpu", "--quick", "--results", str(tmp_path), "--json", str(tmp_path / "run.json")]
    assert main.main(["softmax", *options]) == 0
    for path in (tmp_path / "some-cpu" / "softmax.jsonl", tmp_path / "run.json"):
        written = [json.loads(line) for line in path.read_text().splitlines()]
        cases = list(dict.fromkeys((record["case"], record["pass"]) for record in written))
        assert len(cases) > 1
        for record in written:
            assert record["commit"] == before.commit
            assert record["dirty"] is ((record["case"], record["pass"]) != cases[0])


@pytest.mark.parametrize(
    ("dirty", "commit", "options", "reason"),
    [
        (False, "a", [], "--quick without --results keeps no records"),
        (True, "a", ["--results"], "the code is not that of a commit"),
        (None, "a", ["--results"], "the code is not that of a commit"),
        (None, None, ["--results"], "the code is not that of a commit"),
        (False, "a", ["--results"], None),
    ],
)
def test_a_run_that_cannot_leave_out_what_was_measured_says_so(
    dirty: bool | None,
    commit: str | None,
    options: list[str],
    reason: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    stamp = provenance.Stamp("Some CPU", commit, dirty, {"torch": "2.0"})
    monkeypatch.setattr(provenance, "make_stamp", lambda device: stamp)
    monkeypatch.setattr(main, "cases", lambda suite, setting: iter(()))
    arguments = ["softmax", "--device", "cpu", "--quick", *options, *([str(tmp_path)] if options else [])]
    assert main.main(arguments) == 0
    assert capsys.readouterr().err == ""
    assert main.main([*arguments, "--resume"]) == 0
    assert capsys.readouterr().err == (f"--resume: {reason}, so that every case is measured\n" if reason else "")


@pytest.mark.parametrize("pass_", ["forward", "warm", "backward"])
def test_zeros_are_skipped_by_the_one_and_multiplied_by_the_other(pass_: str) -> None:
    features = matmul._MostlyZero(589, 512, 48, inputs.Setting(torch.device("cpu"), quick=True))
    engines = {}
    for provider in features.providers(pass_):
        with qgnn.trace(error=False) as record:
            provider.setup().run()
        op = record.ops.get("matmul.backward_dw" if pass_ == "backward" else "matmul.forward")
        engines[provider.name] = op and (op["format"], op["backend"].rpartition("/")[2])
    product = "torch._int_mm" if torch.cpu._is_vnni_supported() and pass_ != "backward" else "torch.mm(fp32)"
    assert engines.pop("qgnn int8") == ("int8", "nonzeros")
    assert engines.pop("qgnn all-multiplied int8") == ("int8", product)
    assert engines == dict.fromkeys(["torch fp32", *(["torch.sparse csr fp32"] if pass_ != "forward" else [])])


def test_features_are_as_wide_and_as_sparse_as_wordnet() -> None:
    x = qgnn.data.load("wordnet", None).x
    assert tuple(x.shape) == matmul.WORDNET_SHAPE[:2]
    assert recipe.WORDNET.hidden == matmul.WORDNET_SHAPE[2]
    assert float(x.mean()) == pytest.approx(matmul.WORDNET_DENSITY, rel=1e-3)


def test_a_suite_that_cannot_make_its_inputs_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    real = main.cases

    def cases(suite: str, setting: object) -> object:
        if suite == "spmm":
            raise MemoryError("too large")
        yield from real(suite, setting)

    monkeypatch.setattr(main, "cases", cases)
    path = tmp_path / "run.json"
    assert main.main(["spmm", "softmax", "--device", "cpu", "--quick", "--json", str(path)]) == 1
    assert {json.loads(line)["suite"] for line in path.read_text().splitlines()} == {"softmax"}
    assert "broken suites: spmm" in capsys.readouterr().err
