"""Int8 quantization with stochastic rounding, against eager and compiled torch, and a copy as the ceiling; and fake
quantization to number formats, against torch's functions one after the other, and a ``torch.round`` as the ceiling."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import qgnn
from qgnn import formats, functional
from qgnn.formats import Format

from ..harness import Case, Provider, Work
from .emulation import rounded
from .inputs import TOLERANCE, Setting, num_rows, randn

FORMATS = ("msfp12", "msfp16", "fixed8", "fixed8-affine", "mxint8", "mxfp8-e4m3", "mxfp4")
FORMAT_ROWS, FORMAT_COLUMNS = 20_000, 512
CODES = "int8-codes"  # the case of what the int8 kernels make of the same values
NEAREST = qgnn.QConfig(bits=8, rounding="nearest")


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
        Provider("ceiling: copy", partial(_copy, x), TOLERANCE["fp32"], 2 * x.nbytes),
    ]
    if x.is_cuda:
        compiled = partial(_torch, x, granularity, compiled=True)
        providers.append(Provider("torch.compile int8", compiled, tolerance))
    N, F = x.shape
    num_scales = N if granularity == "row" else 1
    name = f"{N}x{F}/{str(x.dtype).removeprefix('torch.')}/{granularity}"
    return Case(name, "forward", partial(_exact, x), providers, x.nbytes + x.numel() + 4 * num_scales)


def _fake(x: Tensor, fmt: Format) -> Case:
    """Rounding to nearest, which all providers have to agree on, value by value."""
    providers = [
        Provider(f"qgnn {fmt}", lambda: Work(lambda: fmt.quantize(x)), TOLERANCE["fp32"]),
        Provider(f"torch eager {fmt}", lambda: Work(lambda: rounded(x, fmt)), TOLERANCE["fp32"]),
    ]
    return _beside_round(x, str(fmt), lambda: [rounded(x.double(), fmt)], providers, 2 * x.nbytes)


def _to_codes(x: Tensor) -> Case:
    def check() -> list[Tensor]:
        return [functional.quantize(x, NEAREST).dequantize()]

    ours = Work(lambda: functional.quantize(x, NEAREST), check)
    providers = [
        Provider("qgnn int8", lambda: ours, TOLERANCE["int8"]),
        Provider("torch eager int8", partial(_torch, x, "row", compiled=False), TOLERANCE["int8"]),
    ]
    return _beside_round(x, CODES, partial(_exact, x), providers, x.nbytes + x.numel() + 4 * len(x))


def _beside_round(
    x: Tensor, name: str, reference: Callable[[], list[Tensor]], providers: list[Provider], num_bytes: int
) -> Case:
    """With ``torch.round``, which reads and writes as much, and has nothing of a format to be held to."""
    plain = Provider("ceiling: torch.round", lambda: Work(lambda: torch.round(x), reference), TOLERANCE["fp32"])
    name = "{}x{}/float32/fake/{}".format(*x.shape, name)
    return Case(name, "forward", reference, [*providers, plain], num_bytes)


def cases(setting: Setting) -> Iterator[Case]:
    N = num_rows(setting)
    dtypes = (torch.float32, torch.bfloat16) if setting.is_cuda else (torch.float32,)
    for F in setting.shapes(256, 128):
        for dtype in setting.shapes(*dtypes):
            x = randn(N, F, setting=setting, seed=F).to(dtype)
            for granularity in ("row", "tensor"):
                yield _case(x, granularity)
    x = randn(round(FORMAT_ROWS * setting.scale), FORMAT_COLUMNS, setting=setting, seed=1)
    for name in FORMATS:
        yield _fake(x, formats.parse(name))
    yield _to_codes(x)
