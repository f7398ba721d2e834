"""A provider in a process of its own, whose peak of memory is then known."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from ..harness import Case, Measured, Provider, UnavailableError
from ..records import ROOT
from .inputs import Setting

TIMEOUT_SECONDS = 3600


class Problem(Protocol):
    """What a process can be asked to measure a provider of."""

    name: str

    def exact(self) -> Sequence[Tensor]: ...

    def providers(self) -> Iterator[Provider]: ...


Problems = Mapping[str, Callable[[Setting], Problem]]


def case(
    suite: str,
    name: str,
    problem: Problem,
    setting: Setting,
    chosen: Sequence[str] | None = None,
    num_processes: int = 1,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Case:
    """A training step of a problem, each of its providers in a process of its own, or in several that know each other.

    Args:
        suite: The suite, whose module has ``PROBLEMS``.
        name: The problem's among these.
        problem: The problem itself.
        setting: Where it runs.
        chosen: Names of providers; ``None`` for all.
        num_processes: How many a provider has; ``torchrun`` starts several.
        variables: Of their environment, beside those of this process.
    """
    providers = [
        replace(p, setup=partial(_measure, suite, name, p.name, setting, num_processes, variables))
        for p in problem.providers()
        if chosen is None or p.name in chosen
    ]
    return Case(problem.name, "step", problem.exact, providers)


def _measure(
    suite: str, name: str, provider: str, setting: Setting, num_processes: int, variables: Mapping[str, str]
) -> Measured:
    if not sys.platform.startswith("linux"):
        raise UnavailableError("only Linux tells a process its peak of memory")
    if setting.is_cuda and num_processes > torch.cuda.device_count():
        raise UnavailableError(f"{num_processes} processes need as many GPUs (found {torch.cuda.device_count()})")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.pt"
        options = [suite, name, provider, str(setting.device), str(out), *(["--quick"] if setting.quick else [])]
        if setting.root is not None:
            options += ["--root", str(setting.root.resolve())]
        several = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes), "-m"]
        command = [sys.executable, "-m", *(several if num_processes > 1 else []), "bench.child", *options]
        isolated = {"PYTHONSAFEPATH": "1"} if sys.flags.safe_path else {}
        environment = {**os.environ, **isolated, **variables}
        subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_SECONDS, check=True, env=environment)
        measured = torch.load(out, map_location=setting.device)
    if isinstance(measured, str):
        raise UnavailableError(measured)
    return Measured(**measured)
