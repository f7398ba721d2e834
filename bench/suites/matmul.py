"""The dense product of a layer, x W^T + b from fp32 to fp32, and both its gradients, quantization included."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from qgnn import functional

from ..harness import Case, Provider, UnavailableError, Work
from .inputs import OURS, TOLERANCE, Setting, gradients, num_rows, randn, with_tf32
from .quantize import quantize_rows


class Operands:
    """x [N, K], weight [M, K], bias [M] and the gradient of the output [N, M]."""

    def __init__(self, N: int, K: int, M: int, setting: Setting) -> None:
        self.x = randn(N, K, setting=setting, seed=1).requires_grad_()
        self.weight = (randn(M, K, setting=setting, seed=2) / K**0.5).requires_grad_()
        self.bias = randn(M, setting=setting, seed=3)
        self.grad = randn(N, M, setting=setting, seed=4)

    def work(self, product: Callable[[Tensor, Tensor, Tensor], Tensor], pass_: str) -> Work:
        if pass_ == "forward":
            x, weight = self.x.detach(), self.weight.detach()
            return Work(lambda: product(x, weight, self.bias))
        inputs = (self.x, self.weight)
        return Work(gradients(lambda: product(*inputs, self.bias), inputs, self.grad))

    def exact(self, pass_: str) -> list[Tensor]:
        x, weight = self.x.detach().double(), self.weight.detach().double()
        if pass_ == "forward":
            return [linear(x, weight, self.bias.double())]
        grad = self.grad.double()
        return [grad @ weight, grad.t() @ x]

    def num_bytes(self, pass_: str) -> int:
        operands = (self.x, self.weight, self.grad)
        outputs = (self.bias,) if pass_ == "forward" else (self.x, self.weight)
        return sum(t.nbytes for t in (*operands, *outputs))


def _bf16(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As under autocast: operands cast on the way in, the result stays bf16."""
    return linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16())


def _int_mm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x_q, x_scale = quantize_rows(x)
    w_q, w_scale = quantize_rows(weight)
    return torch._int_mm(x_q, w_q.t()).float() * x_scale * w_scale.t() + bias


def _int_mm_work(operands: Operands, pass_: str) -> Work:
    if operands.x.shape[0] <= 16:
        raise UnavailableError("torch._int_mm wants more than 16 rows")
    return operands.work(_int_mm, pass_)


def _providers(operands: Operands, pass_: str, setting: Setting) -> Iterator[Provider]:
    for precision, config in OURS.items():
        product = partial(functional.linear, config=config)
        yield Provider(f"qgnn {precision}", partial(operands.work, product, pass_), TOLERANCE[precision])
    yield Provider("torch fp32", partial(operands.work, linear, pass_), TOLERANCE["fp32"])
    if setting.is_cuda:
        yield Provider("torch tf32", with_tf32(partial(operands.work, linear, pass_)), TOLERANCE["tf32"])
    yield Provider("torch bf16", partial(operands.work, _bf16, pass_), TOLERANCE["bf16"])
    if pass_ == "forward":  # torch._int_mm has no gradient
        yield Provider("torch._int_mm", partial(_int_mm_work, operands, pass_), TOLERANCE["int8"])


def cases(setting: Setting) -> Iterator[Case]:
    N = num_rows(setting)
    for K, M in setting.shapes((256, 256), (128, 256)):
        operands = Operands(N, K, M, setting)
        for pass_ in ("forward", "backward"):
            providers = list(_providers(operands, pass_, setting))
            yield Case(
                f"{N}x{K}x{M}/fp32-in-out",
                pass_,
                partial(operands.exact, pass_),
                providers,
                operands.num_bytes(pass_),
            )
