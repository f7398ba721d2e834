"""Fake quantization as it is usually written: torch's functions one by one, under autograd, results in fp32."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qgnn.formats import Format, Int

TINY = 2.0**-126


def rounded(x: Tensor, fmt: Format) -> Tensor:
    """The values of ``x`` in a format, along its last dimension; inputs are finite."""
    if isinstance(fmt, Int):
        qmax = 2 ** (fmt.bits - 1) - 1
        scale = x.abs().amax(dim=-1, keepdim=True).clamp_min(TINY) / qmax
        return torch.round(x / scale) * scale
    grid: Any = fmt.grid  # type: ignore[attr-defined]
    if grid.affine:
        low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
        step = (high - low).clamp_min(TINY) / (grid.high - grid.low)
        return torch.round((x - low) / step) * step + low
    width = x.shape[-1]
    size = grid.block_size or width
    blocks = F.pad(x, (0, -width % size)).unflatten(-1, (-1, size))
    exponent = torch.log2(blocks.abs().amax(dim=-1, keepdim=True).clamp_min(TINY))
    exponent = exponent.ceil() if grid.round_up else exponent.floor()
    unit = torch.exp2(exponent - grid.max_exponent - grid.fraction_bits)
    t = blocks / unit
    if not grid.is_uniform:  # elements have exponents of their own
        element = torch.log2(t.abs().clamp_min(TINY)).floor().clamp_min(grid.min_exponent)
        step = torch.exp2(element - grid.mantissa_bits)
        t = torch.round(t / step) * step
    values = torch.round(t) if grid.is_uniform else t
    return (values.clamp(grid.low, grid.high) * unit).flatten(-2)[..., :width]


def straight_through(x: Tensor, fmt: Format) -> Tensor:
    """``x`` rounded, with the gradient of ``x``."""
    return x + (rounded(x, fmt) - x).detach()


class _RoundGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: Format) -> Tensor:
        ctx.fmt = fmt
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return rounded(grad, ctx.fmt), None


class EmulatedLinear(torch.nn.Module):
    """A dense layer whose operands are rounded in each pass: rows, weight, and the gradient of the result.

    Args:
        linear: The layer, whose parameters it takes.
        fmt: The format.
    """

    def __init__(self, linear: Any, fmt: Format) -> None:
        super().__init__()
        self.weight, self.bias, self.fmt = linear.weight, linear.bias, fmt

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(straight_through(x, self.fmt), straight_through(self.weight, self.fmt), self.bias)
        return _RoundGradient.apply(out, self.fmt)
