"""Sets of graphs by name, each with one split of its graphs: their classes, or a number that each has."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.transforms import BaseTransform
from torch_geometric.utils import degree, one_hot
from torch_geometric.utils.smiles import x_map

from qgnn.data.datasets import GRAPH_ENTRIES, default_root, key, load_entry, metric_of, unknown_name_message

MAX_DEGREE = 127  # of nodes without features; more neighbors share the last column
PARTS = 10  # one to validate, one to test, the others to train


@dataclass(frozen=True)
class GraphSet:
    """Graphs with one label each, and the split of them.

    Args:
        dataset: All graphs.
        train_index: [G] int64, positions of the graphs to train on, ascending.
        val_index: The same of those to validate on.
        test_index: The same of those to test on.
        metric: What the literature of the set reports: ``"accuracy"``, or ``"rmse"``, the root mean square error of
            numbers.
    """

    dataset: InMemoryDataset
    train_index: Tensor
    val_index: Tensor
    test_index: Tensor
    metric: str = "accuracy"

    def graphs(self, split: str) -> list[Data]:
        """The graphs of one part of the split, for a :class:`torch_geometric.loader.DataLoader`.

        Args:
            split: ``"train"``, ``"val"`` or ``"test"``.
        """
        return list(self.dataset[getattr(self, f"{split}_index")])


class OneHotDegree(BaseTransform):
    """Features of nodes that have none: the number of neighbors, one-hot, in ``max_degree + 1`` columns."""

    def __init__(self, max_degree: int) -> None:
        self.max_degree = max_degree

    def forward(self, data: Data) -> Data:
        """Add ``x``."""
        degrees = degree(data.edge_index[1], data.num_nodes, dtype=torch.long)
        data.x = one_hot(degrees.clamp(max=self.max_degree), self.max_degree + 1, dtype=torch.float32)
        return data


class OneHotAtoms(BaseTransform):
    """The features of atoms of :func:`torch_geometric.utils.from_smiles`, nine categories, one-hot side by side, and a
    single number to learn."""

    def __init__(self) -> None:
        sizes = [len(values) for values in x_map.values()]
        self.width = sum(sizes)
        self.first = torch.tensor([0, *sizes[:-1]], dtype=torch.long).cumsum(0)  # column of each category

    def forward(self, data: Data) -> Data:
        """Change ``x`` and ``y``."""
        data.x = torch.zeros(len(data.x), self.width, dtype=torch.float32).scatter_(1, data.x + self.first, 1.0)
        data.y = data.y.view(1)
        return data


def load_graphs(name: str, root: str | os.PathLike[str] | None = None) -> GraphSet:
    r"""Load a set of graphs by name, with one split of them: to classify, or to learn a number that each has.

    The set is read by the class of PyG that owns it, which downloads what is missing where there is a network. A node's
    features are its label, one-hot; where nodes have no labels, the number of neighbors, one-hot.

    ESOL and FreeSolv of `"MoleculeNet" <https://arxiv.org/abs/1703.00564>`_ are molecules with a measured number each:
    the logarithm of the solubility in water (mol/l), and the free energy of hydration (kcal/mol). The class needs the
    package ``rdkit``, until it has read them once. The features of an atom are the nine categories of the Open Graph
    Benchmark, one-hot side by side: a linear layer in front of them is then the sum of embeddings that its
    ``AtomEncoder`` takes, while codes such as the number of the element have no size that means anything, and would
    set the scale of a quantized row. Features of bonds stay in ``edge_attr``.

    The split is drawn once with a fixed seed, so that it is the same in every call: of each class, or of all molecules,
    a tenth to validate, a tenth to test, the rest to train.

    Processed files are read as tensors and plain values; what would run code is refused.

    Args:
        name: One of :func:`dataset_names` with ``kind="graph"``; upper and lower case, ``-`` and ``_`` do not
            matter.
        root: The folder with PyG's layout. For MUTAG, the raw files are looked for in
            ``root/MUTAG/raw`` and ``root/TUDataset/MUTAG/raw``; downloads go to the second.
            (default: ``~/.cache/qgnn``)

    Shapes:
        of each graph:

        - ``x``: [N, F] float32
        - ``edge_index``: [2, E] int64
        - ``y``: [1] int64, or float32 of molecules

    Raises:
        ValueError: If the name is not known; the message lists the names.
        DatasetError: If the files are neither there nor can be downloaded, or cannot be read; the message names the
            folder.

    Example:
        >>> graphs = qgnn.data.load_graphs("mutag", root="data")
        >>> loader = DataLoader(graphs.graphs("train"), batch_size=32, shuffle=True)
    """
    wanted = key(name)
    if wanted not in GRAPH_ENTRIES:
        raise ValueError(unknown_name_message(name, "load_graphs"))
    folder = Path(default_root() if root is None else root).expanduser()
    dataset = load_entry(wanted, GRAPH_ENTRIES[wanted], folder)
    if dataset.num_node_features == 0:
        largest = max(
            (int(degree(data.edge_index[1], dtype=torch.long).max()) for data in dataset if data.num_edges), default=0
        )
        dataset.transform = OneHotDegree(min(largest, MAX_DEGREE))
    metric = metric_of(wanted)
    if metric is None:
        return GraphSet(dataset, *draw_graph_split(dataset.y))
    dataset.transform = OneHotAtoms()
    return GraphSet(dataset, *draw_graph_split(torch.zeros(len(dataset), dtype=torch.long)), metric)


def draw_graph_split(y: Tensor, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a tenth of each class to validate and a tenth to test, at least one graph of each; the rest is to train on.

    The draw depends on the labels and the seed alone, not on torch's global generator.

    Args:
        y: [G] int64, one label a graph.
        seed: Selects the draw.

    Returns:
        Positions to train, validate and test on, each ascending.
    """
    generator = torch.Generator().manual_seed(seed)
    train, val, test = [], [], []
    for c in y.unique().tolist():
        graphs = (y == c).nonzero().view(-1)
        graphs = graphs[torch.randperm(len(graphs), generator=generator)]
        tenth = max(round(len(graphs) / PARTS), 1)
        val.append(graphs[:tenth])
        test.append(graphs[tenth : 2 * tenth])
        train.append(graphs[2 * tenth :])
    return (
        torch.cat(train).sort().values,
        torch.cat(val).sort().values,
        torch.cat(test).sort().values,
    )
