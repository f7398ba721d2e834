"""Runs over processes: kills of every kind, and a sweep that goes on as if nothing had happened."""

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from qgnn.cli.errors import UsageError
from qgnn.cli.sweep import pool
from qgnn.cli.sweep.journal import DONE, FAILED, RUN, START, Journal
from qgnn.cli.sweep.pool import run_all
from qgnn.cli.sweep.runner import carry_out, ended_by_sigterm, missing
from qgnn.cli.sweep.table import write_table
from sweep_fakes import HEADER, PIDS, STARTED, TRIES, fake, runs_of, threads, troubled, wait_for, whose

# Python 3.12 and newer, in a process with threads; what is forked here computes nothing.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


class Drill(NamedTuple):
    """What sweeps left that were killed and interrupted, in processes of their own."""

    path: Path
    number: int
    codes: dict[str, Any]
    err: str


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory) -> Drill:
    path, number = tmp_path_factory.mktemp("drill"), 200
    variables = {name: str(path / name) for name in (STARTED, PIDS)}
    ended = subprocess.run(
        [sys.executable, "-m", "sweep_fakes", str(path), str(number)],
        env=os.environ | variables | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stderr
    return Drill(path, number, json.loads(ended.stdout), ended.stderr)


def lines_of(path: Path, kind: str = RUN) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def is_gone(pid: int) -> bool:
    """Ended, whether or not its parent, by then init, has asked how."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (OSError, ValueError):
        return True


def test_ten_kills_and_resumes_give_the_table_of_an_undisturbed_sweep(drill: Drill) -> None:
    runs, path = runs_of(drill.number), drill.path / "kills.jsonl"
    assert drill.codes["kills"] == [-signal.SIGKILL] * 10 + [0], "every kill met a sweep that was not done"
    whole = {run.key: {"status": DONE, "result": fake(run), "commit": None, "dirty": None} for run in runs}
    write_table(drill.path / "whole.csv", runs, whole)
    with Journal(path) as journal:
        write_table(drill.path / "kills.csv", runs, journal.runs)
    assert (drill.path / "kills.csv").read_text() == (drill.path / "whole.csv").read_text()

    assert sorted(line["key"] for line in lines_of(path)) == sorted(run.key for run in runs), "each is recorded once"
    resumes = len(lines_of(path, START))
    assert resumes >= 7
    # Two processes, each in one run, and with the outcome of another on its way, at a kill.
    assert len(runs) <= len((drill.path / STARTED).read_text().split()) <= len(runs) + 4 * resumes


def test_processes_end_with_a_parent_that_is_killed(drill: Drill) -> None:
    pids = set((drill.path / PIDS).read_text().split())
    assert len(pids) >= 12, "two of each sweep that was killed in the midst of runs"
    wait_for(lambda: all(is_gone(int(pid)) for pid in pids))


def test_a_run_that_fails_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that dies is tried once more, and no oftener."""
    runs = runs_of(12)
    monkeypatch.setenv(TRIES, str(tmp_path / "tries"))
    with Journal(tmp_path / "j") as journal:
        journal.append(START, **HEADER)
        carry_out(runs, journal, troubled, 2, "fork")
        assert missing(runs, journal.runs, retry_failed=False) == []
        assert [run.seed for run in missing(runs, journal.runs, retry_failed=True)] == [1, 3, 5, 7]
        lines = {run.seed: journal.runs[run.key] for run in runs}
    assert [seed for seed, line in lines.items() if line["status"] == FAILED] == [1, 3, 5, 7]
    assert lines[1]["error"] == "its process ended with SIGKILL; was memory short? fewer --processes need less"
    assert lines[3]["error"] == "its process ended with exit code 7"
    assert lines[5]["error"] == "ValueError: no such format"
    assert "sweep_fakes.py" in lines[5]["trace"]
    assert lines[7]["error"].startswith("TypeError: Object of type object is not JSON serializable")
    assert len(lines_of(tmp_path / "j")) == 12
    tries = Counter(map(int, (tmp_path / "tries").read_text().split()))
    assert tries == {seed: 2 if seed in (1, 2, 3) else 1 for seed in range(12)}
    err = capsys.readouterr().err
    assert err.count("again: gcn on ") == 3
    assert "again: gcn on a, int8, all, nearest, seed 2: its process ended with SIGKILL" in err
    assert "failed: gcn on b, int8, all, nearest, seed 5: ValueError: no such format" in err
    assert "12/12 runs, 4 failed, " in err
    assert "runs per minute" in err


def test_processes_stay_on_a_data_set() -> None:
    """Two processes on two data sets, one of them larger: each has one, until there is nothing left of the smaller."""
    runs = [run for run in runs_of(40) if run.dataset == "a" or run.seed < 10]
    datasets: dict[int, list[str]] = {}
    for outcome in run_all(runs, whose, 2, "fork"):
        assert outcome.result is not None
        datasets.setdefault(outcome.result["pid"], []).append(outcome.run.dataset)
    changes = {
        "".join(sequence): sum(one != other for one, other in itertools.pairwise(sequence))
        for sequence in datasets.values()
    }
    assert sorted(changes.values()) == [0, 1], changes
    assert sum(map(len, changes)) == 25


def test_one_process_takes_the_larger_data_set_first() -> None:
    runs = [run for run in runs_of(9) if run.dataset == "a" or run.seed < 4]
    order = [outcome.run for outcome in run_all(runs, fake, 1, "fork")]
    assert [run.dataset for run in order] == ["a"] * 5 + ["b"] * 2
    assert [run.seed for run in order] == [0, 2, 4, 6, 8, 1, 3]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_all_processes_ends_the_sweep_with_the_journal_whole(drill: Drill, number: int, code: int) -> None:
    """As a terminal sends Ctrl-C and a service manager SIGTERM: no run in flight counts as failed."""
    path = drill.path / f"{int(number)}.jsonl"
    assert drill.codes[str(int(number))] == code
    assert [line["status"] for line in lines_of(path)] == [DONE] * 2
    assert drill.err.count("all runs that ended are recorded; the same command goes on from there") == 2
    assert "Traceback" not in drill.err
    with Journal(path) as journal:
        assert len(missing(runs_of(4), journal.runs, retry_failed=False)) == 2


def at_start(monkeypatch: pytest.MonkeyPatch, strike: Callable[[int], Any]) -> None:
    """``strike``, called with the number of each new process before anything else is done with it."""

    class Struck(pool._Worker):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            strike(self._process.pid)

    monkeypatch.setattr(pool, "_Worker", Struck)


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """A shell that starts the tests in the background may have turned it off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
@pytest.mark.parametrize(("number", "stop"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_while_processes_start_ends_the_sweep(
    monkeypatch: pytest.MonkeyPatch, number: int, stop: type[BaseException]
) -> None:
    """With the one that was started, behind which there is no second one."""
    pids: list[int] = []

    def strike(pid: int) -> None:
        pids.append(pid)
        os.kill(os.getpid(), number)

    at_start(monkeypatch, strike)
    before = signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with ended_by_sigterm(), pytest.raises(stop):
        next(run_all(runs_of(9), fake, 2, "fork"))
    assert len(pids) == 1
    assert multiprocessing.active_children() == []
    assert is_gone(pids[0])
    assert (signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, [])) == before


def test_new_processes_run_with_one_thread_and_hear_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the command starts them. From their first moment on it is this process that ends them."""

    def strike(pid: int) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)

    at_start(monkeypatch, strike)
    (outcome,) = run_all(runs_of(1), threads, 2)
    assert outcome.result == {"threads": 1, "is_main": False}


def test_processes_that_cannot_start_end_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would make every run a failed one."""
    monkeypatch.setattr(pool, "_work", lambda *_: os._exit(3))
    with pytest.raises(UsageError, match="a process ended with exit code 3 before its first run"):
        next(run_all(runs_of(9), fake, 2, "fork"))


def test_a_process_that_cannot_start_ends_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As one that replaces another where memory is short."""
    real, first = pool._work, tmp_path / "first"

    def work(*args: Any) -> None:
        try:
            first.mkdir()
        except FileExistsError:
            real(*args)
        os._exit(3)

    monkeypatch.setattr(pool, "_work", work)
    assert [outcome.error for outcome in run_all(runs_of(9), fake, 3, "fork")] == 9 * [None]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_process_whose_device_is_lost_gets_no_other_run(monkeypatch: pytest.MonkeyPatch, is_lost: bool) -> None:
    """By itself it would fail them all; whose run it was that lost the device is known."""
    failed: list[bool] = []
    monkeypatch.setattr(pool, "device_is_lost", lambda: is_lost and bool(failed))

    def pid(run: Any) -> dict[str, int]:
        if run.seed % 4 == 0:
            failed.append(True)
            raise RuntimeError("an illegal memory access was encountered")
        return {"pid": os.getpid()}

    found = list(run_all(runs_of(9), pid, 1, "fork"))
    assert all(outcome.is_final for outcome in found)
    errors = {outcome.run.seed: outcome.error for outcome in found}
    assert len(errors) == len(found) == 9
    assert {seed for seed, error in errors.items() if error is not None} == {0, 4, 8}
    assert all("illegal memory access" in errors[seed] for seed in (0, 4, 8))
    pids = {outcome.result["pid"] for outcome in found if outcome.result}
    assert (len(pids) > 1) == is_lost
