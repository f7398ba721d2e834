"""What all schedules share: steps, the widths so far, state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from qgnn.schedule.targets import Targets, check_width, checked_targets, set_width

Loss = float | Tensor

MAX_BITS = 16


class Schedule(ABC):
    """What schedules share: what they set, the widths so far, and their state.

    Args:
        target: A model, whose quantized layers get ``config.with_bits(bits)`` (layers in full precision stay so); a
            :class:`qgnn.compress_activations`, whose blocks get the width from the next one on; a function of the
            width; or a list of these.
        widths: The widths that may come up, each of which every target has to have.
    """

    _names: tuple[str, ...] = ()  # attributes that `repr` shows

    def __init__(self, target: Targets, widths: Iterable[int]) -> None:
        self._targets = checked_targets(type(self).__name__, target)
        for bits in dict.fromkeys(widths):
            self._check(bits)
        self.history: list[int] = []  # the width of each epoch, that of the current one last

    @property
    def last_epoch(self) -> int:
        """The number of epochs done, which is the current one's number, counted from 0."""
        return len(self.history) - 1

    @property
    def current_bits(self) -> int:
        """The width of the current epoch."""
        return self.history[-1]

    @property
    def mean_bits(self) -> float:
        """The mean width of the epochs done; before the first is done, its width."""
        done = self.history[:-1] or self.history
        return sum(done) / len(done)

    def step(self, epoch: int | None = None, loss: Loss | None = None) -> None:
        """End an epoch, and set the width of the next one.

        Args:
            epoch: The number of epochs done; ``None`` means one more than before.
            loss: The epoch's loss, where the schedule asks for it: a number, or a tensor with one element, which is
                read only when the schedule decides.

        Raises:
            TypeError: If ``epoch`` is no integer, or ``loss`` no number.
            ValueError: If ``epoch`` does not fit, or the schedule needs a loss and gets none.
        """
        name = type(self).__name__
        if epoch is not None and (isinstance(epoch, bool) or not isinstance(epoch, int)):
            raise TypeError(
                f"'{name}.step' expects 'epoch' to be an int or None (got {epoch!r}); give a loss as 'loss=...'"
            )
        before = self.current_bits
        self._step(self.last_epoch + 1 if epoch is None else epoch, loss)
        if self.current_bits != before:
            self._apply()

    def state_dict(self) -> dict[str, Any]:
        """All of the schedule but its target, of plain numbers and lists."""
        return {name: _plain(value) for name, value in vars(self).items() if name != "_targets"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state_dict`, arguments of the constructor included, and set the current width.

        Args:
            state_dict: As :meth:`state_dict` returned it.

        Raises:
            ValueError: If it is the state of another class, or the target does not have its width.
        """
        owner, own = type(self).__name__, vars(self).keys() - {"_targets"}
        if own != set(state_dict):
            raise ValueError(
                f"'{owner}.load_state_dict' expects the entries {sorted(own)} (got {sorted(state_dict)}); give it the "
                f"state of a {owner}"
            )
        self._check(state_dict["history"][-1])
        self.__dict__.update({name: _plain(value) for name, value in state_dict.items()})
        self._apply()

    @abstractmethod
    def _step(self, epoch: int, loss: Loss | None) -> None:
        """Append the width of ``epoch`` to the history."""

    def _check(self, bits: int) -> None:
        for target in self._targets:
            check_width(target, bits)

    def _apply(self) -> None:
        for target in self._targets:
            set_width(target, self.current_bits)

    def _start(self, bits: int) -> None:
        self.history.append(bits)
        self._apply()

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in (*self._names, "last_epoch", "current_bits"))
        return f"{type(self).__name__}({values})"


def check_int(owner: str, name: str, value: object, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"'{owner}' expects '{name}' to be an int (got {value!r})")
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"'{owner}' expects '{name}' {limits} (got {value})")
    return value


def check_number(owner: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"'{owner}' expects '{name}' to be a number (got {value!r})")
    if not value >= 0:
        raise ValueError(f"'{owner}' expects '{name}' of at least 0 (got {value})")
    return float(value)


def read(losses: list[Loss]) -> list[float]:
    """Losses as numbers, with one wait for the device."""
    tensors = [loss for loss in losses if isinstance(loss, Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(numbers) if isinstance(loss, Tensor) else loss for loss in losses]


def _plain(value: Any) -> Any:
    """A copy of an entry of a state, with tensors as numbers."""
    return read(value) if isinstance(value, list) else value
