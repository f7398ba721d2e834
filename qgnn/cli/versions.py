"""Versions of what a result depends on."""

import platform
from importlib import metadata

PACKAGES = ("qgnn", "torch", "torch_geometric", "triton", "numpy")


def versions() -> dict[str, str | None]:
    """The version of Python and of each package, ``None`` for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found
