"""``qgnn train``: check everything first, then train each precision with each seed, then report."""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch_geometric.data import Data

from qgnn.cli import report
from qgnn.cli.errors import UsageError
from qgnn.cli.model import check_model, check_scheme
from qgnn.cli.plot import check_plot, write_plot
from qgnn.cli.provenance import make_stamp, now
from qgnn.cli.recipe import Recipe, num_edges_of, recipe_for
from qgnn.cli.run import Run, train_run
from qgnn.cli.sampled import SampledNodeTask, sampling_of
from qgnn.cli.scheme import Scheme
from qgnn.cli.task import Task, make_task
from qgnn.cli.values import SEED
from qgnn.data import DatasetError, GraphSet, load, load_graphs
from qgnn.data.datasets import GRAPH_ENTRIES, key


def train(options: argparse.Namespace) -> None:
    """Run the command.

    Args:
        options: The parsed arguments.

    Raises:
        UsageError: If anything that the user gave cannot work; before training where that can be known.
    """
    device = pick_device(options.device)
    for flag, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None:
            check_writable(flag, Path(path))
    if options.plot is not None:
        check_plot(Path(options.plot))
    try:
        SEED(options.seed + options.seeds - 1)
    except ValueError as error:
        raise UsageError(f"the last seed of --seed {options.seed} --seeds {options.seeds}: {error}") from error
    by_graph = key(options.dataset) in GRAPH_ENTRIES
    check_fit(options, recipe_for(options, None if by_graph else 0), by_graph)
    sampling = sampling_of(options, recipe_for(options, None if by_graph else 0), by_graph)
    schemes = combine(options)
    data = load_data(options)
    recipe = recipe_for(options, num_edges_of(data))

    stamp, utc = make_stamp(device), now()
    try:
        task: Task
        if sampling is None:
            task = make_task(data, device, recipe.normalize)
        else:
            task = SampledNodeTask(data, sampling, device, recipe.normalize)
        runs = train_all(task, schemes, options, recipe, device)
    except (RuntimeError, MemoryError) as error:
        # On a CPU torch has no error type of its own for this.
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "can't allocate memory" not in str(error):
            raise
        raise UsageError(
            f"not enough memory on {device.type} to train on {options.dataset} with {recipe.hidden} hidden channels; "
            f"give a smaller --hidden{'' if device.type == 'cpu' else ' or --device cpu'}"
        ) from error
    stamp = stamp.until(make_stamp(device))
    result = {
        "command": options.command_line,
        "utc": utc,
        "machine": stamp.device,
        "commit": stamp.commit,
        "dirty": stamp.dirty,
        "versions": stamp.versions,
        "dataset": options.dataset.strip().lower(),
        "model": options.model,
        "device": device.type,
        "recipe": asdict(recipe),
        "sampling": None if sampling is None else asdict(sampling),
        "runs": runs,
    }
    Console().print(report.table(runs, report.caption(options.dataset, options.model, task, recipe, device)))
    if options.json is not None:
        write_json(Path(options.json), result)
    if options.plot is not None:
        write_plot(Path(options.plot), result)


def combine(options: argparse.Namespace) -> list[Scheme]:
    """Each precision with each compression."""
    schemes = []
    for scheme in options.precision:
        for compression in options.compress:
            try:
                schemes.append(scheme.with_compression(compression))
            except ValueError as error:
                raise UsageError(f"--precision {scheme.name}, --compress {compression.name}: {error}") from error
    return schemes


def check_fit(options: argparse.Namespace, recipe: Recipe, by_graph: bool) -> None:
    """Raise unless the model is one for the data set, and each scheme one for the model."""
    try:
        check_model(options.model, recipe, by_graph)
        for scheme in options.precision:
            check_scheme(scheme, options.model, recipe, by_graph)
    except ValueError as error:
        raise UsageError(f"{error}; change --model, --precision, --layers, --hidden or --epochs") from error


def train_all(
    task: Task, schemes: list[Scheme], options: argparse.Namespace, recipe: Recipe, device: torch.device
) -> list[dict[str, Any]]:
    """Train every scheme with every seed, the schemes in turn, so that a busy moment does not hit only one."""
    order = [(scheme, seed) for seed in range(options.seed, options.seed + options.seeds) for scheme in schemes]
    console = Console(stderr=True)
    runs = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(order) * recipe.epochs)
        for scheme, seed in order:
            names = {"precision": scheme.name, "compress": scheme.compression.name}
            name = report.row_name(names)
            progress.update(bar, description=f"{name}, seed {seed}")
            run = run_one(task, recipe, scheme, seed, device, options.model, lambda: progress.advance(bar))
            if not console.is_terminal:
                print(report.run_line(name, seed, run), file=sys.stderr, flush=True)
            runs.append({**names, "seed": seed, **run._asdict()})
    # In the order of the command line: precision by precision, in it compression by compression.
    rows = [(scheme.name, scheme.compression.name) for scheme in schemes]
    return sorted(runs, key=lambda run: rows.index((run["precision"], run["compress"])))


def run_one(
    task: Task,
    recipe: Recipe,
    scheme: Scheme,
    seed: int,
    device: torch.device,
    model: str,
    on_epoch: Callable[[], None],
) -> Run:
    """One run, with a format that a layer refuses turned into a usage error."""
    try:
        return train_run(task, recipe, scheme, seed, device, model, on_epoch)
    except ValueError as error:
        raise UsageError(f"--precision {scheme.name} on {device.type}: {error}") from error


def pick_device(name: str | None) -> torch.device:
    """The device of that name, or the GPU if there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"--device cuda expects a GPU that torch can use (torch {torch.__version__} finds none); "
            "give --device cpu, or install a build of torch with CUDA"
        )
    if name != "cpu" and torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        raise UsageError("the GPU expects Triton (not installed); pip install triton, or give --device cpu")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def load_data(options: argparse.Namespace) -> Data | GraphSet:
    """The data set, checked to be one that these models can be trained on."""
    try:
        if key(options.dataset) in GRAPH_ENTRIES:
            return load_graphs(options.dataset, options.root)
        data = load(options.dataset, options.root)
    except (ValueError, DatasetError) as error:
        raise UsageError(f"--dataset {options.dataset}: {error}") from error
    except (OSError, RuntimeError) as error:  # a folder that cannot be read, a home that does not exist
        raise UsageError(f"--root expects a folder that can be read (got {options.root!r}: {error})") from error
    if not isinstance(data, Data) or data.x is None:
        raise UsageError(f"--dataset {options.dataset}: expected one graph with node features (got {data})")
    return data


def check_writable(flag: str, path: Path) -> None:
    """Raise unless the file can be written, without leaving a trace if it did not exist."""
    try:
        existed = path.exists() or path.is_symlink()
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise UsageError(
            f"{flag} expects a file that can be written (got {str(path)!r}: {error.strerror}); "
            "name one in an existing folder of yours"
        ) from error


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write the result as JSON."""
    try:
        path.write_text(report.to_json(result), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json: {str(path)!r} could not be written after training ({error.strerror})") from error
