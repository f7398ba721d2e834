"""What an optimizer keeps in codes: time, bytes and error of AdamW with 8- and 4-bit state, of libraries that serve it;
what a model gets right that was trained with it; and the sums of gradients of micro-batches.

Time and bytes are of a step of the optimizer alone, on parameters of real sizes; its error is that of the sum of the
first updates. A model is trained with each of them from equal weights.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.nn import GraphSAGE

import qgnn
from qgnn.compress import GradientAccumulator
from qgnn.formats import Blocks

from ..harness import Case, Measured, Provider, Work
from ..live import storage_mib
from . import pyg_models, step
from .inputs import INT8, Setting, package, randn

LEARNING_RATE = 1e-3
NUM_UPDATES = 5  # that the gate looks at
NUM_SEEDS, NUM_EPOCHS = 3, 20
PRECISIONS = ("fp32", "int8")  # of the model
NUM_PARTS = 8  # micro-batches

Optimizer = Callable[..., torch.optim.Optimizer]

# Bounds of the gate on the sum of the first updates. Neighboring codes of 8 bits differ by a factor of at most 1.13 in
# the largest decade of a block, and by up to 2.1 with 4 bits: rounding is off by 4 % and 20 % there (rms), and by more
# below. In fp32, what is off is the last bit of a parameter, of which an update is a hundredth.
TOLERANCE = {"fp32": 1e-4, "int8": 5e-2, "int4": 0.3}


def optimizers() -> Iterator[tuple[str, Callable[[], Optimizer]]]:
    """Names, and what imports the class, or says that its package is not there."""
    yield "torch adamw fp32", lambda: torch.optim.AdamW
    yield "torch adamw fused fp32", lambda: partial(torch.optim.AdamW, fused=True)
    yield "torchao adamw int8", lambda: package("torchao.optim").AdamW8bit
    yield "torchao adamw int4", lambda: package("torchao.optim").AdamW4bit
    yield "bitsandbytes adamw int8", lambda: package("bitsandbytes.optim").AdamW8bit


def state_of(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    values = chain.from_iterable(state.values() for state in optimizer.state.values())
    return (value for value in values if isinstance(value, Tensor))


class Updates:
    """Parameters of these shapes, and gradients."""

    def __init__(self, name: str, shapes: Sequence[Sequence[int]], setting: Setting) -> None:
        self.name, self.shapes, self.setting = f"{name}/adamw", shapes, setting

    def normal(self, seed: int, dtype: torch.dtype) -> list[Tensor]:
        seeds = range(seed * len(self.shapes), (seed + 1) * len(self.shapes))
        pairs = zip(self.shapes, seeds, strict=True)
        return [0.1 * randn(*shape, setting=self.setting, seed=each).to(dtype) for shape, each in pairs]

    def updates(self, optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Sums of the first updates, of gradients that differ: equal ones would not tell one beta from another."""
        parameters = [torch.nn.Parameter(value) for value in self.normal(0, dtype)]
        before = [p.detach().clone() for p in parameters]
        made = optimizer(parameters, lr=LEARNING_RATE)
        for number in range(1, NUM_UPDATES + 1):
            for parameter, grad in zip(parameters, self.normal(number, dtype), strict=True):
                parameter.grad = grad
            made.step()
        return [p.detach() - q for p, q in zip(parameters, before, strict=True)]

    def work(self, find: Callable[[], Optimizer]) -> Work:
        optimizer = find()
        self.updates(optimizer)  # compiles
        parameters = [torch.nn.Parameter(value) for value in self.normal(0, torch.float32)]
        for parameter, grad in zip(parameters, self.normal(1, torch.float32), strict=True):
            parameter.grad = grad
        made = optimizer(parameters, lr=LEARNING_RATE)
        return Work(made.step, partial(self.updates, optimizer), kept=partial(state_of, made))

    def case(self) -> Case:
        providers = [Provider(name, partial(self.work, find), _tolerance(name)) for name, find in optimizers()]
        return Case(self.name, "step", partial(self.updates, torch.optim.AdamW, torch.float64), providers)


def _tolerance(name: str) -> float:
    return TOLERANCE[name.rsplit(" ", 1)[1]]


class Training(pyg_models.Problem):
    """A GCN on WordNet, PyG's or converted, with each optimizer from equal weights."""

    def trained(self, precision: str, find: Callable[[], Optimizer]) -> Measured:
        optimizer = find()
        model = self.model()
        if precision == "int8":
            qgnn.quantize_(model, INT8)
        edges = self.edges(precision)
        untrained = self.untrained(model, edges)
        made = optimizer(model.parameters(), lr=self.recipe.lr, weight_decay=pyg_models.WEIGHT_DECAY)
        test_acc, times_ms = self.train(model, edges, made, NUM_EPOCHS)
        return Measured(untrained, times_ms, None, storage_mib(state_of(made)), test_acc)

    def case_of(self, precision: str) -> Case:
        tolerance = step.TOLERANCE[precision]
        providers = [
            Provider(name, partial(self.trained, precision, find), tolerance)
            for name, find in optimizers()
            if "fused" not in name  # the same numbers
        ]
        return Case(f"{self.name}/adamw/{precision}/{self.run}", "step", self.exact, providers)


class Sums(pyg_models.Problem):
    """Gradients of the losses of eighths of the training nodes, summed in what each provider keeps between them."""

    @cached_property
    def gradients(self) -> list[tuple[Tensor, ...]]:
        model, data = self.model().eval(), self.data
        nodes = data.train_mask.nonzero()[:, 0]
        order = torch.randperm(len(nodes), generator=torch.Generator().manual_seed(self.seed)).to(nodes.device)
        out, weights = model(data.x, data.edge_index), [p for p in model.parameters() if p.dim() == 2]
        losses = [F.cross_entropy(out[part], data.y[part]) for part in nodes[order].chunk(NUM_PARTS)]
        return [torch.autograd.grad(loss, weights, retain_graph=True) for loss in losses]

    def sums(self, dtype: torch.dtype) -> list[Tensor]:
        totals = [grad.to(dtype, copy=True) for grad in self.gradients[0]]
        for grads in self.gradients[1:]:
            for total, grad in zip(totals, grads, strict=True):
                total.add_(grad)
        return totals

    def plain(self, dtype: torch.dtype) -> Work:
        return Work(partial(self.sums, dtype), kept=partial(self.sums, dtype))

    def coded(self, blocks: Blocks) -> Work:
        parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in self.gradients[0]]
        accumulator = GradientAccumulator(parameters, blocks, min_size=1)

        def accumulate() -> None:
            accumulator.reset()
            for grads in self.gradients:
                for parameter, grad in zip(parameters, grads, strict=True):
                    parameter.grad = grad
                accumulator.accumulate()

        def check() -> list[Tensor]:
            accumulate()
            accumulator.finish()
            return [parameter.grad for parameter in parameters if parameter.grad is not None]

        def kept() -> Iterator[Tensor]:
            accumulate()
            for entry in accumulator.state_dict()["sums"].values():
                yield from (part for part in entry.values() if isinstance(part, Tensor))

        return Work(accumulate, check, kept=kept)

    def sums_case(self) -> Case:
        # A block of 64 normal values ranges over 4.8 deviations, and stochastic rounding costs step / sqrt(6): 0.008 of
        # a deviation with 8 bits, 0.11 with 4 bits and blocks of 32. Variances of the sums of 1 to 8 independent
        # gradients add up to 4.5 times the last one: 0.016 and 0.24. Heavy tails and what cancels make more of it.
        providers = [Provider("qgnn int8", partial(self.coded, Blocks(8, 64)), 0.1)]
        if not self.setting.quick:
            providers.append(Provider("qgnn int4", partial(self.coded, Blocks(4, 32)), 0.75))
        providers += [
            Provider("torch bf16", partial(self.plain, torch.bfloat16), 2e-2),
            Provider("torch fp32", partial(self.plain, torch.float32), 1e-4),
        ]
        return Case(f"{self.name}/sums", "backward", partial(self.sums, torch.float64), providers)


def cases(setting: Setting) -> Iterator[Case]:
    sage = [tuple(p.shape) for p in GraphSAGE(100, 256, 3, 47).parameters()]
    table = [(round(100_000 * setting.scale), 64)]
    for name, shapes in (("products/sage/100-256-256-47", sage), (f"embedding/{table[0][0]}x64", table)):
        yield Updates(name, shapes, setting).case()
    for dataset, kind in setting.shapes(("cora", "gcn"), ("photo", "sage"), ("wordnet", "gcn")):
        yield Sums(dataset, kind, 0, setting).sums_case()
    for seed in range(1 if setting.quick else NUM_SEEDS):
        for precision in PRECISIONS:
            yield Training("wordnet", "gcn", seed, setting).case_of(precision)
