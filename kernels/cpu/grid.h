/* What a block of values on a grid (qgnn.rounding.Grid) shares, and what each of them becomes.
 *
 * Powers of two are made from their bits. A factor that a block shares may not be a normal number: it is applied as
 * two. */
#ifndef QGNN_GRID_H
#define QGNN_GRID_H

#include "common.h"

/* What becomes of a value: an element that is an integer, its code alone, one with an exponent of its own, or one of
 * an affine grid. */
enum { INTEGERS, CODES, FLOATS, AFFINE };

static const uint32_t INFINITY_BITS = 0x7F800000u;

typedef struct {
    int64_t round_up, max_exponent, fraction_bits, mantissa_bits, min_exponent;
    float low, high;
} grid;

/* Of magnitudes as bits the largest (`high`), or the order keys of the smallest and the largest value. */
typedef struct {
    int32_t low, high;
} extrema;

/* Powers of two: t = x * down0 * down1, y = element * up0 * up1. Affine: the offset and both steps. */
typedef struct {
    float down0, down1, up0, up1, low, inverse, step;
    int is_poisoned;
} block;

/* ---- what a block shares ---- */

INLINE extrema find_extrema(const float *x, int64_t n, const int kind) {
    if (kind != AFFINE) return (extrema){.high = (int32_t)absmax_bits(x, n)};
    extrema found = {INT32_MAX, INT32_MIN};
    for (int64_t i = 0; i < n; i++) {
        const int32_t key = order_key((int32_t)bits_of(x[i]));
        found.low = key < found.low ? key : found.low;
        found.high = key > found.high ? key : found.high;
    }
    return found;
}

INLINE extrema join(extrema a, extrema b) {
    return (extrema){a.low < b.low ? a.low : b.low, a.high > b.high ? a.high : b.high};
}

/* The shared exponent + 127 of a block with this largest magnitude. */
INLINE int32_t shared_exponent(uint32_t largest, const grid *g) {
    /* Of a denormal all that matters is whether it rounds up to a normal number: below, the clamp decides. */
    const uint32_t up = !g->round_up ? 0 : largest < 0x00800000u ? 0x003FFFFFu : 0x007FFFFFu;
    int32_t shared = (int32_t)((largest + up) >> 23) - (int32_t)g->max_exponent;
    shared = shared < 0 ? 0 : shared > 254 ? 254 : shared;
    return largest < INFINITY_BITS ? shared : NAN_EXPONENT;
}

INLINE block make_shared(int32_t shared, const grid *g) {
    const int32_t unit = shared - 127 - (int32_t)g->fraction_bits, half = unit >> 1;
    block b = {.is_poisoned = shared == NAN_EXPONENT};
    b.down0 = power_of_two(-half);
    b.down1 = power_of_two(half - unit);
    b.up0 = power_of_two(half);
    b.up1 = power_of_two(unit - half);
    return b;
}

INLINE block make_affine(extrema found, const grid *g) {
    block b = {.low = float_of((uint32_t)order_key(found.low))};
    const float width = float_of((uint32_t)order_key(found.high)) - b.low, levels = g->high - g->low;
    b.inverse = width > 1e-30f ? levels / width : 0.0f;
    b.step = width / levels;
    b.is_poisoned = !(width < INFINITY); /* nor is it with an infinity or NaN */
    return b;
}

/* ---- elements ---- */

/* NaN becomes `low`. */
INLINE float clamp(float x, float low, float high) {
    x = x > low ? x : low;
    return x < high ? x : high;
}

INLINE float round_one(float x, const random_bits *bits, int64_t i) {
    if (!bits) return __builtin_rintf(x);
    const float floor = __builtin_floorf(x);
    return floor + ((int32_t)((x - floor) * 65536.0f) + (int32_t)bits->column[i] >= 65536 ? 1.0f : 0.0f);
}

/* The element of a value, in units of its block. */
INLINE float element_of(float x, block b, grid g, const random_bits *bits, int64_t i, const int kind) {
    if (kind == AFFINE) return clamp(round_one((x - b.low) * b.inverse, bits, i), 0.0f, g.high - g.low);
    const float t = x * b.down0 * b.down1;
    if (kind != FLOATS) return clamp(round_one(t, bits, i), g.low, g.high);
    const int32_t own = (int32_t)(bits_of(t) >> 23 & 0xFF), least = (int32_t)g.min_exponent + 127;
    const int32_t step = (own > least ? own : least) - (int32_t)g.mantissa_bits; /* its exponent + 127 */
    const float rounded = round_one(t * float_of((uint32_t)(254 - step) << 23), bits, i);
    return clamp(float_of((uint32_t)step << 23) * rounded, g.low, g.high);
}

/* Where the result of column k lies: codes, or fp32. */
INLINE void *result_at(void *out, int64_t k, const int kind) {
    return kind == CODES ? (void *)((int8_t *)out + k) : (void *)((float *)out + k);
}

/* n values of one block that is finite. Random bits count from `at`. */
INLINE void round_part(
    void *out, const float *restrict x, int64_t n, grid g, block b, const random_bits *bits, int64_t at, const int kind
) {
    if (kind == CODES) {
        int8_t *restrict codes = out;
#pragma GCC unroll 1 /* gcc unrolls a short loop before it has turned it into vectors, and then cannot */
        for (int64_t i = 0; i < n; i++) codes[i] = (int8_t)element_of(x[i], b, g, bits, at + i, kind);
        return;
    }
    float *restrict y = out;
#pragma GCC unroll 1
    for (int64_t i = 0; i < n; i++) {
        const float element = element_of(x[i], b, g, bits, at + i, kind);
        y[i] = kind == AFFINE ? element * b.step + b.low : element * b.up0 * b.up1;
    }
}

/* What a block that is not finite becomes. */
INLINE void poison(void *out, int64_t n, const int kind) {
    if (kind == CODES) memset(out, 0, (size_t)n);
    else
        for (int64_t i = 0; i < n; i++) ((float *)out)[i] = NAN;
}

INLINE void round_block(
    void *out, const float *x, int64_t n, grid g, block b, const random_bits *bits, int64_t at, const int kind
) {
    if (b.is_poisoned) poison(out, n, kind);
    else round_part(out, x, n, g, b, bits, at, kind);
}

#endif
