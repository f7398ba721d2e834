"""The file that a training goes on from: what runs that have ended measured, and the state of the one that has not."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import torch

from qgnn.cli.errors import UsageError
from qgnn.data.disk import load_whole, replace_file

VERSION = 2
OTHER_FILE = (
    "--resume expects a checkpoint of this version of qgnn train (got {}, another file); begin without --resume, with "
    "another --checkpoint"
)
KEYS = {"version", "arguments", "start", "runs", "current"}


class Checkpoint:
    """What is known of the runs of a command, and the file that it is kept in.

    Args:
        path: The file; ``None`` keeps nothing.
        every: Epochs from one writing to the next.
        arguments: What runs follow from, by name: plain values, which a file has to have too.
        start: When and where the command began: plain values, which those of a file replace.
        writes: Whether it is this process that writes the file.
    """

    def __init__(
        self, path: Path | None, every: int, arguments: dict[str, Any], start: dict[str, Any], writes: bool = True
    ) -> None:
        self.path, self.every, self.arguments, self.start, self.writes = path, every, arguments, start, writes
        self.runs: list[dict[str, Any]] = []
        self._current: dict[str, Any] | None = None

    def has_ended(self, names: dict[str, Any]) -> bool:
        """Whether the run of these names has ended."""
        return any(all(run[name] == value for name, value in names.items()) for run in self.runs)

    def state_of(self, names: dict[str, Any]) -> dict[str, Any] | None:
        """The state to go on from with the run of these names, if it has begun."""
        return self._current["training"] if self._current is not None and self._current["names"] == names else None

    def is_due(self, epoch: int, epochs: int) -> bool:
        """Whether the state behind this one of the epochs is to be kept."""
        return self.path is not None and (epoch % self.every == 0 or epoch == epochs)

    def keep(self, names: dict[str, Any], state: dict[str, Any]) -> None:
        """Keep the state of a run, until that of another one comes."""
        if self.writes:
            self._current = {"names": names, "training": _kept(state)}
            self._write()

    def end(self, run: dict[str, Any]) -> None:
        """Keep what a run measured that has ended."""
        self.runs.append(run)
        if self.path is not None and self.writes:
            self._write()

    def _write(self) -> None:
        assert self.path is not None
        file = io.BytesIO()
        values = {"arguments": self.arguments, "start": self.start, "runs": self.runs, "current": self._current}
        torch.save({"version": VERSION, **values}, file)
        try:
            replace_file(self.path, file.getvalue())
        except OSError as error:
            raise UsageError(
                f"--checkpoint: {str(self.path)!r} could not be written ({error.strerror}); what it held is still there"
            ) from error

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from what :func:`read_checkpoint` found.

        Raises:
            UsageError: If it is of other arguments, or of something else.
        """
        different = [
            f"{name} {saved['arguments'].get(name)} (got {value})"
            for name, value in self.arguments.items()
            if saved["arguments"].get(name) != value
        ]
        if different:
            raise UsageError(
                f"--resume expects the arguments that {str(self.path)!r} was written with: {', '.join(different)}; "
                "give the same, or another --checkpoint without --resume"
            )
        if saved["start"].keys() != self.start.keys():
            raise UsageError(OTHER_FILE.format(repr(str(self.path))))
        self.start, self.runs, self._current = saved["start"], saved["runs"], saved["current"]


def _kept(value: Any) -> Any:
    """A copy in the memory of the host, of which training goes on to change nothing."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _kept(item) for key, item in value.items()}
    return type(value)(map(_kept, value)) if isinstance(value, (list, tuple)) else value


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What a checkpoint holds.

    Raises:
        UsageError: If there is none, or it is damaged.
    """
    try:
        with path.open("rb") as file:
            saved = load_whole(file)
    except OSError as error:
        raise UsageError(
            f"--resume expects a checkpoint that can be read (got {str(path)!r}: {error.strerror}); begin without "
            "--resume"
        ) from error
    except ValueError as error:
        raise UsageError(
            f"--resume expects a whole checkpoint (got {str(path)!r}: {error}); begin without --resume, or give a copy"
        ) from error
    if not _is_ours(saved):
        raise UsageError(OTHER_FILE.format(repr(str(path))))
    return saved


def _is_ours(saved: Any) -> bool:
    """Whether it is what a :class:`Checkpoint` of this version writes."""
    if not isinstance(saved, dict) or saved.keys() != KEYS or type(saved["version"]) is not int:
        return False
    arguments, start, runs, current = (saved[name] for name in ("arguments", "start", "runs", "current"))
    return (
        saved["version"] == VERSION
        and isinstance(arguments, dict)
        and isinstance(start, dict)
        and isinstance(runs, list)
        and all(isinstance(run, dict) for run in runs)
        and (current is None or (isinstance(current, dict) and current.keys() == {"names", "training"}))
    )


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of the generators that training draws from."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Go on from a :func:`random_state`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
