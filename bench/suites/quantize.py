"""Row-wise int8 quantization with stochastic rounding, against eager and compiled torch, and a copy as the ceiling."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from qgnn import functional

from ..harness import Case, Provider, Work
from .inputs import INT8, TOLERANCE, Setting, num_rows, randn


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """What a user would write: one scale a row, uniform noise, floor."""
    x = x.float()
    scale = x.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / 127
    codes = (x / scale + torch.rand_like(x)).floor().clamp(-127, 127)
    return codes.to(torch.int8), scale


def _torch_work(x: Tensor, compiled: bool) -> Work:
    quantize = torch.compile(quantize_rows) if compiled else quantize_rows

    def check() -> list[Tensor]:
        codes, scale = quantize(x)
        return [codes * scale]

    return Work(lambda: quantize(x), check)


def _ours(x: Tensor) -> Work:
    return Work(lambda: functional.quantize(x, INT8), lambda: [functional.quantize(x, INT8).dequantize()])


def _copy(x: Tensor) -> Work:
    """Reads and writes every byte of x: what the memory allows."""
    out = torch.empty_like(x)
    return Work(lambda: out.copy_(x))


def _exact(x: Tensor) -> list[Tensor]:
    return [x.double()]


def cases(setting: Setting) -> Iterator[Case]:
    N = num_rows(setting)
    for F in setting.shapes(256, 128):
        for dtype in setting.shapes(torch.float32, torch.bfloat16):
            x = randn(N, F, setting=setting, seed=F).to(dtype)
            tolerance = TOLERANCE["int8"]
            providers = [
                Provider("qgnn int8", partial(_ours, x), tolerance),
                Provider("torch eager int8", partial(_torch_work, x, compiled=False), tolerance),
                Provider("ceiling: copy", partial(_copy, x), TOLERANCE["fp32"]),
            ]
            if setting.is_cuda:
                compiled = Provider("torch.compile int8", partial(_torch_work, x, compiled=True), tolerance)
                providers.insert(2, compiled)
            name = f"{N}x{F}/{str(dtype).removeprefix('torch.')}"
            num_bytes = x.nbytes + x.numel() + 4 * N
            yield Case(name, "forward", partial(_exact, x), providers, num_bytes)
