"""Block-wise packed storage: codes of 1, 2, 4 or 8 bits with one offset and one step a block of consecutive values.

Bins have one width or given edges (variance-minimized ones, after Eliassen and Selvan, arXiv:2309.11856), and hold the
values themselves or those of a random projection (after EXACT, Liu et al., ICLR 2022).
"""

from __future__ import annotations

import torch
from torch import Tensor

from qgnn.reference._common import row_chunks, stream_seed
from qgnn.rng import counter_hash, random_bits16, stream_key
from qgnn.rounding import absmax_scale

_NEAREST = 1 << 15
_ROW_COUNTERS = 1 << 40  # where the counters of the rows' signs begin, behind those of any R


def projection_signs(num_columns: int, projection: int, seed: Tensor, stream: int) -> Tensor:
    """The matrix R of random signs, fp32 ``[F, R']``: bit ``r % 32`` of the hash of counter
    ``f * ceil(R' / 32) + r // 32`` makes element ``(f, r)`` -1."""
    words = -(-projection // 32)
    counter = torch.arange(num_columns * words, device=seed.device)
    word = counter_hash(counter, seed ^ stream_key(stream)).view(num_columns, words, 1)
    bit = (word >> torch.arange(32, dtype=torch.int32, device=seed.device)) & 1
    return (1 - 2 * bit).flatten(1)[:, :projection].float()


def row_signs(first_row: int, num_rows: int, num_columns: int, seed: Tensor, stream: int) -> Tensor:
    """Signs of each row's own, fp32 ``[N, F]``: bit ``f % 32`` of the hash of counter
    ``2**40 + n * W + f // 32`` makes element ``(n, f)`` -1. ``W`` is the power of two of words that holds a row, whose
    columns so never carry into the counter's high word."""
    words = -(-num_columns // 32)
    step = 1 << (words - 1).bit_length()
    first = _ROW_COUNTERS + torch.arange(first_row, first_row + num_rows, device=seed.device)[:, None] * step
    counter = (first + torch.arange(words, device=seed.device)).flatten()
    word = counter_hash(counter, seed ^ stream_key(stream)).view(num_rows, words, 1)
    bit = (word >> torch.arange(32, dtype=torch.int32, device=seed.device)) & 1
    return (1 - 2 * bit).flatten(1)[:, :num_columns].float()


def _project(x: Tensor, projection: int, seed: Tensor, stream: int) -> Tensor:
    """``(x S) R / sqrt(R')`` in fp32, with each row's own signs S: ``[N, F] -> [N, R']``."""
    signs = projection_signs(x.shape[1], projection, seed, stream)
    out = torch.empty((x.shape[0], projection), dtype=torch.float32, device=x.device)
    for rows in row_chunks(x.shape[0], max(signs.shape)):
        flipped = x[rows].float() * row_signs(rows.start, out[rows].shape[0], x.shape[1], seed, stream)
        out[rows] = (flipped @ signs) * projection**-0.5
    return out


def _unproject(p: Tensor, num_columns: int, first_row: int, seed: Tensor, stream: int) -> Tensor:
    """``P R^T S / sqrt(R')`` in fp32: ``[N, R'] -> [N, F]``."""
    projection = p.shape[1]
    signs = projection_signs(num_columns, projection, seed, stream).t()
    out = torch.empty((p.shape[0], num_columns), dtype=torch.float32, device=p.device)
    for rows in row_chunks(p.shape[0], max(signs.shape)):
        own = row_signs(first_row + rows.start, out[rows].shape[0], num_columns, seed, stream)
        out[rows] = (p[rows] @ signs) * projection**-0.5 * own
    return out


def fixed_edges(edges: Tensor) -> Tensor:
    """Edges of bins in units of 2**-16, int32."""
    return (edges * 65536.0 + 0.5).to(torch.int32)  # an exact product


def _round_down(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest numbers of ``dtype`` (16 bits) that are not above ``value`` (fp32), as fp32."""
    rounded = value.to(dtype)
    bits = rounded.view(torch.int16)
    below = torch.where(bits < 0, bits + 1, bits - 1).view(dtype)  # sign and magnitude: negative ones grow downward
    return torch.where(rounded.float() > value, below, rounded).float()


def _block_scale(low: Tensor, high: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """``(low, step, inverse)`` of blocks with these extrema; the first two are numbers of ``dtype``, held in fp32.

    Offsets are rounded down and steps up, before anything is coded: codes 0 to 2**bits - 1 then span the block whatever
    the rounding. Rounded to nearest, the ends of the block could fall outside, and clamping them would bias them.
    """
    if dtype == torch.float32:
        step, inverse = absmax_scale(high - low, bits + 1)
    else:
        low = _round_down(low, dtype)
        step = -_round_down(-absmax_scale(high - low, bits + 1)[0], dtype)
        _, inverse = absmax_scale(step * ((1 << bits) - 1), bits + 1)  # an exact product: at most 11 + 8 bits
    broken = ~torch.isfinite(step)
    low = low + 0.0  # -0 becomes 0
    return low.masked_fill(broken, float("nan")), step.masked_fill(broken, float("nan")), inverse


def blocks_pack(
    x: Tensor,
    *,
    bits: int,
    block_size: int,
    metadata_dtype: torch.dtype = torch.float32,
    seed: Tensor | None = None,
    stream: int = 0,
    edges: Tensor | None = None,
    projection: int = 0,
    projection_seed: Tensor | None = None,
    projection_stream: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of the values of ``x``, in row-major order, packed into bytes block by block.

    Code ``c`` of a block stands for ``low + c * step``: ``low`` is the smallest value of the block and
    ``step = (largest - low) / (2**bits - 1)``, both rounded outward to ``metadata_dtype`` before the values are coded.
    Codes follow the rule of :mod:`qgnn.formats` with the random bits of element ``(block, position in the block)``.

    A block is ``block_size * bits / 8`` bytes. Byte ``k`` holds the codes of the values ``k``, ``k + r``, ``k + 2 r``,
    ..., the first one in its lowest bits, where ``r`` is the number of bytes of a block. The last block may be filled
    only in part: positions past the end have code 0 and count for nothing else. Blocks do not depend on each other, so
    rows that are a whole number of blocks can be unpacked one by one.

    A block that holds a value that is not finite, or whose offset or step would exceed ``metadata_dtype``, has codes 0,
    and NaN as offset and step. If no value lies more than 1e-30 above ``low``, ``step`` is 0 and all decode to ``low``.

    With ``edges`` code ``c`` stands for ``low + edges[c] * step``. Position and edges are integers in units of 2**-16
    of a step, ``p`` and ``e``; with ``e[c] <= p < e[c + 1]`` and ``w = e[c + 1] - e[c]``, the upper edge is taken if
    ``p + (r16 * w >> 16) >= e[c + 1]``, where ``r16`` is 16 random bits, or 2**15 to round to nearest. No float is
    involved, and edges 0, 1, 2, ... give the codes of bins of one width.

    With a ``projection`` to R' columns, the values are those of the matrix ``(x S) R / sqrt(R')`` in fp32, ``[N, R']``,
    with signs ``R`` (:func:`~qgnn.reference.blocks.projection_signs`) and a row's own signs ``S``
    (:func:`~qgnn.reference.blocks.row_signs`), which no one stores.
    Without ``S`` the errors ``x (R R^T / R' - 1)`` of all rows would be of one matrix, and would not average out in a
    sum over rows, such as the gradient of a weight. Backends add the sums in orders of their own.

    Args:
        x: Values of any floating type, converted to fp32 first; with a projection a matrix ``[N, F]``.
        bits: Width of a code: 1, 2, 4 or 8.
        block_size: Values of a block, a multiple of ``8 / bits``.
        metadata_dtype: Type of offsets and steps: fp32, bf16 or fp16.
        seed: Seed of the stochastic rounding, or ``None`` to round to nearest.
        stream: Number of the seed's stream.
        edges: fp32 ``[2**bits]`` that rise from 0 to ``2**bits - 1`` by at least 2**-16 each, for at most 4 bits;
            ``None``: bins of one width.
        projection: Columns R' to project to, or 0.
        projection_seed: Seed of the signs.
        projection_stream: Number of that seed's stream.

    Shapes:
        - **input:** any, ``n`` values; with a projection ``[N, F]``, and ``n = N R'``
        - **output:** packed uint8 ``[B, block_size * bits / 8]``, low and step ``[B]``, ``B = ceil(n / block_size)``
    """
    values = x.detach()
    if projection:
        assert projection_seed is not None
        values = _project(values, projection, projection_seed, projection_stream)
    values = values.reshape(-1)
    num_blocks = -(-values.numel() // block_size)
    seed = stream_seed(seed, stream)
    packed = torch.empty((num_blocks, block_size * bits // 8), dtype=torch.uint8, device=x.device)
    low = torch.empty(num_blocks, dtype=metadata_dtype, device=x.device)
    step = torch.empty_like(low)
    for blocks in row_chunks(num_blocks, block_size):
        chunk = values[blocks.start * block_size : blocks.stop * block_size].float()
        missing = (blocks.stop - blocks.start) * block_size - chunk.numel()
        rows = torch.cat([chunk, chunk[-1:].expand(missing)]).view(-1, block_size)
        minimum, maximum = rows.aminmax(dim=1)
        low_rows, step_rows, inverse = _block_scale(minimum, maximum, bits, metadata_dtype)
        low[blocks], step[blocks] = low_rows, step_rows
        bits16 = None if seed is None else random_bits16(blocks.start, rows.shape[0], block_size, seed)
        codes = _block_codes(rows - low_rows[:, None], inverse[:, None], bits16, edges)
        codes.view(-1)[chunk.numel() :] = 0
        packed[blocks] = _fold(codes, bits)
    return packed, low, step


def _block_codes(above_low: Tensor, inverse: Tensor, bits16: Tensor | None, edges: Tensor | None) -> Tensor:
    """uint8 codes of values that are not negative; 0 where ``inverse`` is."""
    steps = (above_low * (inverse * 65536.0)).to(torch.int32)
    if edges is None:
        steps += _NEAREST if bits16 is None else bits16
        codes = steps.bitwise_right_shift_(16)
    else:
        fixed = fixed_edges(edges)
        width, upper = fixed.diff(), fixed[1:].contiguous()
        codes = torch.bucketize(steps, upper[:-1], out_int32=True, right=True)
        random = _NEAREST if bits16 is None else bits16.long()
        codes += steps + (width.long()[codes] * random >> 16) >= upper[codes]
    # The mask is for NaN: which integer it becomes depends on the machine.
    return codes.masked_fill_(inverse == 0, 0).to(torch.uint8)


def _fold(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[B, G]`` to bytes ``[B, G * bits / 8]``."""
    parts = codes.view(codes.shape[0], 8 // bits, -1)
    folded = parts[:, 0]
    for number in range(1, 8 // bits):
        folded = folded | (parts[:, number] << (bits * number))
    return folded


def blocks_unpack(
    packed: Tensor,
    low: Tensor,
    step: Tensor,
    *,
    bits: int,
    size: int,
    dtype: torch.dtype = torch.float32,
    edges: Tensor | None = None,
    projection: int = 0,
    projection_seed: Tensor | None = None,
    projection_stream: int = 0,
    num_columns: int = 0,
    first_row: int = 0,
) -> Tensor:
    """The values that packed codes stand for: ``low + step * code``, or ``low + step * edges[code]``, in fp32, rounded
    twice, then converted.

    Those of a projected matrix ``P`` are multiplied back, to ``P R^T S / sqrt(R')`` in fp32. Its mean over the seeds of
    signs and rounding is the matrix that was packed.

    Args:
        packed: Bytes of the blocks.
        low: Their offsets.
        step: Their steps.
        bits: Width of a code.
        size: Number of the packed values; with a projection ``N R'``.
        dtype: Type of the result.
        edges: As the blocks were packed with.
        projection: As the blocks were packed with.
        projection_seed: As the blocks were packed with.
        projection_stream: As the blocks were packed with.
        num_columns: With a projection, the columns F of the matrix that was packed.
        first_row: With a projection, which row of that matrix the first one is.

    Shapes:
        - **input:** as :func:`blocks_pack` returns them, or a range of their blocks
        - **output:** ``[size]`` of ``dtype``, with a projection ``[N, F]``
    """
    if projection:
        assert projection_seed is not None
        values = blocks_unpack(packed, low, step, bits=bits, size=size, edges=edges).view(-1, projection)
        return _unproject(values, num_columns, first_row, projection_seed, projection_stream).to(dtype)
    num_blocks, num_bytes = packed.shape
    block_size = num_bytes * 8 // bits
    shift = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    out = torch.empty(size, dtype=dtype, device=packed.device)
    for blocks in row_chunks(num_blocks, block_size):
        codes = ((packed[blocks, None, :] >> shift) & ((1 << bits) - 1)).flatten(1)  # [B, block_size]
        values = codes.float() if edges is None else edges[codes.int()]
        values = values.mul_(step[blocks, None].float()).add_(low[blocks, None].float())
        chunk = out[blocks.start * block_size : blocks.stop * block_size]
        chunk.copy_(values.view(-1)[: chunk.numel()])
    return out
