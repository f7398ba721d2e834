"""Launch configurations: plain functions of the sizes, bucketed to powers of two, and of the architecture.

Nothing is tuned at run time: graphs arrive in a new size with every sampled batch, and a tuner keyed on sizes would
never finish. A configuration is a dict of the kernel's tile parameters and launch options."""

import functools
from typing import Any

import torch
import triton

Config = dict[str, Any]


@functools.cache
def _capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor


def architecture(device: torch.device) -> int:
    """Compute capability as a number, e.g. 90; the interpreter on CPU tensors plays an sm_90."""
    return _capability(device.index or 0) if device.type == "cuda" else 90


def _power_of_two(value: int, low: int, high: int) -> int:
    """``value`` rounded up to a power of two within ``[low, high]``."""
    return min(max(low, 1 << max(0, value - 1).bit_length()), high)


def _options(num_warps: int, num_stages: int = 1) -> Config:
    # Fused multiply-adds are written out where they are meant: the compiler's own choice differs between versions.
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}


def quantize(group: int) -> Config:
    """Rows of ``group`` columns: a whole row in registers up to 1024 columns, 32 elements a thread."""
    block_f = _power_of_two(group, 2, 1024)
    return {"BLOCK_N": max(1, 4096 // block_f) if block_f >= 16 else 256, "BLOCK_F": block_f, **_options(4)}


QUANTIZE_GRAD_MAX_COLUMNS = 4096  # the widest row of a gradient that one program holds


def quantize_grad(num_columns: int) -> Config:
    """Whole rows, 32 elements a thread beside as many sums."""
    block_f = _power_of_two(num_columns, 8, QUANTIZE_GRAD_MAX_COLUMNS)
    return {"BLOCK_N": min(256, 4096 // block_f), "BLOCK_F": block_f, **_options(4)}


def quantize_grad_tiles(num_rows: int, block_n: int) -> int:
    """Tiles of rows that one program sums. With 128 rows a program, writing and reading its sums takes 2 to 3 % of the
    bytes; a small gradient, whose bytes do not count, is spread over 132 multiprocessors, and of a large one there are
    1056 results to add, eight for each. Like :func:`dw_splits`, the number does not depend on the device."""
    rows = max(triton.cdiv(num_rows, 1056), min(128, triton.cdiv(num_rows, 132)))
    return triton.cdiv(rows, block_n)


def masked_grad(num_columns: int) -> Config:
    """Elementwise: 32 elements a thread, whose bits are one word."""
    block_f = _power_of_two(num_columns, 8, 512)
    return {"BLOCK_N": min(256, 4096 // block_f), "BLOCK_F": block_f, **_options(4)}


def add_partials(size: int, splits: int) -> Config:
    """Tiles of [partial results, elements], 16 elements a thread; as few elements as keep all multiprocessors busy, but
    whole sectors of memory."""
    block = _power_of_two(size // 264, 16, 256)
    return {"BLOCK_S": _power_of_two(splits, 1, 2048 // block), "BLOCK": block, **_options(4)}


def matmul(num_inputs: int, num_outputs: int) -> Config:
    """int8 product: at most 64 accumulators a thread, 3 to 4 tiles of the operands in flight."""
    block_m = _power_of_two(num_outputs, 16, 128)
    return {
        "BLOCK_N": 128,
        "BLOCK_M": block_m,
        "BLOCK_K": _power_of_two(num_inputs, 32, 128),
        **_options(8 if block_m == 128 else 4, num_stages=3),
    }


REQUANTIZE_MAX_OUTPUTS = 256  # the widest output row that one program of the requantizing product holds


def matmul_requantize(num_inputs: int, num_outputs: int) -> Config:
    """int8 product that holds whole output rows."""
    block_m = _power_of_two(num_outputs, 16, REQUANTIZE_MAX_OUTPUTS)
    return {
        "BLOCK_N": 64,
        "BLOCK_M": block_m,
        "BLOCK_K": _power_of_two(num_inputs, 32, 128),
        **_options(8 if block_m >= 128 else 4, num_stages=2),
    }


FUSED_MAX_INPUTS = 512  # the widest rows that are rounded and multiplied by one program
_FUSED_MAX_SHARED = 96 << 10  # what every GPU from sm_80 on has; the operands of the product lie in shared memory


def quantize_matmul(num_inputs: int, num_outputs: int) -> Config | None:
    """Rounding and int8 product in one kernel: 32 elements of the rows a thread (64 of wide rows), and 8 to 32
    accumulators in each step over the output. ``None``: rows that do not fit take two kernels."""
    if num_inputs > FUSED_MAX_INPUTS:
        return None
    block_k = _power_of_two(num_inputs, 32, FUSED_MAX_INPUTS)
    return {
        "BLOCK_N": 64 if block_k <= 128 else 32,
        "BLOCK_M": _power_of_two(num_outputs, 16, 64),
        "BLOCK_K": block_k,
        **_options(8 if block_k >= 128 else 4),
    }


def quantize_matmul_requantize(num_inputs: int, num_outputs: int) -> Config | None:
    """The same with whole output rows, at most 64 accumulators a thread. ``None``: rows of the input or of the output,
    or the weight that lies in shared memory, do not fit; that takes two kernels."""
    if num_inputs > FUSED_MAX_INPUTS or num_outputs > REQUANTIZE_MAX_OUTPUTS:
        return None
    block_k = _power_of_two(num_inputs, 32, FUSED_MAX_INPUTS)
    block_m = _power_of_two(num_outputs, 16, REQUANTIZE_MAX_OUTPUTS)
    # More rows than these spill registers on one of the architectures or with one of the compiler's versions.
    block_n = 64 if block_k == 128 or (block_k < 128 and block_m < 256) else 32
    if block_k == 512 and block_m < 128:
        block_n = 16
    if block_k * (block_n + block_m) > _FUSED_MAX_SHARED:
        return None
    return {
        "BLOCK_N": block_n,
        "BLOCK_M": block_m,
        "BLOCK_K": block_k,
        **_options(8 if max(block_k, block_m) >= 128 else 4),
    }


def matmul_dw(num_inputs: int, num_outputs: int, arch: int) -> Config:
    """fp16 product over rows. The products of Hopper and of Blackwell (but for sm_120) read their operands from shared
    memory and leave registers for a wide tile, which loads each operand less often."""
    wide = 128 if 90 <= arch < 120 else 64
    block_m = _power_of_two(num_outputs, 16, wide)
    block_k = _power_of_two(num_inputs, 16, 128)
    return {
        "BLOCK_N": 64,
        "BLOCK_M": block_m,
        "BLOCK_K": block_k,
        **_options(8 if block_m * block_k > 64 * 128 else 4, num_stages=3),
    }


def dw_splits(num_rows: int, num_tiles: int, block_n: int) -> tuple[int, int]:
    """``(splits, rows of a split)`` of the contraction over rows.

    About 264 programs in all, two for each of 132 multiprocessors. The number does not depend on the device, so that
    neither does the order of the sums."""
    splits = max(1, min(264 // num_tiles, num_rows // (4 * block_n)))
    rows = triton.cdiv(triton.cdiv(num_rows, splits), block_n) * block_n
    return triton.cdiv(num_rows, rows), rows


def _gather(num_columns: int, mean_degree: int, max_block_f: int) -> Config:
    """Tiles of [rows, edges, columns]: 64 elements a thread, more edges a step where rows are long."""
    block_f = _power_of_two(num_columns, 2, max_block_f)
    block_e = _power_of_two(mean_degree // 2 + 1, 4, 32)
    rows = min(16, max(1, 2048 // (block_e * block_f)))
    warps = _power_of_two(rows * block_e * block_f // 2048, 1, 8)
    return {"ROWS": rows, "BLOCK_E": block_e, "BLOCK_F": block_f, **_options(warps)}


SPMM_REQUANTIZE_MAX_COLUMNS = 1024  # the widest output row that one program of the requantizing aggregation holds


def spmm(num_columns: int, mean_degree: int) -> Config:
    """Aggregation, in slices of 512 columns."""
    return _gather(num_columns, mean_degree, 512)


def spmm_requantize(num_columns: int, mean_degree: int) -> Config:
    """Aggregation that holds whole output rows; up to 512 columns the tiles of :func:`spmm`, hence the same sums."""
    return _gather(num_columns, mean_degree, SPMM_REQUANTIZE_MAX_COLUMNS)


def sddmm(num_columns: int, mean_degree: int) -> Config:
    """Dot products of edges, in slices of 256 columns."""
    return _gather(num_columns, mean_degree, 256)
