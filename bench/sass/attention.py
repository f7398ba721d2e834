"""The calls of attention's launchers that are compiled: see ``cases``."""

from collections.abc import Callable
from typing import Any

import torch
from qgnn.kernels.attention import (
    attention,
    attention_backward,
    attention_dot,
    attention_dot_backward,
    attention_gatv2,
    attention_gatv2_backward,
)
from torch import Tensor

from qgnn.activation import Activation

Graph = tuple[Tensor, Tensor]


class AttentionInputs:
    """Operands of attention over a graph: valid, so that the kernels can also run."""

    def __init__(self, graph: Graph, num_nodes: int, device: torch.device) -> None:
        self.indptr, self.index = graph
        self.num_nodes, self.device = num_nodes, device
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)
        self.dropout = Activation(False, 1 << 15, self.seed, 1, None)
        # The edges of a graph whose transpose has the same degrees, with every edge another way round.
        self.transposed = self.indptr, self.index, torch.arange(len(self.index), device=device, dtype=torch.int32)

    def heads(self, H: int) -> Tensor:
        return torch.ones((self.num_nodes, H), device=self.device)

    def rows(self, H: int, D: int, dtype: torch.dtype) -> Tensor:
        return torch.ones((self.num_nodes, H * D), device=self.device).to(dtype)

    def scale(self, H: int, dtype: torch.dtype) -> Tensor | None:
        return self.heads(H) if dtype == torch.int8 else None

    def additive(self, H: int, D: int, dtype: torch.dtype = torch.int8, **kwargs: Any) -> None:
        scores, x, scale = self.heads(H), self.rows(H, D, dtype), self.scale(H, dtype)
        attention(self.indptr, self.index, scores, scores, x, x_scale=scale, **kwargs)

    def additive_backward(self, H: int, D: int, dtype: torch.dtype = torch.int8, **kwargs: Any) -> None:
        scores, x, scale = self.heads(H), self.rows(H, D, dtype), self.scale(H, dtype)
        if dtype == torch.int8:
            kwargs = {"grad_bits": 8, "seed": self.seed, **kwargs}
        attention_backward(
            self.indptr, self.index, *self.transposed, scores, scores, x, 2 * scores, x.float(), x_scale=scale, **kwargs
        )

    def gatv2(self, H: int, D: int, dtype: torch.dtype = torch.int8, **kwargs: Any) -> None:
        x, scale, att = self.rows(H, D, dtype), self.scale(H, dtype), torch.ones((H, D), device=self.device)
        attention_gatv2(self.indptr, self.index, x, x, att, target_scale=scale, source_scale=scale, **kwargs)

    def gatv2_backward(self, H: int, D: int, dtype: torch.dtype = torch.int8, **kwargs: Any) -> None:
        x, scale, att = self.rows(H, D, dtype), self.scale(H, dtype), torch.ones((H, D), device=self.device)
        scales = {"target_scale": scale, "source_scale": scale}
        if dtype == torch.int8:
            kwargs = {"grad_bits": 8, "seed": self.seed, **kwargs}
        attention_gatv2_backward(
            self.indptr, self.index, *self.transposed, x, x, att, self.heads(H) * (2 * D), x.float(), **scales, **kwargs
        )

    def dot(self, H: int, D: int, dtype: torch.dtype = torch.int8, **kwargs: Any) -> None:
        x, scale = self.rows(H, D, dtype), self.scale(H, dtype)
        scales = {"query_scale": scale, "key_scale": scale, "value_scale": scale}
        attention_dot(self.indptr, self.index, x, x, x, heads=H, **scales, **kwargs)

    def dot_backward(self, H: int, D: int, dtype: torch.dtype = torch.int8, **kwargs: Any) -> None:
        x, scale = self.rows(H, D, dtype), self.scale(H, dtype)
        scales = {"query_scale": scale, "key_scale": scale, "value_scale": scale}
        if dtype == torch.int8:
            kwargs = {"grad_bits": 8, "seed": self.seed, **kwargs}
        attention_dot_backward(
            self.indptr, self.index, *self.transposed, x, x, x, self.heads(H) * D, x.float(), **scales, **kwargs
        )


def attention_cases(made: AttentionInputs) -> dict[str, Callable[[], Any]]:
    fp32 = torch.float32
    dropout: dict[str, Any] = {"dropout": made.dropout}
    return {
        "attention/int8/H4/D64": lambda: made.additive(4, 64),
        "attention/int8/H4/D64/dropout": lambda: made.additive(4, 64, **dropout),
        "attention/int8/H8/D8": lambda: made.additive(8, 8),
        "attention/int8/H1/D256": lambda: made.additive(1, 256),
        "attention/fp32/H4/D64": lambda: made.additive(4, 64, fp32),
        "attention_backward/int8/H4/D64": lambda: made.additive_backward(4, 64),
        "attention_backward/int8/H4/D64/dropout": lambda: made.additive_backward(4, 64, **dropout),
        "attention_backward/int8/H8/D8": lambda: made.additive_backward(8, 8),
        "attention_backward/int8/H1/D256": lambda: made.additive_backward(1, 256),
        "attention_backward/fp32/H4/D64": lambda: made.additive_backward(4, 64, fp32),
        "attention_gatv2/int8/H4/D64/dropout": lambda: made.gatv2(4, 64, **dropout),
        "attention_gatv2/int8/H8/D8": lambda: made.gatv2(8, 8),
        "attention_gatv2/int8/H1/D256": lambda: made.gatv2(1, 256),
        "attention_gatv2/fp32/H4/D64": lambda: made.gatv2(4, 64, fp32),
        "attention_gatv2_backward/int8/H4/D64/dropout": lambda: made.gatv2_backward(4, 64, **dropout),
        "attention_gatv2_backward/int8/H8/D8": lambda: made.gatv2_backward(8, 8),
        "attention_gatv2_backward/int8/H1/D256": lambda: made.gatv2_backward(1, 256),
        "attention_gatv2_backward/fp32/H4/D64": lambda: made.gatv2_backward(4, 64, fp32),
        "attention_dot/int8/H4/D64/dropout": lambda: made.dot(4, 64, **dropout),
        "attention_dot/int8/H8/D8": lambda: made.dot(8, 8),
        "attention_dot/int8/H1/D256": lambda: made.dot(1, 256),
        "attention_dot/fp32/H4/D64": lambda: made.dot(4, 64, fp32),
        "attention_dot_backward/int8/H4/D64/dropout": lambda: made.dot_backward(4, 64, **dropout),
        "attention_dot_backward/int8/H8/D8": lambda: made.dot_backward(8, 8),
        "attention_dot_backward/int8/H1/D256": lambda: made.dot_backward(1, 256),
        "attention_dot_backward/fp32/H4/D64": lambda: made.dot_backward(4, 64, fp32),
    }


ATTENTION_MAIN = {
    "attention/int8/H4/D64/dropout",
    "attention_backward/int8/H4/D64/dropout",
    "attention_gatv2/int8/H4/D64/dropout",
    "attention_gatv2_backward/int8/H4/D64/dropout",
    "attention_dot/int8/H4/D64/dropout",
    "attention_dot_backward/int8/H4/D64/dropout",
}
