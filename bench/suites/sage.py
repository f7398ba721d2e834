"""The problem of activation compression: a step of PyG's own GraphSAGE, three layers with batch norm, ReLU and dropout
on the shape of ogbn-arxiv, as it is, under checkpoints and in codes of a few bits, and with layers of ours.

It is the model of EXACT and of its block-wise successor (arXiv:2309.11856), whose bytes :mod:`bench.compression` has.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GraphSAGE

import qgnn
from qgnn import QConfig, compress_activations
from qgnn.bins import best_block_size, optimal_bins, predicted_variance
from qgnn.compress import Report
from qgnn.formats import Blocks
from qgnn.memory import MIB

from ..compression import PUBLISHED_MIB
from ..harness import Provider, UnavailableError, Work
from ..live import made
from .inputs import INT8, Setting, adjacency_coo, graph, graph_name
from .layer import BF16_COUNTS
from .masks import DROPOUT, Fp32Masks, Given, Masks, same_masks
from .step import TOLERANCE, Context, Network, autocast_bf16, training_step

CHANNELS, NUM_LAYERS = 128, 3
NUM_SEEDS = 4  # of the gradient's variance
QUICK_SEEDS, MANY = 3, 3  # of tiny shapes; times as many
TRAINING_STEPS, TRAINING_RATE = 5, 0.01  # in front of what a budget measures

PUBLISHED_OPS = ("linear", "sparse_mm", "batch_norm", "relu", "dropout")

RP8: dict[str, Any] = {"bits": 2, "projection": 8}
RP4: dict[str, Any] = {"bits": 1, "projection": 4, "redraw_dropout": True}
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"int{bits}": {"bits": bits} for bits in (8, 4, 2)},
    **{f"int2-rp8 rows{rows}": {**RP8, "block_rows": rows} for rows in PUBLISHED_MIB},
    "int2-rp8-vm": {**RP8, "bins": "optimal"},
    "int2-rp8-vm redrawn": {**RP8, "bins": "optimal", "redraw_dropout": True},
    # As many bytes of an operand as INT2 of an eighth of its columns, and half of those of batch norm.
    "int1-rp4 rows1 redrawn": {**RP4, "block_rows": 1},
    "int1-rp4 G192 redrawn": {**RP4, "block_size": 192},
    "int1 redrawn": {"bits": 1, "block_size": 256, "redraw_dropout": True},
}
EXACT = "int2-rp8 rows1"
# Widths as a budget of 20 MB has them, most of them for what moves the gradient most.
MB20: dict[str, Any] = {"budget_mib": 20e6 / MIB, "redraw_dropout": True, "reestimate_every": 1 << 30}
BUDGETS: dict[str, dict[str, Any]] = {
    "rp8 20 MB redrawn": {**MB20, "projection": 8},
    "rp4 20 MB redrawn": {**MB20, "projection": 4},
    "rp4-vm 20 MB redrawn": {**MB20, "projection": 4, "bins": "optimal"},
}
COO = (EXACT, "int2-rp8-vm", "int1-rp4 G192 redrawn")  # the others keep as much in PyG's slowest path
SAVED = {"int2": Blocks(2), "int2-rp8": Blocks(2, projection=8)}
OVER_LAYERS: dict[str, Any] = {"bits": 2, "redraw_dropout": True}


def along_tolerance(
    bits: int = 2,
    projection: int | None = None,
    bins: str = "uniform",
    *,
    block_size: int | None = None,
    block_rows: int | None = None,
    channels: int = CHANNELS,
    seeds: int = NUM_SEEDS,
    **_: Any,
) -> float:
    """Bound on the relative error along the exact gradient of the mean over seeds: 5 deviations.

    Of a row x whose part of the component is x d, mixing into R' columns varies it by at most 2 / R' |x|^2 |d|^2, as
    R R^T / R' has the mean of 1 and independent elements of variance 1 / R' in either triangle. Rows have signs of
    their own, so that these add up; 2 / R' of the whole is a bound as long as the parts do not cancel each other down
    to the root of the sum of these squares, which for a first step on many rows they are far from. Roundings of
    different columns are independent, so that of their relative variance at most 1 / F lies along one direction of F
    rows; mixing them back keeps that.
    """
    columns = max(1, channels // (projection or 1))
    size = block_size or (block_rows or 0) * columns or best_block_size(bits, 1 << 20, bins)
    edges = optimal_bins(bits, size) if bins == "optimal" else None
    variance = predicted_variance(bits, size, edges) * (projection or 1) / channels
    if projection:
        variance += 2 / columns
    return TOLERANCE["fp32"] + 5 * math.sqrt(variance / seeds)


class Checkpointed(GraphSAGE):
    """Keeps the inputs of its layers, and computes them once more in the backward pass."""

    def forward(self, x: Tensor, edges: Any) -> Tensor:
        for number in range(self.num_layers):
            x = checkpoint(self._layer, number, x, edges, use_reentrant=False)
        return x

    def _layer(self, number: int, x: Tensor, edges: Any) -> Tensor:
        out = self.convs[number](x, edges)
        return out if number == self.num_layers - 1 else self.dropout(self.act(self.norms[number](out)))


class Problem:
    """Data, first weights and loss that the providers share."""

    def __init__(self, setting: Setting, num_seeds: int = NUM_SEEDS) -> None:
        data = graph("arxiv", setting)
        self.setting, self.edge_index, self.num_nodes = setting, data.edge_index, int(data.num_nodes)
        self.num_seeds = min(num_seeds, QUICK_SEEDS) if setting.quick else num_seeds
        self.x, self.y, self.mask = data.x, data.y, data.train_mask
        self.sizes = (CHANNELS, CHANNELS, NUM_LAYERS, int(self.y.max()) + 1)
        widths = (*[CHANNELS] * NUM_LAYERS, self.sizes[-1])
        self.name = f"{graph_name('arxiv', setting)}/sage/{'-'.join(map(str, widths))}"
        torch.manual_seed(0)
        self.state = GraphSAGE(*self.sizes, dropout=DROPOUT, norm="batch_norm").state_dict()

    def model(self, cls: type[GraphSAGE] = GraphSAGE) -> GraphSAGE:
        model = cls(*self.sizes, dropout=DROPOUT, norm="batch_norm")
        model.load_state_dict(self.state)
        return model.to(self.setting.device)

    def converted(self, config: QConfig | None, fuse: bool = True) -> GraphSAGE:
        """PyG's model, or with layers of ours."""
        return self.model() if config is None else qgnn.quantize_(self.model(), config, fuse=fuse)

    def loss(self, out: Tensor) -> Tensor:
        return F.cross_entropy(out[self.mask].to(torch.promote_types(out.dtype, torch.float32)), self.y[self.mask])

    def csr(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """What PyG takes for edges as well, with int64 indices, as it makes them: torch transposes it in each step. No
        edge of the graph is parallel to another."""
        ones = torch.ones(self.edge_index.shape[1], dtype=dtype, device=self.edge_index.device)
        return adjacency_coo(self.edge_index, ones, self.num_nodes).to_sparse_csr()

    # ---- torch's ways

    def plain(self, edges: Callable[[], Tensor], cls: type[GraphSAGE] = GraphSAGE) -> Work:
        return self._flat(self._step(edges(), partial(self.model, cls)))

    def bf16(self, edges: Callable[[], Tensor], is_coo: bool) -> Work:
        if is_coo and int(self.edge_index[1].bincount().max()) > BF16_COUNTS:
            raise UnavailableError(f"PyG counts the rows of a mean in bf16, where adding ones ends at {BF16_COUNTS}")
        autocast = autocast_bf16(self.setting)
        return self._flat(self._step(edges(), self.model, autocast, Fp32Masks(), self.x.bfloat16()))

    def offloaded(self, edges: Callable[[], Tensor]) -> Work:
        if not self.setting.is_cuda:
            raise UnavailableError("on a CPU there is no other memory to take to what is kept")
        return self._flat(self._step(edges(), self.model, partial(torch.autograd.graph.save_on_cpu, pin_memory=True)))

    def _step(
        self,
        edges: Any,
        make_model: Callable[[], GraphSAGE],
        context: Context = nullcontext,
        masks: torch.nn.Module | None = None,
        x: Tensor | None = None,
    ) -> Work:
        """The step; ``masks`` is the dropout of the gate, ``x`` stands for the features."""
        x = self.x if x is None else x

        def make(checked: bool) -> GraphSAGE:
            model = make_model()
            if checked and masks is not None:
                model.dropout = masks
            return same_masks(model) if checked else model

        def forward(network: Network, _: Tensor | None) -> tuple[Tensor, Tensor]:
            with context():
                out = network(x, edges)
                return out, self.loss(out)

        return training_step(make, forward)

    @staticmethod
    def _flat(work: Work) -> Work:
        """With all gradients in one vector: some are zero but for rounding."""
        check = work.check
        assert check is not None

        def flat() -> Sequence[Tensor]:
            out, *grads = check()
            return [out, flatten(grads)]

        return replace(work, check=flat)

    def exact(self) -> Sequence[Tensor]:
        """Output and gradient of the first step in float64."""
        model = same_masks(self.model().double())
        model.dropout = Fp32Masks()
        return self.gradient(model, self.x.double(), self.csr(torch.float64))

    def gradient(self, model: GraphSAGE, x: Tensor, edges: Any, context: Any = nullcontext()) -> list[Tensor]:  # noqa: B008
        with context:
            out = model(x, edges)
            loss = self.loss(out)
        leaves = [leaf for _, leaf in sorted(model.named_parameters())]
        return [out.detach(), flatten(torch.autograd.grad(loss, leaves))]

    # ---- ours

    def compressed(
        self, how: dict[str, Any], edges: Callable[[], Tensor], config: QConfig | None = None, seeds: int = 1
    ) -> Work:
        """The step under :class:`qgnn.compress_activations`, and of a ``config`` with layers of ours.

        The variance is over ``seeds`` times the usual number of them.
        """
        if "budget_mib" in how:
            how = {**how, "budget_mib": how["budget_mib"] * self.setting.scale}
        given, compressor, make_model = edges(), compress_activations(**how), partial(self.converted, config)

        def context() -> compress_activations:
            return compressor

        if "budget_mib" in how:
            trained = compress_activations(projection=how["projection"], redraw_dropout=True)
            self._choose_widths(make_model(), given, trained, compressor)
        work = self._step(given, make_model, context)
        forward = work.forward
        assert forward is not None
        redraws = bool(how.get("redraw_dropout"))
        checked = partial(make_model, fuse=False)
        variance = Variance(self, checked, compressor, given, config is None, redraws, seeds * self.num_seeds)

        def metrics() -> dict[str, float]:
            model = make_model()
            with compressor as report:
                self.loss(model(self.x, given))
            return {**bytes_of(report), **variance.metrics()}

        return replace(work, check=variance.check, kept=partial(made, forward), metrics=metrics)

    def _choose_widths(
        self, model: GraphSAGE, edges: Any, trained: compress_activations, compressor: compress_activations
    ) -> None:
        """The first block under a budget, which measures, of weights and masks that no measurement here has: in a
        training widths outlast the step that they are made of, too. Steps in front of it are compressed, so that the
        peak is that of this block."""
        optimizer = torch.optim.Adam(model.parameters(), lr=TRAINING_RATE)
        for number in range(TRAINING_STEPS + 1):
            with compressor if number == TRAINING_STEPS else trained:
                self.loss(model(self.x, edges)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def layers(self, config: QConfig) -> Work:
        """Layers of ours alone."""
        make_model = partial(self.converted, config)
        variance = Variance(self, partial(make_model, fuse=False), nullcontext(), self.edge_index, is_exact=False)
        return replace(self._step(self.edge_index, make_model), check=variance.check, metrics=variance.metrics)

    def around_pyg(
        self, form: str, edges: Callable[[], Tensor], settings: dict[str, dict[str, Any]]
    ) -> Iterator[Provider]:
        """PyG's own model under the compressor; what is compared closely, over more seeds."""
        for name, how in settings.items():
            many = form == "csr" and (name == EXACT or "budget_mib" in how) and self.num_seeds > 1
            setup = partial(self.compressed, how, edges, seeds=MANY if many else 1)
            yield Provider(f"qgnn pyg {form} {name}", setup, along_tolerance(**how, seeds=self.num_seeds))

    def providers(self) -> Iterator[Provider]:
        fp32, int8, along = TOLERANCE["fp32"], TOLERANCE["int8"], partial(along_tolerance, seeds=self.num_seeds)
        csr, coo = self.csr, lambda: self.edge_index
        for form, edges in {"coo": coo, "csr": csr}.items():
            yield Provider(f"pyg {form} fp32", partial(self.plain, edges), fp32)
            in_bf16 = partial(self.csr, torch.bfloat16) if form == "csr" else coo
            yield Provider(f"pyg {form} bf16", partial(self.bf16, in_bf16, form == "coo"), TOLERANCE["bf16"])
            yield Provider(f"pyg {form} checkpoint fp32", partial(self.plain, edges, Checkpointed), fp32)
            yield Provider(f"pyg {form} save_on_cpu fp32", partial(self.offloaded, edges), fp32)
            chosen = {name: how for name, how in SETTINGS.items() if form == "csr" or name in COO}
            yield from self.around_pyg(form, edges, chosen)
        yield Provider("qgnn layers int8", partial(self.layers, INT8), int8)
        for name, blocks in SAVED.items():
            setup = partial(self.layers, QConfig(bits=8, save=blocks))
            yield Provider(f"qgnn layers int8 keeping {name}", setup, int8 + along(blocks.bits, blocks.projection))
            both = partial(self.compressed, OVER_LAYERS, coo, QConfig(bits=8, save=blocks))
            bound = along(2, blocks.projection)
            yield Provider(f"qgnn layers int8 keeping {name}, int2 redrawn", both, int8 + bound)


class Budgets(Problem):
    """The same step under budgets of bytes."""

    def __init__(self, setting: Setting, num_seeds: int = NUM_SEEDS) -> None:
        super().__init__(setting, num_seeds)
        self.name += "/budget"

    def providers(self) -> Iterator[Provider]:
        yield Provider("pyg csr fp32", partial(self.plain, self.csr), TOLERANCE["fp32"])
        yield from self.around_pyg("csr", self.csr, {EXACT: SETTINGS[EXACT], **BUDGETS})


class Variance:
    """Gradients of the first step over seeds, against the exact one of the same masks.

    Args:
        problem: The step.
        make_model: Makes the model, whose dropout draws torch's masks: not within a layer of ours.
        context: Of the forward pass.
        edges: What PyG takes as edges.
        is_exact: Whether the forward pass is PyG's, bit for bit.
        redraws: Whether dropout's masks are those of the seed.
        num_seeds: Number of passes; 0 for the problem's.
    """

    def __init__(
        self,
        problem: Problem,
        make_model: Callable[[], GraphSAGE],
        context: Any,
        edges: Any,
        is_exact: bool,
        redraws: bool = False,
        num_seeds: int = 0,
    ) -> None:
        self.problem, self.make_model, self.context, self.edges = problem, make_model, context, edges
        self.is_exact, self.redraws, self.num_seeds = is_exact, redraws, num_seeds or problem.num_seeds
        self.squares: list[float] = []

    def check(self) -> Sequence[Tensor]:
        """PyG's output, and the exact gradient times the mean component along it.

        Raises:
            ValueError: If the forward pass should be PyG's and is not.
        """
        problem, plain = self.problem, same_masks(self.problem.model())
        out, exact = problem.gradient(plain, problem.x, self.edges)
        model, along, results = same_masks(self.make_model()), [], []
        self.squares = []
        for seed in range(self.num_seeds):
            masks = Masks()
            if self.redraws:
                model.dropout = masks
            torch.manual_seed(NUM_LAYERS + seed)  # what the compressor's seed is drawn from
            found, grad = problem.gradient(model, problem.x, self.edges, self.context)
            expected, right = out, exact
            if self.redraws:
                plain.dropout = Given(masks.kept)
                expected, right = problem.gradient(plain, problem.x, self.edges)
            if self.is_exact:
                check_equal(found, expected)
            results.append(out + (found - expected))
            self.squares.append(float((grad - right).square().sum() / right.square().sum()))
            along.append(float(grad @ right / (right @ right)))
        return [torch.stack(results).mean(dim=0), exact * fmean(along)]

    def metrics(self) -> dict[str, float]:
        """The gradient's relative variance, bias included, of all parameters together, and its standard error."""
        if not self.squares:
            self.check()
        return {"variance": fmean(self.squares), "variance_error": stdev(self.squares) / math.sqrt(len(self.squares))}


def check_equal(found: Tensor, expected: Tensor) -> None:
    """Raise a ``ValueError`` unless two forward passes agree bit for bit, or but for the order of atomic additions."""
    off = float((found - expected).norm() / expected.norm())
    if not off <= (1e-5 if found.is_cuda else 0.0):
        raise ValueError(f"the forward pass is off by a relative {off:.3g}")


def flatten(grads: Sequence[Tensor]) -> Tensor:
    return torch.cat([grad.flatten() for grad in grads])


def bytes_of(report: Report) -> dict[str, float]:
    """MiB that the report counts: before, kept, and kept of the tensors that the published figures are about."""
    published = sum(t.saved_bytes for t in report.by_tensor if t.op in PUBLISHED_OPS)
    sizes = {"original_mib": report.original_bytes, "report_mib": report.saved_bytes, "published_mib": published}
    return {name: size / MIB for name, size in sizes.items()}
