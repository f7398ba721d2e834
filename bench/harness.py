"""The one place that times: a correctness gate, warm-up, then the providers of a case in turn.

A suite declares cases; a case is one piece of work on one input, with a reference result and the providers that do it.
A ratio of two records is fair if both come from one case: same process, same input, same rounds, quantization included.
Whatever fails, from the set-up to the last call, costs its provider the numbers and nobody else's.
"""

import gc
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qgnn.cli.measure import device_is_lost
from qgnn.cli.metric import METRICS
from qgnn.cli.provenance import Stamp, now
from qgnn.memory import MIB

from .clock import Clock, percentile
from .live import saved_bytes, storage_mib
from .records import Record, make_record


class DeviceLostError(RuntimeError):
    """A device that serves no call of this process any more, as after an access out of bounds. ``records`` are of the
    case that met it: what was timed before, and who failed."""

    records: Sequence[Record] = ()


class UnavailableError(Exception):
    """A provider cannot do this work here; the message says why. It leaves no record."""


@dataclass(frozen=True)
class Work:
    """A provider set up for a case.

    Args:
        run: The timed call.
        check: The same work from the same state, returning what the gate compares; ``None``: the result of ``run``.
        forward: One forward pass, to count what it keeps for the backward pass, or ``None``.
        kept: The tensors that are kept from call to call, or for the backward pass where hooks hide them from
            ``forward``; or ``None``.
        metrics: What else is measured, by name.
    """

    run: Callable[[], object]
    check: Callable[[], Sequence[Tensor]] | None = None
    forward: Callable[[], object] | None = None
    kept: Callable[[], Iterable[Tensor]] | None = None
    metrics: Callable[[], Mapping[str, float]] | None = None

    def kept_mib(self) -> float | None:
        """MiB that are kept, or ``None`` if they are not counted."""
        if self.kept is not None:
            return storage_mib(self.kept())
        return None if self.forward is None else saved_bytes(self.forward) / MIB


@dataclass(frozen=True)
class Measured:
    """What a process of its own measured of a provider, and the results that the gate compares."""

    results: Sequence[Tensor]
    times_ms: Sequence[float]
    peak_mib: float | None
    saved_mib: float | None
    test_acc: float | None = None
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Provider:
    """A named way to do the work; ``tolerance`` bounds its relative error, ||result - reference|| / ||reference||.

    The name ends in the precision, as in ``torch.sparse csr fp32``: reports compare with the best of a precision.
    ``num_bytes`` are what it has to move, where that is not what the others of its case have to.
    """

    name: str
    setup: Callable[[], Work | Measured]
    tolerance: float
    num_bytes: int | None = None


@dataclass(frozen=True)
class Case:
    """One input and one pass.

    Args:
        name: A path from the general to the special, as ``arxiv/synthetic/F128/weighted``.
        pass_: What is timed: ``forward``, ``backward``, ``step`` (both, and the optimizer), or ``warm``: the forward
            pass on operands that are codes already.
        reference: The result that the gate compares with, in float64.
        providers: Who does the work.
        num_bytes: The fewest bytes anyone has to move, each input read once and each output written once, or ``None``.
    """

    name: str
    pass_: str
    reference: Callable[[], Sequence[Tensor]]
    providers: Sequence[Provider]
    num_bytes: int | None = None


@dataclass(frozen=True)
class Effort:
    """How long to measure a case: rounds until ``seconds`` have passed, at least and at most so many.

    ``few_rounds`` are enough for a provider much slower than the others, and for everyone after ``patience`` seconds.
    """

    min_rounds: int = 5
    max_rounds: int = 100
    seconds: float = 3.0
    warmup_seconds: float = 0.2
    few_rounds: int = 3
    patience: float = 60.0


QUICK = Effort(min_rounds=3, max_rounds=3, seconds=0.0, warmup_seconds=0.0)

# A CPU call of so many seconds is warm, slow next to calls a quarter as long, and in the gate not made a second time.
WARM_SECONDS, SLOW_FACTOR, ONCE_SECONDS = 1.0, 4.0, 5.0


@dataclass
class Entry:
    """A provider on its way through a case; ``work`` is ``None`` when nothing is left to be done with it."""

    provider: Provider
    work: Work | None = None
    error: float = float("nan")
    seconds: float = 0.0  # of one call
    ok: bool = True
    times_ms: list[float] = field(default_factory=list)
    peak_mib: float | None = None
    saved_mib: float | None = None
    test_acc: float | None = None
    metrics: Mapping[str, float] | None = None

    def fail(self) -> None:
        self.work, self.ok, self.times_ms = None, False, []
        self.peak_mib = self.saved_mib = self.test_acc = self.metrics = None

    def has_diverged(self) -> bool:
        """Whether it trained a model whose score is not finite."""
        metrics = self.metrics or {}
        scores = (self.test_acc, *(metrics.get(name) for name in METRICS))
        return not all(score is None or math.isfinite(score) for score in scores)


def relative_error(results: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """The largest relative Frobenius error over the results; infinite if a shape differs or a value is not finite."""
    if len(results) != len(reference) or any(a.shape != b.shape for a, b in zip(results, reference, strict=True)):
        return float("inf")
    worst = 0.0
    for result, expected in zip(results, reference, strict=True):
        exact = expected.detach().double()
        distance = (result.detach().double() - exact).norm() / exact.norm().clamp_min(1e-30)
        worst = max(worst, float(distance.nan_to_num(nan=float("inf"))))
    return worst


def _outputs(result: object) -> Sequence[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)  # type: ignore[call-overload]


def _poison(outputs: Sequence[Tensor]) -> None:
    """Leave NaN where the next outputs of these sizes are likely to be allocated, so that gaps in them show."""
    for output in outputs:
        blocks = [torch.full_like(output.detach(), float("nan")) for _ in range(2) if output.is_floating_point()]
        del blocks


def gate(work: Work, reference: Sequence[Tensor], device: torch.device) -> tuple[float, float]:
    """The relative error of a call made after freed memory was filled with NaN, and the seconds that it took.

    It is the second call, so that what the first one left behind does not pass; the first, where a call takes long.
    """
    check = work.check or (lambda: _outputs(work.run()))

    def timed() -> tuple[Sequence[Tensor], float]:
        start = time.perf_counter()
        results = check()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return results, time.perf_counter() - start

    _poison([t.float() for t in reference])
    results, seconds = timed()
    if device.type == "cuda" or seconds <= ONCE_SECONDS:
        _poison(results)
        del results
        results, seconds = timed()
    return relative_error(results, reference), seconds


def peak_mib(work: Work, device: torch.device) -> float | None:
    """Memory beyond what was allocated before the call, or ``None`` where the device does not count it."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work.run()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / MIB


@contextmanager
def _attempt(entry: Entry, say: Callable[[str, str], None]) -> Iterator[None]:
    """Make an exception, running out of memory included, the failure of this provider alone.

    Raises:
        DeviceLostError: If the device serves nobody any more.
    """
    try:
        yield
    except Exception as error:
        say(entry.provider.name, f"failed\n{traceback.format_exc()}")
        entry.fail()
        if device_is_lost():
            raise DeviceLostError("the device is of no use to this process any more") from error


def _prepare(entry: Entry, reference: Sequence[Tensor], device: torch.device) -> None:
    """Set a provider up and hold its result to the reference."""
    made = entry.provider.setup()
    if isinstance(made, Measured):
        entry.error = relative_error(made.results, reference)
        entry.times_ms, entry.peak_mib, entry.saved_mib = list(made.times_ms), made.peak_mib, made.saved_mib
        entry.test_acc, entry.metrics = made.test_acc, made.metrics
    else:
        entry.work = made
        entry.error, entry.seconds = gate(made, reference, device)


def _sample(entries: Sequence[Entry], clock: Clock, effort: Effort, say: Callable[[str, str], None]) -> None:
    """Time each work: rounds in which every work runs once, starting with another one each time."""
    for entry in entries:
        with _attempt(entry, say):
            start = time.perf_counter()
            while entry.work is not None and entry.seconds < WARM_SECONDS:
                entry.work.run()
                clock.synchronize()
                if time.perf_counter() - start >= effort.warmup_seconds:
                    break
    fastest = min((entry.seconds for entry in entries), default=0.0)
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        for number in range(effort.max_rounds):
            for offset in range(len(entries)):
                entry = entries[(number + offset) % len(entries)]
                is_slow = entry.seconds > max(WARM_SECONDS, SLOW_FACTOR * fastest)
                if entry.work is None or (is_slow and len(entry.times_ms) >= effort.few_rounds):
                    continue
                with _attempt(entry, say):
                    entry.times_ms.append(clock.time(entry.work.run))
            elapsed = time.perf_counter() - start
            enough = effort.few_rounds if elapsed > effort.patience else effort.min_rounds
            if number + 1 >= enough and elapsed >= effort.seconds:
                break
    finally:
        gc.enable()


def _count(entry: Entry, device: torch.device) -> None:
    """What a call keeps, and the memory that it takes."""
    if entry.work is not None:
        entry.peak_mib = peak_mib(entry.work, device)
        entry.saved_mib = entry.work.kept_mib()
        entry.metrics = entry.work.metrics and entry.work.metrics()


def measure(
    suite: str,
    case: Case,
    *,
    stamp: Stamp,
    clock: Clock,
    effort: Effort,
    device: torch.device,
    deadline: float = math.inf,
) -> list[Record]:
    """Gate and time the providers of a case that can be set up before the deadline. What fails its gate, or trained a
    model that diverged, is recorded with ``ok`` false and is not timed."""

    def say(provider: str, message: str) -> None:
        print(f"{suite}: {case.name} {case.pass_}: {provider}: {message}", file=sys.stderr, flush=True)

    utc, entries = now(), list[Entry]()
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()  # or else sizes that differ from the last case's would be symbols
    try:
        _measure(entries, case, clock, effort, device, deadline, say)
    except DeviceLostError as error:
        error.records = [_record(suite, case, e, stamp, utc) for e in entries if e.times_ms or not e.ok]
        raise
    return [_record(suite, case, entry, stamp, utc) for entry in entries]


def _measure(
    entries: list[Entry],
    case: Case,
    clock: Clock,
    effort: Effort,
    device: torch.device,
    deadline: float,
    say: Callable[[str, str], None],
) -> None:
    """Fill ``entries``, which are none yet."""
    reference: Sequence[Tensor] | None = None
    for provider in case.providers:
        if time.monotonic() > deadline:
            say(provider.name, "not measured: out of time")
            continue
        entry = Entry(provider)
        entries.append(entry)
        with _attempt(entry, say):
            try:
                reference = case.reference() if reference is None else reference
                _prepare(entry, reference, device)
            except UnavailableError as reason:
                say(provider.name, f"not available: {reason}")
                entries.pop()
                continue
        if entry.ok and not entry.error <= provider.tolerance:
            say(provider.name, f"relative error {entry.error:.3g} is over {provider.tolerance:.3g}")
            entry.fail()
        if entry.has_diverged():
            say(provider.name, "its score is not finite: training diverged")
            entry.fail()
    reference = None

    _sample([entry for entry in entries if entry.work is not None], clock, effort, say)
    for entry in entries:
        with _attempt(entry, say):
            _count(entry, device)


def _record(suite: str, case: Case, entry: Entry, stamp: Stamp, utc: str) -> Record:
    times = entry.times_ms or [float("nan")]
    return make_record(
        stamp,
        utc,
        suite=suite,
        case=case.name,
        provider=entry.provider.name,
        median_ms=percentile(times, 0.5),
        p20_ms=percentile(times, 0.2),
        p80_ms=percentile(times, 0.8),
        peak_mib=entry.peak_mib,
        saved_mib=entry.saved_mib,
        bytes=case.num_bytes if entry.provider.num_bytes is None else entry.provider.num_bytes,
        error=entry.error,
        ok=entry.ok,
        test_acc=entry.test_acc,
        metrics=entry.metrics,
        **{"pass": case.pass_},
    )


def measure_all(
    suite: str,
    cases: Iterator[Case],
    *,
    deadline: float,
    stamp: Stamp,
    clock: Clock,
    effort: Effort,
    device: torch.device,
    whole: bool = False,
) -> Iterator[list[Record]]:
    """Measure case after case until they end or the deadline (``time.monotonic()``) has passed, within a case, too, but
    where only ``whole`` ones are wanted."""
    cut = math.inf if whole else deadline
    for case in cases:
        if time.monotonic() > deadline:
            print(f"{suite}: {case.name} {case.pass_}: not measured: out of time", file=sys.stderr, flush=True)
            return
        yield measure(suite, case, stamp=stamp, clock=clock, effort=effort, device=device, deadline=cut)
