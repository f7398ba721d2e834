"""Aggregation of int8 rows on tensor cores: a tile of edge weights times the gathered rows.

    out[i, :] = sum_e fp16(weight[e] * x_scale[index[e]]) * x_q[index[e], :]

A program owns 16 consecutive rows. The left operand of its products is 16 x ``BLOCK_E``: row by edge, with the weight
of each edge in the row that the edge belongs to and zeros elsewhere. The right one holds the codes of the edges'
sources. They are gathered as 16-bit words, two codes each, because a tensor core's operand of 16-bit elements is
transposed on its way out of shared memory, one of bytes is not. Two products, of the low and of the high bytes, give
the even and the odd columns.

Numerics: codes are exact in fp16. Weights are rounded to fp16 after a multiplication with a power of two that takes
the largest one of the item seen so far into ``[2**14, 2**15)``; whenever a larger one comes, the sums are multiplied by
the exact quotient of the powers. So a weight has a relative error of ``2**-11``, or an error of ``2**-39`` of the
largest weight if it is smaller than ``2**-28`` of that one. Products are exact and sums are fp32, in an order that
depends only on the plan. Infinities and NaN do not enter the power: they reach exactly the rows that aggregate them.

Oracle: qgnn.reference.spmm, spmm_requantize
"""

from typing import Any

import torch
import triton
import triton.language as tl
from qgnn.kernels import tuning
from qgnn.kernels.memory import VECTOR_BYTES, empty_codes, readable_width
from qgnn.kernels.spmm_hubs import write_rows
from qgnn.kernels.spmm_plan import GROUP_ROWS, Plan, load_item
from torch import Tensor
from triton import knobs

# Biased exponents. fp16(v * 2**(14 - e)) of the largest v stays below 2**15, and both 2**(14 - e) and its inverse
# are normal numbers for every e from 15 on.
_TARGET = tl.constexpr(14)
_MIN_EXPONENT = tl.constexpr(15)
_BIAS = tl.constexpr(127)


@triton.jit
def split_words(x, ASM: tl.constexpr):
    """Exact fp16 of the low and of the high code of each 16-bit word.

    0x6400 is 1024, and a code with its sign bit flipped, ``q + 128``, fills the low byte of its fraction. One byte
    permutation makes the numbers of two words."""
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 biased, low, high, offset;
            xor.b32 biased, $2, 0x80808080;
            prmt.b32 low, biased, 0x64646464, 0x4240;
            prmt.b32 high, biased, 0x64646464, 0x4341;
            mov.b32 offset, 0x64806480;
            sub.rn.f16x2 $0, low, offset;
            sub.rn.f16x2 $1, high, offset;
            }""",
            "=r,=r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = ((x & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
        high = (((x >> 8) & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
        return low, high


@triton.jit
def power_from_biased(biased):
    """fp32 power of two from its biased exponent, 1 to 254."""
    return (biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def aggregate_tile(
    row,
    num_rows,
    first,
    last,
    head,
    first_word,
    indptr_ptr,
    index_ptr,
    words_ptr,
    weight_ptr,
    x_scale_ptr,
    stride_sn,
    WORDS: tl.constexpr,
    stride_xn: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    ASM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """fp32 [ROWS, 2 * BLOCK_W] sums over the edges from ``first`` to ``last`` of the rows from ``row`` on."""
    offs_m = tl.arange(0, ROWS)
    start = tl.load(indptr_ptr + row + offs_m, mask=offs_m < num_rows, other=0)
    stop = tl.load(indptr_ptr + row + offs_m + 1, mask=offs_m < num_rows, other=0)
    start, stop = tl.maximum(start, first), tl.minimum(stop, last)
    offs_w = first_word + tl.arange(0, BLOCK_W)
    even = tl.zeros((ROWS, BLOCK_W), tl.float32)
    odd = tl.zeros((ROWS, BLOCK_W), tl.float32)
    exponent = tl.full((), _MIN_EXPONENT, tl.int32)
    for edge in range(first, last, BLOCK_E):
        offs_e = edge + tl.arange(0, BLOCK_E)
        mask_e = offs_e < last
        source = tl.load(index_ptr + offs_e, mask=mask_e, other=0)
        if HAS_SCALE:
            value = tl.load(x_scale_ptr + source.to(tl.int64) * stride_sn, mask=mask_e, other=0.0)
            if HAS_WEIGHT:
                value *= tl.load(weight_ptr + offs_e.to(tl.int64) * HEADS + head, mask=mask_e, other=0.0)
        elif HAS_WEIGHT:
            weight = tl.load(weight_ptr + offs_e.to(tl.int64) * HEADS + head, mask=mask_e, other=0.0)
            value = weight.to(tl.float32)
        else:
            value = tl.where(mask_e, 1.0, 0.0)
        # Lanes without an edge read row 0 with weight 0: a mask over edges would cost more than the bytes.
        words = words_ptr + (source.to(tl.int64) * stride_xn)[:, None] + offs_w[None, :]
        x = tl.load(words) if WORDS % BLOCK_W == 0 else tl.load(words, mask=(offs_w < WORDS)[None, :], other=0)

        bits = (value.to(tl.int32, bitcast=True) >> 23) & 0xFF
        raised = tl.maximum(exponent, tl.max(tl.where(bits == 255, 0, bits), axis=0))
        if raised > exponent:
            shrink = power_from_biased(tl.maximum(exponent - raised + _BIAS, 1))
            even *= shrink
            odd *= shrink
        exponent = raised
        scaled = (value * power_from_biased(-exponent + (2 * _BIAS + _TARGET))).to(tl.float16)
        inside = (offs_e[None, :] >= start[:, None]) & (offs_e[None, :] < stop[:, None])
        a = tl.where(inside, scaled[None, :], 0.0)  # [ROWS, BLOCK_E]
        low, high = split_words(x, ASM)  # [BLOCK_E, BLOCK_W]
        even = tl.dot(a, low, even)
        odd = tl.dot(a, high, odd)
    back = power_from_biased(exponent - _TARGET)
    return tl.join(even * back, odd * back).reshape(ROWS, 2 * BLOCK_W)


@triton.jit(do_not_specialize=["stream", "dropout_stream", "threshold"])
def _spmm_tile_kernel(
    # outputs
    out_ptr,
    scale_ptr,
    mask_ptr,
    partial_ptr,
    # inputs
    items_ptr,
    counts_ptr,
    indptr_ptr,
    index_ptr,
    words_ptr,
    weight_ptr,
    x_scale_ptr,
    # epilogue
    row_factor_ptr,
    bias_ptr,
    dropout_seed_ptr,
    dropout_stream,
    threshold,
    factor,
    seed_ptr,
    stream,
    # sizes
    F: tl.constexpr,
    WORDS: tl.constexpr,
    HEADS: tl.constexpr,
    # strides
    stride_on: tl.constexpr,
    stride_pn: tl.constexpr,
    stride_xn: tl.constexpr,
    stride_sn,
    # flags
    HAS_WEIGHT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_ROW_FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
    DROPOUT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    QMAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ASM: tl.constexpr,
    # tiles
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One program owns ``2 * BLOCK_W`` columns, of one head, of the items that come its turn and walks their edges
    in CSR order. Slices of columns follow one another, so that the cache has to hold one slice of all rows."""
    first_word = tl.program_id(1) * BLOCK_W
    first_col = 2 * first_word
    head = first_col // (F // HEADS)
    offs_m = tl.arange(0, ROWS)
    for item in range(tl.program_id(0), tl.load(counts_ptr), tl.num_programs(0)):
        row, num_rows, slot, first, last = load_item(items_ptr, item)
        y = aggregate_tile(
            row, num_rows, first, last, head, first_word, indptr_ptr, index_ptr, words_ptr, weight_ptr, x_scale_ptr,
            stride_sn, WORDS, stride_xn, HEADS, HAS_WEIGHT, HAS_SCALE, ASM, ROWS, BLOCK_E, BLOCK_W,
        )  # fmt: skip
        if slot >= 0:
            offs_f = first_col + tl.arange(0, 2 * BLOCK_W)
            partial = partial_ptr + (slot.to(tl.int64) + offs_m)[:, None] * stride_pn + offs_f[None, :]
            tl.store(partial, y, mask=(offs_m < 1)[:, None] & (offs_f < stride_pn)[None, :])
        else:
            write_rows(
                y, row.to(tl.int64) + offs_m, offs_m < num_rows, first_col, out_ptr, scale_ptr, mask_ptr,
                row_factor_ptr, bias_ptr, dropout_seed_ptr, dropout_stream, threshold, factor, seed_ptr, stream, F,
                stride_on, HAS_ROW_FACTOR, HAS_BIAS, RELU, DROPOUT, HAS_MASK, QMAX, STOCHASTIC, ROWS, 2 * BLOCK_W,
            )  # fmt: skip


def _words(x: Tensor) -> Tensor:
    """Codes as 16-bit words whose rows consist of whole vectors; copied if they do not lie that way."""
    width = readable_width(x)
    if x.stride(1) != 1 or width % VECTOR_BYTES or x.stride(0) % VECTOR_BYTES or x.data_ptr() % VECTOR_BYTES:
        x = empty_codes(*x.shape, x.device).copy_(x)
        width = readable_width(x)
    return x.as_strided((x.shape[0], width), (x.stride(0), 1)).view(torch.int16)


def spmm_tile(
    plan: Plan, partial: Tensor, x: Tensor, gather: dict[str, Any], output: dict[str, Any], block_f: int
) -> None:
    """Write the rows of the groups, and the partial sums of the hubs' chunks, in slices of ``block_f`` columns."""
    words = _words(x)
    config = tuning.spmm_tile(block_f)
    _spmm_tile_kernel[(plan.num_programs, triton.cdiv(output["F"], block_f))](
        partial_ptr=partial,
        items_ptr=plan.items,
        counts_ptr=plan.counts,
        words_ptr=words,
        WORDS=words.shape[1],
        stride_pn=partial.stride(0),
        stride_xn=words.stride(0),
        ASM=not knobs.runtime.interpret,
        ROWS=GROUP_ROWS,
        **gather,
        **output,
        **config,
    )
