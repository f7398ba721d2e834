"""Several sources are compiled at a time, and no compiler outlives a build that ends early."""

import os
import select
from collections.abc import Callable
from pathlib import Path

import pytest
from qgnn.kernels.cpu import build

from compilers import Place, calls, team

LAST = build.VARIANTS[-1:]


@pytest.fixture
def sources(place: Place) -> Place:
    """A machine with two more sources, which nothing needs."""
    for name in ("first", "second"):
        (place.sources / f"{name}.c").write_text(f"int {name};\n")
    return place


def test_sources_are_compiled_at_the_same_time(
    sources: Place, compiler: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(build, "TIMEOUT_S", 20)
    script = compiler(': > "$0.$$"; while [ $(ls "$0".[0-9]* | wc -l) -lt 3 ]; do sleep 0.01; done')
    assert team(build.load().library) >= 1
    assert calls(script) == 3


@pytest.mark.parametrize("cores", [1, None])
def test_there_are_no_more_compilers_than_cores(
    sources: Place, compiler: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, cores: int | None
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    compiler('mkdir "$0.lock" || exit 1; sleep 0.05; rmdir "$0.lock"')
    assert team(build.load().library) >= 1


def test_all_sources_are_in_the_library(sources: Place) -> None:
    for name in ("first", "second"):
        (sources.sources / f"{name}.c").write_text(f'#include "common.h"\nEXPORT void qgnn_{name}(void) {{}}\n')
    library = build.load().library
    assert all(hasattr(library, f"qgnn_{name}") for name in ("first", "second", "probe_team"))


def test_what_a_compiler_says_may_be_long(place: Place, compiler: Callable[..., Path]) -> None:
    """More than a pipe holds: a compiler whose words nobody reads would wait."""
    compiler("head -c 1000000 /dev/zero | tr '\\0' w >&2")
    assert team(build.load().library) >= 1
    place.libraries()[0].unlink()
    compiler("head -c 1000000 /dev/zero | tr '\\0' w >&2; exit 1")
    with pytest.raises(build.BuildError, match=r"failed: w{2000}\n"):
        build.load()


def test_the_command_that_failed_is_told(
    sources: Place, compiler: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "VARIANTS", LAST)
    compiler('case "$*" in *second.c) echo "no second" >&2; exit 1;; esac')
    with pytest.raises(build.BuildError, match=r"failed: no second\nThe command was: .* -c .*second\.c$"):
        build.load()
    compiler('case "$*" in *" -shared "*) echo "no linker" >&2; exit 1;; esac')
    with pytest.raises(build.BuildError, match=r"failed: no linker\nThe command was: .* -shared .*\.o .*-lm$"):
        build.load()


# The first source's compiler starts a process that does not end, and that holds a pipe; the second's fails if told to.
HANGING = """
case "$*" in
*first.c) exec 9> "$0.alive"; : > "$TMPDIR/leftover"; : > "$0.started"; sleep 600 & wait;;
*second.c) while [ ! -e "$0.started" ]; do sleep 0.01; done; FATE;;
esac
"""


@pytest.mark.parametrize("end", ["a failure", "a time limit", "an interruption"])
def test_compilers_end_with_the_build(
    sources: Place, compiler: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(build, "VARIANTS", LAST)
    monkeypatch.setenv("TMPDIR", str(sources.temporary))
    script = compiler(HANGING.replace("FATE", "echo 'no second' >&2; exit 1" if end == "a failure" else ":"))
    os.mkfifo(f"{script}.alive")
    alive = os.open(f"{script}.alive", os.O_RDONLY | os.O_NONBLOCK)
    started = Path(f"{script}.started")
    expected: tuple[type[BaseException], str] = (build.BuildError, "failed: no second")
    if end == "a time limit":
        monkeypatch.setattr(build, "TIMEOUT_S", 2)
        expected = (build.BuildError, r"timed out after 2 seconds\nThe command was: .*first\.c$")
    elif end == "an interruption":
        wait = build.time.sleep

        def interrupted(seconds: float) -> None:
            if started.exists():
                raise KeyboardInterrupt("by the user")
            wait(seconds)

        monkeypatch.setattr(build.time, "sleep", interrupted)
        expected = (KeyboardInterrupt, "by the user")
    with pytest.raises(expected[0], match=expected[1]):
        build.load()
    assert started.exists()
    assert select.select([alive], [], [], 60)[0] == [alive]  # its end: nobody holds the pipe any more
    os.close(alive)
    assert list(sources.temporary.iterdir()) == list(sources.cache.iterdir()) == []
