"""Device functions of packed blocks: offset and step of a block, codes of a tile, and the signs of random projections.

A tile of values is [parts, blocks, bytes]: element ``(p, b, k)`` is value ``p r + k`` of a block of ``r`` bytes, whose
code lies in bits ``p * BITS`` and up of byte ``k``. So bytes are made without moving anything between threads if a
thread holds all parts of its bytes.

Numerics: extrema are compared as integers that order like the floats, NaN beyond the infinities. Rounding follows
``qgnn.kernels.rounding``; between given edges it is integer arithmetic alone.

Oracle: qgnn.reference.blocks_pack, qgnn.reference.blocks_unpack
"""

import triton
import triton.language as tl
from qgnn.kernels.rounding import HIGHEST, LOWEST, absmax_scale, counter_hash, hash_keys, pair_hash, stepped_hash


@triton.jit
def flip_order(bits):
    """The bits of a float (int32) as an integer that orders like it, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def find_extrema(x, valid, HAS_GAPS: tl.constexpr):
    """Order keys of the smallest and the largest value of each block of fp32 [P, B, R]: int32 [B], twice."""
    key = flip_order(x.to(tl.int32, bitcast=True))
    low = tl.where(valid, key, HIGHEST) if HAS_GAPS else key
    high = tl.where(valid, key, LOWEST) if HAS_GAPS else key
    return tl.min(tl.min(low, axis=0), axis=1), tl.max(tl.max(high, axis=0), axis=1)


@triton.jit
def round_down(value, dtype: tl.constexpr):
    """The largest numbers of ``dtype`` that are not above ``value`` (fp32), as fp32. What is not finite stays so, or
    becomes the largest number."""
    if dtype == tl.float32:
        return value
    DROPPED: tl.constexpr = 0xFFFF if dtype == tl.bfloat16 else 0x1FFF
    bits = value.to(tl.int32, bitcast=True)
    rounded = ((bits + tl.where(value < 0, DROPPED, 0)) & ~DROPPED).to(tl.float32, bitcast=True)
    if dtype == tl.float16:
        rounded = tl.where(rounded < -65504.0, float("-inf"), tl.where(rounded > 65504.0, 65504.0, rounded))
        # Below the smallest normal number of fp16 its numbers are the multiples of 2^-24.
        tiny = tl.floor(value * 2.0**24) * 2.0**-24
        rounded = tl.where(tl.abs(value) < 2.0**-14, tiny, rounded)
    return rounded


@triton.jit
def block_scale(low_key, high_key, QMAX: tl.constexpr, dtype: tl.constexpr):
    """``(low, step, factor)`` of blocks with these extrema: offset down and step up to ``dtype``, and the inverse step
    times 65536, or 0 if every code of the block is 0."""
    low = round_down(flip_order(low_key).to(tl.float32, bitcast=True), dtype) + 0.0  # -0 becomes 0
    high = flip_order(high_key).to(tl.float32, bitcast=True)
    step, inv = absmax_scale(high - low, QMAX)
    if dtype != tl.float32:
        step = -round_down(-step, dtype)
        _, inv = absmax_scale(step * QMAX, QMAX)  # an exact product: at most 11 + 8 bits
    broken = (step.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= 0x7F800000
    return tl.where(broken, float("nan"), low), tl.where(broken, float("nan"), step), inv * 65536.0


@triton.jit
def store_metadata(ptr, value, mask):
    """Store offsets or steps, which are numbers of the type there; of bf16, the upper halves of their bits."""
    if ptr.dtype.element_ty == tl.bfloat16:
        upper = (value.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
        tl.store(ptr, upper.to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(ptr, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_metadata(ptr, mask):
    """Offsets or steps as fp32; of bf16 by bits, since the interpreter converts its smallest numbers wrongly."""
    value = tl.load(ptr, mask=mask, other=0.0)
    if value.dtype == tl.bfloat16:
        return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def block_bits16(
    seed, block, first, G: tl.constexpr, RUN: tl.constexpr, P: tl.constexpr, B: tl.constexpr, R: tl.constexpr
):
    """16 random bits for each value of a tile: int32 [P, B, R]. ``block`` is int64 [B], ``first`` the tile's first
    byte, which is even if more than one tile makes a block."""
    PAIRS: tl.constexpr = triton.next_power_of_2(G) // 2 if G > 2 else 1
    part = (tl.arange(0, P) * RUN)[:, None, None]
    if RUN % 2 == 0:  # both values of a pair lie side by side
        pair = (part + first) // 2 + tl.arange(0, R // 2)[None, None, :]
        h = pair_hash(seed, block[None, :, None], pair.to(tl.uint32), PAIRS)
        return tl.join(h & 0xFFFF, h >> 16).reshape(P, B, R).to(tl.int32)
    else:
        position = part + first + tl.arange(0, R)[None, None, :]
        h = pair_hash(seed, block[None, :, None], (position // 2).to(tl.uint32), PAIRS)
        return tl.where(position % 2 == 1, h >> 16, h & 0xFFFF).to(tl.int32)


@triton.jit
def load_edge(edges_ptr, c: tl.constexpr):
    """An edge in units of 2^-16 of a step: int32."""
    return (tl.load(edges_ptr + c) * 65536.0 + 0.5).to(tl.int32)  # an exact product


@triton.jit
def code_between(steps, random, edges_ptr, QMAX: tl.constexpr):
    """Codes of positions in units of 2^-16 of a step between given edges; ``random`` has 16 bits. int32.

    The upper edge of each bin, less a random part of the bin, is a threshold: they ascend, and the code is the number
    of those that the position reaches."""
    steps = tl.maximum(steps, 0)  # what a NaN became depends on the machine
    code = tl.zeros_like(steps).to(tl.uint32)
    fraction = random.to(tl.uint32) << 16
    edge = 0
    for c in tl.static_range(QMAX):
        following = load_edge(edges_ptr, c + 1)
        part = tl.umulhi(fraction, (following - edge).to(tl.uint32)).to(tl.int32)  # random * width >> 16
        code += ((following - 1) - part - steps).to(tl.uint32) >> 31  # the sign: a comparison takes a choice more
        edge = following
    return code.to(tl.int32)


@triton.jit
def fold_codes(
    x,
    valid,
    low,
    factor,
    seed,
    block,
    first,
    edges_ptr,
    G: tl.constexpr,
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HAS_GAPS: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
    R: tl.constexpr,
):
    """The bytes of a tile of values (fp32 [P, B, R]) of blocks with these offsets and factors ([B]): uint8 [B, R]."""
    RUN: tl.constexpr = G * BITS // 8
    # As in round_codes: of a block that is not finite, every code becomes 0 here.
    steps = ((x - low[None, :, None]) * factor[None, :, None]).to(tl.int32)
    random = block_bits16(seed, block, first, G, RUN, P, B, R) if STOCHASTIC else tl.full((P, B, R), 32768, tl.int32)
    code = (steps + random) >> 16 if edges_ptr is None else code_between(steps, random, edges_ptr, (1 << BITS) - 1)
    if HAS_GAPS:
        code = tl.where(valid, code, 0)
    return tl.sum(code << (tl.arange(0, P) * BITS)[:, None, None], axis=0).to(tl.uint8)


@triton.jit
def decode(code, low, step, edges_ptr, mask):
    """The values that codes (int32) stand for: fp32."""
    if edges_ptr is None:
        # A conversion by bits: 0x4B000000 is 2^23, and the code fills the end of its fraction.
        level = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    else:
        level = tl.load(edges_ptr + code, mask=mask, other=0.0)
    return low + step * level


@triton.jit
def make_signs(
    seed, first_f, first_r, PROJECTION: tl.constexpr, F: tl.constexpr, R: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """A tile of a projection's signs: fp32 [F, R], or [R, F]. A hash makes 32 columns, which a tile holds in whole or
    the first ``R`` of."""
    WORDS: tl.constexpr = (PROJECTION + 31) // 32
    W: tl.constexpr = R // 32 if R > 32 else 1
    C: tl.constexpr = R // W
    f = (first_f + tl.arange(0, F)) * WORDS
    word = first_r // 32 + tl.arange(0, W)
    shift = 31 - tl.arange(0, C)
    k0, k1 = hash_keys(seed, 0)
    if TRANSPOSED:
        h = counter_hash((word[:, None] + f[None, :]).to(tl.uint32), k0, k1)
        bits = (h[:, None, :] << shift[None, :, None].to(tl.uint32)).reshape(R, F)
    else:
        h = counter_hash((f[:, None] + word[None, :]).to(tl.uint32), k0, k1)
        bits = (h[:, :, None] << shift[None, None, :].to(tl.uint32)).reshape(F, R)
    return ((bits & 0x80000000) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def flip(x, seed, row, first_f, F: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of values [N, BLOCK] of rows (int64 [N]) with each row's own signs. A hash makes 32 columns, which a tile
    holds in whole or ``BLOCK`` of. Rows count in steps of a power of two of words, as those of ``pair_hash``."""
    STEP: tl.constexpr = triton.next_power_of_2((F + 31) // 32)
    W: tl.constexpr = BLOCK // 32 if BLOCK > 32 else 1
    C: tl.constexpr = BLOCK // W
    word = first_f // 32 + tl.arange(0, W)
    h = stepped_hash(seed, (row * STEP + (1 << 40))[:, None], word.to(tl.uint32)[None, :])
    shift = 31 - first_f % 32 - tl.arange(0, C)
    sign = ((h[:, :, None] << shift[None, None, :].to(tl.uint32)) & 0x80000000).reshape(x.shape)
    if x.dtype == tl.float32:
        return (x.to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    else:
        return (x.to(tl.uint16, bitcast=True) ^ (sign >> 16).to(tl.uint16)).to(x.dtype, bitcast=True)
