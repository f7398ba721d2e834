"""One run of a sweep, in the process that it is given to."""

from __future__ import annotations

import argparse
from functools import lru_cache
from typing import Any

import torch

from qgnn.cli.recipe import GIVEN, num_edges_of, recipe_for
from qgnn.cli.run import paired_run
from qgnn.cli.sweep.run_spec import NONE, RunSpec, scheme_of
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
    recipe = recipe_for(settings, num_edges_of(data))
    scheme = scheme_of(run.format, run.component, run.schedule, run.rounding)
    task = task_of(run.dataset, root, device, recipe.normalize)
    result = paired_run(task, recipe, scheme, run.seed, torch.device(device), run.model)
    if run.schedule != NONE and not result.widths:  # else it would be recorded as what it is not
        raise RuntimeError(f"the schedule {run.schedule} set no width: this is a run of a fixed one")
    names = ("test_acc", "final_loss", "best_epoch", "mean_bits", "widths")
    return {"metric": task.metric.name, **{name: getattr(result, name) for name in names}}


@lru_cache(maxsize=1)  # runs of one data set come one after another
def read(dataset: str, root: str | None) -> Any:
    """The data set, checked to be one that can be trained on."""
    return load_data(argparse.Namespace(dataset=dataset, root=root))


@lru_cache(maxsize=1)
def task_of(dataset: str, root: str | None, device: str, normalize: bool) -> Task:
    """What is to be learned from it, on its device."""
    return make_task(read(dataset, root), torch.device(device), normalize)
