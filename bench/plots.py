"""Plots made of records alone: the speed-up over the best rival, the memory of a training step, the accuracy that
training in few bits costs by model, and what number formats lose of it by the error of their operands."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import mean
from typing import Any

from .numbers import POINTS, THRESHOLD, Point, points, resolved
from .records import Record
from .scores import Runs, half_width, runs_of
from .summary import APART, COMPRESSED, OURS, WARM, WHOLE, Line, is_of_formats, lines, machines

Panels = Mapping[str, Sequence[Any]]  # by title

MARKERS = {"int": "o", "fixed": "s", "msfp": "^"}
MODELS = {  # color and marker
    "gcn": ("#1f77b4", "o"),
    "sage": ("#ff7f0e", "s"),
    "gat": ("#2ca02c", "^"),
    "gin": ("#9467bd", "D"),
    "gcn2": ("#8c564b", "v"),
}
CLAIM = 0.3  # points that int8 may lose
PRECISIONS = ("qgnn int8", "qgnn int8 kept-int2-rp8", "qgnn int4")
SPEED = "speed with quantization included"
COLORS = {"quantized": "#1f77b4", "full": "#9ecae1", "peak": "#7f7f7f", "kept": "#1f77b4"}


def write(results: Path, folder: Path) -> list[Path]:
    """PNG files of what was measured on each machine: ``<machine>-steps.png``, ``-primitives.png``, ``-memory.png``,
    ``-compression.png``, ``-accuracy.png``, ``-threshold.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []

    def save(figure: Any, name: str) -> None:
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=110)

    for machine, measured in machines(results).items():
        device = measured[0][0]["device"]
        groups = [group for group in measured if not is_of_formats(group[0]["case"])]
        # A bar is a ratio, and a warm pass has none.
        speed = [n for n in lines(groups) if n.suite not in APART and n.pass_ != WARM and _factors(n)]
        memory = [record for group in groups if group[0]["suite"] == "memory" for record in group if record["ok"]]
        steps = {case: [*rows] for case, rows in groupby(memory, key=itemgetter("case"))}
        plots: dict[str, tuple[Any, Panels]] = {
            "steps": (_draw_speed, {SPEED: [line for line in speed if line.suite in WHOLE]}),
            "primitives": (_draw_speed, {SPEED: [line for line in speed if line.suite not in WHOLE]}),
            "memory": (_draw_memory, {case: rows for case, rows in steps.items() if COMPRESSED not in case}),
            "compression": (_draw_memory, {case: rows for case, rows in steps.items() if COMPRESSED in case}),
        }
        for name, (draw, panels) in plots.items():
            if any(panels.values()):
                save(_panels(draw, panels, device), f"{machine}-{name}")
        shares = {
            key: runs
            for key, runs in runs_of(groups, ablation=False).items()
            if runs.metric.scale == 100 and any(map(runs.differences, PRECISIONS))
        }
        if shares:
            save(_accuracy(shares, device), f"{machine}-accuracy")
        if of_formats := resolved(points(measured)):
            save(_scatter(of_formats, device), f"{machine}-threshold")
    return written


def _scatter(found: Sequence[Point], device: str) -> Any:
    """Error_X against the drop of accuracy: what the rule says is right of it below and left of it above."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for family, marker in MARKERS.items():
        chosen = [point for point in found if point.family == family]
        if chosen:
            errors, drops = ([*values] for values in zip(*((p.errors["error_x"], p.drop) for p in chosen), strict=True))
            bits = [p.bits for p in chosen]
            axes.scatter(errors, drops, 16, bits, marker=marker, vmin=2, vmax=8, label=family)
    axes.axvline(THRESHOLD, color="black", linewidth=0.8, label=f"Error_X {THRESHOLD}")
    axes.axhline(POINTS, color="black", linewidth=0.8, linestyle="--", label=f"{POINTS:g} point")
    axes.set_yscale("symlog", linthresh=POINTS)
    axes.margins(y=0.08)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("Error_X, mean over the operands of the first step", fontsize=8)
    axes.set_ylabel(f"accuracy below fp32, points (linear to {POINTS:g}, logarithmic beyond)", fontsize=8)
    num_datasets = len({point.dataset for point in found})
    axes.set_title(f"{device}: a GCN in formats of 2 to 8 bits, on {num_datasets} data sets that can tell", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.colorbar(axes.collections[0], label="bits")
    figure.legend(loc="outside lower right", ncols=5, fontsize=7)
    return figure


def _accuracy(found: Mapping[tuple[str, str], Runs], device: str) -> Any:
    """Differences to fp32 with their intervals: a line a data set, a marker a model, a panel a width."""
    from matplotlib.figure import Figure

    datasets = list(dict.fromkeys(dataset for dataset, _ in found))
    figure = Figure(figsize=(10, 1.4 + 0.42 * len(datasets)), layout="constrained")
    chosen = [name for name in PRECISIONS if any(runs.differences(name) for runs in found.values())]
    ((first, *others),) = figure.subplots(1, len(chosen), sharey=True, squeeze=False)
    labelled = set()
    for axes, provider in zip((first, *others), chosen, strict=True):
        for (dataset, model), runs in found.items():
            if values := runs.differences(provider):
                y = datasets.index(dataset) + 0.15 * (list(MODELS).index(model) - (len(MODELS) - 1) / 2)
                color, marker = MODELS[model]
                label = model if model not in labelled else None
                labelled.add(model)
                width = half_width(values)
                axes.errorbar(mean(values), y, xerr=width, color=color, marker=marker, markersize=4, lw=1, label=label)
        axes.axvspan(-CLAIM, CLAIM, color="#eeeeee", zorder=0)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_xlabel("points beside PyG's fp32", fontsize=8)
        axes.set_title(provider, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    first.set_yticks(range(len(datasets)), datasets, fontsize=8)
    first.set_ylim(len(datasets) - 0.4, -0.6)
    figure.suptitle(f"{device}: test score, with intervals of 95 %", fontsize=9)
    figure.legend(loc="outside lower right", ncols=len(MODELS), fontsize=7)
    return figure


def _panels(draw: Any, panels: Panels, device: str) -> Any:
    """One panel below the other, each with a line a bar."""
    from matplotlib.figure import Figure

    sizes = [len(found) for found in panels.values()]
    height = 1.2 + 0.32 * sum(sizes) + 0.5 * (len(sizes) - 1)
    figure = Figure(figsize=(10, height), layout="constrained")
    rows = figure.subplots(len(sizes), height_ratios=sizes, sharex=True, squeeze=False)
    for (axes,), (title, found) in zip(rows, panels.items(), strict=True):
        draw(axes, found)
        axes.set_title(title, fontsize=9)
        axes.set_ylim(len(found) - 0.4, -0.6)  # the first one on top
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=8)
        axes.label_outer()
    handles, labels = axes.get_legend_handles_labels()
    figure.suptitle(device, fontsize=9)
    figure.legend(handles, labels, loc="outside lower right", ncols=2, fontsize=7)
    return figure


def _factors(line: Line) -> dict[str, float]:
    found = {"quantized": line.speedup(line.quantized, line.rival), "full": line.speedup(line.full, line.rival)}
    return {kind: factor for kind, factor in found.items() if factor is not None}


def _draw_speed(axes: Any, found: Sequence[Line]) -> None:
    """Horizontal bars that start at 1: right of it ours is faster."""
    offsets = {"quantized": -0.2, "full": 0.2}
    labels = {"quantized": "qgnn, integer codes", "full": "qgnn, fp32"}
    drawn = set()
    for y, line in enumerate(found):
        for kind, factor in _factors(line).items():
            label = labels[kind] if kind not in drawn else None
            drawn.add(kind)
            axes.barh(y + offsets[kind], factor - 1, 0.38, left=1, color=COLORS[kind], label=label)
            side = "left" if factor >= 1 else "right"
            axes.annotate(f"{factor:.2g}x", (factor, y + offsets[kind]), ha=side, va="center", fontsize=6)
    names = [f"{n.suite} {n.case} {n.pass_}  (1x: {n.rival['provider'] if n.rival else ''})" for n in found]
    axes.set_yticks(range(len(found)), names, fontsize=7)
    for y in range(1, len(found)):
        if found[y].suite != found[y - 1].suite:
            axes.axhline(y - 0.5, color="lightgray", linewidth=0.6)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.margins(x=0.08)
    axes.set_xlabel("times as fast as the best rival, one in fp32 where there is one", fontsize=8)


def _draw_memory(axes: Any, found: Sequence[Record]) -> None:
    """What a step takes at its peak, and what of it is kept for the backward pass."""
    labels = {"kept": "kept for the backward pass", "peak": "peak of the process, data set excluded"}
    places, values = range(len(found)), {}
    for kind, field, marker in (("kept", "saved_mib", "o"), ("peak", "peak_mib", "s")):
        values[kind] = [record[field] for record in found]
        axes.plot(values[kind], places, marker, color=COLORS[kind], markersize=5, label=labels[kind])
        for y, value in zip(places, values[kind], strict=True):
            axes.annotate(f"   {value:.0f}", (value, y), ha="left", va="center", fontsize=6)
    axes.hlines(places, values["kept"], values["peak"], color="lightgray", linewidth=0.8, zorder=0)
    axes.set_xscale("log")
    axes.margins(x=0.1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_yticks(places, [record["provider"] for record in found], fontsize=7)
    for tick, record in zip(axes.get_yticklabels(), found, strict=True):
        tick.set_fontweight("bold" if record["provider"].startswith(OURS) else "normal")
    axes.set_xlabel("MiB of a training step, on a logarithmic scale", fontsize=8)
