"""The specification of a sweep: a TOML file, checked as a whole before anything runs."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from qgnn import formats
from qgnn.cli.args import MODELS
from qgnn.cli.errors import UsageError
from qgnn.cli.model import check_model, check_scheme
from qgnn.cli.recipe import usual_recipe
from qgnn.cli.scheme import ALL, FULL_PRECISION, parse_format, parse_schedule
from qgnn.cli.sweep.run_spec import NONE, RunSpec, scheme_of
from qgnn.cli.values import MOST_LAYERS, MOST_SEEDS, SEED, Check, list_of, number, one_of, text, whole
from qgnn.config import COMPONENTS, ROUNDINGS
from qgnn.data import dataset_names
from qgnn.data.datasets import GRAPH_ENTRIES
from qgnn.data.datasets import key as dataset_key

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Grid:
    """The runs that one table of the file names."""

    name: str
    runs: tuple[RunSpec, ...]


@dataclass(frozen=True)
class Spec:
    """A sweep.

    Args:
        name: Of its folder of results.
        root: Folder of the data sets, ``None`` for the usual one.
        device: ``cpu``, ``cuda``, or ``None`` for the GPU if there is one.
        processes: Runs at a time, ``None`` for the usual number.
        grids: In the order of the file.
    """

    name: str
    root: str | None
    device: str | None
    processes: int | None
    grids: tuple[Grid, ...]

    @property
    def runs(self) -> tuple[RunSpec, ...]:
        """The runs of all grids, each once, in the order of first appearance."""
        return tuple(dict.fromkeys(run for grid in self.grids for run in grid.runs))

    @property
    def digest(self) -> str:
        """The SHA-256 of the keys of the runs, in hexadecimal: equal for files that name the same runs."""
        return hashlib.sha256("".join(run.key for run in self.runs).encode()).hexdigest()


def read_spec(path: Path) -> Spec:
    """Read and check a file.

    Raises:
        UsageError: If anything in it is wrong: where, what was expected, what is there, and the closest name.
    """
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"SPEC expects a file that can be read (got {str(path)!r}: {error.strerror})") from error
    except (ValueError, RecursionError) as error:  # of TOML, of its encoding, or of lists in lists
        raise UsageError(f"{path}: expected TOML ({error})") from error
    try:
        return _spec(document, path.stem)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def _spec(document: dict[str, Any], stem: str) -> Spec:
    for name in document:
        one_of(("sweep", "grid"), any_case=False)(name)
    shared, grids = document.get("sweep", {}), document.get("grid", [{}])
    if not isinstance(shared, dict):
        raise ValueError(f"expected a table [sweep] (got {shared!r})")
    if not isinstance(grids, list) or not all(isinstance(grid, dict) for grid in grids):
        raise ValueError(f"expected tables [[grid]], with two brackets (got {grids!r})")
    top = _table("[sweep]", shared, _OF_SWEEP | _OF_GRID)
    made = []
    for position, table in enumerate(grids, 1):
        place = f"[[grid]] {position}"
        settings = {**top, "name": place, **_table(place, table, {"name": _name} | _OF_GRID)}
        try:
            made.append(Grid(settings["name"], tuple(_expand(settings))))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
    return Spec(top.get("name", stem), top.get("root"), top.get("device"), top.get("processes"), tuple(made))


def _table(place: str, table: dict[str, Any], checks: dict[str, Check]) -> dict[str, Any]:
    """The checked values of a table."""
    checked = {}
    for name, value in table.items():
        try:
            one_of(tuple(checks), any_case=False)(name)
            checked[name] = checks[name](value)
        except ValueError as error:
            raise ValueError(f"{place}, {name}: {error}") from error
    return checked


def _expand(settings: dict[str, Any]) -> list[RunSpec]:
    """The product of the lists, runs in full precision once for each data set, model and seed."""
    for name in ("datasets", "formats"):
        if name not in settings:
            raise ValueError(f"expected a list '{name}', here or in [sweep]")
    given = {name: settings[name] for name in sorted(_RECIPE) if name in settings}
    runs = []
    for dataset, model in product(settings["datasets"], settings.get("models", ["gcn"])):
        by_graph = dataset in GRAPH_ENTRIES
        recipe = replace(usual_recipe(dataset, model, None if by_graph else 0), **given)
        check_model(model, recipe, by_graph)
        for parts in product(*(settings.get(name, default) for name, default in _OF_SCHEME.items())):
            scheme = _canonical(*parts)
            check_scheme(scheme_of(*scheme), model, recipe, by_graph)
            runs += [
                RunSpec(dataset, model, *scheme, seed, tuple(given.items())) for seed in settings.get("seeds", [0])
            ]
    return list(dict.fromkeys(runs))


_OF_SCHEME = {"formats": [], "components": [ALL], "schedules": [NONE], "rounding": ["stochastic"]}


def _canonical(fmt: str, component: str, schedule: str, rounding: str) -> tuple[str, str, str, str]:
    """The same training under one name: a schedule sets the width of the format, and full precision has no details."""
    if fmt in FULL_PRECISION:
        return fmt, NONE, NONE, NONE
    if schedule != NONE:
        try:
            widths = [formats.parse(fmt).with_bits(bits) for bits in parse_schedule(schedule)[1]]
        except ValueError as error:
            raise ValueError(f"{fmt} with the schedule {schedule}: {error}") from error
        fmt = str(widths[-1])
    return fmt, component, schedule, rounding


def _name(value: Any) -> str:
    if "/" in text(value) or value in (".", "..") or not value.isprintable():
        raise ValueError(f"expected a name for a folder (got {value!r})")
    return text(value)


def _dataset(value: Any) -> str:
    return one_of(dataset_names() + dataset_names("graph"))(dataset_key(text(value)))


def _format(value: Any) -> str:
    name = text(value).strip().lower()
    return name if name in FULL_PRECISION else str(parse_format(name))


def _schedule(value: Any) -> str:
    name = "".join(text(value).lower().split())
    if name != NONE:
        parse_schedule(name)
    return name


def _seeds(value: Any) -> list[int]:
    """A list, or how many: from 0 on."""
    seeds: list[int] = list_of(SEED)(value) if isinstance(value, list) else list(range(whole(1, MOST_SEEDS)(value)))
    return seeds


_RECIPE: dict[str, Check] = {
    "epochs": whole(1),
    "hidden": whole(1),
    "layers": whole(1, MOST_LAYERS),
    "dropout": number(0, 1, high_open=True),
    "lr": number(0, 100, low_open=True),
    "weight_decay": number(0, 100),
}
_OF_GRID: dict[str, Check] = {
    "datasets": list_of(_dataset),
    "models": list_of(one_of(MODELS)),
    "formats": list_of(_format),
    "components": list_of(one_of((ALL, *COMPONENTS))),
    "schedules": list_of(_schedule),
    "rounding": list_of(one_of(ROUNDINGS)),
    "seeds": _seeds,
    **_RECIPE,
}
_OF_SWEEP: dict[str, Check] = {
    "name": _name,
    "root": text,
    "device": one_of(("cpu", "cuda")),
    "processes": whole(1),
}
