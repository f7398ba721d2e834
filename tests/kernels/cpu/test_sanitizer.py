"""No launcher makes a kernel read or write outside its operands, or do what C leaves undefined."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from qgnn.kernels.cpu import build

import prototypes

FLAGS = ("-fopenmp", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g")
TESTS = Path(__file__).resolve().parents[2]
PLANTED = {
    "heap-buffer-overflow": ("quantize.c", "scale[n * groups + g] =", "scale[(n + 1) * groups + g] ="),
    "runtime error: shift exponent": ("common.h", "return (rounding){seed", "qmax <<= qmax; return (rounding){seed"),
}


@pytest.fixture(scope="module")
def runtime() -> Path:
    """The sanitizer's library, which the interpreter has to load first."""
    command = [*build.compiler(), "-print-file-name=libasan.so"]
    path = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    if not path.is_absolute():
        pytest.skip(f"{shlex.join(build.compiler())} has no address sanitizer")
    return path


def run(runtime: Path, sources: Path, folder: Path) -> subprocess.CompletedProcess:
    """Compiles ``sources`` with sanitizers and runs sanitize.py on the result."""
    out = folder / "sanitized.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCES", sources)
        build.compile_library(build.compiler(), FLAGS, out)
    options = {"LD_PRELOAD": str(runtime), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "2"}
    environment = {**os.environ, "PYTHONPATH": str(TESTS), **options}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("sanitize.py")), str(out), str(sources)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_launchers_stay_inside_their_operands(runtime: Path, tmp_path: Path) -> None:
    result = run(runtime, build.SOURCES, tmp_path)
    assert result.returncode == 0, result.stderr[-5000:]
    assert json.loads(result.stdout) == sorted(prototypes.prototypes(build.SOURCES))  # each function was called


@pytest.mark.parametrize("message", PLANTED)
def test_a_planted_fault_is_found(runtime: Path, tmp_path: Path, message: str) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in ("common.h", "epilogue.h", "exp.h", "narrow.h", "activation.c", "quantize.c"):
        shutil.copy(build.SOURCES / name, sources)
    file, before, after = PLANTED[message]
    text = (sources / file).read_text()
    assert before in text
    (sources / file).write_text(text.replace(before, after))
    result = run(runtime, sources, tmp_path)
    assert result.returncode != 0
    assert message in result.stderr
