"""``qgnn train`` in several processes: the loss of one, batches shared, a process that dies, errors told once."""

import json
import os
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from cli_processes import FAILS, RANKS, TRAIN, assert_equal, labeled_graph, run_all, runs_of, torchrun
from qgnn.cli import main
from qgnn.cli import train as train_module
from qgnn.cli.processes import ALONE, Processes, ProcessLostError, is_launched, joined, leave
from qgnn.cli.sampled import SampledNodeTask, Sampling, Shares

CPU = torch.device("cpu")

# 64 nodes to train on: the last batch has one node, and so nothing for the second process.
BATCHES = ("--sampler", "neighbor", "--batch-size", "9")
SAGE = (*BATCHES, "--model", "sage", "--fanout", "all,all", "--dropout", "0", "--precision", "fp32", "--seeds", "2")
# Everything that has a state: rounding, codes, a schedule, dropout, int8 gradients; and a run that ends before.
STATES = (*BATCHES, "--precision", "int4:sdq[2,4]", "--compress", "none,int2", "--seeds", "1", "--gradients", "int8")


class Found:
    """What the processes made of all commands, by name; what torchrun did; and where the files are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "alone.pt").write_bytes(b"no checkpoint")
        dead = (*STATES, "--checkpoint", str(folder / "dead.pt"))
        self.killed = torchrun([*TRAIN, *dead], folder)
        self.at_death = torch.load(folder / "dead.pt", weights_only=True)
        commands = {
            "resumed": (*dead, "--resume", "--json", str(folder / "resumed.json")),
            "whole": (*STATES, "--checkpoint", str(folder / "whole.pt"), "--json", str(folder / "whole.json")),
            "sage": (*SAGE, "--json", str(folder / "sage.json")),
            "int8": (*SAGE, "--gradients", "int8", "--json", str(folder / "int8.json")),
            "typo": ("--no-such-option",),
            "graph": (),
            "graphs": ("--dataset", "mutag", "--sampler", "neighbor"),
            "batch": ("--sampler", "neighbor", "--batch-size", "1"),
            "one rank": (*BATCHES, "--json", str(folder / "no" / "a.json")),
            "damaged": (*BATCHES, "--checkpoint", str(folder / "alone.pt"), "--resume"),
            "alone": (*SAGE, "--checkpoint", str(folder / "sage.pt"), "--resume"),
            "fails": (*SAGE, FAILS),
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_module, "load", lambda *_: labeled_graph())
            files = ("--checkpoint", str(folder / "sage.pt"), "--json", str(folder / "one.json"))
            assert main([*TRAIN, *SAGE, *files]) == 0
        ended = run_all([[*TRAIN, *command] for command in commands.values()], folder)
        self.ended = dict(zip(commands, ended, strict=True))

    def json(self, name: str) -> Any:
        return json.loads((self.folder / f"{name}.json").read_text())

    def codes(self, name: str) -> list[int]:
        return [ended["code"] for ended in self.ended[name]]

    def written(self, name: str) -> str:
        """To standard error, by all processes."""
        return "".join(ended["err"] for ended in self.ended[name])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("processes"))


def test_two_processes_have_the_losses_of_one(found: Found) -> None:
    """Means over all neighbors do not depend on what else is in a batch. Sums take another order: some 1e-7 a step."""
    for one, two in zip(found.json("one")["runs"], found.json("sage")["runs"], strict=True):
        assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert one["losses"][-1] < 0.99 * one["losses"][0]
        assert (two["test_acc"], two["best_epoch"]) == (one["test_acc"], one["best_epoch"])
        assert two["sent_bytes"] == two["full_bytes"] > 0
    assert found.codes("sage") == [0, 0]


def test_int8_gradients_train_as_full_ones(found: Found) -> None:
    full, int8 = found.json("sage"), found.json("int8")
    assert (full["gradients"], int8["gradients"]) == ("fp32", "int8")
    assert full["processes"] == int8["processes"] == RANKS
    for of_full, of_int8 in zip(full["runs"], int8["runs"], strict=True):
        assert of_int8["losses"] == pytest.approx(of_full["losses"], rel=0.02)
        assert of_int8["losses"] != of_full["losses"]
        assert of_int8["full_bytes"] == of_full["full_bytes"]
        assert 3.9 < of_int8["full_bytes"] / of_int8["sent_bytes"] <= 4


def test_the_first_process_alone_reports(found: Found) -> None:
    first, second = found.ended["int8"]
    assert f"; processes: {RANKS}, gradients: int8" in " ".join(first["out"].split())
    assert first["err"].startswith("fp32, seed 0: test accuracy ")
    assert second["out"] == second["err"] == ""


def test_a_lost_process_ends_the_others(found: Found) -> None:
    """And torchrun, with a message of ours beside its own; what is written of the third epoch is the second."""
    assert found.killed.returncode == 1
    lines = [line for line in found.killed.stderr.splitlines() if line.startswith("qgnn train: error: ")]
    assert len(lines) == 1
    assert re.search(r": the process group lost a process: .+; the same command with --resume goes on from '", lines[0])
    assert found.at_death["current"]["training"]["epoch"] == 2
    assert found.at_death["runs"] == []


def test_what_a_lost_process_ended_is_resumed_bit_for_bit(found: Found) -> None:
    assert found.codes("resumed") == found.codes("whole") == [0, 0]
    assert runs_of(found.folder / "resumed.json") == runs_of(found.folder / "whole.json")
    resumed, whole = (torch.load(found.folder / f"{name}.pt", weights_only=True) for name in ("dead", "whole"))
    assert_equal(resumed, whole)
    assert len(whole["runs"]) == 2


def test_processes_draw_for_themselves(found: Found) -> None:
    """Dropout, neighbors and rounding of rows from torch's generator, that of codes from their own."""
    first, second = torch.load(found.folder / "whole.pt", weights_only=True)["current"]["training"]["processes"]
    assert not torch.equal(first["random"]["torch"], second["random"]["torch"])
    assert first["compressed"] != second["compressed"]
    assert Processes(0, 2).own_seed(3) != Processes(1, 2).own_seed(3) != Processes(1, 2).own_seed(4)
    assert ALONE.own_seed(3) == 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("typo", "unrecognized arguments: --no-such-option; see qgnn --help"),
        ("graph", "2 processes expect batches, to share each (got a step over a whole graph); give --sampler neighbor"),
        ("graphs", "2 processes expect batches, to share each (got many graphs); start a single one"),
        ("batch", "--batch-size expects a node for each process, 2 (got 1)"),
        (
            "one rank",
            "a.json': No such file or directory); name one in an existing folder of yours (in process 0 of 2)",
        ),
        ("damaged", "--resume expects a whole checkpoint (got "),
        ("alone", "processes 1 (got 2), gradients None (got fp32); give the same"),
    ],
)
def test_a_usage_error_is_told_once(found: Found, name: str, expected: str) -> None:
    assert found.codes(name) == [2, 2]
    written = found.written(name)
    assert written.startswith("qgnn train: error: ")
    assert expected in written
    assert written.count("\n") == 1


def test_an_error_of_one_process_is_told_by_that_one(found: Found) -> None:
    assert found.codes("fails") == [1, 2]
    first, second = found.ended["fails"]
    assert second["err"] == "qgnn train: error: --precision fp32 on cpu: planted\n"
    assert first["err"] == ""


# ---- in this process


def shares(rank: int, size: int, epoch: int = 1, count: int = 14, batch_size: int = 5) -> Shares:
    result = Shares(count, batch_size, 3, Processes(rank, size))
    result.epoch = epoch
    return result


def test_shares_of_a_batch_are_all_of_it() -> None:
    whole = list(shares(0, 1))
    assert sorted(node for batch in whole for node in batch) == list(range(14))
    for size in (2, 3):
        of_ranks = [list(shares(rank, size)) for rank in range(size)]
        for batch, *parts in zip(whole, *of_ranks, strict=True):
            assert sorted(node for part in parts for node in part) == sorted(batch)
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert list(shares(0, 1, epoch=2)) != whole
    assert len(shares(0, 1)) == len(whole) == 3


def test_a_process_without_a_node_takes_the_step_without_weight() -> None:
    """Of the last batch, one node: the second process repeats it, and counts it 0 times."""
    first, second = (list(shares(rank, 2, count=11)) for rank in range(2))
    assert first[-1] == second[-1]
    assert shares(0, 2, count=11).sizes == [(3, 5), (3, 5), (1, 1)]
    assert shares(1, 2, count=11).sizes == [(2, 5), (2, 5), (0, 1)]


def test_steps_weigh_the_nodes_alike(tiny: Data) -> None:
    """The mean of the processes' losses, each times its share, is that of all nodes."""
    for rank in range(3):
        task = SampledNodeTask(tiny, Sampling((2,), 5, 0), CPU, processes=Processes(rank, 3))
        steps = list(task.steps(tiny.x, train_module.Recipe(), 0)(1))
        assert [step.size for step in steps] == [[2, 2, 2], [2, 2, 1], [1, 1, 1]][rank]
        assert [step.share for step in steps] == [
            3 * step.size / total for step, total in zip(steps, (5, 5, 4), strict=True)
        ]


def test_nothing_to_train_on_is_an_error(qgnn_train: Callable[..., int], tiny: Data, capsys: Any) -> None:
    tiny.train_mask[:] = False
    assert qgnn_train("--sampler", "neighbor") == 2
    assert "expected nodes to train on (got none)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"WORLD_SIZE": "1"}, False),
        ({"WORLD_SIZE": "2"}, True),
        ({"WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}, True),
    ],
)
def test_a_launched_process_is_known(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: bool
) -> None:
    for name in ("WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_launched() == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WORLD_SIZE": "2", "RANK": ""}, "environment variable RANK expected, but not set"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "invalid literal for int() with base 10: 'two'"),
    ],
)
def test_a_broken_environment_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    qgnn_train: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    expected: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert qgnn_train() == 2
    error = capsys.readouterr().err
    assert "several processes expect the environment that torchrun makes" in error
    assert expected in error
    assert error.count("\n") == 1


def test_processes_that_do_not_come_are_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**group, "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(ProcessLostError, match=r"not all have come together within 0\.2 s \(.+\)$"),
        joined(0.2),
    ):
        pytest.fail("joined alone")


def test_behind_an_error_a_process_of_a_group_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    assert leave(ALONE, 3) == 3
    assert codes == []
    leave(Processes(1, 2, 1, torch.distributed.HashStore()), 3)
    assert codes == [3]


@pytest.mark.parametrize("flag", [("--gradients", "int8"), ("--timeout", "5")])
def test_what_is_for_several_processes_needs_them(
    qgnn_train: Callable[..., int], capsys: pytest.CaptureFixture[str], flag: tuple[str, str]
) -> None:
    assert qgnn_train(*flag) == 2
    assert f"{flag[0]} expects several processes: torchrun --nproc-per-node 2 -m qgnn" in capsys.readouterr().err


def test_every_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(train_module.importlib.util, "find_spec", lambda _: True)
    store = torch.distributed.HashStore()
    assert train_module.pick_device(None, Processes(5, 8, 1, store)) == torch.device("cuda", 1)
    assert chosen == [1]
    with pytest.raises(train_module.UsageError, match=r"a GPU for each process of a machine \(got 2 for process 2\)"):
        train_module.pick_device("cuda", Processes(6, 8, 2, store))
    assert train_module.pick_device("cpu", Processes(6, 8, 2, store)) == CPU
    assert train_module.pick_device("cuda") == torch.device("cuda")


def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What torchrun starts."""
    monkeypatch.setattr("sys.argv", ["qgnn", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("qgnn", run_name="__main__")
    assert capsys.readouterr().out.startswith("qgnn ")
