"""What compression of activations costs in time: a step of the GraphSAGE in :mod:`.sage`, as it is, under checkpoints
and in codes, in turn in one process."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from ..harness import Case, Measured, Provider, Work
from . import sage
from .inputs import Setting

QUICK = ("pyg csr fp32", "qgnn pyg csr int2-rp8 rows1")
TIMED = (
    *QUICK,
    *("pyg csr bf16", "pyg csr checkpoint fp32", "pyg csr save_on_cpu fp32"),
    *(f"qgnn pyg csr {name}" for name in ("int8", "int2", "int2-rp8 rows64", "int2-rp8-vm", "int2-rp8-vm redrawn")),
    *("qgnn pyg csr rp4 20 MB redrawn", "qgnn layers int8", "qgnn layers int8 keeping int2-rp8"),
)


def _timed(setup: Callable[[], Work | Measured]) -> Work:
    """The step alone: what it keeps is in the suite memory."""
    work = setup()
    assert isinstance(work, Work)
    return replace(work, forward=None, kept=None, metrics=None)


def cases(setting: Setting) -> Iterator[Case]:
    problem = sage.Problem(setting, num_seeds=1)  # the time of a gate stands for that of a step
    names = QUICK if setting.quick else TIMED
    providers = [
        Provider(p.name, partial(_timed, p.setup), p.tolerance)
        for p in (*problem.providers(), *problem.around_pyg("csr", problem.csr, sage.BUDGETS))
        if p.name in names
    ]
    yield Case(problem.name, "step", problem.exact, providers)
