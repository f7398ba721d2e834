"""Widths by a list."""

from __future__ import annotations

from collections.abc import Iterable

from qgnn.schedule.schedule import MAX_BITS, Loss, Schedule, check_int
from qgnn.schedule.targets import Targets


class StaticSchedule(Schedule):
    r"""A list of widths over equal parts of the training: static dynamic quantization, SDQ[x, y, z, v].

    Of :math:`E` epochs and :math:`k` widths, epoch :math:`i = 0, 1, \dots` has the width with the number
    :math:`\lfloor i k / E \rfloor`: part :math:`j` begins with epoch :math:`\lceil j E / k \rceil`. Ten epochs and four
    widths make parts of 3, 2, 3 and 2 epochs. Later epochs keep the last width.

    Args:
        target: A model with quantized layers, a :class:`qgnn.compress_activations`, a function of the width, or a list
            of these.
        bits: The widths, at least one.
        epochs: Epochs of the whole training, at least as many as there are widths.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is outside its range, the model has no quantized layer, or a target not the width.

    Example:
        >>> schedule = qgnn.schedule.StaticSchedule(model, bits=(8, 6, 5, 4), epochs=200)
        >>> for epoch in range(200):
        ...     train(model)
        ...     schedule.step()
    """

    _names = ("bits", "epochs")

    def __init__(self, target: Targets, bits: Iterable[int], epochs: int) -> None:
        if isinstance(bits, (int, str)) or not isinstance(bits, Iterable):
            raise TypeError(f"'StaticSchedule' expects 'bits' to be a list of widths (got {bits!r})")
        self.bits = list(bits)
        for width in self.bits:
            check_int("StaticSchedule", "bits", width, 1, MAX_BITS)
        if not self.bits:
            raise ValueError("'StaticSchedule' expects at least one width in 'bits' (got none)")
        self.epochs = check_int("StaticSchedule", "epochs", epochs, len(self.bits))
        super().__init__(target, self.bits)
        self._start(self.bits[0])

    def _step(self, epoch: int, loss: Loss | None) -> None:
        if epoch < 0:
            raise ValueError(f"'StaticSchedule.step' expects 'epoch' to be at least 0 (got {epoch})")
        del self.history[epoch + 1 :]
        self.history += [self._width_of(i) for i in range(len(self.history), epoch + 1)]

    def _width_of(self, epoch: int) -> int:
        return self.bits[min(epoch * len(self.bits) // self.epochs, len(self.bits) - 1)]
