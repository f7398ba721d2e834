"""The dense product of a layer, x W^T + b from fp32 to fp32, and both its gradients, quantization included.

More cases: number formats in place of int8, features that are mostly zero, and the product of codes alone.
"""

from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import linear

import qgnn
from qgnn import formats, functional
from qgnn.ops._backends import c_kernels

from ..harness import Case, Provider, UnavailableError, Work
from .inputs import (
    INT8,
    OURS,
    TOLERANCE,
    Setting,
    csr_int32,
    gradients,
    num_rows,
    package,
    randn,
    require_bf16,
    sparse_sum,
    tf32,
)
from .quantize import quantize_absmax

FORMATS = ("msfp12", "msfp16", "mxint8")  # whose codes the kernel of shared exponents multiplies

Product = Callable[[Tensor, Tensor, Tensor], Tensor]

# The first layer of `qgnn train`: as many words, as rarely present, as the features of the embedded WordNet graph have.
WORDNET_SHAPE, WORDNET_DENSITY = (117_791, 512, 48), 0.00414
CONSTANT = qgnn.QConfig(bits=8, rounding="nearest")  # how features that stay the same are quantized

SQUARE = 1024  # long enough for an integer product to show its rate, short enough for torch's slow one


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

    def torchao(self) -> Work:
        """Its linear layer with rows quantized as they come."""
        quantization = package("torchao.quantization")
        M, K = self.weight.shape
        layer = torch.nn.Linear(K, M, device=self.x.device).requires_grad_(False)
        layer.weight.copy_(self.weight)
        layer.bias.copy_(self.bias)
        model = torch.nn.Sequential(layer)  # it replaces the layers of a model
        quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
        x = self.x.detach()
        return Work(lambda: model(x))

    def onednn(self) -> Work:
        _require_onednn(self.setting)
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


def _bf16_in(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Ours between layers that hand each other bf16 rows: the cast, which is not ours, is in the times all the same."""
    return functional.linear(x.bfloat16(), weight, bias, config=INT8)


def _int_mm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x_q, x_scale = quantize_absmax(x)
    w_q, w_scale = quantize_absmax(weight)
    return torch._int_mm(x_q, w_q.t()).float() * x_scale * w_scale.t() + bias


def _onednn(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return _onednn_product(x, weight, bias)()


def _onednn_product(x: Tensor, weight: Tensor, bias: Tensor) -> Callable[[], Tensor]:
    """oneDNN's fused product: activations in u8 (s8 takes a slow path) with one scale, weights with one a channel."""
    x_q, x_scale = quantize_absmax(x, "tensor", torch.uint8)
    w_q, w_scale = quantize_absmax(weight)
    packed = torch.ops.onednn.qlinear_prepack(w_q, None)
    zeros = torch.zeros(len(w_q), dtype=torch.int64)
    operands = (x_q, float(x_scale), 128, packed, w_scale.view(-1), zeros, bias)
    output = (1.0, 0, torch.float32)  # scale and zero point would be those of an integer one
    return lambda: torch.ops.onednn.qlinear_pointwise(*operands, *output, "none", [], "")


def _require_onednn(setting: Setting) -> None:
    if setting.is_cuda or not torch.backends.mkldnn.is_available():
        raise UnavailableError("oneDNN's int8 product is one of CPUs")


def _providers(operands: Operands, pass_: str) -> Iterator[Provider]:
    for precision, config in OURS.items():
        product = partial(functional.linear, config=config)
        yield Provider(f"qgnn {precision}", partial(operands.work, product, pass_), TOLERANCE[precision])
    if operands.setting.is_cuda and pass_ == "forward":
        yield Provider("qgnn bf16-in int8", partial(operands.work, _bf16_in, pass_), TOLERANCE["int8"])
    yield Provider("torch fp32", partial(operands.work, linear, pass_), TOLERANCE["fp32"])
    if operands.setting.is_cuda:
        yield Provider("torch tf32", tf32(partial(operands.work, linear, pass_)), TOLERANCE["tf32"])
    yield Provider("torch bf16", partial(operands.bf16, pass_), TOLERANCE["bf16"])
    if pass_ == "forward":  # the integer products of torch have no gradient
        yield Provider("torch._int_mm int8", operands.int_mm, TOLERANCE["int8"])
        yield Provider("torchao int8", operands.torchao, TOLERANCE["int8"])
        yield Provider("onednn.qlinear int8", operands.onednn, TOLERANCE["int8"])


def _of_formats(operands: Operands, pass_: str) -> Iterator[Provider]:
    """Formats beside int8 and what torch has; their error is that of both operands, as of values in TOLERANCE."""
    for name in FORMATS:
        config = qgnn.QConfig(fmt=formats.parse(name))
        product = partial(functional.linear, config=config)
        yield Provider(f"qgnn {name}", partial(operands.work, product, pass_), 2 * _error_of(config))
    product = partial(functional.linear, config=INT8)
    yield Provider("qgnn int8", partial(operands.work, product, pass_), TOLERANCE["int8"])
    yield Provider("torch fp32", partial(operands.work, linear, pass_), TOLERANCE["fp32"])
    if operands.setting.is_cuda:
        yield Provider("torch tf32", tf32(partial(operands.work, linear, pass_)), TOLERANCE["tf32"])
    yield Provider("torch bf16", partial(operands.bf16, pass_), TOLERANCE["bf16"])


def _error_of(config: qgnn.QConfig) -> float:
    """The relative error of a rounded normal operand; a product of two has the root of 2 of it."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    return float((functional.quantize(x, config, seed=0).dequantize() - x).norm() / x.norm())


class _MostlyZero:
    """Constant features x [N, K] of zeros and few ones, weight [M, K], bias [M] and the gradient of the output [N, M].

    Passes: ``forward`` from fp32 features, ``warm`` from what was made of them before, and likewise ``backward``, the
    gradient of the weight alone.
    """

    def __init__(self, N: int, K: int, M: int, setting: Setting) -> None:
        self.setting = setting
        generator = torch.Generator(setting.device).manual_seed(1)
        self.x = (torch.rand(N, K, generator=generator, device=setting.device) < WORDNET_DENSITY).float()
        self.weight = (randn(M, K, setting=setting, seed=2) / K**0.5).requires_grad_()
        self.bias = randn(M, setting=setting, seed=3)
        self.grad = randn(N, M, setting=setting, seed=4)

    def _work(self, product: Callable[[Tensor], Tensor], pass_: str) -> Work:
        """A product of the weight, or of what stands for it."""
        if pass_ != "backward":
            weight = self.weight.detach()
            return Work(lambda: product(weight))
        return Work(gradients(lambda: product(self.weight), [self.weight], self.grad))

    def fp32(self, pass_: str) -> Work:
        return self._work(lambda weight: linear(self.x, weight, self.bias), pass_)

    def ours(self, pass_: str) -> Work:
        x = self.x if pass_ == "forward" else functional.quantize(self.x, CONSTANT)
        return self._work(lambda weight: functional.linear(x, weight, self.bias, config=INT8), pass_)

    def all_multiplied(self, pass_: str) -> Work:
        """Ours without the route that skips zeros."""
        if self.setting.is_cuda or not c_kernels()[0]:
            raise UnavailableError("only the C kernels skip zeros")
        from qgnn.kernels.cpu import matmul

        run = self.ours(pass_).run

        def dense() -> object:
            with patch.object(matmul, "_MAX_DENSITY", -1.0):
                return run()

        return Work(dense)

    def csr(self, pass_: str) -> Work:
        """torch's sparse product, the matrix and its transpose prepared."""
        if pass_ != "backward":
            x, weight_t = csr_int32(self.x), self.weight.detach().t().contiguous()
            return Work(lambda: sparse_sum(x, weight_t) + self.bias)
        x_t = csr_int32(self.x.t())
        return Work(lambda: sparse_sum(x_t, self.grad).t().contiguous())

    def exact(self, pass_: str) -> list[Tensor]:
        x, weight = self.x.double(), self.weight.detach().double()
        return [self.grad.double().t() @ x] if pass_ == "backward" else [linear(x, weight, self.bias.double())]

    def providers(self, pass_: str) -> Iterator[Provider]:
        yield Provider("qgnn int8", partial(self.ours, pass_), TOLERANCE["int8"])
        yield Provider("qgnn all-multiplied int8", partial(self.all_multiplied, pass_), TOLERANCE["int8"])
        yield Provider("torch fp32", partial(self.fp32, pass_), TOLERANCE["fp32"])
        if pass_ != "forward":  # nobody makes a sparse matrix in every step
            yield Provider("torch.sparse csr fp32", partial(self.csr, pass_), TOLERANCE["fp32"])


class _Codes(Operands):
    """The integer product alone: both operands of torch's are codes already, of ours x is."""

    def ours(self) -> Work:
        x, weight = functional.quantize(self.x.detach(), CONSTANT), self.weight.detach()
        return Work(lambda: functional.linear(x, weight, self.bias, config=INT8))

    def int_mm(self) -> Work:
        (x_q, x_scale), (w_q, w_scale) = quantize_absmax(self.x.detach()), quantize_absmax(self.weight.detach())
        return Work(lambda: torch._int_mm(x_q, w_q.t()).float() * x_scale * w_scale.t() + self.bias)

    def onednn(self) -> Work:
        _require_onednn(self.setting)
        return Work(_onednn_product(self.x.detach(), self.weight.detach(), self.bias))

    def providers(self) -> Iterator[Provider]:
        yield Provider("qgnn int8", self.ours, TOLERANCE["int8"])
        yield Provider("torch fp32", partial(self.work, linear, "forward"), TOLERANCE["fp32"])
        yield Provider("torch._int_mm int8", self.int_mm, TOLERANCE["int8"])
        yield Provider("onednn.qlinear int8", self.onednn, TOLERANCE["int8"])


def cases(setting: Setting) -> Iterator[Case]:
    N = num_rows(setting)
    for K, M in setting.shapes((256, 256), (128, 256)):
        operands = Operands(N, K, M, setting)
        for pass_ in ("forward", "backward"):
            providers = list(_providers(operands, pass_))
            exact = partial(operands.exact, pass_)
            yield Case(f"{N}x{K}x{M}/fp32-in-out", pass_, exact, providers, operands.num_bytes(pass_))
            if K == M:
                found = list(_of_formats(operands, pass_))
                yield Case(f"{N}x{K}x{M}/formats", pass_, exact, found, operands.num_bytes(pass_))
    N, K, M = WORDNET_SHAPE
    features = _MostlyZero(round(N * setting.scale), K, M, setting)
    for pass_ in ("forward", "warm", "backward"):
        exact = partial(features.exact, pass_)
        yield Case(
            f"wordnet/synthetic/{len(features.x)}x{K}x{M}/mostly-zero", pass_, exact, list(features.providers(pass_))
        )
    size = SQUARE // 8 if setting.quick else SQUARE
    codes = _Codes(size, size, size, setting)
    yield Case(f"{size}x{size}x{size}/codes-in", "warm", partial(codes.exact, "forward"), list(codes.providers()))
