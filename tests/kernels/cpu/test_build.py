"""Compiling, caching and loading the native kernels on machines that are not as one would wish.

Most tests compile a small library in place of the kernels; how it is built and loaded is the same.
"""

import importlib.util
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from qgnn.kernels.cpu import build

from compilers import Place, calls, folder_of, rejecting, team, write_compiler


def test_the_first_load_compiles_and_later_ones_do_not(place: Place, compiler: Callable[..., Path]) -> None:
    script = compiler()
    first, not_kept = build.load()
    assert not_kept is None
    assert calls(script) == 1
    compiler("exit 1")
    second = build.load().library
    assert calls(script) == 1
    assert first._name == second._name == str(place.libraries()[0])
    assert team(second) >= 1


def test_what_is_made_belongs_to_the_user_alone(place: Place) -> None:
    before = os.umask(0)
    try:
        build.load()
    finally:
        os.umask(before)
    assert stat.S_IMODE(place.cache.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in place.cache.iterdir()] == [0o600]
    assert list(place.temporary.iterdir()) == []


def test_a_kept_library_needs_no_compiler(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    build.load()
    monkeypatch.setenv("PATH", str(place.root / "empty"))
    assert folder_of(build.load().library) == place.cache


@pytest.mark.parametrize("spoil", [lambda b: b[: len(b) // 2], lambda b: b[:-1] + bytes([b[-1] ^ 1]), lambda _: b""])
def test_a_spoiled_library_is_built_again(
    place: Place, compiler: Callable[..., Path], spoil: Callable[[bytes], bytes]
) -> None:
    script = compiler()
    build.load()
    (path,) = place.libraries()
    good = path.read_bytes()
    path.unlink()  # never write into a library that is loaded
    path.write_bytes(spoil(good))
    library = build.load().library
    assert calls(script) == 2
    assert folder_of(library) == place.cache
    assert Path(library._name).stem.endswith(build._digest(Path(library._name).read_bytes()))


def test_leftovers_of_a_killed_build_are_harmless(place: Place) -> None:
    place.cache.mkdir(mode=0o700)
    (place.cache / ".building-abc").write_bytes(b"half a lib")
    (place.cache / f"kernels-{build._key()}-.so").write_bytes(b"")
    (place.cache / f"kernels-{build._key()}-{'0' * 20}.so").write_bytes(b"")
    assert folder_of(build.load().library) == place.cache


CHANGES = {
    "source": lambda m: (build.SOURCES / "probe.c").write_text("int x;"),
    "header": lambda m: (build.SOURCES / "common.h").write_text("int x;"),
    "new source": lambda m: (build.SOURCES / "more.c").write_text(""),
    "name of a source": lambda m: (build.SOURCES / "probe.c").rename(build.SOURCES / "other.c"),
    "flags": lambda m: m.setattr(build, "FLAGS", (*build.FLAGS, "-g")),
    "variants": lambda m: m.setattr(build, "VARIANTS", build.VARIANTS[1:]),
    "compiler": lambda m: m.setenv("CC", "gcc"),
    "cpu": lambda m: m.setattr(build, "_cpu", lambda: "another"),
    "C library": lambda m: m.setattr(build.platform, "libc_ver", lambda: ("glibc", "2.0")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_key_depends_on_what_goes_in(place: Place, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    before = build._key()
    assert build._key() == before
    CHANGES[change](monkeypatch)
    assert build._key() != before


@pytest.mark.parametrize("line", ["model name : B", "flags : sse avx", "Features : asimd", "CPU part : 0xd08"])
def test_the_cpu_is_known_by_what_native_code_depends_on(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: True)

    def described(text: str) -> str:
        monkeypatch.setattr(Path, "read_text", lambda path: text)
        return build._cpu()

    common = "processor : 0\nmodel name : A\nflags : sse\nFeatures : fp\nCPU part : 0xd07\nbogomips : 1.00\n"
    assert described(common) == described(common.replace("1.00", "2.00") + "\nprocessor : 1\n")
    start = line.split(":")[0]
    changed = "\n".join(line if old.startswith(start) else old for old in common.split("\n"))
    assert described(common) != described(changed)


# ---- compilers ----


@pytest.mark.parametrize("name", ["/nonexistent/cc", "no-such-compiler -m64", "'unfinished", "   ", "."])
def test_a_missing_compiler_is_named(place: Place, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("CC", name)
    with pytest.raises(build.BuildError) as error:
        build.load()
    assert str(error.value) == f"no C compiler: found no program {name}; install one, or set CC"


def test_a_machine_without_any_compiler(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(place.root / "empty"))
    with pytest.raises(build.BuildError, match="found no program cc or gcc or clang; install one, or set CC"):
        build.load()


def test_the_compiler_may_be_a_command_or_a_path_with_spaces(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    script = write_compiler(place.root / "my compiler")
    monkeypatch.setenv("CC", str(script))
    assert build.compiler() == [str(script)]
    build.load()
    monkeypatch.setenv("CC", f"'{script}' -DUNUSED")
    assert build.compiler() == [str(script), "-DUNUSED"]
    build.load()
    assert calls(script) == 2
    assert len(place.libraries()) == 2


def test_what_a_failing_compiler_says_is_told(place: Place, compiler: Callable[..., Path]) -> None:
    script = compiler("printf 'no such header \\377' >&2; exit 4")
    with pytest.raises(build.BuildError, match=r"compiler failed: no such header \ufffd\nThe command was: .*compiler"):
        build.load()
    assert calls(script) == len(build.VARIANTS)
    compiler("exit 4")
    with pytest.raises(build.BuildError, match="compiler failed: exit status 4"):
        build.load()
    assert list(place.temporary.iterdir()) == list(place.cache.iterdir()) == []


@pytest.mark.parametrize("missing", [("-fopenmp",), ("-march=native",), ("-march=native", "-fopenmp")])
def test_a_compiler_may_lack_options(place: Place, compiler: Callable[..., Path], missing: tuple[str, ...]) -> None:
    whole = team(build.load().library)
    script = compiler(rejecting(*missing))
    library = build.load().library
    assert team(library) == (1 if "-fopenmp" in missing else whole)
    tried = calls(script)
    assert build.load().library._name == library._name
    assert calls(script) == tried  # what failed once is not tried again by each process


def test_a_compiler_may_know_openmp_and_lack_its_library(place: Place) -> None:
    missing = "#ifdef _OPENMP\nvoid missing(void);\nEXPORT void qgnn_probe_missing(void) { missing(); }\n#endif\n"
    with (place.sources / "probe.c").open("a") as file:
        file.write(missing)
    assert team(build.load().library) == 1


def test_a_compiler_that_hangs_is_given_up(
    place: Place, compiler: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "TIMEOUT_S", 0.5)
    script = compiler("exec sleep 600")
    with pytest.raises(
        build.BuildError, match=r"did not run to its end: timed out after 0.5 seconds\nThe command was: .*probe.c"
    ):
        build.load()
    assert calls(script) == 1  # once, not for each variant and folder


def test_a_compiler_that_is_no_program(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    script = place.root / "compiler"
    script.write_bytes(b"\0\1\2\3")
    script.chmod(0o700)
    monkeypatch.setenv("CC", str(script))
    with pytest.raises(build.BuildError, match=r"did not run to its end: .*Exec format error"):
        build.load()


def test_a_compiler_that_leaves_nothing(place: Place, compiler: Callable[..., Path]) -> None:
    """It is not the folder's fault, so the other folder is not tried."""
    script = compiler("exit 0")
    with pytest.raises(build.BuildError, match=r"compiler gave no library: .*No such file"):
        build.load()
    assert calls(script) == 1


def test_a_library_for_another_machine(place: Place, compiler: Callable[..., Path]) -> None:
    compiler('while [ "$1" != -o ]; do shift; done; echo "not for this machine" > "$2"; exit 0')
    with pytest.raises(build.BuildError, match=r"cannot be kept or loaded: .*; .*"):
        build.load()


def test_systems_that_are_not_posix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.os, "name", "nt")
    monkeypatch.setattr(build.platform, "system", lambda: "Windows")
    with pytest.raises(build.BuildError, match=r"not built on this system \(Windows\)"):
        build.load()


# ---- several at once ----

ALONE = """
import importlib.util, json, os, pathlib, sys
spec = importlib.util.spec_from_file_location("build", sys.argv[1])
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
build.SOURCES = pathlib.Path(sys.argv[2])
path = build.load().library._name
if os.fork() == 0:
    sys.exit()  # runs the handlers that the parent has registered
os.wait()
print(json.dumps([path, os.path.exists(path)]))
"""


def start(place: Place, **variables: str) -> subprocess.Popen:
    """A process that loads the library, without torch."""
    file = importlib.util.find_spec("qgnn.kernels.cpu.build").origin
    command = [sys.executable, "-c", ALONE, file, str(place.sources)]
    environment = {**os.environ, "TMPDIR": str(place.temporary), **variables}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> tuple[Path, bool]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    path, exists = json.loads(out)
    return Path(path), exists


# Waits until two of its kind run.
MEETING = ': > "$0.$$"; while [ $(ls "$0".[0-9]* | wc -l) -lt 2 ]; do sleep 0.01; done'


def test_two_processes_compile_at_once(place: Place, compiler: Callable[..., Path]) -> None:
    script = compiler(MEETING)
    processes = [start(place), start(place)]
    found = {finish(process)[0] for process in processes}
    assert calls(script) == 2
    assert found == set(place.libraries()) == set(place.cache.iterdir())
    build.load()
    assert calls(script) == 2


def test_two_threads_compile_at_once(place: Place, compiler: Callable[..., Path]) -> None:
    script = compiler(MEETING)
    with ThreadPoolExecutor(2) as pool:
        loads = [future.result(timeout=300) for future in [pool.submit(build.load), pool.submit(build.load)]]
    assert calls(script) == 2
    assert {Path(loaded.library._name) for loaded in loads} == set(place.cache.iterdir())


def test_a_temporary_folder_lasts_as_long_as_its_process(place: Place) -> None:
    place.cache.write_text("")
    path, existed_after_fork = finish(start(place))
    assert path.is_relative_to(place.temporary)
    assert existed_after_fork
    assert list(place.temporary.iterdir()) == []
