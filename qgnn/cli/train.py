"""``qgnn train``: check everything first, then train each precision with each seed, then report."""

import argparse
import contextlib
import errno
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch_geometric.data import Data

from qgnn.cli import report
from qgnn.cli.checkpoint import Checkpoint, read_checkpoint
from qgnn.cli.errors import UsageError
from qgnn.cli.model import check_model, check_scheme
from qgnn.cli.plot import check_plot, write_plot
from qgnn.cli.processes import ALONE, Processes
from qgnn.cli.provenance import Stamp, make_stamp, now
from qgnn.cli.recipe import Recipe, num_edges_of, recipe_for
from qgnn.cli.run import Run, train_run
from qgnn.cli.sampled import SampledNodeTask, Sampling, sampling_of
from qgnn.cli.scheme import Scheme
from qgnn.cli.task import Task, make_task
from qgnn.cli.training import Training
from qgnn.cli.values import SEED
from qgnn.data import DatasetError, GraphSet, load, load_graphs
from qgnn.data.datasets import GRAPH_ENTRIES, key, metric_of
from qgnn.data.disk import locked, replace_file

# On a CPU torch has no error type of its own for this, nor for more bytes than can be counted.
NO_MEMORY = ("can't allocate memory", "Storage size calculation overflowed")


def train(options: argparse.Namespace, processes: Processes = ALONE) -> None:
    """Run the command.

    Args:
        options: The parsed arguments.
        processes: Those that run it together.

    Raises:
        UsageError: If anything that the user gave cannot work; before training where that can be known.
    """
    device = processes.agree(lambda: pick_device(options.device, processes))
    kinds = processes.gather(device.type)
    if len(set(kinds)) > 1:
        raise UsageError(f"--device expects the same in all processes (got {', '.join(kinds)}); give cpu or cuda")
    sampling, schemes = processes.agree(lambda: checked(options, processes))
    with contextlib.ExitStack() as stack:
        if options.checkpoint is not None:
            path = Path(options.checkpoint)
            processes.agree(lambda: stack.enter_context(claimed(path)) if processes.is_first else None)
        carry_out(options, processes, device, sampling, schemes)


def carry_out(
    options: argparse.Namespace,
    processes: Processes,
    device: torch.device,
    sampling: Sampling | None,
    schemes: list[Scheme],
) -> None:
    """Load, train and report, with arguments that have been checked and files that are this command's own."""
    saved = processes.from_first(processes.agree(lambda: saved_in(options) if processes.is_first else None))
    # The first process of a machine may have to download what the others then find.
    data = processes.agree(lambda: load_data(options) if processes.local_rank == 0 else None)
    data = processes.agree(lambda: load_data(options) if data is None else data)
    recipe = recipe_for(options, num_edges_of(data))

    stamp = make_stamp(device)
    try:
        task: Task
        if sampling is None:
            task = make_task(data, device, recipe.normalize)
        else:
            task = SampledNodeTask(data, sampling, device, recipe.normalize, processes)
        checkpoint = Checkpoint(
            None if options.checkpoint is None else Path(options.checkpoint),
            options.checkpoint_every or 1,
            identity(options, task, recipe, sampling, device, processes),
            {"utc": now(), "stamp": asdict(stamp)},
            processes.is_first,
        )
        if saved is not None:
            processes.agree(lambda: checkpoint.load(saved))
        runs = train_all(task, schemes, options, recipe, device, checkpoint, processes)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and not any(
            message in str(error) for message in NO_MEMORY
        ):
            raise
        raise UsageError(
            f"not enough memory on {device.type} to train on {options.dataset} with {recipe.hidden} hidden channels; "
            f"give a smaller --hidden{'' if device.type == 'cpu' else ' or --device cpu'}"
        ) from error
    if not processes.is_first:
        return
    stamp = Stamp(**checkpoint.start["stamp"]).until(make_stamp(device))
    gradients = gradients_of(options, processes)
    result = {
        "command": options.command_line,
        "utc": checkpoint.start["utc"],
        "machine": stamp.device,
        "commit": stamp.commit,
        "dirty": stamp.dirty,
        "versions": stamp.versions,
        "dataset": options.dataset.strip().lower(),
        "metric": task.metric.name,
        "model": options.model,
        "device": device.type,
        "processes": processes.size,
        "gradients": gradients,
        "recipe": asdict(recipe),
        "sampling": None if sampling is None else asdict(sampling),
        "runs": runs,
    }
    try:
        if options.json is not None:
            write_json(Path(options.json), result)
    finally:  # the table is what is left of a training whose file cannot be written after all
        caption = report.caption(options.dataset, options.model, task, recipe, device)
        if gradients is not None:
            caption += f"; processes: {processes.size}, gradients: {gradients}"
        Console().print(report.table(runs, caption, task.metric))
    if options.plot is not None:
        write_plot(Path(options.plot), result)


def checked(options: argparse.Namespace, processes: Processes) -> tuple[Sampling | None, list[Scheme]]:
    """How batches are made and what runs compute in, of options that go together and files that can be written."""
    if not processes.is_joined:
        for name in ("gradients", "timeout"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name} expects several processes: torchrun --nproc-per-node 2 -m qgnn train ...")
    if options.checkpoint is None and (options.resume or options.checkpoint_every is not None):
        raise UsageError(f"--{'resume' if options.resume else 'checkpoint-every'} expects --checkpoint FILE")
    paths = [Path(path).resolve() for path in (options.json, options.plot, options.checkpoint) if path is not None]
    if len(set(paths)) < len(paths):
        raise UsageError("--json, --plot and --checkpoint expect files of their own (got one of them twice)")
    if processes.is_first:
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
    recipe = recipe_for(options, None if by_graph else 0)
    check_fit(options, recipe, by_graph)
    return sampling_of(options, recipe, by_graph, processes), combine(options)


def gradients_of(options: argparse.Namespace, processes: Processes) -> str | None:
    """What processes send each other; ``None`` for one on its own."""
    return options.gradients or "fp32" if processes.is_joined else None


def identity(
    options: argparse.Namespace,
    task: Task,
    recipe: Recipe,
    sampling: Sampling | None,
    device: torch.device,
    processes: Processes,
) -> dict[str, Any]:
    """What the runs follow from, by name."""
    return {
        "dataset": key(options.dataset),
        "data": task.description,
        "metric": metric_of(options.dataset),
        "model": options.model,
        "precision": [scheme.name for scheme in options.precision],
        "compress": [compression.name for compression in options.compress],
        "seed": options.seed,
        "seeds": options.seeds,
        **asdict(recipe),
        "sampling": None if sampling is None else asdict(sampling),
        "device": device.type,
        "processes": processes.size,
        "gradients": gradients_of(options, processes),
    }


def saved_in(options: argparse.Namespace) -> dict[str, Any] | None:
    """What the checkpoint of ``--resume`` holds."""
    if options.checkpoint is None:
        return None
    path = Path(options.checkpoint)
    if options.resume and path.exists():
        return read_checkpoint(path)
    if options.resume:
        print(f"--resume: no file {options.checkpoint!r} yet, begins anew", file=sys.stderr, flush=True)
    elif path.exists():
        raise UsageError(
            f"--checkpoint expects a new file (got {options.checkpoint!r}, which exists); add --resume to go on from "
            "it, or delete it"
        )
    return None


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
    task: Task,
    schemes: list[Scheme],
    options: argparse.Namespace,
    recipe: Recipe,
    device: torch.device,
    checkpoint: Checkpoint,
    processes: Processes,
) -> list[dict[str, Any]]:
    """Train every scheme with every seed, the schemes in turn, so that a busy moment does not hit only one."""
    order = [(scheme, seed) for seed in range(options.seed, options.seed + options.seeds) for scheme in schemes]
    console = Console(stderr=True)
    is_shown = console.is_terminal and processes.is_first
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        bar = progress.add_task("", total=len(order) * recipe.epochs)
        for done, (scheme, seed) in enumerate(order):
            names = {"precision": scheme.name, "compress": scheme.compression.name, "seed": seed}
            if checkpoint.has_ended(names):
                continue

            def on_epoch(training: Training, names: dict[str, Any] = names, before: int = done * recipe.epochs) -> None:
                progress.update(bar, completed=before + training.epoch)
                if checkpoint.is_due(training.epoch, recipe.epochs):
                    checkpoint.keep(names, training.state_dict())

            name = report.row_name(names)
            progress.update(bar, description=f"{name}, seed {seed}")
            more = (checkpoint.state_of(names), processes, gradients_of(options, processes) or "fp32")
            run = run_one(task, recipe, scheme, seed, device, options.model, on_epoch, *more)
            if processes.is_first and not is_shown:
                print(report.run_line(name, seed, run, task.metric), file=sys.stderr, flush=True)
            checkpoint.end({**names, **run._asdict()})
    # In the order of the command line: precision by precision, in it compression by compression.
    rows = [(scheme.name, scheme.compression.name) for scheme in schemes]
    return sorted(checkpoint.runs, key=lambda run: rows.index((run["precision"], run["compress"])))


def run_one(
    task: Task,
    recipe: Recipe,
    scheme: Scheme,
    seed: int,
    device: torch.device,
    model: str,
    on_epoch: Callable[[Training], None],
    state: dict[str, Any] | None,
    processes: Processes,
    gradients: str,
) -> Run:
    """One run, with a format that a layer refuses turned into a usage error."""
    options: dict[str, Any] = {"state": state, "processes": processes, "gradients": gradients}
    try:
        return train_run(task, recipe, scheme, seed, device, model, on_epoch, **options)
    except ValueError as error:
        raise UsageError(f"--precision {scheme.name} on {device.type}: {error}") from error


def pick_device(name: str | None, processes: Processes = ALONE) -> torch.device:
    """The device of that name, or the GPU if there is one, and of several processes one each."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"--device cuda expects a GPU that torch can use (torch {torch.__version__} finds none); "
            "give --device cpu, or install a build of torch with CUDA"
        )
    if name != "cpu" and torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        raise UsageError("the GPU expects Triton (not installed); pip install triton, or give --device cpu")
    kind = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu" or not processes.is_joined:
        return torch.device(kind)
    if processes.local_rank >= (count := torch.cuda.device_count()):
        raise UsageError(
            f"--device cuda expects a GPU for each process of a machine (got {count} for process "
            f"{processes.local_rank}); give torchrun --nproc-per-node {count}, or --device cpu"
        )
    torch.cuda.set_device(processes.local_rank)
    return torch.device(kind, processes.local_rank)


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
        raise not_writable(flag, path, error) from error


def not_writable(flag: str, path: Path, error: OSError) -> UsageError:
    """What to say of a file that cannot be written."""
    return UsageError(
        f"{flag} expects a file that can be written (got {str(path)!r}: {error.strerror}); name one in an existing "
        "folder of yours"
    )


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Raise unless the checkpoint can be written, and no other command writes it until the block ends."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(path.parent / f"{path.name}.lock"))
        except BlockingIOError as error:
            raise UsageError(
                f"--checkpoint: another qgnn train is writing {str(path)!r}; wait for it, or give another file"
            ) from error
        except OSError as error:
            raise not_writable("--checkpoint", path, error) from error
        check_writable("--checkpoint", path)
        yield


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write the result as JSON: a file of its own whole or not at all, what else there is as it comes."""
    text = report.to_json(result)
    try:
        for stream in (sys.stdout, sys.stderr):
            if _is_file_of(stream, path):  # perhaps a regular one, which the stream goes on to write
                print(text, end="", file=stream, flush=True)
                return
        target = path.resolve()
        if target.exists() and not target.is_file():  # a pipe, a device
            target.write_text(text, encoding="utf-8")
            return
        try:
            replace_file(target, text.encode())
        except OSError as error:  # a file that is its user's but not its folder, or is mounted by itself
            if not target.exists() or error.errno not in (errno.EACCES, errno.EPERM, errno.EBUSY):
                raise
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json: {str(path)!r} could not be written after training ({error.strerror})") from error


def _is_file_of(stream: TextIO, path: Path) -> bool:
    """Whether the path is what a stream of this process writes to, as ``/dev/stdout`` is."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no such file yet, or none behind the stream
        return os.path.samestat(path.stat(), os.fstat(stream.fileno()))
    return False
