"""One run of a sweep, in the process that it is given to."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from qgnn.cli.recipe import GIVEN, recipe_for
from qgnn.cli.run import train_run
from qgnn.cli.scheme import Scheme
from qgnn.cli.sweep.run_spec import BASELINE, NONE, RunSpec
from qgnn.cli.task import Task, make_task
from qgnn.cli.train import load_data


def execute(run: RunSpec, root: str | None, device: str) -> dict[str, Any]:
    """Train, and return what the seed determines: times of processes side by side say nothing.

    Args:
        run: What to train.
        root: Folder of the data sets.
        device: Where.

    Raises:
        RuntimeError: If the run has a schedule, and nothing followed it.
    """
    settings = argparse.Namespace(dataset=run.dataset, model=run.model, root=root, **dict.fromkeys(GIVEN))
    vars(settings).update(run.recipe)
    data = read(run.dataset, root)
    recipe = recipe_for(settings, data)
    result = train_run(
        task_of(run.dataset, root, device, recipe.normalize),
        recipe,
        scheme_of(run),
        run.seed,
        torch.device(device),
        run.model,
        measure=False,
    )
    if run.schedule != NONE and not result.widths:  # else it would be recorded as what it is not
        raise RuntimeError(f"the schedule {run.schedule} set no width: this is a run of a fixed one")
    names = ("test_acc", "final_loss", "mean_bits", "widths")
    return {name: value for name, value in result._asdict().items() if name in names}


def scheme_of(run: RunSpec) -> Scheme:
    """What the run computes in."""
    if run.format == BASELINE:
        return Scheme.from_parts(BASELINE)
    scheme = Scheme.from_parts(run.format, run.component, None if run.schedule == NONE else run.schedule)
    assert scheme.config is not None
    return replace(scheme, config=replace(scheme.config, rounding=run.rounding))


@lru_cache(maxsize=1)  # runs of one data set come one after another
def read(dataset: str, root: str | None) -> Any:
    """The data set, checked to be one that can be trained on."""
    return load_data(argparse.Namespace(dataset=dataset, root=root))


@lru_cache(maxsize=1)
def task_of(dataset: str, root: str | None, device: str, normalize: bool) -> Task:
    """What is to be learned from it, on its device."""
    return make_task(read(dataset, root), torch.device(device), normalize)
