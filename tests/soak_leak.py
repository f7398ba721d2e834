"""Training steps that should keep nothing: ``python tests/soak.py --leak --steps 10000``.

Each kind of step is run by itself: a first part fills caches and pools, then the memory of Python, the resident memory
of the process and the numbers of living tensors and graphs are taken every so many steps. What is kept of a step would
raise them in every part alike.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qgnn
from qgnn import Graph, QConfig
from qgnn.nn import Epilogue, QGATConv, QGCNConv
from qgnn.weak_cache import _entries

N, E, K = 60, 300, 16
SAMPLES = 8
# What a step may keep. The smallest tensor takes a page of 4 KiB as soon as its neighbors are gone, a Python object 16
# bytes at least: a leak of one object a step is above the first, of one tensor above the second. RSS moves in arenas of
# 64 MiB of which glibc gives back what it likes, so its slope is over all samples.
MAX_PYTHON_BYTES, MAX_RSS_BYTES = 16.0, 512.0


class Net(nn.Module):
    def __init__(self, config: QConfig | None) -> None:
        super().__init__()
        self.first = QGCNConv(K, K, config=config, epilogue=Epilogue("relu", dropout=0.5))
        self.second = QGATConv(K, 4, heads=2, config=config)

    def forward(self, x: Tensor, edges: Any) -> Tensor:
        return self.second(self.first(x, edges), edges)


def training(kind: str) -> Callable[[], None]:
    """A step of a small model: ``int8``, ``fp32``, ``compressed``, ``new_graphs``, ``graph_objects`` or ``traced``."""
    model = Net(None if kind == "fp32" else QConfig())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, edges = torch.randn(N, K), torch.randint(N, (2, E))

    def step() -> None:
        given: Any = edges
        if kind in ("new_graphs", "graph_objects"):
            given = torch.randint(N, (2, E))
        if kind == "graph_objects":
            given = Graph.from_edge_index(given, N).update(remove=torch.arange(3))
        compressed = qgnn.compress_activations(min_size=1) if kind == "compressed" else nullcontext()
        with compressed, qgnn.trace() if kind == "traced" else nullcontext():
            loss = model(x, given).square().mean()
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()

    return step


KINDS = ("int8", "fp32", "compressed", "new_graphs", "graph_objects", "traced")


def living() -> dict[str, int]:
    """Numbers of tensors, graphs and remembered results."""
    gc.collect()
    objects = gc.get_objects()
    return {
        "tensors": sum(issubclass(type(o), Tensor) for o in objects),
        "graphs": sum(type(o) is Graph for o in objects),
        "remembered": len(_entries),
    }


def resident_bytes() -> int:
    """Memory of the process that is in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def slope(values: list[float], steps: float) -> float:
    """By least squares, of values taken every so many steps: a step."""
    mean = sum(values) / len(values)
    center = (len(values) - 1) / 2
    rise = sum((i - center) * (value - mean) for i, value in enumerate(values))
    return rise / sum((i - center) ** 2 for i in range(len(values))) / steps


def measure(step: Callable[[], None], steps: int) -> dict[str, Any]:
    """What is kept of a step, after a third of the steps that does not count."""
    for _ in range(steps // 3):
        step()
    first = living()
    tracemalloc.start()
    python, resident = [], []
    part = max(1, (steps - steps // 3) // SAMPLES)
    for _ in range(SAMPLES):
        for _ in range(part):
            step()
        gc.collect()
        python.append(float(tracemalloc.get_traced_memory()[0]))
        resident.append(float(resident_bytes()))
    tracemalloc.stop()
    last = living()
    return {
        "python_bytes": round(slope(python, part), 2),
        "rss_bytes": round(slope(resident, part), 2),
        "more": {name: last[name] - first[name] for name in first},
    }


def leaks(found: dict[str, Any]) -> list[str]:
    """What grows."""
    grows = [f"{number} more {name}" for name, number in found["more"].items() if number > 0]
    for name, most in (("python_bytes", MAX_PYTHON_BYTES), ("rss_bytes", MAX_RSS_BYTES)):
        if found[name] > most:
            grows.append(f"{found[name]} {name} a step (of at most {most})")
    return grows


def main(steps: int, seed: int) -> dict[str, Any]:
    """All kinds, with a line each."""
    result: dict[str, Any] = {"steps": steps, "kinds": {}, "failures": []}
    for kind in KINDS:
        torch.manual_seed(seed)
        found = measure(training(kind), steps)
        result["kinds"][kind] = found
        grows = leaks(found)
        print(f"{'FAILED ' if grows else ''}{kind}: {found}", flush=True)
        result["failures"] += [{"kind": kind, "reason": reason} for reason in grows]
    return result
