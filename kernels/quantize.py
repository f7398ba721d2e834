"""Symmetric int8 codes of a matrix: ``x ~ x_q * x_scale``, one scale per row, per block of a row, or for the whole
matrix; and the same of a gradient before an activation.

    x [N, F] fp32, fp16 or bf16, any strides  ->  x_q [N, F] int8, x_scale fp32 [N], [N, ceil(F / G)] or [1]
    quantize_grad = codes of grad * factor where the mask (uint8 [N, ceil(F / 8)]) has a bit and of 0 elsewhere, and the
    sums of the columns, fp32 [F]

Numerics: everything is fp32; scales, codes and random bits are those of ``qgnn.kernels.rounding``, equal in every bit
to the plain PyTorch definition. Rounding is stochastic with a seed and to nearest without one; both are
deterministic, and so are the sums: each program adds its rows, then their results are added in a fixed order. Rows of
codes lie a multiple of 16 bytes apart, and what lies in the gap is undefined.

Oracle: qgnn.reference.quantize, quantize_grad
"""

import torch
import triton
import triton.language as tl
from qgnn.kernels import tuning
from qgnn.kernels.activation import activation_backward
from qgnn.kernels.epilogue import load_mask
from qgnn.kernels.matmul_dw import add_partials
from qgnn.kernels.memory import check_columns, code_stride, column_offsets, empty_codes
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
    check_columns("quantize", F)
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


@triton.jit
def load_grad(
    grad_ptr,
    mask_ptr,
    offs_n,
    mask_n,
    first_col,
    factor,
    stride_gf,
    F: tl.constexpr,
    stride_gn: tl.constexpr,
    HAS_MASK: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """A tile of the gradient before the activation: fp32 [R, C]."""
    offs_f = first_col + tl.arange(0, C)
    grad_row = grad_ptr + offs_n[:, None] * stride_gn
    mask = mask_n[:, None] & (offs_f < F)[None, :]
    grad = tl.load(grad_row + column_offsets(offs_f, stride_gf)[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_MASK:
        grad = tl.where(load_mask(mask_ptr, offs_n, mask_n, first_col, F, R, C), grad * factor, 0.0)
    return grad


@triton.jit(do_not_specialize=["N", "TILES", "stream", "factor"])
def _quantize_grad_kernel(
    # outputs
    q_ptr,
    scale_ptr,
    partial_ptr,
    # inputs
    grad_ptr,
    mask_ptr,
    seed_ptr,
    # sizes
    N,
    F: tl.constexpr,
    TILES,
    # strides
    stride_qn: tl.constexpr,
    stride_gn: tl.constexpr,
    stride_gf,
    # scalars
    stream,
    factor,
    # flags
    QMAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HAS_MASK: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
    # tiles
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program owns ``TILES`` tiles of ``BLOCK_N`` whole rows and walks them in ascending order. It writes one row
    of partial sums, so that those are few beside the gradient."""
    pid = tl.program_id(0)
    offs_f = tl.arange(0, BLOCK_F)
    seed = load_seed(seed_ptr, stream) if STOCHASTIC else 0
    total = tl.zeros((BLOCK_N, BLOCK_F), tl.float32)
    for tile in range(0, TILES):
        offs_n = (pid.to(tl.int64) * TILES + tile) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N
        grad = load_grad(
            grad_ptr, mask_ptr, offs_n, mask_n, 0, factor, stride_gf, F, stride_gn, HAS_MASK, BLOCK_N, BLOCK_F
        )
        if SUM_COLUMNS:
            total += grad
        scale, inv = absmax_scale(row_absmax(grad), QMAX)
        q = round_codes(grad, inv, seed, offs_n, 0, F, STOCHASTIC, BLOCK_N, BLOCK_F)
        mask = mask_n[:, None] & (offs_f < stride_qn)[None, :]  # whole vectors, whatever the width
        tl.store(q_ptr + offs_n[:, None] * stride_qn + offs_f[None, :], q, mask=mask)
        tl.store(scale_ptr + offs_n, scale, mask=mask_n)
    if SUM_COLUMNS:
        tl.store(partial_ptr + pid.to(tl.int64) * F + offs_f, tl.sum(total, axis=0), mask=offs_f < F)


def quantize_grad(
    grad: Tensor,
    *,
    bits: int = 8,
    granularity: str = "row",
    seed: Tensor | None = None,
    stream: int = 0,
    mask: Tensor | None = None,
    factor: float = 1.0,
    sum_columns: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes and scales of the gradient before an activation, and the sums of its columns; the parameters are those of
    :func:`qgnn.reference.quantize_grad`.

    With a scale a row, the gradient is read once. One scale for all needs the absmax of all before the first code, and
    rows of more than 4096 columns do not fit the registers of one program: these take a kernel each for mask, absmax,
    codes and sums."""
    N, F = grad.shape
    is_plain = mask is None and not sum_columns
    if is_plain or granularity != "row" or F > tuning.QUANTIZE_GRAD_MAX_COLUMNS or grad.numel() == 0:
        wide = grad
        if mask is not None:
            wide, _ = activation_backward(grad, mask, factor=factor, out_dtype=torch.float32)
        codes, scale = quantize(wide, bits=bits, granularity=granularity, seed=seed, stream=stream)
        return codes, scale, wide.sum(0, dtype=torch.float32) if sum_columns else None
    codes = empty_codes(N, F, grad.device)
    scale = torch.empty(N, dtype=torch.float32, device=grad.device)
    config = tuning.quantize_grad(F)
    tiles = tuning.quantize_grad_tiles(N, config["BLOCK_N"]) if sum_columns else 1
    num_programs = triton.cdiv(N, tiles * config["BLOCK_N"])
    partial = torch.empty((num_programs, F), dtype=torch.float32, device=grad.device) if sum_columns else None
    with torch.cuda.device_of(grad):
        _quantize_grad_kernel[(num_programs,)](
            q_ptr=codes,
            scale_ptr=scale,
            partial_ptr=partial,
            grad_ptr=grad,
            mask_ptr=mask,
            seed_ptr=seed,
            N=N,
            F=F,
            TILES=tiles,
            stride_qn=code_stride(F),
            stride_gn=grad.stride(0),
            stride_gf=grad.stride(1),
            stream=stream,
            factor=float(factor),
            QMAX=(1 << (bits - 1)) - 1,
            STOCHASTIC=seed is not None,
            HAS_MASK=mask is not None,
            SUM_COLUMNS=sum_columns,
            **config,
        )
        return codes, scale, None if partial is None else add_partials(partial)
