"""Which format a tensor gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from qgnn.bins import best_block_size, block_sizes, measure_variances
from qgnn.compress.budget import Budget, Key, with_bits
from qgnn.compress.policy import Rule
from qgnn.compress.report import SavedTensor
from qgnn.compress.saved import Codes
from qgnn.formats import Blocks
from qgnn.rounding import MAX_BLOCK_SIZE

Excluded = str | nn.Module | Callable[[SavedTensor], bool]


class Formats:
    """The formats of the tensors of one block.

    Args:
        blocks: The format of all, as far as nothing below says otherwise.
        exclude: What is kept as it is.
        runs: Whether a module runs.
        block_sizes: Lengths of blocks measured so far, to be added to; ``None`` to measure none.
        budget: What chooses widths, or ``None``.
        block_rows: Rows of a block, in place of the length that ``blocks`` has, or ``None``.
    """

    def __init__(
        self,
        blocks: Blocks,
        exclude: tuple[Excluded, ...],
        runs: Callable[[nn.Module], bool],
        block_sizes: dict[tuple[Key, int], int] | None,
        budget: Budget | None,
        block_rows: int | None = None,
    ) -> None:
        self._blocks, self._exclude, self._runs = blocks, exclude, runs
        self._block_sizes, self._budget, self._block_rows = block_sizes, budget, block_rows
        self._seen: Counter[tuple[str, str]] = Counter()
        self._adaptive: Key | None = None  # the tensor that was chosen for last, if its width is the budget's

    def excludes(self, entry: SavedTensor) -> bool:
        """Whether a tensor is to be kept as it is."""
        return any(self._is_excluded(excluded, entry) for excluded in self._exclude)

    def choose(self, entry: SavedTensor, values: Tensor, rule: Rule) -> Blocks:
        """The format of one tensor."""
        self._adaptive = None
        kind = (entry.op, entry.module)
        key = (*kind, self._seen[kind])
        self._seen[kind] += 1
        blocks = self._usual(values, rule) if rule.bits is None else self._of_loss(rule.bits)
        # A projection mixes values to normal ones.
        measured = self._block_sizes if blocks.projection is None and rule.bits is None else None

        def in_width(bits: int) -> Blocks:
            narrow = with_bits(blocks, bits)
            return narrow if measured is None else replace(narrow, block_size=_measured(measured, key, values, narrow))

        if self._budget is None:
            return in_width(blocks.bits)
        self._adaptive = key
        return self._budget.choose(key, in_width, blocks.bits)

    def _usual(self, values: Tensor, rule: Rule) -> Blocks:
        """The format before a width or a length is measured."""
        blocks = self._blocks if rule.projected else replace(self._blocks, projection=None)
        # Bins that are made for normal values round others, as of what is behind a ReLU, more coarsely than equal ones.
        if blocks.projection is None and not rule.normal:
            blocks = replace(blocks, bins="uniform")
        if self._block_rows is not None:
            columns = values.shape[-1]
            num_values = self._block_rows * (blocks.columns(columns) or columns)
            whole = -(-num_values // 8) * 8  # bytes in any width
            blocks = replace(blocks, block_size=min(whole, MAX_BLOCK_SIZE))
        return blocks

    def _of_loss(self, bits: int) -> Blocks:
        """That of a loss's gradient, which may lie below the smallest number of fp16."""
        dtype = self._blocks.metadata_dtype
        return Blocks(bits, metadata_dtype=torch.bfloat16 if dtype == torch.float16 else dtype)

    def made(self, codes: Codes) -> None:
        """Codes in the format that was chosen last."""
        if self._budget is not None and self._adaptive is not None:
            self._budget.made(self._adaptive, codes)

    def _is_excluded(self, excluded: Any, entry: SavedTensor) -> bool:
        if isinstance(excluded, str):
            return fnmatchcase(entry.op, excluded) or fnmatchcase(entry.module, excluded)
        if isinstance(excluded, nn.Module):
            return self._runs(excluded)
        return bool(excluded(entry))


def _measured(sizes: dict[tuple[Key, int], int], key: Key, values: Tensor, blocks: Blocks) -> int:
    """The length of a block for the values that the tensor had first; no longer than the tensor now."""
    name = (key, blocks.bits)
    if name not in sizes:
        variances = measure_variances(values, blocks.bits, blocks.bins)
        metadata_bits = 16 * blocks.metadata_dtype.itemsize
        sizes[name] = best_block_size(blocks.bits, values.numel(), blocks.bins, metadata_bits, variances)
    return min(sizes[name], block_sizes(values.numel())[-1])
