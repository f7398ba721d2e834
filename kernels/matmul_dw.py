"""The weight gradient of a dense product from int8 codes.

    dW [M, K] = sum_n g_scale[n] * x_scale[n] * g_q[n]^T x_q[n]             g_q [N, M], x_q [N, K]

Numerics: rows have different scales, so integers cannot be summed. The product of a row's two scales, relative to the
largest of its chunk of rows, is folded into ``g`` in fp16. Codes are exact in fp16. A code ``g`` with the factor ``f``
of its row, in a chunk whose largest factor is ``u`` (at least ``2^-126``), is off by at most
``(2^-10 + 2^-20) |g f| + 2^-25 (|g| + 1) u``; the second term, the spacing of subnormal fp16, counts where ``f`` or
``g f`` is below ``2^-14 u``, and rows with a factor of at most ``2^-25 u`` vanish. Sums are fp32, and the partial
results of the chunks are added in a fixed order: deterministic, and no sum can overflow however many rows there are. A
NaN scale makes the whole result NaN.

Oracle: qgnn.reference.matmul_dw
"""

import torch
import triton
import triton.language as tl
from qgnn.kernels import tuning
from qgnn.kernels.memory import column_offsets, readable_width, scale_stride
from qgnn.kernels.rounding import int8_to_fp16
from torch import Tensor

_SMALLEST = tl.constexpr(2.0**-126)  # whose inverse is finite; smaller units lose digits below it


@triton.jit(do_not_specialize=["N", "CHUNK"])
def _matmul_dw_kernel(
    # outputs
    partial_ptr,
    # inputs
    g_ptr,
    g_scale_ptr,
    x_ptr,
    x_scale_ptr,
    # sizes
    N,
    M: tl.constexpr,
    K: tl.constexpr,
    G_WIDTH: tl.constexpr,
    X_WIDTH: tl.constexpr,
    CHUNK,
    # strides
    stride_gn: tl.constexpr,
    stride_gm,
    stride_xn: tl.constexpr,
    stride_xk,
    stride_gsn,
    stride_xsn,
    # tiles
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_SCALE: tl.constexpr,
):
    """One program owns a [BLOCK_M, BLOCK_K] tile of one partial result: the sum over a chunk of ``CHUNK`` rows. It
    walks the chunk's scales for the largest factor, then the rows in ascending order."""
    NUM_M: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    NUM_K: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    pid = tl.program_id(0)
    split = (pid // (NUM_M * NUM_K)).to(tl.int64)
    tile = pid % (NUM_M * NUM_K)
    offs_m = (tile // NUM_K) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = (tile % NUM_K) * BLOCK_K + tl.arange(0, BLOCK_K)
    first = split * CHUNK
    last = tl.minimum(first + CHUNK, N)

    largest = tl.zeros((BLOCK_SCALE,), tl.float32)
    for n in range(first, last, BLOCK_SCALE):
        offs_n = n + tl.arange(0, BLOCK_SCALE).to(tl.int64)
        g_scale = tl.load(g_scale_ptr + offs_n * stride_gsn, mask=offs_n < last, other=0.0)
        x_scale = tl.load(x_scale_ptr + offs_n * stride_xsn, mask=offs_n < last, other=0.0)
        largest = tl.maximum(largest, g_scale * x_scale)
    unit = tl.maximum(tl.max(largest, axis=0), _SMALLEST)
    inverse = tl.div_rn(1.0, unit)

    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for n in range(first, last, BLOCK_N):
        offs_n = n + tl.arange(0, BLOCK_N).to(tl.int64)
        mask_n = offs_n < last
        g_scale = tl.load(g_scale_ptr + offs_n * stride_gsn, mask=mask_n, other=0.0)
        x_scale = tl.load(x_scale_ptr + offs_n * stride_xsn, mask=mask_n, other=0.0)
        g = tl.load(
            g_ptr + offs_n[:, None] * stride_gn + column_offsets(offs_m, stride_gm)[None, :],
            mask=mask_n[:, None] & (offs_m < G_WIDTH)[None, :],
            other=0,
        )  # [BLOCK_N, BLOCK_M]
        x = tl.load(
            x_ptr + offs_n[:, None] * stride_xn + column_offsets(offs_k, stride_xk)[None, :],
            mask=mask_n[:, None] & (offs_k < X_WIDTH)[None, :],
            other=0,
        )  # [BLOCK_N, BLOCK_K]
        # Within [0, 1]; a NaN stays one, so that it shows in the result.
        factor = (g_scale * x_scale * inverse).to(tl.float16)
        acc = tl.dot(tl.trans(int8_to_fp16(g) * factor[:, None]), int8_to_fp16(x), acc)

    offs = split * (M * K) + offs_m[:, None].to(tl.int64) * K + offs_k[None, :]
    tl.store(partial_ptr + offs, acc * unit, mask=(offs_m < M)[:, None] & (offs_k < K)[None, :])


@triton.jit(do_not_specialize=["SPLITS"])
def _add_partials_kernel(
    # outputs
    out_ptr,
    # inputs
    partial_ptr,
    # sizes
    SIZE,
    SPLITS,
    # tiles
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program owns ``BLOCK`` elements. It adds every ``BLOCK_S``-th of their partial results in ascending order,
    then those sums."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offs_s = tl.arange(0, BLOCK_S)
    total = tl.zeros((BLOCK_S, BLOCK), tl.float32)
    for first in range(0, SPLITS, BLOCK_S):
        split = (first + offs_s).to(tl.int64)
        mask = (split < SPLITS)[:, None] & (offs < SIZE)[None, :]
        total += tl.load(partial_ptr + split[:, None] * SIZE + offs[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + offs, tl.sum(total, axis=0), mask=offs < SIZE)


def add_partials(partial: Tensor) -> Tensor:
    """Sum over the first axis of fp32 ``[SPLITS, ...]``, in an order that its shape fixes."""
    splits, size = partial.shape[0], partial[0].numel()
    if splits == 1:
        return partial[0]
    out = torch.empty(partial.shape[1:], dtype=torch.float32, device=partial.device)
    config = tuning.add_partials(size, splits)
    with torch.cuda.device_of(partial):
        _add_partials_kernel[(triton.cdiv(size, config["BLOCK"]),)](
            out_ptr=out, partial_ptr=partial, SIZE=size, SPLITS=splits, **config
        )
    return out


def matmul_dw(g_q: Tensor, g_scale: Tensor, x_q: Tensor, x_scale: Tensor) -> Tensor:
    """Weight gradient, fp32 ``[M, K]``; the parameters are those of :func:`qgnn.reference.matmul_dw`."""
    N, M = g_q.shape
    K = x_q.shape[1]
    if N == 0 or M * K == 0:
        return torch.zeros((M, K), dtype=torch.float32, device=g_q.device)
    config = tuning.matmul_dw(K, M, tuning.architecture(g_q.device))
    num_tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(K, config["BLOCK_K"])
    splits, chunk = tuning.dw_splits(N, num_tiles, config["BLOCK_N"])
    partial = torch.empty((splits, M, K), dtype=torch.float32, device=g_q.device)
    with torch.cuda.device_of(g_q):
        _matmul_dw_kernel[(num_tiles * splits,)](
            partial_ptr=partial,
            g_ptr=g_q,
            g_scale_ptr=g_scale,
            x_ptr=x_q,
            x_scale_ptr=x_scale,
            N=N,
            M=M,
            K=K,
            G_WIDTH=readable_width(g_q),
            X_WIDTH=readable_width(x_q),
            CHUNK=chunk,
            stride_gn=g_q.stride(0),
            stride_gm=g_q.stride(1),
            stride_xn=x_q.stride(0),
            stride_xk=x_q.stride(1),
            stride_gsn=scale_stride(g_scale),
            stride_xsn=scale_stride(x_scale),
            **config,
            BLOCK_SCALE=1024,
        )
        return add_partials(partial)
