"""What is missing in a journal, and how it gets there."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from qgnn.cli.errors import UsageError
from qgnn.cli.provenance import commit, now
from qgnn.cli.sweep.journal import DONE, FAILED, RUN, Journal
from qgnn.cli.sweep.pool import Execute, Outcome, run_all
from qgnn.cli.sweep.progress import SweepProgress
from qgnn.cli.sweep.run_spec import RunSpec


def missing(runs: Sequence[RunSpec], recorded: dict[str, dict[str, Any]], retry_failed: bool) -> list[RunSpec]:
    """The runs that are still to be carried out.

    Args:
        runs: Those of the specification.
        recorded: The lines of the journal by key.
        retry_failed: Whether a run that failed is one of them.
    """
    ended = {key for key, line in recorded.items() if line["status"] == DONE or not retry_failed}
    return [run for run in runs if run.key not in ended]


def check_device(journal: Journal, device: str) -> None:
    """Raise if the runs of the journal were made on another kind of device: their results are not comparable."""
    found = journal.starts[0]["device"] if journal.starts else device
    if found != device:
        raise UsageError(f"{str(journal.path)!r} holds runs on {found!r} (got {device!r}); give another --results")


def carry_out(
    runs: Sequence[RunSpec], journal: Journal, execute: Execute, processes: int, context: str = "spawn"
) -> None:
    """Run, and record each run as it ends.

    Args:
        runs: What to run.
        journal: Where to record it.
        execute: Carries out one run.
        processes: How many at a time.
        context: How processes start.
    """
    console = Console(stderr=True)
    outcomes = run_all(runs, execute, processes, context)
    start = time.monotonic()
    with ended_by_sigterm(), SweepProgress(runs, processes, console) as progress, contextlib.closing(outcomes):
        try:
            for outcome in outcomes:
                if outcome.is_final:
                    record(outcome, journal)
                    progress.advance(outcome)
                else:
                    progress.retry(outcome)
        except (KeyboardInterrupt, SystemExit):
            print("all runs that ended are recorded; the same command goes on from there", file=sys.stderr)
            raise
        minutes = (time.monotonic() - start) / 60
        console.print(f"{progress.done} runs in {minutes:.1f} minutes: {progress.rate:.1f} runs per minute")


def record(outcome: Outcome, journal: Journal) -> None:
    """Append the line of a run that ended, as that of modified code where the code has changed since the start."""
    run, result, error, trace, seconds, _ = outcome
    ended = {"result": result} if error is None else {"error": error, "trace": trace}
    status = {"key": run.key, "run": run.fields, "status": DONE if error is None else FAILED}
    start = journal.starts[-1]
    changed = {} if commit() == (start["commit"], start["dirty"]) else {"dirty": True}
    journal.append(RUN, **status, **ended, **changed, seconds=round(seconds, 3), utc=now())


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, with the exit code that a shell gives for it."""

    def stop(number: int, _: Any) -> None:
        sys.exit(128 + number)

    handler = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
