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
from qgnn.cli.compression import Compression
from qgnn.cli.errors import UsageError
from qgnn.cli.model import GAT_HEADS
from qgnn.cli.plot import check_plot, write_plot
from qgnn.cli.precision import Precision
from qgnn.cli.provenance import make_stamp, now
from qgnn.cli.recipe import Recipe, recipe_for
from qgnn.cli.run import Run, normalize_rows, train_run
from qgnn.data import DatasetError, load


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
    if options.model == "gat" and options.hidden is not None and options.hidden % GAT_HEADS:
        raise UsageError(
            f"--model gat expects a multiple of {GAT_HEADS}, its number of heads (got --hidden {options.hidden}); "
            f"give --hidden {options.hidden + -options.hidden % GAT_HEADS}"
        )
    data = load_data(options)
    recipe = recipe_for(options, data)
    check_layers(options, recipe)

    stamp, utc = make_stamp(device), now()
    try:
        if recipe.normalize:
            data = normalize_rows(data)
        runs = train_all(data, options, recipe, device)
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
        "runs": runs,
    }
    Console().print(report.table(runs, report.caption(options.dataset, options.model, data, recipe, device)))
    if options.json is not None:
        write_json(Path(options.json), result)
    if options.plot is not None:
        write_plot(Path(options.plot), result)


def check_layers(options: argparse.Namespace, recipe: Recipe) -> None:
    """Raise if the model would be without a convolution, or an integer precision without a layer of its own."""
    if options.model == "gcn2" and recipe.layers < 3:
        raise UsageError(
            f"--model gcn2 expects at least 3 layers (got {recipe.layers}), since the first and the last are dense; "
            "give --layers 3 or more"
        )
    for precision in options.precision:
        if precision.bits is not None and recipe.layers < 2:
            raise UsageError(
                f"--precision {precision.name} expects at least 2 layers (got --layers {recipe.layers}), since the "
                "last layer stays in full precision; give --layers 2 or leave it out"
            )


def train_all(data: Data, options: argparse.Namespace, recipe: Recipe, device: torch.device) -> list[dict[str, Any]]:
    """Train every precision with every seed, the precisions in turn, so that a busy moment does not hit only one."""
    order = [
        (precision, compress, seed)
        for seed in range(options.seed, options.seed + options.seeds)
        for precision in options.precision
        for compress in options.compress
    ]
    data = data.to(device, "x", "edge_index", "y", "train_mask", "val_mask", "test_mask")
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
        task = progress.add_task("", total=len(order) * recipe.epochs)
        for precision, compress, seed in order:
            names = {"precision": precision.name, "compress": compress.name}
            name = report.row_name(names)
            progress.update(task, description=f"{name}, seed {seed}")
            run = run_one(
                data, recipe, precision, compress, seed, device, options.model, lambda: progress.advance(task)
            )
            if not console.is_terminal:
                print(report.run_line(name, seed, run), file=sys.stderr, flush=True)
            runs.append({**names, "seed": seed, **run._asdict()})
    # In the order of the command line: precision by precision, in it compression by compression.
    rows = list(dict.fromkeys((precision.name, compress.name) for precision, compress, _ in order))
    return sorted(runs, key=lambda run: rows.index((run["precision"], run["compress"])))


def run_one(
    data: Data,
    recipe: Recipe,
    precision: Precision,
    compress: Compression,
    seed: int,
    device: torch.device,
    model: str,
    on_epoch: Callable[[], None],
) -> Run:
    """One run, with a format that a layer refuses turned into a usage error."""
    try:
        return train_run(data, recipe, precision, seed, device, model, on_epoch, compress)
    except ValueError as error:
        raise UsageError(f"--precision {precision.name} on {device.type}: {error}") from error


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


def load_data(options: argparse.Namespace) -> Data:
    """The data set, checked to be one that these models can be trained on."""
    try:
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
