/* Rounding of a matrix [R, C] to a grid whose blocks share a power of two, or to an affine one.
 * Oracle: qgnn.reference.quantize_dequantize, quantize_shared.
 *
 * Powers of two are made from their bits. A factor that a block shares may not be a normal number: it is applied as two.
 */

#include "common.h"

enum { SHARED_NAN = 255 };

/* What becomes of a value: an element that is an integer, its code alone, one with an exponent of its own, or one of
 * an affine grid. */
enum { INTEGERS, CODES, FLOATS, AFFINE };

typedef struct {
    int64_t round_up, max_exponent, fraction_bits, mantissa_bits, min_exponent;
    float low, high;
} grid;

typedef struct {
    float *y;
    int8_t *codes;
    uint8_t *exponent;
    const float *x;
    int64_t C, stride_x, group;
    int kind;
    grid g;
    rounding rule;
} task;

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

INLINE float power_of_two(int64_t exponent) { return float_of((uint32_t)(exponent + 127) << 23); }

/* The shared exponent + 127 of a block with this largest magnitude. */
INLINE int64_t shared_exponent(uint32_t largest, const grid *g) {
    if (largest >= 0x7F800000u) return SHARED_NAN;
    /* Of a denormal all that matters is whether it rounds up to a normal number: below, the clamp decides. */
    const uint32_t up = !g->round_up ? 0 : largest < 0x00800000u ? 0x003FFFFFu : 0x007FFFFFu;
    return max_i64(0, min_i64((int64_t)((largest + up) >> 23) - g->max_exponent, 254));
}

INLINE block make_block(const task *job, int64_t r, int64_t first, extrema found, const int kind) {
    const grid *g = &job->g;
    block b;
    if (kind == AFFINE) {
        b.low = float_of((uint32_t)order_key(found.low));
        const float width = float_of((uint32_t)order_key(found.high)) - b.low, levels = g->high - g->low;
        b.inverse = width > 1e-30f ? levels / width : 0.0f;
        b.step = width / levels;
        b.is_poisoned = !(width < INFINITY); /* nor is it with an infinity or NaN */
        return b;
    }
    const int64_t shared = shared_exponent((uint32_t)found.high, g);
    if (kind == CODES) job->exponent[r * ((job->C + job->group - 1) / job->group) + first / job->group] = (uint8_t)shared;
    const int64_t unit = shared - 127 - g->fraction_bits, half = unit >> 1;
    b.down0 = power_of_two(-half);
    b.down1 = power_of_two(half - unit);
    b.up0 = power_of_two(half);
    b.up1 = power_of_two(unit - half);
    b.is_poisoned = shared == SHARED_NAN;
    return b;
}

/* ---- elements ---- */

INLINE float clamp(float x, float low, float high) {
    x = x < low ? low : x;
    return x > high ? high : x;
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

/* Columns first .. first + n of row r, all of one block. Random bits count from `at`. */
INLINE void round_part(
    const task *job, int64_t r, int64_t first, int64_t n, block b, const random_bits *bits, int64_t at, const int kind
) {
    const grid g = job->g;
    const float *restrict x = job->x + r * job->stride_x + first;
    if (kind == CODES) {
        int8_t *restrict codes = job->codes + r * job->C + first;
        if (b.is_poisoned) memset(codes, 0, (size_t)n);
        else
#pragma GCC unroll 1 /* gcc unrolls a short loop before it has turned it into vectors, and then cannot */
            for (int64_t i = 0; i < n; i++) codes[i] = (int8_t)element_of(x[i], b, g, bits, at + i, kind);
        return;
    }
    float *restrict y = job->y + r * job->C + first;
    if (b.is_poisoned)
        for (int64_t i = 0; i < n; i++) y[i] = NAN;
    else
#pragma GCC unroll 1
        for (int64_t i = 0; i < n; i++) {
            const float element = element_of(x[i], b, g, bits, at + i, kind);
            y[i] = kind == AFFINE ? element * b.step + b.low : element * b.up0 * b.up1;
        }
}

/* Random bits of columns first .. first + n; returns the place of the first. */
INLINE int64_t draw(random_bits *bits, const task *job, int64_t r, int64_t first, int64_t n) {
    const int64_t odd = first & 1, counter = r * pairs_per_row(job->C) + (first >> 1);
    hash_pairs(bits->pair, (uint64_t)counter, (odd + n + 1) / 2, job->rule.seed);
    return odd;
}

/* ---- rows ---- */

/* Columns first .. end in blocks of `group`, several of which share a call of the hash. */
INLINE void round_short_blocks(
    const task *job, int64_t r, int64_t first, int64_t end, const int64_t group, const int are_whole, const int kind,
    const int stochastic
) {
    random_bits bits;
    const int64_t several = ROUND_BLOCK / group * group;
    for (int64_t start = first; start < end; start += several) {
        const int64_t stop = min_i64(start + several, end);
        const int64_t at = stochastic ? draw(&bits, job, r, start, stop - start) : 0;
        for (int64_t k = start; k < stop; k += group) {
            const int64_t n = are_whole ? group : min_i64(group, stop - k); /* a constant, if the group is one */
            const block b = make_block(job, r, k, find_extrema(job->x + r * job->stride_x + k, n, kind), kind);
            round_part(job, r, k, n, b, stochastic ? &bits : 0, at + k - start, kind);
        }
    }
}

/* Columns first .. end of a block. */
INLINE void round_long_block(
    const task *job, int64_t r, int64_t first, int64_t end, block b, const int kind, const int stochastic
) {
    random_bits bits;
    for (int64_t start = first; start < end; start += ROUND_BLOCK) {
        const int64_t n = min_i64(ROUND_BLOCK, end - start), at = stochastic ? draw(&bits, job, r, start, n) : 0;
        round_part(job, r, start, n, b, stochastic ? &bits : 0, at, kind);
    }
}

/* Columns first .. end of a row: all of them, or, if the row is the one block `given`, some. */
INLINE void round_columns_of(
    const task *job, int64_t r, int64_t first, int64_t end, const block *given, const int kind, const int stochastic
) {
    const int64_t group = job->group;
    if (group < ROUND_BLOCK) {
        int64_t whole = end / group * group;
        if (kind != AFFINE && group == 16) round_short_blocks(job, r, 0, whole, 16, 1, kind, stochastic);
        else if (kind != AFFINE && group == 32) round_short_blocks(job, r, 0, whole, 32, 1, kind, stochastic);
        else whole = 0;
        round_short_blocks(job, r, whole, end, group, 0, kind, stochastic);
        return;
    }
    for (int64_t start = first; start < end; start += group) {
        const int64_t stop = min_i64(start + group, end);
        block b;
        if (given) b = *given;
        else b = make_block(job, r, start, find_extrema(job->x + r * job->stride_x + start, stop - start, kind), kind);
        round_long_block(job, r, start, stop, b, kind, stochastic);
    }
}

/* The same with constants. It is called within the loops of threads, which are functions that see none. */
static void round_any(const task *job, int64_t r, int64_t first, int64_t end, const block *given) {
    const int kind = job->kind;
    if (job->rule.stochastic) {
        if (kind == INTEGERS) round_columns_of(job, r, first, end, given, INTEGERS, 1);
        else if (kind == CODES) round_columns_of(job, r, first, end, given, CODES, 1);
        else if (kind == FLOATS) round_columns_of(job, r, first, end, given, FLOATS, 1);
        else round_columns_of(job, r, first, end, given, AFFINE, 1);
    } else {
        if (kind == INTEGERS) round_columns_of(job, r, first, end, given, INTEGERS, 0);
        else if (kind == CODES) round_columns_of(job, r, first, end, given, CODES, 0);
        else if (kind == FLOATS) round_columns_of(job, r, first, end, given, FLOATS, 0);
        else round_columns_of(job, r, first, end, given, AFFINE, 0);
    }
}

/* A row that is one block, shared by all threads. */
static void round_long_row(const task *job, int64_t r, int64_t threads) {
    const float *x = job->x + r * job->stride_x;
    const int64_t piece = 8 * ROUND_BLOCK;
    int32_t low = INT32_MAX, high = INT32_MIN;
#pragma omp parallel for schedule(static) reduction(min : low) reduction(max : high) num_threads(threads)
    for (int64_t k = 0; k < job->C; k += piece) {
        const int64_t n = min_i64(piece, job->C - k);
        const extrema found = job->kind == AFFINE ? find_extrema(x + k, n, AFFINE) : find_extrema(x + k, n, INTEGERS);
        low = found.low < low ? found.low : low;
        high = found.high > high ? found.high : high;
    }
    const block b = make_block(job, r, 0, (extrema){low, high}, job->kind);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t k = 0; k < job->C; k += piece) round_any(job, r, k, min_i64(k + piece, job->C), &b);
}

static void round_rows(const task *job, int64_t R, int64_t threads) {
    threads = useful_threads(R * job->C, threads);
    if (R < threads && job->group == job->C && job->group >= ROUND_BLOCK) {
        for (int64_t r = 0; r < R; r++) round_long_row(job, r, threads);
        return;
    }
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < R; r++) round_any(job, r, 0, job->C, 0);
}

/* `kind` is INTEGERS, FLOATS or AFFINE; blocks are of `group` columns. */
EXPORT void qgnn_quantize_grid_values(
    float *y, const float *x, const int64_t *seed, int64_t stream_key, int64_t R, int64_t C, int64_t stride_x,
    int64_t kind, int64_t group, int64_t round_up, int64_t max_exponent, int64_t fraction_bits, int64_t mantissa_bits,
    int64_t min_exponent, float low, float high, int64_t threads
) {
    const grid g = {round_up, max_exponent, fraction_bits, mantissa_bits, min_exponent, low, high};
    const task job = {y, 0, 0, x, C, stride_x, group, (int)kind, g, make_rounding(seed, stream_key, 0)};
    round_rows(&job, R, threads);
}

/* Codes and exponents of a grid of integers. */
EXPORT void qgnn_quantize_grid_codes(
    int8_t *codes, uint8_t *exponent, const float *x, const int64_t *seed, int64_t stream_key, int64_t R, int64_t C,
    int64_t stride_x, int64_t group, int64_t round_up, int64_t max_exponent, int64_t fraction_bits, float low,
    float high, int64_t threads
) {
    const grid g = {round_up, max_exponent, fraction_bits, 0, 0, low, high};
    const task job = {0, codes, exponent, x, C, stride_x, group, CODES, g, make_rounding(seed, stream_key, 0)};
    round_rows(&job, R, threads);
}
