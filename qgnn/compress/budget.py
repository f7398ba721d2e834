"""Widths of codes under a budget of bytes, by what the rounding of each tensor does to the gradient.

After GACT (`arXiv:2206.11357 <https://arxiv.org/abs/2206.11357>`_) and ActNN (`arXiv:2104.14129
<https://arxiv.org/abs/2104.14129>`_). In a block that measures, all tensors are kept in 8 bits. Its backward pass runs
once as it is, and once for each tensor with this one's values rounded anew to 2 bits: the squared distance of the two
gradients of all leaves is the variance that 2 bits of it add. That of b bits is proportional to 1 / (2**b - 1)**2, and
variances of different tensors add up. Widths are then raised from 1 bit, each time where a byte saves the most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qgnn.compress.report import Report
from qgnn.compress.saved import Codes
from qgnn.compressed_tensor import CompressedTensor
from qgnn.formats import BLOCK_BITS, Blocks
from qgnn.functional.blocks import decompress, pack, with_block_size

# Function, module, and how many tensors of both came before in a block.
Key = tuple[str, str, int]

_MIB = 2**20
_PROBE_BITS = 2
_WIDEST = BLOCK_BITS[-1]


class Candidate(NamedTuple):
    """A tensor whose width is to be chosen.

    Args:
        variance: What one bit of it adds to the gradient's variance.
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
        mib: MiB to keep for a backward pass, all included.
        every: Blocks from one measurement to the next.
        bits: Width of a tensor that has not been measured yet.
    """

    def __init__(self, mib: float, every: int, bits: int) -> None:
        self._mib, self._every, self._bits = mib, every, bits
        self._widths: dict[Key, int] = {}
        self._variances: dict[Key, float] = {}
        self._blocks_since = 0
        self._is_stale = True
        self._codes: dict[Key, Codes] = {}
        self._formats: dict[Key, Blocks] = {}
        self.measures = False

    def begin(self) -> None:
        """A block begins."""
        self.measures = self._is_stale or self._blocks_since >= self._every
        self._blocks_since += 1
        self._codes.clear()
        self._formats.clear()

    def end(self) -> None:
        """It has ended without an error.

        Raises:
            RuntimeError: If it should have measured, and had no backward pass.
        """
        if self.measures and self._codes:
            raise RuntimeError(
                "'compress_activations' with a 'budget_mib' measures in its first block, and every 'reestimate_every' "
                "blocks, what rounding does to gradients: call 'loss.backward()' inside the block"
            )

    def choose(self, key: Key, blocks: Blocks) -> Blocks:
        """The format of a tensor."""
        self._formats[key] = blocks
        if self.measures:
            return with_bits(blocks, _WIDEST)
        return with_bits(blocks, self._widths.get(key, self._bits))

    def made(self, key: Key, codes: Codes) -> None:
        """The codes of a tensor."""
        if self.measures:
            self._codes[key] = codes
        elif key not in self._widths:
            self._is_stale = True

    def measure(
        self, report: Report, seed: Callable[[torch.device], Tensor], root: Tensor, gradient: Tensor | None
    ) -> None:
        """Choose widths, before the backward pass of ``root``; ``seed`` makes seeds.

        Raises:
            ValueError: If the budget is too small for one bit of each tensor, beside what is not coded.
        """
        leaves = leaves_of(root)
        exact = gradients(root, leaves, gradient)
        candidates = {}
        for key, codes in self._codes.items():
            kept: CompressedTensor = codes.kept
            codes.kept = rounded_anew(kept, _PROBE_BITS, seed(kept.packed.device))
            changed = gradients(root, leaves, gradient)
            codes.kept = kept
            distance = sum(float((a - b).square().sum()) for a, b in zip(changed, exact, strict=True))
            variance = distance * ((1 << _PROBE_BITS) - 1) ** 2
            if key in self._variances:  # one sample each time: the mean of them, older ones for less
                variance = (variance + self._variances[key]) / 2
            self._variances[key] = variance
            candidates[key] = Candidate(variance, self._sizes(key, kept))
        rest = report.saved_bytes - sum(codes.kept.nbytes for codes in self._codes.values())
        try:
            self._widths = allocate(candidates, int(self._mib * _MIB) - rest)
        except ValueError:
            least = rest + sum(c.num_bytes[BLOCK_BITS[0]] for c in candidates.values())
            raise ValueError(
                f"'compress_activations' expects a 'budget_mib' of at least {least / _MIB:.3f}: one bit a value of "
                f"what is coded, and {rest / _MIB:.3f} MiB of masks and what is kept as it is (got {self._mib})"
            ) from None
        self._is_stale, self._blocks_since = False, 1
        self._codes.clear()

    def _sizes(self, key: Key, kept: CompressedTensor) -> dict[int, int]:
        """Bytes of a tensor in each width."""
        num_values = kept.shape.numel() // kept.shape[-1] * kept.columns if kept.columns else kept.shape.numel()
        formats = {bits: with_block_size(with_bits(self._formats[key], bits), num_values) for bits in BLOCK_BITS}
        seed = 0 if kept.projection_seed is None else kept.projection_seed.nbytes
        return {bits: blocks.num_bytes(num_values) + seed for bits, blocks in formats.items()}


def with_bits(blocks: Blocks, bits: int) -> Blocks:
    """The format in another width; bins of one width where there are no others."""
    bins = blocks.bins if bits in (2, 4) else "uniform"
    return replace(blocks, bits=bits, bins=bins)


def rounded_anew(c: CompressedTensor, bits: int, seed: Tensor) -> CompressedTensor:
    """The same values, projected by the same signs, in codes of fewer bits."""
    rows = c.shape if not c.columns else torch.Size((*c.shape[:-1], c.columns))
    values = decompress(replace(c, shape=rows, columns=0, projection_seed=None, dtype=torch.float32))
    narrow = pack(values, Blocks(bits, metadata_dtype=c.blocks.metadata_dtype), seed)
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
        if hasattr(node, "variable"):
            found.append(node.variable)
        nodes.extend(following for following, _ in node.next_functions)
    return found


def gradients(root: Tensor, leaves: list[Tensor], gradient: Tensor | None) -> list[Tensor]:
    """The gradients of the leaves, with the graph kept."""
    found = torch.autograd.grad(root, leaves, gradient, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]
