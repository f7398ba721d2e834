"""Tables of ``qgnn sweep``, made of its journals."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .summary import commit_of, shown, table


def swept(results: Path) -> dict[str, list[list[dict[str, Any]]]]:
    """The lines of the journals ``<machine>/sweeps/<name>.jsonl``, by region: ``sweep:<name>``."""
    from qgnn.cli.sweep.journal import lines_in

    found: dict[str, list[list[dict[str, Any]]]] = {}
    for path in sorted(results.glob("*/sweeps/*.jsonl")):
        found.setdefault(f"sweep:{path.stem}", []).append(lines_in(path))
    return found


def _place(run: Any) -> tuple[Any, ...]:
    """Where a run stands among the others: by component, format, schedule and seed."""
    from qgnn.cli.scheme import ALL
    from qgnn.cli.sweep.run_spec import NONE
    from qgnn.config import COMPONENTS
    from qgnn.formats.names import NAMES

    known = (*NAMES, run.format)
    return (NONE, *COMPONENTS, ALL).index(run.component), known.index(run.format), run.schedule, run.seed


def _taken(lines: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The starts of a journal, and the last line of each run by key, with what it ran under."""
    starts, recorded = [], {}
    for line in lines:
        if line["kind"] == "start":
            starts.append(line)
        else:
            recorded[line["key"]] = {name: starts[-1][name] for name in ("machine", "commit", "dirty")} | line
    return starts, recorded


def _of_two(runs: Sequence[Any], recorded: dict[str, dict[str, Any]]) -> str:
    """How many differences are between runs of two commits, and of two machines."""
    from qgnn.cli.sweep.table import is_done

    pairs = [
        (recorded[run.key], recorded[run.baseline.key])
        for run in runs
        if run != run.baseline and is_done(run, recorded) and is_done(run.baseline, recorded)
    ]
    text = ""
    for what, of in (("commits", commit_of), ("machines", lambda line: line["machine"])):
        if count := sum(of(run) != of(baseline) for run, baseline in pairs):
            text += f"; {count} of the {len(pairs)} differences are between runs of two {what}"
    return text


def sweep_region(journals: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Accuracy by format and component, as the command printed it on each machine, and where it comes from."""
    from qgnn.cli.sweep.run_spec import BASELINE, RunSpec
    from qgnn.cli.sweep.table import panels

    parts = []
    for lines in journals:
        starts, recorded = _taken(lines)
        ended = (line["run"] for line in recorded.values())
        runs = [RunSpec(**{**fields, "recipe": tuple(fields["recipe"].items())}) for fields in ended]
        runs.sort(key=_place)  # they end in no certain order
        scores: dict[str, None] = {}
        for panel in panels(runs, recorded):
            scores[panel.metric.heading.replace(" %", " in %")] = None
            heads = [component.replace("_", " ") for component in panel.components]
            rows = []
            for label in panel.labels:
                cells = (panel.cells.get((label, component)) for component in panel.components)
                rows.append(
                    (label, *("" if cell is None else cell.text(panel.num_seeds).replace("\n", ", ") for cell in cells))
                )
            text = table((panel.title, *heads), rows)
            if panel.baseline is not None:
                text += f"\n\n{BASELINE}: {panel.baseline._replace(differences=()).text(panel.num_seeds)}"
            parts.append(text)
        parts.append(
            f"`{shown(starts[0]['command'])}`: {len(runs)} runs; {', '.join(scores)}, mean and deviation over seeds "
            f"(difference to {BASELINE} and its standard error); "
            f"{', '.join(dict.fromkeys(start['machine'] for start in starts))}; "
            f"{', '.join(dict.fromkeys(f'commit {commit_of(run)}' for run in (*starts, *recorded.values())))}"
            f"{_of_two(runs, recorded)}"
        )
    return "\n\n".join(parts)
