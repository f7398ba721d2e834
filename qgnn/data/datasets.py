"""Data sets by name, read by the classes of PyG and OGB that own them."""

import difflib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch_geometric.data import Data

from qgnn.data.download import DatasetError, read_guarded
from qgnn.data.embedded import wordnet
from qgnn.data.splits import with_single_split


class Entry(NamedTuple):
    """Where a data set comes from: a class of `torch_geometric.datasets` and what to call it with."""

    cls: str
    name: str | None = None  # argument `name` of the class, if it takes one
    folder: str | None = None  # folder of this set inside the root, if the class makes one
    kwargs: dict[str, Any] = {}  # noqa: RUF012 - a NamedTuple default, never written to
    metric: str | None = None  # what its literature reports, if not what is usual for such labels


def _named(cls: str, folder: Callable[[str], str], *names: str, metric: str | None = None) -> dict[str, Entry]:
    return {key(name): Entry(cls, name, folder(name), metric=metric) for name in names}


def key(name: str) -> str:
    """The spelling under which a name is looked up: case and the choice of `-`, `_` or space do not matter."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def _with_underscores(name: str) -> str:
    return name.lower().replace("-", "_")


ENTRIES: dict[str, Entry] = {
    **_named("Planetoid", str, "Cora", "CiteSeer", "PubMed"),
    **_named("Amazon", str, "Computers", "Photo"),
    **_named("Coauthor", str, "CS", "Physics"),
    **_named("CitationFull", str.lower, "Cora_ML", "DBLP"),
    "cora-full": Entry("CitationFull", "Cora", "cora"),
    **_named("HeterophilousGraphDataset", _with_underscores, "Roman-empire", "Amazon-ratings"),
    # Two classes, of which one is rare: https://arxiv.org/abs/2302.11640, https://arxiv.org/abs/2110.14446.
    **_named("HeterophilousGraphDataset", str.lower, "Minesweeper", "Tolokers", "Questions", metric="roc_auc"),
    **_named("LINKXDataset", str, "genius", metric="roc_auc"),
    **_named("LINKXDataset", str, "penn94", "reed98", "amherst41", "cornell5", "johnshopkins55"),
    **_named("WebKB", str.lower, "Cornell", "Texas", "Wisconsin"),
    "actor": Entry("Actor"),
    "wikics": Entry("WikiCS", kwargs={"is_undirected": True}),
    "github": Entry("GitHub"),
    "lastfm-asia": Entry("LastFMAsia"),
    "deezer-europe": Entry("DeezerEurope"),
    "facebook-page-page": Entry("FacebookPagePage"),
    "flickr": Entry("Flickr"),
    "reddit": Entry("Reddit"),
    "reddit2": Entry("Reddit2"),
    "yelp": Entry("Yelp"),
    "amazon-products": Entry("AmazonProducts"),
}

# Sets of many graphs with a label each, which `load_graphs` reads.
GRAPH_ENTRIES: dict[str, Entry] = {
    **_named("TUDataset", str, "MUTAG", "PROTEINS", "ENZYMES", "Mutagenicity", "NCI1", "IMDB-BINARY"),
    **_named("MoleculeNet", str.lower, "ESOL", "FreeSolv", metric="rmse"),
}

OGB_NAMES = ("ogbn-arxiv", "ogbn-products", "ogbn-papers100m")


def dataset_names(kind: str = "node") -> list[str]:
    """The names of data sets.

    Args:
        kind: ``"node"`` for those of :func:`load`, the embedded graph first, whose nodes have labels; ``"graph"`` for
            those of :func:`load_graphs`, whose graphs have classes or numbers.

    Raises:
        ValueError: If it is another kind.
    """
    if kind not in ("node", "graph"):
        raise ValueError(f"'dataset_names' expects 'kind' to be 'node' or 'graph' (got {kind!r})")
    return list(GRAPH_ENTRIES) if kind == "graph" else ["wordnet", *ENTRIES, *OGB_NAMES]


def metric_of(name: str) -> str | None:
    """What the literature of a data set reports: ``"roc_auc"`` or ``"rmse"``; ``None`` for what is usual: accuracy, or
    micro-F1 of several labels a node."""
    entry = (ENTRIES | GRAPH_ENTRIES).get(key(name))
    return None if entry is None else entry.metric


def default_root() -> Path:
    """The folder that is searched, and downloaded to, when none is given: ``qgnn`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qgnn"


def load(name: str, root: str | os.PathLike[str] | None = None) -> Data:
    r"""Load a node classification data set by name, with one split.

    The set is read by the class of PyG or OGB that owns it, which downloads what is missing where there is a
    network. ``load`` adds no processing, except that ``ogbn-arxiv`` is made symmetric, as is usual for GCN.

    The split is the set's own public one; where several are given, the first. A set without a split gets the one of
    Shchur et al. (https://arxiv.org/abs/1811.05868): 20 nodes a class to train, 30 to validate, the rest to test,
    drawn once with a fixed seed, so that it is the same in every call. A class of fewer than 60 nodes gives a third
    to each. Nodes without a label are in no mask.

    Processed files are read as tensors and plain values; what would run code is refused. Raw files of several sets are
    pickles, as Planetoid's are, which PyG unpickles: name a folder only if you trust who wrote to it.

    Args:
        name: One of :func:`dataset_names`; upper and lower case, ``-`` and ``_`` do not matter.
        root: The folder with PyG's layout. For Cora, the raw files are looked for in
            ``root/Cora/raw`` and ``root/Planetoid/Cora/raw`` (the class name comes first); downloads go to the
            second. Not used for ``wordnet``, which is embedded. (default: ``~/.cache/qgnn``)

    Shapes:
        - ``x``: [N, F] float32
        - ``edge_index``: [2, E] int64
        - ``y``: [N] int64, -1 for an unknown label; [N, T] float32 of zeros and ones for multi-label sets (Yelp)
        - ``train_mask``, ``val_mask``, ``test_mask``: [N] bool
        - ``metric``: ``"roc_auc"``, of sets of two classes whose literature reports the area under the ROC curve
          (Minesweeper, Tolokers, Questions, genius); others lack it: accuracy, or micro-F1 of several labels a node

    Raises:
        ValueError: If the name is not known; the message lists the names.
        DatasetError: If the files are neither there nor can be downloaded, or cannot be read; the message names the
            folder.

    Example:
        >>> data = qgnn.data.load("cora", root="data")
    """
    wanted = key(name)
    if wanted == "wordnet":
        return wordnet()
    folder = Path(default_root() if root is None else root).expanduser()
    if wanted in OGB_NAMES:
        from qgnn.data.ogb import load_ogb

        return with_single_split(load_ogb(wanted, folder))
    if wanted not in ENTRIES:
        raise ValueError(unknown_name_message(name))
    data = with_single_split(load_entry(wanted, ENTRIES[wanted], folder)[0])
    if (metric := metric_of(wanted)) is not None:
        data.metric = metric
    return data


def unknown_name_message(name: str, function: str = "load") -> str:
    """One line: what came, what is close to it, and everything that would have been right."""
    other = "load_graphs" if function == "load" else "load"
    own, others = (dataset_names("node" if reader == "load" else "graph") for reader in (function, other))
    if key(name) in others:
        return f"{function!r} does not read the data set {name!r}; call {other!r}, which does"
    close = difflib.get_close_matches(key(name), own + others, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return (
        f"{function!r} does not know the data set {name!r}{hint} expected one of {', '.join(own)}; {other!r} reads "
        f"{', '.join(others)}"
    )


def find_root(root: Path, entry: Entry) -> Path:
    """The folder to give to the class as its root; where nothing is found, the one to download to.

    Accepted are the folder that holds the class's folder (``root/Planetoid/Cora``), the class's folder itself
    (``root/Cora``) and, for a set that has the class's folder for itself, this folder (``root/raw``).
    """
    nested = root / entry.cls
    if entry.folder is None:
        return root if root.name == entry.cls else nested
    if not (nested / entry.folder).is_dir() and ((root / entry.folder).is_dir() or root.name == entry.cls):
        return root
    return nested


def load_entry(name: str, entry: Entry, root: Path) -> Any:
    """The data set of PyG that ``entry`` names."""
    from torch_geometric import datasets

    cls = getattr(datasets, entry.cls, None)
    if cls is None:
        raise DatasetError(f"the data set {name!r} needs a newer torch_geometric, which has the class {entry.cls!r}")
    class_root = find_root(root, entry)
    arguments = {"root": str(class_root), **entry.kwargs}
    if entry.name is not None:
        arguments["name"] = entry.name
    raw_dir = class_root / (entry.folder or "") / "raw"
    return read_guarded(name, cls, arguments, raw_dir, root)
