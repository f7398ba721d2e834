"""What training in few bits costs of accuracy: the models of ``qgnn train`` on real data, seed by seed.

A case is a seed: PyG's model in fp32, the converted one with int8 and int4 codes, and int8 with what is kept for the
backward pass in two bits of projected rows. All start from the same weights; what is recorded is the test score at the
best validation epoch, in the metric of the data set. Cases under ``ablation`` take rules of rounding away, one by one
and together. The gate looks at the untrained model, whose result conversion may change by rounding alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from qgnn.cli.model import GRAPH_MODELS
from qgnn.cli.recipe import Recipe
from qgnn.cli.run import train_run
from qgnn.cli.scheme import Scheme
from qgnn.cli.task import NodeTask, Task
from qgnn.formats import Int

from ..harness import Case, Measured, Provider
from . import tasks
from .inputs import Setting, available, require_bf16
from .step import TOLERANCE, tolerance_of

GRAPHS = ("mutag", "proteins", "mutagenicity", "esol", "freesolv")
NODES = (
    *("cora", "citeseer", "cora-ml", "pubmed", "dblp", "minesweeper", "photo", "computers", "tolokers"),
    *("debian", "wordnet", "cs", "cornell5", "physics"),
)
MODELS = (*GRAPH_MODELS, "gcn2")
NUM_SEEDS = 10
SUM_ROWS = ("gcn", "sage", "gin", "gcn2")  # by PyG in fp32 with a matrix: messages cost GiB, and several times as long
ABLATED = ("cora", "pubmed", "photo", "wordnet")
ANY = 100.0  # relative error of what is finite at least
EVAL_EVERY = 2  # at least: a forward pass after each epoch would take a third of the time
LONG = ("computers", "tolokers", "debian", "cs", "cornell5", "physics")  # where an epoch takes seconds
EPOCHS_OF_LONG = 100

Schemes = dict[str, Scheme]


def precisions() -> Schemes:
    """By provider."""
    names = {"pyg fp32": ("fp32", "none"), "pyg bf16": ("bf16", "none"), "qgnn int8": ("int8", "none")}
    names |= {f"qgnn int8 kept-{kept}": ("int8", kept) for kept in ("int2-rp8", "int2-rp8-vm")}
    names["qgnn int4"] = ("int4", "none")
    return {name: Scheme.from_parts(fmt, compress=kept) for name, (fmt, kept) in names.items()}


def rules() -> Schemes:
    """With and without each rule: rounding at random, a scale a row, a last layer in full precision."""
    found = {"pyg fp32": tasks.FP32}
    for bits, rounding, granularity, keep_last in product(
        (8, 4), ("stochastic", "nearest"), ("row", "tensor"), (True, False)
    ):
        scheme = Scheme.from_parts(f"int{bits}")
        assert scheme.config is not None
        config = replace(scheme.config, rounding=rounding, granularity=granularity)
        name = f"qgnn {rounding} {granularity} {'fp32-last' if keep_last else 'all'} int{bits}"
        found[name] = replace(scheme, config=config, keep_last=keep_last)
    return found


class Problem:
    """A model on a data set, from one seed.

    Args:
        dataset: Its name.
        model: The model's.
        seed: Of its first weights, and of all noise.
        schemes: What it is trained in, by provider.
        setting: Where it runs.
    """

    def __init__(self, dataset: str, model: str, seed: int, schemes: Schemes, setting: Setting) -> None:
        self.dataset, self.model, self.seed, self.schemes, self.setting = dataset, model, seed, schemes, setting

    def train(self, scheme: Scheme) -> Measured:
        if scheme.bf16:
            require_bf16(self.setting)
        task, recipe = self.load(scheme)
        run = train_run(task, recipe, scheme, self.seed, self.setting.device, self.model, measure=False)
        found = {task.metric.name: run.test_acc, "best_epoch": float(run.best_epoch), "final_loss": run.final_loss}
        share = run.test_acc if task.metric.scale == 100 else None
        return Measured(self.untrained(scheme), [run.epoch_ms], None, None, share, found)

    def load(self, scheme: Scheme, dtype: torch.dtype = torch.float32) -> tuple[Task, Recipe]:
        task, recipe = tasks.load(self.dataset, self.model, self.setting)
        epochs = min(recipe.epochs, EPOCHS_OF_LONG) if self.dataset in LONG else recipe.epochs
        recipe = replace(recipe, epochs=epochs, eval_every=max(recipe.eval_every, EVAL_EVERY))
        if scheme == tasks.FP32 and self.model in SUM_ROWS and isinstance(task, NodeTask):
            task = tasks.by_matrix(task, dtype)
        return task, recipe

    def untrained(self, scheme: Scheme, dtype: torch.dtype = torch.float32) -> Sequence[Tensor]:
        task, recipe = self.load(scheme, dtype)
        return tasks.untrained(task, recipe, scheme, self.model, self.seed, self.setting.device, dtype)

    def exact(self) -> Sequence[Tensor]:
        return self.untrained(tasks.FP32, torch.float64)

    def tolerance(self, name: str, scheme: Scheme) -> float:
        """What rounding may change; the rules taken away are there to be seen, whatever they change."""
        if scheme.config is None:
            return TOLERANCE["bf16" if scheme.bf16 else "fp32"]
        if " tensor " in name or " all " in name:
            return ANY
        return tolerance_of(Int(int(name[-1]) if "kept" not in name else 8))

    def case(self, name: str) -> Case:
        providers = [Provider(p, partial(self.train, s), self.tolerance(p, s)) for p, s in self.schemes.items()]
        path = f"{tasks.name_of(self.dataset, self.setting)}/{self.model}{name}/seed{self.seed}"
        return Case(path, "step", self.exact, providers)


def cases(setting: Setting) -> Iterator[Case]:
    datasets = setting.shapes(*NODES, *GRAPHS)
    for dataset in available("accuracy", datasets, setting, lambda dataset: tasks.load(dataset, "gcn", setting)):
        models = GRAPH_MODELS if tasks.is_of_graphs(dataset) else MODELS
        for model in setting.shapes(*models):
            for seed in setting.shapes(*range(NUM_SEEDS)):
                yield Problem(dataset, model, seed, precisions(), setting).case("")
        for seed in setting.shapes(*range(NUM_SEEDS)) if dataset in ABLATED else ():
            yield Problem(dataset, "gcn", seed, rules(), setting).case("/ablation")
