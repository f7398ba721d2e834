"""The tables of the suite `accuracy`: what training in few bits costs, by model, and which rule of rounding matters.

A difference is that of the seeds that a provider and fp32 have, with a confidence interval of 95 % (Student's t). The
column of fp32 is of the seeds that any other has; a difference of fewer says of how many.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev

from qgnn.cli.metric import ACCURACY as ACCURACY_METRIC
from qgnn.cli.metric import METRICS, Metric

from .records import Record
from .summary import table
from .tables import Groups, Rows, region, spread

FULL = "pyg fp32"
KEPT = ("qgnn int8", "qgnn int8 kept-int2-rp8", "qgnn int8 kept-int2-rp8-vm", "qgnn int4")
ACCURACY = ("data set", "model", "score", "PyG fp32", *(name.replace(" kept-", ", kept ") for name in KEPT), "seeds")
WORST = ("provider", "models", "mean difference", "least of fp32 %", "where", "worse than fp32 beyond its interval")
ABLATION = ("data set", "rounding", "scale a", "last layer", "int8", "int4", "seeds")
NOTE = (
    "Test score at the best validation epoch: of PyG's models in fp32, mean and standard deviation over the seeds; of "
    "the others the difference, with a confidence interval of 95 %, and n where it is of fewer seeds. A seed gives all "
    "the same weights. Runs whose untrained model failed its check, and those that diverged, are left out."
)


class Runs:
    """The scores of one model on one data set, by provider and seed.

    Attributes:
        metric: What they are; shares are in percent.
    """

    metric: Metric = ACCURACY_METRIC

    def __init__(self) -> None:
        self.by_provider: dict[str, dict[str, float]] = {}

    def add(self, record: Record) -> None:
        """Take a record; one without a score says nothing."""
        found = record.get("metrics", {})
        self.metric = next((METRICS[name] for name in found if name in METRICS), ACCURACY_METRIC)
        score = record.get("test_acc") if self.metric.scale == 100 else found[self.metric.name]
        if score is None:
            return
        name = record["provider"]
        full = name.startswith("pyg") and name.endswith("fp32")  # whatever form its edges have
        seed = f"{record['case'].rsplit('/', 1)[1]} {record['commit']}"
        self.by_provider.setdefault(FULL if full else name, {})[seed] = self.metric.scale * score

    def pairs(self, provider: str) -> list[tuple[float, float]]:
        """Scores in fp32 and of a provider, of the seeds that both have at one commit."""
        full, others = (self.by_provider.get(name, {}) for name in (FULL, provider))
        return [(full[seed], others[seed]) for seed in full if seed in others]

    def compared(self, providers: Sequence[str]) -> list[float]:
        """Scores in fp32, of the seeds that one of these has at the same commit."""
        others = {seed for name in providers for seed in self.by_provider.get(name, ())}
        return [score for seed, score in self.by_provider.get(FULL, {}).items() if seed in others]

    def differences(self, provider: str) -> list[float]:
        return [other - full for full, other in self.pairs(provider)]

    def share(self, provider: str) -> float:
        """What is left of the score in fp32, of an error its inverse."""
        full, other = (mean(values) for values in zip(*self.pairs(provider), strict=True))
        return other / full if self.metric.larger_is_better else full / other

    def is_worse(self, provider: str) -> bool:
        """Whether all of the interval is."""
        values = self.differences(provider)
        worse = -mean(values) if self.metric.larger_is_better else mean(values)
        return len(values) > 1 and worse > half_width(values)


def runs_of(groups: Groups, ablation: bool) -> dict[tuple[str, str], Runs]:
    """By data set and model, in the order of the names. Older records, whose cases name a precision and which are of
    other recipes, count where there are no others."""
    found: tuple[dict[tuple[str, str], Runs], ...] = {}, {}
    for record in (record for group in groups if group[0]["suite"] == "accuracy" for record in group if record["ok"]):
        dataset, model, *middle, _ = record["case"].split("/")
        if (middle == ["ablation"]) == ablation:
            found[middle in ([], ["ablation"])].setdefault((dataset, model), Runs()).add(record)
    older, newer = found
    return dict(sorted({**older, **newer}.items()))


def half_width(values: Sequence[float]) -> float:
    """Of the confidence interval of a mean, 95 %."""
    from scipy.stats import t

    return float(t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def interval(values: Sequence[float], digits: int = 2) -> str:
    """Mean and half the width of its interval."""
    if not values:
        return ""
    return f"{mean(values):+.{digits}f}" + (f" ± {half_width(values):.{digits}f}" if len(values) > 1 else "")


def _counted(values: Sequence[float], num_seeds: int, digits: int) -> str:
    """The interval, with how many seeds it is of where they are fewer than ``num_seeds``."""
    return interval(values, digits) + (f" (n={len(values)})" if 0 < len(values) < num_seeds else "")


def accuracy_rows(groups: Groups) -> Rows:
    """A line a data set and model."""
    for (dataset, model), runs in runs_of(groups, ablation=False).items():
        counts = [len(pairs) for name in KEPT if (pairs := runs.pairs(name))]
        if counts:
            full = runs.compared(KEPT)
            metric = runs.metric
            cells = (_counted(runs.differences(name), len(full), metric.digits) for name in KEPT)
            seeds = str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
            yield dataset, model, f"{metric.label}{metric.unit}", spread(full, metric.digits), *cells, seeds


def worst_rows(groups: Groups) -> Rows:
    """A line a provider: what it keeps of the scores in fp32 at least, and how often it loses what noise is not."""
    every = runs_of(groups, ablation=False)
    for name in KEPT:
        found = {key: runs for key, runs in every.items() if runs.pairs(name)}
        if not found:
            continue
        shares = {key: runs.share(name) for key, runs in found.items()}
        lowest = min(shares, key=shares.__getitem__)
        points = [mean(runs.differences(name)) for runs in found.values() if runs.metric.scale == 100]
        worse = sum(runs.is_worse(name) for runs in found.values())
        yield (
            *(name, str(len(found)), f"{mean(points):+.2f}" if points else ""),
            *(f"{100 * shares[lowest]:.1f}", " ".join(lowest), str(worse)),
        )


def ablation_rows(groups: Groups) -> Rows:
    """A line a data set and set of rules."""
    for (dataset, _), runs in runs_of(groups, ablation=True).items():
        rules: dict[str, None] = dict.fromkeys(name.rpartition(" ")[0] for name in runs.by_provider if name != FULL)
        for rule in rules:
            by_width = [runs.differences(f"{rule} {bits}") for bits in ("int8", "int4")]
            _, rounding, scale, last = rule.split()
            counts = {len(values) for values in by_width if values}
            yield (
                *(dataset, rounding, scale, "fp32" if last == "fp32-last" else "quantized"),
                *map(interval, by_width),
                str(min(counts, default=0)),
            )


TABLES = {
    "accuracy": (ACCURACY, accuracy_rows),
    "accuracy:worst": (WORST, worst_rows),
    "accuracy:ablation": (ABLATION, ablation_rows),
}


def regions(results: Path) -> Iterator[tuple[str, str]]:
    """The regions that there are records for, and their texts."""
    for name, (header, rows) in TABLES.items():
        if text := region(results, "accuracy", header, rows):
            yield name, f"{text}\n\n{NOTE}" if name == "accuracy" else text


def tables(groups: Groups) -> list[str]:
    """Those that there are rows for."""
    return [table(header, found) for header, rows in TABLES.values() if (found := list(rows(groups)))]
