"""The masks of dropout of a step that is repeated: drawn again, in any type, or given."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.nn import GraphSAGE

DROPOUT = 0.5


class Fp32Masks(torch.nn.Module):
    """Dropout of any type with the masks that are drawn for fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return x * F.dropout(torch.ones_like(x, dtype=torch.float32), DROPOUT).to(x.dtype)


class Masks(torch.nn.Module):
    """Dropout that remembers whom it kept, for :class:`Given`."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(x, DROPOUT)
        self.kept.append(y != 0)  # wrong where ReLU is zero: its gradient is, too
        alive = int((x != 0).sum())
        share = int(self.kept[-1].sum()) / alive
        if abs(share - 0.5) > 5 * 0.5 / math.sqrt(alive):
            raise ValueError(f"dropout keeps {share:.4f}, not half of the values")
        return y


class Given(torch.nn.Module):
    """Dropout with masks of one pass."""

    def __init__(self, kept: Sequence[Tensor]) -> None:
        super().__init__()
        self._kept = iter(kept)

    def forward(self, x: Tensor) -> Tensor:
        return x * next(self._kept) * (1 / (1 - DROPOUT))


def same_masks(model: GraphSAGE) -> GraphSAGE:
    """Seed torch's generator in front of each dropout, so that its masks do not depend on who else draws."""
    seeds = count(model.num_layers)

    def seed(number: int, *_: Any) -> None:
        torch.manual_seed(number)

    for number, norm in enumerate(model.norms):
        norm.register_forward_pre_hook(partial(seed, number))
    model.dropout.register_forward_hook(lambda *_: seed(next(seeds)))  # layers of ours draw theirs anew
    return model
