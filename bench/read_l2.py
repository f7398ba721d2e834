"""A kernel that does nothing but read a table from the L2 cache, again and again."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192


@triton.jit
def _read_kernel(out_ptr, x_ptr, NUM_BLOCKS, BLOCK: tl.constexpr):
    """Each program sums the whole table, starting at a block of its own; ".cg" passes by the cache nearer than L2."""
    pid = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, NUM_BLOCKS):
        block = (pid * 7 + step) % NUM_BLOCKS
        total += tl.load(x_ptr + block * BLOCK + tl.arange(0, BLOCK), cache_modifier=".cg")
    tl.store(out_ptr + pid, tl.sum(total, axis=0))


def read(x: Tensor, reads: int) -> Tensor:
    """``reads`` sums of ``x``, a whole number of blocks, each by a program of its own."""
    out = torch.empty(reads, device=x.device)
    with torch.cuda.device_of(x):
        _read_kernel[(reads,)](out, x, x.numel() // BLOCK, BLOCK=BLOCK, num_warps=8)
    return out
