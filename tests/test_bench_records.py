"""Files of records: appended whole, cut where a kill left half a line, and never damaged further."""

import fcntl
import json
import os
import re
from pathlib import Path

import pytest

from bench_records import records


def lines_of(*cases: str) -> list[dict]:
    return [{"case": case, "provider": "qgnn int8"} for case in cases]


def test_what_a_kill_left_is_cut_away_at_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # hundreds of them would take seconds
    path = tmp_path / "machine" / "unit.jsonl"
    records.append(path, lines_of("a", "b"))
    content = path.read_bytes()
    whole = len(content) // 2
    for left in (*(content[:end] for end in range(whole, len(content))), content[:whole] + bytes(9) + b"\n"):
        path.write_bytes(left)
        assert list(records.read(tmp_path)) == [("machine", line) for line in lines_of("a")]
        records.append(path, lines_of("c", "d"))
        assert list(records.read(tmp_path)) == [("machine", line) for line in lines_of("a", "c", "d")]


def test_a_damaged_line_before_the_last_is_named_and_left(tmp_path: Path) -> None:
    path = tmp_path / "machine" / "unit.jsonl"
    records.append(path, lines_of("a"))
    content = path.read_bytes() + b'{"case": {"case": "b"}\n'
    path.write_bytes(content)
    records.append(path, [])
    path.write_bytes(content + path.read_bytes())
    with pytest.raises(ValueError, match=re.escape(f"line 2 of {str(path)!r} is no record; restore the file")):
        list(records.read(tmp_path))


@pytest.mark.parametrize("written", [0, 10])
def test_a_full_disk_leaves_the_records_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    path, real = tmp_path / "machine" / "unit.jsonl", os.write
    records.append(path, lines_of("a"))
    content = path.read_bytes()
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:written]))
    with pytest.raises(OSError, match="no space left"):
        records.append(path, lines_of("b"))
    assert path.read_bytes() == content


def test_records_of_two_processes_are_appended_one_behind_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another one appends until the lock is given stays, and all is on the disk at the end."""
    path, synced = tmp_path / "machine" / "unit.jsonl", []
    path.parent.mkdir()

    def flock(file: int, operation: int) -> None:
        assert operation == fcntl.LOCK_EX
        path.write_text(json.dumps(*lines_of("theirs")) + "\n")

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(path.read_bytes()))
    records.append(path, lines_of("ours"))
    assert [line["case"] for _, line in records.read(tmp_path)] == ["theirs", "ours"]
    assert synced[-1] == path.read_bytes()
