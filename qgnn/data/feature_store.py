"""Features as int8 rows, from which loaders take the rows of a batch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, HeteroData, TensorAttr

from qgnn.data.stored_features import NEAREST, StoredFeatures, check_finite
from qgnn.functional import quantize
from qgnn.qtensor import QTensor

_Key = tuple[Any, str]


class QuantizedFeatureStore(FeatureStore):
    """Features in int8 with a scale a row, for PyG's loaders: a quarter of the memory of fp32, and of the bytes that go
    to a GPU.

    What is put in under one of the names ``quantized`` becomes codes, to nearest; all else, such as labels, stays as it
    is, as do codes of rows in any format (:class:`qgnn.QTensor`). Loaders give batches whose ``x`` is a
    :class:`qgnn.QTensor`, which every layer of :mod:`qgnn.nn` takes as it is (those of other formats, layers whose
    config has a ``fmt``): it goes into the first product without being decoded. PyG's own layers, and transforms that
    compute with features, take ``batch.x.dequantize()``. Features that are larger than memory come from
    :func:`qgnn.data.write_features`. With any store PyG gives batches no attributes of edges:
    ``data.edge_weight[batch.e_id]`` has their weights.

    Args:
        quantized: Names of attributes to quantize.

    Raises:
        TypeError: If what is put in under such a name is not floating point.
        ValueError: If it is no matrix, a row holds an infinity or NaN, codes lie along the rows, or rows are put into
            codes of another kind or into files.
        IndexError: If numbers or a mask are not those of rows.
        KeyError: If there is no such attribute.

    Shapes:
        - **input:** ``[N, F]``, one row a node

    Example:
        >>> store = qgnn.data.QuantizedFeatureStore.from_data(data)
        >>> sampler = qgnn.data.NeighborSampler(data, [15, 10])
        >>> loader = NodeLoader((store, data), sampler, input_nodes=data.train_mask, batch_size=1024)
        >>> batch = next(iter(loader))
        >>> out = model(batch.x, batch.edge_index)[: batch.batch_size]
    """

    def __init__(self, quantized: Collection[str] = ("x",)) -> None:
        super().__init__()
        self._quantized = frozenset(quantized)
        self._entries: dict[_Key, Tensor | QTensor | StoredFeatures] = {}
        self._owned: set[_Key] = set()

    @classmethod
    def from_data(cls, data: Data | HeteroData, quantized: Collection[str] = ("x",)) -> QuantizedFeatureStore:
        """A store of all tensors that have a row for each node: features, labels, masks.

        Args:
            data: A graph; it stays as it is, and serves loaders as the store of edges.
            quantized: As above.
        """
        store = cls(quantized)
        for nodes in data.node_stores:
            for name, value in nodes.items():
                is_rows = isinstance(value, Tensor) and nodes.is_node_attr(name)
                if is_rows or isinstance(value, QTensor):
                    store.put_tensor(value, group_name=nodes._key, attr_name=name, index=None)
        return store

    @property
    def nbytes(self) -> int:
        """Bytes of everything in it, in memory and in files."""
        return sum(_rows_of(entry).nbytes for entry in self._entries.values())

    def share_memory_(self) -> QuantizedFeatureStore:
        """Move what is in memory to where processes share it, as ``torch.Tensor.share_memory_`` does; files are shared
        as they are."""
        for key, entry in self._entries.items():
            if not isinstance(entry, StoredFeatures):
                for rows in _tensors(self._own(key, entry)):
                    rows.share_memory_()
        return self

    def update_tensor(self, tensor: Any, *args: Any, **kwargs: Any) -> bool:
        """As ``put_tensor``: with an index, rows of what is there.

        Args:
            tensor: What is put in.
            args: A ``TensorAttr``, or its fields.
            kwargs: Its fields by name.
        """
        return self.put_tensor(tensor, *args, **kwargs)

    def _own(self, key: _Key, held: Tensor | QTensor) -> Tensor | QTensor:
        """The entry, of which no caller has the memory: rows put into it later are its own, and everybody's."""
        if key not in self._owned:
            held = held.clone() if isinstance(held, Tensor) else held.with_tensors(*(t.clone() for t in _tensors(held)))
            self._entries[key] = held
            self._owned.add(key)
        return held

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        entry = self._entry(tensor, str(attr.attr_name))
        if attr.index is None:
            self._entries[_key(attr)] = entry
            self._owned.discard(_key(attr))
            if isinstance(entry, QTensor) and not isinstance(tensor, QTensor):  # made here
                self._owned.add(_key(attr))
            return True
        key = _key(attr)
        held = self._entries.get(key)
        if held is None:
            raise KeyError(f"'QuantizedFeatureStore' has no {attr.attr_name!r} to put rows into; put all of it in")
        if _kind_of(held) != _kind_of(entry) or isinstance(held, StoredFeatures) or isinstance(entry, StoredFeatures):
            raise ValueError(
                f"'QuantizedFeatureStore' puts rows into tensors of their kind in memory (got {entry!r} for {held!r}); "
                f"put all of it in anew"
            )
        index = _index_of(attr.index, held.shape[0])
        num_rows = len(range(*index.indices(held.shape[0]))) if isinstance(index, slice) else len(index)
        expected, given = [num_rows, *held.shape[1:]], list(entry.shape)
        is_number = not isinstance(attr.index, slice) and torch.as_tensor(attr.index).dim() == 0
        if given != expected and not (is_number and given == expected[1:]):
            raise ValueError(f"'QuantizedFeatureStore' expects rows of shape {expected} (got {given})")
        for into, rows in zip(_tensors(self._own(key, held)), _tensors(entry), strict=True):
            _numbers(into)[index] = _numbers(rows)
        return True

    def _entry(self, value: Any, name: str) -> Tensor | QTensor | StoredFeatures:
        if isinstance(value, StoredFeatures):
            return value
        if isinstance(value, QTensor):
            if not value.has_parts:
                raise ValueError(f"'QuantizedFeatureStore' expects codes of rows for {name!r} (got {value!r})")
            return value.with_tensors(*value.tensors).to("cpu")
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if not isinstance(value, Tensor):
            raise TypeError(
                f"'QuantizedFeatureStore' expects a tensor or array for {name!r} (got {type(value).__name__})"
            )
        value = value.detach()
        if name not in self._quantized:
            return value.cpu()
        if value.dim() != 2:
            raise ValueError(f"'QuantizedFeatureStore' expects {name!r} of shape [N, F] (got {tuple(value.shape)})")
        q = quantize(value, NEAREST).to("cpu")
        check_finite(q.scales)
        return q

    def _get_tensor(self, attr: TensorAttr) -> Any:
        entry = self._entries.get(_key(attr))
        if entry is None:
            return None
        rows = _rows_of(entry)
        if attr.index is None:
            return rows
        index = _index_of(attr.index, rows.shape[0])
        if isinstance(index, slice):
            return rows.part(index) if isinstance(rows, QTensor) else rows[index]
        return rows.index_select(0, index)

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        found = self._get_tensor(attr)
        return None if found is None else tuple(found.shape)

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        if attr.index is not None:
            raise ValueError(
                f"'QuantizedFeatureStore' removes all rows of {attr.attr_name!r} at once (got an index); give "
                "index=None"
            )
        return self._entries.pop(_key(attr), None) is not None

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """What is in it."""
        return [TensorAttr(group, name) for group, name in self._entries]

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        held = ((name if group is None else f"{group}.{name}", entry) for (group, name), entry in self._entries.items())
        parts = (f"{name}={_kind_of(entry)} {list(_rows_of(entry).shape)}" for name, entry in held)
        return f"QuantizedFeatureStore({', '.join(parts)})"


def _key(attr: TensorAttr) -> _Key:
    return attr.group_name, str(attr.attr_name)


def _kind_of(entry: Tensor | QTensor | StoredFeatures) -> str:
    if isinstance(entry, Tensor):
        return str(entry.dtype).removeprefix("torch.")
    rows = _rows_of(entry)
    assert isinstance(rows, QTensor)
    return rows.name


def _rows_of(entry: Tensor | QTensor | StoredFeatures) -> Tensor | QTensor:
    return entry.rows if isinstance(entry, StoredFeatures) else entry


def _tensors(rows: Tensor | QTensor) -> list[Tensor]:
    """What has a row for each node."""
    return [t for t in rows.tensors if t is not None] if isinstance(rows, QTensor) else [rows]


def _numbers(t: Tensor) -> Tensor:
    """A view that torch can write to by index, which it cannot do with floats of one byte."""
    return t.view(torch.uint8) if t.is_floating_point() and t.dtype.itemsize == 1 else t


def _index_of(index: Any, num_rows: int) -> Tensor | slice:
    """Rows that there are."""
    if isinstance(index, slice):
        return index if index.step in (None, 1) else torch.arange(num_rows)[index]
    index = torch.as_tensor(index)
    if index.is_floating_point() or (index.dtype == torch.bool and index.shape != (num_rows,)):
        raise IndexError(
            f"'QuantizedFeatureStore' expects a mask [{num_rows}] or numbers of rows (got {index.dtype} of shape "
            f"{list(index.shape)})"
        )
    if index.dtype == torch.bool:
        index = index.nonzero()
    index = index.view(-1).to("cpu", torch.int64)
    if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < num_rows):
        raise IndexError(
            f"'QuantizedFeatureStore' has rows 0 to {num_rows - 1} (got {int(index.min())} to {int(index.max())})"
        )
    return index
