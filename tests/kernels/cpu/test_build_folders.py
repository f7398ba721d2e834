"""Where the native kernels are kept, and what happens where they cannot be."""

import ctypes
import errno
import os
import pwd
import re
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from qgnn.kernels.cpu import build

from compilers import Place, calls, folder_of, team


def _a_file(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.cache.write_text("")


def _below_a_file(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.root / "file").write_text("")
    monkeypatch.setenv("QGNN_CACHE_DIR", str(place.root / "file" / "cache"))


def _for_a_group(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.cache.chmod(0o770)


def _for_everyone(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.cache.chmod(0o707)


def _of_another_user(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.os, "getuid", lambda: os.geteuid() + 1)


def _without_home(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("QGNN_CACHE_DIR")
    monkeypatch.delenv("HOME")


def _refusing(error: int) -> Callable[[Place, pytest.MonkeyPatch], None]:
    """Permission bits do not stop root, so the system's answer is imitated."""

    def prepare(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        mkstemp = tempfile.mkstemp

        def refuse(*args: object, **options: object) -> tuple[int, str]:
            if options["dir"] == place.cache:
                raise OSError(error, os.strerror(error), str(place.cache / ".building-abc"))
            return mkstemp(*args, **options)

        monkeypatch.setattr(tempfile, "mkstemp", refuse)

    return prepare


def _full(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace

    def refuse(path: Path, target: Path) -> Path:
        if path.parent == place.cache:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as from a write: it names no file
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refuse)


def _without_execution(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a mount with the option noexec."""
    load = ctypes.CDLL

    def refuse(path: str) -> ctypes.CDLL:
        if Path(path).parent == place.cache:
            raise OSError(f"{path}: failed to map segment from shared object")
        return load(path)

    monkeypatch.setattr(build.ctypes, "CDLL", refuse)


# What is wrong, and what is told of it; FOLDER stands for the folder.
UNUSABLE = {
    "file": (_a_file, "File exists: 'FOLDER'"),
    "below a file": (_below_a_file, "Not a directory: '.*/file/cache'"),
    "writable by the group": (_for_a_group, r"others can write to FOLDER \(to end that: chmod go-w FOLDER\)"),
    "writable by all": (_for_everyone, r"others can write to FOLDER \(to end that: chmod go-w FOLDER\)"),
    "of another user": (_of_another_user, "FOLDER belongs to another user"),
    "no home": (_without_home, "the user has no home folder to make ~/.cache/qgnn in"),
    "read-only": (_refusing(errno.EROFS), "Read-only file system: 'FOLDER'"),
    "not allowed": (_refusing(errno.EACCES), "Permission denied: 'FOLDER'"),
    "full": (_full, "No space left on device: 'FOLDER'"),
    "noexec": (_without_execution, "FOLDER/.*: failed to map segment"),
}
WITH_LIBRARY = ("writable by the group", "writable by all", "of another user", "noexec")


@pytest.mark.parametrize("case", UNUSABLE)
def test_an_unusable_cache_folder_gives_way_to_a_temporary_one(
    place: Place, compiler: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    if case in WITH_LIBRARY:
        build.load()
    script = compiler()
    monkeypatch.delenv("CC")  # the same key as of the library that is there
    monkeypatch.setattr(build, "compiler", lambda: [str(script)])
    prepare, reason = UNUSABLE[case]
    prepare(place, monkeypatch)
    library, not_kept = build.load()
    assert re.search(reason.replace("FOLDER", re.escape(str(place.cache))), not_kept)
    assert folder_of(library).parent == place.temporary
    assert stat.S_IMODE(folder_of(library).stat().st_mode) == 0o700
    assert calls(script) == 1
    assert team(library) >= 1
    assert list(place.root.glob("cache/.building-*")) == []


def test_a_machine_without_any_folder(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.cache.write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(place.root / "missing"))
    with pytest.raises(build.BuildError, match=r"cannot be kept or loaded: .*File exists.*; .*No such file"):
        build.load()


@pytest.mark.parametrize("name", ["with space", "caché", "a[1]*?", "'quote\"", "%41$HOME", "-o"])
def test_folders_of_any_name(
    place: Place, compiler: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    script = compiler()
    sources = place.sources.rename(place.root / f"sources {name}")
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("QGNN_CACHE_DIR", str(place.root / name))
    assert build.load().library._name == build.load().library._name
    assert calls(script) == 1


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"QGNN_CACHE_DIR": "."}, "."),
        ({"QGNN_CACHE_DIR": "a/b"}, "a/b"),
        ({"QGNN_CACHE_DIR": "~/mine"}, "home/mine"),
        ({"XDG_CACHE_HOME": "xdg"}, "xdg/qgnn"),
        ({}, "home/.cache/qgnn"),
    ],
)
def test_where_the_cache_folder_is(
    place: Place, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    monkeypatch.delenv("QGNN_CACHE_DIR")
    monkeypatch.setenv("HOME", str(place.root / "home"))
    monkeypatch.chdir(place.root)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    place.root.chmod(0o700)
    library = build.load().library
    assert folder_of(library) == place.root / expected
    assert Path(library._name).is_absolute()
