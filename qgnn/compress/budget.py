"""Widths of codes under a budget of bytes, by what the rounding of each tensor does to the gradient.

After GACT (`arXiv:2206.11357 <https://arxiv.org/abs/2206.11357>`_) and ActNN (`arXiv:2104.14129
<https://arxiv.org/abs/2104.14129>`_). In a block that measures, all tensors are kept in 8 bits. Each of its backward
passes runs once as it is, and once for each tensor with this one's values rounded anew to 2 bits, in the blocks that
those would have: the squared distance of the two gradients of all leaves is the variance that 2 bits of it add. That of
b bits is proportional to 1 / (2**b - 1)**2 (about: blocks of other widths have other lengths), and variances of
different tensors and backward passes add up. They count relative to the squared gradient, which shrinks in training and
grows with the scale of a loss, so that blocks can be averaged. At the block's end widths are raised from 1 bit, each
time where a byte saves the most.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from qgnn.compress.report import Report
from qgnn.compress.saved import Codes
from qgnn.compressed_tensor import CompressedTensor
from qgnn.formats import Blocks
from qgnn.functional.blocks import decompress, pack, with_block_size
from qgnn.memory import MIB
from qgnn.rounding import BLOCK_BITS

# Function, module, and how many tensors of both came before in a block.
Key = tuple[str, str, int]

_PROBE_BITS = 2
_WIDEST = BLOCK_BITS[-1]


class Candidate(NamedTuple):
    """A tensor whose width is to be chosen.

    Args:
        variance: What one bit of it adds to the gradient's relative variance.
        num_bytes: Bytes in each width.
    """

    variance: float
    num_bytes: dict[int, int]

    def variance_of(self, bits: int) -> float:
        """What codes of this width add."""
        return self.variance / ((1 << bits) - 1) ** 2


def allocate(candidates: dict[Key, Candidate], num_bytes: int) -> dict[Key, int]:
    """Widths whose codes take at most so many bytes, with about the least variance in all.

    A step to the next width saves less variance a byte than the step before it, so that the cheapest step first is the
    best choice up to one step: the last one that does not fit.

    Raises:
        ValueError: If one bit of each is too much.
    """
    widths = dict.fromkeys(candidates, BLOCK_BITS[0])
    used = sum(c.num_bytes[BLOCK_BITS[0]] for c in candidates.values())
    if used > num_bytes:
        raise ValueError(f"one bit a value takes {used} bytes, of which there are {num_bytes}")
    while True:
        steps = []
        for key, candidate in candidates.items():
            bits = widths[key]
            if bits < _WIDEST:
                wider = 2 * bits
                more = candidate.num_bytes[wider] - candidate.num_bytes[bits]
                saved = candidate.variance_of(bits) - candidate.variance_of(wider)
                if used + more <= num_bytes:
                    steps.append((saved / max(more, 1), more, wider, key))
        if not steps:
            return widths
        _, more, wider, key = max(steps)
        widths[key] = wider
        used += more


class Budget:
    """Widths of the tensors of one object, block after block.

    Args:
        mib: MiB to keep for a block's backward passes, all included.
        every: Blocks from one measurement to the next.
    """

    def __init__(self, mib: float, every: int) -> None:
        self._mib, self._every = mib, every
        self._widths: dict[Key, int] = {}
        self._variances: dict[Key, float] = {}
        self._blocks_since = 0
        self._is_stale = True
        self.measures = False
        self._forget()

    def _forget(self) -> None:
        """Of a block that measures: formats and bytes of each tensor in each width, the variance that one bit of it
        adds, the squared gradient, and the codes that some graph holds."""
        self._report = Report()
        self._formats: dict[Key, dict[int, Blocks]] = {}
        self._num_bytes: dict[Key, dict[int, int]] = {}
        self._found: dict[Key, float] = {}
        self._square = 0.0
        self._codes: WeakKeyDictionary[Codes, Key] = WeakKeyDictionary()
        self._coded_bytes, self._has_measured = 0, False

    def begin(self, report: Report) -> None:
        """A block begins."""
        self.measures = self._is_stale or self._blocks_since >= self._every
        self._blocks_since += 1
        self._forget()
        self._report = report

    def end(self) -> None:
        """It has ended without an error: choose widths if it has measured.

        Raises:
            RuntimeError: If it should have measured, and had no backward pass.
            ValueError: If the budget is too small for one bit of each tensor, beside what is not coded.
        """
        if self.measures and self._num_bytes:
            if not self._has_measured:
                raise RuntimeError(
                    "'compress_activations' with a 'budget_mib' measures in its first block, and every "
                    "'reestimate_every' blocks, what rounding does to gradients: call 'loss.backward()' inside the "
                    "block"
                )
            # Scaled losses overflow at times: the next block measures again.
            self._is_stale = not all(map(math.isfinite, (self._square, *self._found.values())))
            if not self._is_stale:
                self._choose_widths()
        self._forget()

    def choose(self, key: Key, in_width: Callable[[int], Blocks], bits: int) -> Blocks:
        """The format of a tensor, which has one in each width, ``bits`` as long as it has not been measured."""
        if not self.measures:
            return in_width(self._widths.get(key, bits))
        self._formats[key] = {bits: in_width(bits) for bits in BLOCK_BITS}
        return self._formats[key][_WIDEST]

    def made(self, key: Key, codes: Codes) -> None:
        """Codes of a tensor, which may have several."""
        if not self.measures:
            self._is_stale |= key not in self._widths
            return
        kept: CompressedTensor = codes.kept
        self._codes[codes] = key
        self._coded_bytes += kept.nbytes
        before = self._num_bytes.get(key, dict.fromkeys(BLOCK_BITS, 0))
        self._num_bytes[key] = {
            bits: before[bits] + _num_bytes(kept, blocks) for bits, blocks in self._formats[key].items()
        }

    def measure(self, seed: Callable[[torch.device], Tensor], root: Tensor, gradient: Tensor | None) -> None:
        """Add up what rounding does to gradients, before the backward pass of ``root``; ``seed`` makes seeds."""
        self._has_measured = True
        leaves, codes_of = leaves_of(root), defaultdict[Key, list[Codes]](list)
        for codes, key in self._codes.items():
            codes_of[key].append(codes)
        if not leaves or not codes_of:
            return
        exact = gradients(root, leaves, gradient)
        self._square += sum(map(_sum_of_squares, exact))
        for key, several in codes_of.items():
            kept = [codes.kept for codes in several]
            try:
                for codes in several:
                    device = codes.kept.packed.device
                    codes.kept = rounded_anew(codes.kept, self._formats[key][_PROBE_BITS], seed(device))
                changed = gradients(root, leaves, gradient)
            finally:
                for codes, original in zip(several, kept, strict=True):
                    codes.kept = original
            distance = sum(_sum_of_squares(a - b) for a, b in zip(changed, exact, strict=True))
            self._found[key] = self._found.get(key, 0.0) + distance * ((1 << _PROBE_BITS) - 1) ** 2

    def _choose_widths(self) -> None:
        candidates = {}
        for key, num_bytes in self._num_bytes.items():
            # None: no backward pass asked for it.
            variance = self._found.get(key, 0.0) / (self._square or 1.0)
            if key in self._variances:  # one sample each time: the mean of them, older ones for less
                variance = (variance + self._variances[key]) / 2
            self._variances[key] = variance
            candidates[key] = Candidate(variance, num_bytes)
        rest = self._report.saved_bytes - self._coded_bytes
        try:
            self._widths = allocate(candidates, int(self._mib * MIB) - rest)
        except ValueError:
            least = rest + sum(c.num_bytes[BLOCK_BITS[0]] for c in candidates.values())
            raise ValueError(
                f"'compress_activations' expects a 'budget_mib' of at least {least / MIB:.3f}: one bit a value of "
                f"what is coded, and {rest / MIB:.3f} MiB of masks and what is kept as it is (got {self._mib})"
            ) from None
        self._blocks_since = 1


def _sum_of_squares(x: Tensor) -> float:
    """The sum of squares, of complex numbers as well, in fp32."""
    return float(x.abs().float().square().sum())


def _num_bytes(kept: CompressedTensor, blocks: Blocks) -> int:
    """Bytes of the same values in another format."""
    num_values = kept.shape.numel() // kept.shape[-1] * kept.columns if kept.columns else kept.shape.numel()
    seed = 0 if kept.projection_seed is None else kept.projection_seed.nbytes
    return with_block_size(blocks, num_values).num_bytes(num_values) + seed


def with_bits(blocks: Blocks, bits: int) -> Blocks:
    """The format in another width; bins of one width where there are no others."""
    bins = blocks.bins if bits in (2, 4) else "uniform"
    return replace(blocks, bits=bits, bins=bins)


def rounded_anew(c: CompressedTensor, blocks: Blocks, seed: Tensor) -> CompressedTensor:
    """The same values, projected by the same signs, in codes of another format."""
    rows = c.shape if not c.columns else torch.Size((*c.shape[:-1], c.columns))
    values = decompress(replace(c, shape=rows, columns=0, projection_seed=None, dtype=torch.float32))
    narrow = pack(values, replace(blocks, projection=None), seed)
    return replace(narrow, shape=c.shape, columns=c.columns, projection_seed=c.projection_seed, dtype=c.dtype)


def leaves_of(root: Tensor) -> list[Tensor]:
    """The leaves that get a gradient from ``root``."""
    found: list[Tensor] = []
    nodes: list[Any] = [root.grad_fn]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            found.append(node.variable)
        nodes.extend(following for following, _ in node.next_functions)
    return found


def gradients(root: Tensor, leaves: list[Tensor], gradient: Tensor | None) -> list[Tensor]:
    """The gradients of the leaves, with the graph kept."""
    found = torch.autograd.grad(root, leaves, gradient, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]
