"""Synthetic graphs: shape, skew, determinism, and that their classes can be learned."""

import pytest
import torch
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import coalesce, homophily

from qgnn.data import generate, synthetic


@pytest.mark.parametrize(("like", "num_edges"), [("cora", 10_556), ("pubmed", 88_648), ("arxiv", 2_315_598)])
def test_synthetic_has_the_published_size(like: str, num_edges: int) -> None:
    data = synthetic(like)
    shape = generate.SHAPES[like]
    assert data.num_nodes == shape.num_nodes
    assert data.x.shape == (shape.num_nodes, shape.num_features)
    assert data.num_edges == pytest.approx(num_edges, rel=0.03)
    assert data.y.unique().tolist() == list(range(shape.num_classes))


@pytest.mark.parametrize(("like", "scale"), [("cora", 0.5), ("arxiv", 0.05), ("products", 0.002), ("reddit", 0.002)])
def test_synthetic_is_simple_and_symmetric(like: str, scale: float) -> None:
    data = synthetic(like, scale=scale)
    assert data.validate()
    assert torch.equal(coalesce(data.edge_index), data.edge_index), "sorted, no duplicates"
    assert torch.equal(coalesce(data.edge_index.flip(0)), data.edge_index)
    assert not data.has_self_loops()
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert (masks.sum(dim=0) == 1).all()
    assert masks.any(dim=1).all()


@pytest.mark.parametrize("like", list(generate.SHAPES))
def test_synthetic_survives_tiny_scales(like: str) -> None:
    data = synthetic(like, scale=1e-6)
    N = data.num_nodes
    assert 4 * generate.SHAPES[like].num_classes == N
    assert data.num_edges <= N * (N - 1) // 2
    assert data.validate()


def test_synthetic_scale_keeps_the_average_degree() -> None:
    small, large = synthetic("arxiv", scale=0.02), synthetic("arxiv", scale=0.1)
    assert small.num_edges / small.num_nodes == pytest.approx(large.num_edges / large.num_nodes, rel=0.02)


def test_synthetic_degrees_are_skewed() -> None:
    degree = torch.bincount(synthetic("arxiv", scale=0.1).edge_index[0]).double()
    # Of a graph whose ends were drawn evenly, the largest degree would stay below 3 times the mean.
    assert degree.max() > 50 * degree.mean()
    top = degree.sort(descending=True).values[: len(degree) // 100]
    assert top.sum() > 0.15 * degree.sum(), "one node in a hundred holds more than 15 times its share"


def test_synthetic_edges_prefer_their_class() -> None:
    data = synthetic("cora")
    share = torch.bincount(data.y).double() / data.num_nodes
    assert homophily(data.edge_index, data.y) > 2 * float((share**2).sum())


def test_synthetic_classes_are_learnable_but_not_trivial() -> None:
    """Nearest class mean, of the features alone and of the features after two rounds of GCN's averaging."""
    data = synthetic("arxiv", scale=0.05)
    edge_index, weight = gcn_norm(data.edge_index, num_nodes=data.num_nodes)
    A = torch.sparse_coo_tensor(edge_index, weight, (data.num_nodes, data.num_nodes))

    def accuracy(x: torch.Tensor) -> float:
        mean = torch.stack([x[data.train_mask & (data.y == c)].mean(dim=0) for c in range(int(data.y.max()) + 1)])
        predicted = torch.cdist(x, mean).argmin(dim=1)
        return float((predicted == data.y)[data.test_mask].double().mean())

    alone, smoothed = accuracy(data.x), accuracy(A @ (A @ data.x))
    assert 0.1 < alone < 0.6
    assert alone + 0.1 < smoothed < 0.93  # a tenth of the labels is random


def test_synthetic_is_deterministic_in_the_seed() -> None:
    first, again, other = (synthetic("cora", seed=seed) for seed in (3, 3, 4))
    for name, value in first.to_dict().items():
        assert torch.equal(value, again[name]), name
        assert not torch.equal(value, other[name]), name


def test_synthetic_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = synthetic("cora", scale=0.1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(synthetic("cora", scale=0.1).x, first.x)


def test_synthetic_rejects_an_unknown_name() -> None:
    with pytest.raises(ValueError, match=r"one of cora, pubmed, arxiv, products, reddit \(got 'arxive'\)"):
        synthetic("arxive")


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf"), "1"])
def test_synthetic_rejects_a_bad_scale(scale: float) -> None:
    with pytest.raises(ValueError, match="'scale' to be a positive number"):
        synthetic("cora", scale=scale)
