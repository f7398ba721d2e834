"""Runs of a sweep that train nothing: what new processes import, and a sweep that is killed again and again."""

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qgnn.cli.errors import UsageError
from qgnn.cli.sweep.journal import START, Journal
from qgnn.cli.sweep.pool import Execute
from qgnn.cli.sweep.run_spec import RunSpec
from qgnn.cli.sweep.runner import carry_out, missing

STARTED, PIDS, TRIES = "QGNN_TEST_STARTED", "QGNN_TEST_PIDS", "QGNN_TEST_TRIES"  # files to which runs append
HEADER = {"device": "cpu", "commit": None, "dirty": None}


def runs_of(number: int) -> list[RunSpec]:
    """Runs on two data sets, in an order that changes between them."""
    return [RunSpec("ab"[n % 2], "gcn", "int8", "all", "none", "nearest", n) for n in range(number)]


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Return when the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("waited in vain")
        time.sleep(0.002)


def has_lines(path: Path, number: int) -> bool:
    """Whether a file has so many whole lines."""
    return path.exists() and path.read_bytes().count(b"\n") >= number


def note(variable: str, text: str) -> None:
    """Append a line to the file that the variable names, if it names one."""
    if variable in os.environ:
        with open(os.environ[variable], "a") as file:
            file.write(text + "\n")


def fake(run: RunSpec) -> dict[str, Any]:
    """Takes 1 to 9 ms; what it measures follows from the run alone."""
    note(STARTED, str(run.seed))
    note(PIDS, str(os.getpid()))
    time.sleep((1 + run.seed * 7 % 9) / 1e3)
    return {"test_acc": random.Random(run.key).random(), "mean_bits": 5.0, "widths": [2, 8]}


def whose(run: RunSpec) -> dict[str, Any]:
    """Who runs it."""
    time.sleep(2e-3)
    return {"pid": os.getpid()}


def threads(run: RunSpec) -> dict[str, Any]:
    """How many threads torch uses, and whether this is the process of the tests."""
    return {"threads": torch.get_num_threads(), "is_main": "pytest" in sys.modules}


def half(run: RunSpec) -> dict[str, Any]:
    """The first two runs end, the others do not while a test runs."""
    if run.seed >= 2:
        note(STARTED + "_SLOW", str(run.seed))
        time.sleep(600)
    return fake(run)


def troubled(run: RunSpec) -> dict[str, Any]:
    """Some runs die, raise, or return what is no JSON; that of seed 2 dies only the first time."""
    note(TRIES, str(run.seed))
    tries = Path(os.environ[TRIES]).read_text().split().count(str(run.seed))
    if run.seed == 1 or (run.seed == 2 and tries == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if run.seed == 3:
        os._exit(7)
    if run.seed == 5:
        raise ValueError("no such\nformat")
    return {"test_acc": object()} if run.seed == 7 else fake(run)


def sweep(path: Path, number: int, execute: Execute = fake) -> None:
    """The sweep: what is missing, over two processes; they are forked, which is quick, and safe without OpenMP."""
    journals = []

    def is_open() -> bool:
        with contextlib.suppress(UsageError):  # forks of a killed one hold its lock until they see that it is gone
            journals.append(Journal(path))
        return bool(journals)

    wait_for(is_open)
    with journals[0] as journal:
        remaining = missing(runs_of(number), journal.runs, retry_failed=False)
        if remaining:
            journal.append(START, **HEADER)
            carry_out(remaining, journal, execute, processes=2, context="fork")


def kill_and_resume(path: Path, number: int, kills: int = 10) -> list[int]:
    """The exit codes of a sweep whose process is killed at random moments, so often, and then may end."""
    draw, codes = random.Random(5), []
    for attempt in range(kills + 1):
        before = path.read_bytes().count(b"\n") if path.exists() else 0
        child = os.fork()
        if child == 0:
            sweep(path, number)
            os._exit(0)
        if attempt < kills:
            if attempt % 3:  # in the midst of runs; else perhaps before the first
                wait_for(partial(has_lines, path, before + 2))
            time.sleep(draw.uniform(0.0, 0.05))
            os.kill(child, signal.SIGKILL)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return codes


def interrupt(path: Path, number: int) -> int:
    """The exit code of a sweep of four runs which, with its processes, gets a signal in the midst of the last two."""
    started = path.with_suffix(".started")
    child = os.fork()
    if child == 0:
        os.setsid()
        os.environ[STARTED + "_SLOW"] = str(started)
        try:
            sweep(path, 4, half)
        except KeyboardInterrupt:
            os._exit(130)
        except SystemExit as stop:
            os._exit(stop.code if isinstance(stop.code, int) else 1)
        os._exit(0)
    wait_for(lambda: has_lines(started, 2) and has_lines(path, 3))
    os.killpg(child, number)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell started the tests without one
    codes: dict[str, Any] = {"kills": kill_and_resume(folder / "kills.jsonl", int(sys.argv[2]))}
    for number in (signal.SIGINT, signal.SIGTERM):
        codes[str(int(number))] = interrupt(folder / f"{int(number)}.jsonl", number)
    print(json.dumps(codes))
