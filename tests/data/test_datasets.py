"""Data sets by name: layouts, splits, and one clear line where something is missing. Nothing here needs a network."""

import shutil
import socket
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric import datasets as pyg
from torch_geometric.data import Data, InMemoryDataset

from qgnn.data import DatasetError, dataset_names, download, load
from qgnn.data.datasets import ENTRIES, default_root, find_root
from qgnn.data.splits import draw_split, with_single_split

N = 12


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a network: names do not resolve."""

    def refuse(*_: Any, **__: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(download.urllib.request, "getproxies", dict)


def ring() -> torch.Tensor:
    node = torch.arange(N)
    return torch.stack([node, (node + 1) % N])


def write_minesweeper(raw: Path) -> None:
    """A tiny graph in the raw layout of the heterophilous data sets, with two splits."""
    raw.mkdir(parents=True)
    node = np.arange(N)
    masks = {
        f"{split}_masks": np.stack([node % 3 == number, node % 3 == (number + 1) % 3])
        for number, split in enumerate(("train", "val", "test"))
    }
    np.savez(
        raw / "minesweeper.npz",
        node_features=np.eye(N, 7, dtype=np.float32),
        node_labels=node % 2,
        edges=ring().t().numpy(),
        **masks,
    )


def write_github(raw: Path) -> None:
    """A tiny graph in the raw layout of a data set that comes without a split."""
    raw.mkdir(parents=True)
    node = np.arange(N)
    np.savez(raw / "github.npz", features=np.eye(N, 4, dtype=np.float32), target=node % 2, edges=ring().t().numpy())


def write_cora(folder: Path) -> None:
    """Cora's folder as it is after processing; the raw files are there, and not read."""
    (folder / "raw").mkdir(parents=True)
    (folder / "processed").mkdir()
    for part in ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index"):
        (folder / "raw" / f"ind.cora.{part}").touch()
    third = torch.arange(N) % 3
    masks = {"train_mask": third == 0, "val_mask": third == 1, "test_mask": third == 2}
    data = Data(x=torch.eye(N), edge_index=ring(), y=torch.arange(N) % 7, **masks)
    InMemoryDataset.save([data], str(folder / "processed" / "data.pt"))
    for name in ("pre_transform", "pre_filter"):  # how PyG notes that there were none
        torch.save("None", folder / "processed" / f"{name}.pt")


@pytest.mark.parametrize("below", ["", "HeterophilousGraphDataset"])
@pytest.mark.parametrize("name", ["minesweeper", "Minesweeper", " MINESWEEPER "])
def test_load_finds_both_layouts_under_any_case(tmp_path: Path, below: str, name: str) -> None:
    write_minesweeper(tmp_path / below / "minesweeper" / "raw")
    data = load(name, tmp_path)
    assert (data.num_nodes, data.x.shape, data.metric) == (N, (N, 7), "roc_auc")


@pytest.mark.parametrize("below", ["Cora", "Planetoid/Cora"])
def test_load_finds_cora_in_both_layouts(tmp_path: Path, below: str) -> None:
    write_cora(tmp_path / below)
    data = load("cora", str(tmp_path))
    assert torch.equal(data.x, torch.eye(N))
    assert data.train_mask.sum() == N // 3


def test_load_keeps_the_first_of_several_splits(tmp_path: Path) -> None:
    write_minesweeper(tmp_path / "minesweeper" / "raw")
    data = load("minesweeper", tmp_path)
    third = torch.arange(N) % 3
    for number, split in enumerate(("train_mask", "val_mask", "test_mask")):
        assert torch.equal(data[split], third == number)


def test_load_draws_a_split_where_there_is_none(tmp_path: Path) -> None:
    write_github(tmp_path / "GitHub" / "raw")
    torch.manual_seed(1)
    first = load("github", tmp_path)
    torch.manual_seed(2)
    second = load("github", tmp_path)
    assert "metric" not in first, "accuracy, as is usual"
    for split in ("train_mask", "val_mask", "test_mask"):
        assert torch.equal(first[split], second[split])
        assert first[split].sum() == N // 3, "a third of each class of six"


def test_load_does_not_take_a_foreign_raw_folder(tmp_path: Path) -> None:
    """Flickr, Yelp and others name their raw files alike; root/raw belongs to a set only if root bears its name."""
    assert find_root(tmp_path, ENTRIES["yelp"]) == tmp_path / "Yelp"
    assert find_root(tmp_path / "Yelp", ENTRIES["yelp"]) == tmp_path / "Yelp"
    assert find_root(tmp_path / "Planetoid", ENTRIES["cora"]) == tmp_path / "Planetoid"


def test_every_entry_names_a_class_and_its_folder(tmp_path: Path) -> None:
    """What we compute as the raw folder is what the class would read."""
    for name, entry in ENTRIES.items():
        cls = getattr(pyg, entry.cls)
        with pytest.raises(DatasetError) as caught:
            load(name, tmp_path)
        expected = str(tmp_path / entry.cls / (entry.folder or "") / "raw")
        assert expected in str(caught.value), name
        dataset = cls.__new__(cls)
        dataset.root, dataset.split = str(tmp_path / entry.cls), "public"
        dataset.name = entry.folder
        assert dataset.raw_dir == expected.rstrip("/"), name


def test_load_without_network_names_the_folder_at_once(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(DatasetError) as caught:
        load("cora", tmp_path)
    assert time.monotonic() - start < 5
    message = str(caught.value)
    assert message.startswith(f"the data set 'cora' is not in {tmp_path / 'Planetoid' / 'Cora' / 'raw'} and could")
    assert "no connection to github.com" in message
    assert "\n" not in message
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert list(tmp_path.iterdir()) == [], "no empty folders are left"


def test_a_silent_network_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that never answers: nothing in Python bounds that wait."""
    monkeypatch.setattr(download, "CONNECT_TIMEOUT_S", -0.9)  # one second of grace is added
    over = threading.Event()

    def silence(*_: object, **__: object) -> None:
        over.wait()
        raise OSError("the test is over")

    monkeypatch.setattr(socket, "create_connection", silence)
    try:
        with pytest.raises(DatasetError, match="no answer within"):
            load("cora", tmp_path)
    finally:
        over.set()


def test_a_broken_download_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: pyg.GitHub) -> None:
        assert socket.getdefaulttimeout() == download.READ_TIMEOUT_S
        Path(self.raw_dir, "github.npz").write_bytes(b"half of it")
        raise TimeoutError("timed out")

    monkeypatch.setattr(pyg.GitHub, "download", interrupted)
    monkeypatch.setattr(download, "check_reachable", lambda url: None)
    with pytest.raises(DatasetError, match=r"could not be downloaded.*TimeoutError: timed out"):
        load("github", tmp_path)
    assert not (tmp_path / "GitHub").exists()
    assert socket.getdefaulttimeout() is None


def test_a_download_that_works_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(self: pyg.GitHub) -> None:
        Path(self.raw_dir).rmdir()
        write_github(Path(self.raw_dir))

    monkeypatch.setattr(pyg.GitHub, "download", fetch)
    monkeypatch.setattr(download, "check_reachable", lambda url: None)
    assert load("github", tmp_path).num_nodes == N


def test_load_says_which_files_are_broken(tmp_path: Path) -> None:
    raw = tmp_path / "GitHub" / "raw"
    raw.mkdir(parents=True)
    (raw / "github.npz").write_bytes(b"no archive")
    with pytest.raises(DatasetError, match=r"'github' in .*GitHub cannot be read or processed") as caught:
        load("github", tmp_path)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None


class Code:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["data", "pre_transform", "pre_filter"])
def test_load_runs_no_code_of_a_processed_file(tmp_path: Path, name: str) -> None:
    write_cora(tmp_path / "Cora")
    processed = tmp_path / "Cora" / "processed"
    torch.save(Code(tmp_path / "ran"), processed / f"{name}.pt")
    with pytest.raises(DatasetError) as caught:
        load("cora", tmp_path)
    assert not (tmp_path / "ran").exists()
    message = f"the file {processed / name}.pt of the data set 'cora' is damaged, or would run code when it is read"
    assert str(caught.value) == f"{message}; delete the folder {processed}, which is made anew of the raw files"


@pytest.mark.parametrize("name", ["geometric_data_processed", "pre_filter"])
def test_load_runs_no_code_of_a_processed_file_of_ogb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fake_ogb(monkeypatch)
    write_ogb(tmp_path / "ogbn_arxiv")
    load("ogbn-arxiv", tmp_path)
    processed = tmp_path / "ogbn_arxiv" / "processed"
    torch.save(Code(tmp_path / "ran"), processed / f"{name}.pt")
    with pytest.raises(DatasetError, match=rf"the file {processed / name}\.pt of .*; delete the folder {processed}, "):
        load("ogbn-arxiv", tmp_path)
    assert not (tmp_path / "ran").exists()
    shutil.rmtree(processed)
    assert load("ogbn-arxiv", tmp_path).num_nodes == N, "made anew"


def test_load_names_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def process(self: pyg.GitHub) -> None:
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

    write_github(tmp_path / "GitHub" / "raw")
    monkeypatch.setattr(pyg.GitHub, "process", process)
    with pytest.raises(DatasetError, match="needs the package 'scipy' to be read: pip install scipy"):
        load("github", tmp_path)


def test_load_rejects_an_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not know the data set 'coraa'; did you mean 'cora'") as caught:
        load("coraa", tmp_path)
    assert all(name in str(caught.value) for name in dataset_names())


def test_load_takes_the_embedded_graph_by_name() -> None:
    assert load("WordNet", root="/nonexistent").num_nodes == 117_791


def test_default_root_follows_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_root() == Path("/cache/qgnn")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_root() == Path.home() / ".cache" / "qgnn"


def test_drawn_split_has_20_and_30_a_class() -> None:
    y = torch.cat([torch.zeros(100), torch.ones(60), torch.full((9,), 2), torch.full((5,), -1), torch.full((1,), 3)])
    y = y.long()
    train, val, test = draw_split(y)
    counts = [[int((mask & (y == c)).sum()) for c in (0, 1, 2, -1, 3)] for mask in (train, val, test)]
    assert counts == [[20, 20, 3, 0, 1], [30, 30, 3, 0, 0], [50, 10, 3, 0, 0]]
    assert not torch.equal(train, draw_split(y, seed=1)[0])
    with pytest.raises(ValueError, match="one label a node"):
        draw_split(torch.zeros(3, 2))


def test_given_split_leaves_out_unknown_labels() -> None:
    everything = torch.ones(3, dtype=torch.bool)
    data = Data(y=torch.tensor([0, -1, 1]), train_mask=everything, val_mask=everything, test_mask=everything)
    assert with_single_split(data).train_mask.tolist() == [True, False, True]


def fake_ogb(monkeypatch: pytest.MonkeyPatch, nan_label: bool = False) -> None:
    """A stand-in for the package `ogb` that stores and loads its files in the same way, with plain torch.load."""

    class PygNodePropPredDataset(InMemoryDataset):
        def __init__(self, name: str, root: str) -> None:
            self.meta_info = {"url": "http://snap.stanford.edu/x.zip"}
            super().__init__(str(Path(root) / name.replace("-", "_")))
            self.data, self.slices = torch.load(self.processed_paths[0])

        raw_file_names = property(lambda self: ["edge.csv.gz"])
        processed_file_names = property(lambda self: "geometric_data_processed.pt")

        def download(self) -> None:
            raise AssertionError("no connection, no download")

        def process(self) -> None:
            print("Processing on standard output")
            y = torch.arange(N)[:, None]
            y = torch.where(y == 1, torch.nan, y.float()) if nan_label else y
            data = Data(x=torch.eye(N), edge_index=ring(), y=y)
            torch.save(self.collate([data]), self.processed_paths[0])
            torch.save(dict(zip(("train", "valid", "test"), np.arange(N).reshape(3, 4), strict=True)), self.split_path)

        split_path = property(lambda self: Path(self.root) / "split_dict.pt")

        def get_idx_split(self) -> dict[str, Any]:
            return torch.load(self.split_path)

    package, module = types.ModuleType("ogb"), types.ModuleType("ogb.nodeproppred")
    module.PygNodePropPredDataset = PygNodePropPredDataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ogb", package)
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", module)


def write_ogb(folder: Path) -> None:
    (folder / "raw").mkdir(parents=True)
    (folder / "raw" / "edge.csv.gz").touch()


@pytest.mark.parametrize(("name", "is_symmetric"), [("OGBN-arxiv", True), ("ogbn_products", False)])
def test_ogb_loads_under_weights_only(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    is_symmetric: bool,
) -> None:
    fake_ogb(monkeypatch)
    write_ogb(tmp_path / name.lower().replace("-", "_"))
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    allowed = set(torch.serialization.get_safe_globals())
    data = load(name, tmp_path)
    assert data.y.shape == (N,)
    assert data.num_edges == (2 * N if is_symmetric else N)
    assert [data[split].nonzero().view(-1).tolist() for split in ("train_mask", "val_mask", "test_mask")] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    assert set(torch.serialization.get_safe_globals()) == allowed, "declared for this load only"
    assert capsys.readouterr().out == "", "standard output is for results"


def test_ogb_leaves_unlabeled_nodes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ogb(monkeypatch, nan_label=True)
    write_ogb(tmp_path / "ogbn_papers100M")
    data = load("ogbn-papers100m", tmp_path)
    assert (data.y.dtype, data.y[1].item()) == (torch.int64, -1)
    assert data.train_mask.nonzero().view(-1).tolist() == [0, 2, 3]


def test_ogb_without_network_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ogb(monkeypatch)
    with pytest.raises(DatasetError, match=r"'ogbn-arxiv' is not in .*ogbn_arxiv and .*no connection to snap.stanford"):
        load("ogbn-arxiv", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_ogb_absent_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ogb", None)
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    with pytest.raises(DatasetError, match=r"needs the package 'ogb'.*: pip install ogb$"):
        load("ogbn-arxiv", tmp_path)
