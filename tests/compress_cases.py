"""A small model, and what is asked of it, for the tests of the compressor."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

import qgnn
from qgnn.compress.context import _open_recorders

N, K = 48, 32
INT8: dict[str, Any] = {"bits": 8, "block_size": 1024, "min_size": 1, "seed": 1}
INT2: dict[str, Any] = {**INT8, "bits": 2}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(K, K), nn.BatchNorm1d(K), nn.Linear(K, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.norm(self.first(x)).relu(), 0.25)
        return F.log_softmax(self.second(F.gelu(h)), -1)


def gradient(net: Net, run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """The loss, and all gradients in one vector."""
    net.zero_grad()
    torch.manual_seed(3)
    loss = run()
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in net.parameters()])


def loss_of(net: Net, x: Tensor) -> Tensor:
    return net(x).square().sum()


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def nothing_is_open() -> bool:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    modes = torch._C._len_torch_function_stack()
    return not (_open_recorders() or hooks or modes or _global_forward_hooks or _global_forward_pre_hooks)


def ops(report: qgnn.compress.Report) -> list[str]:
    return [t.op for t in report.by_tensor]
