"""What attention of all kinds shares: rows by head, weights from scores, dropout, the rounded gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from qgnn.activation import Activation
from qgnn.reference._common import compute_dtype, stream_seed
from qgnn.reference.dense import quantize
from qgnn.reference.edges import edge_targets, row_sums, softmax
from qgnn.rng import random_bits16


def result_dtype(x: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    if out_dtype is not None:
        return out_dtype
    return x.dtype if x.is_floating_point() else torch.float32


def rows_by_head(x: Tensor, scale: Tensor | None, heads: int | None = None) -> Tensor:
    """What codes or rows stand for, by head: [N, H, D] (or [N, 1, F] of rows whose heads play no part)."""
    heads = heads or (1 if scale is None else scale.shape[1])
    rows = x.to(compute_dtype(x)).view(x.shape[0], heads, x.shape[1] // heads)
    return rows if scale is None else rows * scale[:, :, None]


def by_head(values: Tensor) -> Tensor:
    return values if values.dim() == 2 else values[:, None]


def rounded_grad(grad: Tensor, heads: int, dtype: torch.dtype, bits: int, seed: Tensor | None, stream: int) -> Tensor:
    """The gradient as the backward pass gathers it, [N, H * D]."""
    if bits == 0:
        return grad.to(dtype)
    num_rows, width = grad.shape
    codes, scale = quantize(grad.reshape(num_rows * heads, width // heads), bits=bits, seed=seed, stream=stream)
    return (codes.to(dtype) * scale[:, None]).view(num_rows, width)


def weights_of(indptr: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """``p`` [E, H], and ``L`` [N, H]: 0 for rows without edges."""
    p = softmax(indptr, e)
    num_rows = indptr.numel() - 1
    if e.numel() == 0:
        return p, e.new_zeros((num_rows, e.shape[1]))
    largest = torch.segment_reduce(e, "max", offsets=indptr, axis=0, unsafe=True)
    sums = row_sums(indptr, (e - largest[edge_targets(indptr, e.shape[0])]).exp())
    lse = torch.where((indptr.diff() > 0)[:, None], largest + sums.log(), 0.0)
    return p, lse.to(e.dtype)


def keeps(num_edges: int, heads: int, dropout: Activation | None) -> Tensor | None:
    """What multiplies ``p``: 0 where an edge's head is dropped, else the factor, [E, H]; ``None`` without dropout."""
    if dropout is None or not dropout.threshold:
        return None
    seed = stream_seed(dropout.seed, dropout.stream)
    assert seed is not None
    keep = random_bits16(0, num_edges, heads, seed) >= dropout.threshold
    return keep.float() * dropout.factor


def dropped(p: Tensor, dropout: Activation | None) -> Tensor:
    factor = keeps(p.shape[0], p.shape[1], dropout)
    return p if factor is None else p * factor.to(p.dtype)


def recomputed_weights(indptr: Tensor, e: Tensor, lse: Tensor, dropout: Activation | None) -> tuple[Tensor, Tensor]:
    """``p`` and what multiplies it, from the scores and ``L``."""
    p = (e - lse.to(e.dtype)[edge_targets(indptr, e.shape[0])]).exp()
    factor = keeps(p.shape[0], p.shape[1], dropout)
    return p, torch.ones_like(p) if factor is None else factor.to(p.dtype)


def leaky_slope(x: Tensor, negative_slope: float) -> Tensor:
    return torch.full_like(x, negative_slope).masked_fill_(x > 0, 1.0)


def score_grads(indptr: Tensor, p: Tensor, t: Tensor) -> Tensor:
    """``p * (t - D)`` of edges, [E, H], where ``t`` is multiplied with what dropout multiplies ``p`` with. ``D`` is
    divided by the sum of ``p``, which is 1 but for the rounding of ``L``."""
    mean = row_sums(indptr, p * t) / row_sums(indptr, p)
    return p * (t - mean[edge_targets(indptr, p.shape[0])])
