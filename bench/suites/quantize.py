"""Int8 quantization with stochastic rounding, against eager and compiled torch, and a copy as the ceiling."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import qgnn
from qgnn import functional

from ..harness import Case, Provider, Work
from .inputs import TOLERANCE, Setting, num_rows, randn


def quantize_absmax(x: Tensor, granularity: str = "row", dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """What a careful user would write: one scale a row or a tensor, uniform noise, floor; 128 stands for 0 in uint8."""
    x = x.float()
    absmax = x.abs().amax(dim=1, keepdim=True) if granularity == "row" else x.abs().amax()
    scale = absmax.clamp_min(1e-30) / 127
    codes = (x / scale).add_(torch.rand_like(x)).floor_().clamp_(-127, 127)
    return (codes.add_(128) if dtype == torch.uint8 else codes).to(dtype), scale


def _torch(x: Tensor, granularity: str, compiled: bool) -> Work:
    quantize = torch.compile(quantize_absmax) if compiled else quantize_absmax

    def check() -> list[Tensor]:
        codes, scale = quantize(x, granularity)
        return [codes * scale]

    return Work(lambda: quantize(x, granularity), check)


def _ours(x: Tensor, granularity: str) -> Work:
    config = qgnn.QConfig(granularity=granularity)
    return Work(lambda: functional.quantize(x, config), lambda: [functional.quantize(x, config).dequantize()])


def _copy(x: Tensor) -> Work:
    """Reads and writes every byte of x, into memory that is there: what the machine allows."""
    out = torch.empty_like(x)
    return Work(lambda: out.copy_(x))


def _exact(x: Tensor) -> list[Tensor]:
    return [x.double()]


def _case(x: Tensor, granularity: str) -> Case:
    tolerance = TOLERANCE["int8"]
    providers = [
        Provider("qgnn int8", partial(_ours, x, granularity), tolerance),
        Provider("torch eager int8", partial(_torch, x, granularity, compiled=False), tolerance),
        Provider("ceiling: copy", partial(_copy, x), TOLERANCE["fp32"]),
    ]
    if x.is_cuda:
        compiled = partial(_torch, x, granularity, compiled=True)
        providers.append(Provider("torch.compile int8", compiled, tolerance))
    N, F = x.shape
    num_scales = N if granularity == "row" else 1
    name = f"{N}x{F}/{str(x.dtype).removeprefix('torch.')}/{granularity}"
    return Case(name, "forward", partial(_exact, x), providers, x.nbytes + x.numel() + 4 * num_scales)


def cases(setting: Setting) -> Iterator[Case]:
    N = num_rows(setting)
    dtypes = (torch.float32, torch.bfloat16) if setting.is_cuda else (torch.float32,)
    for F in setting.shapes(256, 128):
        for dtype in setting.shapes(*dtypes):
            x = randn(N, F, setting=setting, seed=F).to(dtype)
            for granularity in ("row", "tensor"):
                yield _case(x, granularity)
