"""Records of the benchmark suites made by hand, and what the tables say of them."""

import importlib
import sys
from pathlib import Path

from house import ROOT
from qgnn.cli.provenance import Stamp

sys.path.append(str(ROOT))  # bench is not installed; last, so that an installed qgnn is found first
records = importlib.import_module("bench.records")

STAMP = Stamp("Some CPU, 2 threads", "0" * 40, False, {})


def write(results: Path, suite: str, case: str, provider: str, ms: float = 1.0, **changes: object) -> None:
    """A record of a step."""
    fields = {"suite": suite, "case": case, "provider": provider, "pass": "step", "median_ms": ms, "p20_ms": ms}
    fields |= {"p80_ms": ms, "peak_mib": None, "saved_mib": None, "bytes": None, "error": 0.0, "ok": True}
    record = {**records.make_record(STAMP, "2026-01-02T00:00:00+00:00", **fields), **changes}
    records.append(results / STAMP.machine / f"{suite}.jsonl", [record])


def rows(text: str, *words: str) -> list[list[str]]:
    """The cells of the lines of a table in which all words occur."""
    lines = [line for line in text.splitlines() if line.startswith("|") and all(word in line for word in words)]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
