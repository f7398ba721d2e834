"""The suites: each declares its cases and providers, and times nothing itself."""

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..harness import Case
    from .inputs import Setting

# In order of importance: under a time budget the last ones may be left out. `device` stands apart: it measures the
# machine, for the others to be seen against, and comes first where they are.
SUITES = (
    *("train", "layer", "attention", "sampled", "spmm", "matmul", "sddmm", "softmax", "activation", "quantize"),
    *(
        "blocks",
        "codes",
        "update",
        "optimizer",
        "memory",
        "overhead",
        "scale",
        "distributed",
        "blocksize",
        "accuracy",
        "distribution",
    ),
    *("threshold", "device"),
)


def cases(suite: str, setting: "Setting") -> "Iterator[Case]":
    """The cases of a suite; its module, and with it PyG and qgnn, is imported here."""
    return import_module(f".{suite}", __name__).cases(setting)
