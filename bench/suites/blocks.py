"""Packed storage of activations in blocks of 128 values, INT1 to INT8 with stochastic rounding: pack, unpack, both.
INT2 also in bins of given edges, and after a random projection to an eighth of the columns."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from qgnn import ops
from qgnn.ops._backends import STREAM_PROJECTION
from qgnn.reference.blocks import projection_signs, row_signs
from qgnn.rng import make_seed

from ..harness import Case, Provider, Work
from .inputs import Setting, num_rows, randn

BLOCK = 128
WIDTH = 128
PROJECTION = 16
EDGES = (0.0, 1.1017, 1.8983, 3.0)  # of least variance for INT2 blocks of 128 normal values

# Bound on the error of the mean, and on values that no rounding explains (see Activations.results). The mean of 100,000
# values (quick), each off by at most a step of 2.6 deviations, strays by 0.01 of itself; rounding down costs 0.5 of it.
TOLERANCE = 5e-2

Packed = Sequence[Tensor]


class Activations:
    """Outputs of a ReLU [N, F], to be kept in codes of so many bits."""

    def __init__(
        self, N: int, bits: int, setting: Setting, edges: Sequence[float] | None = None, projection: int = 0
    ) -> None:
        self.bits, self.projection = bits, projection
        variant = "/edges" if edges else f"/projection{projection}" if projection else ""
        self.name = f"{N}x{WIDTH}/block{BLOCK}/int{bits}{variant}"
        self.x = randn(N, WIDTH, setting=setting, seed=1).relu_()
        self.edges = None if edges is None else torch.tensor(edges, device=self.x.device)
        self.seed = make_seed(1, self.x.device)
        self.signs = projection_signs(WIDTH, max(1, projection), self.seed, STREAM_PROJECTION)
        self.own = row_signs(0, N, WIDTH, self.seed, STREAM_PROJECTION) if projection else torch.ones(())
        self.size = N * projection if projection else self.x.numel()

    def project(self, x: Tensor) -> Tensor:
        """What is packed."""
        if not self.projection:
            return x
        return (x * self.own.to(x.dtype)) @ self.signs.to(x.dtype) * self.projection**-0.5

    def restore(self, values: Tensor) -> Tensor:
        if not self.projection:
            return values
        mixed = values.view(-1, self.projection) @ self.signs.t().to(values.dtype)
        return mixed * self.projection**-0.5 * self.own.to(values.dtype)

    def work(
        self,
        task: str,
        pack: Callable[[Tensor], Packed],
        unpack: Callable[[Packed], Tensor],
        decode: Callable[[Packed], Tensor],
    ) -> Work:
        """``task`` is pack, unpack or round-trip; what is not timed is checked with it all the same. ``decode`` stops
        before what was projected is multiplied back."""
        x = self.x
        packed = pack(x)
        run: dict[str, Callable[[], object]] = {
            "pack": lambda: pack(x),
            "unpack": lambda: unpack(packed),
            "round-trip": lambda: unpack(pack(x)),
        }

        def check() -> list[Tensor]:
            blocks = packed if task == "unpack" else pack(x)
            return self.results(decode(blocks), unpack(blocks))

        return Work(run[task], check)

    def exact(self) -> list[Tensor]:
        values = self.project(self.x.double()).view(-1, BLOCK)
        return [values, values.mean() + self.offset(values), self.x.view(-1)]

    def offset(self, values: Tensor) -> Tensor | float:
        """Makes the mean of projected values, which is almost 0, one that a relative error can be told of."""
        return values.abs().mean() if self.projection else 0.0

    def results(self, decoded: Tensor, restored: Tensor) -> list[Tensor]:
        """The input where ``decoded`` is one of the two codes around it, elsewhere ``decoded``; the mean; and the input
        plus what ``restored`` and ``decoded`` differ by.

        A step may be larger than the data, so the error alone would not tell a wrong value from a rounded one.
        """
        x = self.project(self.x.double()).view(-1, BLOCK)
        y = decoded.view(-1, BLOCK).double()
        low, high = x.aminmax(dim=1, keepdim=True)
        step = (high - low).clamp_min(1e-30) / (2**self.bits - 1)
        code = (y - low) / step
        if self.edges is None:
            level, width = code.round(), 1.0
        else:
            upper = torch.bucketize(code, (self.edges[1:] + self.edges[:-1]) / 2)
            level, width = self.edges[upper], float(self.edges.diff().max())
        is_rounded = ((code - level).abs() < 1e-3) & ((y - x).abs() < 1.001 * width * step)
        difference = restored.double().view(-1) - self.restore(decoded.double()).view(-1)
        mean = y.mean() + self.offset(x)
        return [torch.where(is_rounded, x, y), mean, self.x.view(-1) + difference]

    def ours(self, task: str) -> Work:
        seed, bits, edges, dtype = make_seed(2, self.x.device), self.bits, self.edges, self.x.dtype
        signs = (self.projection, self.seed)

        def pack(x: Tensor) -> Packed:
            return ops.blocks_pack(x, seed, bits, BLOCK, torch.float32, edges, *signs)

        def unpack(packed: Packed) -> Tensor:
            return ops.blocks_unpack(*packed, bits, self.size, dtype, edges, *signs, WIDTH, 0)

        def decode(packed: Packed) -> Tensor:
            return ops.blocks_unpack(*packed, bits, self.size, dtype, edges, 0, None, 0, 0)

        return self.work(task, pack, unpack, decode)

    def rival(self, task: str, compiled: bool = False) -> Work:
        pack = torch.compile(_pack) if compiled else _pack
        unpack = torch.compile(_unpack) if compiled else _unpack

        def decode(packed: Packed) -> Tensor:
            return unpack(packed, self.bits, self.edges)

        return self.work(
            task,
            lambda x: pack(self.project(x), self.bits, self.edges),
            lambda packed: self.restore(decode(packed)),
            decode,
        )

    def num_bytes(self, task: str) -> int:
        packed = self.size * self.bits // 8 + 8 * (self.size // BLOCK)
        return (self.x.nbytes + packed) * (2 if task == "round-trip" else 1)


def _pack(x: Tensor, bits: int, edges: Tensor | None) -> Packed:
    """What a careful user would write, after EXACT: extrema of a block, uniform noise, shifts."""
    values = x.view(-1, BLOCK)
    low, high = values.aminmax(dim=1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    scaled = (values - low).mul_(1 / step.clamp_min(1e-30))
    if edges is None:
        codes = scaled.add_(torch.rand_like(scaled)).clamp_(max=2**bits - 1).to(torch.uint8)
    else:
        below = torch.bucketize(scaled, edges[1:-1], right=True, out_int32=True)
        fraction = (scaled - edges[below]) / edges.diff()[below]
        codes = below.add_(fraction >= torch.rand_like(scaled)).to(torch.uint8)
    parts = codes.view(-1, 8 // bits, BLOCK * bits // 8)
    packed = parts[:, 0].clone()
    for part in range(1, parts.shape[1]):
        packed |= parts[:, part] << (bits * part)
    return packed, low, step


def _unpack(kept: Packed, bits: int, edges: Tensor | None) -> Tensor:
    packed, low, step = kept
    parts = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    codes = torch.stack(parts, dim=1).view(-1, BLOCK)
    return torch.addcmul(low, codes.float() if edges is None else edges[codes.int()], step)


def cases(setting: Setting) -> Iterator[Case]:
    N = num_rows(setting)
    variants = [Activations(N, bits, setting) for bits in (2, 4, 1, 8)]
    whole = N - N % (BLOCK // PROJECTION)  # rows that make whole blocks, as the rival needs them
    variants += [Activations(N, 2, setting, EDGES), Activations(whole, 2, setting, projection=PROJECTION)]
    for activations in variants:
        for task in ("pack", "unpack", "round-trip"):
            providers = [
                Provider(f"qgnn int{activations.bits}", partial(activations.ours, task), TOLERANCE),
                Provider(f"torch eager int{activations.bits}", partial(activations.rival, task), TOLERANCE),
            ]
            if setting.is_cuda and activations is variants[0]:  # each compilation takes seconds
                compiled = partial(activations.rival, task, compiled=True)
                providers.append(Provider(f"torch.compile int{activations.bits}", compiled, TOLERANCE))
            name = f"{activations.name}/{task}"
            yield Case(name, "forward", activations.exact, providers, activations.num_bytes(task))
