"""The journal of a sweep: whatever a kill leaves, opening it gives all whole lines and nothing else."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import soak_files
from qgnn.cli.errors import UsageError
from qgnn.cli.sweep import runner
from qgnn.cli.sweep.journal import DONE, FAILED, RUN, START, Journal, recorded_in
from qgnn.cli.sweep.pool import Outcome
from qgnn.cli.sweep.runner import check_device, missing
from soak_draw import Draw
from sweep_fakes import HEADER, runs_of


def write(path: Path, runs: int, status: str = DONE) -> None:
    with Journal(path) as journal:
        journal.append(START, **HEADER)
        for run in runs_of(runs):
            journal.append(RUN, key=run.key, run=run.fields, status=status, result={"test_acc": run.seed})


def test_a_journal_gives_back_what_was_written(tmp_path: Path) -> None:
    write(tmp_path / "j", 3)
    write(tmp_path / "j", 0)
    with Journal(tmp_path / "j") as journal:
        assert [line["result"]["test_acc"] for line in journal.runs.values()] == [0, 1, 2]
        assert list(journal.runs) == [run.key for run in runs_of(3)]
        assert len(journal.starts) == 2
    lines = [json.loads(line) for line in (tmp_path / "j").read_text().splitlines()]
    assert [line["kind"] for line in lines] == [START, RUN, RUN, RUN, START]
    assert lines[1]["run"] == runs_of(1)[0].fields


@pytest.mark.parametrize("number", [0, 2])
def test_a_torn_last_line_is_cut_away_at_every_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Also the first line, and also a line that lacks nothing but its end. What follows is whole again."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a thousand of them would take seconds
    path = tmp_path / "j"
    write(path, number)
    content = path.read_bytes()
    whole = content[: content[:-1].rfind(b"\n") + 1]
    assert len(content) > len(whole) + 40
    for end in range(len(whole), len(content)):
        path.write_bytes(content[:end])
        with Journal(path) as journal:
            assert list(journal.runs) == [run.key for run in runs_of(number)[: max(number - 1, 0)]]
            assert path.read_bytes() == whole
            journal.append(START, **HEADER)
        with Journal(path) as journal:
            assert path.read_bytes().startswith(whole)
            assert len(journal.starts) == whole.count(b'"start"') + 1


@pytest.mark.parametrize("tail", [b"\0" * 30, b"\0" * 30 + b"\n", b"\xff\xfe\n", b'{"kind": "run"}\n', b"[]\n", b"\n"])
def test_a_last_line_without_content_is_cut_away(tmp_path: Path, tail: bytes) -> None:
    write(tmp_path / "j", 2)
    content = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(content + tail)
    with Journal(tmp_path / "j") as journal:
        assert len(journal.runs) == 2
    assert (tmp_path / "j").read_bytes() == content


@pytest.mark.parametrize(("at", "number"), [(0, 1), (1, 2), (2, 3)])
def test_a_foreign_line_before_the_last_is_refused_and_left(tmp_path: Path, at: int, number: int) -> None:
    write(tmp_path / "j", 2)
    lines = (tmp_path / "j").read_bytes().splitlines(keepends=True)
    content = b"".join([*lines[:at], b"hello\n", *lines[at:], *lines[-1:]])
    (tmp_path / "j").write_bytes(content)
    with pytest.raises(UsageError, match=f"line {number} of .* is none of a sweep's journal"):
        Journal(tmp_path / "j")
    assert (tmp_path / "j").read_bytes() == content


@pytest.mark.parametrize(
    "line",
    [
        *(b"[" * 100_000, b'{"kind": []}', b'{"kind": "run", "key": [], "status": "done", "result": {"test_acc": 1}}'),
        *(b'{"kind": "run", "key": "k", "status": []}', b'{"kind": "run", "key": "k", "status": "done"}'),
        *(b'{"kind": "run", "key": "k", "status": "done", "result": {"test_acc": "0.5"}}',),
        *(b'{"kind": "run", "key": "k", "status": "done", "result": {"test_acc": 0.5, "widths": 2}}',),
        *(b'{"kind": "start", "commit": null, "dirty": null}', b'{"kind": "start", "commit": {}, "device": "cpu"}'),
    ],
)
def test_a_line_of_other_values_is_foreign(tmp_path: Path, line: bytes) -> None:
    write(tmp_path / "j", 2)
    content = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(content + line + b"\n" + content)
    for read in (Journal, recorded_in):
        with pytest.raises(UsageError, match=r"line 4 of .* is none of a sweep's journal"):
            read(tmp_path / "j")


@settings(max_examples=30)
@given(st.integers(0, 2**63))
def test_whatever_is_damaged_ends_in_one_line(seed: int) -> None:
    soak_files.journal(Draw(seed))


def test_a_journal_without_its_first_line_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "j", 2)
    (tmp_path / "j").write_bytes((tmp_path / "j").read_bytes().partition(b"\n")[2])
    with pytest.raises(UsageError, match="line 1 of"):
        Journal(tmp_path / "j")


def test_two_sweeps_cannot_write_one_journal(tmp_path: Path) -> None:
    with Journal(tmp_path / "j"):
        with pytest.raises(UsageError, match="another sweep is writing"):
            Journal(tmp_path / "j")
        with Journal(tmp_path / "k"):
            pass
    Journal(tmp_path / "j").close()


def test_a_journal_that_is_refused_is_not_left_locked(tmp_path: Path) -> None:
    (tmp_path / "j").write_text("hello\nhello\n")
    for _ in range(2):
        with pytest.raises(UsageError, match="line 1 of"):
            Journal(tmp_path / "j")


@pytest.mark.parametrize("written", [0, 10])
def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int) -> None:
    write(tmp_path / "j", 1)
    content, real = (tmp_path / "j").read_bytes(), os.write

    def full(file: int, data: bytes) -> int:
        if not written:
            raise OSError(28, "No space left on device")
        return real(file, data[:written])

    with Journal(tmp_path / "j") as journal:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(UsageError, match="could not be written"):
            journal.append(RUN, key="k", status=DONE)
        assert "k" not in journal.runs
    monkeypatch.undo()
    assert (tmp_path / "j").read_bytes() == content


def test_a_folder_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"could not be opened \(No such file or directory\)"):
        Journal(tmp_path / "none" / "j")


def left(path: Path, number: int, **options: Any) -> list[int]:
    with Journal(path) as journal:
        return [run.seed for run in missing(runs_of(number), journal.runs, **{"retry_failed": False, **options})]


def test_what_is_missing_is_what_was_not_recorded(tmp_path: Path) -> None:
    assert left(tmp_path / "j", 4) == [0, 1, 2, 3]
    write(tmp_path / "j", 3)
    assert left(tmp_path / "j", 5) == [3, 4], "a specification that grew"
    assert left(tmp_path / "j", 2) == [], "one that shrank"


def test_failed_runs_are_missing_only_on_request(tmp_path: Path) -> None:
    write(tmp_path / "j", 2, FAILED)
    assert left(tmp_path / "j", 3) == [2]
    assert left(tmp_path / "j", 3, retry_failed=True) == [0, 1, 2]
    write(tmp_path / "j", 2)
    assert left(tmp_path / "j", 3, retry_failed=True) == [2], "the last line of a run counts"


def test_a_changed_sweep_goes_on_with_what_it_still_names(tmp_path: Path) -> None:
    """Two of three recorded runs are gone from it, three others new."""
    write(tmp_path / "j", 3)
    with Journal(tmp_path / "j") as journal:
        assert missing(runs_of(6)[2:], journal.runs, retry_failed=False) == runs_of(6)[3:]


def test_a_journal_of_another_device_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "j", 3)
    with Journal(tmp_path / "j") as journal:
        check_device(journal, "cpu")
        with pytest.raises(UsageError, match=r"holds runs on 'cpu' \(got 'cuda'\)"):
            check_device(journal, "cuda")


def test_a_run_that_ends_behind_a_change_of_the_code_is_of_modified_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a commit or an edit, until the sweep is started anew; what no change came before says nothing of its own."""
    steps = [  # a start, or how the code is when a run ends, with what is then known of the run, and what it says
        (START, ("a", False), None),
        (("a", False), ("a", False), None),
        (("a", True), ("a", True), True),
        (("b", False), ("a", True), True),
        (START, ("b", False), None),
        (("b", False), ("b", False), None),
        (START, ("b", True), None),
        (("b", True), ("b", True), None),
        (("b", False), ("b", True), True),
    ]
    runs = iter(runs_of(len(steps)))
    with Journal(tmp_path / "j") as journal:
        for state, (commit, dirty), _ in steps:
            if state == START:
                journal.append(START, device="cpu", commit=commit, dirty=dirty)
            else:
                monkeypatch.setattr(runner, "commit", lambda state=state: state)
                runner.record(Outcome(next(runs), {"test_acc": 0.5}, None, None, 1.0), journal)
        written = journal.runs
    with Journal(tmp_path / "j") as journal:
        assert journal.runs == written
        found = [(line["commit"], line["dirty"]) for line in journal.runs.values()]
    assert found == [expected for state, expected, _ in steps if state != START]
    lines = [json.loads(line) for line in (tmp_path / "j").read_text().splitlines()]
    assert [line.get("dirty") for line in lines if line["kind"] == RUN] == [
        own for state, _, own in steps if state != START
    ]


def test_a_journal_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    """Also in the midst of a line, which is left to be ended."""
    path = tmp_path / "j"
    assert recorded_in(path) == {}
    assert not path.exists()
    write(path, 2)
    with Journal(path), path.open("ab") as file:
        file.write(b'{"kind": "run", "key"')
        file.flush()
        content = path.read_bytes()
        assert list(recorded_in(path)) == [run.key for run in runs_of(2)]
        assert path.read_bytes() == content
    with pytest.raises(UsageError, match=r"could not be read \(Is a directory\)"):
        recorded_in(tmp_path)
