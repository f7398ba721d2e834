"""The dense product of int8 codes whose blocks of G columns share a power of two.

    y[n, m] = sum_b dot[n, m, b] * 2**(w_exponent[m, b] - 127 - fraction_bits) * 2**(x_exponent[n, b] - 127) + bias[m]

with codes x_q [N, K] and w_q [M, K], and uint8 exponents x_exponent [N, ceil(K / G)] and w_exponent [M, ceil(K / G)],
255 in place of a block that is not finite.

Numerics: the dot product of a block is exact, in int8 products of 32 columns at least, or, of blocks of at most 16, in
fp16 products with fp32 sums: 16 * 128 * 128 < 2**24. It is multiplied by one factor after the other, and sums are fp32,
in order of the blocks: equal to the reference in every bit. A block that is not finite makes its row or column NaN.

Oracle: qgnn.reference.matmul_shared
"""

import torch
import triton
import triton.language as tl
from qgnn.kernels import tuning
from qgnn.kernels.memory import VECTOR_BYTES, column_offsets, common_unit, readable_width
from qgnn.kernels.rounding import NAN_EXPONENT, int8_to_fp16
from torch import Tensor

_WORD = tl.constexpr(4)  # exponents that are read at a time
_MAX_FEW_WORDS = 8  # up to 512 columns in blocks of 16: a loop of unknown length takes up to 40 registers more


@triton.jit
def _factor(exponent, shift):
    """``2**(exponent - shift)`` of biased exponents (int32), at least ``2**-149``; NaN for 255."""
    e = exponent - shift
    normal, denormal = (
        (e + 127) << 23,
        1 << tl.maximum(e + 149, 0),
    )  # chosen as integers: fewer instructions
    factor = tl.where(e >= -126, normal, denormal).to(tl.float32, bitcast=True)
    return tl.where(exponent == NAN_EXPONENT, float("nan"), factor)


@triton.jit(
    do_not_specialize=["N", "K_UNITS", "words", "fraction_bits"],
    do_not_specialize_on_alignment=["stride_xn", "stride_wm"],
)
def _matmul_shared_kernel(
    # outputs
    out_ptr,
    # inputs
    x_ptr,
    x_exponent_ptr,
    w_ptr,
    w_exponent_ptr,
    bias_ptr,
    # sizes
    N,
    M: tl.constexpr,
    K_UNITS,
    words,
    G: tl.constexpr,
    K_UNIT: tl.constexpr,
    FEW_WORDS: tl.constexpr,
    # strides: of rows in units
    stride_xn,
    stride_xk,
    stride_wm,
    stride_wk,
    # scalars
    fraction_bits,
    # flags
    HAS_BIAS: tl.constexpr,
    # tiles
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program owns a [BLOCK_N, BLOCK_M] tile of the output and walks along the blocks, four in each step. Programs
    walk along output rows first, so that those which read the same rows of ``x`` run together.

    Along the nodes of sampled batches ``K`` is always another number: it is ``K_UNITS * K_UNIT``, in units of 16 or 1.
    ``FEW_WORDS`` is the number of words where a constant shortens the code, else 0."""
    NUM_M: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    K = K_UNITS * K_UNIT
    num_words = FEW_WORDS if FEW_WORDS > 0 else words
    pid = tl.program_id(0)
    offs_n = (pid // NUM_M).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = (pid % NUM_M) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_g = tl.arange(0, BLOCK_K)
    mask_n = offs_n < N
    mask_m = offs_m < M
    x_row = x_ptr + offs_n[:, None] * stride_xn * K_UNIT
    w_row = w_ptr + offs_m[None, :].to(tl.int64) * stride_wm * K_UNIT

    y = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for word in range(0, num_words):
        x_exponents = tl.load(x_exponent_ptr + offs_n * num_words + word, mask=mask_n, other=0)
        w_exponents = tl.load(w_exponent_ptr + offs_m.to(tl.int64) * num_words + word, mask=mask_m, other=0)
        for i in range(_WORD):
            offs_k = (word * _WORD + i) * G + offs_g
            mask_k = (offs_g < G) & (offs_k < K)
            x = tl.load(
                x_row + column_offsets(offs_k, stride_xk)[None, :], mask=mask_n[:, None] & mask_k[None, :], other=0
            )
            w = tl.load(
                w_row + column_offsets(offs_k, stride_wk)[:, None], mask=mask_k[:, None] & mask_m[None, :], other=0
            )
            if BLOCK_K >= 32:
                dot = tl.dot(x, w, out_dtype=tl.int32).to(tl.float32)  # [BLOCK_N, BLOCK_M]
            else:
                dot = tl.dot(int8_to_fp16(x), int8_to_fp16(w))
            x_factor = _factor((x_exponents >> (8 * i)) & 255, 127)
            w_factor = _factor((w_exponents >> (8 * i)) & 255, 127 + fraction_bits)
            y += dot * w_factor[None, :] * x_factor[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_m, mask=mask_m, other=0.0).to(tl.float32)[None, :]

    mask = mask_n[:, None] & mask_m[None, :]
    tl.store(out_ptr + offs_n[:, None] * M + offs_m[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


def _words(exponent: Tensor) -> Tensor:
    """Rows of exponents as int32 words, one at least, that zeros fill up: a copy, of little beside the codes."""
    num_rows, num_blocks = exponent.shape
    words = exponent.new_zeros((num_rows, 4 * max(1, triton.cdiv(num_blocks, 4))))
    words[:, :num_blocks] = exponent
    return words.view(torch.int32)


def matmul_shared(
    x_q: Tensor,
    x_exponent: Tensor,
    w_q: Tensor,
    w_exponent: Tensor,
    bias: Tensor | None = None,
    *,
    block_size: int,
    fraction_bits: int,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``x w^T + bias`` in ``out_dtype``; the parameters are those of :func:`qgnn.reference.matmul_shared`."""
    (N, K), M = x_q.shape, w_q.shape[0]
    out = torch.empty((N, M), dtype=out_dtype, device=x_q.device)
    if out.numel() == 0:
        return out
    with torch.cuda.device_of(x_q):
        x_words, w_words = _words(x_exponent), _words(w_exponent)
        config = tuning.matmul_shared(block_size, M)
        width = readable_width(x_q)
        if K % VECTOR_BYTES and width % VECTOR_BYTES == 0:  # whole vectors: codes beyond K meet zeros
            K, w_q = width, torch.nn.functional.pad(w_q, (0, width - K))
        k_unit = 1
        if x_q.stride(1) == w_q.stride(1) == 1 and common_unit(K, x_q.stride(0), w_q.stride(0)) == VECTOR_BYTES:
            k_unit = VECTOR_BYTES
        _matmul_shared_kernel[(triton.cdiv(N, config["BLOCK_N"]) * triton.cdiv(M, config["BLOCK_M"]),)](
            out_ptr=out,
            x_ptr=x_q,
            x_exponent_ptr=x_words,
            w_ptr=w_q,
            w_exponent_ptr=w_words,
            bias_ptr=None if bias is None else bias.contiguous(),
            N=N,
            M=M,
            K_UNITS=K // k_unit,
            words=x_words.shape[1],
            G=block_size,
            K_UNIT=k_unit,
            FEW_WORDS=x_words.shape[1] if x_words.shape[1] <= _MAX_FEW_WORDS else 0,
            stride_xn=x_q.stride(0) // k_unit,
            stride_xk=x_q.stride(1),
            stride_wm=w_q.stride(0) // k_unit,
            stride_wk=w_q.stride(1),
            fraction_bits=fraction_bits,
            HAS_BIAS=bias is not None,
            **config,
        )
    return out
