"""Widths of codes that change during training.

- :class:`StaticSchedule`: a list of widths over equal parts of the training (SDQ);
- :class:`ActiveSchedule`: one bit more whenever the mean loss of a few epochs no longer falls (ADQ);
- :class:`PlateauSchedule`: one bit more when the loss has not improved for some epochs, as
  :class:`torch.optim.lr_scheduler.ReduceLROnPlateau` has it.

A schedule is made behind the model and stepped once after each epoch, as schedulers of torch are. It sets the widths of
quantized layers, of the compressor of activations, or of anything else by a function. ``last_epoch`` is the number of
epochs done, so epochs are counted from 0: the constructor sets the width of epoch 0, and the first ``step()`` that of
epoch 1. A compiled model is compiled once for each width that comes up, in training and in eval mode: raise
``torch._dynamo.config.recompile_limit`` where these are more than it allows.
"""

from qgnn.schedule.rising import ActiveSchedule, PlateauSchedule
from qgnn.schedule.schedule import Schedule
from qgnn.schedule.static import StaticSchedule

__all__ = ["ActiveSchedule", "PlateauSchedule", "Schedule", "StaticSchedule"]
