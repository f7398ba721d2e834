"""Compiling the native kernels with the system's C compiler, once a machine.

The library lies in the user's cache folder (``QGNN_CACHE_DIR``, else ``$XDG_CACHE_HOME/qgnn``, else ``~/.cache/qgnn``)
under a name made of a key, what went in (sources, flags, ``CC``, CPU, C library), and of a digest, what came out: a
file that was cut short or changed is seen and built again. Files appear by renaming, so processes that build at the
same time do not disturb each other. If the folder cannot be used, the library lives in a temporary one for as long as
the process, and what :func:`load` returns says why.
"""

import atexit
import contextlib
import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent
COMPILE_FLAGS = (
    *("-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden"),
    # Codes and NaN must come out as in the reference: no contraction, none of -ffast-math's assumptions about values.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-parameter"),  # the last two: without OpenMP
)
LINK_FLAGS: tuple[str, ...] = ("-shared",)
if sys.platform == "linux":  # a compiler may know OpenMP and lack its library: elsewhere linkers refuse that anyway
    LINK_FLAGS += ("-Wl,--no-undefined",)
FLAGS = (*COMPILE_FLAGS, *LINK_FLAGS)  # of a call that does both
NATIVE = ("-march=native", "-DQGNN_NATIVE")  # info.c tells the two apart by the macro
# Tried in this order: a compiler may lack OpenMP (one thread then), or know no native architecture.
VARIANTS = ((*NATIVE, "-fopenmp"), NATIVE, ("-fopenmp",), ())
TIMEOUT_S = 300  # for a variant: some 10 s of work, which many processes may start at once
POLL_S = 0.005


class BuildError(RuntimeError):
    """The native kernels cannot be compiled or loaded; the message says why."""


class CompilerError(BuildError):
    """The compiler ran and failed: with other options it may succeed."""


class Loaded(NamedTuple):
    """The library, and why it could not be kept for other processes, if so."""

    library: ctypes.CDLL
    not_kept: str | None


def loaded_libraries(*names: str) -> list[Path]:
    """Shared libraries of this process whose file name starts with one of ``names`` (Linux; elsewhere none)."""
    try:
        maps = os.fsdecode(Path("/proc/self/maps").read_bytes())
    except OSError:
        return []
    files = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/" in line}
    return sorted(Path(file) for file in files if Path(file).name.startswith(names))


def _command(text: str) -> list[str]:
    """A program, whose path may have spaces, or a program with options, such as ``ccache gcc``; empty if not found."""
    if shutil.which(text):
        return [text]
    try:
        words = shlex.split(text)
    except ValueError:  # a quotation without an end
        return []
    return words if words and shutil.which(words[0]) else []


def compiler() -> list[str]:
    """The command of the C compiler: ``CC``, or the first of ``cc``, ``gcc`` and ``clang`` on the path."""
    candidates = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    for candidate in candidates:
        if command := _command(candidate):
            return command
    raise BuildError(f"no C compiler: found no program {' or '.join(candidates)}; install one, or set CC")


def _cpu() -> str:
    """What -march=native depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        first = cpuinfo.read_text().split("\n\n")[0]
        lines = re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*$", first, re.MULTILINE)
        return "\n".join([platform.machine(), *lines])
    return f"{platform.machine()} {platform.processor()}"


def _key() -> str:
    """What goes in. Not the compiler itself: a library that is there already is loaded without one."""
    parts = [path.name.encode() + path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))]
    options = (os.environ.get("CC", ""), *FLAGS, *(flag for variant in VARIANTS for flag in variant))
    parts += [os.fsencode(item) for item in (*options, _cpu(), *platform.libc_ver())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]


def _cache_path() -> Path:
    """Where the user's cache folder is to be.

    Raises:
        OSError: If the user has no home folder, and no variable names another one.
    """
    home, base = os.environ.get("QGNN_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    folder = Path(home) if home else Path(base or "~/.cache") / "qgnn"
    try:
        return folder.expanduser().absolute()
    except RuntimeError as error:
        raise FileNotFoundError(f"the user has no home folder to make {folder} in") from error


def _cache_folder() -> Path:
    """The user's cache folder, made if there is none.

    Raises:
        OSError: If it cannot be made, or others may write to it: what lies there gets loaded and run.
    """
    folder = _cache_path()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.stat()
    if state.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others can write to {folder} (to end that: chmod go-w {shlex.quote(str(folder))})")
    return folder


def _temporary_folder() -> Path:
    folder, owner = Path(tempfile.mkdtemp(prefix="qgnn-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


def _cached(folder: Path, key: str) -> Path | None:
    """The library of that key whose content is what its name says."""
    for path in folder.glob(f"kernels-{key}-*.so"):
        if path.stem.rpartition("-")[2] == _digest(path.read_bytes()):
            return path
    return None


def _end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Kill processes with all that they have started."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses to kill what has just ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _start(call: list[str], scratch: Path, errors: Path) -> subprocess.Popen[bytes]:
    """Start a command, in a group of its own so that it can be killed with what it starts."""
    with open(errors, "wb") as file:  # not a pipe, which somebody would have to read
        return subprocess.Popen(
            call,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            env={**os.environ, "TMPDIR": str(scratch)},  # what a killed compiler leaves there goes with the folder
            start_new_session=True,
        )


def _check(call: list[str], status: int, errors: Path) -> None:
    if status != 0:
        reason = errors.read_text(errors="replace").strip()[-2000:] or f"exit status {status}"
        raise CompilerError(f"the C compiler failed: {reason}\nThe command was: {shlex.join(call)}")


def _run_all(calls: list[list[str]], scratch: Path, deadline: float) -> None:
    """Run commands, as many at a time as there are cores, until all have ended or one has failed.

    Raises:
        CompilerError: If one fails.
        BuildError: If one does not run, or does not end before the deadline.
    """
    waiting = list(range(len(calls)))
    running: dict[int, subprocess.Popen[bytes]] = {}
    errors = [scratch / f"{number}.err" for number in waiting]
    try:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                number = waiting.pop(0)
                running[number] = _start(calls[number], scratch, errors[number])
            for number, process in list(running.items()):
                if process.poll() is not None:
                    del running[number]
                    _check(calls[number], process.returncode, errors[number])
            if running and time.monotonic() > deadline:
                raise BuildError(
                    f"the C compiler did not run to its end: timed out after {TIMEOUT_S} seconds\n"
                    f"The command was: {shlex.join(calls[min(running)])}"
                )
            if running:
                time.sleep(POLL_S)
    except OSError as error:
        raise BuildError(f"the C compiler did not run to its end: {error}") from error
    finally:
        _end(running.values())


def compile_objects(command: list[str], flags: tuple[str, ...], scratch: Path, deadline: float) -> list[str]:
    """Compile each source into an object file in the folder ``scratch``, several at a time, for at most as long as
    :func:`time.monotonic` is below ``deadline``; raises what :func:`compile_library` does."""
    # The longest first: none of them is then the last to begin.
    sources = sorted(SOURCES.glob("*.c"), key=lambda path: (-path.stat().st_size, path))
    objects = [str(scratch / f"{source.stem}.o") for source in sources]
    call = [*command, *COMPILE_FLAGS, *flags, "-c"]
    calls = [[*call, "-o", name, str(source)] for name, source in zip(objects, sources, strict=True)]
    _run_all(calls, scratch, deadline)
    return sorted(objects)


def compile_library(command: list[str], flags: tuple[str, ...], out: Path) -> None:
    """Compile all sources into the shared library ``out``.

    Raises:
        CompilerError: If the compiler fails.
        BuildError: If it does not run, or does not end.
    """
    deadline = time.monotonic() + TIMEOUT_S
    with tempfile.TemporaryDirectory(prefix="qgnn-build-", ignore_cleanup_errors=True) as folder:
        objects = compile_objects(command, flags, Path(folder), deadline)
        _run_all([[*command, *FLAGS, *flags, "-o", str(out), *objects, "-lm"]], Path(folder), deadline)


def _compiled() -> bytes:
    """The library, made with the first variant of flags that works."""
    command = compiler()
    try:
        return _compiled_by(command)
    except OSError as error:  # no room for temporary files, or a compiler that leaves nothing
        raise BuildError(f"{shlex.join(command)} gave no library: {error}") from error


def _compiled_by(command: list[str]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="qgnn-build-") as scratch:
        out = Path(scratch, "kernels.so")
        for flags in VARIANTS[:-1]:
            with contextlib.suppress(CompilerError):
                compile_library(command, flags, out)
                return out.read_bytes()
        compile_library(command, VARIANTS[-1], out)  # the plainest: if this fails too, its message is the one to read
        return out.read_bytes()


def _install(library: bytes, folder: Path, key: str) -> Path:
    """Put a library into a folder, whole or not at all."""
    finished = folder / f"kernels-{key}-{_digest(library)}.so"
    try:
        handle, name = tempfile.mkstemp(prefix=".building-", dir=folder)
        partial = Path(name)
        try:
            with open(handle, "wb") as file:
                file.write(library)
            partial.replace(finished)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:  # that of a full disk names no file
        raise OSError(error.errno, error.strerror, str(folder)) from error
    return finished


def load() -> Loaded:
    """The library, compiled if there is none for these sources, flags, compiler and CPU yet.

    Raises:
        BuildError: If it cannot be compiled or loaded.
    """
    if os.name != "posix":
        raise BuildError(f"the native kernels are not built on this system ({platform.system()})")
    library: bytes | None = None
    failures: list[str] = []
    for find_folder in (_cache_folder, _temporary_folder):
        try:
            folder, key = find_folder(), _key()
            path = _cached(folder, key)
            if path is None:
                library = _compiled() if library is None else library
                path = _install(library, folder, key)
            return Loaded(ctypes.CDLL(str(path)), failures[0] if failures else None)
        except OSError as error:  # no such folder, not writable, full, or mounted without the right to execute
            failures.append(str(error))
    raise BuildError(f"the native kernels cannot be kept or loaded: {'; '.join(failures)}")
