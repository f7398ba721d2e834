"""Training over several processes with fewer bytes between them, on ``torch.distributed``."""

from qgnn.distributed.gradients import Int8State, int8_hook

__all__ = ["Int8State", "int8_hook"]
