"""Autocast: everything here computes in the types that it documents, whatever autocast would make of torch's calls."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Where autocast is off."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
