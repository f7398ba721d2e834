"""The progress of a sweep: a rate and a remaining time that follow from the runs of this process alone."""

import io
from datetime import timedelta

import pytest
from rich.console import Console

from qgnn.cli.sweep import progress as progress_module
from qgnn.cli.sweep.pool import Outcome
from qgnn.cli.sweep.progress import SweepProgress
from qgnn.cli.sweep.run_spec import RunSpec
from sweep_fakes import runs_of


class Clock:
    """In place of ``time``: a monotonic clock that stands still between runs."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


def end(progress: SweepProgress, clock: Clock, run: RunSpec, seconds: float, after: float) -> None:
    clock.now += after
    progress.advance(Outcome(run, {}, None, None, seconds))


def test_a_resumed_sweep_counts_what_it_runs_itself(clock: Clock) -> None:
    """Ten of a hundred are left, each takes 6 s, two at a time: from the first on, the rest takes half of its sum."""
    runs, out = runs_of(100)[90:], io.StringIO()
    progress = SweepProgress(runs, 2, Console(file=out, width=200))
    assert progress.remaining == timedelta(0)
    for number, run in enumerate(runs, 1):
        end(progress, clock, run, seconds=6, after=6 * (number % 2))
        assert progress.remaining == timedelta(seconds=6 * (10 - number) / min(2, max(10 - number, 1)))
    assert progress.rate == pytest.approx(20)
    assert out.getvalue().splitlines()[0].startswith("1/10 runs, 10.0 a minute, 0:00:27 left: ")
    assert out.getvalue().splitlines()[-1].startswith("10/10 runs, 20.0 a minute, 0:00:00 left: ")


def test_more_processes_than_runs_do_not_shorten_a_run(clock: Clock) -> None:
    runs = runs_of(9)
    progress = SweepProgress(runs, 8, Console(file=io.StringIO()))
    for number, run in enumerate(runs[:-1]):
        end(progress, clock, run, seconds=80, after=80 * (number == 0))
    assert progress.remaining == timedelta(seconds=80)


def test_a_kind_not_seen_yet_takes_as_long_as_the_others(clock: Clock) -> None:
    runs = runs_of(6)  # three on each of two data sets
    progress = SweepProgress(runs, 1, Console(file=io.StringIO()))
    end(progress, clock, runs[0], seconds=10, after=10)
    assert progress.remaining == timedelta(seconds=50)
    end(progress, clock, runs[1], seconds=2, after=2)
    assert progress.remaining == timedelta(seconds=2 * 10 + 2 * 2)
