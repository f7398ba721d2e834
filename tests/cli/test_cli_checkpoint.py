"""``--checkpoint`` and ``--resume``: a training that was interrupted ends as one that was not, bit for bit."""

import contextlib
import errno
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

import soak_files
from cli_processes import TRAIN, assert_equal, runs_of, tiny_graph
from qgnn.cli import main, measure, provenance
from qgnn.cli import train as train_module
from qgnn.cli.checkpoint import KEYS, VERSION, Checkpoint, read_checkpoint
from qgnn.cli.errors import UsageError
from qgnn.cli.training import Training
from qgnn.data import disk
from soak_draw import Draw
from tu_files import write_tu

Train = Callable[..., int]

NEIGHBOR = ("--sampler", "neighbor", "--batch-size", "5", "--fanout", "3,2")


@contextlib.contextmanager
def epochs(interrupt_at: int | None = None) -> Iterator[list[int]]:
    """The numbers of the epochs that run within the block, over all runs; that at one place ends in Ctrl-C."""
    run_epoch, seen = Training.run_epoch, []

    def interrupted(training: Training) -> None:
        run_epoch(training)  # is lost, with the random numbers that it drew
        seen.append(training.epoch)
        if len(seen) == interrupt_at:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "run_epoch", interrupted)
        yield seen


def check_resumed(run: Train, folder: Path, *arguments: str, at: int) -> None:
    """The command, interrupted and resumed, against itself undisturbed: its JSON, and its checkpoint."""
    undisturbed = ("--checkpoint", str(folder / "whole.pt"), "--json", str(folder / "whole.json"))
    resumed = ("--checkpoint", str(folder / "part.pt"), "--json", str(folder / "part.json"))
    assert run(*arguments, *undisturbed) == 0
    with epochs(interrupt_at=at):
        assert run(*arguments, *resumed) == 130
    assert not (folder / "part.json").exists()
    assert run(*arguments, *resumed, "--resume") == 0
    assert runs_of(folder / "part.json") == runs_of(folder / "whole.json")
    part, whole = (torch.load(folder / f"{name}.pt", weights_only=True) for name in ("part", "whole"))
    assert_equal(part, whole)
    assert part["current"]["training"]["model"], "and not because there is nothing to compare"


@pytest.mark.parametrize(
    ("arguments", "at"),
    [
        (("--precision", "int8", "--model", "gin"), 3),
        (("--precision", "int8:adq[7,8]", "--epochs", "14"), 13),
        (("--precision", "fp32:sdq[1,8]", "--compress", "int2-rp8"), 3),
        (("--precision", "int4", "--compress", "int2", "--workers", "1", *NEIGHBOR), 4),
    ],
)
def test_resumed_is_undisturbed(qgnn_train: Train, tmp_path: Path, arguments: tuple[str, ...], at: int) -> None:
    check_resumed(qgnn_train, tmp_path, "--seeds", "1", *arguments, at=at)


def test_graph_data_sets_are_resumed(tmp_path: Path) -> None:
    write_tu(tmp_path / "MUTAG" / "raw", "MUTAG", [1] * 30 + [-1] * 20)

    def run(*arguments: str) -> int:
        data = ("--dataset", "mutag", "--root", str(tmp_path), "--device", "cpu", "--epochs", "4", "--seeds", "1")
        return main(["train", *data, "--precision", "int8", "--compress", "int2", *arguments])

    check_resumed(run, tmp_path, at=3)


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A checkpoint of two seeds in fp32 and int8, interrupted in the second epoch of the third of these four runs."""
    path = tmp_path_factory.mktemp("part") / "part.pt"
    with pytest.MonkeyPatch.context() as patch, epochs(interrupt_at=10):
        patch.setattr(train_module, "load", lambda *_: tiny_graph())
        assert main([*TRAIN, "--seeds", "2", "--checkpoint", str(path)]) == 130
    return path.read_bytes()


@pytest.fixture
def part(tmp_path: Path, content: bytes) -> Path:
    """The same, in a file that may be changed."""
    path = tmp_path / "part.pt"
    path.write_bytes(content)
    return path


def test_runs_that_have_ended_are_not_repeated(qgnn_train: Train, tmp_path: Path, part: Path) -> None:
    resume = ("--seeds", "2", "--checkpoint", str(part), "--resume", "--json", str(tmp_path / "part.json"))
    with epochs() as seen:
        assert qgnn_train(*resume) == 0
    assert seen == [2, 3, 4, 1, 2, 3, 4]
    assert qgnn_train("--seeds", "2", "--json", str(tmp_path / "whole.json")) == 0
    assert runs_of(tmp_path / "part.json") == runs_of(tmp_path / "whole.json")
    with epochs() as seen:
        assert qgnn_train(*resume) == 0, "reports once more"
    assert seen == []
    assert runs_of(tmp_path / "part.json") == runs_of(tmp_path / "whole.json")


def test_the_last_model_is_in_the_file(qgnn_train: Train, tmp_path: Path) -> None:
    """As it was behind its last epoch: measuring the run, which moves the means of batch norms, changes nothing."""
    models = []
    with pytest.MonkeyPatch.context() as patch, epochs():
        run_epoch = Training.run_epoch

        def spied(training: Training) -> None:
            run_epoch(training)
            models.append({name: value.clone() for name, value in training.model.state_dict().items()})

        patch.setattr(Training, "run_epoch", spied)
        arguments = ("--seeds", "1", "--precision", "int8", "--model", "gin")
        assert qgnn_train(*arguments, "--checkpoint", str(tmp_path / "a.pt"), "--checkpoint-every", "3") == 0
    saved = torch.load(tmp_path / "a.pt", weights_only=True)["current"]["training"]["model"]
    assert saved.keys() == models[3].keys()
    assert all(torch.equal(value, models[3][name]) for name, value in saved.items())
    assert not all(torch.equal(value, models[2][name]) for name, value in saved.items())


def test_epochs_between_two_writings(qgnn_train: Train, tmp_path: Path) -> None:
    arguments = ("--seeds", "1", "--precision", "fp32", "--checkpoint", str(tmp_path / "a.pt"))
    with epochs(interrupt_at=4):
        assert qgnn_train(*arguments, "--checkpoint-every", "2") == 130
    with epochs() as seen:
        assert qgnn_train(*arguments, "--resume") == 0
    assert seen == [3, 4]


def test_the_result_tells_of_both_parts(
    qgnn_train: Train, tmp_path: Path, part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the first, and that the code has changed since."""
    start = torch.load(part, weights_only=True)["start"]
    monkeypatch.setattr(provenance, "commit", lambda: ("a" * 40, False))
    resume = ("--seeds", "2", "--checkpoint", str(part), "--resume", "--json", str(tmp_path / "part.json"))
    assert qgnn_train(*resume) == 0
    result = json.loads((tmp_path / "part.json").read_text())
    assert (result["utc"], result["commit"], result["dirty"]) == (start["utc"], start["stamp"]["commit"], True)


def test_the_peak_of_memory_is_that_of_both_parts(
    qgnn_train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The larger one, also behind the last epoch, and none if either is unknown."""
    peaks: list[float | None] = []
    monkeypatch.setattr(measure, "peak_bytes", lambda device: peaks[0] and peaks[0] * measure.MIB)
    for number, (before, behind, expected) in enumerate([(901, 423, 901), (423, 901, 901), (None, 423, None)]):
        path, out = tmp_path / f"{number}.pt", tmp_path / "out.json"
        arguments = ("--seeds", "1", "--precision", "fp32", "--checkpoint", str(path), "--json", str(out))
        peaks[:] = [before]
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoint, "end", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            assert qgnn_train(*arguments) == 130
        peaks[:] = [behind]
        with epochs() as seen:
            assert qgnn_train(*arguments, "--resume") == 0
        assert seen == []
        assert json.loads(out.read_text())["runs"][0]["peak_mib"] == expected


def test_two_trainings_do_not_write_one_file(
    qgnn_train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one ends before it reads or writes it; when the first has ended, no lock is left."""
    path = tmp_path / "a.pt"
    arguments = ("--seeds", "1", "--precision", "fp32", "--checkpoint", str(path))
    run_epoch, messages = Training.run_epoch, []

    def disturbed(training: Training) -> None:
        run_epoch(training)
        if not messages:
            other = train_module.read_checkpoint
            monkeypatch.setattr(train_module, "read_checkpoint", lambda _: pytest.fail("read"))
            messages.append(error_of(qgnn_train(*arguments, "--resume"), capsys))
            monkeypatch.setattr(train_module, "read_checkpoint", other)
            assert not path.exists()

    monkeypatch.setattr(Training, "run_epoch", disturbed)
    assert qgnn_train(*arguments) == 0
    assert f"--checkpoint: another qgnn train is writing {str(path)!r}; wait for it, or give" in messages[0]
    assert list(tmp_path.iterdir()) == [path]
    assert qgnn_train(*arguments, "--resume") == 0


def test_a_lock_that_a_kill_left_behind_is_none(qgnn_train: Train, tmp_path: Path) -> None:
    (tmp_path / "a.pt.lock").touch()
    assert qgnn_train("--seeds", "1", "--precision", "fp32", "--checkpoint", str(tmp_path / "a.pt")) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_a_lock_that_its_owner_removes_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its opening and its locking by the next one, which else would hold what a third does not see."""
    path, lock, opened = tmp_path / "lock", disk.lock, []

    def late(descriptor: int) -> None:
        if not opened:
            path.unlink()
        opened.append(descriptor)
        lock(descriptor)

    monkeypatch.setattr(disk, "lock", late)
    with disk.locked(path):
        assert len(opened) == 2
        with pytest.raises(BlockingIOError), disk.locked(path):
            pass
        assert path.exists()
    assert not path.exists()


def error_of(code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """The line on standard error of a command that the user has to change."""
    assert code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("qgnn train: error: ")
    return line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--seeds", "1"), "seeds 2 (got 1)"),
        (("--seeds", "2", "--seed", "1"), "seed 0 (got 1)"),
        (("--seeds", "2", "--epochs", "5"), "epochs 4 (got 5)"),
        (("--seeds", "2", "--lr", "0.5"), "lr 0.01 (got 0.5)"),
        (("--seeds", "2", "--model", "sage"), "model gcn (got sage)"),
        (("--seeds", "2", "--precision", "fp32"), "precision ['fp32', 'int8'] (got ['fp32'])"),
        (("--seeds", "2", "--compress", "int2"), "compress ['none'] (got ['int2'])"),
        (("--seeds", "2", "--dataset", "cora"), "dataset photo (got cora)"),
        (("--seeds", "2", "--workers", "0", *NEIGHBOR), "sampling None (got {'fanout': (3, 2), 'batch_size': 5"),
    ],
)
def test_other_arguments_are_refused(
    qgnn_train: Train, capsys: pytest.CaptureFixture[str], part: Path, arguments: tuple[str, ...], expected: str
) -> None:
    before = part.read_bytes()
    message = error_of(qgnn_train(*arguments, "--checkpoint", str(part), "--resume"), capsys)
    assert f"expects the arguments that {str(part)!r} was written with: " in message
    assert expected in message
    assert part.read_bytes() == before


def test_a_graph_that_has_changed_is_refused(
    qgnn_train: Train, capsys: pytest.CaptureFixture[str], tiny: Data, part: Path
) -> None:
    tiny.edge_index = tiny.edge_index[:, 1:]
    message = error_of(qgnn_train("--seeds", "2", "--checkpoint", str(part), "--resume"), capsys)
    assert "data 271 nodes, 1,056 directed edges, 64 features (got 271 nodes, 1,055 directed" in message


def test_a_damaged_file_is_refused(qgnn_train: Train, capsys: pytest.CaptureFixture[str], part: Path) -> None:
    """Whatever byte is another one, it is noticed, or it is none of what was saved."""
    content, saved = part.read_bytes(), torch.load(part, weights_only=True)
    refused = 0
    for place in [*range(0, len(content), 97), *range(len(content) - 22, len(content))]:
        part.write_bytes(content[:place] + bytes([content[place] ^ 0x5A]) + content[place + 1 :])
        try:
            found = read_checkpoint(part)
        except UsageError as error:
            assert "--resume expects a" in str(error)  # noqa: PT017
            refused += 1
        else:
            assert_equal(found, saved)
    assert refused > 0.4 * len(content) / 97, "torch pads its records"
    for length in (0, 1, 100, len(content) // 2, len(content) - 1):
        part.write_bytes(content[:length])
        message = error_of(qgnn_train("--seeds", "2", "--checkpoint", str(part), "--resume"), capsys)
        assert f"--resume expects a whole checkpoint (got {str(part)!r}: " in message


def test_what_is_no_checkpoint_is_refused(
    qgnn_train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "a.pt"
    arguments = ("--checkpoint", str(path), "--resume")
    plain = {"version": VERSION, "arguments": {}, "start": {}, "runs": [], "current": None}
    wrong = {"version": [], "arguments": [], "start": None, "runs": [1], "current": {"names": {}}}
    parts = [plain | {name: value} for name, value in wrong.items()]
    for content in ({"weight": torch.zeros(3)}, [1], dict.fromkeys(KEYS, 0), *parts):
        torch.save(content, path)
        assert "expects a checkpoint of this version of qgnn train" in error_of(qgnn_train(*arguments), capsys)
    torch.save({"version": Path()}, path)
    assert "whole checkpoint" in error_of(qgnn_train(*arguments), capsys), "which would run code"


@settings(max_examples=20)
@given(st.integers(0, 2**63))
def test_whatever_is_damaged_is_refused_or_what_was_written(seed: int) -> None:
    soak_files.checkpoint(Draw(seed))


def test_resuming_from_no_file_begins(qgnn_train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """So one command serves those who start it again and again."""
    arguments = ("--seeds", "1", "--epochs", "2", "--checkpoint", str(tmp_path / "a.pt"), "--resume")
    assert qgnn_train(*arguments) == 0
    assert "no file" in capsys.readouterr().err
    with epochs() as seen:
        assert qgnn_train(*arguments) == 0
    assert seen == []


def test_a_file_that_cannot_be_read_is_refused(
    qgnn_train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    message = error_of(qgnn_train("--checkpoint", str(tmp_path), "--resume"), capsys)
    assert "--checkpoint expects a file that can be written" in message


def test_files_are_not_written_over_each_other(
    qgnn_train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "a.pt")
    message = error_of(qgnn_train("--checkpoint", path, "--json", path), capsys)
    assert "expect files of their own" in message


def test_an_existing_file_is_kept(qgnn_train: Train, capsys: pytest.CaptureFixture[str], part: Path) -> None:
    before = part.read_bytes()
    message = error_of(qgnn_train("--seeds", "2", "--checkpoint", str(part)), capsys)
    assert "expects a new file" in message
    assert "add --resume to go on from it, or delete it" in message
    assert part.read_bytes() == before


@pytest.mark.parametrize("flag", [("--resume",), ("--checkpoint-every", "2")])
def test_a_file_has_to_be_named(qgnn_train: Train, capsys: pytest.CaptureFixture[str], flag: tuple[str, ...]) -> None:
    assert f"{flag[0]} expects --checkpoint FILE" in error_of(qgnn_train(*flag), capsys)


def test_an_unwritable_file_is_found_before_training(
    qgnn_train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with epochs() as seen:
        message = error_of(qgnn_train("--checkpoint", str(tmp_path / "no" / "a.pt")), capsys)
    assert "--checkpoint expects a file that can be written" in message
    assert seen == []


def test_a_full_disk_leaves_the_last_checkpoint(
    qgnn_train: Train, capsys: pytest.CaptureFixture[str], part: Path
) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = part.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "sync", fail)
        message = error_of(qgnn_train("--seeds", "2", "--checkpoint", str(part), "--resume"), capsys)
    assert "could not be written (No space left on device); what it held is still there" in message
    assert part.read_bytes() == before
    assert qgnn_train("--seeds", "2", "--checkpoint", str(part), "--resume") == 0


def test_a_file_is_replaced_when_all_of_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "a", []
    path.write_text("old")

    def sync(synced_path: Path) -> None:
        synced.append((synced_path.name, path.read_bytes()))

    monkeypatch.setattr(disk, "sync", sync)
    disk.replace_file(path, b"new")
    (part, held), behind = synced
    assert part.startswith("a.")
    assert part.endswith(".part")
    assert (held, behind) == (b"old", (tmp_path.name, b"new"))
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_a_file_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one, a process or thread, writes while this one's is not in its place yet; who comes last, stays."""
    path, real, others = tmp_path / "a", disk.sync, []

    def sync(synced: Path) -> None:
        real(synced)
        if not others:
            others.append(threading.Thread(target=disk.replace_file, args=(path, b"another")))
            others[0].start()
            others[0].join()
            assert path.read_bytes() == b"another"

    monkeypatch.setattr(disk, "sync", sync)
    disk.replace_file(path, b"one")
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]
