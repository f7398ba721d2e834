"""Other ways to keep the operands of dense products in few bits, in saved-tensor hooks: top-k pruning, low rank, bf16.

Each codec takes a matrix ``[N, F]`` and a budget in bits a value, and returns the bytes that it keeps and the matrix
that they stand for. Everything but the operands is kept as torch does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_BF16_BITS = 16
_RUN, _PLACE_BITS, _COUNT_BITS = 256, 8, 16  # a place within a run of values, and how many of it are kept


class Coded(NamedTuple):
    """What is kept of an operand."""

    num_bytes: int
    restore: Callable[[], Tensor]


Codec = Callable[[Tensor], Coded]


def bf16(x: Tensor, bits_per_value: float = _BF16_BITS) -> Coded:
    """Every value in bf16, whatever the budget."""
    kept = x.bfloat16()
    return Coded(kept.nbytes, kept.float)


def top_k(x: Tensor, bits_per_value: float) -> Coded:
    """The values of largest magnitude in bf16; for their places a bit a value, or one within a run of 256 for each, of
    which the number is kept, if that is less."""
    n = x.numel()
    counts = -(-n // _RUN) * _COUNT_BITS
    by_bitmap = (bits_per_value - 1) * n / _BF16_BITS
    by_place = (bits_per_value * n - counts) / (_BF16_BITS + _PLACE_BITS)
    k = max(1, int(max(by_bitmap, by_place)))
    place = x.abs().flatten().topk(k).indices.sort().values
    kept = x.flatten()[place].bfloat16()
    bits = min(n, counts + _PLACE_BITS * k) + _BF16_BITS * k

    def restore() -> Tensor:
        return torch.zeros(n, device=x.device).index_copy_(0, place, kept.float()).view(x.shape)

    return Coded(-(-bits // 8), restore)


def low_rank(x: Tensor, bits_per_value: float) -> Coded:
    """The truncated SVD, both factors in bf16. Columns are few: eigenvectors of x^T x are found directly."""
    rank = max(1, int(bits_per_value * x.numel() / (_BF16_BITS * sum(x.shape))))
    x = x.float()
    vectors = torch.linalg.eigh(x.t() @ x).eigenvectors[:, -rank:]
    left, right = (x @ vectors).bfloat16(), vectors.bfloat16()
    return Coded(left.nbytes + right.nbytes, lambda: left.float() @ right.float().t())


class _Products(TorchFunctionMode):
    """Tells whether a dense product runs."""

    def __init__(self) -> None:
        super().__init__()
        self.running = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer, self.running = self.running, func is F.linear
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.running = outer


@contextmanager
def operands_in(codec: Codec, features: Tensor, min_size: int = 1024) -> Iterator[list[int]]:
    """Keep the operands of ``linear`` as a codec does; yields the bytes of each, as its format has them.

    Parameters and the constant features are left alone: they are kept anyway. A codec draws nothing from torch's
    generator, or it would change the masks of dropout.
    """
    sizes: list[int] = []
    products = _Products()

    def is_kept_anyway(t: Tensor) -> bool:
        base = t if t._base is None else t._base  # a weight is saved as its transpose
        return (base.is_leaf and base.requires_grad) or t.data_ptr() == features.data_ptr()

    def pack(t: Tensor) -> Any:
        if not products.running or t.numel() < min_size or is_kept_anyway(t):
            return t.detach()  # the tensor itself would keep its own graph alive
        with torch.no_grad(), torch._C.DisableTorchFunction():
            coded = codec(t.detach())
        sizes.append(coded.num_bytes)
        return coded.restore

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), products:
        yield sizes
