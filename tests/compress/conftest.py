"""The model and the rows of the tests of the compressor."""

import pytest
import torch
from torch import Tensor

from compress_cases import K, N, Net


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, K)
