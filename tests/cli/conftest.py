"""A tiny data set in place of the real ones, so that a whole command takes a second."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch_geometric.data import Data

from cli_processes import TRAIN, tiny_graph
from qgnn.cli import main
from qgnn.cli import train as train_module


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Data:
    """What every data set name stands for in this test: 271 nodes of seven classes."""
    data = tiny_graph()
    monkeypatch.setattr(train_module, "load", lambda name, root: data.clone())
    return data


@pytest.fixture
def qgnn_train(tiny: Data) -> Callable[..., int]:
    """``qgnn train`` in this process, on the tiny data set and the CPU."""

    def run(*arguments: str) -> int:
        return main([*TRAIN, *arguments])

    return run


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Graphs this small only lose by a second thread, and by far where other work runs beside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
