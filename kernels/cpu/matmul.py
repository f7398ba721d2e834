"""The dense product of int8 rows on a CPU: torch's matrix product between two native passes over rows in cache.

    y[n, m] = (sum_k x_q[n, k] * w_q[m, k]) * x_scale[n] * w_scale[m] + bias[m]

The product itself is ``torch._int_mm`` where the CPU multiplies bytes into 32-bit sums (VNNI), and torch's fp32 product
of the codes elsewhere: without such instructions int8 arithmetic gains little over fused multiply-adds, and torch's
fallback for it is many times slower. Either way the integer sums are exact, so the choice is never seen in a result.

Codes that are mostly zero, as bag-of-words features are, are multiplied by a native kernel that visits the others only:
finding them takes a read of one byte a value. A sample of rows decides.

Numerics: 1024 * 127**2 < 2**24, so an fp32 sum of that many products of codes is exact in any order; longer rows are
added up in int32 (K up to 131,071). ``dw`` contracts over rows of different scale and is an fp32 product.

Oracle: qgnn.reference.matmul, matmul_requantize, matmul_dw
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from qgnn.kernels.cpu.epilogue import activate
from qgnn.kernels.cpu.library import PARTS, empty_codes, empty_floats, launch, rows_of, stream_key
from qgnn.kernels.cpu.quantize import quantize
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 20  # of the larger of input and output: 4 MiB of floats, about the last-level cache
_EXACT_TERMS = 1024
_SAMPLE_ROWS, _MAX_DENSITY = 1024, 0.1
_NONZEROS, _INT_MM, _MM = "nonzeros", "torch._int_mm", "torch.mm(fp32)"
_SMALL = 1 << 20  # values whose memory is nobody's concern
_MIN_INTEGER_WORK = 1 << 22  # products below which converting codes costs less than the integer product's setup


@cache
def has_vnni() -> bool:
    """The CPU has instructions that add products of bytes into 32-bit sums."""
    return torch.cpu._is_vnni_supported()


def _mostly_zero(codes: Tensor) -> bool:
    """Whether so few of the codes are not zero that visiting those alone is faster than a dense product."""
    (N, K), codes = codes.shape, rows_of(codes, torch.int8)
    step = max(1, N // _SAMPLE_ROWS)
    limit = int(_MAX_DENSITY * -(-N // step) * K)
    answer = torch.empty(1, dtype=torch.int64)
    launch("qgnn_matmul_is_sparse", answer, codes, N, K, codes.stride(0), step, limit)
    return bool(answer)


def _route(x_q: Tensor, w_q: Tensor) -> str:
    """Which product runs."""
    if _mostly_zero(x_q):
        return _NONZEROS
    is_large = x_q.shape[0] * w_q.numel() >= _MIN_INTEGER_WORK
    return _INT_MM if has_vnni() and is_large else _MM


def _dw_route(g_q: Tensor, g_scale: Tensor, x_q: Tensor, x_scale: Tensor) -> str:
    """Which product runs. Zeros are skipped where they stand for zeros: a NaN or an inf times a zero is a NaN. The
    parts' own sums must not take more memory than the operands do."""
    (N, M), K = g_q.shape, x_q.shape[1]
    if max(N * (K + M), _SMALL) < PARTS * K * M:
        return _MM
    if not _mostly_zero(x_q):
        return _MM
    return _NONZEROS if torch.isfinite(128 * (g_scale * x_scale).float()).all() else _MM


# What a trace shows of the product, by function and operands.
ENGINES: dict[str, Callable[..., str]] = {
    "matmul": lambda x_q, _, w_q, *__: _route(x_q, w_q),
    "matmul_requantize": lambda x_q, _, w_q, *__: _route(x_q, w_q),
    "matmul_dw": _dw_route,
}


def _chunks(num_rows: int, width: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, width))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _floats(codes: Tensor, out: Tensor, factor: Tensor | None = None) -> Tensor:
    """Codes [R, K], times a factor a row, as fp32 in the first rows of the buffer ``out``."""
    out = out[: codes.shape[0]]
    launch("qgnn_matmul_floats", out, codes, factor, *codes.shape, codes.stride(0))
    return out


class _Product:
    """Exact integer products of chunks of rows with one weight matrix.

    Args:
        x_q: All rows, [N, K].
        w_q: The weight, [M, K].
        step: Rows of the largest chunk.
    """

    def __init__(self, x_q: Tensor, w_q: Tensor, step: int) -> None:
        self.x_q, self.w_q = rows_of(x_q, torch.int8), rows_of(w_q, torch.int8)
        K, M = x_q.shape[1], w_q.shape[0]
        self.route = _route(self.x_q, self.w_q)
        if self.route == _NONZEROS:
            self.w_t, self.found = w_q.t().float().contiguous(), torch.empty((PARTS, K), dtype=torch.int32)
            return
        if self.route == _INT_MM:
            self.total = torch.empty((step, M), dtype=torch.int32)
            return
        self.x_float = empty_floats(step, K)
        self.w_floats = _floats(self.w_q, empty_floats(M, K)).split(_EXACT_TERMS, dim=1)
        # Two exact halves add up to what their integer sum rounds to; more than two go through int32.
        self.part = empty_floats(step, M) if len(self.w_floats) > 1 else None
        self.total = torch.empty((step, M), dtype=torch.int32) if len(self.w_floats) > 2 else None

    def of(self, rows: slice, out: Tensor) -> Tensor | None:
        """Sums of a chunk: written to ``out`` (fp32 [R, M]), or returned as int32 where fp32 might not hold them."""
        x_q = self.x_q[rows]
        (R, K), M = x_q.shape, out.shape[1]
        if self.route == _NONZEROS:
            launch("qgnn_matmul_nonzeros", out, self.found, x_q, self.w_t, R, K, M, x_q.stride(0), PARTS)
            return None
        if self.route == _INT_MM:
            return torch._int_mm(x_q, self.w_q.t(), out=self.total[:R])
        x_floats = _floats(x_q, self.x_float).split(_EXACT_TERMS, dim=1)
        torch.mm(x_floats[0], self.w_floats[0].t(), out=out)
        if self.part is None:
            return None
        part, total = self.part[:R], out if self.total is None else self.total[:R].copy_(out)
        for x_float, w_float in zip(x_floats[1:], self.w_floats[1:], strict=True):
            total += torch.mm(x_float, w_float.t(), out=part).to(total.dtype)
        return None if self.total is None else total


def _vector(t: Tensor) -> Tensor:
    return t.detach().float().contiguous()


def matmul(
    x_q: Tensor,
    x_scale: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.float32,
    activation: Any = None,
) -> Tensor:
    """``y = x w^T + bias`` and its activation from int8 operands: [N, K], [M, K] -> [N, M]."""
    (N, K), M = x_q.shape, w_q.shape[0]
    out = empty_floats(N, M)
    if out.numel() == 0:
        return out.to(out_dtype)
    chunks = list(_chunks(N, max(K, M)))
    product = _Product(x_q, w_q, chunks[0].stop)
    x_scale, w_scale, bias = _vector(x_scale), _vector(w_scale), None if bias is None else _vector(bias)
    for rows in chunks:
        y = out[rows]
        total = product.of(rows, y)
        operands = (y if total is None else total, total is not None, *_scale_of(x_scale, rows), w_scale, bias)
        launch("qgnn_matmul_scale", y, *operands, *y.shape)
        activate(y, activation, rows.start)
    return out.to(out_dtype)


def _scale_of(x_scale: Tensor, rows: slice) -> tuple[Tensor, int]:
    """The scales from a chunk's first row on, and their stride: 0 if all rows share one."""
    return (x_scale, 0) if x_scale.numel() == 1 else (x_scale[rows.start :], 1)


def matmul_requantize(
    x_q: Tensor,
    x_scale: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    *,
    bits: int = 8,
    seed: Tensor | None = None,
    stream: int = 0,
) -> tuple[Tensor, Tensor]:
    """``x w^T`` rounded to int8 rows while a chunk of it is in cache: codes [N, M], scale [N]."""
    (N, K), M = x_q.shape, w_q.shape[0]
    codes, scale = empty_codes(N, M), empty_floats(N)
    if codes.numel() == 0:
        return codes, scale.zero_()
    chunks = list(_chunks(N, max(K, M)))
    product, buffer = _Product(x_q, w_q, chunks[0].stop), empty_floats(chunks[0].stop, M)
    x_scale, w_scale = _vector(x_scale), _vector(w_scale)
    rule = (seed, stream_key(stream), (1 << (bits - 1)) - 1)
    for rows in chunks:
        y = buffer[: rows.stop - rows.start]
        total = product.of(rows, y)
        operands = (y, total, *_scale_of(x_scale, rows), w_scale, *rule, rows.start, *y.shape)
        launch("qgnn_matmul_requantize", codes[rows], scale[rows], *operands)
    return codes, scale


def quantize_matmul(
    x: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    *,
    bits: int = 8,
    seed: Tensor | None = None,
    stream: int = 0,
    out_dtype: torch.dtype = torch.float32,
    activation: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`matmul` of rows that are rounded first: y [N, M], and codes [N, K] and scale [N] of ``x``."""
    x_q, x_scale = quantize(x, bits=bits, seed=seed, stream=stream)
    y = matmul(x_q, x_scale, w_q, w_scale, bias, out_dtype=out_dtype, activation=activation)
    return y, x_q, x_scale


def quantize_matmul_requantize(
    x: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    *,
    bits: int = 8,
    seed: Tensor | None = None,
    stream: int = 0,
    hidden_stream: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`matmul_requantize` of rows that are rounded first: its codes and scale, and those of ``x``."""
    x_q, x_scale = quantize(x, bits=bits, seed=seed, stream=stream)
    hidden = matmul_requantize(x_q, x_scale, w_q, w_scale, bits=bits, seed=seed, stream=hidden_stream)
    return (*hidden, x_q, x_scale)


def matmul_dw(g_q: Tensor, g_scale: Tensor, x_q: Tensor, x_scale: Tensor) -> Tensor:
    """``dw = g^T x`` with the row scales of both folded into ``g``: [N, M], [N, K] -> fp32 [M, K]."""
    (N, M), K = g_q.shape, x_q.shape[1]
    out = torch.zeros((M, K), dtype=torch.float32)
    if out.numel() == 0 or N == 0:
        return out
    g_q, x_q = rows_of(g_q, torch.int8), rows_of(x_q, torch.int8)
    factor = (g_scale * x_scale).float().expand(N).contiguous()
    if _dw_route(g_q, g_scale, x_q, x_scale) == _NONZEROS:
        partial, scaled = torch.zeros((PARTS, K, M), dtype=torch.float32), empty_floats(PARTS, M)
        found = torch.empty((PARTS, K), dtype=torch.int32)
        operands = (partial, found, scaled, g_q, factor, x_q, N, M, K, g_q.stride(0), x_q.stride(0), PARTS)
        launch("qgnn_matmul_dw_nonzeros", *operands)
        return partial.sum(0).t().contiguous()
    chunks = list(_chunks(N, max(K, M)))
    g_float, x_float = empty_floats(chunks[0].stop, M), empty_floats(chunks[0].stop, K)
    for rows in chunks:
        out.addmm_(_floats(g_q[rows], g_float, factor[rows]).t(), _floats(x_q[rows], x_float))
    return out
