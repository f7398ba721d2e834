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
from qgnn.cli.provenance import now
from qgnn.cli.sweep.journal import DONE, FAILED, RUN, Journal
from qgnn.cli.sweep.pool import Execute, run_all
from qgnn.cli.sweep.progress import SweepProgress
from qgnn.cli.sweep.run_spec import RunSpec


def missing(runs: Sequence[RunSpec], journal: Journal, device: str, retry_failed: bool) -> list[RunSpec]:
    """The runs that are still to be carried out.

    Raises:
        UsageError: If the journal is that of another sweep: each has runs that the other has not, or another device.
    """
    keys, recorded = {run.key for run in runs}, set(journal.runs)
    if recorded - keys and keys - recorded:
        raise UsageError(
            f"{str(journal.path)!r} is the journal of another sweep: {len(recorded - keys)} of its {len(recorded)} "
            f"runs are not in the specification, and {len(keys - recorded)} of the specification not in it; give "
            "another --results"
        )
    if journal.starts and journal.starts[0]["device"] != device:
        raise UsageError(
            f"{str(journal.path)!r} holds runs on {journal.starts[0]['device']} (got {device}); give another --results"
        )
    ended = {key for key, line in journal.runs.items() if line["status"] == DONE or not retry_failed}
    return [run for run in runs if run.key not in ended]


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
                run, result, error, trace, seconds = outcome
                ended = {"result": result} if error is None else {"error": error, "trace": trace}
                status = {"key": run.key, "run": run.fields, "status": DONE if error is None else FAILED}
                journal.append(RUN, **status, **ended, seconds=round(seconds, 3), utc=now())
                progress.advance(outcome)
        except (KeyboardInterrupt, SystemExit):
            print("all runs that ended are recorded; the same command goes on from there", file=sys.stderr)
            raise
        minutes = (time.monotonic() - start) / 60
        console.print(f"{progress.done} runs in {minutes:.1f} minutes: {progress.rate:.1f} runs per minute")


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
