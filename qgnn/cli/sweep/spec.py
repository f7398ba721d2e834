"""The specification of a sweep: a TOML file, checked as a whole before anything runs."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

from qgnn import formats
from qgnn.cli.args import MODELS
from qgnn.cli.errors import UsageError
from qgnn.cli.model import GAT_HEADS, GRAPH_MODELS
from qgnn.cli.scheme import ALL, Scheme, parse_schedule
from qgnn.cli.sweep.run_spec import BASELINE, NONE, RunSpec
from qgnn.config import COMPONENTS, ROUNDINGS
from qgnn.data import dataset_names
from qgnn.data.datasets import GRAPH_ENTRIES
from qgnn.data.datasets import key as dataset_key

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Among which the closest name is looked for; 'qgnn.formats.parse' knows more, such as other lengths of blocks.
FORMATS = (
    BASELINE,
    *(f"{kind}{bits}{affine}" for kind in ("int", "fixed") for bits in range(2, 9) for affine in ("", "-affine")),
    *(f"msfp{number}" for number in range(10, 17)),
    *("mxint8", "mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp4", "fp8-e4m3", "fp8-e5m2"),
)

Check = Callable[[Any], Any]


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
    except ValueError as error:  # of TOML, or of its encoding
        raise UsageError(f"{path}: expected TOML ({error})") from error
    try:
        return _spec(document, path.stem)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def _spec(document: dict[str, Any], stem: str) -> Spec:
    for name in document:
        _one_of(("sweep", "grid"))(name)
    shared, grids = document.get("sweep", {}), document.get("grid", [{}])
    if not isinstance(shared, dict):
        raise ValueError(f"expected a table [sweep] (got {shared!r})")
    if not isinstance(grids, list) or not all(isinstance(grid, dict) for grid in grids):
        raise ValueError(f"expected tables [[grid]], with two brackets (got {grids!r})")
    top = _table("[sweep]", shared, _OF_SWEEP | _OF_GRID)
    made = []
    for number, table in enumerate(grids, 1):
        place = f"[[grid]] {number}"
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
            _one_of(tuple(checks))(name)
            checked[name] = checks[name](value)
        except ValueError as error:
            raise ValueError(f"{place}, {name}: {error}") from error
    return checked


def _expand(settings: dict[str, Any]) -> list[RunSpec]:
    """The product of the lists, the baseline once for each data set, model and seed."""
    for name in ("datasets", "formats"):
        if name not in settings:
            raise ValueError(f"expected a list '{name}', here or in [sweep]")
    recipe = tuple((name, settings[name]) for name in sorted(_RECIPE) if name in settings)
    runs = []
    for dataset, model in product(settings["datasets"], settings.get("models", ["gcn"])):
        _check_sizes(dataset, model, settings)
        for parts in product(*(settings.get(name, default) for name, default in _OF_SCHEME.items())):
            fmt, component, schedule, rounding = parts
            if schedule != NONE and fmt != BASELINE:
                try:
                    Scheme.from_parts(fmt, component, schedule)
                except ValueError as error:
                    raise ValueError(f"{fmt} with the schedule {schedule}: {error}") from error
            for seed in settings.get("seeds", [0]):
                run = RunSpec(dataset, model, fmt, component, schedule, rounding, seed, recipe)
                runs.append(run.baseline if fmt == BASELINE else run)
    return list(dict.fromkeys(runs))


_OF_SCHEME = {"formats": [], "components": [ALL], "schedules": [NONE], "rounding": ["stochastic"]}


def _check_sizes(dataset: str, model: str, settings: dict[str, Any]) -> None:
    """Raise if the model is not made for such data, or cannot have the size that is given for it."""
    by_graph = dataset in GRAPH_ENTRIES
    if by_graph and model not in GRAPH_MODELS:
        raise ValueError(f"{dataset} expects one of the models {', '.join(GRAPH_MODELS)} (got {model})")
    hidden, layers = settings.get("hidden", GAT_HEADS), settings.get("layers", 3)
    if model == "gat" and hidden % GAT_HEADS:
        raise ValueError(f"gat expects hidden to be a multiple of {GAT_HEADS}, its number of heads (got {hidden})")
    if model == "gcn2" and layers < 3:
        raise ValueError(f"gcn2 expects layers of at least 3, since the first and the last are dense (got {layers})")
    if layers < 2 and not by_graph:
        raise ValueError(f"expected layers of at least 2, since the last stays in full precision (got {layers})")


def _one_of(choices: Sequence[str]) -> Check:
    def check(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"expected one of {', '.join(choices)} (got {value!r}){_closest(value, choices)}")
        return str(value)

    return check


def _closest(value: Any, choices: Sequence[str]) -> str:
    close = get_close_matches(str(value).lower(), choices, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected text (got {value!r})")
    return value


def _name(value: Any) -> str:
    if "/" in _text(value) or value in (".", ".."):
        raise ValueError(f"expected a name for a folder (got {value!r})")
    return _text(value)


def _dataset(value: Any) -> str:
    return _one_of(dataset_names() + dataset_names("graph"))(dataset_key(_text(value)))


def _format(value: Any) -> str:
    if _text(value) == BASELINE:
        return value
    try:
        return str(formats.parse(value))
    except ValueError as error:
        raise ValueError(f"{error}{_closest(value, FORMATS)}") from error


def _schedule(value: Any) -> str:
    name = "".join(_text(value).split())
    if name != NONE:
        parse_schedule(name)
    return name


def _int(minimum: int) -> Check:
    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"expected a whole number of at least {minimum} (got {value!r})")
        return value

    return check


def _float(low: float, high: float, *, low_open: bool = False, high_open: bool = False) -> Check:
    def check(value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (low_open and value == low) or (high_open and value == high):
            ends = f"{'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"
            raise ValueError(f"expected a number in {ends} (got {value!r})")
        return float(value)

    return check


def _list_of(check: Check) -> Check:
    def check_all(value: Any) -> list[Any]:
        values = value if isinstance(value, list) else [value]
        if not values:
            raise ValueError("expected at least one value (got none)")
        return list(dict.fromkeys(check(each) for each in values))

    return check_all


def _seeds(value: Any) -> list[int]:
    """A list, or how many: from 0 on."""
    seeds: list[int] = _list_of(_int(0))(value) if isinstance(value, list) else list(range(_int(1)(value)))
    return seeds


_RECIPE: dict[str, Check] = {
    "epochs": _int(1),
    "hidden": _int(1),
    "layers": _int(1),
    "dropout": _float(0, 1, high_open=True),
    "lr": _float(0, 100, low_open=True),
    "weight_decay": _float(0, 100),
}
_OF_GRID: dict[str, Check] = {
    "datasets": _list_of(_dataset),
    "models": _list_of(_one_of(MODELS)),
    "formats": _list_of(_format),
    "components": _list_of(_one_of((ALL, *COMPONENTS))),
    "schedules": _list_of(_schedule),
    "rounding": _list_of(_one_of(ROUNDINGS)),
    "seeds": _seeds,
    **_RECIPE,
}
_OF_SWEEP: dict[str, Check] = {
    "name": _name,
    "root": _text,
    "device": _one_of(("cpu", "cuda")),
    "processes": _int(1),
}
