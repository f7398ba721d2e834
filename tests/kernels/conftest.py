"""Every test of this folder runs with poisoned allocations: an element that a kernel fails to write shows."""

from typing import Any

import pytest
import torch

_UNWRITTEN_CODE = -128  # no code of any width has this value


@pytest.fixture(autouse=True)
def _poisoned_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def poisoned_empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = empty(*args, **kwargs)
        return x.fill_(float("nan") if x.is_floating_point() else _UNWRITTEN_CODE)

    monkeypatch.setattr(torch, "empty", poisoned_empty)
