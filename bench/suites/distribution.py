"""Is the clipped normal true? Activations of models after a few training steps, as they are and randomly projected,
in blocks of 16 to 2048 values, against the model that variance-minimized bins are made from (:mod:`qgnn.bins`).

A case is one tensor in blocks of one size. Its gate: INT2 codes are rounded with the variance that follows from the
values. Recorded beside the time of a round trip are the distances of the values from the model and from a uniform
distribution, and how many times the predicted variance there was.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from qgnn import bins, ops
from qgnn.rng import make_seed

from ..clock import make_clock
from ..harness import Case, Measured, Provider
from . import pyg_models
from .inputs import Setting, available, projected

DATASETS = ("wordnet", *pyg_models.DATASETS)  # the first one is embedded
# What a layer keeps for its backward pass: its input, by the layer's name. Input features are left out: they are
# kept anyway. GraphSAGE has two inputs, the mean of the neighbors (lin_l) and the node itself (lin_r).
LINEAR = {"sage": ("convs.0.lin_l", "convs.1.lin_l", "convs.1.lin_r"), "gcn": ("convs.1.lin",), "gat": ("convs.1.lin",)}
NORMS = ("norms.0.module", "norms.1.module")

BITS = 2
BLOCKS = (16, 64, 256, 2048)
RATIO = 8  # columns of a matrix for each of its projection
NUM_STEPS = 5
NUM_PIECES, PIECE_ROWS = 4, 1024  # consecutive rows of an activation that are looked at
NUM_SEEDS = 3

# Bound on the relative error of the variance, of 40,000 squares and three seeds or more. Squares have a deviation of
# 1.2 to 4 times their mean (rows of different sizes), so 0.012 is a standard error at most.
TOLERANCE = 0.06


class Problem(pyg_models.Problem):
    """A model of three layers with batch norm, whose activations are taken in training, dropout included."""

    num_layers = 3

    def __init__(self, dataset: str, kind: str, setting: Setting) -> None:
        super().__init__(dataset, kind, 0, setting)
        self.recipe = replace(self.recipe, hidden=128, norm="batch_norm")

    def activations(self) -> dict[str, Tensor]:
        """The inputs ``[N, F]`` of the layers in the last of a few training steps, or pieces of many rows."""
        model, found = self.model(), {}

        def keep(name: str, module: torch.nn.Module, inputs: tuple[Tensor]) -> None:
            x = inputs[0].detach()
            if len(x) > NUM_PIECES * PIECE_ROWS:
                apart = (len(x) - PIECE_ROWS) // (NUM_PIECES - 1)
                x = torch.cat([x[number * apart :][:PIECE_ROWS] for number in range(NUM_PIECES)])
            found[name] = x.clone()

        for name in (*LINEAR[self.kind], *NORMS):
            model.get_submodule(name).register_forward_pre_hook(partial(keep, name))
        step = self.step(model.train(), self.edges("fp32"))
        for _ in range(NUM_STEPS):
            step()
        return found


@lru_cache(maxsize=1)
def activations(dataset: str, kind: str, setting: Setting) -> dict[str, Tensor]:
    return Problem(dataset, kind, setting).activations()


class Blocks:
    """One tensor in blocks of one size."""

    def __init__(self, problem: Problem, tensor: str, ratio: int, block_size: int) -> None:
        self.problem, self.tensor, self.ratio, self.block_size = problem, tensor, ratio, block_size
        form = f"projected{ratio}" if ratio > 1 else "plain"
        self.name = f"{problem.name}/{tensor.removesuffix('.module')}/{form}/G{block_size}"

    @property
    def x(self) -> Tensor:
        """Values in the order in which they are stored, whole blocks of them."""
        x = activations(self.problem.dataset, self.problem.kind, self.problem.setting)[self.tensor]
        if self.ratio > 1:
            x = projected(x, self.ratio)
        return x.flatten()[: x.numel() // self.block_size * self.block_size]

    def edges(self) -> tuple[Tensor | None, Tensor]:
        """Of uniform and of optimal bins."""
        return None, bins.optimal_bins(BITS, self.block_size).to(self.problem.setting.device)

    def exact(self) -> Sequence[Tensor]:
        """The variance in squared steps that follows from the values, in uniform and in optimal bins."""
        steps, step = bins.block_steps(self.x, BITS, self.block_size)
        rows = steps[step[:, 0] > 0]
        return [bins.rounding_variance(rows, edges).double().mean() for edges in self.edges()]

    def measure(self) -> Measured:
        x, clock = self.x, make_clock(self.problem.setting.device)
        in_steps, in_values, times_ms = [], [], []
        for edges in self.edges():
            trips = [RoundTrip(x, edges, self.block_size, seed) for seed in range(NUM_SEEDS)]
            times_ms += [clock.time(trip.run) for trip in trips]
            in_steps.append(torch.stack([trip.variance(per_step=True) for trip in trips]).mean())
            in_values.append(torch.stack([trip.variance(per_step=False) for trip in trips]).mean())
        return Measured(in_steps, times_ms, None, None, metrics=self.metrics(in_steps, in_values))

    def metrics(self, in_steps: Sequence[Tensor], in_values: Sequence[Tensor]) -> dict[str, float]:
        """The fit of the model, and measured variances as multiples of those that it predicts."""
        fit = bins.fit(self.x, self.block_size)
        found = {name: value for name, value in fit._asdict().items() if isinstance(value, float)}
        for p, value, model in zip(bins.QUANTILES, fit.quantiles, fit.model_quantiles, strict=True):
            found[f"q{100 * p:02.0f}_off"] = value - model
        predicted = [bins.expected_variance(BITS, self.block_size, edges) for edges in self.edges()]
        uniform, optimal = (float(measured) / model for measured, model in zip(in_steps, predicted, strict=True))
        found |= {"uniform_ratio": uniform, "optimal_ratio": optimal}
        found |= {"gain": 1 - float(in_values[1] / in_values[0]), "predicted_gain": 1 - predicted[1] / predicted[0]}
        return found

    def case(self) -> Case:
        return Case(self.name, "forward", self.exact, [Provider(f"qgnn int{BITS}", self.measure, TOLERANCE)])


class RoundTrip:
    """Blocks of ``x`` to codes and back."""

    def __init__(self, x: Tensor, edges: Tensor | None, block_size: int, seed: int) -> None:
        self.x, self.edges, self.block_size, self.seed = x, edges, block_size, make_seed(seed, x.device)

    def run(self) -> None:
        given = (self.edges, 0, None)  # no projection: what is given is projected already
        packed, low, self.step = ops.blocks_pack(self.x, self.seed, BITS, self.block_size, torch.float32, *given)
        self.restored = ops.blocks_unpack(packed, low, self.step, BITS, len(self.x), self.x.dtype, *given, 0, 0)

    def variance(self, per_step: bool) -> Tensor:
        """Mean squared error, in squared steps of the blocks that have one or as it is."""
        squares = (self.restored - self.x).double().square().view(-1, self.block_size).mean(dim=1)
        return (squares / self.step.double().square())[self.step > 0].mean() if per_step else squares.mean()


def cases(setting: Setting) -> Iterator[Case]:
    datasets = setting.shapes(*DATASETS)
    for dataset in available("distribution", datasets, setting, lambda d: pyg_models.load(d, False, setting)):
        for kind in setting.shapes(*LINEAR):
            problem = Problem(dataset, kind, setting)
            forms = [(name, ratio) for name in LINEAR[kind] for ratio in (1, RATIO)] + [(n, 1) for n in NORMS]
            for tensor, ratio in setting.shapes(*forms):
                for block_size in BLOCKS:
                    yield Blocks(problem, tensor, ratio, block_size).case()
