"""Packed storage of activations in blocks of 128 values, INT1 to INT8 with stochastic rounding: pack, unpack, both."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from qgnn import ops
from qgnn.rng import make_seed

from ..harness import Case, Provider, Work
from .inputs import Setting, num_rows, randn

BLOCK = 128
WIDTH = 128

# Bound on the error of the mean, and on values that no rounding explains (see Activations.results). The mean of 100,000
# values (quick), each off by at most a step of 2.6 deviations, strays by 0.01 of itself; rounding down costs 0.5 of it.
TOLERANCE = 5e-2

Packed = Sequence[Tensor]


class Activations:
    """Outputs of a ReLU [N, F], to be kept in codes of so many bits."""

    def __init__(self, N: int, bits: int, setting: Setting) -> None:
        self.bits = bits
        self.name = f"{N}x{WIDTH}/block{BLOCK}/int{bits}"
        self.x = randn(N, WIDTH, setting=setting, seed=1).relu_()

    def work(self, task: str, pack: Callable[[Tensor], Packed], unpack: Callable[[Packed], Tensor]) -> Work:
        """``task`` is pack, unpack or round-trip; what is not timed is checked with it all the same."""
        x = self.x
        packed = pack(x)
        run: dict[str, Callable[[], object]] = {
            "pack": lambda: pack(x),
            "unpack": lambda: unpack(packed),
            "round-trip": lambda: unpack(pack(x)),
        }
        return Work(run[task], lambda: self.results(unpack(packed if task == "unpack" else pack(x))))

    def results(self, value: Tensor) -> list[Tensor]:
        """The input where ``value`` is one of the two codes around it, elsewhere ``value``; and the mean.

        A step may be larger than the data, so the error alone would not tell a wrong value from a rounded one.
        """
        x, y = self.x.view(-1, BLOCK).double(), value.view(-1, BLOCK).double()
        low, high = x.aminmax(dim=1, keepdim=True)
        step = (high - low).clamp_min(1e-30) / (2**self.bits - 1)
        code = (y - low) / step
        is_rounded = ((code - code.round()).abs() < 1e-3) & ((y - x).abs() < 1.001 * step)
        return [torch.where(is_rounded, x, y), value.mean(dtype=torch.float64)]

    def ours(self, task: str) -> Work:
        seed = make_seed(1, self.x.device)

        def unpack(packed: Packed) -> Tensor:
            return ops.blocks_unpack(*packed, self.bits, self.x.numel(), self.x.dtype)

        return self.work(task, lambda x: ops.blocks_pack(x, seed, self.bits, BLOCK, torch.float32), unpack)

    def rival(self, task: str, compiled: bool = False) -> Work:
        pack = torch.compile(_pack) if compiled else _pack
        unpack = torch.compile(_unpack) if compiled else _unpack
        return self.work(task, lambda x: pack(x, self.bits), lambda packed: unpack(packed, self.bits))

    def exact(self) -> list[Tensor]:
        x = self.x.view(-1, BLOCK).double()
        return [x, x.mean()]

    def num_bytes(self, task: str) -> int:
        num_values = self.x.numel()
        packed = num_values * self.bits // 8 + 8 * (num_values // BLOCK)
        return (self.x.nbytes + packed) * (2 if task == "round-trip" else 1)


def _pack(x: Tensor, bits: int) -> Packed:
    """What a careful user would write, after EXACT: extrema of a block, uniform noise, shifts."""
    values = x.view(-1, BLOCK)
    low, high = values.aminmax(dim=1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    scaled = (values - low).mul_(1 / step.clamp_min(1e-30))
    codes = scaled.add_(torch.rand_like(scaled)).clamp_(max=2**bits - 1).to(torch.uint8)
    parts = codes.view(-1, 8 // bits, BLOCK * bits // 8)
    packed = parts[:, 0].clone()
    for part in range(1, parts.shape[1]):
        packed |= parts[:, part] << (bits * part)
    return packed, low, step


def _unpack(kept: Packed, bits: int) -> Tensor:
    packed, low, step = kept
    parts = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.addcmul(low, torch.stack(parts, dim=1).view(-1, BLOCK).float(), step)


def cases(setting: Setting) -> Iterator[Case]:
    for bits in (2, 4, 1, 8):
        activations = Activations(num_rows(setting), bits, setting)
        for task in ("pack", "unpack", "round-trip"):
            providers = [
                Provider(f"qgnn int{bits}", partial(activations.ours, task), TOLERANCE),
                Provider(f"torch eager int{bits}", partial(activations.rival, task), TOLERANCE),
            ]
            if setting.is_cuda and bits == 2:  # each compilation takes seconds
                compiled = partial(activations.rival, task, compiled=True)
                providers.append(Provider(f"torch.compile int{bits}", compiled, TOLERANCE))
            name = f"{activations.name}/{task}"
            yield Case(name, "forward", activations.exact, providers, activations.num_bytes(task))
