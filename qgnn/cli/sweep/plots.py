"""The summary as a picture; needs matplotlib, which is imported only here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from qgnn.cli.errors import UsageError
from qgnn.cli.sweep.table import Panel, standard_error


def write_plot(path: Path, panels: Sequence[Panel]) -> bool:
    """Draw how much worse each format is in each component, with the deviation over seeds.

    Args:
        path: The file; its ending selects the format.
        panels: Those of the summary; one without a baseline, or with nothing else, has no picture.

    Returns:
        Whether there was anything to draw; if not, the file is left as it is.
    """
    from matplotlib.figure import Figure

    drawn = [panel for panel in panels if any(cell.differences for cell in panel.cells.values())]
    if not drawn:
        return False
    widest = max(len(panel.labels) * (len(panel.components) + 1) for panel in drawn)
    figure = Figure(figsize=(max(4.8, 0.16 * widest), 3.2 * len(drawn)), layout="constrained")
    for axes, panel in zip(figure.subplots(len(drawn), 1, squeeze=False)[:, 0], drawn, strict=True):
        width = 1 / (len(panel.components) + 1)
        worse, sign = ("drop", -1) if panel.metric.larger_is_better else ("rise", 1)
        for number, component in enumerate(panel.components):
            cells = [(at, panel.cells.get((label, component))) for at, label in enumerate(panel.labels)]
            drops = [
                (at, [sign * points for points in cell.differences]) for at, cell in cells if cell and cell.differences
            ]
            axes.bar(
                [at + (number - (len(panel.components) - 1) / 2) * width for at, _ in drops],
                [mean(points) for _, points in drops],
                width,
                yerr=[standard_error(points) or 0.0 for _, points in drops],
                label=component,
                error_kw={"elinewidth": 0.8},
            )
        axes.set_xticks(range(len(panel.labels)), panel.labels, rotation=40, ha="right", rotation_mode="anchor")
        points = " (points)" * (panel.metric.scale == 100)
        axes.set_ylabel(f"{panel.metric.label} {worse}{points}, standard error")
        axes.set_title(panel.title, fontsize=10)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(
            f"--plot: {str(path)!r} could not be written ({error.strerror}); the runs are recorded"
        ) from error
    return True
