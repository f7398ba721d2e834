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
from qgnn.cli.sweep.journal import DONE, FAILED, START, Journal, recorded_in
from qgnn.cli.sweep.plots import write_plot
from qgnn.cli.sweep.run_spec import BASELINE, RunSpec
from qgnn.cli.sweep.runner import carry_out, check_device, missing
from qgnn.cli.sweep.spec import Spec, read_spec
from qgnn.cli.sweep.table import check_table, panels, summary, write_table
from qgnn.cli.train import check_writable, pick_device

JOURNAL, TABLE = "journal.jsonl", "results.csv"
SHOWN_FAILURES = 10


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
    folder = Path(options.results or Path("sweeps") / spec.name)
    table = Path(options.table or folder / TABLE)
    check_formats(spec, table, options.plot)
    if options.dry_run:
        recorded = recorded_in(folder / JOURNAL)
        Console().print(plan(spec, recorded, options.retry_failed))
        tell_of_others(spec.runs, recorded, folder / JOURNAL)
        return 0
    device = pick_device(spec.device)
    root = options.root or spec.root
    processes = options.processes or spec.processes or (1 if device.type == "cuda" else len(os.sched_getaffinity(0)))
    make_folder(folder)
    check_outputs(table, options.plot)
    with Journal(folder / JOURNAL) as journal:
        check_device(journal, device.type)
        tell_of_others(spec.runs, journal.runs, journal.path)
        remaining = missing(spec.runs, journal.runs, options.retry_failed)[: options.limit]
        for dataset in dict.fromkeys(run.dataset for run in remaining):
            read(dataset, root)  # before the first run, and in one process, since it may have to be downloaded
        read.cache_clear()
        if remaining:
            tell_of_machine(journal, machine_of(device))
            journal.append(START, **header(spec, options.command_line, device, processes))
            carry_out(remaining, journal, partial(execute, root=root, device=device.type), processes)
        recorded = journal.runs
    write_table(table, spec.runs, recorded)
    shown = panels(spec.runs, recorded)
    for panel in shown:
        Console().print(summary(panel))
    code = tell(spec.runs, recorded, table)
    if options.plot is not None and not write_plot(Path(options.plot), shown):
        print(
            f"no plot: it shows what {BASELINE} and another format have of the same seeds, so far none", file=sys.stderr
        )
    return code


def plan(spec: Spec, recorded: dict[str, Any], retry_failed: bool) -> Table:
    """How many runs each grid has that none above it has, how many of these are recorded, and how many are left."""
    table = Table("grid", title=escape(spec.name), title_justify="left")
    for heading in ("runs", "new", DONE, FAILED, "left"):
        table.add_column(heading, justify="right")

    def add(name: str, total: int, runs: Sequence[RunSpec]) -> None:
        states = states_of(runs, recorded)
        left = len(missing(runs, recorded, retry_failed))
        table.add_row(name, *map(str, (total, len(runs), states.count(DONE), states.count(FAILED), left)))

    seen: set[RunSpec] = set()
    for grid in spec.grids:
        add(escape(grid.name), len(grid.runs), [run for run in grid.runs if run not in seen])
        seen |= set(grid.runs)
    table.add_section()
    add("all", sum(len(grid.runs) for grid in spec.grids), spec.runs)
    return table


def make_folder(folder: Path) -> None:
    """Make the folder of the results unless it exists."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--results expects a folder (got {str(folder)!r}: {error.strerror})") from error


def check_formats(spec: Spec, table: Path, plot: str | None) -> None:
    """Raise unless the files that are written at the end have formats that can be written, of what the sweep has."""
    check_table(table)
    if plot is not None:
        check_plot(Path(plot))
        if not {BASELINE} < {run.format for run in spec.runs}:
            raise UsageError(f"--plot expects {BASELINE} and another one among the formats, to draw the difference")


def check_outputs(table: Path, plot: str | None) -> None:
    """Raise unless the files that are written at the end can be written."""
    check_writable("--table", table)
    if plot is not None:
        check_writable("--plot", Path(plot))


def header(spec: Spec, command: str, device: torch.device, processes: int) -> dict[str, Any]:
    """Under what the runs that follow are made."""
    sha, dirty = commit()
    return {
        "sweep": spec.name,
        "spec": spec.digest,
        "command": command,
        "utc": now(),
        "device": device.type,
        "machine": machine_of(device),
        "processes": processes,
        "commit": sha,
        "dirty": dirty,
        "versions": versions(),
    }


def machine_of(device: torch.device) -> str:
    """The name of what computes."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def tell_of_machine(journal: Journal, machine: str) -> None:
    """Warn if the first runs of the journal were made on another machine than those that follow."""
    first = journal.starts[0].get("machine", machine) if journal.starts else machine
    if first != machine:
        print(
            f"{str(journal.path)!r} holds runs on {first}, and goes on with runs on {machine}: times and rounding may "
            "differ, also between a run and the baseline that it is compared with; another --results keeps them apart",
            file=sys.stderr,
        )


def states_of(runs: Sequence[RunSpec], recorded: dict[str, Any]) -> list[str | None]:
    """How each run ended, ``None`` if it did not."""
    return [recorded[run.key]["status"] if run.key in recorded else None for run in runs]


def tell_of_others(runs: Sequence[RunSpec], recorded: dict[str, Any], journal: Path) -> None:
    """Say how many recorded runs are none of these: a changed file goes on with what it still names."""
    others = len(recorded.keys() - {run.key for run in runs})
    if others:
        print(
            f"{others} of the {len(recorded)} runs in {journal} are not in the specification, or come from a qgnn that "
            "trains otherwise: they stay there, and out of the table",
            file=sys.stderr,
        )


def tell(runs: Sequence[RunSpec], recorded: dict[str, Any], table: Path) -> int:
    """Say what is there, what failed and why, and what is missing; returns the exit code."""
    states = states_of(runs, recorded)
    failures = [run for run, state in zip(runs, states, strict=True) if state == FAILED]
    for run in failures[:SHOWN_FAILURES]:
        print(f"failed: {run}: {recorded[run.key]['error']}", file=sys.stderr)
    if len(failures) > SHOWN_FAILURES:
        print(f"failed: {len(failures) - SHOWN_FAILURES} more, in the column 'error' of the table", file=sys.stderr)
    text = f"{states.count(DONE)} of {len(runs)} runs done, in {table}"
    text += f"; {len(failures)} failed: the same command with --retry-failed runs them again" * bool(failures)
    text += f"; {states.count(None)} left: the same command without --limit runs them" * bool(states.count(None))
    print(text, file=sys.stderr)
    return 1 if failures else 0
