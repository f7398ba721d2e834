"""The models that are trained: PyG's layers, or qgnn's in their place."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GCNConv

from qgnn.cli.precision import Precision
from qgnn.cli.recipe import Recipe
from qgnn.config import QConfig
from qgnn.nn import QGCNConv
from qgnn.qtensor import QTensor
from qgnn.rng import splitmix64


class GCN(nn.Module):
    """Graph convolutions with ReLU and dropout in between.

    The masks of dropout follow from the seed, the number of the step and the layer alone, not from how many random
    numbers the layers drew before: with equal seeds all precisions meet the same masks, and their difference is that
    of the precision.

    Args:
        in_channels: Number of features.
        out_channels: Number of classes.
        recipe: Sizes and dropout.
        precision: ``fp32`` and ``bf16`` take PyG's ``GCNConv``; an integer precision takes ``QGCNConv`` for every
            layer but the last, whose outputs are the logits: it stays in full precision.
        seed: Seed of the masks.

    Shapes:
        - **input:** features [N, F], for integer layers also as codes; edges [2, E]
        - **output:** logits [N, C]
    """

    def __init__(
        self, in_channels: int, out_channels: int, recipe: Recipe, precision: Precision, seed: int = 0
    ) -> None:
        super().__init__()
        self.dropout = recipe.dropout
        self.input_dropout = recipe.dropout if recipe.input_dropout else 0.0
        self.seed = seed
        self.step = 0
        widths = [in_channels, *[recipe.hidden] * (recipe.layers - 1), out_channels]
        self.convs = nn.ModuleList()
        for layer, (width, next_width) in enumerate(pairwise(widths)):
            if precision.bits is None:
                conv = GCNConv(width, next_width, cached=True)
            else:
                config = QConfig(bits=precision.bits) if layer < recipe.layers - 1 else None
                conv = QGCNConv(width, next_width, cached=True, config=config)
            self.convs.append(conv)

    def forward(self, x: Tensor | QTensor, edge_index: Tensor) -> Tensor:
        """The logits of every node."""
        self.step += self.training
        if self.input_dropout and isinstance(x, Tensor):
            x = self._drop(x, self.input_dropout, 0)
        first, *rest = self.convs
        out: Tensor = first(x, edge_index)
        for layer, conv in enumerate(rest, start=1):
            out = conv(self._drop(out.relu(), self.dropout, layer), edge_index)
        return out

    def _drop(self, x: Tensor, p: float, layer: int) -> Tensor:
        if not self.training or p == 0:
            return x
        torch.manual_seed(splitmix64(splitmix64(self.seed) ^ (self.step << 16 | layer)))
        return F.dropout(x, p)
