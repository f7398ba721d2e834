"""The one place that times: a correctness gate, warm-up, then the providers of a case in turn.

A suite declares cases; a case is one piece of work on one input, with a reference result and the providers that do it.
A ratio of two records is fair if both come from one case: same process, same input, same rounds, quantization included.
"""

import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qgnn.cli.measure import MIB, SavedBytes

from .clock import Clock, percentile
from .records import Record, Stamp, make_record, now


class UnavailableError(Exception):
    """A provider cannot do this work here; the message says why. It leaves no record."""


@dataclass(frozen=True)
class Work:
    """A provider set up for a case.

    Args:
        run: The timed call.
        check: The same work from the same state, returning what the gate compares; ``None``: the result of ``run``.
        forward: One forward pass, to count what it keeps for the backward pass, or ``None``.
    """

    run: Callable[[], object]
    check: Callable[[], Sequence[Tensor]] | None = None
    forward: Callable[[], object] | None = None


@dataclass(frozen=True)
class Provider:
    """A named way to do the work; ``tolerance`` bounds its relative error, ||result - reference|| / ||reference||."""

    name: str
    setup: Callable[[], Work]
    tolerance: float


@dataclass(frozen=True)
class Case:
    """One input and one pass: ``forward``, ``backward`` or ``step``.

    Args:
        name: A path from the general to the special, as ``arxiv/synthetic/F128/weighted``.
        pass_: What is timed.
        reference: The result that the gate compares with.
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
    """How long to measure a case: rounds until ``seconds`` have passed, at least and at most so many."""

    min_rounds: int = 5
    max_rounds: int = 100
    seconds: float = 3.0
    warmup_seconds: float = 0.2


QUICK = Effort(min_rounds=3, max_rounds=5, seconds=0.2, warmup_seconds=0.0)


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


def gate(work: Work, reference: Sequence[Tensor]) -> float:
    """The error of a second call, made after freed memory was filled with NaN."""
    check = work.check or (lambda: _outputs(work.run()))
    _poison(list(check()))
    return relative_error(list(check()), reference)


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


def saved_bytes(forward: Callable[[], object]) -> int:
    """Bytes of the distinct storages that ``forward`` makes and saves for the backward pass.

    What was alive before it (parameters, inputs, a prepared graph) is kept anyway and does not count.
    """
    saved = SavedBytes()
    with saved.count():
        forward()
    return round(saved.mib * MIB)


def _sample(works: Sequence[Work], clock: Clock, effort: Effort) -> list[list[float]]:
    """Times of each work: rounds in which every work runs once, starting with another one each time."""
    samples: list[list[float]] = [[] for _ in works]
    functions = [work.run for work in works]
    for function in functions:
        start = time.perf_counter()
        while True:
            function()
            clock.synchronize()
            if time.perf_counter() - start >= effort.warmup_seconds:
                break
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        for number in range(effort.max_rounds):
            order = [(number + offset) % len(works) for offset in range(len(works))]
            for index, ms in zip(order, clock.round([functions[i] for i in order]), strict=True):
                samples[index].append(ms)
            if number + 1 >= effort.min_rounds and time.perf_counter() - start > effort.seconds:
                break
    finally:
        gc.enable()
    return samples


def _say(suite: str, case: Case, provider: str, message: str) -> None:
    print(f"{suite}: {case.name} {case.pass_}: {provider}: {message}", file=sys.stderr, flush=True)


def measure(
    suite: str, case: Case, *, stamp: Stamp, clock: Clock, effort: Effort, device: torch.device
) -> list[Record]:
    """Gate and time the providers of a case. What fails its gate is recorded with ``ok`` false and is not timed."""
    utc = now()
    reference = case.reference()
    gated: list[tuple[Provider, Work | None, float]] = []
    for provider in case.providers:
        try:
            work = provider.setup()
            error = gate(work, reference)
        except UnavailableError as reason:
            _say(suite, case, provider.name, f"not available: {reason}")
            continue
        except Exception:  # one provider's failure must not end the run; it is recorded as not ok
            _say(suite, case, provider.name, f"failed\n{traceback.format_exc()}")
            gated.append((provider, None, float("nan")))
            continue
        if not error <= provider.tolerance:
            _say(suite, case, provider.name, f"relative error {error:.3g} is over {provider.tolerance:.3g}")
            gated.append((provider, None, error))
        else:
            gated.append((provider, work, error))
    del reference

    timed = [work for _, work, _ in gated if work is not None]
    samples = iter(_sample(timed, clock, effort))
    records = []
    for provider, passed, error in gated:
        times = [float("nan")] if passed is None else next(samples)
        records.append(
            make_record(
                stamp,
                utc,
                suite=suite,
                case=case.name,
                provider=provider.name,
                median_ms=percentile(times, 0.5),
                p20_ms=percentile(times, 0.2),
                p80_ms=percentile(times, 0.8),
                peak_mib=peak_mib(passed, device) if passed is not None else None,
                saved_mib=saved_bytes(passed.forward) / MIB
                if passed is not None and passed.forward is not None
                else None,
                bytes=case.num_bytes,
                error=error,
                ok=passed is not None,
                **{"pass": case.pass_},
            )
        )
    return records


def measure_all(
    suite: str,
    cases: Iterator[Case],
    *,
    deadline: float,
    stamp: Stamp,
    clock: Clock,
    effort: Effort,
    device: torch.device,
) -> Iterator[list[Record]]:
    """Measure case after case until they end or the deadline (``time.monotonic()``) has passed."""
    for case in cases:
        if time.monotonic() > deadline:
            _say(suite, case, "all", "not measured: out of time")
            return
        yield measure(suite, case, stamp=stamp, clock=clock, effort=effort, device=device)
