"""A GCN layer inside a network: forward, backward and optimizer step, quantization included."""

from collections.abc import Iterator

from ..harness import Case
from .gcn import Problem
from .inputs import Setting


def cases(setting: Setting) -> Iterator[Case]:
    for like, width in setting.shapes(("arxiv", 256), ("pubmed", 64), ("cora", 64)):
        problem = Problem(f"gcn-layer/{width}", like, (width, width), setting)
        yield Case(problem.name, "step", problem.exact, list(problem.providers()))
