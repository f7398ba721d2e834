"""Calling the compiled library: what crosses the border to C, threads, forks, and machines without a compiler."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from qgnn.kernels.cpu import build, library

from compilers import Place
from prototypes import Prototype, broken_rules, misfits, prototypes
from qgnn import rng

# ---- what the sources declare ----


def test_exported_functions_take_what_the_library_passes() -> None:
    found = prototypes(build.SOURCES)
    inner = {"attention_shared"}  # functions for other files alone
    assert {prototype.file for prototype in found.values()} == {p.stem for p in build.SOURCES.glob("*.c")} - inner
    assert [rule for prototype in found.values() for rule in broken_rules(prototype)] == []


def test_broken_rules_are_found(tmp_path: Path) -> None:
    (tmp_path / "spmm.c").write_text(
        "EXPORT void qgnn_spmm(const float *x, int64_t N, float f,\n    int64_t threads) {\n}\n"
        "EXPORT int qgnn_spmm_a(int64_t threads) {\n}\nEXPORT void qgnn_spmm_b(int n, double d, int64_t threads) {\n}\n"
        "EXPORT void qgnn_sum(float *x, int64_t num_threads) {\n}\n"
    )
    assert [rule for prototype in prototypes(tmp_path).values() for rule in broken_rules(prototype)] == [
        "qgnn_spmm_a returns int",
        "qgnn_spmm_b takes the int n",
        "qgnn_spmm_b takes the double d",
        "qgnn_sum is not named after spmm.c",
        "qgnn_sum does not end with 'int64_t threads'",
    ]


def test_misfits_are_found() -> None:
    pointers = [("float *", "x"), ("void *", "index"), ("int64_t", "n"), ("float", "f"), ("int64_t", "threads")]
    prototype = Prototype("a", "qgnn_a", "void", pointers)
    x = torch.ones(2)
    assert misfits(prototype, (x, x, 1, 2.0)) == misfits(prototype, (None, None, True, 2.0)) == []
    assert misfits(prototype, (x.double(), 0, 1.0, 2)) == [
        "qgnn_a takes x as float * (got torch.float64)",
        "qgnn_a takes index as void * (got 0)",
        "qgnn_a takes n as int64_t (got 1.0)",
        "qgnn_a takes f as float (got 2)",
    ]
    assert misfits(prototype, (x,)) == ["qgnn_a takes 4 arguments (got 1)"]


def test_each_exported_function_is_launched_and_each_launched_one_exported() -> None:
    launched = {name for path in build.SOURCES.glob("*.py") for name in re.findall(r'"(qgnn_\w+)"', path.read_text())}
    assert launched == set(prototypes(build.SOURCES))
    assert all(hasattr(library._load(), name) for name in launched)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("", ("-fopenmp",)),
        ("", ("-fsyntax-only",)),  # without OpenMP
        ("clang", ("-fopenmp", "-fsyntax-only")),
        ("clang", ("-O1",)),
    ],
)
def test_compilers_give_no_warnings(tmp_path: Path, name: str, flags: tuple[str, ...]) -> None:
    if name and not shutil.which(name):
        pytest.skip(f"{name} is not installed")
    command, deadline = [name] if name else build.compiler(), time.monotonic() + build.TIMEOUT_S
    build.compile_objects(command, ("-Werror", *flags), tmp_path, deadline)


# ---- calls ----


@pytest.fixture
def small_library(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process, with a small library."""
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setattr(library, "_not_kept", None)
    monkeypatch.setattr(library, "_functions", {})


@pytest.mark.parametrize("value", [0, -1, 2**31, -(2**52), True])
def test_arguments_arrive_as_they_are(small_library: None, threads: int, value: int) -> None:
    out = torch.empty(4, dtype=torch.float64)
    library.launch("qgnn_probe_arguments", out, torch.tensor([7.5]), value, 0.1)
    assert out.tolist() == [7.5, float(value), torch.tensor(0.1).item(), float(threads)]
    library.launch("qgnn_probe_arguments", out, None, value, -0.0)
    assert out[0] == -1
    library.launch("qgnn_probe_arguments", out, torch.tensor([2.5]), value, 1)  # what the first call made a float
    assert out.tolist() == [2.5, float(value), 1.0, float(threads)]
    with pytest.raises(ctypes.ArgumentError):
        library.launch("qgnn_probe_arguments", out, None, 0.5, 1.0)


def test_a_function_that_is_not_there(small_library: None) -> None:
    with pytest.raises(AttributeError, match="qgnn_nothing"):
        library.launch("qgnn_nothing")


@pytest.mark.parametrize("stream", [0, 1, 2, 3, 1 << 20])
def test_streams_are_those_of_the_seeds(stream: int) -> None:
    assert library.stream_key(stream) == rng.stream_key(stream)


def test_rows_are_copied_only_if_need_be() -> None:
    x = torch.randn(6, 8, requires_grad=True)
    for kept in (x, x[:, 2:5], x[::2], x[:, 3:4], x[:1].expand(4, 8), x[:0]):
        rows = library.rows_of(kept, torch.float32)
        assert rows.data_ptr() == kept.data_ptr()
        assert not rows.requires_grad
    for copied in (x.t(), x[:, ::2], x[:, :1].expand(6, 8), x.double(), x.half()):
        rows = library.rows_of(copied, torch.float32)
        assert rows.stride(1) == 1
        assert torch.equal(rows, copied.float())


@pytest.mark.parametrize("shape", [(0, 4), (3, 5), (4097, 2049), (1 << 23, 3)])
def test_codes_are_as_torch_makes_them(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones lie on huge pages: the advice is about whole pages within them."""
    advice: list[tuple[int, int]] = []
    monkeypatch.setattr(library, "_madvise", lambda start, size, _: advice.append((start.value, size.value)))
    x = library.empty_codes(*shape)
    assert (x.shape, x.dtype, x.is_contiguous()) == (shape, torch.int8, True)
    assert len(advice) == (x.nbytes >= 1 << 23)
    for start, size in advice:
        assert start % (1 << 21) == size % (1 << 21) == 0
        assert x.data_ptr() <= start
        assert start + size <= x.data_ptr() + x.nbytes
        assert size > x.nbytes - (1 << 22)


def test_two_threads_load_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, start, compiled = [], Barrier(2), library._library
    monkeypatch.setattr(build, "load", lambda: loads.append(1) or build.Loaded(compiled, None))
    monkeypatch.setattr(library, "_library", None)

    def ask() -> str | None:
        start.wait(timeout=60)
        return library.unavailable()

    with ThreadPoolExecutor(2) as pool:
        assert [future.result(timeout=60) for future in [pool.submit(ask), pool.submit(ask)]] == [None, None]
    assert loads == [1]


def test_a_failure_is_told_once_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def fail() -> None:
        tries.append(1)
        raise build.BuildError("no compiler today")

    monkeypatch.setattr(build, "load", fail)
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setattr(library, "_functions", {})
    monkeypatch.setattr(library, "_failure", None)
    with pytest.warns(RuntimeWarning, match="plain PyTorch, which is slower .*: no compiler today$") as warned:
        assert library.unavailable() == library.unavailable() == "no compiler today"
    assert len(warned) == 1
    with pytest.raises(build.BuildError, match="no compiler today"):
        library.launch("qgnn_quantize_tensor")
    assert tries == [1]


def test_a_replaced_openmp_library_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an upgrade under a running process: the file that was loaded is gone."""
    monkeypatch.setattr(build, "loaded_libraries", lambda *names: [Path("/gone/libgomp.so.1 (deleted)")])
    library._share_openmp()


# ---- a cache folder that cannot be used ----


def test_a_library_that_is_kept_needs_no_warning(small_library: None) -> None:
    assert library.unavailable() is None
    assert library.not_kept() is None


def test_a_library_that_cannot_be_kept_is_warned_of_once(small_library: None, place: Place) -> None:
    place.cache.mkdir()
    place.cache.chmod(0o775)
    reason = f"others can write to {place.cache} (to end that: chmod go-w {place.cache})"
    advice = "repair this, or set QGNN_CACHE_DIR to a folder that you alone can write to"
    message = f"each process compiles qgnn's CPU kernels anew, as they cannot be kept: {reason}; {advice}"
    with pytest.warns(RuntimeWarning, match=f"^{re.escape(message)}$") as caught:
        assert library.unavailable() is None
    assert len(caught) == 1
    library.launch("qgnn_probe_arguments", torch.empty(4, dtype=torch.float64), None, 1, 0.5)  # warnings are errors
    assert library.unavailable() is None
    assert library.not_kept() == reason


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_stops_only_the_first_call(small_library: None, place: Place) -> None:
    place.cache.write_text("")
    with pytest.raises(RuntimeWarning, match=r"cannot be kept: .*File exists"):
        library.launch("qgnn_nothing")
    assert library.unavailable() is None


def test_who_shows_a_warning_may_call_a_kernel(
    small_library: None, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.cache.write_text("")
    locked = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda *args: locked.append(library._lock.locked()))
        assert library.unavailable() is None
    assert locked == [False]


# ---- processes ----


def run_python(code: str, **variables: str) -> dict:
    """What a fresh interpreter prints, which must end in time."""
    environment = {**os.environ, **variables}
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


FORKS = """
import hashlib, json, os, signal, torch, qgnn
from qgnn.kernels.cpu import library
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(2)
x = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0))  # work for several threads
edges = torch.randint(2000, (2, 9000), generator=torch.Generator().manual_seed(0))

def work():  # without torch's own loops: those do wait for the parent's threads
    codes = qgnn.functional.quantize(x, qgnn.QConfig(), seed=1).codes
    out = qgnn.functional.spmm(edges, x, config=qgnn.QConfig(), seed=1)
    return hashlib.sha256(codes.numpy().tobytes() + out.numpy().tobytes()).hexdigest()

class Rows(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return work()

expected = work()
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(120)  # a child that waits for threads it does not have would wait forever
    os.write(writer, json.dumps([work(), library.num_threads()]).encode())
    os._exit(0)
status = os.waitpid(child, 0)[1]
os.close(writer)
in_child = json.loads(os.read(reader, 1000)) if status == 0 else None
loaded = list(DataLoader(Rows(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=300))
print(json.dumps({"expected": expected, "status": status, "in_child": in_child, "loaded": loaded,
                  "threads": library.num_threads(), "after": work()}))
"""


def test_forked_processes_work_alone() -> None:
    result = run_python(FORKS)
    assert result["status"] == 0
    assert result["in_child"] == [result["expected"], 1]
    assert result["loaded"] == [result["expected"]] * 4
    assert result["after"] == result["expected"]
    assert result["threads"] == 2


WARNS = """
import os, sys, warnings
from pathlib import Path
from qgnn.kernels.cpu import build, library

build.SOURCES = Path(os.environ["SOURCES"])
warnings.simplefilter("always")
assert library.unavailable() is None
child = os.fork()
assert library.unavailable() is None
assert library.not_kept() is not None
if child == 0:
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_does_not_warn_again(place: Place) -> None:
    place.cache.write_text("")
    environment = {**os.environ, "SOURCES": str(place.sources), "TMPDIR": str(place.temporary)}
    result = subprocess.run([sys.executable, "-c", WARNS], env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stderr.count("RuntimeWarning: each process compiles qgnn's CPU kernels anew") == 1


WORK = """
import json, os, torch, qgnn
from qgnn import cli
from qgnn.kernels.cpu import library

x, weight = (torch.randn(*shape, generator=torch.Generator().manual_seed(1)) for shape in ((40, 33), (9, 33)))
edges = torch.randint(40, (2, 100), generator=torch.Generator().manual_seed(1))
with qgnn.trace(error=False) as record:
    q = qgnn.functional.quantize(x, qgnn.QConfig(), seed=1)
    out = qgnn.functional.graph_linear(edges, x, weight, config=qgnn.QConfig(), seed=1)
cli.main(["info", "--json", os.environ["INFO"]])
print()
print(json.dumps({"reason": library.unavailable(), "codes": q.codes.tolist(), "scale": q.scale.tolist(),
                  "out": out.tolist(), "backends": sorted({op["backend"] for op in record.ops.values()})}))
"""


def test_without_a_compiler_torch_does_the_same(tmp_path: Path) -> None:
    variables = {"INFO": str(tmp_path / "info.json")}
    native = run_python(WORK, **variables)
    plain = run_python(WORK, **variables, CC="/nonexistent/cc", QGNN_CACHE_DIR=str(tmp_path / "cache"))
    reason = "no C compiler: found no program /nonexistent/cc; install one, or set CC"
    assert native["reason"] is None
    assert plain["reason"] == reason
    assert "c" in native["backends"]
    assert plain["backends"] == ["torch"]
    assert plain["codes"] == native["codes"]
    assert plain["scale"] == native["scale"]
    torch.testing.assert_close(torch.tensor(plain["out"]), torch.tensor(native["out"]))
    ops = json.loads((tmp_path / "info.json").read_text())["ops"]
    assert {op["cpu"]["backend"] for op in ops.values()} == {"torch"}
    assert {op["cpu"]["why"] for op in ops.values()} == {f"plain PyTorch: {reason}"}
