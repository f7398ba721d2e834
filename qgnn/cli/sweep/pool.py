"""Runs spread over processes: handed out one by one, so that a process which dies takes a single run with it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from qgnn.cli.errors import UsageError
from qgnn.cli.measure import device_is_lost
from qgnn.cli.sweep.run_spec import RunSpec

Execute = Callable[[RunSpec], dict[str, Any]]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # both come to whole groups of processes


class Outcome(NamedTuple):
    """How a run ended, or that it will be tried again.

    Args:
        run: The run.
        result: What it measured, ``None`` if it failed.
        error: In a line why it failed, ``None`` if it did not.
        trace: Where in the code it failed, if there it did.
        seconds: How long it took.
        is_final: Whether this is its end; otherwise its process died for the first time, and the run has still to come.
    """

    run: RunSpec
    result: dict[str, Any] | None
    error: str | None
    trace: str | None
    seconds: float
    is_final: bool = True


def run_all(
    runs: Sequence[RunSpec], execute: Execute, processes: int, context: str = "spawn"
) -> Generator[Outcome, None, None]:
    """Carry out runs in other processes, each with one thread.

    A process stays on a data set while it has runs left. One that dies is replaced, and its run tried once more, behind
    all others of its data set, since memory may have been short because of what ran beside it; then it is a failed one.
    One that ends before its first run is not replaced while others are left. All processes end with this one, whatever
    ends it.

    Args:
        runs: What to run.
        execute: Carries out one run; importable in a new process. What it returns has to fit into JSON.
        processes: How many at a time.
        context: How processes start. OpenMP hangs in a process that was forked behind its first parallel region.

    Returns:
        The outcomes as they come, one of each run that is final. Close the iterator to end the processes.

    Raises:
        UsageError: If the last process ends before its first run.
    """
    left: dict[str, deque[RunSpec]] = {}
    for run in runs:
        left.setdefault(run.dataset, deque()).append(run)
    died: set[RunSpec] = set()
    workers: dict[Any, _Worker] = {}
    if context == "spawn":
        resource_tracker.ensure_running()  # whose start would let the signals through that are held below

    def start() -> None:
        with _signals_held():
            worker = _Worker(multiprocessing.get_context(context), execute)
            workers[worker.connection] = worker

    try:
        for _ in range(min(processes, len(runs))):
            start()
        while workers:
            for connection in wait(list(workers)):
                worker = workers[connection]
                try:
                    outcome = worker.receive()
                except (EOFError, OSError):  # it ended, at worst within a message
                    del workers[connection]
                    outcome = worker.bury(is_last=not workers)
                    if outcome is None:
                        continue
                    if outcome.run not in died:
                        died.add(outcome.run)
                        left.setdefault(outcome.run.dataset, deque()).append(outcome.run)
                        outcome = outcome._replace(is_final=False)
                    if left:
                        start()
                else:
                    others = [other.dataset for other in workers.values()]
                    following = None if worker.is_lost else _take(left, worker.dataset, others)
                    if following is not None:
                        worker.send(following)
                    else:
                        worker.end()
                        del workers[connection]
                        if worker.is_lost and left:
                            start()
                if outcome is not None:
                    yield outcome
    finally:
        with _signals_held():  # one that is left would be waited for at exit
            for worker in workers.values():
                worker.end()


def _take(left: dict[str, deque[RunSpec]], dataset: str | None, in_use: list[str | None]) -> RunSpec | None:
    """The next run for a process that has ``dataset`` loaded: one of the same if there is any, else of the data set
    with the fewest processes, and among those the most runs."""
    if not left:
        return None
    if dataset not in left:
        users = Counter(in_use)
        dataset = min(left, key=lambda name: (users[name], -len(left[name])))
    run = left[dataset].popleft()
    if not left[dataset]:
        del left[dataset]
    return run


class _Worker:
    """A process that carries out runs, seen from the one that hands them out."""

    def __init__(self, context: Any, execute: Execute) -> None:
        self.connection, theirs = context.Pipe()
        self.dataset: str | None = None
        self.is_lost = False  # whether its device serves no other run
        self._is_ready = False
        self._run: RunSpec | None = None
        self._since = 0.0
        self._process = context.Process(target=_work, args=(theirs, execute), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, run: RunSpec) -> None:
        """Hand out a run. One that died since is found when it is waited for."""
        self.dataset, self._run, self._since = run.dataset, run, time.monotonic()
        with contextlib.suppress(OSError):
            self.connection.send(run)

    def receive(self) -> Outcome | None:
        """What it sends: first that it is ready, then outcomes."""
        message = self.connection.recv()
        if not self._is_ready:
            self._is_ready = True
            return None
        assert self._run is not None
        text, error, trace, self.is_lost = message
        outcome = Outcome(self._run, text and json.loads(text), error, trace, time.monotonic() - self._since)
        self._run = None
        return outcome

    def bury(self, is_last: bool) -> Outcome | None:
        """The outcome of the run in which it died; ``None`` if that was before its first one, and others go on."""
        self._process.join()
        code = self._process.exitcode
        how = f"exit code {code}" if code >= 0 else f"{signal.Signals(-code).name}"
        if self._run is None and not is_last:
            return None
        if self._run is None:
            raise UsageError(
                f"a process ended with {how} before its first run; if it was short of memory, give fewer --processes"
            )
        hint = "; was memory short? fewer --processes need less" if code == -signal.SIGKILL else ""
        error = f"its process ended with {how}{hint}"
        return Outcome(self._run, None, error, None, time.monotonic() - self._since)

    def end(self) -> None:
        """End it at once; what it has not told is lost."""
        self._process.kill()
        self._process.join()
        self.connection.close()


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the end of this block, and never reach processes started in it: their parent ends
    them."""
    held: list[int] = []
    handlers: dict[signal.Signals, Any] = {}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # inherited, also by a new program
    try:
        for number in _SIGNALS:  # the mask is that of one thread, and another may receive the signal
            handlers[number] = signal.signal(number, lambda received, _: held.append(received))
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


def _work(connection: Connection, execute: Execute) -> None:
    """Body of the process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    connection.send(None)
    while True:
        run = connection.recv()
        message: tuple[str | None, str | None, str | None]
        try:
            message = json.dumps(execute(run)), None, None
        except Exception as error:
            message = None, f"{type(error).__name__}: {' '.join(str(error).split())}", traceback.format_exc()
        connection.send((*message, device_is_lost()))


def _end_with_parent() -> None:
    """Wait for the parent's end, also by SIGKILL, which closes a pipe, and end in the midst of whatever runs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
