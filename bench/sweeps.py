"""Tables of ``qgnn sweep``, made of its journals."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .summary import commit_of, shown, table


def swept(results: Path) -> dict[str, list[list[dict[str, Any]]]]:
    """The lines of the journals ``<machine>/sweeps/<name>.jsonl``, by region: ``sweep:<name>``."""
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for path in sorted(results.glob("*/sweeps/*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found.setdefault(f"sweep:{path.stem}", []).append(lines)
    return found


def _place(run: Any) -> tuple[Any, ...]:
    """Where a run stands among the others: by component, format, schedule and seed."""
    from qgnn.cli.scheme import ALL
    from qgnn.cli.sweep.run_spec import NONE
    from qgnn.config import COMPONENTS
    from qgnn.formats.names import NAMES

    known = (*NAMES, run.format)
    return (NONE, *COMPONENTS, ALL).index(run.component), known.index(run.format), run.schedule, run.seed


def sweep_region(journals: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Accuracy by format and component, as the command printed it on each machine, and where it comes from."""
    from qgnn.cli.sweep.run_spec import BASELINE, RunSpec
    from qgnn.cli.sweep.table import panels

    parts = []
    for lines in journals:
        starts = [line for line in lines if line["kind"] == "start"]
        recorded = {line["key"]: {**line, "commit": None, "dirty": None} for line in lines if line["kind"] == "run"}
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
            f"{starts[0]['machine']}; {', '.join(dict.fromkeys(f'commit {commit_of(start)}' for start in starts))}"
        )
    return "\n\n".join(parts)
