"""Graph classification sets by name: their files, features and split. Nothing here needs a network."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Batch
from torch_geometric.utils.smiles import x_map

from molecules import ELEMENTS, read_chains, write_freesolv
from qgnn.data import DatasetError, dataset_names, load, load_graphs
from qgnn.data.graph_sets import MAX_DEGREE, OneHotDegree, draw_graph_split
from tu_files import write_tu

SPLITS = ("train", "val", "test")
LABELS = [1] * 30 + [-1] * 20  # as MUTAG has them


@pytest.mark.parametrize("below", ["MUTAG", "TUDataset/MUTAG"])
@pytest.mark.parametrize("name", ["mutag", " MUTAG"])
def test_load_graphs_finds_both_layouts_under_any_case(tmp_path: Path, below: str, name: str) -> None:
    write_tu(tmp_path / below / "raw", "MUTAG", LABELS)
    graphs = load_graphs(name, tmp_path)
    assert len(graphs.dataset) == 50
    assert graphs.dataset.num_classes == 2
    assert [len(graphs.graphs(split)) for split in SPLITS] == [40, 5, 5]
    batch = Batch.from_data_list(graphs.graphs("val"))
    assert batch.x.shape == (batch.num_nodes, 2)
    assert torch.equal(batch.x.argmax(1), batch.y[batch.batch]), "the nodes' labels are those of their graph"


def test_a_graph_is_in_one_split_and_a_class_in_all(tmp_path: Path) -> None:
    write_tu(tmp_path / "MUTAG" / "raw", "MUTAG", LABELS)
    torch.manual_seed(1)
    first = load_graphs("mutag", tmp_path)
    torch.manual_seed(2)
    second = load_graphs("mutag", tmp_path)
    indices = [getattr(first, f"{split}_index") for split in SPLITS]
    assert torch.cat(indices).sort().values.tolist() == list(range(50))
    for split, index in zip(SPLITS, indices, strict=True):
        assert torch.equal(index, getattr(second, f"{split}_index")), "the same in every call"
        counts = torch.bincount(first.dataset.y[index]).tolist()
        assert counts == ([16, 24] if split == "train" else [2, 3])


def test_small_classes_are_split_too() -> None:
    y = torch.tensor([0] * 14 + [1] * 3 + [2] * 26)
    counts = [torch.bincount(y[index], minlength=3).tolist() for index in draw_graph_split(y)]
    assert counts == [[12, 1, 20], [1, 1, 3], [1, 1, 3]]
    assert not torch.equal(draw_graph_split(y)[0], draw_graph_split(y, seed=1)[0])


def test_nodes_without_labels_have_their_number_of_neighbors(tmp_path: Path) -> None:
    write_tu(tmp_path / "IMDB-BINARY" / "raw", "IMDB-BINARY", LABELS, with_node_labels=False)
    graphs = load_graphs("imdb_binary", tmp_path)
    assert graphs.dataset.num_node_features == 3, "up to two neighbors in a ring"
    for data in graphs.graphs("test"):
        assert torch.equal(data.x, torch.tensor([[0.0, 0.0, 1.0]]).expand(data.num_nodes, 3))


def test_hubs_share_the_last_column(tmp_path: Path) -> None:
    leaf = torch.arange(1, MAX_DEGREE + 3)
    star = Batch(edge_index=torch.stack([leaf, torch.zeros_like(leaf)]), num_nodes=len(leaf) + 1)
    x = OneHotDegree(MAX_DEGREE)(star).x
    assert x.shape == (len(leaf) + 1, MAX_DEGREE + 1)
    assert x.argmax(1).tolist() == [MAX_DEGREE] + [0] * len(leaf)


@pytest.mark.parametrize("raw", ["TUDataset/PROTEINS/raw", "MoleculeNet/esol/raw", "MoleculeNet/freesolv/raw"])
def test_missing_files_name_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    name = raw.split("/")[1].lower()
    with pytest.raises(DatasetError, match=f"'{name}' is not in") as caught:
        load_graphs(name, tmp_path)
    assert str(tmp_path / raw) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["freesolv", "MoleculeNet/freesolv"])
def test_molecules_have_one_hot_atoms_and_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str) -> None:
    read_chains(monkeypatch)
    numbers = torch.tensor(write_freesolv(tmp_path / below / "raw", 40))
    graphs = load_graphs("FreeSolv", tmp_path)
    assert graphs.metric == "rmse"
    indices = [getattr(graphs, f"{split}_index") for split in SPLITS]
    assert [len(index) for index in indices] == [32, 4, 4]
    assert torch.cat(indices).sort().values.tolist() == list(range(40))
    for split, index in zip(SPLITS, indices, strict=True):
        batch = Batch.from_data_list(graphs.graphs(split))
        assert torch.equal(batch.y, numbers[index])
        assert batch.x.dtype == torch.float32
        first = torch.tensor([0, *(len(values) for values in x_map.values())]).cumsum(0)
        assert batch.x.shape[1] == first[-1] == 177
        chains = "".join(batch.smiles)
        atoms = [x_map["atomic_num"][int(row.argmax())] for row in batch.x[:, : first[1]]]
        assert atoms == [ELEMENTS[atom] for atom in chains]
        for begin, end in pairwise(first.tolist()):
            assert (batch.x[:, begin:end].sum(1) == 1).all(), "one value of each category"
        degrees = torch.bincount(batch.edge_index[1], minlength=batch.num_nodes)
        assert torch.equal(batch.x[:, first[2] : first[3]].argmax(1), degrees)


def test_molecules_without_rdkit_say_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they are there, read by whomever, they are taken without it."""
    monkeypatch.setitem(sys.modules, "rdkit", None)
    write_freesolv(tmp_path / "freesolv" / "raw", 40)
    with pytest.raises(DatasetError, match="'freesolv' needs the package 'rdkit' to be read: pip install rdkit"):
        load_graphs("freesolv", tmp_path)
    with monkeypatch.context() as reader:
        read_chains(reader)
        load_graphs("freesolv", tmp_path)
    assert len(load_graphs("freesolv", tmp_path).dataset) == 40


def test_each_function_names_the_other() -> None:
    assert {"mutag", "proteins", "enzymes", "mutagenicity", "esol", "freesolv"} <= set(dataset_names("graph"))
    assert not set(dataset_names("graph")) & set(dataset_names())
    with pytest.raises(ValueError, match="'load' does not read the data set 'MUTAG'; call 'load_graphs', which does"):
        load("MUTAG")
    with pytest.raises(ValueError, match="'load_graphs' does not read the data set 'cora'; call 'load', which does"):
        load_graphs("cora")
    with pytest.raises(ValueError, match=r"did you mean 'proteins'.*'load' reads wordnet, cora"):
        load_graphs("protein")
    with pytest.raises(ValueError, match="'kind' to be 'node' or 'graph'"):
        dataset_names("edge")
