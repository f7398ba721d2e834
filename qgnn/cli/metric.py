"""The scores that trained models are compared by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import stdev

from torch import Tensor


@dataclass(frozen=True)
class Metric:
    """A score, and how it is shown.

    Args:
        name: What JSON and tables of results call it.
        label: What headings call it.
        of: The score of a model's results and the labels.
        larger_is_better: Whether a better model has a larger one.
        scale: What is shown of a score of one: 100 for percent.

    Example:
        >>> METRICS["roc_auc"].heading, METRICS["rmse"].heading
        ('test ROC-AUC %', 'test RMSE')
    """

    name: str
    label: str
    of: Callable[[Tensor, Tensor], float]
    larger_is_better: bool = True
    scale: int = 100

    @property
    def unit(self) -> str:
        """What stands behind a number."""
        return " %" if self.scale == 100 else ""

    @property
    def heading(self) -> str:
        """What stands above numbers."""
        return f"test {self.label}{self.unit}"

    @property
    def digits(self) -> int:
        """How many are shown behind the point."""
        return 2 if self.scale == 100 else 3

    def text(self, score: float) -> str:
        """The score as it is shown, without a unit."""
        return f"{self.scale * score:.{self.digits}f}"

    def is_better(self, score: float, other: float) -> bool:
        """Whether a score is better than another one; equal ones are not, and any is better than NaN."""
        if math.isnan(other):
            return not math.isnan(score)
        return score > other if self.larger_is_better else score < other


def accuracy(out: Tensor, y: Tensor) -> float:
    """The fraction of rows of logits whose largest is that of the label; 0 of none.

    Args:
        out: [N, C] logits.
        y: [N] int64.
    """
    return float((out.argmax(dim=1) == y).double().sum() / max(len(y), 1))


def micro_f1(out: Tensor, y: Tensor) -> float:
    """Micro-F1 of several labels a node; 0 of none.

    Args:
        out: [N, T] logits.
        y: [N, T] zeros and ones.
    """
    predicted, true = out > 0, y > 0
    return float(2 * (predicted & true).sum() / max(int(predicted.sum() + true.sum()), 1))


def roc_auc(out: Tensor, y: Tensor) -> float:
    """The area under the ROC curve of two classes: the fraction of pairs of a one and a zero of which the one has the
    larger difference of logits, equal ones counted half. Pairs are counted exactly; NaN where a difference is, or
    where a class has no row.

    Args:
        out: [N, 2] logits.
        y: [N] int64, zeros and ones.
    """
    difference = out[:, 1].double() - out[:, 0].double()
    ones = int(y.sum())
    if difference.isnan().any() or not 0 < ones < len(y):
        return float("nan")
    _, place = difference.unique(return_inverse=True)
    ones_at, zeros_at = place[y == 1].bincount(minlength=len(y)), place[y == 0].bincount(minlength=len(y))
    zeros_below = zeros_at.cumsum(0) - zeros_at
    return int((ones_at * (2 * zeros_below + zeros_at)).sum()) / (2 * ones * (len(y) - ones))


def rmse(out: Tensor, y: Tensor) -> float:
    """The root of the mean square error; NaN of nothing.

    Args:
        out: [G, 1].
        y: [G].
    """
    return float((out.squeeze(1) - y).double().square().mean().sqrt())


def or_nan(score: float | None) -> float:
    """The score as JSON gives it back, which has ``null`` for NaN and infinity."""
    return math.nan if score is None else score


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of a sample of two values or more; NaN where one is not finite: its training diverged."""
    return stdev(values) if all(map(math.isfinite, values)) else math.nan


METRICS = {
    metric.name: metric
    for metric in (
        Metric("accuracy", "accuracy", accuracy),
        Metric("micro_f1", "micro-F1", micro_f1),
        Metric("roc_auc", "ROC-AUC", roc_auc),
        Metric("rmse", "RMSE", rmse, larger_is_better=False, scale=1),
    )
}
ACCURACY = METRICS["accuracy"]
