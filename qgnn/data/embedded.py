"""The graph that ships inside the package: WordNet 3.1 as a node classification task."""

import os
from importlib import resources

import numpy as np
import torch
from torch_geometric.data import Data


def wordnet() -> Data:
    """Load the WordNet 3.1 graph that is embedded in the package; needs neither a download nor a folder to write to.

    Nodes are synsets and edges the pointers between them (hypernyms, parts, antonyms, ...), in both directions. A
    feature says whether one of the 512 most frequent definition words occurs in the definition of the synset. The
    class is the synset's lexicographer file, such as ``noun.animal``. The split is random, 60/20/20, and fixed.

    The data are derived from WordNet 3.1, whose license is shipped beside them in ``qgnn/data/wordnet/LICENSE``.
    The graph was made for this package: no published accuracy exists, so use it to compare methods with each other.

    Shapes:
        - ``x``: [117791, 512] float32, zeros and ones
        - ``edge_index``: [2, 368166] int64, symmetric, sorted by source, without self-loops or duplicates
        - ``y``: [117791] int64 in 0..44
        - ``train_mask``, ``val_mask``, ``test_mask``: [117791] bool, disjoint, together every node
        - ``class_names``, ``words``: lists of 45 and 512 strings, the names of the classes and of the features

    Example:
        >>> data = qgnn.data.wordnet()
        >>> data.num_nodes, data.num_edges
        (117791, 368166)
    """
    resource = resources.files("qgnn.data").joinpath("wordnet", "wordnet.npz")
    with resources.as_file(resource) as path:
        return read_archive(path)


def read_archive(path: str | os.PathLike[str]) -> Data:
    """A graph from an ``.npz`` file like that of :func:`wordnet`: the upper triangle of a symmetric matrix and the
    features, zeros and ones, in CSR, labels, three lists of nodes, and names of classes and features."""
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}

    N, F = (int(size) for size in arrays["attr_shape"])
    node = np.repeat(np.arange(N), np.diff(arrays["attr_indptr"]))
    x = torch.zeros(N, F, dtype=torch.float32)
    x[torch.from_numpy(node), torch.from_numpy(arrays["attr_indices"].astype(np.int64))] = 1.0

    # Stored is the upper triangle; sorting the keys of both directions gives the order of PyG's `coalesce`.
    source = np.repeat(np.arange(N), np.diff(arrays["adj_indptr"]))
    target = arrays["adj_indices"].astype(np.int64)
    key = np.sort(np.concatenate([source * N + target, target * N + source]))

    data = Data(
        x=x,
        edge_index=torch.from_numpy(np.stack([key // N, key % N])),
        y=torch.from_numpy(arrays["labels"].astype(np.int64)),
    )
    for split in ("train", "val", "test"):
        mask = torch.zeros(N, dtype=torch.bool)
        mask[torch.from_numpy(arrays[f"{split}_idx"].astype(np.int64))] = True
        data[f"{split}_mask"] = mask
    data.class_names = arrays["class_names"].tolist()
    data.words = arrays["words"].tolist()
    return data
