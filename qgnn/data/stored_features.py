"""Rows of features in a folder: int8 codes with a scale each, written in parts and mapped into memory.

    codes.npy        int8 [N, F]
    scales.npy       fp32 [N, 1]
    checksums.npy    uint32 [chunks, 2]: of each chunk of rows its CRC-32, and 1 once it is on the disk
    features.json    what these files are

A folder gets its name when its last chunk is on the disk: until then it has the suffix ``.part``, and the same call
goes on with it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor

from qgnn.config import QConfig
from qgnn.data.disk import lock, sync
from qgnn.functional import quantize
from qgnn.qtensor import QTensor

NEAREST = QConfig(bits=8, rounding="nearest")  # of constants, whose errors no later step averages out

_KIND, _VERSION = "qgnn int8 features", 1
_CHUNK_BYTES = 64 << 20
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


class FeatureFileError(RuntimeError):
    """A folder is none of features, or not whole, or not what it was when it was written. The message is one line."""


class StoredFeatures:
    """Rows of features in a folder, mapped into memory: pages are read when rows are, and are the same for all
    processes that map them.

    Args:
        path: The folder, of :func:`write_features`.

    Attributes:
        rows: All rows, int8 ``[N, F]`` with scales ``[N, 1]``. Whoever changes them changes no file.

    Raises:
        FeatureFileError: If it holds something else, or files are missing, shorter than they were or of another size.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        meta = _read_meta(self.path)
        self.chunk_rows: int = meta["chunk_rows"]
        codes, scales, self._checksums = (_mapped(self.path, name, meta) for name in ("codes", "scales", "checksums"))
        if not bool((self._checksums[:, 1] == 1).all()):
            raise FeatureFileError(f"{str(self.path)!r} lacks some of its rows; write them anew with write_features")
        self.rows = QTensor(torch.from_numpy(codes), torch.from_numpy(scales), dtype=_DTYPES[meta["dtype"]])

    def verify(self) -> None:
        """Read all rows, and compare them with the checksums of when they were written.

        Raises:
            FeatureFileError: If some differ.
        """
        for chunk, rows in enumerate(_chunks(self.rows.shape[0], self.chunk_rows)):
            if _checksum(self.rows.part(rows)) != self._checksums[chunk, 0]:
                raise FeatureFileError(
                    f"rows {rows.start} to {rows.stop - 1} in {str(self.path)!r} are not what was written; write them "
                    f"anew with write_features"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process maps the files itself."""
        return StoredFeatures, (str(self.path),)

    def __repr__(self) -> str:
        return f"StoredFeatures({str(self.path)!r}, {self.rows!r})"


def write_features(
    path: str | os.PathLike[str], rows: Any, *, chunk_rows: int | None = None, device: torch.device | str = "cpu"
) -> StoredFeatures:
    """Quantize rows to int8 with a scale each, to nearest, into a folder that takes a quarter of the space of fp32.

    Rows are read in chunks, so that they may be more than fit into memory. After an interruption the same call goes on
    behind the last chunk that is on the disk.

    Args:
        path: The folder to make; nothing but a whole one ever has this name.
        rows: The features: a tensor, or whatever has a ``shape`` and gives NumPy arrays for slices of rows, as
            ``numpy.memmap`` and the data sets of HDF5 and Zarr do.
        chunk_rows: Rows that are in memory at a time; by default as many as take 64 MiB.
        device: Where to quantize.

    Shapes:
        - **input:** ``[N, F]``, float

    Returns:
        The folder, opened.

    Raises:
        FileExistsError: If there is something of this name.
        ValueError: If ``rows`` is no matrix, a row holds an infinity or NaN, or what an interrupted call left is of
            other rows: of other sizes, or with other values in the first chunk.
        TypeError: If rows are not floating-point numbers.
        FeatureFileError: If another process is writing the folder.
        OSError: If there is no space for all rows, before the first is read.

    Example:
        >>> rows = numpy.load("features.npy", mmap_mode="r")
        >>> store = qgnn.data.QuantizedFeatureStore()
        >>> store[None, "x", None] = qgnn.data.write_features("features", rows)
    """
    path = Path(path).absolute()
    if path.exists():
        raise FileExistsError(f"{str(path)!r} exists; give another name, or delete it")
    first = _matrix(rows, slice(0, 1))
    num_rows, width = (int(size) for size in rows.shape)
    if chunk_rows is None:
        chunk_rows = max(1, _CHUNK_BYTES // (4 * max(1, width)))
    if chunk_rows < 1:
        raise ValueError(f"'write_features' expects 'chunk_rows' of at least 1 (got {chunk_rows})")
    meta = {
        "kind": _KIND,
        "version": _VERSION,
        "shape": [num_rows, width],
        "chunk_rows": chunk_rows,
        "dtype": _name_of(first.dtype),
    }
    part = path.with_name(f"{path.name}.part")
    with _locked(part):
        codes, scales, checksums = _opened(part, meta)
        written = [bool(mark) for mark in checksums[:, 1] == 1]
        for chunk, where in enumerate(_chunks(num_rows, chunk_rows)):
            if written[chunk] and chunk != written.index(True):
                continue
            q = _quantized(_matrix(rows, where), where.start, device)
            if written[chunk]:
                if _checksum(q) != checksums[chunk, 0]:
                    raise ValueError(
                        f"{str(part)!r} is of other features (rows {where.start} to {where.stop - 1} differ); delete "
                        f"it to begin anew"
                    )
                continue
            codes[where], scales[where] = q.storage.numpy(), q.scales.numpy()
            codes.flush()
            scales.flush()
            checksums[chunk] = _checksum(q), 1
            checksums.flush()
        try:
            part.rename(path)
        except OSError as error:
            raise FileExistsError(f"{str(path)!r} was made meanwhile; the features are in {str(part)!r}") from error
        sync(path.parent)
    return StoredFeatures(path)


def check_finite(scales: Tensor, first: int = 0) -> None:
    """Raise if a row, counted from ``first`` on, holds an infinity or NaN, which its scale tells."""
    bad = scales.view(-1).isnan().nonzero()
    if bad.numel():
        raise ValueError(
            f"features should be finite in fp32 (row {first + int(bad[0])} holds an infinity, NaN or larger number); "
            f"replace what is missing, as torch.nan_to_num does"
        )


def _quantized(values: Tensor, first: int, device: torch.device | str) -> QTensor:
    q = quantize(values.to(device), NEAREST)
    q = q.with_tensors(q.storage.cpu(), q.scales.cpu())
    check_finite(q.scales, first)
    return q


def _matrix(rows: Any, where: slice) -> Tensor:
    """Some rows as a tensor."""
    shape = getattr(rows, "shape", None)
    if shape is None or len(shape) != 2:
        raise ValueError(f"features should be a matrix [N, F] (got {type(rows).__name__} of shape {shape})")
    values = rows[where]
    if not isinstance(values, Tensor):
        values = np.array(values)
        values = torch.from_numpy(values.astype(values.dtype.newbyteorder("="), copy=False))
    values = values.detach()
    num_rows = min(where.stop, shape[0]) - where.start
    if values.shape != (num_rows, shape[1]):
        raise ValueError(
            f"features of shape {tuple(shape)} should give {num_rows} rows for {where} (got {tuple(values.shape)})"
        )
    if _name_of(values.dtype) not in _DTYPES:
        raise TypeError(
            f"features should be floating-point numbers (got {values.dtype}); convert them, as .float() does"
        )
    return values


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _chunks(num_rows: int, chunk_rows: int) -> Iterator[slice]:
    for start in range(0, num_rows, chunk_rows):
        yield slice(start, min(start + chunk_rows, num_rows))


def _checksum(q: QTensor) -> int:
    return zlib.crc32(q.scales.numpy().data, zlib.crc32(q.storage.numpy().data))


# ---- files ----


def _arrays(meta: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each array."""
    num_rows, width = meta["shape"]
    num_chunks = -(-num_rows // meta["chunk_rows"])
    return {
        "codes": ("|i1", (num_rows, width)),
        "scales": ("<f4", (num_rows, 1)),
        "checksums": ("<u4", (num_chunks, 2)),
    }


def _opened(part: Path, meta: dict[str, Any]) -> tuple[np.memmap, np.memmap, np.memmap]:
    """The arrays of an unfinished folder, made if there are none yet."""
    described = part / "features.json"
    if not described.exists():  # it is written last
        for name, (dtype, shape) in _arrays(meta).items():
            _make(part / f"{name}.npy", dtype, shape)
        written = part / "features.json.new"
        written.write_text(json.dumps(meta), encoding="utf-8")
        sync(written)
        written.replace(described)
        sync(part)
    found = _read_meta(part)
    if found != meta:
        differing = ", ".join(f"{key} {meta[key]}, not {found[key]}" for key in meta if meta[key] != found[key])
        raise ValueError(f"{str(part)!r} is of other features (these have {differing}); delete it to begin anew")
    codes, scales, checksums = (_mapped(part, name, meta, "r+") for name in _arrays(meta))
    return codes, scales, checksums


def _make(path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    """An array of zeros, with space on the disk: a page that finds none when it is written would end the process."""
    array = open_memmap(path, "w+", dtype, shape)
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, array.offset + max(1, array.nbytes))
            file.truncate(array.offset + array.nbytes)
    array.flush()


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "features.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FeatureFileError(f"{str(folder)!r} is no folder of features: there is no {path.name} in it") from error
    except (OSError, ValueError, RecursionError) as error:
        raise FeatureFileError(f"{str(path)!r} cannot be read ({error})") from error
    if not isinstance(meta, dict) or meta.get("kind") != _KIND:
        raise FeatureFileError(f"{str(path)!r} does not describe {_KIND}")
    if meta.get("version") != _VERSION:
        raise FeatureFileError(
            f"{str(path)!r} is of version {meta.get('version')!r}, which this qgnn does not read (it reads "
            f"{_VERSION}); write the features anew"
        )
    sizes = [*meta["shape"], meta.get("chunk_rows")] if isinstance(meta.get("shape"), list) else []
    if len(sizes) != 3 or not all(type(n) is int and n >= 0 for n in sizes) or not sizes[2]:
        raise FeatureFileError(f"{str(path)!r} has no sizes that could be ({sizes})")
    if not isinstance(meta.get("dtype"), str) or meta["dtype"] not in _DTYPES:
        raise FeatureFileError(f"{str(path)!r} has no floating-point type ({meta.get('dtype')!r})")
    return meta


def _mapped(folder: Path, name: str, meta: dict[str, Any], mode: Literal["c", "r+"] = "c") -> np.memmap:
    """One of the arrays; by default what is written to it stays in this process."""
    path = folder / f"{name}.npy"
    try:
        with np.errstate(over="ignore"):  # of sizes that no file has
            array = open_memmap(path, mode)
        size = path.stat().st_size
    except Exception as error:  # of any type, by where a header is damaged
        reason = str(error).partition("\n")[0]
        raise FeatureFileError(f"{str(path)!r} is missing or not whole ({reason})") from error
    expected = _arrays(meta)[name]
    has_rows = array.flags.c_contiguous and size == array.offset + array.nbytes
    if (array.dtype.str, array.shape) != expected or not has_rows:
        order = "" if array.flags.c_contiguous else " by columns"
        raise FeatureFileError(
            f"{str(path)!r} holds {array.dtype.str} {array.shape}{order} in {size} bytes, not {expected[0]} "
            f"{expected[1]}"
        )
    pages = getattr(array, "_mmap", None)
    if pages is not None and mode == "c" and hasattr(mmap, "MADV_RANDOM"):
        pages.madvise(mmap.MADV_RANDOM)  # neighbors lie anywhere: what follows a row is not read next
    return array


@contextlib.contextmanager
def _locked(part: Path) -> Iterator[None]:
    """The folder, made if it does not exist, while no other process writes it."""
    part.mkdir(parents=True, exist_ok=True)
    if os.name == "nt":  # which opens no folders
        yield
        return
    descriptor = os.open(part, os.O_RDONLY)
    try:
        try:
            lock(descriptor)
        except OSError as error:
            raise FeatureFileError(f"another process is writing {str(part)!r}; wait for it") from error
        yield
    finally:
        os.close(descriptor)
