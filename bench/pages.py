"""What stands between pairs of markers of README and of pages of the documentation: the tables of the suites, of
``qgnn train`` and of ``bench sass``, made of records, and the roofline's, which is arithmetic."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qgnn.data.disk import replace_file

from . import compression, numbers, scores
from .records import ROOT
from .summary import commit_of, region, shown, table
from .sweeps import sweep_region, swept
from .tables import distributed_region, layer_region, scale_region, update_region

PAGES = (ROOT / "README.md", ROOT / "docs" / "guide" / "gpu.md", *sorted((ROOT / "docs" / "results").glob("*.md")))
BENCH, SASS, ROOFLINE = "bench", "sass", "roofline"
TABLES = {
    "layer": layer_region,
    "scale": scale_region,
    "distributed": distributed_region,
    "update": update_region,
}
MACHINE_CODE = ("case", "kernel", "registers sm_80 / 90 / 100", "stack", "instructions", "multiplications", "F2I, I2F")
TRAIN = ("precision", "test accuracy %", "ms per epoch", "MiB kept", "peak MiB", "speed")
COMPRESSED = (*TRAIN[:4], "without features", *TRAIN[4:])
PYG = ("fp32", "bf16")  # precisions of PyG's own layers

_MARKER = re.compile(r"<!-- ([\w:.-]+):(?:begin|end) -->")


def markers(name: str) -> tuple[str, str]:
    """The lines around a region."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def trained(results: Path) -> dict[str, list[dict[str, Any]]]:
    """What ``qgnn train --json`` wrote to ``<machine>/train-<name>.json``, by region: ``train:<name>``."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(results.glob("*/train-*.json")):
        name = path.stem.removeprefix("train-")
        found.setdefault(f"train:{name}", []).append(json.loads(path.read_text(encoding="utf-8")))
    return found


def train_region(results: list[dict[str, Any]]) -> str:
    """The table that the command printed on each machine, and where it comes from."""
    from qgnn.cli.metric import ACCURACY, METRICS
    from qgnn.cli.report import cells, is_compressed

    parts = []
    for result in results:
        metric = METRICS[result.get("metric", ACCURACY.name)]  # older results have accuracies
        found = cells(result["runs"], metric=metric)
        rows = [(f"{name} ({'PyG' if name in PYG else 'qgnn'})", *rest) for name, *rest in found]
        first, _, *others = COMPRESSED if is_compressed(result["runs"]) else TRAIN
        headings = (first, metric.heading, *others)
        parts.append(f"{table(headings, rows)}\n\n{_origin(result)}")
    return "\n\n".join(parts)


def _origin(result: dict[str, Any]) -> str:
    """Command, effort, machine and commit of a result."""
    num_seeds, num_epochs = len({run["seed"] for run in result["runs"]}), result["recipe"]["epochs"]
    seeds = f"{num_seeds} seeds (± is their standard deviation)" if num_seeds > 1 else "1 seed"
    effort = f"{seeds}, {num_epochs} epoch{'s' if num_epochs > 1 else ''}"
    return f"`{shown(result['command'])}`: {effort}; {result['machine']}; commit {commit_of(result)}"


def sass_region(path: Path) -> str:
    """Machine code of the main cases' first kernels; counts an element are those on sm_90."""
    from .sass.cases import MAIN

    found: dict[str, dict[str, dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        case, _, arch = record["case"].rpartition("/")
        found.setdefault(case, {}).setdefault(arch, record)
    if missing := MAIN - found.keys():
        raise ValueError(f"{path} has no records of {sorted(missing)}; make them anew")
    rows = []
    for case in sorted(MAIN):
        by_arch = found[case]
        each = by_arch["sm_90"]["per_element"]
        rows.append(
            (
                case,
                f"`{by_arch['sm_90']['kernel']}`",
                " / ".join(str(by_arch[arch]["registers"]) for arch in ("sm_80", "sm_90", "sm_100")),
                str(max(record["stack"] for record in by_arch.values())),
                f"{each['total']:.1f} per {by_arch['sm_90']['unit']}",
                f"{each.get('imul', 0):.2f}",
                f"{each.get('i2f', 0) + each.get('f2i', 0):.2f}",
            )
        )
    last = next(iter(found[rows[0][0]].values()))
    origin = f"Triton {last['versions']['triton']}; commit {commit_of(last)}"
    return f"{table(MACHINE_CODE, rows)}\n\n`python -m bench sass --json FILE`: {origin}"


def roofline_region() -> str:
    """Bytes and floors of one layer, made in three ways."""
    from . import steps

    header, *rows = steps.by_purpose(dict(steps.cases()))
    return f"{table(header, rows)}\n\n`python -m bench roofline`: {steps.LAYER}, floors of an {steps.ON}"


def regions(results: Path) -> Iterator[tuple[str, str]]:
    """Every region that there are records for, and its text."""
    yield BENCH, region(results)
    for name, make in TABLES.items():
        if text := make(results):
            yield name, text
    yield from scores.regions(results)
    for name in compression.PARTS:
        if text := compression.region(results, name):
            yield name, text
    for name in numbers.REGIONS:
        if text := numbers.region(results, name):
            yield name, text
    yield ROOFLINE, roofline_region()
    for path in sorted((results / SASS).glob("triton-*.json"))[-1:]:
        yield SASS, sass_region(path)
    for name, found in trained(results).items():
        yield name, train_region(found)
    for name, journals in swept(results).items():
        yield name, sweep_region(journals)


def fill(text: str, results: Path) -> str:
    """The text with its regions as the records have them; a region without markers is left out.

    Raises:
        ValueError: If there are no markers, or some come without their other, more than once, or without records.
    """
    known = dict(regions(results))
    names = dict.fromkeys(_MARKER.findall(text))
    if not names:
        raise ValueError(f"expected markers such as '{markers(BENCH)[0]}' (got none)")
    for name in names:
        begin, end = markers(name)
        before, found_begin, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end) or begin in rest or end in before + after:
            raise ValueError(f"expected one pair of lines '{begin}' and '{end}'")
        if name not in known:
            raise ValueError(f"'{begin}' expects one of {', '.join(known)}; no record in {results} is of that name")
        text = f"{before}{begin}\n{known[name]}\n{end}{after}"
    return text


def rewrite(page: Path, results: Path) -> None:
    """Put the tables between the markers of a page, which holds its old text or the new one, whatever happens.

    Raises:
        OSError: If it cannot be written.
        ValueError: If :func:`fill` does not know what to do; the file is left alone.
    """
    try:
        text = fill(page.read_text(encoding="utf-8"), results)
    except ValueError as error:
        raise ValueError(f"{page}: {error}") from error
    replace_file(page.resolve(), text.encode())
