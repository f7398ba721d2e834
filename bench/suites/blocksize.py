"""How long should a block be, on which graph and model? And what else keeps as little? (The open questions of the
block-wise compressor, arXiv:2309.11856.)

PyG's models after a few steps of training, and the gradient of one more over seeds: its variance, bias and bytes.
A case of the first question is a format, a provider of it a block length; one of the second, ``operands``, keeps the
operands of dense products alone, which pruning, low rank and bf16 keep as well, at equal bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.utils import k_hop_subgraph

from qgnn import bins, compress_activations
from qgnn.compress import Report
from qgnn.functional import compress

from ..clock import make_clock
from ..compression import EXACT, EXACT_ROWS
from ..harness import MIB, Case, Measured, Provider, UnavailableError
from ..live import saved_bytes
from . import pyg_models, rivals
from .inputs import Setting, available, graph_name, projected
from .sage import along_tolerance, check_equal, flatten

DATASETS = ("wordnet", *pyg_models.DATASETS)  # the first one is embedded
KINDS = ("gcn", "sage", "gat")
NUM_ROOTS = 2000  # synsets of WordNet, which are taken with their neighbors
NUM_STEPS = 5  # of training in front
NUM_SEEDS, MANY_SEEDS = 4, 16  # of a block length's variance, and of what has to tell variance from bias
NUM_REPEATS = 5  # of what draws nothing

LENGTHS = (8, 32, 128, 512, 2048, 8192, 65536)
FORMATS: dict[str, dict[str, Any]] = {
    f"int{bits}" + ("-rp8" if projection else "") + ("-vm" if edges == "optimal" else ""): {
        "bits": bits,
        "projection": projection,
        "bins": edges,
    }
    for bits in (2, 4, 1)
    for projection in (None, 8)
    for edges in (("uniform",) if bits == 1 else bins.BINS)
}
OPERANDS: dict[str, dict[str, Any]] = {
    "int2": {"bits": 2},
    "int1": {"bits": 1, "block_size": 64},
    "int2-rp8": {"bits": 2, "projection": 8},
}
FP32 = 1e-5  # of a forward pass that is repeated
METADATA_BITS = 32  # an offset and a step in bf16


@lru_cache(maxsize=1)
def sample(setting: Setting) -> Data:
    """Synsets of WordNet, drawn at random, and their neighbors, with the edges among them."""
    data = pyg_models.load("wordnet", False, setting)
    roots = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(0))[:NUM_ROOTS]
    nodes, edge_index, _, _ = k_hop_subgraph(roots.to(data.edge_index.device), 1, data.edge_index, relabel_nodes=True)
    return Data(data.x[nodes], edge_index, y=data.y[nodes], train_mask=data.train_mask[nodes])


@dataclass(frozen=True)
class Passes:
    """Forward and backward passes over seeds.

    Args:
        out: The output of the first one.
        gradients: The gradient of all parameters, of each.
        times_ms: Their times.
        saved_mib: What one keeps.
    """

    out: Tensor
    gradients: Sequence[Tensor]
    times_ms: Sequence[float]
    saved_mib: float

    def metrics(self, exact: Tensor) -> dict[str, float]:
        """Relative squares of the gradient's error: its variance, and the bias without the variance's part of it."""
        scale, count = float(exact.square().sum()), len(self.gradients)
        errors = [float((grad - exact).square().sum()) / scale for grad in self.gradients]
        if count == 1:  # nothing is drawn
            return {"variance": 0.0, "bias": errors[0]}
        mean = torch.stack(list(self.gradients)).mean(dim=0)
        off = float((mean - exact).square().sum()) / scale
        variance = (fmean(errors) - off) * count / (count - 1)
        found = {"variance": variance, "bias": max(0.0, off - variance / count)}
        return {**found, "variance_error": stdev(errors) / count**0.5}

    def along(self, exact: Tensor) -> Tensor:
        """The exact gradient times the mean component along it."""
        return exact * fmean(float(grad @ exact / (exact @ exact)) for grad in self.gradients)


class Problem(pyg_models.Problem):
    """A model on a graph, a few steps in, with one set of dropout's masks."""

    def __init__(self, dataset: str, kind: str, setting: Setting) -> None:
        super().__init__(dataset, kind, 0, setting)
        graph = graph_name("arxiv", setting) if setting.quick else dataset
        self.name = f"{graph}/{kind}"

    @property
    def data(self) -> Data:
        sampled = self.dataset == "wordnet" and not self.setting.quick
        return sample(self.setting) if sampled else super().data

    @cached_property
    def trained(self) -> tuple[torch.nn.Module, Tensor]:
        """The model, and what it takes as edges."""
        model, edges = self.model().train(), self.edges("fp32")
        step = self.step(model, edges)
        for _ in range(NUM_STEPS):
            step()
        return model, edges

    @cached_property
    def plain(self) -> Passes:
        return self.passes(lambda _: nullcontext())

    def passes(
        self,
        context: Callable[[int], Any],
        kept: Callable[[Any], float] | None = None,
        seeds: int = 1,
        forward: Callable[[], Tensor] | None = None,
        warm: bool = False,
    ) -> Passes:
        """Passes in a context of the seed, after one that does not count if ``warm``; ``kept`` counts its MiB from what
        the context yields."""
        clock, (model, edges) = make_clock(self.setting.device), self.trained
        forward = forward or partial(model, self.data.x, edges)
        leaves = [leaf for _, leaf in sorted(model.named_parameters())]
        outs: list[Tensor] = []
        grads: list[Tensor] = []
        yielded: list[Any] = []

        def run(seed: int) -> None:
            torch.manual_seed(0)
            with context(seed) as made:
                out = forward()
                loss = F.cross_entropy(out[self.data.train_mask], self.data.y[self.data.train_mask])
            grads.append(flatten(torch.autograd.grad(loss, leaves)))
            outs.append(out.detach())
            yielded.append(made)

        if warm:
            run(0)
            for results in (grads, outs, yielded):
                results.clear()
        times_ms = [clock.time(partial(run, seed)) for seed in range(seeds)]
        for out in outs:
            check_equal(out, outs[0])
        mib = saved_bytes(forward) / MIB if kept is None else kept(yielded[0])
        return Passes(outs[0], grads, times_ms, mib)

    def exact(self) -> Sequence[Tensor]:
        return [self.plain.out, self.plain.gradients[0]]

    def compressed(
        self, how: dict[str, Any], kept: Callable[[Report], float], seeds: int, warm: bool = False
    ) -> Passes:
        """Passes under the compressor.

        Raises:
            ValueError: If the forward pass is not the plain one.
        """
        passes = self.passes(lambda seed: compress_activations(**how, seed=seed << 32), kept, seeds, warm=warm)
        check_equal(passes.out, self.plain.out)
        return passes

    @cached_property
    def operand(self) -> Tensor:
        """The largest operand of a dense product that is no constant."""
        found: list[Tensor] = []

        def codec(x: Tensor) -> rivals.Coded:
            found.append(x)
            return rivals.Coded(x.nbytes, lambda: x)

        with rivals.operands_in(codec, self.data.x):
            self.trained[0](self.data.x, self.trained[1])
        return max(found, key=Tensor.numel)

    @lru_cache  # noqa: B019, a problem lives as long as its cases
    def chosen(self, bits: int, projection: int | None, edges: str) -> dict[str, float]:
        """Lengths that the rule chooses for the largest operand: for normal values, and for those that it has."""
        x = self.operand
        if projection is not None:
            x = projected(x, projection)
        optimal = {size: bins.optimal_bins(bits, size) if edges == "optimal" else None for size in LENGTHS}
        predicted = {size: bins.predicted_variance(bits, size, optimal[size]) for size in LENGTHS}
        measured = bins.measure_variances(x, bits, edges)
        return {
            "values": x.numel(),
            "predicted_block": bins.best_block_size(bits, x.numel(), edges, METADATA_BITS, predicted),
            "measured_block": bins.best_block_size(
                bits, x.numel(), edges, METADATA_BITS, {size: measured[size] for size in LENGTHS if size in measured}
            ),
        }

    # ---- providers

    def measure_plain(self) -> Measured:
        found = self.plain
        return Measured([found.out, found.gradients[0]], found.times_ms, None, found.saved_mib, metrics={})

    def measure_blocks(self, how: dict[str, Any], length: dict[str, Any]) -> Measured:
        """All that the compressor codes, in blocks of one length, in values or rows."""
        found = self.compressed({**how, **length}, lambda report: report.saved_bytes / MIB, NUM_SEEDS)
        exact = self.plain.gradients[0]
        metrics = {**length, **found.metrics(exact), **self.chosen(*how.values())}
        return Measured([found.out, found.along(exact)], found.times_ms, None, found.saved_mib, metrics=metrics)

    def measure_operands(self, how: dict[str, Any]) -> Measured:
        """Operands of dense products, in codes."""

        def kept(report: Report) -> float:
            return sum(t.saved_bytes for t in report.by_tensor if t.op == "linear") / MIB

        how = {**how, "exclude": lambda entry: entry.op != "linear"}
        return self._measured(self.compressed(how, kept, MANY_SEEDS, warm=True))

    def measure_rival(self, codec: Callable[[Tensor, float], rivals.Coded], how: dict[str, Any]) -> Measured:
        """The same operands as a rival keeps them, in as many bits as ``how`` takes."""

        @lru_cache
        def bits_per_value(shape: torch.Size) -> float:  # the same for each operand of a shape
            return 8 * compress(torch.zeros(shape), **how, seed=0).nbytes / shape.numel()

        def coded(x: Tensor) -> rivals.Coded:
            return codec(x, bits_per_value(x.shape))

        def context(_: int) -> Any:
            return rivals.operands_in(coded, self.data.x)

        return self._measured_once(self.passes(context, lambda sizes: sum(sizes) / MIB, NUM_REPEATS, warm=True))

    def measure_checkpoint(self) -> Measured:
        """Nothing is kept, and the forward pass runs twice."""
        model, edges = self.trained

        def forward() -> Tensor:
            return checkpoint(model, self.data.x, edges, use_reentrant=False)

        return self._measured_once(
            self.passes(lambda _: nullcontext(), lambda _: 0.0, NUM_REPEATS, forward=forward, warm=True)
        )

    def measure_offload(self) -> Measured:
        if not self.setting.is_cuda:
            raise UnavailableError("on a CPU there is no other memory to take what is kept to")
        return self._measured_once(
            self.passes(lambda _: torch.autograd.graph.save_on_cpu(), lambda _: 0.0, NUM_REPEATS, warm=True)
        )

    def _measured(self, found: Passes) -> Measured:
        """The gate looks at the forward pass, as the gradient's error is what is measured."""
        check_equal(found.out, self.plain.out)
        return Measured([found.out], found.times_ms, None, found.saved_mib, metrics=found.metrics(self.exact()[1]))

    def _measured_once(self, found: Passes) -> Measured:
        """Of passes that draw nothing, one gradient."""
        return self._measured(replace(found, gradients=found.gradients[:1]))

    # ---- cases

    def cases(self) -> Iterator[Case]:
        for name, how in FORMATS.items():
            bound = partial(along_tolerance, **how, channels=self.recipe.hidden, seeds=NUM_SEEDS)
            sizes = self.setting.shapes(*LENGTHS)
            lengths: dict[str, dict[str, Any]] = {f"qgnn G{size}": {"block_size": size} for size in sizes}
            if name == EXACT:
                lengths[EXACT_ROWS] = {"block_rows": 1}
            providers = [
                Provider(ours, partial(self.measure_blocks, how, length), bound(**length))
                for ours, length in lengths.items()
            ]
            providers.append(Provider("pyg fp32", self.measure_plain, FP32))
            yield Case(f"{self.name}/{name}", "step", self.exact, providers)
        for name, how in self.setting.shapes(*OPERANDS.items()):
            providers = [Provider(f"qgnn {name}", partial(self.measure_operands, how), FP32)]
            for rival, codec in (("top-k", rivals.top_k), ("low rank", rivals.low_rank)):
                providers.append(Provider(f"{rival} bf16", partial(self.measure_rival, codec, how), FP32))
            providers.append(Provider("storage bf16", partial(self.measure_rival, rivals.bf16, how), FP32))
            providers.append(Provider("checkpoint fp32", self.measure_checkpoint, FP32))
            providers.append(Provider("save_on_cpu fp32", self.measure_offload, FP32))
            yield Case(f"{self.name}/operands/{name}", "step", lambda: self.exact()[:1], providers)


def cases(setting: Setting) -> Iterator[Case]:
    datasets = setting.shapes(*DATASETS)
    for dataset in available("blocksize", datasets, setting, lambda d: pyg_models.load(d, False, setting)):
        for kind in setting.shapes(*KINDS):
            yield from Problem(dataset, kind, setting).cases()
