"""Launch configurations: plain functions of the sizes, bucketed to powers of two, and of the architecture.

Nothing is tuned at run time: graphs arrive in a new size with every sampled batch, and a tuner keyed on sizes would
never finish. A configuration is a dict of the kernel's tile parameters and launch options."""

import functools
from typing import Any, NamedTuple

import torch
import triton

Config = dict[str, Any]

MAX_INT32_TERMS = 2**17 - 1  # of a sum of products of codes: (2**17 - 1) * 128 * 128 < 2**31


@functools.cache
def _capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor


def architecture(device: torch.device) -> int:
    """Compute capability as a number, e.g. 90; the interpreter on CPU tensors plays an sm_90."""
    return _capability(device.index or 0) if device.type == "cuda" else 90


@functools.cache
def _l2_bytes(index: int) -> int:
    return torch.cuda.get_device_properties(index).L2_cache_size


def l2_bytes(device: torch.device) -> int:
    """Size of the cache that all multiprocessors share; the interpreter on CPU tensors plays an H100."""
    return _l2_bytes(device.index or 0) if device.type == "cuda" else 50 * 2**20


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


QUANTIZE_GRID_MAX_COLUMNS = 4096  # the widest block that one program holds


def quantize_grid(num_columns: int, group: int) -> Config:
    """Whole blocks, 32 elements a thread; of short ones as many as make up 512 columns."""
    wanted = num_columns if group >= num_columns else max(group, min(num_columns, 512))
    block_c = _power_of_two(wanted, 2, QUANTIZE_GRID_MAX_COLUMNS)
    return {"BLOCK_R": min(256, 4096 // block_c), "BLOCK_C": block_c, **_options(4)}


def codes(num_columns: int) -> Config:
    """Groups of eight codes: four a thread."""
    block_g = _power_of_two(-(-num_columns // 8), 1, 256)
    return {"BLOCK_R": 512 // block_g, "BLOCK_G": block_g, **_options(4)}


def activation(num_columns: int) -> Config:
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


def matmul_shared(block_size: int, num_outputs: int) -> Config:
    """Product of blocks with exponents of their own: beside each sum its block's product, 32 of both a thread. Left to
    itself, the assembler aims at 168 registers on sm_100, and keeps some on the stack."""
    return {
        "BLOCK_N": 64,
        "BLOCK_M": _power_of_two(num_outputs, 16, 64),
        "BLOCK_K": _power_of_two(block_size, 16, 128),
        **_options(4, num_stages=2),
        "maxnreg": 255,
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


def _gather(num_columns: int, mean_degree: int, max_block_f: int, min_block_f: int = 2, elements: int = 64) -> Config:
    """Tiles of [rows, edges, columns]: ``elements`` a thread, more edges a step where rows are long."""
    block_f = _power_of_two(num_columns, min_block_f, max_block_f)
    block_e = _power_of_two(mean_degree // 2 + 1, 4, 32)
    rows = min(16, max(1, 32 * elements // (block_e * block_f)))
    warps = _power_of_two(rows * block_e * block_f // (32 * elements), 1, 8)
    return {"ROWS": rows, "BLOCK_E": block_e, "BLOCK_F": block_f, **_options(warps)}


SPMM_REQUANTIZE_MAX_COLUMNS = 512  # the widest output row that one program of the requantizing aggregation holds
SPMM_TILE_MIN_COLUMNS = 32
_SLICE = 128  # columns of codes; what a slice of all rows takes in the cache is a slice's share of the codes


class SpmmStrategy(NamedTuple):
    """Whether an aggregation runs on tensor cores, and how many columns one of their programs holds."""

    on_tensor_cores: bool
    block_f: int


def spmm_strategy(
    num_columns: int,
    dtype: torch.dtype,
    *,
    heads: int = 1,
    whole_rows: bool = False,
    code_bytes: int = 0,
    l2_bytes: int = 0,
) -> SpmmStrategy:
    """How to aggregate. Whole rows are gathered at once, up to 256 columns, unless the codes outgrow half of the
    cache: then a slice of 128 bytes of all rows at a time. A slice lies within a head."""
    width = num_columns // heads
    if dtype != torch.int8 or width < SPMM_TILE_MIN_COLUMNS or (heads > 1 and width % SPMM_TILE_MIN_COLUMNS):
        return SpmmStrategy(False, 0)
    if whole_rows:
        return SpmmStrategy(True, _power_of_two(num_columns, 32, SPMM_REQUANTIZE_MAX_COLUMNS))
    widest = _SLICE if 2 * code_bytes > l2_bytes else 2 * _SLICE
    if heads > 1:
        return SpmmStrategy(True, min(width & -width, widest))
    # Of two slices' widths, the one whose slices overlap the end of the row less.
    block_f = min(_power_of_two(width, 32, widest), widest)
    half = max(32, block_f // 2)
    narrow = width > block_f and triton.cdiv(width, half) * half < triton.cdiv(width, block_f) * block_f
    return SpmmStrategy(True, half if narrow else block_f)


def spmm_tile(block_f: int) -> Config:
    """Aggregation on tensor cores: 64 edges a step, 64 accumulators a thread."""
    return {"BLOCK_E": 64, "BLOCK_W": block_f // 2, **_options(4 if block_f > 256 else 2)}


def spmm_rows(num_columns: int, mean_degree: int, *, has_mask: bool = False) -> Config:
    """Aggregation by multiply-adds, in slices of as many columns as rows that are rounded whole may have; a mask is
    made of bytes, of 8 columns each."""
    return _gather(num_columns, mean_degree, SPMM_REQUANTIZE_MAX_COLUMNS, 8 if has_mask else 2)


def spmm_hubs(num_columns: int, whole_rows: bool) -> Config:
    """Sums of partial sums: tiles of [slots, columns], 16 elements a thread. A hub of a million edges, with 3,907 slots
    of 256 edges, takes 62 steps. Left to itself, the assembler aims at 40 registers on sm_80 and spills some."""
    block_f = _power_of_two(num_columns, 8, SPMM_REQUANTIZE_MAX_COLUMNS if whole_rows else 64)
    return {"BLOCK_S": 4096 // block_f, "BLOCK_F": block_f, **_options(8), "maxnreg": 64}


def spmm_extremum(num_columns: int, mean_degree: int) -> Config:
    """Maximum and the edge it comes from: 16 elements a thread, since 32 spill at some widths."""
    return _gather(num_columns, mean_degree, 256, elements=16)


def spmm_extremum_hubs(num_columns: int) -> Config:
    """Maxima of partial maxima: tiles of [slots, columns], 16 elements a thread."""
    block_f = _power_of_two(num_columns, 2, 128)
    return {"BLOCK_S": max(4, 2048 // block_f), "BLOCK_F": block_f, **_options(4)}


def sddmm(num_columns: int, mean_degree: int, heads: int = 1) -> Config:
    """Dot products of edges: heads of ``num_columns`` columns, as many as fit 256 columns, or slices of a head."""
    block_d = _power_of_two(num_columns, 2, 256)
    block_h = _power_of_two(heads, 1, 256 // block_d)
    config = _gather(block_d * block_h, mean_degree, 256)
    del config["BLOCK_F"]
    return {"BLOCK_H": block_h, "BLOCK_D": block_d, **config}


def sddmm_add(num_columns: int, mean_degree: int) -> Config:
    """Sums of the rows of edges, in slices of 256 columns."""
    return _gather(num_columns, mean_degree, 256, elements=32)


def softmax(heads: int, mean_degree: int) -> Config:
    """Softmax over edges: tiles of [rows, edges, heads], 8 elements a thread of a single warp; most rows take one
    step."""
    block_h = _power_of_two(heads, 1, 16)
    block_e = _power_of_two(mean_degree, 4, 32)
    rows = min(16, max(1, 256 // (block_e * block_h)))
    warps = _power_of_two(rows * block_e * block_h // 256, 1, 8)
    return {"ROWS": rows, "BLOCK_E": block_e, "BLOCK_H": block_h, **_options(warps)}


def softmax_hubs(heads: int) -> Config:
    """Edges and slots of a hub: tiles of [edges, heads], 8 elements a thread. As in spmm_hubs, the assembler left to
    itself aims at 32 registers, and keeps some on the stack with Triton 3.6."""
    block_h = _power_of_two(heads, 1, 16)
    return {"BLOCK_S": 512 // block_h, "BLOCK_E": 1024 // block_h, "BLOCK_H": block_h, **_options(4), "maxnreg": 80}


def softmax_hubs_programs(num_hub_programs: int) -> tuple[int, int]:
    """Hubs at a time, and programs that share the chunks of each: a graph has a few hubs of many chunks, or many of
    a few."""
    return min(num_hub_programs, 256), 16


ATTENTION_MAX_COLUMNS = 4096  # the widest head that one program holds
ATTENTION_SUM_PROGRAMS = 264  # groups of 16 programs that each write a sum over all of their rows: 32 a multiprocessor


# What these kernels take, given as a limit: left to itself, the assembler aims lower with Triton 3.6, and keeps some on
# the stack.
ATTENTION_DROPOUT_REGISTERS = 112
ATTENTION_DOT_REGISTERS = 128


def attention(heads: int, width: int, *, hubs: bool = False, tiles: int = 1, registers: int = 0) -> Config:
    """Whole rows by head: a warp up to 1024 columns, of more the heads are split. ``tiles`` accumulators share 32
    elements a thread. Steps of few edges, since most rows are short; the slots of a hub take four warps. ``registers``
    is the limit of a thread where a row has one tile, or 0."""
    limit = 1024 // tiles
    block_d = _power_of_two(width, 2, ATTENTION_MAX_COLUMNS)
    block_h = _power_of_two(heads, 1, max(1, limit // block_d))
    columns = block_h * block_d
    warps = _power_of_two(columns // limit, 1, 8)
    tile = {"BLOCK_H": block_h, "BLOCK_D": block_d}
    if hubs:
        warps = min(8, 4 * warps)
        # As in spmm_hubs, the assembler left to itself spills some registers on sm_80.
        return {"BLOCK_E": _power_of_two(warps * limit // columns, 1, 32), **tile, **_options(warps), "maxnreg": 128}
    config = {"BLOCK_E": _power_of_two(limit // columns, 1, 8), **tile, **_options(warps)}
    # The same with two accumulators, or with masks of columns; all else takes fewer registers if it is left to itself.
    registers = 255 if tiles > 1 or width < block_d else registers
    return {**config, "maxnreg": registers} if registers else config


_BLOCK_TILE = 4096  # values of a tile of packed blocks: 32 a thread
_WHOLE_BLOCK = 16384  # the longest block that one program holds; half of it where edges take registers too


def blocks_pack(block_size: int, bits: int, itemsize: int, has_edges: bool = False) -> Config:
    """Tiles of [parts of a byte, blocks, bytes]. All parts of a byte are one thread's if the bytes of a tile take all
    threads, 16 bytes of values each: 1-bit codes of 16-bit values take a double tile. Codes of 4 bits between
    edges take half a tile: 15 edges are held in registers too."""
    parts, share = 8 // bits, 2 if bits == 4 and has_edges else 1
    longest = _WHOLE_BLOCK // (2 if has_edges else 1)
    block_r = _power_of_two(block_size // parts, 1, longest // parts)
    if block_size > longest:
        block_r = 2 * _BLOCK_TILE // share // parts
    tile = 2 * _BLOCK_TILE if parts == 8 and itemsize == 2 else _BLOCK_TILE // share
    warps = _power_of_two(4 * parts * block_r // tile, 4, 16)
    return {"BLOCK_B": max(1, tile // (parts * block_r)), "BLOCK_R": block_r, **_options(warps)}


def blocks_unpack(block_size: int, bits: int, itemsize: int) -> Config:
    """Tiles of [blocks, bytes]: as many bytes a thread as values fill a vector, for each part of the byte; of wider
    codes more, since they have fewer parts."""
    tile = 128 * (16 // itemsize) * max(1, bits // 2)
    block_r = _power_of_two(block_size * bits // 8, 1, tile)
    return {"BLOCK_B": tile // block_r, "BLOCK_R": block_r, **_options(4)}


def blocks_project(num_columns: int, projection: int) -> Config:
    """Products by signs on tensor cores: 32 values of the matrix a thread and step, of which some are in flight; beside
    32 sums 16, for which there are registers on every architecture."""
    block_r = _power_of_two(projection, 8, 64)
    return {
        "BLOCK_N": 64,
        "BLOCK_K": _power_of_two(num_columns, 16, 64 if block_r < 64 else 32),
        "BLOCK_R": block_r,
        **_options(4, num_stages=3),
    }


def blocks_unproject(num_columns: int, projection: int) -> Config:
    """At most 64 sums a thread."""
    return {
        "BLOCK_N": 64,
        "BLOCK_F": _power_of_two(num_columns, 16, 128),
        "BLOCK_R": _power_of_two(projection, 8, 32),
        **_options(4),
    }
