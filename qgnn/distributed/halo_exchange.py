"""Rows of boundary nodes to the processes whose nodes are their neighbors, and their gradients back.

Each direction is one message to every other process. It starts before the rows of own nodes are summed and is waited
for behind that, forward and backward: autograd runs what was recorded last first, which is the sending of gradients,
then the sums of own nodes, then the receipt. Rounding is stochastic and independent in both directions and in all
processes, so that what arrives is right in expectation. After AdaQP (`arXiv:2306.01381
<https://arxiv.org/abs/2306.01381>`_), in one width for all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from qgnn import functional
from qgnn.distributed._messages import RowFormat, join
from qgnn.graph import Graph
from qgnn.qtensor import QTensor
from qgnn.rng import make_rounding_seed, stream_key
from qgnn.trace import recording, report
from qgnn.weak_cache import cached

_FORWARD, _BACKWARD = 0, 1
_NEW, _SEEN, _SENT = 0, 1, 2  # stages of constant rows


class HaloExchange:
    """What a process sends to all others and gets from them.

    Args:
        boundary: Which of its own nodes it sends, in the order of the processes that get them.
        num_nodes: Number of its own nodes.
        sent: Number of rows that each process gets.
        received: Number of rows that each process sends.
        row_format: How rows are sent.
        process_group: The processes.

    Attributes:
        sent_bytes: What this process has sent, forward and backward.
        full_bytes: What it would have sent in fp32.
        count: Messages to all others so far.
    """

    def __init__(
        self,
        boundary: Tensor,
        num_nodes: int,
        sent: list[int],
        received: list[int],
        row_format: RowFormat,
        process_group: dist.ProcessGroup,
    ) -> None:
        self.boundary = boundary
        self.row_format = row_format
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.num_rows = {_FORWARD: (sent, received), _BACKWARD: (received, sent)}
        position = torch.arange(len(boundary), device=boundary.device)
        self.returned = Graph.from_edge_index(torch.stack([position, boundary]), (len(boundary), num_nodes))
        self.sent_bytes = self.full_bytes = self.count = 0

    def to(self, device: torch.device | str) -> HaloExchange:
        """The same between rows on another device, which counts anew."""
        exchange = copy(self)
        exchange.boundary, exchange.returned = self.boundary.to(device), self.returned.to(device)
        exchange.sent_bytes = exchange.full_bytes = exchange.count = 0
        return exchange

    def start(self, x: Tensor | QTensor, exact: bool) -> Callable[[], Tensor]:
        """Send rows ``[N, F]`` of own nodes; what is returned waits for those of the halo.

        Rows that need no gradient, and come a second time unchanged in training, are constants: they are sent as they
        are, and remembered for as long as they live unchanged. Whether they are is agreed upon: where one process has
        changed its rows, all send theirs.
        """
        tensors = (x,) if isinstance(x, Tensor) else (x.storage, x.scales) if x.origin is None else (x.origin,)
        if exact or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            return self._posted(x, exact)
        known = cached((*tensors, self.boundary), ("rows of the halo", _is_int8(x)), _Constant)
        stage = self._least(known.stage)
        if stage == _NEW:
            if torch.is_grad_enabled():
                known.stage = max(known.stage, _SEEN)
            return self._posted(x, exact)
        if stage == _SEEN:
            known.stage, known.rows = _SENT, self._posted(x, exact=True)()
        rows = known.rows
        assert rows is not None
        return lambda: rows

    def _least(self, number: int) -> int:
        """The least of the numbers of all processes."""
        numbers = torch.tensor(number, dtype=torch.int64, device=self.boundary.device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN, group=self.process_group)
        return int(numbers)

    def _posted(self, x: Tensor | QTensor, exact: bool) -> Callable[[], Tensor]:
        row_format = self.row_format
        if exact or x.shape[1] == 0:
            row_format = replace(row_format, bits=8 if _is_int8(x) else None)
        seed = None
        if row_format.bits is not None and torch.is_grad_enabled():
            seed = make_rounding_seed(None, self.boundary.device)
        message = _Message(self, row_format, x.shape[1], x.dtype, seed)
        rows, codes = (x, None) if isinstance(x, Tensor) else (x.origin, x)
        token = _Send.apply(rows, codes, message)
        return lambda: _Receive.apply(token, message)


@dataclass
class _Constant:
    """What is known of rows that do not change: how far they are, and in the end the rows of the halo."""

    stage: int = _NEW
    rows: Tensor | None = None


class _Message:
    """Rows on their way to the other processes, or gradients on their way back.

    Args:
        exchange: Between whom.
        row_format: How they are sent.
        num_columns: Width of the rows.
        dtype: Their type.
        seed: Of rounding; ``None`` rounds to nearest.
    """

    def __init__(
        self,
        exchange: HaloExchange,
        row_format: RowFormat,
        num_columns: int,
        dtype: torch.dtype,
        seed: Tensor | None,
    ) -> None:
        self.exchange, self.row_format, self.num_columns, self.dtype = exchange, row_format, num_columns, dtype
        self.seed = seed
        self._flying: tuple[dist.Work, Tensor, Tensor] | None = None

    def encoded(self, rows: Tensor, direction: int) -> Tensor:
        """The message of rows."""
        seed = None if self.seed is None else self.seed ^ stream_key(2 * self.exchange.rank + direction)
        return self.row_format.encode(rows, seed)

    def post(self, sent: Tensor, direction: int) -> None:
        """Send messages of rows, and do not wait for what comes."""
        out, into = self.exchange.num_rows[direction]
        received = sent.new_empty((sum(into), sent.shape[1]))
        work = dist.all_to_all_single(received, sent, into, out, group=self.exchange.process_group, async_op=True)
        self._flying = work, received, sent  # which has to live until it is sent
        self.exchange.sent_bytes += sent.nbytes
        self.exchange.full_bytes += sent.shape[0] * self.num_columns * 4
        self.exchange.count += 1
        if recording():
            bits, stage = self.row_format.bits, "backward" if direction == _BACKWARD else "forward"
            name = str(self.dtype).removeprefix("torch.") if bits is None else f"int{bits}"
            report(f"halo.{stage}", name, dist.get_backend(self.exchange.process_group), (sent,))

    def wait(self) -> Tensor:
        """The rows that came."""
        assert self._flying is not None
        work, received, _ = self._flying
        work.wait()
        self._flying = None
        return self.row_format.decode(received, self.num_columns, self.dtype)


class _Send(torch.autograd.Function):
    """Rows go out; their gradients come in, and each node's are added in the order of the processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor | None, q: QTensor | None, message: _Message) -> Tensor:
        ctx.message = message
        boundary = message.exchange.boundary
        if q is not None and message.row_format.bits == 8 and _is_int8(q):
            sent = join(q.codes.index_select(0, boundary), q.scale.index_select(0, boundary))
        else:
            rows = q.dequantize() if q is not None and x is None else x
            assert rows is not None
            sent = message.encoded(rows.index_select(0, boundary), _FORWARD)
        message.post(sent, _FORWARD)
        return sent.new_empty(0, dtype=torch.float32)  # no values: what ties the receipt to the sending

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        message = ctx.message
        return functional.spmm(message.exchange.returned, message.wait()), None, None


class _Receive(torch.autograd.Function):
    """Rows of the halo come in; their gradients go out."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, message: _Message) -> Tensor:
        ctx.message = message
        return message.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.message.post(ctx.message.encoded(grad, _BACKWARD), _BACKWARD)
        return grad.new_empty(0, dtype=torch.float32), None


def _is_int8(x: Tensor | QTensor) -> bool:
    """Whether rows are int8 codes with a scale a row, as messages are."""
    if not isinstance(x, QTensor) or x.code_dtype != torch.int8 or x.zero is not None:
        return False
    return x.scale.shape == (x.shape[0], 1)
