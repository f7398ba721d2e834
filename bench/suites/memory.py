"""What a training step takes of memory: each provider of ``train`` makes a few steps in a process of its own."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from ..harness import Case, Measured, Provider, UnavailableError
from ..records import ROOT
from .inputs import Setting
from .train import problem

TIMEOUT_SECONDS = 300

# Every child takes seconds to import what it needs.
QUICK_PROVIDERS = ("qgnn int8", "pyg coo fp32")


def _measure(like: str, provider: str, setting: Setting) -> Measured:
    if not sys.platform.startswith("linux"):
        raise UnavailableError("only Linux tells a process its peak of memory")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.pt"
        options = [like, provider, str(setting.device), str(out), *(["--quick"] if setting.quick else [])]
        isolated = ["-P"] if sys.flags.safe_path else []
        command = [sys.executable, *isolated, "-m", "bench.child", *options]
        subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_SECONDS, check=True)
        measured = torch.load(out, map_location=setting.device)
    if isinstance(measured, str):
        raise UnavailableError(measured)
    return Measured(**measured)


def cases(setting: Setting) -> Iterator[Case]:
    like = "arxiv"
    gcn = problem(like, setting)
    chosen = [p for p in gcn.providers() if not setting.quick or p.name in QUICK_PROVIDERS]
    providers = [Provider(p.name, partial(_measure, like, p.name, setting), p.tolerance) for p in chosen]
    yield Case(gcn.name, "step", gcn.exact, providers)
