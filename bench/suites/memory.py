"""What a step takes of memory, of a GCN, of layers with attention and of GraphSAGE under the compressor of activations:
each provider in a process of its own. And in number formats, of small graphs: bytes of tensors, in this process."""

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
from . import formats, layer, sage, train
from .inputs import Setting

TIMEOUT_SECONDS = 900

# Every child takes seconds to import what it needs.
QUICK: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gcn", "gat"), ("qgnn int8", "pyg coo fp32")),
    "sage": ("qgnn pyg csr int2-rp8 rows1", "qgnn pyg csr int1-rp4 G192 redrawn", "pyg csr fp32"),
    "sage budget": ("qgnn pyg csr rp8 20 MB redrawn", "pyg csr fp32"),
}


class Problem(Protocol):
    """What a process can be asked to measure a provider of."""

    name: str

    def exact(self) -> Sequence[Tensor]: ...

    def providers(self) -> Iterator[Provider]: ...


PROBLEMS: dict[str, Callable[[Setting], Problem]] = {
    "gcn": partial(train.Problem, "arxiv"),
    "sage": sage.Problem,
    "sage budget": sage.Budgets,
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
    for name, make in PROBLEMS.items():
        if setting.quick and name not in QUICK:
            continue
        problem = make(setting)
        chosen = [p for p in problem.providers() if not setting.quick or p.name in QUICK[name]]
        providers = [Provider(p.name, partial(_measure, name, p.name, setting), p.tolerance) for p in chosen]
        yield Case(problem.name, "step", problem.exact, providers)
    yield from formats.cases(setting)
