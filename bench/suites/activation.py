"""Bias, a residual, an activation and dropout behind a layer in one pass, against torch's functions one by one.

What is timed drops half of the elements, and each provider draws its own. So the gate compares what nothing was dropped
of, and before that holds what is timed to itself: kept elements, their gradients, and how many they are.
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

    def work(
        self, pass_: str, function: Callable[..., Tensor], dtype: torch.dtype = torch.float32, compiled: bool = False
    ) -> Work:
        function = torch.compile(function) if compiled else function
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in self.tensors]
        forward = partial(function, *leaves, DROPOUT)
        exact = partial(function, *leaves, 0.0)
        check_dropout(forward, exact, leaves[0])
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
        """With the least that a provider keeps: a bit an element of ReLU, a byte of ELU."""
        x, bias, _ = self.tensors
        kept = x.numel() // 8 if self.kind == "relu" else x.numel()
        rows = 3 if pass_ == "forward" else 2  # operands and result; gradient and that of rows and residual
        return rows * x.nbytes + bias.nbytes + kept


def check_dropout(forward: Callable[[], Tensor], exact: Callable[[], Tensor], x: Tensor) -> None:
    """Raise unless ``forward`` is ``exact`` with dropout: kept elements are as large again as their share is small, the
    gradient of a dropped one is 0 and of a kept one is not, and the share is within five deviations."""
    out, plain = forward(), exact().detach()
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    kept, passes = out.detach() != 0, plain != 0
    share = float(kept.sum() / passes.sum())
    deviation = (DROPOUT * (1 - DROPOUT) / float(passes.sum())) ** 0.5
    if not abs(share - (1 - DROPOUT)) <= 5 * deviation:
        raise ValueError(f"dropout keeps {share:.4f} of the elements (expected {1 - DROPOUT})")
    torch.testing.assert_close(out.detach(), torch.where(kept, plain / (1 - DROPOUT), 0), rtol=1e-5, atol=1e-6)
    seen = plain > -0.99  # below, ELU's derivative may be rounded to a code of 0
    if grad[passes & ~kept].any() or not grad[kept & seen].all():
        raise ValueError("the gradient does not vanish exactly where the result does")


def cases(setting: Setting) -> Iterator[Case]:
    for kind in setting.shapes("elu", "relu"):
        operands = Operands(256, kind, setting)
        for pass_ in ("forward", "backward"):
            providers = [
                Provider("qgnn fp32", partial(operands.work, pass_, operands.ours), TOLERANCE["fp32"]),
                Provider("torch eager fp32", partial(operands.work, pass_, operands.torch), TOLERANCE["fp32"]),
            ]
            if setting.is_cuda:
                compiled = partial(operands.work, pass_, operands.torch, compiled=True)
                providers.append(Provider("torch.compile fp32", compiled, TOLERANCE["fp32"]))
            if kind == "elu":  # of the others a bit is kept in any case
                ours = partial(operands.ours, config=INT8)
                providers.append(Provider("qgnn int8", partial(operands.work, pass_, ours), TOLERANCE["int8"]))
            exact = partial(operands.exact, pass_)
            yield Case(operands.name, pass_, exact, providers, operands.num_bytes(pass_))
