"""Does an Error_X of at most 0.3 tell which width keeps the accuracy? (The rule of Tango, arXiv:2308.00890, and a
question that it leaves open.)

A case is a data set, a format and a width: the GCN of ``qgnn train`` from a few seeds, beside the same
in full precision, and the error of what its layers read in their first step. Its gate looks at the untrained model.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from qgnn.cli.model import make_model, train_features
from qgnn.cli.recipe import Recipe
from qgnn.cli.run import Run, paired_run
from qgnn.cli.scheme import UNQUANTIZED, Scheme
from qgnn.cli.task import Task
from qgnn.formats import MSFP, FixedPoint, Format, Int
from qgnn.metrics import error_x
from qgnn.nn import QGCNConv

from ..harness import Case, Measured, Provider
from . import tasks
from .inputs import Setting, available
from .step import tolerance_of

# Without physics, of which a run takes ten minutes.
NODES = ("cora", "citeseer", "pubmed", "cora-ml", "photo", "computers", "dblp", "cs", "wordnet")
GRAPHS = ("mutag", "proteins", "enzymes")
LARGE = ("cs", "wordnet")  # a run takes a minute or more
# Of MUTAG's test graphs one is five points.
NUM_SEEDS = {"mutag": 20, "proteins": 5, "enzymes": 5, **dict.fromkeys(LARGE, 2)}
USUAL_SEEDS, QUICK_SEEDS = 3, 2
EVAL_EVERY = 5  # epochs: a forward pass after each would take a third of the time
FORMATS: dict[str, Callable[[int], Format]] = {
    "int": Int,
    "fixed": FixedPoint,
    "msfp": lambda bits: MSFP(bits - 1),  # one of them is the sign
}
WIDTHS = tuple(range(8, 1, -1))

Operands = list[tuple[str, Tensor]]


def load(dataset: str, setting: Setting) -> tuple[Task, Recipe]:
    task, recipe = tasks.load(dataset, "gcn", setting)
    return task, replace(recipe, eval_every=EVAL_EVERY)


@lru_cache(maxsize=1)
def full_precision(dataset: str, setting: Setting) -> tuple[Run, ...]:
    """The runs without formats, which all formats of the data set are compared with."""
    return tuple(train(dataset, UNQUANTIZED, setting))


def train(dataset: str, scheme: Scheme, setting: Setting) -> Iterator[Run]:
    task, recipe = load(dataset, setting)
    for seed in range(QUICK_SEEDS if setting.quick else NUM_SEEDS.get(dataset, USUAL_SEEDS)):
        yield paired_run(task, recipe, scheme, seed, setting.device, "gcn")


@lru_cache(maxsize=1)
def operands(dataset: str, setting: Setting) -> Operands:
    """What quantized layers read in the first step of the first seed, in full precision: rows, weights, messages, and
    the gradients of results; their values share scales along the last dimension."""
    task, recipe = load(dataset, setting)
    torch.manual_seed(0)
    x = task.features[0]
    sizes = (x.shape[1], task.num_outputs, recipe)
    model, found = make_model("gcn", *sizes, tasks.FP32, task.by_graph).to(setting.device).train(), []

    def keep(module: Any, args: tuple[Tensor, ...], out: Tensor) -> None:
        found.extend([("rows", args[0]), ("weights", module.weight), ("messages", out)])

    def keep_gradient(module: Any, args: Any, out: Tensor) -> None:
        out.register_hook(lambda grad: found.append(("output_gradient", grad)))

    quantized = make_model("gcn", *sizes, Scheme.from_parts("int8"), task.by_graph)
    for name, layer in quantized.named_modules():
        if isinstance(layer, QGCNConv) and layer.config is not None:
            conv: Any = model.get_submodule(name)
            conv.lin.register_forward_hook(keep)
            conv.register_forward_hook(keep_gradient)
    task.loss(model, train_features(x, recipe)()).backward()
    return [(name, t.detach()) for name, t in found]


def errors(dataset: str, fmt: Format, setting: Setting) -> dict[str, float]:
    """Means over the operands, and the largest Error_X, rounded to nearest as :func:`qgnn.metrics.select_bits` does.
    The SQNR is that of the mean noise, since some operands are exact."""
    elementwise, norm, noise = [], [], []
    for _, t in operands(dataset, setting):
        rounded = fmt.quantize(t)
        elementwise.append(float(error_x(t, rounded)))
        norm.append(float(error_x(t, rounded, "norm")))
        noise.append(float((rounded - t).double().square().sum() / t.double().square().sum()))
    return {
        "error_x": fmean(elementwise),
        "error_x_max": max(elementwise),
        "error_x_norm": fmean(norm),
        "error_x_norm_max": max(norm),
        "sqnr": float(-10 * torch.tensor(fmean(noise), dtype=torch.float64).log10()),
    }


class Problem:
    """One format of one width on one data set."""

    def __init__(self, dataset: str, family: str, bits: int, setting: Setting) -> None:
        self.dataset, self.bits, self.setting = dataset, bits, setting
        self.fmt = FORMATS[family](bits)
        self.scheme = Scheme.from_parts(str(self.fmt))
        self.name = f"{tasks.name_of(dataset, setting)}/gcn/{family}/{bits}"

    def measure(self) -> Measured:
        runs = list(train(self.dataset, self.scheme, self.setting))
        drops = [full.test_acc - run.test_acc for full, run in zip(self.full, runs, strict=True)]
        found = {
            **errors(self.dataset, self.fmt, self.setting),
            "bits": self.bits,
            "fp32_acc": fmean(run.test_acc for run in self.full),
            "drop_error": stdev(drops) / len(drops) ** 0.5,
            "seeds": len(runs),
        }
        test_acc = fmean(run.test_acc for run in runs)
        return Measured(self.untrained(self.scheme), [run.epoch_ms for run in runs], None, None, test_acc, found)

    @property
    def full(self) -> Sequence[Run]:
        return full_precision(self.dataset, self.setting)

    def untrained(self, scheme: Scheme, dtype: torch.dtype = torch.float32) -> Sequence[Tensor]:
        task, recipe = load(self.dataset, self.setting)
        return tasks.untrained(task, recipe, scheme, "gcn", 0, self.setting.device, dtype)

    def exact(self) -> Sequence[Tensor]:
        return self.untrained(tasks.FP32, torch.float64)

    def case(self) -> Case:
        provider = Provider(f"qgnn {self.fmt}", self.measure, tolerance_of(self.fmt))
        return Case(self.name, "step", self.exact, [provider])


def cases(setting: Setting) -> Iterator[Case]:
    datasets = setting.shapes(*NODES, *GRAPHS)
    for dataset in available("threshold", datasets, setting, lambda dataset: load(dataset, setting)):
        for bits in setting.shapes(*WIDTHS):
            for family in FORMATS:
                yield Problem(dataset, family, bits, setting).case()
