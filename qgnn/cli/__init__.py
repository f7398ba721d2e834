"""The command line: ``qgnn train``, ``qgnn sweep`` and ``qgnn info``, also as ``python -m qgnn.cli``."""

from qgnn.cli.app import main

__all__ = ["main"]
