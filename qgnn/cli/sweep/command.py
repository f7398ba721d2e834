"""``qgnn sweep``: read, check, run what is missing, show what there is."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qgnn.cli.errors import UsageError
from qgnn.cli.plot import check_plot
from qgnn.cli.provenance import commit, cpu_name, now, versions
from qgnn.cli.sweep.execute import execute, read
from qgnn.cli.sweep.journal import DONE, FAILED, START, Journal
from qgnn.cli.sweep.plots import write_plot
from qgnn.cli.sweep.run_spec import BASELINE, RunSpec
from qgnn.cli.sweep.runner import carry_out, missing
from qgnn.cli.sweep.spec import Spec, read_spec
from qgnn.cli.sweep.table import check_table, panels, rows_of, summary, write_table
from qgnn.cli.train import check_writable, pick_device

JOURNAL, TABLE = "journal.jsonl", "results.csv"


def sweep(options: argparse.Namespace) -> int:
    """Run the command.

    Args:
        options: The parsed arguments.

    Returns:
        The exit code: 1 if a run of the sweep failed, now or earlier.

    Raises:
        UsageError: If anything that the user gave cannot work; before the first run where that can be known.
    """
    spec = read_spec(Path(options.spec))
    if options.dry_run:
        Console().print(plan(spec))
        return 0
    device = pick_device(spec.device)
    root = options.root or spec.root
    processes = options.processes or spec.processes or (1 if device.type == "cuda" else len(os.sched_getaffinity(0)))
    folder = Path(options.results or Path("sweeps") / spec.name)
    table = Path(options.table or folder / TABLE)
    make_folder(folder)
    check_outputs(spec, table, options.plot)
    with Journal(folder / JOURNAL) as journal:
        remaining = missing(spec.runs, journal, device.type, options.retry_failed)[: options.limit]
        for dataset in dict.fromkeys(run.dataset for run in remaining):
            read(dataset, root)  # before the first run, and in one process, since it may have to be downloaded
        read.cache_clear()
        if remaining:
            journal.append(START, **header(spec, options.command_line, device, processes))
            carry_out(remaining, journal, partial(execute, root=root, device=device.type), processes)
        recorded = journal.runs
    write_table(table, rows_of(spec.runs, recorded))
    shown = panels(spec.runs, recorded)
    for panel in shown:
        Console().print(summary(panel))
    if options.plot is not None:
        write_plot(Path(options.plot), shown)
    return tell(spec.runs, recorded, table)


def plan(spec: Spec) -> Table:
    """How many runs each grid has, and how many of them none above it has."""
    table = Table("grid", title=escape(spec.name), title_justify="left")
    for heading in ("runs", "new"):
        table.add_column(heading, justify="right")
    seen: set[RunSpec] = set()
    for grid in spec.grids:
        table.add_row(escape(grid.name), str(len(grid.runs)), str(len(set(grid.runs) - seen)))
        seen |= set(grid.runs)
    table.add_section()
    table.add_row("all", str(sum(len(grid.runs) for grid in spec.grids)), str(len(seen)))
    return table


def make_folder(folder: Path) -> None:
    """Make the folder of the results unless it exists."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--results expects a folder (got {str(folder)!r}: {error.strerror})") from error


def check_outputs(spec: Spec, table: Path, plot: str | None) -> None:
    """Raise unless what is written at the end can be written."""
    check_table(table)
    check_writable("--table", table)
    if plot is not None:
        check_writable("--plot", Path(plot))
        check_plot(Path(plot))
        if not {BASELINE} < {run.format for run in spec.runs}:
            raise UsageError(f"--plot expects {BASELINE} and another one among the formats, to draw the difference")


def header(spec: Spec, command: str, device: torch.device, processes: int) -> dict[str, Any]:
    """Under what the runs that follow are made."""
    sha, dirty = commit()
    return {
        "sweep": spec.name,
        "spec": spec.digest,
        "command": command,
        "utc": now(),
        "device": device.type,
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "processes": processes,
        "commit": sha,
        "dirty": dirty,
        "versions": versions(),
    }


def tell(runs: Sequence[RunSpec], recorded: dict[str, Any], table: Path) -> int:
    """Say what is there and what is missing; returns the exit code."""
    states = [recorded[run.key]["status"] if run.key in recorded else None for run in runs]
    failed, left = states.count(FAILED), states.count(None)
    text = f"{states.count(DONE)} of {len(runs)} runs in {table}"
    text += f"; {failed} failed, see its column 'error': --retry-failed runs them again" * bool(failed)
    text += f"; {left} left: the same command without --limit runs them" * bool(left)
    print(text, file=sys.stderr)
    return 1 if failed else 0
