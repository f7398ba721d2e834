"""Records: one JSON line a measurement, with the commit, the machine and the versions that it belongs to."""

import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"

FIELDS = (
    *("suite", "case", "provider", "pass", "median_ms", "p20_ms", "p80_ms", "peak_mib", "saved_mib", "bytes"),
    *("error", "ok", "device", "commit", "dirty", "versions", "utc"),
)

Record = dict[str, Any]


@dataclass(frozen=True)
class Stamp:
    """What all records of one process share."""

    device: str
    commit: str | None
    dirty: bool | None
    versions: dict[str, str]

    @property
    def machine(self) -> str:
        """The device's name as a folder's name."""
        return re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def make_stamp(device: torch.device) -> Stamp:
    return Stamp(_device_name(device), *_commit(), _versions())


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (match := re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)):
        name = match[1].strip()
    return f"{name}, {torch.get_num_threads()} threads"


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _commit() -> tuple[str | None, bool | None]:
    """The checkout's commit, and whether its code differs from it; a copy without git may be told by QGNN_COMMIT."""
    if (root := _git("rev-parse", "--show-toplevel")) and Path(root) == ROOT and (commit := _git("rev-parse", "HEAD")):
        return commit, bool(_git("status", "--porcelain", "--", ".", ":!bench/results"))
    commit, modified, _ = os.environ.get("QGNN_COMMIT", "").partition("+")
    return (commit, bool(modified)) if commit else (None, None)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("qgnn", "torch", "torch_geometric", "triton", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "absent" if package != "qgnn" else "source"
    versions["torch"] = torch.__version__
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def make_record(stamp: Stamp, utc: str, **values: Any) -> Record:
    """A record with every field, in order; a number that is not finite becomes null."""
    values |= {"device": stamp.device, "commit": stamp.commit, "dirty": stamp.dirty}
    values |= {"versions": stamp.versions, "utc": utc}
    if set(values) != set(FIELDS):
        raise ValueError(f"a record has the fields {FIELDS} (got {tuple(values)})")

    def clean(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.6g}") if math.isfinite(value) else None
        return value

    return {field: clean(values[field]) for field in FIELDS}


def append(path: Path, records: Iterable[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def read(results: Path) -> Iterator[tuple[str, Record]]:
    """Every record under ``results``, with the machine it was made on."""
    for path in sorted(results.glob("*/*.jsonl")):
        for line in path.read_text().splitlines():
            yield path.parent.name, json.loads(line)
