"""The table as a picture; needs matplotlib, which is imported only here."""

import math
from pathlib import Path
from typing import Any

from qgnn.cli.errors import UsageError
from qgnn.cli.metric import METRICS
from qgnn.cli.report import by_precision, is_compressed, summarize

MEASURED = (("epoch_ms", "time per epoch (ms)"), ("saved_mib", "kept for backward (MiB)"))


def check_plot(path: Path) -> None:
    """Raise unless matplotlib is there and knows the format of the file."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install matplotlib") from error
    formats = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in formats:
        raise UsageError(f"--plot expects a file name that ends in one of {', '.join(formats)} (got {str(path)!r})")


def write_plot(path: Path, result: dict[str, Any]) -> None:
    """Draw the score, time and memory of each precision and compression side by side.

    Args:
        path: The file; its ending selects the format.
        result: What ``--json`` writes.
    """
    from matplotlib.figure import Figure

    metric = METRICS[result["metric"]]
    panels = (("acc", metric.heading), *MEASURED)
    rows = {name: summarize(runs, metric) for name, runs in by_precision(result["runs"]).items()}
    figure = Figure(figsize=(max(3.2, 0.6 * len(rows)) * len(panels), 3.2), layout="constrained")
    figure.suptitle(f"{result['model'].upper()} on {result['dataset']}, {result['device'].upper()}")
    for axes, (column, title) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        values = [row[column] if math.isfinite(row[column]) else math.nan for row in rows.values()]
        errors = [row["acc_dev"] or 0.0 for row in rows.values()] if column == "acc" else None
        bars = axes.bar(list(rows), values, yerr=errors, capsize=4, color=[f"C{n % 10}" for n in range(len(rows))])
        axes.bar_label(bars, fmt=f"%.{metric.digits - 1 if column == 'acc' else 1}f", padding=3)
        if is_compressed(result["runs"]):  # long names, and more of them
            axes.set_xticks(range(len(rows)), list(rows), rotation=40, ha="right", rotation_mode="anchor")
        axes.set_title(title, fontsize=10)
        axes.margins(y=0.15)
        axes.spines[["top", "right"]].set_visible(False)
        if column == "acc":  # differences of a point would vanish on an axis from zero; the labels give the values
            finite = [value for value in values if not math.isnan(value)] or [0.0]
            spread = max(0.05 * metric.scale, 3 * (max(finite) - min(finite)))
            top = max(finite) + spread / 2
            axes.set_ylim(max(0.0, min(finite) - spread), min(100.0, top) if metric.larger_is_better else top)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"--plot: {str(path)!r} could not be written after training ({error.strerror})") from error
