"""The feature store: rows as of direct quantization, PyG's interface, loaders, other processes."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.data import Data, HeteroData, TensorAttr
from torch_geometric.loader import LinkLoader, NodeLoader

import qgnn
from qgnn import QConfig, QTensor, functional
from qgnn.data import NeighborSampler, QuantizedFeatureStore, StoredFeatures, write_features
from qgnn.formats import MSFP, MXFP4, Format, Int

N, F = 40, 9
X = torch.randn(N, F, generator=torch.Generator().manual_seed(0))
Q = functional.quantize(X, QConfig(rounding="nearest"))
EDGE_INDEX = torch.randint(N, (2, 150), generator=torch.Generator().manual_seed(1))


def graph() -> Data:
    return Data(
        x=X, edge_index=EDGE_INDEX, y=torch.arange(N), train_mask=torch.arange(N) < 20, edge_attr=torch.ones(150)
    )


def in_memory(_: Path) -> QuantizedFeatureStore:
    return QuantizedFeatureStore.from_data(graph())


def in_files(folder: Path) -> QuantizedFeatureStore:
    store = QuantizedFeatureStore()
    store[None, "x", None] = write_features(folder / "features", X, chunk_rows=7)
    store[None, "y", None] = graph().y
    return store


def assert_rows(rows: Any, index: Any) -> None:
    assert isinstance(rows, QTensor)
    assert torch.equal(rows.codes, Q.codes[index])
    assert torch.equal(rows.scale, Q.scale[index])


@pytest.fixture(params=[in_memory, in_files])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> QuantizedFeatureStore:
    """The same features in memory and in files."""
    return request.param(tmp_path)


INDICES = [
    None,
    slice(3, 17),
    slice(30, None, 3),
    torch.tensor([5, 0, 39, 5]),
    torch.tensor([7], dtype=torch.int32),
    torch.tensor([], dtype=torch.int64),
    torch.arange(N) % 3 == 0,
    np.array([4]),  # PyG itself takes no longer ones
]


@pytest.mark.parametrize("index", INDICES, ids=lambda index: type(index).__name__)
def test_rows_are_those_of_direct_quantization(store: QuantizedFeatureStore, index: Any) -> None:
    assert_rows(store.get_tensor(None, "x", index), slice(None) if index is None else index)
    where = slice(None) if index is None else index
    assert torch.equal(store[None, "y", index], graph().y[where])


@given(st.lists(st.integers(0, N - 1), max_size=60))
def test_any_rows_in_any_order(index: list[int]) -> None:
    assert_rows(in_memory(Path())[None, "x", torch.tensor(index, dtype=torch.int64)], index)


def test_it_takes_a_quarter_of_fp32() -> None:
    store = QuantizedFeatureStore()
    store[None, "x", None] = torch.randn(500, 256)
    assert store.nbytes == 500 * (256 + 4)


def test_it_holds_what_has_a_row_for_each_node() -> None:
    """Of a graph that stays as it is, edges are left to it."""
    data = graph()
    store = QuantizedFeatureStore.from_data(data)
    assert {attr.attr_name for attr in store.get_all_tensor_attrs()} == {"x", "y", "train_mask"}
    assert torch.equal(data.x, X)
    assert repr(store) == "QuantizedFeatureStore(x=int8 [40, 9], y=int64 [40], train_mask=bool [40])"
    assert len(store) == 3


def test_types_of_nodes_are_groups() -> None:
    data = HeteroData()
    data["paper"].x, data["author"].x, data["author"].age = X, -X[:5], torch.arange(5)
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1], [2, 3]])
    store = QuantizedFeatureStore.from_data(data)
    assert_rows(store["paper", "x", None], slice(None))
    assert torch.equal(store["author", "x", None].codes, -Q.codes[:5])
    assert store.get_tensor_size("author", "age") == (5,)
    assert store["paper"].x[torch.tensor([3])].shape == (1, F), "PyG's views"
    assert "author.age=int64 [5]" in repr(store)


def test_other_names_can_be_quantized() -> None:
    store = QuantizedFeatureStore(quantized=("embedding",))
    store[None, "x", None], store[None, "embedding", None] = X, X.numpy()
    assert torch.equal(store[None, "x", None], X)
    assert_rows(store[None, "embedding", None], slice(None))


@pytest.mark.parametrize("fmt", [Int(4), MSFP(3), MXFP4()], ids=str)
def test_codes_stay_what_they_are(fmt: Format) -> None:
    store, q = QuantizedFeatureStore(), fmt.encode(X)
    store[None, "x", None] = q
    rows = store[None, "x", torch.tensor([3, 1])]
    assert torch.equal(rows.dequantize(), q.dequantize()[[3, 1]])
    assert rows.nbytes * N == q.nbytes * 2
    with pytest.raises(ValueError, match="expects codes of rows for 'x'"):
        store[None, "x", None] = MSFP(3).encode(X, 0)


def test_rows_are_put_update_and_removed() -> None:
    store = in_memory(Path())
    index = torch.tensor([7, 2])
    assert store.put_tensor(5 * X[:2], None, "x", index=index)
    changed = store[None, "x", None]
    assert torch.equal(changed.codes[index], Q.codes[:2])
    assert torch.allclose(changed.scale[index], 5 * Q.scale[:2])
    assert torch.equal(changed.codes[8:], Q.codes[8:])
    assert store.update_tensor(X[:4], None, "x", index=None)
    assert store.get_tensor_size(None, "x") == (4, F)
    assert store.remove_tensor(None, "x", index=None)
    assert not store.remove_tensor(None, "x", index=None)
    assert store.get_tensor_size(None, "x") is None
    with pytest.raises(KeyError, match="has no 'x' to put rows into"):
        store[None, "x", index] = X[:2]


def test_an_update_of_rows_leaves_the_others() -> None:
    store, index = in_memory(Path()), torch.tensor([7, 2])
    assert store.update_tensor(5 * X[:2], group_name=None, attr_name="x", index=index)
    changed = store[None, "x", None]
    assert torch.equal(changed.codes[index], Q.codes[:2])
    assert torch.equal(changed.codes[8:], Q.codes[8:])
    with pytest.raises(ValueError, match=r"removes all rows of 'x' at once .*give index=None"):
        store.remove_tensor(group_name=None, attr_name="x", index=index)
    assert store.get_tensor_size(None, "x") == (N, F)


def test_rows_are_not_put_into_what_the_caller_has() -> None:
    data = graph()
    store = QuantizedFeatureStore.from_data(data)
    store[None, "y", torch.tensor([3])] = torch.tensor([-7])
    store[None, "y", torch.tensor([4])] = torch.tensor([-8])
    assert torch.equal(data.y, torch.arange(N))
    store[None, "y", 5] = torch.tensor(-9)
    assert store[None, "y", torch.tensor([2, 3, 4, 5])].tolist() == [2, -7, -8, -9]


@pytest.mark.parametrize("quantized", [(), ("x",)], ids=["fp32", "int8"])
@pytest.mark.parametrize("index", [torch.tensor([0, 1, 2]), slice(0, 3)], ids=["tensor", "slice"])
@pytest.mark.parametrize("shape", [(3, 1), (1, 8), (4, 8), (3, 9)])
def test_rows_of_another_shape_are_not_put(quantized: tuple[str, ...], index: Any, shape: tuple[int, ...]) -> None:
    store = QuantizedFeatureStore(quantized)
    store.put_tensor(torch.randn(5, 8), group_name=None, attr_name="x", index=None)
    held = store.get_tensor(group_name=None, attr_name="x", index=None)
    with pytest.raises(ValueError, match=rf"expects rows of shape \[3, 8\] \(got \[{shape[0]}, {shape[1]}\]\)"):
        store.put_tensor(torch.randn(shape), group_name=None, attr_name="x", index=index)
    assert store.get_tensor(group_name=None, attr_name="x", index=None) is held


def test_rows_are_put_into_their_kind_alone(tmp_path: Path) -> None:
    index = torch.tensor([7, 2])
    store = in_files(tmp_path)
    with pytest.raises(ValueError, match="of their kind in memory"):
        store[None, "x", index] = X[:2]
    assert_rows(StoredFeatures(tmp_path / "features").rows, slice(None))
    for fmt in (Int(8, symmetric=False), Int(4), MSFP(7)):
        store[None, "x", None] = fmt.encode(X)
        with pytest.raises(ValueError, match="of their kind in memory"):
            store[None, "x", index] = X[:2]
        store[None, "x", index] = fmt.encode(-X[:2])
        expected = fmt.encode(X).dequantize()
        expected[index] = fmt.encode(-X[:2]).dequantize()
        assert torch.equal(store[None, "x", None].dequantize(), expected)
    with pytest.raises(ValueError, match="of their kind in memory"):
        store[None, "y", index] = X[:2, 0]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (X[0], ValueError, r"'x' of shape \[N, F\] \(got \(9,\)\)"),
        (X.long(), TypeError, r"floating-point"),
        ([[1.0]], TypeError, r"a tensor or array for 'x' \(got list\)"),
        (torch.cat([X, X[:1] * torch.inf]), ValueError, r"\(row 40 holds an infinity, NaN"),
    ],
)
def test_what_cannot_be_quantized(value: Any, error: type, message: str) -> None:
    store = QuantizedFeatureStore()
    with pytest.raises(error, match=message):
        store[None, "x", None] = value
    assert len(store) == 0


@pytest.mark.parametrize("index", [torch.tensor([0, N]), torch.tensor([-1, 3]), np.array([N + 5])])
def test_rows_that_there_are_not(store: QuantizedFeatureStore, index: Any) -> None:
    with pytest.raises(IndexError, match=r"has rows 0 to 39 \(got"):
        store.get_tensor(None, "x", index)


@pytest.mark.parametrize("index", [torch.tensor([True, False]), torch.tensor([1.5])])
def test_what_is_no_index(store: QuantizedFeatureStore, index: Any) -> None:
    with pytest.raises(IndexError, match=r"expects a mask \[40\] or numbers of rows"):
        store.get_tensor(None, "x", index)


def test_graphs_whose_features_are_codes_already() -> None:
    data = graph()
    data.x, data.num_nodes = Q, N
    assert_rows(QuantizedFeatureStore.from_data(data)[None, "x", None], slice(None))


def test_a_row_does_not_keep_the_gradient_of_what_was_put_in() -> None:
    store = QuantizedFeatureStore()
    store[None, "x", None] = X.clone().requires_grad_()
    assert store[None, "x", torch.tensor([1])].origin is None


# ---- loaders ----


def loader(store: Any, data: Data, **options: Any) -> NodeLoader:
    return NodeLoader(
        (store, data), NeighborSampler(data, [4, 3]), input_nodes=torch.arange(20), batch_size=8, **options
    )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_a_loader(store: QuantizedFeatureStore, num_workers: int) -> None:
    batches = list(loader(store, graph(), num_workers=num_workers))
    assert [batch.batch_size for batch in batches] == [8, 8, 4]
    for batch in batches:
        assert_rows(batch.x, batch.n_id)
        assert torch.equal(batch.y, batch.n_id)
        assert batch.num_nodes == len(batch.n_id)
        assert_rows(batch.to("cpu").x, batch.n_id)


def test_workers_that_are_spawned(store: QuantizedFeatureStore) -> None:
    options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    for batch in loader(store, graph(), **options):
        assert_rows(batch.x, batch.n_id)


def test_batches_of_links(store: QuantizedFeatureStore) -> None:
    data = graph()
    links = LinkLoader(
        (store, data), NeighborSampler(data, [4, 3]), edge_label_index=(None, EDGE_INDEX[:, :10]), batch_size=5
    )
    for number, batch in enumerate(links):
        assert_rows(batch.x, batch.n_id)
        assert torch.equal(batch.n_id[batch.edge_label_index], EDGE_INDEX[:, 5 * number : 5 * number + 5])


LAYERS: list[Callable[..., torch.nn.Module]] = [qgnn.nn.QGCNConv, qgnn.nn.QSAGEConv, qgnn.nn.QGATConv]


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_take_batches_as_they_are(layer: Callable[..., torch.nn.Module]) -> None:
    """The first product reads the codes of the store: nothing is rounded a second time, or decoded before."""
    conv = layer(F, 5, config=QConfig(rounding="nearest"))
    batch = next(iter(loader(in_memory(Path()), graph())))
    with qgnn.trace() as trace:
        out = conv(batch.x, batch.edge_index)
    assert torch.equal(out, conv(functional.quantize(X[batch.n_id], QConfig(rounding="nearest")), batch.edge_index))
    assert all("float32" not in op["format"] for name, op in trace.ops.items() if name.startswith("matmul"))
    out.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in conv.parameters())


# ---- processes ----


def test_a_pickled_store_maps_the_files_again(tmp_path: Path) -> None:
    store = QuantizedFeatureStore()
    store[None, "x", None] = write_features(tmp_path / "features", torch.randn(1000, 64))
    content = pickle.dumps(store)
    assert len(content) < 2000
    assert torch.equal(pickle.loads(content)[None, "x", None].codes, store[None, "x", None].codes)


def test_memory_that_processes_share(store: QuantizedFeatureStore) -> None:
    assert store.share_memory_() is store
    assert store[None, "y", None].is_shared()
    assert_rows(store[None, "x", None], slice(None))
    held = store[None, "x", None]
    assert (
        held.storage.is_shared()
        == held.scales.is_shared()
        == (not isinstance(store._entries[None, "x"], StoredFeatures))
    )


def test_rows_put_into_shared_memory_are_everybodys() -> None:
    store, y = QuantizedFeatureStore(), torch.zeros(5)
    store[None, "y", None] = y
    shared = store.share_memory_()[None, "y", None]
    store[None, "y", torch.tensor([1])] = torch.ones(1)
    assert store[None, "y", None].data_ptr() == shared.data_ptr()
    assert shared.tolist() == [0, 1, 0, 0, 0]
    assert not y.is_shared()
    assert not y.any()


def test_attributes_have_pygs_form() -> None:
    attr = TensorAttr(None, "x", torch.tensor([1, 2]))
    rows: list[Any] = in_memory(Path()).multi_get_tensor([attr])
    assert_rows(rows[0], [1, 2])


def test_a_store_holds_no_copy_of_what_a_batch_changes() -> None:
    rows = in_memory(Path())
    batch: Tensor = rows[None, "x", torch.tensor([1, 2])].codes
    batch.zero_()
    assert_rows(rows[None, "x", None], slice(None))
