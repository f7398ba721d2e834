"""PyG's own models on real data, as they are and after ``qgnn.quantize_``: equal splits, recipes and first weights.

Where a layer sums features before its product, PyG's takes them by a CSR matrix, to the same result: so many a message
would take hours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE

import qgnn
from qgnn.cli.task import normalize_rows
from qgnn.data import DatasetError
from qgnn.data.datasets import default_root
from qgnn.data.embedded import read_archive

from ..clock import make_clock
from .inputs import Setting, adjacency_int64, from_root, graph, graph_name, randn

PLANETOID = ("cora", "pubmed")
DATASETS = ("cora", "pubmed", "photo", "dblp")
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "gcn": partial(GCN, cached=True),
    "sage": GraphSAGE,
    "gat": partial(GAT, heads=8),
    "gin": GIN,
}
SUMS_FEATURES = ("sage", "gin")
NUM_EPOCHS, EVAL_EVERY = 100, 2
QUICK_EPOCHS = 4
DROPOUT, WEIGHT_DECAY = 0.5, 5e-4


@dataclass(frozen=True)
class Recipe:
    """How a model is made and trained on a data set.

    Args:
        hidden: Width of the hidden layer.
        lr: Learning rate of Adam.
        norm: Normalization, as the models of PyG take it.
        normalize_rows: Whether the rows of the features are scaled to sum to one.
    """

    hidden: int = 64
    lr: float = 0.01
    norm: str | None = None
    normalize_rows: bool = False


def recipe(kind: str, dataset: str) -> Recipe:
    """The usual values; on the citation graphs as in Kipf and Welling. What GIN sums grows with the degree: it takes
    smaller steps, and where nodes have over a thousand neighbors (Photo) it trains with normalization only. GraphSAGE
    takes smaller steps there too: features with hundreds of ones a row make larger ones uneven from seed to seed."""
    planetoid = dataset in PLANETOID
    if kind == "gin":
        return Recipe(norm="batch_norm") if dataset == "photo" else Recipe(lr=0.005)
    if (kind, dataset) == ("sage", "photo"):
        return Recipe(lr=0.005)
    return Recipe(hidden=16 if planetoid and kind == "gcn" else 64, normalize_rows=planetoid)


@lru_cache(maxsize=1)
def load(name: str, with_normal_rows: bool, setting: Setting) -> Data:
    """A data set with one split."""
    if setting.quick:
        return graph("arxiv", setting)
    with from_root():
        data = read(name, setting.root)
    return (normalize_rows(data) if with_normal_rows else data).to(setting.device)


def read(name: str, root: Path | None) -> Data:
    """A data set of :func:`qgnn.data.load`, or ``debian``."""
    return _debian(root) if name == "debian" else qgnn.data.load(name, root)


def _debian(root: Path | None) -> Data:
    """The packages of Debian 12 and what they depend on, to be sorted by section; of no class of PyG's.

    A file like WordNet's, ``DebianBookworm/raw/debian_bookworm.npz``: 63,436 nodes, of which one, libc6, has 21,814
    neighbors.
    """
    path = (root or default_root()) / "DebianBookworm" / "raw" / "debian_bookworm.npz"
    if not path.exists():
        raise DatasetError(f"expected {path}")
    return read_archive(path)


class Problem:
    """One model on one data set, from one seed."""

    num_layers = 2

    def __init__(self, dataset: str, kind: str, seed: int, setting: Setting) -> None:
        self.dataset, self.kind, self.seed, self.setting = dataset, kind, seed, setting
        name = graph_name("arxiv", setting) if setting.quick else dataset
        self.recipe = recipe(kind, dataset)
        self.name, self.run = f"{name}/{kind}", f"seed{seed}"

    @property
    def data(self) -> Data:
        return load(self.dataset, self.recipe.normalize_rows, self.setting)

    def model(self) -> torch.nn.Module:
        """PyG's, with the weights that follow from the seed."""
        torch.manual_seed(self.seed)
        sizes = {
            "in_channels": self.data.num_features,
            "hidden_channels": self.recipe.hidden,
            "num_layers": self.num_layers,
        }
        how = {"out_channels": int(self.data.y.max()) + 1, "dropout": DROPOUT, "norm": self.recipe.norm}
        return MODELS[self.kind](**sizes, **how).to(self.setting.device)

    def exact(self) -> Sequence[Tensor]:
        """What the untrained model makes of the data in float64."""
        return self.untrained(self.model().double(), self.data.edge_index)

    def untrained(self, model: torch.nn.Module, edges: Tensor) -> Sequence[Tensor]:
        """The result without dropout, and the gradient of the first weight for normal gradients of the result."""
        weight = next(p for p in model.parameters() if p.dim() == 2)
        out = model.eval()(self.data.x.to(weight.dtype), edges)
        upstream = randn(*out.shape, setting=self.setting, seed=self.seed).to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, weight, upstream)]

    def edges(self, precision: str) -> Tensor:
        """Made for this run: what a layer prepares of them lives as long as they do."""
        edge_index = self.data.edge_index.clone()
        if precision == "int8" or self.kind not in SUMS_FEATURES:
            return edge_index
        return adjacency_int64(edge_index, torch.ones(edge_index.shape[1], device=edge_index.device), len(self.data.x))

    def adam(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=self.recipe.lr, weight_decay=WEIGHT_DECAY)

    def train(
        self,
        model: torch.nn.Module,
        edges: Tensor,
        optimizer: torch.optim.Optimizer | None = None,
        num_epochs: int = NUM_EPOCHS,
    ) -> tuple[float, list[float]]:
        """Test accuracy at the best validation epoch, and the times of the steps; with Adam unless told otherwise."""
        clock, step = make_clock(self.setting.device), self.step(model, edges, optimizer)
        times_ms = []
        best_val_acc, test_acc = -1.0, 0.0
        for epoch in range(1, 1 + (QUICK_EPOCHS if self.setting.quick else num_epochs)):
            model.train()
            times_ms.append(clock.time(step))
            if epoch % EVAL_EVERY == 0:
                val_acc, test_acc_now = evaluate(model.eval(), self.data, edges)
                if val_acc > best_val_acc:
                    best_val_acc, test_acc = val_acc, test_acc_now
        return test_acc, times_ms

    def step(
        self, model: torch.nn.Module, edges: Tensor, optimizer: torch.optim.Optimizer | None = None
    ) -> Callable[[], None]:
        """A training step, with Adam unless told otherwise."""
        data, updates = self.data, optimizer or self.adam(model)

        def step() -> None:
            updates.zero_grad()
            out = model(data.x, edges)
            F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
            updates.step()

        return step


@torch.no_grad()
def evaluate(model: torch.nn.Module, data: Data, edges: Tensor) -> tuple[float, float]:
    """Accuracy on the validation and on the test nodes."""
    right = model(data.x, edges).argmax(dim=1) == data.y
    val_acc, test_acc = (right[mask].float().mean() for mask in (data.val_mask, data.test_mask))
    return float(val_acc), float(test_acc)
