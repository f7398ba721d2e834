"""The journal of a sweep: what has been run, one line of JSON each, appended and never edited.

A line is written by one process with a single ``write`` to a file that it alone has locked, and is on the disk before
the next run is recorded. So a kill can only tear the last line, which the next opening cuts away.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from qgnn.cli.errors import UsageError
from qgnn.cli.report import jsonable
from qgnn.data.disk import append_whole, lock, shorten, whole_lines

START, RUN = "start", "run"  # kinds of lines
DONE, FAILED = "done", "failed"  # how a run ended


class Journal:
    """A journal, open and locked until it is closed.

    The first line, and one more each time the sweep goes on, is of kind ``start``: under what the runs below it were
    made. Every other line is a run's; it says ``dirty`` where the code has changed since the start.

    Args:
        path: The file, made if it does not exist; its folder has to exist.

    Raises:
        UsageError: If another process has it open, it cannot be opened, or a line before the last is not one of ours.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(f"the journal {str(path)!r} could not be opened ({error.strerror})") from error
        try:
            self._lock()
            self.starts: list[dict[str, Any]] = []
            self.runs: dict[str, dict[str, Any]] = {}  # by key, the last line of each
            for line in self._read():
                self._take(line)
        except BaseException:
            os.close(self._file)
            raise

    def _lock(self) -> None:
        try:
            lock(self._file)
        except OSError as error:
            raise UsageError(
                f"another sweep is writing the journal {str(self.path)!r}; wait for it, or give another --results"
            ) from error

    def _read(self) -> list[dict[str, Any]]:
        """All whole lines; what a kill left behind them is cut away."""
        content = self.path.read_bytes()
        lines, keep = _whole_lines(self.path, content)
        shorten(self._file, keep)
        return lines

    def _take(self, line: dict[str, Any]) -> None:
        if line["kind"] == START:
            self.starts.append(line)
        else:
            start = self.starts[-1]
            self.runs[line["key"]] = {"dirty": start.get("dirty")} | line | {"commit": start["commit"]}

    def append(self, kind: str, **fields: Any) -> None:
        """Write a line; it is on the disk when this returns.

        Args:
            kind: ``"start"`` or ``"run"``.
            fields: Of a start ``commit``, ``dirty`` and ``device`` at least, of a run ``key``, ``status`` and, where it
                is done, ``result``.

        Raises:
            UsageError: If there is no space, or the disk fails; the journal is then as it was before.
        """
        line = jsonable({"kind": kind, **fields})
        try:
            append_whole(self._file, self.path, json.dumps(line, allow_nan=False).encode() + b"\n")
        except OSError as error:
            raise UsageError(f"the journal {str(self.path)!r} could not be written ({error.strerror})") from error
        self._take(line)

    def close(self) -> None:
        """Close the file, which unlocks it."""
        os.close(self._file)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def lines_in(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal, also while another process writes it; none if there is no file.

    Raises:
        UsageError: If the file cannot be read, or a line before the last is not one of ours.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"the journal {str(path)!r} could not be read ({error.strerror})") from error
    return _whole_lines(path, content)[0]


def recorded_in(path: Path) -> dict[str, dict[str, Any]]:
    """The last line of each run in a journal by key, as :func:`lines_in` reads it."""
    return {line["key"]: line for line in lines_in(path) if line["kind"] == RUN}


def _whole_lines(path: Path, content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The lines of a journal, and the number of its bytes before what a kill left behind them."""
    lines, keep = whole_lines(content, _parse)
    whole = [line for line in lines if line is not None]
    if len(whole) < len(lines) or (whole and whole[0]["kind"] != START):
        number = 1 + (lines.index(None) if None in lines else 0)
        raise UsageError(
            f"line {number} of {str(path)!r} is none of a sweep's journal; restore the file, or give another --results"
        )
    return whole, keep


def _parse(text: bytes) -> dict[str, Any] | None:
    """The line, or ``None`` if it is none of a journal."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    if line.get("kind") == START:
        commit, dirty, device = (line.get(name, False) for name in ("commit", "dirty", "device"))
        is_ours = (commit is None or isinstance(commit, str)) and dirty in (None, True, False)
        return line if is_ours and isinstance(device, str) else None
    if line.get("kind") != RUN or not isinstance(line.get("key"), str) or line.get("status") not in (DONE, FAILED):
        return None
    result = line.get("result")
    return line if _is_result(result) or (result is None and line["status"] == FAILED) else None


def _is_result(result: Any) -> bool:
    """Whether it is what a run measures, as far as tables need it."""
    if not isinstance(result, dict) or "test_acc" not in result:
        return False
    score, bits, widths = (result.get(name) for name in ("test_acc", "mean_bits", "widths"))
    return all(value is None or _is_number(value) for value in (score, bits)) and (
        widths is None or (isinstance(widths, list) and all(map(_is_number, widths)))
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
