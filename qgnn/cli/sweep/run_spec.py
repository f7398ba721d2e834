"""One run of a sweep, and what makes it the same run tomorrow."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from qgnn.cli.scheme import UNQUANTIZED, Scheme
from qgnn.data.datasets import metric_of

# Of the meaning of a run's fields: raise it when equal fields stand for another training than before.
KEY_VERSION = 2

BASELINE = "fp32"
NONE = "none"  # the component, schedule and rounding of full precision; the schedule of a fixed width


@dataclass(frozen=True)
class RunSpec:
    """What determines a run. Where it is computed, and from which folder it reads, are no part of it.

    Args:
        dataset: Name of the data set.
        model: Name of the model.
        format: Name of the number format, ``fp32`` for the baseline, or ``bf16`` for PyG's layers under autocast;
            with a schedule, that of its last width.
        component: What is in that format: ``all``, or one component of :class:`qgnn.QConfig`.
        schedule: How its width changes during training, or ``none``.
        rounding: ``stochastic`` or ``nearest``.
        seed: Seed of the training.
        recipe: Hyperparameters given in place of those of the data set, by name.
    """

    dataset: str
    model: str
    format: str
    component: str
    schedule: str
    rounding: str
    seed: int
    recipe: tuple[tuple[str, int | float], ...] = ()

    @property
    def fields(self) -> dict[str, Any]:
        """The fields, ``recipe`` as a dictionary."""
        return asdict(self) | {"recipe": dict(self.recipe)}

    @property
    def canonical(self) -> str:
        """The JSON that identifies the run: equal runs, and they alone, have equal text."""
        fields = {"version": KEY_VERSION, **self.fields}
        if (metric := metric_of(self.dataset)) is not None:  # runs of before there was one are of accuracy
            fields["metric"] = metric
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @property
    def key(self) -> str:
        """The SHA-256 of :attr:`canonical`, in hexadecimal."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()

    @property
    def baseline(self) -> RunSpec:
        """The run in full precision that this one is compared with."""
        return RunSpec(self.dataset, self.model, BASELINE, NONE, NONE, NONE, self.seed, self.recipe)

    def __str__(self) -> str:
        details = [self.component, self.schedule, self.rounding, *(f"{name} {value}" for name, value in self.recipe)]
        named = [detail for detail in details if detail != NONE]
        return ", ".join([f"{self.model} on {self.dataset}", self.format, *named, f"seed {self.seed}"])


def scheme_of(format: str, component: str, schedule: str, rounding: str) -> Scheme:
    """What a run computes in, by the fields of that name."""
    if format == BASELINE:
        return UNQUANTIZED
    if component == NONE:
        return Scheme.from_parts(format)
    scheme = Scheme.from_parts(format, component, None if schedule == NONE else schedule)
    assert scheme.config is not None
    return replace(scheme, config=replace(scheme.config, rounding=rounding))
