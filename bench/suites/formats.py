"""What a training step takes of memory in a number format: the GCN of the study of quantized training, two layers of
16, on its data sets.

Measured are bytes of tensors, features and all: the features as codes, weights, the optimizer's state, what was
prepared of the graph, and at its peak what a step makes. The study emulated its formats, which took up to twelve times
the memory of fp32; ``emulated`` is that.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GCN, global_mean_pool

import qgnn
from qgnn import QConfig, formats
from qgnn.cli.measure import SavedBytes
from qgnn.cli.task import GraphTask
from qgnn.formats import Format
from qgnn.functional import quantize
from qgnn.memory import MIB
from qgnn.qtensor import QTensor

from ..clock import make_clock
from ..harness import Case, Measured, Provider
from ..live import LiveBytes
from . import pyg_models
from .emulation import EmulatedLinear
from .inputs import Setting, adjacency, from_root, graph_name, randn
from .step import TOLERANCE, tolerance_of

DATASETS = ("cora", "pubmed", "mutag")
GRAPHS = ("mutag",)
NAMES = ("int8", "int4", "fixed8", "msfp16", "msfp12", "mxint8", "mxfp8-e4m3", "mxfp6-e2m3", "mxfp4")
EMULATED = ("int8", "fixed8", "msfp12", "mxfp8-e4m3")  # one a family
QUICK = ("int8", "msfp12")
HIDDEN, DROPOUT = 16, 0.5
NUM_STEPS = 3  # in front of the one that is measured, which prepare the graph

Features = Tensor | QTensor


class Pooled(torch.nn.Module):
    """The same convolutions, the mean over each graph, and a dense layer."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.convolutions = GCN(num_features, HIDDEN, 2, dropout=DROPOUT, cached=True)
        self.last = torch.nn.Linear(HIDDEN, num_classes)

    def forward(self, x: Features, edges: Tensor, batch: Tensor, batch_size: int) -> Tensor:
        logits: Tensor = self.last(global_mean_pool(self.convolutions(x, edges), batch, batch_size))
        return logits


@lru_cache(maxsize=1)
def load_graphs(name: str, setting: Setting) -> Data:
    """The graphs to train on, as one."""
    with from_root():
        return GraphTask(qgnn.data.load_graphs(name, setting.root), setting.device).parts[0]


class Problem:
    """A data set, and the model with its first weights."""

    def __init__(self, dataset: str, setting: Setting) -> None:
        self.dataset, self.setting, self.by_graph = dataset, setting, dataset in GRAPHS
        name = graph_name("arxiv", setting) if setting.quick and not self.by_graph else dataset
        self.name = f"{name}/gcn/formats"

    @property
    def data(self) -> Data:
        if self.by_graph:
            return load_graphs(self.dataset, self.setting)
        return pyg_models.load(self.dataset, True, self.setting)

    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        sizes = (self.data.num_features, int(self.data.y.max()) + 1)
        plain = Pooled(*sizes) if self.by_graph else GCN(sizes[0], HIDDEN, 2, sizes[1], dropout=DROPOUT, cached=True)
        return plain.to(self.setting.device)

    def forward(self, model: torch.nn.Module, x: Features, edges: Tensor) -> Tensor:
        of_graphs = (self.data.batch, self.data.num_graphs) if self.by_graph else ()
        out: Tensor = model(x, edges, *of_graphs)
        return out

    def loss(self, model: torch.nn.Module, x: Features, edges: Tensor) -> Tensor:
        out, y = self.forward(model, x, edges), self.data.y
        return F.cross_entropy(out, y) if self.by_graph else F.cross_entropy(out[self.mask], y[self.mask])

    @property
    def mask(self) -> Tensor:
        mask: Tensor = self.data.train_mask
        return mask

    # ---- ways to make it

    def coo(self) -> Tensor:
        """Edges of a provider's own: what is prepared of them lives as long as they do."""
        edge_index: Tensor = self.data.edge_index.clone()
        return edge_index

    def csr(self) -> Tensor:
        edge_index = self.data.edge_index
        return adjacency(edge_index, torch.ones(edge_index.shape[1], device=edge_index.device), len(self.data.x))

    def emulated(self, fmt: Format) -> torch.nn.Module:
        """Layers that ours computes in the format, as the study has them."""
        model, ours = self.model(), self.ours(fmt)
        for name, module in ours.named_modules():
            if getattr(module, "config", None) is not None:
                conv: Any = model.get_submodule(name)
                conv.lin = EmulatedLinear(conv.lin, fmt)
        return model

    def ours(self, fmt: Format) -> torch.nn.Module:
        return qgnn.quantize_(self.model(), QConfig(fmt=fmt))

    # ---- what is measured

    def measure(
        self,
        make_model: Callable[[], torch.nn.Module],
        make_edges: Callable[[], Tensor],
        fmt: Format | None = None,
    ) -> Measured:
        """Of a model, with features in a format if one is given."""
        x: Features = self.data.x if fmt is None else quantize(self.data.x, QConfig(fmt=fmt, rounding="nearest"))
        results = self.untrained(make_model(), x, make_edges())
        device = self.setting.device
        with LiveBytes(device) as prepared:
            model, edges = make_model().train(), make_edges()
            optimizer = torch.optim.Adam(model.parameters())

            def step() -> None:
                optimizer.zero_grad()
                self.loss(model, x, edges).backward()
                optimizer.step()

            for _ in range(NUM_STEPS):
                step()
            optimizer.zero_grad()
            gc.collect()
        clock = make_clock(device)  # which has memory of its own
        with LiveBytes(device) as stepped:
            time_ms = clock.time(step)
        saved = SavedBytes(_tensors(x))
        with saved.count():
            self.loss(model, x, edges)
        peak_mib = (x.nbytes + prepared.net + stepped.peak) / MIB
        found = {"features_mib": x.nbytes / MIB, "prepared_mib": prepared.net / MIB}
        return Measured(results, [time_ms], peak_mib, saved.mib, metrics=found)

    def untrained(self, model: torch.nn.Module, x: Features, edges: Tensor) -> Sequence[Tensor]:
        """The result without dropout, and the gradient of the first weight for normal gradients of the result."""
        weight = next(p for p in model.parameters() if p.dim() == 2)
        out = self.forward(model.eval(), x, edges)
        upstream = randn(*out.shape, setting=self.setting, seed=0).to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, weight, upstream)]

    def exact(self) -> Sequence[Tensor]:
        """In float64."""
        return self.untrained(self.model().double(), self.data.x.double(), self.coo())

    def case(self) -> Case:
        providers = [
            Provider("pyg coo fp32", partial(self.measure, self.model, self.coo), TOLERANCE["fp32"]),
            Provider("pyg csr fp32", partial(self.measure, self.model, self.csr), TOLERANCE["fp32"]),
        ]
        for name in QUICK if self.setting.quick else NAMES:
            fmt = formats.parse(name)
            if name in EMULATED:
                emulated = partial(self.measure, partial(self.emulated, fmt), self.coo)
                providers.append(Provider(f"emulated {name}", emulated, tolerance_of(fmt)))
            ours = partial(self.measure, partial(self.ours, fmt), self.coo, fmt)
            providers.append(Provider(f"qgnn {name}", ours, tolerance_of(fmt)))
        return Case(self.name, "step", self.exact, providers)


def _tensors(x: Features | None) -> list[Tensor]:
    if isinstance(x, QTensor):
        return [t for t in (x.storage, x.scales, x.zero, *_tensors(x.columns)) if t is not None]
    return [] if x is None else [x]


def cases(setting: Setting) -> Iterator[Case]:
    for dataset in setting.shapes(*DATASETS):
        yield Problem(dataset, setting).case()
