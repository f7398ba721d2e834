"""The harness on providers that are wrong, slow, missing or that break halfway; clocks and records."""

import importlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from house import ROOT

sys.path.append(str(ROOT))  # bench is not installed; last, so that an installed qgnn is found first
harness = importlib.import_module("bench.harness")
provenance = importlib.import_module("qgnn.cli.provenance")
records = importlib.import_module("bench.records")
clock = importlib.import_module("bench.clock")
live = importlib.import_module("bench.live")
main = importlib.import_module("bench.__main__")

CPU = torch.device("cpu")
STAMP = provenance.Stamp("Some CPU, 2 threads", "0123456789abcdef", False, {"torch": "2.0"})
NOW, STAMPED = "2026-01-01T00:00:00+00:00", {"device", "commit", "dirty", "versions", "utc"}


def provider(name: str, value: object, tolerance: float = 1e-3) -> object:
    """A provider whose result is ``value``, or raises it."""

    def run() -> object:
        if isinstance(value, BaseException):
            raise value
        return value() if callable(value) else value

    return harness.Provider(name, lambda: harness.Work(run), tolerance)


def measure(*providers: object, reference: object, effort: object = harness.QUICK) -> dict[str, dict]:
    make_reference = reference if callable(reference) else lambda: [reference]
    case = harness.Case("a/b", "forward", make_reference, providers, num_bytes=1000)
    arguments = {"stamp": STAMP, "clock": clock.CpuClock(), "effort": effort, "device": CPU}
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


def breaks_at(call: int, value: torch.Tensor) -> Callable[[], torch.Tensor]:
    calls: list[int] = []

    def run() -> torch.Tensor:
        calls.append(1)
        if len(calls) == call:
            raise MemoryError("no memory left")
        return value

    return run


# Two calls of the gate, one to warm up, three to be timed: the third fails while warming, the fifth while being timed.
@pytest.mark.parametrize("call", [3, 5])
def test_a_failure_after_the_gate_is_a_failed_record_and_ends_nothing(call: int, capsys: pytest.CaptureFixture) -> None:
    right = torch.ones(4)
    found = measure(provider("breaks", breaks_at(call, right)), provider("right", right), reference=right)
    assert found["breaks"]["ok"] is False
    assert found["breaks"]["median_ms"] is None
    assert found["right"]["ok"] is True
    assert found["right"]["median_ms"] > 0
    assert "breaks: failed" in capsys.readouterr().err


def test_a_failure_while_counting_is_a_failed_record() -> None:
    right = torch.ones(4)

    def forward() -> None:
        raise MemoryError("no memory left")

    counted = harness.Provider("counted", lambda: harness.Work(lambda: right, forward=forward), 0.0)
    found = measure(counted, provider("right", right), reference=right)
    assert found["counted"]["ok"] is False
    assert found["counted"]["median_ms"] is found["counted"]["saved_mib"] is None
    assert found["right"]["ok"] is True


def test_no_provider_is_set_up_when_time_is_out(capsys: pytest.CaptureFixture) -> None:
    case = harness.Case("a/b", "forward", list, [provider("late", torch.ones(4))])
    arguments = {"stamp": STAMP, "clock": clock.CpuClock(), "effort": harness.QUICK, "device": CPU}
    assert harness.measure("unit", case, **arguments, deadline=0.0) == []
    assert "late: not measured: out of time" in capsys.readouterr().err


def test_a_lost_device_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """In which others would get the blame; what was timed before is told, and who failed."""
    right = torch.ones(4)
    monkeypatch.setattr(harness, "device_is_lost", lambda: True)
    done = harness.Provider("done", lambda: harness.Measured([right], [1.0], None, None), 1e-3)
    bad, waiting, behind = provider("bad", RuntimeError("no")), provider("waiting", right), provider("behind", right)
    with pytest.raises(harness.DeviceLostError) as raised:
        measure(done, waiting, bad, behind, reference=right)
    assert {record["provider"]: record["ok"] for record in raised.value.records} == {"done": True, "bad": False}


def test_suites_behind_a_lost_device_are_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def measure_all(suite: str, *_: object, **__: object) -> Iterator[list[dict]]:
        error = harness.DeviceLostError("lost")
        error.records = [
            records.make_record(
                STAMP, NOW, **{**dict.fromkeys({*records.FIELDS} - STAMPED), "suite": suite, "ok": False}
            )
        ]
        raise error
        yield

    monkeypatch.setattr(harness, "measure_all", measure_all)
    monkeypatch.setattr("qgnn.cli.measure.device_is_lost", lambda: True)
    assert main.main(["softmax", "codes", "--quick", "--device", "cpu", "--results", str(tmp_path)]) == 1
    assert [line["suite"] for _, line in records.read(tmp_path)] == ["softmax"]
    assert "broken suites: softmax, codes" in capsys.readouterr().err


def test_a_provider_may_move_other_bytes_than_its_case() -> None:
    right = torch.ones(4)
    copy = harness.Provider("copy", lambda: harness.Work(lambda: right), 0.0, num_bytes=32)
    found = measure(copy, provider("right", right), reference=right)
    assert (found["copy"]["bytes"], found["right"]["bytes"]) == (32, 1000)


def test_each_case_is_compiled_by_itself() -> None:
    """Sizes that differ from those of the case before would be symbols."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph

    function = torch.compile(lambda x: 2 * x, backend=backend)
    for size in (5, 6, 7):
        right = torch.ones(size)
        measure(provider("compiled", lambda right=right: function(right / 2)), reference=right)
    names = [[node.name for node in graph.graph.nodes if node.op == "placeholder"] for graph in graphs]
    assert [len(found) for found in names] == [1, 1, 1]
    torch.compiler.reset()


def test_without_a_reference_everyone_fails(capsys: pytest.CaptureFixture) -> None:
    def reference() -> list[torch.Tensor]:
        raise MemoryError("the reference takes too much")

    found = measure(provider("a", torch.ones(4)), provider("b", torch.ones(4)), reference=reference)
    assert [record["ok"] for record in found.values()] == [False, False]
    assert "the reference takes too much" in capsys.readouterr().err


def measured(value: torch.Tensor) -> object:
    result = harness.Measured([value], [3.0, 1.0, 2.0], peak_mib=10.0, saved_mib=5.0)
    return harness.Provider("child", lambda: result, 1e-3)


def test_what_a_process_of_its_own_measured_passes_the_same_gate() -> None:
    right = torch.ones(4)
    passed = measure(measured(right), reference=right)["child"]
    assert (passed["median_ms"], passed["peak_mib"], passed["saved_mib"]) == (2.0, 10.0, 5.0)
    failed = measure(measured(right * 2), reference=right)["child"]
    assert failed["ok"] is False
    assert failed["median_ms"] is failed["peak_mib"] is failed["saved_mib"] is None


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["test_acc", "rmse", "roc_auc"])
def test_a_score_that_is_not_finite_is_a_failure(name: str, score: float, capsys: pytest.CaptureFixture) -> None:
    """What else is measured may be: a loss of a training that found its best epoch before is no score."""
    right = torch.ones(4)

    def trained(score: float, final_loss: float) -> object:
        found = {"test_acc": score} if name == "test_acc" else {"metrics": {name: score, "final_loss": final_loss}}
        return lambda: harness.Measured([right], [1.0], None, None, **found)

    diverged = harness.Provider("diverged", trained(score, 1.0), 0.0)
    late = harness.Provider("late", trained(0.5, float("nan")), 0.0)
    found = measure(diverged, late, reference=right)
    assert [found[name]["ok"] for name in ("diverged", "late")] == [False, True]
    assert found["diverged"]["median_ms"] is None
    assert "a/b forward: diverged: its score is not finite: training diverged" in capsys.readouterr().err


def sample(works: list, effort: object, seconds: float | list[float] = 0.0) -> list[list[float]]:
    """Times of works whose gate took so long."""
    taken = [seconds] * len(works) if isinstance(seconds, float) else seconds
    entries = [harness.Entry(provider("x", 1), work, seconds=s) for work, s in zip(works, taken, strict=True)]
    harness._sample(entries, clock.CpuClock(), effort, lambda *_: None)
    return [entry.times_ms for entry in entries]


def test_providers_take_turns() -> None:
    calls: list[str] = []
    works = [harness.Work(lambda name=name: calls.append(name)) for name in "abc"]
    effort = harness.Effort(min_rounds=3, max_rounds=3, seconds=0.0, warmup_seconds=0.0)
    samples = sample(works, effort)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"  # warm-up, then three rounds
    assert [len(times) for times in samples] == [3, 3, 3]


def test_a_slow_provider_takes_part_in_the_first_rounds_only() -> None:
    calls: list[str] = []
    works = [harness.Work(lambda name=name: calls.append(name)) for name in "ab"]
    effort = harness.Effort(min_rounds=5, max_rounds=5, seconds=0.0, few_rounds=3)
    samples = sample(works, effort, [4.1, 1.0])
    assert "".join(calls) == "ab" + "ba" + "ab" + "b" + "b"  # a gate call of a second leaves it warm
    assert [len(times) for times in samples] == [3, 5]
    assert [len(times) for times in sample(works, effort, [4.0, 1.0])] == [5, 5]
    assert [len(times) for times in sample(works, effort, [0.5, 0.01])] == [5, 5]  # no call of half a second is slow


def test_few_rounds_are_enough_when_they_took_long() -> None:
    works = [harness.Work(lambda: None), harness.Work(lambda: None)]
    effort = harness.Effort(min_rounds=5, max_rounds=9, seconds=0.0, warmup_seconds=0.0, patience=0.0)
    assert [len(times) for times in sample(works, effort)] == [3, 3]


def test_rounds_go_on_until_the_time_is_over() -> None:
    works = [harness.Work(lambda: time.sleep(0.001))]
    effort = harness.Effort(min_rounds=5, max_rounds=1000, seconds=0.05, warmup_seconds=0.0)
    (times,) = sample(works, effort)
    assert 5 < len(times) <= 50


def test_sampling_measures_the_right_function() -> None:
    works = [harness.Work(lambda: None), harness.Work(lambda: time.sleep(0.002))]
    fast, slow = sample(works, harness.QUICK)
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
    assert [device_clock.time(lambda name=name: log.append(name)) for name in "ab"] == [1.5, 1.5]
    assert log == [step for name in "ab" for step in ("flush", "record", name, "record", "wait")]
    assert sizes == [4 * l2_bytes]


def test_percentile_interpolates() -> None:
    samples = [4.0, 1.0, 3.0, 2.0]
    assert [clock.percentile(samples, p) for p in (0.0, 0.2, 0.5, 1.0)] == pytest.approx([1.0, 1.6, 2.5, 4.0])


def test_saved_bytes_counts_what_the_forward_pass_makes_and_keeps() -> None:
    x, weight = torch.randn(100, 16), torch.randn(16, 8, requires_grad=True)
    assert live.saved_bytes(lambda: x @ weight) == 0  # an input and a parameter
    assert live.saved_bytes(lambda: (x @ weight).relu().square()) == 100 * 8 * 4  # one tensor, saved twice


def test_deadline_stops_before_the_next_case() -> None:
    right = torch.ones(2)
    case = harness.Case("a", "forward", lambda: [right], [provider("right", right)])
    arguments = {"stamp": STAMP, "clock": clock.CpuClock(), "effort": harness.QUICK, "device": CPU}
    late = harness.measure_all("unit", iter([case, case]), deadline=time.monotonic() - 1, **arguments)
    in_time = harness.measure_all("unit", iter([case, case]), deadline=time.monotonic() + 60, **arguments)
    assert (len(list(late)), len(list(in_time))) == (0, 2)


def test_records_of_a_checkout_that_changed_meanwhile_are_dirty() -> None:
    made = [records.make_record(STAMP, NOW, **dict.fromkeys(set(records.FIELDS) - STAMPED))]
    assert records.until(made, STAMP, replace(STAMP)) == made
    for change in ({"commit": "fedc"}, {"dirty": True}, {"versions": {"torch": "2.1"}}):
        (changed,) = records.until(made, STAMP, replace(STAMP, **change))
        assert changed == {**made[0], "dirty": True}


@pytest.mark.parametrize(
    ("told", "expected"), [("", (None, None)), ("0a1b", ("0a1b", False)), ("0a1b+", ("0a1b", True))]
)
def test_a_copy_without_git_is_told_its_commit(
    told: str, expected: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setenv("QGNN_COMMIT", told)
    stamp = provenance.make_stamp(CPU)
    assert (stamp.commit, stamp.dirty) == expected


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_checkout_knows_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (tmp_path / "bench" / "results" / "machine").mkdir(parents=True)
    (tmp_path / "bench" / "results" / "machine" / "unit.jsonl").touch()  # records do not make the code another one
    assert provenance.commit() == (head, False)
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "journal.jsonl").touch()
    assert provenance.commit() == (head, False), "what a command writes is no code"
    (tmp_path / "qgnn").mkdir()
    (tmp_path / "qgnn" / "new.py").touch()
    assert provenance.commit() == (head, True)
    index = tmp_path / ".git" / "index"
    index.write_bytes(b"no index")
    assert provenance.commit() == (head, None), "git status fails, which says nothing"
    index.unlink()
    (tmp_path / "site-packages").mkdir()
    monkeypatch.setattr(provenance, "ROOT", tmp_path / "site-packages")  # a package installed inside the checkout
    assert provenance.commit() == (None, None)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))  # as git sets it for a hook: it names another project
    assert provenance.commit() == (None, None)


def test_record_needs_every_field() -> None:
    with pytest.raises(ValueError, match="a record has the fields"):
        records.make_record(STAMP, NOW, suite="unit")
