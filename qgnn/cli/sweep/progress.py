"""How far a sweep is: a bar on a terminal, now and then a line in a log."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from statistics import mean
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from qgnn.cli.sweep.pool import Outcome
from qgnn.cli.sweep.run_spec import RunSpec

LOG_EVERY_S = 5.0  # a log of thousands of short runs stays readable


class SweepProgress:
    """Counts runs and shows what remains, from the times of runs with the same model on the same data set.

    Args:
        runs: All that will be run.
        processes: How many at a time.
        console: Where to show it.
    """

    def __init__(self, runs: Sequence[RunSpec], processes: int, console: Console) -> None:
        self.done, self.failed = 0, 0
        self._total, self._processes, self._console = len(runs), processes, console
        self._left = Counter((run.dataset, run.model) for run in runs)
        self._seconds: dict[tuple[str, str], list[float]] = {}
        self._start = time.monotonic()
        self._logged = float("-inf")
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("runs {task.description}"))
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=len(runs))

    def __enter__(self) -> SweepProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def retry(self, outcome: Outcome) -> None:
        """Show that a run will be tried again."""
        self._console.print(f"again: {outcome.run}: {outcome.error}", markup=False, soft_wrap=True)

    def advance(self, outcome: Outcome) -> None:
        """Count a run that ended. A failed one is shown at once."""
        kind = (outcome.run.dataset, outcome.run.model)
        self.done += 1
        self._left[kind] -= 1
        self._seconds.setdefault(kind, []).append(outcome.seconds)
        if outcome.error is not None:
            self.failed += 1
            self._console.print(f"failed: {outcome.run}: {outcome.error}", markup=False, soft_wrap=True)
        state = f"{self.failed} failed, " * bool(self.failed) + f"{self.rate:.1f} a minute, {self.remaining} left"
        self._bar.update(self._task, advance=1, description=state)
        now = time.monotonic()
        if not self._console.is_terminal and (now >= self._logged + LOG_EVERY_S or self.done == self._total):
            self._logged = now
            self._console.print(f"{self.done}/{self._total} runs, {state}: {outcome.run}", markup=False, soft_wrap=True)

    @property
    def rate(self) -> float:
        """Runs per minute since this process began, the start of the others included."""
        return 60 * self.done / max(time.monotonic() - self._start, 1e-9)

    @property
    def remaining(self) -> timedelta:
        """The time that the remaining runs will take; of a kind not seen yet, as long as the mean of the others."""
        means = {kind: mean(seconds) for kind, seconds in self._seconds.items()}
        usual = mean(means.values()) if means else 0.0
        seconds = sum(count * means.get(kind, usual) for kind, count in self._left.items())
        at_a_time = max(min(self._processes, self._left.total()), 1)
        return timedelta(seconds=round(seconds / at_a_time))
