"""Graphs and error bounds that the tests of aggregation share."""

import torch
from qgnn.kernels.spmm import spmm
from qgnn.kernels.spmm_plan import GROUP_ROWS, Plan
from torch import Tensor

from graphs import GRAPHS, RECTANGULAR
from kernel_cases import UNIT, assert_within, csr, dense, storage_error

ALL_GRAPHS = {name: (edges, n, n) for name, (edges, n) in GRAPHS.items()} | RECTANGULAR
GRAPH = RECTANGULAR["wide"]  # 90 edges from 60 nodes into 7


def graph(name: str, device: str, dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor, int, int]:
    edge_index, num_sources, num_targets = ALL_GRAPHS[name]
    return *csr(edge_index, num_targets, device, dtype), num_sources, num_targets


def _on_tensor_cores(x: Tensor, heads: int) -> bool:
    width = x.shape[1] // heads
    return x.dtype == torch.int8 and width >= 32 and (heads == 1 or width % 32 == 0)


def _largest_of_group(indptr: Tensor, value: Tensor) -> Tensor:
    """For each row, the largest |value| of the edges of the 16 rows around it: [N]."""
    row = torch.repeat_interleave(indptr.diff().long(), output_size=value.numel())
    groups = value.new_zeros(-(-(indptr.numel() - 1) // GROUP_ROWS))
    groups.scatter_reduce_(0, row // GROUP_ROWS, value.abs(), "amax")
    return groups.repeat_interleave(GROUP_ROWS)[: indptr.numel() - 1]


def _sums(
    indptr: Tensor, index: Tensor, x: Tensor, value: Tensor, on_tensor_cores: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums in float64, sums of absolute terms, and a bound of the error of the sums before their epilogue.

    Multiply-adds: a row of d terms takes d roundings, sums of partial sums among them, and two more, scale times weight
    and a sum over what else is in a tile. Tensor cores may cut off where others round, which doubles these. Theirs are
    sums of weights in fp16, with an error of 2**-11, or for weights that are subnormal in fp16, of half of 2**-24 where
    the largest weight of the item is at least 2**14."""
    matrix, magnitude = dense(indptr, index, value, x.shape[0]), dense(indptr, index, value.abs(), x.shape[0])
    total = magnitude @ x.double().abs()
    bound = (indptr.diff()[:, None] + 2) * UNIT * total
    if on_tensor_cores:
        codes = dense(indptr, index, torch.ones_like(value), x.shape[0]) @ x.double().abs()
        largest = _largest_of_group(indptr, value).clamp_min(2.0**-112)
        bound = 2 * bound + 2.0**-11 * total + 2.0**-39 * largest[:, None] * codes
    return matrix @ x.double(), total, bound


def exact_sums(
    indptr: Tensor, index: Tensor, x: Tensor, *, weight: Tensor | None = None, x_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """float64 ``[N, F]``: the sums, those of the terms' absolute values, and a bound of the error of :func:`spmm`."""
    E = index.numel()
    values = torch.ones(E, device=x.device, dtype=torch.float64) if weight is None else weight.double()
    values = values[:, None] if values.dim() == 1 else values
    if x_scale is not None:
        values = values * x_scale.double().expand(x.shape[0])[index.long()][:, None]
    heads = values.shape[1]
    per_head = [
        _sums(indptr, index, columns, value, _on_tensor_cores(x, heads))
        for columns, value in zip(x.chunk(heads, dim=1), values.unbind(1), strict=True)
    ]
    exact, total, bound = (torch.cat(parts, dim=1) for parts in zip(*per_head, strict=True))
    return exact, total, bound


def assert_spmm_within_bound(
    indptr: Tensor,
    index: Tensor,
    x: Tensor,
    *,
    weight: Tensor | None = None,
    x_scale: Tensor | None = None,
    row_factor: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """The sums' own bound, and three roundings of the epilogue: row factor, bias, result."""
    options = {"weight": weight, "x_scale": x_scale, "row_factor": row_factor, "bias": bias, "out_dtype": out_dtype}
    out = spmm(indptr, index, x, **options, plan=plan)
    assert torch.equal(out, spmm(indptr, index, x, **options, plan=plan))  # bit for bit
    exact, total, bound = exact_sums(indptr, index, x, weight=weight, x_scale=x_scale)
    factor = torch.ones(indptr.numel() - 1, device=x.device) if row_factor is None else row_factor
    offset = torch.zeros(x.shape[1], device=x.device) if bias is None else bias
    exact = exact * factor.double()[:, None] + offset.double()
    total = total * factor.double().abs()[:, None] + offset.double().abs()
    bound = bound * factor.double().abs()[:, None]
    assert_within(out, exact, 1.01 * (bound + 3 * UNIT * total) + storage_error(out.dtype) * total)
    return out
