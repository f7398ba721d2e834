"""A fixture for the tests of layers and models."""

from collections.abc import Iterator

import torch


def one_thread() -> Iterator[None]:
    """Graphs here are tiny: a second thread only waits for the first, at several times the cost on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
