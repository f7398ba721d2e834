"""Symmetric int8 codes of a matrix: ``x ~ x_q * x_scale``, one scale per row, per block of a row, or for the whole
matrix.

    x [N, F] fp32, fp16 or bf16, any strides  ->  x_q [N, F] int8, x_scale fp32 [N], [N, ceil(F / G)] or [1]

Numerics: everything is fp32; scales, codes and random bits are those of ``qgnn.kernels.rounding``, equal in every bit
to the plain PyTorch definition. Rounding is stochastic with a seed and to nearest without one; both are
deterministic. Rows of codes lie a multiple of 16 bytes apart, and what lies in the gap is undefined.

Oracle: qgnn.reference.quantize
"""

import torch
import triton
import triton.language as tl
from qgnn.kernels import tuning
from qgnn.kernels.memory import code_stride, column_offsets, empty_codes
from qgnn.kernels.rounding import absmax_scale, load_seed, round_codes, row_absmax
from torch import Tensor


@triton.jit(do_not_specialize=["N", "stream"])
def _quantize_kernel(
    # outputs
    q_ptr,
    scale_ptr,
    # inputs
    x_ptr,
    absmax_ptr,
    seed_ptr,
    # sizes
    N,
    F: tl.constexpr,
    GROUP: tl.constexpr,
    # strides
    stride_qn: tl.constexpr,
    stride_xn: tl.constexpr,
    stride_xf,
    # scalars
    stream,
    # flags
    QMAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PER_TENSOR: tl.constexpr,
    # tiles
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program owns one group (``GROUP`` columns) of ``BLOCK_N`` rows. A group of one tile is read once; a longer
    one is walked twice, for its absmax and for its codes. With ``PER_TENSOR`` the absmax is given.

    Tiles do not cross groups: a group is a whole row, or a power of two of columns like ``BLOCK_F``."""
    NUM_GROUPS: tl.constexpr = (F + GROUP - 1) // GROUP
    pid = tl.program_id(0).to(tl.int64)
    group = pid % NUM_GROUPS
    offs_n = (pid // NUM_GROUPS) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    first = (group * GROUP).to(tl.int32)
    x_row = x_ptr + offs_n[:, None] * stride_xn
    q_row = q_ptr + offs_n[:, None] * stride_qn

    if PER_TENSOR:
        scale, inv = absmax_scale(tl.load(absmax_ptr + tl.zeros((BLOCK_N,), tl.int32)), QMAX)
    elif GROUP <= BLOCK_F:
        scale = tl.zeros((BLOCK_N,), tl.float32)
        inv = scale
    else:
        absmax = tl.zeros((BLOCK_N,), tl.float32)
        for col in range(0, GROUP, BLOCK_F):
            offs_f = first + col + tl.arange(0, BLOCK_F)
            mask = mask_n[:, None] & (offs_f < F)[None, :]
            x = tl.load(x_row + column_offsets(offs_f, stride_xf)[None, :], mask=mask, other=0.0).to(tl.float32)
            # As bits, like row_absmax: an fp maximum would drop a NaN.
            tile_bits = row_absmax(x).to(tl.int32, bitcast=True)
            absmax = tl.maximum(absmax.to(tl.int32, bitcast=True), tile_bits).to(tl.float32, bitcast=True)
        scale, inv = absmax_scale(absmax, QMAX)

    seed = load_seed(seed_ptr, stream) if STOCHASTIC else 0
    for col in range(0, GROUP, BLOCK_F):
        offs_f = first + col + tl.arange(0, BLOCK_F)
        mask = mask_n[:, None] & (offs_f < F)[None, :]
        x = tl.load(x_row + column_offsets(offs_f, stride_xf)[None, :], mask=mask, other=0.0)
        x = x.to(tl.float32)  # [BLOCK_N, BLOCK_F]
        if not PER_TENSOR and GROUP <= BLOCK_F:
            scale, inv = absmax_scale(row_absmax(x), QMAX)
        q = round_codes(x, inv, seed, offs_n, first + col, F, STOCHASTIC, BLOCK_N, BLOCK_F)
        # What ends the row may write into the gap behind it: whole vectors, whatever the width.
        tl.store(q_row + offs_f[None, :], q, mask=mask_n[:, None] & (offs_f < stride_qn)[None, :])

    if PER_TENSOR:
        tl.store(scale_ptr + offs_n * 0, scale, mask=offs_n == 0)
    else:
        tl.store(scale_ptr + offs_n * NUM_GROUPS + group, scale, mask=mask_n)


def quantize(
    x: Tensor,
    *,
    bits: int = 8,
    granularity: str = "row",
    block_size: int = 128,
    seed: Tensor | None = None,
    stream: int = 0,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of ``x``; the parameters are those of :func:`qgnn.reference.quantize`."""
    N, F = x.shape
    group = min(block_size, max(1, F)) if granularity == "block" else max(1, F)
    num_groups = -(-F // group)
    if num_groups > 1 and (group < 2 or group & (group - 1)):
        raise ValueError(
            f"'quantize' expects 'block_size' to be a power of two from 2 on (got {block_size}); choose one, or leave "
            f"out 'granularity' for one scale a row"
        )
    shape = {"row": (N,), "block": (N, num_groups), "tensor": (1,)}[granularity]
    codes = empty_codes(N, F, x.device)
    if codes.numel() == 0:
        return codes, torch.zeros(shape, dtype=torch.float32, device=x.device)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        absmax = None
        if granularity == "tensor":
            absmax = torch.linalg.vector_norm(x, float("inf")).to(torch.float32)
        config = tuning.quantize(group)
        _quantize_kernel[(triton.cdiv(N, config["BLOCK_N"]) * num_groups,)](
            q_ptr=codes,
            scale_ptr=scale,
            x_ptr=x,
            absmax_ptr=absmax,
            seed_ptr=seed,
            N=N,
            F=F,
            GROUP=group,
            stride_qn=code_stride(F),
            stride_xn=x.stride(0),
            stride_xf=x.stride(1),
            stream=stream,
            QMAX=(1 << (bits - 1)) - 1,
            STOCHASTIC=seed is not None,
            PER_TENSOR=absmax is not None,
            **config,
        )
    return codes, scale
