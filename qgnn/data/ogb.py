"""The node classification sets of the Open Graph Benchmark, read by the package `ogb`."""

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from qgnn.data.download import DatasetError, check_notes, guarded_download, one_line, plain_files, remove_empty

# Names as OGB spells them, where lower case is not enough.
SPELLING = {"ogbn-papers100m": "ogbn-papers100M"}


def load_ogb(name: str, root: Path) -> Data:
    """Load an OGB set as one ``Data`` with ``y`` [N] int64 and the set's own split as masks.

    Args:
        name: Lower-case name, such as ``ogbn-arxiv``.
        root: The folder that holds OGB's folder of the set, such as ``ogbn_arxiv``.

    Raises:
        DatasetError: If `ogb` is not installed, or the files are missing or unreadable.
    """
    try:
        from ogb.nodeproppred import PygNodePropPredDataset
    except ImportError as error:
        broken = "" if (error.name or "").partition(".")[0] == "ogb" else f" ({one_line(error)})"
        raise DatasetError(f"the data set {name!r} needs the package 'ogb'{broken}: pip install ogb") from error

    spelled = SPELLING.get(name, name)
    folder = find_folder(spelled, root)

    class Guarded(PygNodePropPredDataset):
        def download(self) -> None:
            with guarded_download(name, self.meta_info["url"], folder):
                super().download()

        def _process(self) -> None:
            check_notes(Path(self.processed_dir))
            super()._process()

    Guarded.__name__ = PygNodePropPredDataset.__name__
    existed = folder.is_dir()
    try:
        with prints_to_stderr(), ogb_pickles(), plain_files(name, folder / "processed"):
            dataset = Guarded(name=spelled, root=str(folder.parent))
            split = dataset.get_idx_split()
            data = dataset[0]
    except DatasetError:
        if not existed:
            remove_empty(folder / "raw", root)
        raise
    except EOFError as error:
        # OGB asks at the terminal whether to update a folder of another release.
        raise DatasetError(
            f"OGB wants to ask whether to update {folder}, and there is no terminal to ask at; a copied folder needs "
            "the file RELEASE_v1.txt that OGB put beside 'raw'"
        ) from error
    except Exception as error:
        raise DatasetError(
            f"the files of the data set {name!r} in {folder} cannot be read or processed ({one_line(error)}); "
            "the folder must be writable, and hold what OGB's archive holds"
        ) from error

    y = data.y.view(-1)
    data.y = torch.where(y.isnan(), -1, y).long() if y.is_floating_point() else y  # NaN: no label
    for mask, part in (("train_mask", "train"), ("val_mask", "valid"), ("test_mask", "test")):
        data[mask] = torch.zeros(len(data.y), dtype=torch.bool)
        data[mask][torch.as_tensor(split[part])] = True
    if name == "ogbn-arxiv":  # citations point one way
        data.edge_index = to_undirected(data.edge_index, num_nodes=len(data.y))
    return data


def find_folder(spelled: str, root: Path) -> Path:
    """OGB's folder of the set: in ``root``, or ``root`` itself if that is the folder."""
    folder = spelled.replace("-", "_")
    if root.name in (folder, f"{folder}_pyg"):
        return root
    return root / f"{folder}_pyg" if (root / f"{folder}_pyg").is_dir() else root / folder


def ogb_pickles() -> Any:
    """While this lasts, ``torch.load`` accepts the classes in OGB's processed files, and no others.

    OGB calls ``torch.load`` on a file that holds a PyG ``Data`` and, for splits, NumPy arrays; the default
    ``weights_only=True`` of torch refuses both unless they are declared.
    """
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import GlobalStorage

    # On leaving, torch forgets even those that were declared before, so only what is new may be named.
    reconstruct: Any = np.zeros(1).__reduce__()[0]
    dtypes: set[Any] = {type(np.dtype(kind)) for kind in ("int64", "int32", "float32", "float64", "bool")}
    needed = {Data, DataEdgeAttr, DataTensorAttr, GlobalStorage, np.ndarray, np.dtype, reconstruct, *dtypes}
    return torch.serialization.safe_globals(list(needed - set(torch.serialization.get_safe_globals())))


@contextlib.contextmanager
def prints_to_stderr() -> Iterator[None]:
    """OGB reports its progress with ``print``; keep standard output for results.

    Questions stay visible, since ``input`` writes its prompt to the redirected stream, and a closed or absent
    standard input answers at once instead of blocking.
    """
    stream = sys.stderr if sys.stderr is not None else io.StringIO()
    with contextlib.redirect_stdout(stream):
        yield
