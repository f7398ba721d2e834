"""Synthetic graphs in the shapes of well-known data sets: skewed degrees, planted classes, noisy features."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data


class Shape(NamedTuple):
    """The size of a published graph, and how its synthetic stand-in is drawn."""

    num_nodes: int
    num_edges: int  # directed edges of the symmetric graph
    num_features: int
    num_classes: int
    split: tuple[float, float]  # fractions of the nodes in train and val; the rest is test
    max_degree: int
    homophily: float  # fraction of the edges whose second end is drawn from the class of the first


SHAPES = {
    "cora": Shape(2_708, 10_556, 1_433, 7, (0.052, 0.185), 168, 0.75),
    "pubmed": Shape(19_717, 88_648, 500, 3, (0.05, 0.10), 171, 0.7),
    "arxiv": Shape(169_343, 2_315_598, 128, 40, (0.54, 0.18), 13_161, 0.6),
    "products": Shape(2_449_029, 123_718_280, 100, 47, (0.08, 0.02), 17_481, 0.75),
    "reddit": Shape(232_965, 114_615_892, 602, 41, (0.66, 0.10), 21_657, 0.7),
}

# How far apart the class means stand, in units such that the noise along the line between two means has deviation 1;
# and the fraction of nodes whose label is drawn anew. Together they keep every model near or below 90 % accuracy.
CLASS_DISTANCE = 3.0
LABEL_NOISE = 0.1

# Edges are topped up until the wanted number of distinct ones is reached, or until this many rounds have passed.
MAX_ROUNDS = 24


def synthetic(like: str = "arxiv", scale: float = 1.0, seed: int = 0) -> Data:
    r"""Draw a graph in the shape of a published one, for measurements where the real graph is out of reach.

    Nodes get weights with a power-law tail, and edges join nodes in proportion to these weights (the model of Chung
    and Lu), so degrees are as skewed as in citation and social networks, with hubs of up to the published largest
    degree. Most edges stay within a class. Features are a class mean plus Gaussian noise of equal size for every
    class, and ten percent of the labels are random. A two-layer GCN therefore beats the features alone by a wide
    margin and still stays away from 100 %.

    Everything is drawn from a generator of its own: the same arguments give the same graph, and torch's global
    generator is left as it was.

    Args:
        like: The shape: ``"cora"``, ``"pubmed"``, ``"arxiv"``, ``"products"`` or ``"reddit"``.
        scale: Factor on the numbers of nodes and edges; the average degree stays. Very small dense graphs
            get fewer edges, at most half of all pairs. (default: ``1.0``)
        seed: Selects the graph. (default: ``0``)

    Shapes:
        - ``x``: [N, F] float32
        - ``edge_index``: [2, E] int64, symmetric, sorted by source, without self-loops or duplicates
        - ``y``: [N] int64
        - ``train_mask``, ``val_mask``, ``test_mask``: [N] bool, disjoint, together every node

        At scale 1 the memory needed is about 56 bytes an edge while drawing and 16 after: 7 GiB for ``products``.

    Raises:
        ValueError: If ``like`` is not one of the names, or ``scale`` is not a positive number.

    Example:
        >>> data = qgnn.data.synthetic(like="cora", seed=1)
        >>> data.num_nodes
        2708
    """
    if like not in SHAPES:
        raise ValueError(f"'synthetic' expects 'like' to be one of {', '.join(SHAPES)} (got {like!r})")
    if not (isinstance(scale, (int, float)) and math.isfinite(scale) and scale > 0):
        raise ValueError(
            f"'synthetic' expects 'scale' to be a positive number (got {scale!r}); 1.0 is the published size"
        )
    shape = SHAPES[like]
    N = max(round(shape.num_nodes * scale), 4 * shape.num_classes)
    num_pairs = min(round(shape.num_edges * scale / 2), N * (N - 1) // 4)

    generator = torch.Generator().manual_seed(seed)
    group = draw_classes(N, shape.num_classes, generator)
    low, high = draw_pairs(group, num_pairs, min(shape.max_degree, N // 4), shape.homophily, generator)
    key = torch.cat([low * N + high, high * N + low]).sort().values
    edge_index = torch.stack([key // N, key % N])

    x = draw_features(group, shape.num_classes, shape.num_features, generator)
    relabeled = torch.rand(N, generator=generator, dtype=torch.float32) < LABEL_NOISE
    y = torch.where(relabeled, torch.randint(shape.num_classes, (N,), generator=generator), group)

    data = Data(x=x, edge_index=edge_index, y=y)
    order = torch.randperm(N, generator=generator)
    first, second = round(shape.split[0] * N), round(sum(shape.split) * N)
    for split, nodes in (("train", order[:first]), ("val", order[first:second]), ("test", order[second:])):
        mask = torch.zeros(N, dtype=torch.bool)
        mask[nodes] = True
        data[f"{split}_mask"] = mask
    return data


def draw_classes(N: int, num_classes: int, generator: torch.Generator) -> Tensor:
    """Classes of unequal size, [N]: the c-th has a share proportional to 1/sqrt(c+1), and none is empty."""
    share = torch.arange(1, num_classes + 1, dtype=torch.float64).rsqrt().cumsum(0)
    group = torch.searchsorted(share / share[-1], torch.rand(N, generator=generator, dtype=torch.float64))
    group = group.clamp_(max=num_classes - 1)
    group[torch.randperm(N, generator=generator)[:num_classes]] = torch.arange(num_classes)
    return group


def draw_features(group: Tensor, num_classes: int, F: int, generator: torch.Generator) -> Tensor:
    """Class mean plus unit Gaussian noise, [N, F]; two means are about CLASS_DISTANCE apart."""
    x = torch.randn(len(group), F, generator=generator, dtype=torch.float32)
    mean = torch.randn(num_classes, F, generator=generator, dtype=torch.float32)
    return x.add_(mean.mul_(CLASS_DISTANCE / math.sqrt(2 * F))[group])


def draw_pairs(
    group: Tensor, num_pairs: int, max_degree: int, homophily: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Distinct unordered pairs of distinct nodes, as (smaller, larger) ends of [P] each."""
    N = len(group)
    order = torch.argsort(group, stable=True)  # position -> node, so that a class is an interval of positions
    weight = node_weights(N, 2 * num_pairs / N, max_degree)[torch.randperm(N, generator=generator)]
    end = weight.cumsum(0)
    bound = torch.bincount(group).cumsum(0)  # one past the last position of each class
    upper = end[bound - 1]
    lower = torch.cat([upper.new_zeros(1), upper[:-1]])
    group_at = group[order]

    def pick(u: Tensor) -> Tensor:
        return torch.searchsorted(end, u, right=True).clamp_(max=N - 1)

    key = torch.empty(0, dtype=torch.int64)
    for _ in range(MAX_ROUNDS):
        missing = num_pairs - len(key)
        if missing <= 0:
            break
        draws = missing + missing // 8 + 16
        first = pick(torch.rand(draws, generator=generator, dtype=torch.float64) * end[-1])
        u = torch.rand(draws, generator=generator, dtype=torch.float64)
        c = group_at[first]
        inside = torch.rand(draws, generator=generator, dtype=torch.float32) < homophily
        second = pick(torch.where(inside, torch.lerp(lower[c], upper[c], u), u * end[-1]))
        a, b = order[first], order[second]
        new = (torch.minimum(a, b) * N + torch.maximum(a, b))[a != b]
        key = torch.cat([key, new]).unique()
    if len(key) > num_pairs:
        key = key[torch.randperm(len(key), generator=generator)[:num_pairs]]
    return key // N, key % N


def node_weights(N: int, mean_degree: float, max_degree: int) -> Tensor:
    """Expected degrees with a power-law tail, [N] float64, descending: about ``max_degree`` at the top.

    The weights are rank^-alpha, with the exponent at which the largest of N weights of the given mean is the wanted
    degree; found by bisection, and kept below 0.9 (a tail exponent of 2.1), beyond which a few hubs own every edge.
    """
    rank = torch.arange(1, N + 1, dtype=torch.float64)
    low, high = 0.0, 0.9
    for _ in range(30):
        alpha = (low + high) / 2
        weight = rank**-alpha
        if float(weight[0] / weight.mean()) * mean_degree < max_degree:
            low = alpha
        else:
            high = alpha
    return rank**-low
