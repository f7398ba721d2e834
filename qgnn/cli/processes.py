"""The processes that train a model together: this one alone, or those that torchrun has started."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from qgnn.cli.errors import UsageError
from qgnn.rng import derive_seed

TIMEOUT_S = 600.0
PRINTING_S = 5.0  # for the process that has said that it prints

Result = TypeVar("Result")


class ProcessLostError(Exception):
    """A process of the group is gone or does not answer, or this one was told to end."""


@dataclass(frozen=True)
class Processes:
    """The processes that train a model together.

    Args:
        rank: The number of this one.
        size: How many there are.
        local_rank: The number of this one on its machine.
        store: Where they leave word for each other; ``None`` for a process on its own.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    store: dist.Store | None = None

    @property
    def is_joined(self) -> bool:
        """Whether there is a group, even if it is one of this process alone."""
        return self.store is not None

    @property
    def is_first(self) -> bool:
        """Whether this one speaks for all: it evaluates, and writes files."""
        return self.rank == 0

    def own_seed(self, seed: int) -> int:
        """The seed of what has to differ between processes; a single one keeps the given one."""
        return seed if self.size == 1 else derive_seed(seed, self.rank)

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in the order of their ranks."""
        if not self.is_joined:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def from_first(self, value: Any) -> Any:
        """The value of the first process."""
        values = [value]
        if self.is_joined:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def agree(self, function: Callable[[], Result]) -> Result:
        """The result of a function; a :class:`UsageError` that it raises in one process is raised in all."""
        try:
            result, error = function(), None
        except UsageError as raised:
            result, error = None, raised
        errors = self.gather(error)
        failed = [rank for rank, error in enumerate(errors) if error is not None]
        if failed:
            where = "" if len(failed) == self.size else f" (in process {failed[0]} of {self.size})"
            raise UsageError(f"{errors[failed[0]]}{where}") from error
        return result  # type: ignore[return-value]

    def mean(self, total: Tensor, count: int) -> Tensor:
        """The sum of the totals of all processes over that of the counts."""
        if not self.is_joined:
            return total / count
        sums = torch.stack([total.double(), total.new_tensor(count, dtype=torch.float64)])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).to(total.dtype)

    def say(self, line: str) -> None:
        """Print a line on standard error, unless another process of the group has done so."""
        if self.store is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone with the process that held it
                if self.store.add("printing", 1) > 1:
                    self.store.wait(["printed"], timedelta(seconds=PRINTING_S))
                    return
        print(line, file=sys.stderr, flush=True)
        if self.store is not None:
            with contextlib.suppress(RuntimeError):
                self.store.set("printed", "")


ALONE = Processes()


def is_launched() -> bool:
    """Whether torchrun, or what sets the same variables, has started this process as one of a group."""
    return "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"


@contextlib.contextmanager
def joined(timeout_s: float) -> Iterator[Processes]:
    """The group of the processes that were started together, within the block.

    Gloo serves tensors on the CPU, NCCL those on a GPU. SIGTERM, which torchrun sends to the others when a process has
    ended, ends the block as the loss of a process does.

    Args:
        timeout_s: Seconds to wait for another process, here and in whatever they do together.

    Raises:
        UsageError: If the environment is not that of a group.
        ProcessLostError: If the others do not come.
    """
    with _ended_by_sigterm():
        timeout = timedelta(seconds=timeout_s)
        try:
            store, rank, size = next(rendezvous("env://", timeout=timeout))
            store.set_timeout(timeout)
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
            dist.init_process_group(
                backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=timeout
            )
            local_rank = int(os.environ.get("LOCAL_RANK", rank))
        except ValueError as error:
            raise UsageError(f"several processes expect the environment that torchrun makes (got: {error})") from error
        except RuntimeError as error:
            raise ProcessLostError(f"not all have come together within {timeout_s:g} s ({_reason(error)})") from error
        try:
            yield Processes(rank, size, local_rank, dist.PrefixStore("qgnn", store))
        except RuntimeError as error:
            if _tells_of_loss(error):
                raise ProcessLostError(_reason(error)) from error
            raise
        dist.destroy_process_group()


def leave(processes: Processes, code: int) -> int:
    """The exit code of a process behind an error. One of a group ends with it here and now: Python's way out passes
    through gloo, which waits for what another one has not sent, even if that one is gone."""
    if processes.is_joined:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _tells_of_loss(error: RuntimeError) -> bool:
    """Whether it is what a collective raises without its peer. Gloo's errors have no type of their own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _reason(error: RuntimeError) -> str:
    """Its first sentence, without the place in torch's source."""
    return re.sub(r"^\[\S+\] ", "", str(error).partition("\n")[0].partition(". ")[0])


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises within the block; once a process is lost, what is left is to say so, which it does not disturb."""

    def stop(*_: Any) -> None:
        raise ProcessLostError("this one was ended by SIGTERM, as torchrun does when another one ends")

    handler = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except ProcessLostError:
        handler = signal.SIG_IGN
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)
