"""Two processes against one: the same loss, epoch by epoch, the same accuracy, and fewer bytes between them.

``partitioned``: a GCN on a graph whose nodes are split, with rows of neighbors and gradients sent as they are or as
codes. ``batches``: a GraphSAGE on batches of nodes with their neighbors, each cut in two, with gradients sent as they
are or as codes. A case is a seed. Its gate compares the losses of the epochs with those of one process in fp32: what is
sent as it is changes the order of sums alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data

from qgnn.cli.processes import ALONE, Processes, is_launched, joined
from qgnn.cli.recipe import Recipe
from qgnn.cli.run import train_run
from qgnn.cli.sampled import SampledNodeTask, Sampling
from qgnn.cli.scheme import parse_scheme
from qgnn.distributed import Int8State, PartitionedGraph, fp32_hook, int8_hook, mean_loss, partition_nodes
from qgnn.functional import quantize
from qgnn.memory import MIB
from qgnn.nn import Epilogue, QGCNConv
from qgnn.qtensor import QTensor

from ..clock import make_clock
from ..harness import Case, Measured, Provider
from . import process
from .inputs import INT8, OURS, Setting, graph_name
from .pyg_models import load
from .train import Convolutions

DATASETS, WAYS, SEEDS = ("wordnet", "debian"), ("partitioned", "batches"), (0, 1, 2)
NUM_PROCESSES, TIMEOUT_S = 2, 600.0
ONE, TWO = "one process", "two processes"
RECIPE = Recipe(hidden=64, dropout=0.0, lr=0.01, weight_decay=0.0, epochs=60, eval_every=2)
SAMPLED = replace(RECIPE, epochs=4, eval_every=1)
SAMPLING = Sampling(fanout=(-1, -1), batch_size=4096, workers=0)  # all neighbors, as each process draws its own
# How far the losses may be apart.
ORDER_OF_SUMS, NOISE = 1e-5, 0.03


class Problem:
    """A model and its first weights on a data set, to be trained by one process or by several.

    Args:
        dataset: Its name.
        way: How processes share the work.
        seed: Of the weights, and of the noise of each process.
        setting: Where it runs.
    """

    def __init__(self, dataset: str, way: str, seed: int, setting: Setting) -> None:
        self.dataset, self.way, self.seed, self.setting = dataset, way, seed, setting
        name = graph_name("arxiv", setting) if setting.quick else dataset
        self.name = f"{name}/{'gcn' if way == 'partitioned' else 'sage'}/{way}/seed{seed}"

    @property
    def data(self) -> Data:
        return load(self.dataset, False, self.setting)

    def recipe(self) -> Recipe:
        recipe = RECIPE if self.way == "partitioned" else SAMPLED
        return replace(recipe, epochs=2) if self.setting.quick else recipe

    def train(self, precision: str, bits: int | None) -> Measured:
        """With the other processes, if this is one of several."""
        with joined(TIMEOUT_S) if is_launched() else nullcontext(ALONE) as processes:
            return (self.partitioned if self.way == "partitioned" else self.batches)(precision, bits, processes)

    def partitioned(self, precision: str, bits: int | None, processes: Processes) -> Measured:
        part = Part(self.data, bits, processes)
        torch.manual_seed(self.seed)
        widths = (self.data.num_features, RECIPE.hidden, int(self.data.y.max()) + 1)
        conv = partial(QGCNConv, cached=True, config=OURS[precision], epilogue=Epilogue("relu"))
        model: nn.Module = Convolutions(conv, widths).to(self.setting.device)
        if processes.is_joined:
            model = DistributedDataParallel(model)
            model.register_comm_hook(*((None, fp32_hook) if bits is None else (Int8State(seed=self.seed), int8_hook)))
        torch.manual_seed(processes.own_seed(self.seed))
        optimizer = torch.optim.Adam(model.parameters(), lr=RECIPE.lr)
        x: Tensor | QTensor = part.x if precision == "fp32" else quantize(part.x, replace(INT8, rounding="nearest"))
        losses: list[Tensor] = []

        def step() -> None:
            optimizer.zero_grad()
            with part.counting():
                loss = part.loss(model(x, part.edges))
                loss.backward()
            optimizer.step()
            losses.append(loss.detach())

        clock, recipe = make_clock(self.setting.device), self.recipe()
        times_ms, best = [], (-1.0, 0.0)
        for epoch in range(1, recipe.epochs + 1):
            model.train()
            times_ms.append(clock.time(step))
            if epoch % recipe.eval_every == 0:
                with torch.no_grad():
                    best = max(best, part.scores(model.eval()(x, part.edges)), key=lambda scores: scores[0])
        return Measured([torch.stack(losses)], times_ms, None, None, best[1], part.sent(recipe.epochs))

    def batches(self, precision: str, bits: int | None, processes: Processes) -> Measured:
        recipe, device = self.recipe(), self.setting.device
        task = SampledNodeTask(self.data, SAMPLING, device, processes=processes)
        gradients = "fp32" if bits is None else "int8"
        run = train_run(
            *(task, recipe, parse_scheme(precision), self.seed, device, "sage"),
            measure=False,
            processes=processes,
            gradients=gradients,
        )
        sent = None
        if run.sent_bytes is not None:
            assert run.full_bytes is not None
            steps = -(-int(self.data.train_mask.sum()) // SAMPLING.batch_size)
            sent = {"sent_mib": steps * run.sent_bytes / MIB, "full_mib": steps * run.full_bytes / MIB}
        return Measured([torch.tensor(run.losses)], [run.epoch_ms], None, None, run.test_acc, sent)

    @cached_property
    def alone(self) -> Measured:
        """One process in fp32."""
        return self.train("fp32", None)

    def exact(self) -> Sequence[Tensor]:
        return self.alone.results

    def providers(self) -> Iterator[Provider]:
        full = "qgnn" if self.way == "partitioned" else "pyg"  # whose layers these are in fp32

        def train(name: str, precision: str, bits: int | None, tolerance: float) -> Provider:
            return Provider(name, partial(self.train, precision, bits), tolerance)

        yield Provider(f"{full} {ONE} fp32", lambda: self.alone, 0.0)
        yield train(f"qgnn {ONE} int8", "int8", None, NOISE)
        yield train(f"{full} {TWO} fp32", "fp32", None, ORDER_OF_SUMS)
        yield train(f"qgnn {TWO} int8", "int8", 8, NOISE)
        if self.way == "partitioned":
            yield train(f"qgnn {TWO} int2", "int8", 2, NOISE)


class Part:
    """The rows and edges of a process.

    Args:
        data: The whole.
        bits: As what rows are sent.
        processes: Those that share it.
    """

    def __init__(self, data: Data, bits: int | None, processes: Processes) -> None:
        self.processes, self.edges = processes, data.edge_index
        rows: Tensor | slice = slice(None)
        if processes.is_joined:
            parts = partition_nodes(data.edge_index, processes.size, data.num_nodes)
            self.edges = PartitionedGraph.from_edge_index(data.edge_index, parts, bits=bits)
            rows = self.edges.nodes
        self.x, self.y = data.x[rows], data.y[rows]
        self.masks = [data[f"{name}_mask"][rows] for name in ("train", "val", "test")]
        self.total = torch.zeros(2, dtype=torch.float64)

    def loss(self, out: Tensor) -> Tensor:
        losses = F.cross_entropy(out[self.masks[0]], self.y[self.masks[0]], reduction="none")
        return mean_loss(losses) if self.processes.is_joined else losses.mean()

    def scores(self, out: Tensor) -> tuple[float, float]:
        """Accuracy on the validation and on the test nodes of all processes."""
        right = out.argmax(dim=1) == self.y
        counts = torch.stack([torch.stack([right[m].sum(), m.sum()]) for m in self.masks[1:]]).double()
        if self.processes.is_joined:
            dist.all_reduce(counts)
        val_acc, test_acc = (counts[:, 0] / counts[:, 1]).tolist()
        return val_acc, test_acc

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what this process sends of rows and of their gradients."""
        before = self._sent()
        yield
        self.total += self._sent() - before

    def _sent(self) -> Tensor:
        counts = (self.edges.sent_bytes, self.edges.full_bytes) if self.processes.is_joined else (0, 0)
        return torch.tensor(counts, dtype=torch.float64)

    def sent(self, epochs: int) -> dict[str, float] | None:
        """What a process sent an epoch, the mean of all, and what it would have been in fp32."""
        if not self.processes.is_joined:
            return None
        sent, full = (sum(self.processes.gather(self.total)) / self.processes.size / epochs / MIB).tolist()
        return {"sent_mib": sent, "full_mib": full}


PROBLEMS: process.Problems = {
    f"{dataset}/{way}/{seed}": partial(Problem, dataset, way, seed)
    for dataset in DATASETS
    for way in WAYS
    for seed in SEEDS
}


def cases(setting: Setting) -> Iterator[Case]:
    for name in setting.shapes(*PROBLEMS):
        problem = PROBLEMS[name](setting)
        one, two = ([p for p in problem.providers() if words in p.name] for words in (ONE, TWO))
        if setting.quick:  # processes take seconds to start
            one, two = ([p for p in one if p.name.endswith("fp32")], [p for p in two if p.name.endswith("int8")])
        case = process.case("distributed", name, problem, setting, [p.name for p in two], NUM_PROCESSES)
        yield replace(case, providers=[*one, *case.providers])
