"""What a step takes of memory, of a GCN and of layers with attention: each provider in a process of its own."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..harness import Case, Measured, Provider, UnavailableError
from ..records import ROOT
from . import layer, train
from .inputs import Setting

TIMEOUT_SECONDS = 300

# Every child takes seconds to import what it needs.
QUICK_PROVIDERS = ("qgnn int8", "pyg coo fp32")


class Problem(Protocol):
    """What a process can be asked to measure a provider of."""

    name: str

    def exact(self) -> Sequence[Tensor]: ...

    def providers(self) -> Iterator[Provider]: ...


PROBLEMS: dict[str, Callable[[Setting], Problem]] = {
    "gcn": partial(train.Problem, "arxiv"),
    **{kind: partial(layer.Problem, kind, "arxiv") for kind in layer.ATTENTION},
}


def _measure(name: str, provider: str, setting: Setting) -> Measured:
    if not sys.platform.startswith("linux"):
        raise UnavailableError("only Linux tells a process its peak of memory")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.pt"
        options = [name, provider, str(setting.device), str(out), *(["--quick"] if setting.quick else [])]
        isolated = ["-P"] if sys.flags.safe_path else []
        command = [sys.executable, *isolated, "-m", "bench.child", *options]
        subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_SECONDS, check=True)
        measured = torch.load(out, map_location=setting.device)
    if isinstance(measured, str):
        raise UnavailableError(measured)
    return Measured(**measured)


def cases(setting: Setting) -> Iterator[Case]:
    for name, make in list(PROBLEMS.items())[: 2 if setting.quick else None]:
        problem = make(setting)
        chosen = [p for p in problem.providers() if not setting.quick or p.name in QUICK_PROVIDERS]
        providers = [Provider(p.name, partial(_measure, name, p.name, setting), p.tolerance) for p in chosen]
        yield Case(problem.name, "step", problem.exact, providers)
