"""The dense product of a layer, x W^T + b from fp32 to fp32, and both its gradients, quantization included."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from qgnn import functional

from ..harness import Case, Provider, UnavailableError, Work
from .inputs import OURS, TOLERANCE, Setting, gradients, num_rows, randn, require_bf16, tf32
from .quantize import quantize_absmax

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


class Operands:
    """x [N, K], weight [M, K], bias [M] and the gradient of the output [N, M]."""

    def __init__(self, N: int, K: int, M: int, setting: Setting) -> None:
        self.setting = setting
        self.x = randn(N, K, setting=setting, seed=1).requires_grad_()
        self.weight = (randn(M, K, setting=setting, seed=2) / K**0.5).requires_grad_()
        self.bias = randn(M, setting=setting, seed=3)
        self.grad = randn(N, M, setting=setting, seed=4)

    def work(self, product: Product, pass_: str) -> Work:
        if pass_ == "forward":
            x, weight = self.x.detach(), self.weight.detach()
            return Work(lambda: product(x, weight, self.bias))
        inputs = (self.x, self.weight)
        return Work(gradients(lambda: product(*inputs, self.bias), inputs, self.grad))

    def bf16(self, pass_: str) -> Work:
        require_bf16(self.setting)
        return self.work(_bf16, pass_)

    def int_mm(self) -> Work:
        if self.x.shape[0] <= 16:
            raise UnavailableError("torch._int_mm wants more than 16 rows")
        return self.work(_int_mm, "forward")

    def onednn(self) -> Work:
        if self.setting.is_cuda or not torch.backends.mkldnn.is_available():
            raise UnavailableError("oneDNN's int8 product is one of CPUs")
        return self.work(_onednn, "forward")

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
    x_q, x_scale = quantize_absmax(x)
    w_q, w_scale = quantize_absmax(weight)
    return torch._int_mm(x_q, w_q.t()).float() * x_scale * w_scale.t() + bias


def _onednn(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """oneDNN's fused product: activations in u8 (s8 takes a slow path) with one scale, weights with one a channel."""
    x_q, x_scale = quantize_absmax(x, "tensor", torch.uint8)
    w_q, w_scale = quantize_absmax(weight)
    packed = torch.ops.onednn.qlinear_prepack(w_q, None)
    zeros = torch.zeros(len(w_q), dtype=torch.int64)
    operands = (x_q, float(x_scale), 128, packed, w_scale.view(-1), zeros, bias)
    output = (1.0, 0, torch.float32)  # scale and zero point would be those of an integer one
    return torch.ops.onednn.qlinear_pointwise(*operands, *output, "none", [], "")


def _providers(operands: Operands, pass_: str) -> Iterator[Provider]:
    for precision, config in OURS.items():
        product = partial(functional.linear, config=config)
        yield Provider(f"qgnn {precision}", partial(operands.work, product, pass_), TOLERANCE[precision])
    yield Provider("torch fp32", partial(operands.work, linear, pass_), TOLERANCE["fp32"])
    if operands.setting.is_cuda:
        yield Provider("torch tf32", tf32(partial(operands.work, linear, pass_)), TOLERANCE["tf32"])
    yield Provider("torch bf16", partial(operands.bf16, pass_), TOLERANCE["bf16"])
    if pass_ == "forward":  # the integer products of torch have no gradient
        yield Provider("torch._int_mm int8", operands.int_mm, TOLERANCE["int8"])
        yield Provider("onednn.qlinear int8", operands.onednn, TOLERANCE["int8"])


def cases(setting: Setting) -> Iterator[Case]:
    N = num_rows(setting)
    for K, M in setting.shapes((256, 256), (128, 256)):
        operands = Operands(N, K, M, setting)
        for pass_ in ("forward", "backward"):
            providers = list(_providers(operands, pass_))
            exact = partial(operands.exact, pass_)
            yield Case(f"{N}x{K}x{M}/fp32-in-out", pass_, exact, providers, operands.num_bytes(pass_))
