"""What a number belongs to: the machine, the commit, the versions, the time."""

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

CODE = ("kernels", "qgnn", "bench")
ROOT = Path(__file__).resolve().parents[2]  # of the checkout, where the package runs from one
PACKAGES = ("qgnn", "torch", "torch_geometric", "triton", "numpy")


@dataclass(frozen=True)
class Stamp:
    """What the results of one process share.

    Args:
        device: The machine, in words.
        commit: That of the checkout, ``None`` where there is none.
        dirty: Whether the code differs from the commit, ``None`` where that is not known.
        versions: Those of Python and of the packages.
    """

    device: str
    commit: str | None
    dirty: bool | None
    versions: dict[str, str | None]

    @property
    def machine(self) -> str:
        """The device's name as a folder's name."""
        return re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")

    def until(self, end: "Stamp") -> "Stamp":
        """This stamp for work that ended under another one: what changed in between makes the code a modified one."""
        return self if end == self else Stamp(self.device, self.commit, True, self.versions)


def make_stamp(device: torch.device) -> Stamp:
    """The stamp of this process as things are now."""
    return Stamp(device_name(device), *commit(), versions())


def now() -> str:
    """The time in UTC, as ISO 8601 writes it."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def cpu_name() -> str:
    """The model of the processor, as the system tells it: with numbers, since virtual machines shorten the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        first = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
        numbers = f" (family {first['cpu family']}, model {first['model']})" if "cpu family" in first else ""
        return first["model name"] + numbers
    except (OSError, KeyError):
        return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str | None]:
    """The version of Python and of each package, ``None`` for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    found["torch"] = str(torch.__version__)  # with the build
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def _git(*arguments: str) -> str | None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # as of a hook
    try:
        result = subprocess.run(["git", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    except OSError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def commit() -> tuple[str | None, bool | None]:
    """The checkout's commit, and whether its code differs from it, ``None`` where git does not tell.

    New files count where code is: results may be written anywhere else. A copy without git may be told by QGNN_COMMIT.

    An installed package has no commit, even where some other project's checkout surrounds it.
    """
    if (root := _git("rev-parse", "--show-toplevel")) and Path(root) == ROOT and (head := _git("rev-parse", "HEAD")):
        changes = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
        added = _git("ls-files", "--others", "--exclude-standard", "--", *CODE, ":!bench/results")
        return head, None if changes is None or added is None else bool(changes or added)
    told, modified, _ = os.environ.get("QGNN_COMMIT", "").partition("+")
    return (told, bool(modified)) if told else (None, None)
