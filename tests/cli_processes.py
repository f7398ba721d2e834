"""``qgnn train`` on a tiny graph: in several processes, what starts them and the script that each of them is; and what
two trainings have in common."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch_geometric.data import Data

from qgnn.cli import app, main
from qgnn.cli import train as train_module
from qgnn.cli.sampled import SampledNodeTask
from qgnn.cli.task import Step
from qgnn.data import synthetic

TRAIN = ("train", "--device", "cpu", "--dataset", "photo", "--epochs", "4", "--hidden", "8")  # of the tiny graph
RANKS, SECONDS = 2, 600
TIMES = ("epoch_ms", "peak_mib")  # of a run: what a resumed one may measure otherwise
FAILS = "fails"  # behind the arguments of a command, the last one, in which the second process raises


def tiny_graph() -> Data:
    """271 nodes of seven classes."""
    data = synthetic("cora", scale=0.1)
    data.x = data.x[:, :64].contiguous()
    return data


def labeled_graph() -> Data:
    """The same, of which all nodes are to train on that are not to test on."""
    data = tiny_graph()
    data.train_mask = ~data.test_mask
    return data


def runs_of(path: Path) -> list[dict[str, Any]]:
    """The runs of a JSON, without times."""
    runs = json.loads(path.read_text())["runs"]
    return [{name: value for name, value in run.items() if name not in TIMES} for run in runs]


def assert_equal(first: Any, second: Any) -> None:
    """Of checkpoints: all but times."""
    assert type(first) is type(second)
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for name in first.keys() - {*TIMES, "times_ms", "start", "python"}:  # python's generator is not seeded
            assert_equal(first[name], second[name])
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for each, other in zip(first, second, strict=True):
            assert_equal(each, other)
    elif isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    else:
        assert first == second


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def run_all(commands: list[list[str]], folder: Path) -> list[list[dict[str, Any]]]:
    """Run commands one after another in the same processes: of each, what each process made of it.

    Their store is that of this process, as torchrun's is that of its agent.
    """
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in commands]
    lines = [{"arguments": command, "port": store.port} for command, store in zip(commands, stores, strict=True)]
    (folder / "commands.json").write_text(json.dumps(lines))
    group = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(RANKS):
            own = {**environment(), **group, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen([sys.executable, "-P", __file__, str(folder)], env=own))
        for process in processes:
            assert process.wait(SECONDS) == 0
    finally:
        for process in processes:
            process.kill()
    ended = [json.loads((folder / f"ended{rank}.json").read_text()) for rank in range(RANKS)]
    return [list(of_ranks) for of_ranks in zip(*ended, strict=True)]


def torchrun(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command under torchrun, of whose processes the second kills itself amid the third epoch."""
    (folder / "commands.json").write_text(json.dumps([{"arguments": command}]))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    whole = [sys.executable, "-P", *launcher, __file__, str(folder)]
    return subprocess.run(whole, env=environment(), capture_output=True, text=True, timeout=SECONDS)


def disturb(what: Callable[[], None]) -> None:
    """See that ``what`` happens in the second step of the third epoch, in the last process."""
    steps = SampledNodeTask.steps

    def disturbed(self: SampledNodeTask, *arguments: Any) -> Callable[[int], Iterator[Step]]:
        steps_of = steps(self, *arguments)

        def epoch_steps(number: int) -> Iterator[Step]:
            for place, step in enumerate(steps_of(number)):
                if (self.processes.rank, number, place) == (RANKS - 1, 3, 1):
                    what()
                yield step

        return epoch_steps

    SampledNodeTask.steps = disturbed  # type: ignore[method-assign]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail() -> None:
    raise ValueError("planted")


def _run_each(folder: Path) -> None:
    warnings.simplefilter("error")
    data, ended = labeled_graph(), []
    train_module.load = lambda *_: data.clone()  # type: ignore[assignment]
    for command in json.loads((folder / "commands.json").read_text()):
        if "port" not in command:
            disturb(_die)
            sys.exit(main(command["arguments"]))
        if command["arguments"][-1] == FAILS:
            disturb(_fail)
            command["arguments"].pop()
        os.environ["MASTER_PORT"] = str(command["port"])
        app.leave = lambda _, code: code  # type: ignore[assignment] # there are more commands
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = main(command["arguments"])
        if dist.is_initialized():  # behind an error
            dist.destroy_process_group()
        ended.append({"code": code, "out": out.getvalue(), "err": err.getvalue()})
    (folder / f"ended{os.environ['RANK']}.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    _run_each(Path(sys.argv[1]))
