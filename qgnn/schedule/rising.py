"""Widths that the losses raise."""

from __future__ import annotations

from abc import abstractmethod
from numbers import Real

from torch import Tensor

from qgnn.schedule.schedule import MAX_BITS, Loss, Schedule, check_int, check_number, read
from qgnn.schedule.targets import Targets


class _Rising(Schedule):
    """A width that the losses raise.

    Args:
        target: What gets the width.
        start: The first width.
        stop: The last one.
    """

    def __init__(self, target: Targets, start: int, stop: int) -> None:
        name = type(self).__name__
        self.start = check_int(name, "start", start, 1, MAX_BITS)
        self.stop = check_int(name, "stop", stop, 1, MAX_BITS)
        if start > stop:
            raise ValueError(
                f"'{name}' expects 'start' to be at most 'stop' (got {start} and {stop}): widths only rise"
            )
        super().__init__(target, (start, stop))
        self.widths = [bits for bits in range(start, stop + 1) if self._has(bits)]
        self.losses: list[Loss] = []  # of the epochs since the last decision that may still be asked for
        self._start(start)

    def _has(self, bits: int) -> bool:
        try:
            self._check(bits)
        except ValueError:
            return False
        return True

    def _step(self, epoch: int, loss: Loss | None) -> None:
        name = type(self).__name__
        if epoch != self.last_epoch + 1:
            raise ValueError(
                f"'{name}.step' expects each epoch in turn, now 'epoch' {self.last_epoch + 1} (got {epoch}): it is the "
                f"number of epochs done, and may be left away"
            )
        if loss is None:
            raise ValueError(f"'{name}.step' expects the epoch's loss (got None); call 'step(loss=...)'")
        if isinstance(loss, bool) or not isinstance(loss, (Real, Tensor)):
            raise TypeError(f"'{name}.step' expects 'loss' to be a number or a tensor (got {type(loss).__name__})")
        if isinstance(loss, Tensor) and (loss.numel() != 1 or loss.is_complex()):
            raise ValueError(f"'{name}.step' expects 'loss' with one real number (got shape {list(loss.shape)})")
        rises = False
        if self.current_bits < self.stop:
            # A copy: a replayed CUDA graph writes each epoch's loss to the same place.
            self.losses.append(loss.detach().clone().reshape(()) if isinstance(loss, Tensor) else float(loss))
            rises = self._rises(epoch)
        position = self.widths.index(self.current_bits)
        self.history.append(self.widths[position + rises])

    @abstractmethod
    def _rises(self, epoch: int) -> bool:
        """Whether ``epoch`` gets a wider code than the one before it, whose loss is the last of ``self.losses``."""


class ActiveSchedule(_Rising):
    r"""One bit more whenever the mean loss of a few epochs no longer falls: active dynamic quantization, ADQ[x, y].

    With :math:`L_n` the loss of the :math:`n`-th epoch, counted from 1, the width grows by a bit where

    .. math:: \frac{1}{w} \sum_{k=n-w+1}^{n} L_k > p \cdot \frac{1}{w} \sum_{k=n-2w+1}^{n-w} L_k

    for :math:`n = n_0, n_0 + w, n_0 + 2w, \dots` with ``window`` :math:`w`, ``patience`` :math:`p` and ``warmup``
    :math:`n_0`. By default, the width changes first for the 11th epoch, from the losses of the ten before it, and then
    for the 16th, 21st, ..., or stays: "from epoch 11 on, every 5 epochs", in our reading. Losses are positive. One that
    is NaN raises no width.

    Args:
        target: A model with quantized layers, a :class:`qgnn.compress_activations` (where one bit more is the next of
            its widths), a function of the width, or a list of these.
        start: The first width.
        stop: The last one.
        window: Epochs of a mean, and from one decision to the next.
        patience: The largest ratio of the later to the earlier mean that counts as falling.
        warmup: Epochs before the first decision, at least two windows.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is outside its range, the model has no quantized layer, or a target not the width.

    Example:
        >>> schedule = qgnn.schedule.ActiveSchedule(model, start=4, stop=8)
        >>> for epoch in range(200):
        ...     loss = train(model)
        ...     schedule.step(loss=loss)
    """

    _names = ("start", "stop", "window", "patience", "warmup")

    def __init__(
        self, target: Targets, start: int, stop: int, window: int = 5, patience: float = 0.95, warmup: int = 10
    ) -> None:
        self.window = check_int("ActiveSchedule", "window", window, 1)
        self.patience = check_number("ActiveSchedule", "patience", patience)
        self.warmup = check_int("ActiveSchedule", "warmup", warmup, 2 * window)
        super().__init__(target, start, stop)

    def _rises(self, epoch: int) -> bool:
        self.losses = self.losses[-2 * self.window :]
        if epoch < self.warmup or (epoch - self.warmup) % self.window:
            return False
        losses = read(self.losses)
        before, last = sum(losses[: self.window]), sum(losses[self.window :])
        return bool(last > self.patience * before)


class PlateauSchedule(_Rising):
    """One bit more when the loss has not improved for more than ``patience`` epochs, as
    :class:`torch.optim.lr_scheduler.ReduceLROnPlateau` counts them.

    Args:
        target: A model with quantized layers, a :class:`qgnn.compress_activations` (where one bit more is the next of
            its widths), a function of the width, or a list of these.
        start: The first width.
        stop: The last one.
        patience: Epochs without improvement that are let pass: the one after them raises the width.
        threshold: By which part of the best value a value has to be better to count as an improvement.
        mode: Whether ``"min"`` or ``"max"`` is better.
        cooldown: Epochs after a raise that do not count.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is outside its range, the model has no quantized layer, or a target not the width.

    Example:
        >>> schedule = qgnn.schedule.PlateauSchedule(model, start=4, stop=8, patience=10)
        >>> schedule.step(loss=validation_loss)
    """

    _names = ("start", "stop", "patience", "threshold", "mode", "cooldown")

    def __init__(
        self,
        target: Targets,
        start: int,
        stop: int,
        patience: int = 10,
        threshold: float = 1e-4,
        mode: str = "min",
        cooldown: int = 0,
    ) -> None:
        self.patience = check_int("PlateauSchedule", "patience", patience, 0)
        self.threshold = check_number("PlateauSchedule", "threshold", threshold)
        if mode not in ("min", "max"):
            raise ValueError(f"'PlateauSchedule' expects 'mode' to be 'min' or 'max' (got {mode!r})")
        self.mode = mode
        self.cooldown = check_int("PlateauSchedule", "cooldown", cooldown, 0)
        self.best = float("inf") if mode == "min" else float("-inf")
        self.num_bad_epochs = self.cooldown_left = 0
        super().__init__(target, start, stop)

    def _rises(self, epoch: int) -> bool:
        # Fewer losses than are missing cannot raise the width, and so need not be waited for.
        if self.num_bad_epochs + len(self.losses) <= self.patience:
            return False
        for loss in read(self.losses):
            self._count(loss)
        self.losses = []
        if self.num_bad_epochs <= self.patience:
            return False
        self.num_bad_epochs, self.cooldown_left = 0, self.cooldown
        return True

    def _count(self, loss: float) -> None:
        if self.mode == "min":
            better = loss < self.best * (1 - self.threshold)
        else:
            better = loss > self.best * (1 + self.threshold)
        if better:
            self.best = loss
        self.num_bad_epochs = 0 if better else self.num_bad_epochs + 1
        if self.cooldown_left > 0:
            self.cooldown_left -= 1
            self.num_bad_epochs = 0
