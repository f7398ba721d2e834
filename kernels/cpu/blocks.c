/* Block-wise packed codes of 1, 2, 4 or 8 bits; oracle: qgnn.reference.blocks_pack and blocks_unpack.
 *
 * A block of G values takes r = G * bits / 8 bytes; byte k holds the codes of the values k, k + r, k + 2 r, ...: a run
 * of r neighboring values shares a shift and goes to neighboring bytes, so vectors are packed without shuffles. Values
 * are coded to a byte each in the first-level cache and folded from there.
 */

#include "common.h"

enum { MAX_BLOCK = 1 << 16 };

/* ---- offset and step of a block ---- */

enum { METADATA_FP32, METADATA_BF16, METADATA_FP16 };

/* The largest number of the type that is not above `value`, or -INFINITY. */
INLINE float round_down(float value, int64_t type) {
    if (type == METADATA_FP32 || !isfinite(value)) return value;
    /* Below the smallest normal number of fp16 its numbers are the multiples of 2^-24. */
    if (type == METADATA_FP16 && fabsf(value) < 0x1p-14f) return floorf(value * 0x1p24f) * 0x1p-24f;
    const uint32_t dropped = type == METADATA_BF16 ? (1u << 16) - 1 : (1u << 13) - 1;
    const float rounded = float_of((bits_of(value) + (value < 0 ? dropped : 0)) & ~dropped);
    if (type == METADATA_BF16) return rounded;
    return rounded < -65504.0f ? -INFINITY : fminf(rounded, 65504.0f);
}

typedef struct {
    float low, step;
    float steps; /* inverse step times 65536, or 0 if every code of the block is 0 */
} block_scale;

/* Offset down and step up, so that the codes span the block whatever the rounding. */
INLINE block_scale make_block_scale(float low, float high, float qmax, int64_t type) {
    block_scale scale;
    scale.low = round_down(low, type) + 0.0f; /* -0 becomes 0 */
    scale.step = absmax_scale(bits_of(fabsf(high - scale.low)), qmax, &scale.steps);
    if (type != METADATA_FP32) {
        scale.step = -round_down(-scale.step, type);
        absmax_scale(bits_of(scale.step * qmax), qmax, &scale.steps); /* an exact product: at most 11 + 8 bits */
    }
    if (!isfinite(scale.step)) scale.low = scale.step = NAN;
    return scale;
}

/* The bits of a float as an integer that orders like it, and back. NaNs lie beyond the infinities. */
INLINE int32_t order_key(int32_t bits) { return bits ^ ((bits >> 31) & INT32_MAX); }

INLINE block_scale scale_of_block(const float *x, int64_t n, float qmax, int64_t type) {
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (int64_t i = 0; i < n; i++) {
        const int32_t key = order_key((int32_t)bits_of(x[i]));
        low = key < low ? key : low;
        high = key > high ? key : high;
    }
    return make_block_scale(float_of((uint32_t)order_key(low)), float_of((uint32_t)order_key(high)), qmax, type);
}

/* ---- bytes of a block ---- */

INLINE void fold(uint8_t *restrict packed, const uint8_t *restrict codes, int64_t run, const int bits) {
    for (int64_t k = 0; k < run; k++) {
        uint8_t byte = 0;
        for (int part = 0; part < 8 / bits; part++) byte |= (uint8_t)(codes[part * run + k] << (bits * part));
        packed[k] = byte;
    }
}

INLINE void unfold(uint8_t *restrict codes, const uint8_t *restrict packed, int64_t run, const int bits) {
    for (int part = 0; part < 8 / bits; part++)
        for (int64_t k = 0; k < run; k++)
            codes[part * run + k] = (packed[k] >> (bits * part)) & ((1 << bits) - 1);
}

/* The two with `bits` a constant. */
static void fold_any(uint8_t *packed, const uint8_t *codes, int64_t run, int64_t bits) {
    if (bits == 1) fold(packed, codes, run, 1);
    else if (bits == 2) fold(packed, codes, run, 2);
    else if (bits == 4) fold(packed, codes, run, 4);
    else fold(packed, codes, run, 8);
}

static void unfold_any(uint8_t *codes, const uint8_t *packed, int64_t run, int64_t bits) {
    if (bits == 1) unfold(codes, packed, run, 1);
    else if (bits == 2) unfold(codes, packed, run, 2);
    else if (bits == 4) unfold(codes, packed, run, 4);
    else unfold(codes, packed, run, 8);
}

/* Codes of the n values of a block: round_columns of common.h with the offset taken off in the same loop. */
INLINE void round_block(
    uint8_t *codes, const float *x, int64_t block, int64_t n, int64_t pairs, block_scale scale, rounding rule
) {
    if (scale.steps == 0.0f) {
        memset(codes, 0, (size_t)n);
        return;
    }
    random_bits bits;
    if (!rule.stochastic)
        for (int64_t i = 0; i < min_i64(ROUND_BLOCK, n); i++) bits.column[i] = 1 << 15;
    for (int64_t first = 0; first < n; first += ROUND_BLOCK) {
        const int64_t count = min_i64(ROUND_BLOCK, n - first);
        if (rule.stochastic) hash_pairs(bits.pair, (uint64_t)(block * pairs + first / 2), (count + 1) / 2, rule.seed);
        for (int64_t i = 0; i < count; i++) {
            const int32_t steps = (int32_t)((x[first + i] - scale.low) * scale.steps);
            codes[first + i] = (uint8_t)((steps + (int32_t)bits.column[i]) >> 16);
        }
    }
}

/* ---- blocks ---- */

/* `x` holds n values, of which the first belongs to the block `first_block`. */
EXPORT void qgnn_blocks_pack(
    uint8_t *packed, float *low, float *step, const float *x, const int64_t *seed, int64_t stream_key, int64_t bits,
    int64_t metadata, int64_t first_block, int64_t n, int64_t G, int64_t threads
) {
    const rounding rule = make_rounding(seed, stream_key, (1 << bits) - 1);
    const int64_t pairs = pairs_per_row(G), blocks = (n + G - 1) / G, run = G * bits / 8;
    threads = useful_threads(n, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t b = 0; b < blocks; b++) {
        uint8_t codes[MAX_BLOCK];
        const int64_t count = min_i64(G, n - b * G);
        const block_scale scale = scale_of_block(x + b * G, count, rule.qmax, metadata);
        low[b] = scale.low;
        step[b] = scale.step;
        round_block(codes, x + b * G, first_block + b, count, pairs, scale, rule);
        memset(codes + count, 0, (size_t)(G - count));
        fold_any(packed + b * run, codes, run, bits);
    }
}

EXPORT void qgnn_blocks_unpack(
    float *x, const uint8_t *packed, const float *low, const float *step, int64_t bits, int64_t n, int64_t G,
    int64_t threads
) {
    const int64_t blocks = (n + G - 1) / G, run = G * bits / 8;
    threads = useful_threads(n, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t b = 0; b < blocks; b++) {
        uint8_t codes[MAX_BLOCK];
        float *restrict values = x + b * G;
        const float offset = low[b], width = step[b];
        unfold_any(codes, packed + b * run, run, bits);
        for (int64_t i = 0; i < min_i64(G, n - b * G); i++) values[i] = offset + width * (float)codes[i];
    }
}
