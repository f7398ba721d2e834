"""A library that compiles in no time, and C compilers with faults."""

import ctypes
import shlex
from pathlib import Path

from qgnn.kernels.cpu import build

_REAL = shlex.join(build.compiler())

# *team becomes the number of threads that worked: 1 without OpenMP.
PROBE = """
#include "common.h"
EXPORT void qgnn_probe_team(int64_t *team, int64_t threads) {
    int64_t found = 0;
#pragma omp parallel num_threads(threads)
#pragma omp atomic
    found++;
    *team = found;
}
EXPORT void qgnn_probe_arguments(double *out, const float *x, int64_t i, float f, int64_t threads) {
    out[0] = x ? x[0] : -1;
    out[1] = (double)i;
    out[2] = f;
    out[3] = (double)threads;
}
"""


class Place:
    """A machine of its own: sources, cache folder and temporary folder below ``root``."""

    def __init__(self, root: Path) -> None:
        self.root, self.cache, self.temporary = root, root / "cache", root / "tmp"
        self.sources = write_sources(root / "sources")
        self.temporary.mkdir()

    def libraries(self) -> list[Path]:
        return sorted(self.cache.glob("kernels-*.so"))


def write_sources(folder: Path) -> Path:
    """A small set of sources, in place of those of the kernels."""
    folder.mkdir(parents=True)
    (folder / "common.h").write_text((build.SOURCES / "common.h").read_text())
    (folder / "probe.c").write_text(PROBE)
    return folder


def write_compiler(path: Path, faults: str = "") -> Path:
    """A script that notes each of its calls in ``<path>.log``, runs the shell commands ``faults``, then compiles."""
    path.write_text(f'#!/bin/sh\necho "$*" >> "$0.log"\n{faults}\nexec {_REAL} "$@"\n')
    path.chmod(0o700)
    return path


def calls(compiler: Path) -> int:
    """How often the script was told to compile a file."""
    log = Path(f"{compiler}.log")
    return sum(" -c " in line for line in log.read_text().splitlines()) if log.exists() else 0


def rejecting(*flags: str) -> str:
    """Faults of a compiler that does not know ``flags``."""
    patterns = "|".join(f'*" {flag} "*' for flag in flags)
    return f'case " $* " in {patterns}) echo "unknown option" >&2; exit 1;; esac'


def team(library: ctypes.CDLL, threads: int = 2) -> int:
    """Threads that work in a library made from :func:`write_sources`."""
    found = ctypes.c_int64(0)
    library.qgnn_probe_team(ctypes.byref(found), ctypes.c_int64(threads))
    return found.value


def folder_of(library: ctypes.CDLL) -> Path:
    return Path(library._name).parent
