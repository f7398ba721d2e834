"""The embedded WordNet graph: its counts, its split, and that every use gets its own copy."""

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.utils import coalesce, homophily

import qgnn


@pytest.fixture(scope="module")
def data() -> Data:
    return qgnn.data.wordnet()


def test_wordnet_has_the_published_counts(data: Data) -> None:
    assert data.num_nodes == 117_791
    assert data.num_edges == 368_166
    assert data.x.shape == (117_791, 512)
    assert data.x.dtype == torch.float32
    assert data.y.dtype == torch.int64
    assert data.edge_index.dtype == torch.int64
    assert data.y.unique().tolist() == list(range(45))
    assert data.x.unique().tolist() == [0.0, 1.0]
    assert int(data.x.sum()) == 249_750


def test_wordnet_is_simple_and_symmetric(data: Data) -> None:
    assert data.validate()
    assert torch.equal(coalesce(data.edge_index), data.edge_index), "sorted, no duplicates"
    assert torch.equal(coalesce(data.edge_index.flip(0)), data.edge_index)
    assert not data.has_self_loops()
    assert int(torch.bincount(data.edge_index[0]).max()) == 674
    assert homophily(data.edge_index, data.y) == pytest.approx(0.71, abs=0.005)


def test_wordnet_split_is_a_partition(data: Data) -> None:
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.dtype == torch.bool
    assert masks.sum(dim=1).tolist() == [70_674, 23_558, 23_559]
    assert (masks.sum(dim=0) == 1).all()


def test_wordnet_names_classes_and_features(data: Data) -> None:
    assert (len(data.class_names), len(data.words)) == (45, 512)
    assert data.class_names[3] == "noun.Tops"
    # Synset 0 is "entity", a top of the hierarchy, defined by what is "perceived or known or inferred to exist".
    assert data.class_names[int(data.y[0])] == "noun.Tops"
    assert "known" in [word for word, there in zip(data.words, data.x[0].tolist(), strict=True) if there]


def test_wordnet_returns_a_fresh_object(data: Data) -> None:
    other = qgnn.data.wordnet()
    other.x.zero_()
    assert data.x.any()
