"""Features in files: codes as of direct quantization, chunks that survive an interruption, files that are refused."""

import json
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import soak_files
from qgnn import QConfig, functional
from qgnn.data import FeatureFileError, StoredFeatures, write_features
from qgnn.data import stored_features as module
from soak_draw import Draw

X = torch.randn(23, 7, generator=torch.Generator().manual_seed(0))
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class Rows:
    """An array that remembers what is read, and fails at some row."""

    def __init__(self, x: Tensor, fails_at: int | None = None) -> None:
        self.shape, self.read = tuple(x.shape), []
        self._x, self._fails_at = x, fails_at

    def __getitem__(self, where: slice) -> np.ndarray:
        if self._fails_at is not None and where.start <= self._fails_at < where.stop:
            raise KeyboardInterrupt
        self.read.append((where.start, where.stop))
        return self._x[where].numpy()


def assert_direct(stored: StoredFeatures, x: Tensor) -> None:
    q = functional.quantize(x, QConfig(rounding="nearest"))
    assert torch.equal(stored.rows.codes, q.codes)
    assert torch.equal(stored.rows.scale, q.scale)
    assert stored.rows.dtype == x.dtype


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("chunk_rows", [None, 1, 5, 23, 100])
def test_codes_are_those_of_direct_quantization(tmp_path: Path, dtype: torch.dtype, chunk_rows: int | None) -> None:
    x = X.to(dtype)
    stored = write_features(tmp_path / "features", x, chunk_rows=chunk_rows)
    assert_direct(stored, x)
    assert_direct(StoredFeatures(tmp_path / "features"), x)
    stored.verify()
    assert [path.name for path in tmp_path.iterdir()] == ["features"]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 40), st.integers(0, 9), st.integers(1, 50), st.integers(0, 2**31))
def test_any_size_and_chunk(tmp_path_factory: Any, num_rows: int, width: int, chunk_rows: int, seed: int) -> None:
    x = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))
    stored = write_features(tmp_path_factory.mktemp("any") / "features", x.numpy(), chunk_rows=chunk_rows)
    assert_direct(stored, x)
    stored.verify()


def test_an_array_on_disk_is_read_by_chunks(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X.numpy())
    assert_direct(write_features(tmp_path / "features", np.load(tmp_path / "x.npy", mmap_mode="r"), chunk_rows=4), X)
    rows = Rows(X)
    write_features(tmp_path / "others", rows, chunk_rows=10)
    assert rows.read == [(0, 1), (0, 10), (10, 20), (20, 23)], "the first row tells the type"


def test_files_take_a_quarter_of_fp32(tmp_path: Path) -> None:
    write_features(tmp_path / "features", torch.randn(1000, 256))
    size = sum(path.stat().st_size for path in (tmp_path / "features").iterdir())
    assert size < 0.256 * 4 * 256 * 1000  # the scale of a row, and headers


def test_an_interrupted_call_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "features"
    with pytest.raises(KeyboardInterrupt):
        write_features(path, Rows(X, fails_at=14), chunk_rows=5)
    assert not path.exists()
    codes = np.load(tmp_path / "features.part/codes.npy", mmap_mode="r+")
    codes[10:15] = 99  # half of a chunk that was being written
    codes.flush()
    rows = Rows(X)
    stored = write_features(path, rows, chunk_rows=5)
    assert rows.read == [(0, 1), (0, 5), (10, 15), (15, 20), (20, 23)], "the first chunk is compared"
    assert_direct(stored, X)
    stored.verify()


DIES = """
import os, signal, sys
import torch
from qgnn.data import write_features

class Rows:
    x = torch.load(sys.argv[1])
    shape = x.shape

    def __getitem__(self, where):
        if where.start == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.x[where]

write_features(sys.argv[2], Rows(), chunk_rows=5)
"""


def test_a_killed_process_loses_no_chunk_and_no_lock(tmp_path: Path) -> None:
    torch.save(X, tmp_path / "x.pt")
    ended = subprocess.run([sys.executable, "-c", DIES, tmp_path / "x.pt", tmp_path / "features"], check=False)
    assert ended.returncode == -signal.SIGKILL
    rows = Rows(X)
    assert_direct(write_features(tmp_path / "features", rows, chunk_rows=5), X)
    assert rows.read == [(0, 1), (0, 5), (10, 15), (15, 20), (20, 23)]


def test_an_interrupted_call_before_the_first_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the files are made there is no description of them: they are made anew."""
    with monkeypatch.context() as patch:
        patch.setattr(module.json, "dumps", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write_features(tmp_path / "features", X)
    assert_direct(write_features(tmp_path / "features", X), X)


def test_other_features_do_not_go_on(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_features(tmp_path / "features", Rows(X, fails_at=14), chunk_rows=5)
    with pytest.raises(
        ValueError, match=r"features\.part' is of other features \(these have shape \[23, 3\], not \[23, 7"
    ):
        write_features(tmp_path / "features", X[:, :3], chunk_rows=5)
    with pytest.raises(ValueError, match="these have chunk_rows 6, not 5, dtype float16, not float32"):
        write_features(tmp_path / "features", X.half(), chunk_rows=6)
    with pytest.raises(ValueError, match=r"is of other features \(rows 0 to 4 differ\); delete it to begin anew"):
        write_features(tmp_path / "features", -X, chunk_rows=5)


def test_bytes_in_the_other_order(tmp_path: Path) -> None:
    assert_direct(write_features(tmp_path / "features", X.numpy().astype(">f4"), chunk_rows=5), X)


class Careless:
    """Gives one row, whatever is asked for."""

    shape = (20, 7)

    def __getitem__(self, where: slice) -> np.ndarray:
        return X[:1].numpy()


def test_a_source_that_gives_other_rows_than_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"should give 5 rows for slice\(0, 5, None\) \(got \(1, 7\)\)"):
        write_features(tmp_path / "features", Careless(), chunk_rows=5)


def test_a_full_disk_is_found_before_the_first_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    rows = Rows(X)
    monkeypatch.setattr(module.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        write_features(tmp_path / "features", rows, chunk_rows=5)
    assert rows.read == [(0, 1)]


def test_a_name_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    class Racing(Rows):
        def __getitem__(self, where: slice) -> np.ndarray:
            (tmp_path / "features").mkdir(exist_ok=True)
            (tmp_path / "features/mine").touch()
            return super().__getitem__(where)

    with pytest.raises(FileExistsError, match="was made meanwhile; the features are in"):
        write_features(tmp_path / "features", Racing(X))
    assert (tmp_path / "features/mine").exists()


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    part = tmp_path / "features.part"
    with module._locked(part), pytest.raises(FeatureFileError, match="another process is writing"):
        write_features(tmp_path / "features", X)
    assert_direct(write_features(tmp_path / "features", X), X)


def test_what_exists_is_not_overwritten(tmp_path: Path) -> None:
    write_features(tmp_path / "features", X)
    with pytest.raises(FileExistsError, match="features' exists; give another name"):
        write_features(tmp_path / "features", X)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (X[0], ValueError, r"a matrix \[N, F\] \(got Tensor of shape torch.Size\(\[7\]\)\)"),
        ([[1.0]], ValueError, r"a matrix \[N, F\] \(got list of shape None\)"),
        (X.int(), TypeError, r"floating-point numbers \(got torch.int32\); convert them, as .float\(\) does"),
        (
            torch.cat([X, X[:1] * torch.nan]),
            ValueError,
            r"\(row 23 holds an infinity, NaN or larger number\); replace",
        ),
        (torch.cat([X[:6], X[:1] * torch.inf, X]), ValueError, r"\(row 6 holds an infinity, NaN"),
    ],
)
def test_rows_that_cannot_be_quantized(tmp_path: Path, rows: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        write_features(tmp_path / "features", rows, chunk_rows=5)
    assert not (tmp_path / "features").exists()


def test_chunks_have_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'chunk_rows' of at least 1 \(got 0\)"):
        write_features(tmp_path / "features", X, chunk_rows=0)


def _describe(folder: Path, **fields: Any) -> None:
    path = folder / "features.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _unwritten(path: Path) -> None:
    checksums = np.load(path)
    checksums[1, 1] = 0
    np.save(path, checksums)


def _promise(folder: Path, num_rows: int) -> None:
    """Codes of so many rows, of which there are none."""
    with (folder / "codes.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "|i1", "fortran_order": False, "shape": (num_rows, X.shape[1])}
        )
    _describe(folder, shape=[num_rows, X.shape[1]])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "features.json").unlink(), "is no folder of features: there is no features.json in it"),
        (lambda f: _cut(f / "features.json"), "features.json' cannot be read"),
        (lambda f: (f / "features.json").write_text("[]"), "does not describe qgnn int8 features"),
        (lambda f: _describe(f, kind="images"), "does not describe qgnn int8 features"),
        (lambda f: _describe(f, version=2), r"of version 2, which this qgnn does not read \(it reads 1\)"),
        (lambda f: _describe(f, version="a\nb"), r"of version 'a\\nb', which this qgnn does not read"),
        (lambda f: _describe(f, shape=[23, -7]), r"no sizes that could be \(\[23, -7, 5\]\)"),
        (lambda f: _describe(f, shape="all"), r"no sizes that could be"),
        (lambda f: _describe(f, chunk_rows=0), r"no sizes that could be"),
        (lambda f: _describe(f, dtype="int8"), r"no floating-point type \('int8'\)"),
        (lambda f: _describe(f, shape=[23, 8]), r"codes.npy' holds \|i1 \(23, 7\) in \d+ bytes, not \|i1 \(23, 8\)"),
        (lambda f: _describe(f, chunk_rows=6), "checksums.npy' holds"),
        (lambda f: _describe(f, dtype=["float32"]), r"no floating-point type \(\['float32'\]\)"),
        (lambda f: (f / "features.json").write_text("[" * 100_000), "features.json' cannot be read"),
        (lambda f: np.save(f / "codes.npy", np.zeros((7, 23), "i1").T), r"holds \|i1 \(23, 7\) by columns in"),
        *((lambda f, n=n: _promise(f, n), "codes.npy' is missing or not whole") for n in (2**40, 2**62, 10**30)),
        (lambda f: (f / "codes.npy").write_bytes(b"\x93NUMPY\1\0\x10\0{'shape': (\n" + b" " * 9), "not whole"),
        (lambda f: _cut(f / "codes.npy"), "codes.npy' is missing or not whole"),
        (lambda f: _extend(f / "codes.npy"), "codes.npy' holds"),
        (lambda f: (f / "scales.npy").unlink(), "scales.npy' is missing or not whole"),
        (lambda f: (f / "scales.npy").write_bytes(b""), "scales.npy' is missing or not whole"),
        (lambda f: np.save(f / "scales.npy", np.zeros((23, 1))), r"scales.npy' holds <f8 \(23, 1\)"),
        (lambda f: (f / "codes.npy").write_bytes(b"PK\3\4" + bytes(500)), "codes.npy' is missing or not whole"),
        (lambda f: np.save(f / "codes.npy", np.array([{}]), allow_pickle=True), "codes.npy' is missing or not whole"),
        (lambda f: _unwritten(f / "checksums.npy"), "lacks some of its rows"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, spoil: Any, message: str) -> None:
    folder = tmp_path / "features"
    write_features(folder, X, chunk_rows=5)
    spoil(folder)
    with pytest.raises(FeatureFileError, match=message) as raised:
        StoredFeatures(folder)
    assert "\n" not in str(raised.value)


@settings(max_examples=30)
@given(st.integers(0, 2**63))
def test_whatever_is_damaged_is_refused_or_what_was_written(seed: int) -> None:
    soak_files.features(Draw(seed))


@pytest.mark.parametrize("name", ["codes", "scales"])
def test_verify_finds_a_changed_byte(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "features"
    write_features(folder, X, chunk_rows=5)
    array = np.load(folder / f"{name}.npy")
    array[12, 0] += 1
    np.save(folder / f"{name}.npy", array)
    stored = StoredFeatures(folder)
    with pytest.raises(FeatureFileError, match=r"rows 10 to 14 in .* are not what was written"):
        stored.verify()


def test_writing_to_rows_changes_no_file(tmp_path: Path) -> None:
    stored = write_features(tmp_path / "features", X)
    stored.rows.codes.zero_()
    assert_direct(StoredFeatures(tmp_path / "features"), X)


def test_another_process_maps_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stored = write_features("features", X)
    content = pickle.dumps(stored)
    assert len(content) < 300, "a name, not the rows"
    monkeypatch.chdir("/")
    assert_direct(pickle.loads(content), X)
    assert str(tmp_path) in repr(stored)
