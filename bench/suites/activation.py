"""Bias, a residual, an activation and dropout behind a layer in one pass, against torch's functions one by one.

What is timed drops half of the elements; the gate compares without, as each provider draws its own.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as torch_functional

from qgnn import QConfig, functional

from ..harness import Case, Provider, Work
from .inputs import INT8, TOLERANCE, Setting, gradients, num_rows, randn

DROPOUT = 0.5


class Operands:
    """Rows [N, F], a residual, and a bias [F], which all need gradients."""

    def __init__(self, F: int, kind: str, setting: Setting) -> None:
        N = num_rows(setting)
        self.name, self.kind = f"{N}x{F}/{kind}/dropout", kind
        x, residual, self.grad = (randn(N, F, setting=setting, seed=seed) for seed in range(3))
        self.tensors = (x, randn(F, setting=setting, seed=3), residual)

    def work(self, pass_: str, function: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> Work:
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in self.tensors]
        forward = partial(function, *leaves, DROPOUT)
        exact = partial(function, *leaves, 0.0)
        if pass_ == "forward":
            return Work(forward, lambda: [exact().detach()], forward)
        return Work(gradients(forward, leaves, self.grad), gradients(exact, leaves, self.grad), forward)

    def torch(self, x: Tensor, bias: Tensor, residual: Tensor, p: float) -> Tensor:
        return torch_functional.dropout(getattr(torch_functional, self.kind)(x + bias + residual), p)

    def ours(self, x: Tensor, bias: Tensor, residual: Tensor, p: float, config: QConfig | None = None) -> Tensor:
        return functional.activation(x, self.kind, p, bias=bias, residual=residual, config=config)

    def exact(self, pass_: str) -> Sequence[Tensor]:
        check = self.work(pass_, self.torch, torch.float64).check
        assert check is not None
        return check()

    def num_bytes(self, pass_: str) -> int:
        x, bias, _ = self.tensors
        kept = x.numel() // 8 if self.kind == "relu" else x.numel()
        rows = 3 if pass_ == "forward" else 2  # operands and result; gradient and that of rows and residual
        return rows * x.nbytes + bias.nbytes + kept


def cases(setting: Setting) -> Iterator[Case]:
    for kind in setting.shapes("elu", "relu"):
        operands = Operands(256, kind, setting)
        for pass_ in ("forward", "backward"):
            providers = [
                Provider("qgnn fp32", partial(operands.work, pass_, operands.ours), TOLERANCE["fp32"]),
                Provider("torch eager fp32", partial(operands.work, pass_, operands.torch), TOLERANCE["fp32"]),
            ]
            if kind == "elu":  # of the others a bit is kept in any case
                ours = partial(operands.ours, config=INT8)
                providers.append(Provider("qgnn int8", partial(operands.work, pass_, ours), TOLERANCE["int8"]))
            exact = partial(operands.exact, pass_)
            yield Case(operands.name, pass_, exact, providers, operands.num_bytes(pass_))
