"""The benchmarks still run: the GPU script rehearsed on the CPU, and the harness on providers that are wrong."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest
import torch

from house import ROOT

sys.path.append(str(ROOT))  # bench is not installed; last, so that an installed qgnn is found first
harness = importlib.import_module("bench.harness")
records = importlib.import_module("bench.records")
report = importlib.import_module("bench.report")
clock = importlib.import_module("bench.clock")

CPU = torch.device("cpu")
STAMP = records.Stamp("Some CPU, 2 threads", "0123456789abcdef", False, {"torch": "2.0"})


def gpu_script(out: Path, test: Path, suites: str) -> subprocess.CompletedProcess:
    """bench/gpu.sh as on a machine without a GPU, with one small test file in place of the kernels' tests."""
    environment = {**os.environ, "PYTHON": sys.executable, "TESTS": str(test), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"SUITES": suites, "OMP_NUM_THREADS": "1"}  # tiny shapes: threads would only wait for each other
    command = ["bash", str(ROOT / "bench" / "gpu.sh"), str(out), "300"]
    return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess, Path]:
    folder = tmp_path_factory.mktemp("rehearsal")
    test = folder / "test_small.py"
    test.write_text("def test_passes(): pass\n")
    return gpu_script(folder / "out", test, "layer spmm,matmul,quantize"), folder / "out"


def test_rehearsal_passes_and_ends_in_the_table(rehearsal: tuple[subprocess.CompletedProcess, Path]) -> None:
    result, _ = rehearsal
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed" in result.stdout
    table, last = result.stdout.strip().rsplit("\n", 1)
    assert last.startswith("all passed in ")
    assert "FAILED" not in table
    for suite in ("layer", "spmm", "matmul", "quantize"):
        assert re.search(rf"^{suite}  \S+  (forward|step)\n  .*\d", table, re.MULTILINE)


@pytest.mark.parametrize("suite", ["layer", "spmm", "matmul", "quantize"])
def test_rehearsal_writes_whole_records(rehearsal: tuple[subprocess.CompletedProcess, Path], suite: str) -> None:
    (path,) = rehearsal[1].glob(f"*/{suite}.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for record in lines:
        assert tuple(record) == records.FIELDS
        assert record["ok"] is True
        assert record["suite"] == suite
        assert record["pass"] in ("forward", "backward", "step")
        assert 0 < record["p20_ms"] <= record["median_ms"] <= record["p80_ms"]
        assert 0 <= record["error"] < 0.1
        assert record["peak_mib"] is None  # a CPU does not count it
        assert re.sub(r"[^a-z0-9]+", "-", record["device"].lower()) == path.parent.name
        assert {"python", "qgnn", "torch", "torch_geometric", "triton"} <= set(record["versions"])
        assert datetime.fromisoformat(record["utc"]).utcoffset().total_seconds() == 0
    providers = {record["provider"] for record in lines}
    assert "qgnn int8" in providers
    assert ("qgnn fp32" in providers) == (suite != "quantize")
    assert len(providers) >= 3
    if suite == "layer":
        assert all(record["saved_mib"] > 0 for record in lines)


def test_script_reports_a_failed_test(tmp_path: Path) -> None:
    test = tmp_path / "test_small.py"
    test.write_text("def test_fails(): assert False\n")
    result = gpu_script(tmp_path / "out", test, "")
    assert result.returncode == 1
    assert "test_fails" in result.stdout
    assert result.stdout.rstrip().endswith("failed: tests (exit status 1)")


def cli(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_command_line_rejects_what_it_cannot_do() -> None:
    result = cli("spmm", "--device", "cuda")
    assert result.returncode == 2
    assert "torch sees no CUDA device here; use --device cpu" in result.stderr


def test_quick_run_leaves_the_results_alone(tmp_path: Path) -> None:
    before = sorted(records.RESULTS.rglob("*.jsonl"))
    result = cli("quantize", "--quick", "--json", str(tmp_path / "run.json"))
    assert result.returncode == 0, result.stderr
    assert sorted(records.RESULTS.rglob("*.jsonl")) == before
    written = [json.loads(line) for line in (tmp_path / "run.json").read_text().splitlines()]
    assert {record["provider"] for record in written} >= {"qgnn int8", "torch eager int8"}


def provider(name: str, value: object, tolerance: float = 1e-3) -> object:
    """A provider whose result is ``value``, or raises it."""

    def run() -> object:
        if isinstance(value, BaseException):
            raise value
        return value() if callable(value) else value

    return harness.Provider(name, lambda: harness.Work(run), tolerance)


def measure(*providers: object, reference: torch.Tensor) -> dict[str, dict]:
    case = harness.Case("a/b", "forward", lambda: [reference], providers, num_bytes=1000)
    arguments = {"stamp": STAMP, "clock": clock.CpuClock(), "effort": harness.QUICK, "device": CPU}
    return {record["provider"]: record for record in harness.measure("unit", case, **arguments)}


def test_gate_refuses_wrong_results(capsys: pytest.CaptureFixture) -> None:
    right = torch.randn(8, 8)
    wrong = {
        "off by 1%": right * 1.01,
        "one row missing": torch.cat([right[:-1], torch.zeros(1, 8)]),
        "nan": right.where(right != right[0, 0], float("nan")),
        "all nan": torch.full((8, 8), float("nan")),
        "inf": right.where(right != right[0, 0], float("inf")),
        "transposed": right.t(),
        "wrong shape": right[:-1],
        "two results": (right, right),
        "raises": RuntimeError("no such kernel"),
    }
    found = measure(*(provider(*item) for item in wrong.items()), provider("right", right * 1.0001), reference=right)
    assert found["right"]["ok"]
    assert found["right"]["error"] == pytest.approx(1e-4, rel=1e-2)
    for name in wrong:
        assert found[name]["ok"] is False
        assert found[name]["median_ms"] is found[name]["p20_ms"] is found[name]["p80_ms"] is None
    assert found["raises"]["error"] is None
    assert "no such kernel" in capsys.readouterr().err


def test_gate_sees_an_output_that_is_written_only_once() -> None:
    """The second call is the one that counts, so a result left over from the first does not pass."""
    right, calls = torch.ones(4), []

    def forgetful() -> torch.Tensor:
        calls.append(1)
        return right if len(calls) == 1 else torch.full((4,), float("nan"))

    assert measure(provider("forgetful", forgetful), reference=right)["forgetful"]["ok"] is False


def test_unavailable_provider_leaves_no_record(capsys: pytest.CaptureFixture) -> None:
    right = torch.ones(4)
    missing = provider("missing", harness.UnavailableError("needs a GPU"))
    assert set(measure(missing, provider("right", right), reference=right)) == {"right"}
    assert "missing: not available: needs a GPU" in capsys.readouterr().err


def test_providers_take_turns() -> None:
    calls: list[str] = []
    works = [harness.Work(lambda name=name: calls.append(name)) for name in "abc"]
    effort = harness.Effort(min_rounds=3, max_rounds=3, seconds=0.0, warmup_seconds=0.0)
    samples = harness._sample(works, clock.CpuClock(), effort)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"  # warm-up, then three rounds
    assert [len(times) for times in samples] == [3, 3, 3]


def test_sampling_measures_the_right_function() -> None:
    works = [harness.Work(lambda: None), harness.Work(lambda: time.sleep(0.002))]
    fast, slow = harness._sample(works, clock.CpuClock(), harness.QUICK)
    assert min(slow) >= 2.0
    assert clock.percentile(fast, 0.5) < clock.percentile(slow, 0.5)


def test_cuda_clock_flushes_before_and_waits_after_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence on a device, told by stand-ins for its events and its cache."""
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def elapsed_time(self, end: "Event") -> float:
            return 1.5

    class Flush:
        def zero_(self) -> None:
            log.append("flush")

    l2_bytes = 100 << 20
    sizes = []
    properties = type("Properties", (), {"L2_cache_size": l2_bytes})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(clock.torch, "empty", lambda size, **_: sizes.append(size) or Flush())
    device_clock = clock.make_clock(torch.device("cuda", 0))
    assert device_clock.round([lambda: log.append("a"), lambda: log.append("b")]) == [1.5, 1.5]
    assert log == [step for name in "ab" for step in ("flush", "record", name, "record", "wait")]
    assert sizes == [4 * l2_bytes]


def test_percentile_interpolates() -> None:
    samples = [4.0, 1.0, 3.0, 2.0]
    assert [clock.percentile(samples, p) for p in (0.0, 0.2, 0.5, 1.0)] == pytest.approx([1.0, 1.6, 2.5, 4.0])


def test_saved_bytes_counts_what_the_forward_pass_makes_and_keeps() -> None:
    x, weight = torch.randn(100, 16), torch.randn(16, 8, requires_grad=True)
    assert harness.saved_bytes(lambda: x @ weight) == 0  # an input and a parameter
    assert harness.saved_bytes(lambda: (x @ weight).relu().square()) == 100 * 8 * 4  # one tensor, saved twice


def test_deadline_stops_before_the_next_case() -> None:
    right = torch.ones(2)
    case = harness.Case("a", "forward", lambda: [right], [provider("right", right)])
    arguments = {"stamp": STAMP, "clock": clock.CpuClock(), "effort": harness.QUICK, "device": CPU}
    late = harness.measure_all("unit", iter([case, case]), deadline=time.monotonic() - 1, **arguments)
    in_time = harness.measure_all("unit", iter([case, case]), deadline=time.monotonic() + 60, **arguments)
    assert (len(list(late)), len(list(in_time))) == (0, 2)


@pytest.mark.parametrize(
    ("told", "expected"), [("", (None, None)), ("0a1b", ("0a1b", False)), ("0a1b+", ("0a1b", True))]
)
def test_a_copy_without_git_is_told_its_commit(
    told: str, expected: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setenv("QGNN_COMMIT", told)
    stamp = records.make_stamp(CPU)
    assert (stamp.commit, stamp.dirty) == expected


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_checkout_knows_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "ROOT", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (tmp_path / "bench" / "results" / "machine").mkdir(parents=True)
    (tmp_path / "bench" / "results" / "machine" / "unit.jsonl").touch()  # records do not make the code another one
    assert records._commit() == (head, False)
    (tmp_path / "new.py").touch()
    assert records._commit() == (head, True)


def test_record_needs_every_field() -> None:
    with pytest.raises(ValueError, match="a record has the fields"):
        records.make_record(STAMP, records.now(), suite="unit")


def make_record(provider: str, ms: float, utc: str, **changes: object) -> dict:
    values = {"suite": "unit", "case": "a/b", "provider": provider, "pass": "forward", "median_ms": ms, "p20_ms": ms}
    values |= {"p80_ms": ms, "peak_mib": None, "saved_mib": None, "bytes": 3_000_000, "error": float("nan"), "ok": True}
    return {**records.make_record(STAMP, utc, **values), **changes}


def test_records_survive_the_file(tmp_path: Path) -> None:
    lines = [make_record("x", 1.0, records.now()), make_record("y", 2.0, records.now())]
    for line in lines:
        records.append(tmp_path / STAMP.machine / "unit.jsonl", [line])
    assert list(records.read(tmp_path)) == [("some-cpu-2-threads", line) for line in lines]
    assert lines[0]["error"] is None  # not a number in JSON either


def test_report_divides_within_the_newest_run_only(tmp_path: Path) -> None:
    old = [make_record("torch fp32", 100.0, "2026-01-01T00:00:00+00:00")]
    new = [
        make_record("qgnn int8", 2.0, "2026-01-02T00:00:00+00:00"),
        make_record("torch fp32", 6.0, "2026-01-02T00:00:00+00:00"),
        make_record("pyg fp32", 8.0, "2026-01-02T00:00:00+00:00"),
        make_record("torch bf16", 3.0, "2026-01-02T00:00:00+00:00"),
        make_record("broken fp32", 1.0, "2026-01-02T00:00:00+00:00", ok=False, median_ms=None),
    ]
    records.append(tmp_path / STAMP.machine / "unit.jsonl", new + old)
    text = report.markdown(tmp_path)
    assert "## some-cpu-2-threads" in text
    assert "commit 0123456789ab; torch 2.0" in text
    table = [[cell.strip() for cell in line.split("|")[3:-1]] for line in text.splitlines() if "a/b" in line]
    assert [line[0] for line in table] == ["qgnn int8", "torch bf16", "torch fp32", "pyg fp32", "broken fp32"]
    assert [line[-2] for line in table] == [
        "3.00",
        "2.00",
        "1.00",
        "0.75",
        "",
    ]  # against the best fp32 that is not ours
    assert [line[-1] for line in table] == ["1.50", "1.00", "0.50", "0.38", ""]
    assert table[0][3] == "1.5"  # GB/s
    assert table[-1][1] == "FAILED"
    assert report.compact(tmp_path, "2026-01-03") == "no records"
    assert "unit  a/b  forward\n  qgnn int8" in report.compact(tmp_path, "2026-01-02")
