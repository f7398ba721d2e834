"""Rows of numbers as what goes over the wire: codes of a few bits and what they are scaled with, side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qgnn import ops
from qgnn.rng import derive_seed, make_seed

SCALE_BYTES = 4


def encode(rows: Tensor, seed: Tensor | None) -> Tensor:
    """Codes by stochastic rounding, to nearest without a seed.

    Shapes:
        - **input:** fp32 ``[R, G]``
        - **output:** uint8 ``[R, G + 4]``
    """
    return join(*ops.quantize(rows, seed, 8, "row", 1))


def join(codes: Tensor, scale: Tensor) -> Tensor:
    """The message of int8 codes ``[R, G]`` and a scale a row."""
    return torch.cat([codes.view(torch.uint8), scale.view(-1, 1).view(torch.uint8)], 1)


def decode(message: Tensor) -> Tensor:
    """The values: fp32 ``[R, G]`` of uint8 ``[R, G + 4]``."""
    codes, scale = message.split([message.shape[1] - SCALE_BYTES, SCALE_BYTES], 1)
    return codes.view(torch.int8).float().mul_(_column(scale, torch.float32))


@dataclass(frozen=True)
class RowFormat:
    """How rows are sent: as they are, as int8 codes with a scale a row, or as blocks of fewer bits.

    Blocks of a row are equally long, and no longer than ``block_size``; each has an offset and a step in bf16.

    Args:
        bits: Width of a code, 1, 2, 4 or 8; ``None`` for rows as they are.
        block_size: The most values that share an offset and a step, of codes of fewer than 8 bits.
    """

    bits: int | None
    block_size: int

    def num_bytes(self, num_columns: int, dtype: torch.dtype) -> int:
        """Bytes of the message of a row."""
        if self.bits is None:
            return num_columns * dtype.itemsize
        if self.bits == 8:
            return num_columns + SCALE_BYTES
        return sum(self._widths(num_columns))

    def encode(self, rows: Tensor, seed: Tensor | None) -> Tensor:
        """The messages of rows ``[R, F]``, uint8 ``[R, B]``; rounded to nearest without a seed."""
        if self.bits is None:
            values = rows.clone(memory_format=torch.contiguous_format).view(-1)  # even one value may have a stride
            return values.view(torch.uint8).view(len(rows), self.num_bytes(rows.shape[1], rows.dtype))
        rows = rows.float()
        if self.bits == 8:
            return encode(rows, seed)
        num_rows, num_columns = rows.shape
        num_blocks, length = self._blocks(num_columns)
        padding = rows[:, -1:].expand(-1, num_blocks * length - num_columns)  # which leaves the range of a block alone
        values = torch.cat([rows, padding], 1)
        packed, low, step = ops.blocks_pack(values, seed, self.bits, length, torch.bfloat16, None, 0, None)
        parts = zip((packed, low.view(torch.uint8), step.view(torch.uint8)), self._widths(num_columns), strict=True)
        return torch.cat([part.view(num_rows, width) for part, width in parts], 1)

    def decode(self, message: Tensor, num_columns: int, dtype: torch.dtype) -> Tensor:
        """The rows ``[R, F]`` of messages ``[R, B]``, in a type."""
        if self.bits is None:
            return message.reshape(-1).view(dtype).view(len(message), num_columns)
        if self.bits == 8:
            return decode(message).to(dtype)
        num_rows = message.shape[0]
        num_blocks, length = self._blocks(num_columns)
        codes, low, step = message.split(self._widths(num_columns), 1)
        packed = codes.reshape(num_rows * num_blocks, length * self.bits // 8)
        low, step = (_column(numbers, torch.bfloat16).view(-1) for numbers in (low, step))
        size = num_rows * num_blocks * length
        values = ops.blocks_unpack(packed, low, step, self.bits, size, torch.float32, None, 0, None, 0, 0)
        return values.view(num_rows, num_blocks * length)[:, :num_columns].to(dtype)

    def _blocks(self, num_columns: int) -> tuple[int, int]:
        """How many blocks a row has, and their length, which fills whole bytes."""
        assert self.bits is not None
        codes_a_byte, num_blocks = 8 // self.bits, -(-num_columns // self.block_size)
        length = -(-num_columns // (num_blocks * codes_a_byte)) * codes_a_byte
        return -(-num_columns // length), length

    def _widths(self, num_columns: int) -> list[int]:
        """Bytes of a row's codes, offsets and steps."""
        num_blocks, length = self._blocks(num_columns)
        assert self.bits is not None
        return [num_blocks * length * self.bits // 8, 2 * num_blocks, 2 * num_blocks]


def seed_of(device: torch.device, *numbers: int) -> Tensor:
    """The seed of a rounding that these numbers name: independent ones for different numbers."""
    return make_seed(derive_seed(*numbers), device)


def _column(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of a type from columns of messages."""
    return stored.clone(memory_format=torch.contiguous_format).view(dtype)
