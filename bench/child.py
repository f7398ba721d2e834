"""``python -m bench.child SUITE PROBLEM PROVIDER DEVICE OUT``: one provider of a suite, all by itself.

It writes the fields of :class:`bench.harness.Measured` to OUT, or why the provider is not available here. Of several
processes that ``torchrun`` has started, the first one does.
"""

import argparse
import os
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from qgnn.cli.measure import PeakMemory
from qgnn.cli.processes import is_launched

from .clock import Clock, make_clock
from .harness import UnavailableError, Work
from .suites.inputs import Setting
from .suites.process import Problems

MIN_STEPS, MAX_STEPS, ENOUGH_MS = 3, 20, 2000.0


def measure(work: Work, memory: PeakMemory, base_mib: float, clock: Clock) -> dict[str, Any]:
    """A few steps of ``work``; its peak counts from ``base_mib``, the level before anything of it was made."""
    times_ms: list[float] = []
    while len(times_ms) < MIN_STEPS or (len(times_ms) < MAX_STEPS and sum(times_ms) < ENOUGH_MS):
        times_ms.append(clock.time(work.run))
    peak_mib = memory.mib
    metrics = work.metrics and work.metrics()  # of the steps: the check has a peak of its own
    assert peak_mib is not None
    assert work.check is not None
    return {
        "times_ms": times_ms,
        "peak_mib": peak_mib - base_mib,
        "saved_mib": work.kept_mib(),
        "results": work.check(),
        "metrics": metrics,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.child", description=__doc__)
    for name in ("suite", "problem", "provider", "device"):
        parser.add_argument(name)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--root", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")

    device = torch.device(options.device)
    if is_launched() and device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    problems: Problems = import_module(f".suites.{options.suite}", __package__).PROBLEMS
    problem = problems[options.problem](Setting(device, options.quick, options.root))
    (setup,) = (provider.setup for provider in problem.providers() if provider.name == options.provider)
    clock, memory = make_clock(device), PeakMemory(device)  # a clock has memory of its own
    memory.start()
    base_mib = memory.mib
    result: dict[str, Any] | str
    if base_mib is None:
        result = "this system does not let a process reset its peak of memory"
    else:
        try:
            found = setup()
            result = measure(found, memory, base_mib, clock) if isinstance(found, Work) else vars(found)
        except UnavailableError as reason:
            result = str(reason)
    if os.environ.get("RANK", "0") == "0":
        torch.save(result, options.out)


if __name__ == "__main__":
    main()
