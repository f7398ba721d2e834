"""The compressions of what is kept for the backward pass, and what they mean for a step."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from qgnn.compress import Report, compress_activations
from qgnn.compress.budget import with_bits
from qgnn.formats import Blocks


class Compression(NamedTuple):
    """One row of the comparison beside its precision: its name, and the format of the codes if there are any."""

    name: str = "none"
    blocks: Blocks | None = None

    def with_bits(self, bits: int) -> Compression:
        """The same with codes of another width, as a schedule sets it.

        Raises:
            ValueError: If there is no such width.
        """
        return self if self.blocks is None else self._replace(blocks=with_bits(self.blocks, bits))

    def context(self, seed: int = 0) -> contextlib.AbstractContextManager[Report | None]:
        """What a training step runs in, again and again; masks of dropout are the same with any compression."""
        if self.blocks is None:
            return contextlib.nullcontext()
        blocks = self.blocks
        return compress_activations(blocks.bits, blocks.block_size, blocks.projection, blocks.bins, seed)


NO_COMPRESSION = Compression()


def parse_compression(text: str) -> Compression:
    """``none``, or a name of :meth:`qgnn.formats.Blocks.parse`.

    Raises:
        ValueError: For anything else.
    """
    name = text.strip().lower()
    if name == "none":
        return NO_COMPRESSION
    if not name.startswith("int"):
        raise ValueError(f"expected none, or a format such as int2, int2-rp8 or int2-rp8-vm (got {text!r})")
    blocks = Blocks.parse(name)
    return Compression(str(blocks), blocks)
