"""What the tests of the native kernels share. None is skipped: they need a C compiler, and say so if there is none."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from qgnn.kernels.cpu import build, library

from compilers import Place, write_compiler


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Compiles the kernels once, before the clock of any test runs."""
    assert library.unavailable() is None, library.unavailable()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Most operands here are tiny: a second thread only waits for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2], ids=["one_thread", "two_threads"])
def threads(request: pytest.FixtureRequest, _one_thread: None) -> int:
    """The number of threads that kernels are given."""
    torch.set_num_threads(request.param)
    return request.param


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A machine where nothing is compiled yet, and where a small library stands for the kernels."""
    place = Place(tmp_path)
    monkeypatch.setattr(build, "SOURCES", place.sources)
    monkeypatch.setattr(tempfile, "tempdir", str(place.temporary))
    monkeypatch.setenv("QGNN_CACHE_DIR", str(place.cache))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("CC", raising=False)
    return place


@pytest.fixture
def compiler(place: Place, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes ``CC`` a compiler with the given faults."""

    def make(faults: str = "") -> Path:
        path = write_compiler(place.root / "compiler", faults)
        monkeypatch.setenv("CC", str(path))
        return path

    return make
