"""Device helpers that every quantizing kernel shares: random bits, scales, rounding, and int8 to float without
conversions.

Codes and scales of a group with ``m = max|x|`` and ``qmax = 2**(bits - 1) - 1``::

    scale = m * (1 / qmax)          inv = div_rn(qmax * (1 - 2**-22), m)          both 0 where m <= 1e-30
    code  = (trunc(x * (inv * 65536)) + r16) >> 16

``r16`` is 16 random bits (stochastic rounding) or 32768 (nearest, halves up).

Numerics: the numerator of ``inv`` lies just below ``qmax``, so ``x * inv`` never reaches ``qmax`` plus one rounding
error and no clamp is needed. The only product of an element feeds a float-to-int conversion, so contraction into a
fused multiply-add cannot change a code: the same bits come out of Triton, C and PyTorch. A group that holds an
infinity or a NaN gets the scale NaN and codes 0, which poisons that group and nothing else.

Oracle: qgnn.rng, qgnn.rounding.
"""

import triton
import triton.language as tl

_WEYL = tl.constexpr(0x9E3779B9)
_HIGH = tl.constexpr(0x85EBCA6B)
_STREAM_STEP = tl.constexpr(0x5BF0363585EBCA6B)
INFINITY_BITS = tl.constexpr(0x7F800000)
LOWEST = tl.constexpr(-(2**31))  # of int32
HIGHEST = tl.constexpr(2**31 - 1)
_FLUSH = tl.constexpr(1e-30)
NAN_EXPONENT = tl.constexpr(255)  # of a block that is not finite, where the others are biased by 127


@triton.jit
def load_seed(seed_ptr, stream):
    """The effective seed of one random stream: int64."""
    return tl.load(seed_ptr) ^ (stream.to(tl.int64) * _STREAM_STEP)


@triton.jit
def hash_keys(seed, high):
    """The two keys of counters whose high word is ``high`` (uint32)."""
    k0 = seed.to(tl.uint32) + high * _WEYL
    k1 = (seed >> 32).to(tl.uint32) ^ (high * _HIGH)
    return k0, k1


@triton.jit
def mix(h, k1):
    """The mixing rounds of the hash. ``h`` has had its Weyl step, ``low * 0x9E3779B9 + k0``."""
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15) ^ k1) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def counter_hash(low, k0, k1):
    """32 random bits of the counters whose low word is ``low`` (uint32)."""
    return mix(low * _WEYL + k0, k1)


@triton.jit
def stepped_hash(seed, base, offset):
    """32 random bits of the counters ``base + offset``, whose parts broadcast against each other: int64, and uint32
    that never carries into the high word. The Weyl step is linear, so that the part of ``base`` is computed once."""
    k0, k1 = hash_keys(seed, (base >> 32).to(tl.uint32))
    return mix((base.to(tl.uint32) * _WEYL + k0) + offset * _WEYL, k1)


@triton.jit
def pair_hash(seed, row, pair, PAIRS: tl.constexpr):
    """32 random bits for pairs of columns (uint32) of rows (int64) that broadcast against them; ``PAIRS`` is the power
    of two of pairs that rows lie apart."""
    return stepped_hash(seed, row * PAIRS, pair)


@triton.jit
def random_bits16(seed, row, first_col, F: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """16 random bits for each element of a tile of a matrix with ``F`` columns: int32 [R, C].

    ``row`` is int64 [R]; the tile's columns start at ``first_col``, which must be even. An even column and the next
    odd one share a hash. Rows count in steps of a power of two of pairs, so a column never carries into the counter's
    high word."""
    PAIRS: tl.constexpr = triton.next_power_of_2(F) // 2 if F > 2 else 1
    pair = (first_col // 2 + tl.arange(0, C // 2)).to(tl.uint32)
    h = stepped_hash(seed, (row * PAIRS)[:, None], pair[None, :])  # [R, C / 2]
    return tl.join(h & 0xFFFF, h >> 16).reshape(R, C).to(tl.int32)


@triton.jit
def power_of_two(exponent):
    """``2.0**exponent`` of int32 from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def row_absmax(x):
    """max|x| of each row of fp32 [R, C]: [R]. A NaN anywhere makes the result NaN, which an fp maximum would drop."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # magnitudes compare like their bits, and NaN is above infinity
    return tl.max(bits, axis=1).to(tl.float32, bitcast=True)


@triton.jit
def absmax_scale(absmax, QMAX: tl.constexpr):
    """``(scale, inv)`` of groups with this ``max|x|`` (fp32, any shape)."""
    NUMERATOR: tl.constexpr = QMAX * (1 - 2.0**-22)
    STEP: tl.constexpr = 1.0 / QMAX
    finite = (absmax.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < INFINITY_BITS  # a NaN may have a sign
    live = finite & (absmax > _FLUSH)
    scale = tl.where(live, absmax * STEP, tl.where(finite, 0.0, float("nan")))
    inv = tl.where(live, tl.div_rn(NUMERATOR, tl.where(live, absmax, 1.0)), 0.0)
    return scale, inv


@triton.jit
def round_codes(
    x, inv, seed, row, first_col, F: tl.constexpr, STOCHASTIC: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """int8 codes of a tile ``x`` (fp32 [R, C]) whose rows have the inverse scales ``inv`` ([R])."""
    # An infinity or NaN meets inv = 0 here; NaN converts to 0 on the GPU, and elsewhere to INT_MIN, whose code is 0.
    steps = (x * (inv * 65536.0)[:, None]).to(tl.int32)
    if STOCHASTIC:
        steps += random_bits16(seed, row, first_col, F, R, C)
    else:
        steps += 32768
    return (steps >> 16).to(tl.int8)


@triton.jit
def int8_to_fp16(q):
    """Exact fp16 of int8 codes by bits: 0x6400 is 1024, and the code, biased by 0x80, fills the low byte of its
    fraction. One operation sets both: the compiler does not merge two."""
    return ((q.to(tl.int16) & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def to_fp32(x):
    """Exact fp32 of int8 codes or of floats.

    The conversion of a signed byte runs at a quarter of the rate of other instructions, that of an unsigned one does
    not."""
    if x.dtype == tl.int8:
        return (x.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.float32) - 128.0
    else:
        return x.to(tl.float32)
