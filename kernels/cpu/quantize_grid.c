/* Rounding of a matrix [R, C] to a grid whose blocks share a power of two, or to an affine one.
 * Oracle: qgnn.reference.quantize_dequantize, quantize_shared.
 *
 * Powers of two are made from their bits. A factor that a block shares may not be a normal number: it is applied as two.
 */

#include "half.h"

enum { SHARED_NAN = 255 };

/* Rows are read in pieces of PIECE columns. Those whose columns lie apart are copied in panels of so many rows, in
 * shorter pieces: what is adjacent in memory is then several lines of the cache. */
enum { PIECE = ROUND_BLOCK, PANEL = 64, PANEL_PIECE = 128, PITCH = PANEL_PIECE + 16, LINE = 16 };

/* What becomes of a value: an element that is an integer, its code alone, one with an exponent of its own, or one of
 * an affine grid. */
enum { INTEGERS, CODES, FLOATS, AFFINE };

typedef struct {
    int64_t round_up, max_exponent, fraction_bits, mantissa_bits, min_exponent;
    float low, high;
} grid;

typedef struct {
    void *y;
    int8_t *codes;
    uint8_t *exponent;
    const void *x;
    int64_t R, C, stride_row, stride_column, group;
    int type, kind;
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

/* Where the result of column k lies: codes, or fp32. */
INLINE void *result_at(void *out, int64_t k, const int kind) {
    return kind == CODES ? (void *)((int8_t *)out + k) : (void *)((float *)out + k);
}

/* n values of one block. Random bits count from `at`. */
INLINE void round_part(
    void *out, const float *restrict x, int64_t n, grid g, block b, const random_bits *bits, int64_t at, const int kind
) {
    if (kind == CODES) {
        int8_t *restrict codes = out;
        if (b.is_poisoned) memset(codes, 0, (size_t)n);
        else
#pragma GCC unroll 1 /* gcc unrolls a short loop before it has turned it into vectors, and then cannot */
            for (int64_t i = 0; i < n; i++) codes[i] = (int8_t)element_of(x[i], b, g, bits, at + i, kind);
        return;
    }
    float *restrict y = out;
    if (b.is_poisoned)
        for (int64_t i = 0; i < n; i++) y[i] = NAN;
    else
#pragma GCC unroll 1
        for (int64_t i = 0; i < n; i++) {
            const float element = element_of(x[i], b, g, bits, at + i, kind);
            y[i] = kind == AFFINE ? element * b.step + b.low : element * b.up0 * b.up1;
        }
}

/* ---- pieces of rows ---- */

/* Room for a piece of a row, or of a panel of them, PITCH apart. */
typedef float panel[PANEL * PITCH];

INLINE int is_contiguous(const task *job) { return job->stride_column == 1; }

INLINE int64_t rows_of_panel(const task *job) { return is_contiguous(job) ? 1 : PANEL; }

INLINE int64_t width_of_piece(const task *job) { return is_contiguous(job) ? PIECE : PANEL_PIECE; }

INLINE void copy_panel(
    float *restrict copy, const task *job, int64_t r, int64_t rows, int64_t first, int64_t n, const int type
) {
    const int64_t down = job->stride_row, right = job->stride_column, start = r * down + first * right;
    if (right == 1) {
        for (int64_t k = 0; k < n; k++) copy[k] = load_float(job->x, start + k, type);
        return;
    }
    for (int64_t line = 0; line < n; line += LINE) /* columns of which all rows are read while they are in the cache */
        for (int64_t i = 0; i < rows; i++)
            for (int64_t k = line; k < min_i64(line + LINE, n); k++)
                copy[i * PITCH + k] = load_float(job->x, start + k * right + i * down, type);
}

/* Columns first .. first + n of the rows of a panel, from r on: a copy, or where they lie. */
static const float *values_of(float *copy, const task *job, int64_t r, int64_t rows, int64_t first, int64_t n) {
    if (job->type == BF16) copy_panel(copy, job, r, rows, first, n, BF16);
    else if (job->type == FP16) copy_panel(copy, job, r, rows, first, n, FP16);
    else if (is_contiguous(job)) return (const float *)job->x + r * job->stride_row + first;
    else copy_panel(copy, job, r, rows, first, n, FP32);
    return copy;
}

/* n columns from `first` on, in blocks of `group` from there on. */
INLINE void round_blocks(
    const task *job, void *out, const float *x, int64_t r, int64_t first, int64_t n, const int64_t group,
    const int are_whole, const random_bits *bits, int64_t at, const int kind
) {
    for (int64_t k = 0; k < n; k += group) {
        const int64_t count = are_whole ? group : min_i64(group, n - k); /* a constant, if the group is one */
        const block b = make_block(job, r, first + k, find_extrema(x + k, count, kind), kind);
        round_part(result_at(out, k, kind), x + k, count, job->g, b, bits, at + k, kind);
    }
}

/* A piece: a part of the block `given`, or some blocks. */
INLINE void round_piece_of(
    const task *job, void *out, const float *x, int64_t r, int64_t first, int64_t n, const block *given, const int kind,
    const int stochastic
) {
    random_bits drawn;
    const random_bits *bits = stochastic ? &drawn : 0;
    const int64_t group = job->group, at = stochastic ? first & 1 : 0;
    if (stochastic) {
        const int64_t counter = r * pairs_per_row(job->C) + (first >> 1);
        hash_pairs(drawn.pair, (uint64_t)counter, (at + n + 1) / 2, job->rule.seed);
    }
    if (given) {
        round_part(out, x, n, job->g, *given, bits, at, kind);
        return;
    }
    int64_t whole = n / group * group;
    if (kind != AFFINE && group == 16) round_blocks(job, out, x, r, first, whole, 16, 1, bits, at, kind);
    else if (kind != AFFINE && group == 32) round_blocks(job, out, x, r, first, whole, 32, 1, bits, at, kind);
    else whole = 0;
    out = result_at(out, whole, kind);
    round_blocks(job, out, x + whole, r, first + whole, n - whole, group, 0, bits, at + whole, kind);
}

/* The same with constants. It is called within the loops of threads, which are functions that see none. */
static void round_piece(const task *job, const float *x, int64_t r, int64_t first, int64_t n, const block *given) {
    const int64_t place = r * job->C + first;
    const int kind = job->kind, stochastic = job->rule.stochastic;
    float own[PIECE];
    void *out = kind == CODES ? (void *)(job->codes + place) : job->type == FP32 ? (float *)job->y + place : own;
    if (kind == INTEGERS && stochastic) round_piece_of(job, out, x, r, first, n, given, INTEGERS, 1);
    else if (kind == INTEGERS) round_piece_of(job, out, x, r, first, n, given, INTEGERS, 0);
    else if (kind == CODES && stochastic) round_piece_of(job, out, x, r, first, n, given, CODES, 1);
    else if (kind == CODES) round_piece_of(job, out, x, r, first, n, given, CODES, 0);
    else if (kind == FLOATS && stochastic) round_piece_of(job, out, x, r, first, n, given, FLOATS, 1);
    else if (kind == FLOATS) round_piece_of(job, out, x, r, first, n, given, FLOATS, 0);
    else if (stochastic) round_piece_of(job, out, x, r, first, n, given, AFFINE, 1);
    else round_piece_of(job, out, x, r, first, n, given, AFFINE, 0);
    if (kind != CODES && job->type == BF16)
        for (int64_t k = 0; k < n; k++) store_half(job->y, place + k, own[k], BF16);
    else if (kind != CODES && job->type == FP16)
        for (int64_t k = 0; k < n; k++) store_half(job->y, place + k, own[k], FP16);
}

/* ---- blocks that are longer than a piece ---- */

INLINE extrema join(extrema a, extrema b) {
    return (extrema){a.low < b.low ? a.low : b.low, a.high > b.high ? a.high : b.high};
}

static extrema extrema_of_piece(const task *job, const float *x, int64_t n) {
    return job->kind == AFFINE ? find_extrema(x, n, AFFINE) : find_extrema(x, n, INTEGERS);
}

/* Of all rows of a panel: read twice. */
static void round_long_blocks(const task *job, int64_t r, int64_t rows) {
    const int64_t piece = width_of_piece(job);
    panel copy;
    for (int64_t start = 0; start < job->C; start += job->group) {
        const int64_t stop = min_i64(start + job->group, job->C);
        extrema found[PANEL];
        block b[PANEL];
        for (int64_t i = 0; i < rows; i++) found[i] = (extrema){INT32_MAX, INT32_MIN};
        for (int64_t first = start; first < stop; first += piece) {
            const int64_t n = min_i64(piece, stop - first);
            const float *x = values_of(copy, job, r, rows, first, n);
            for (int64_t i = 0; i < rows; i++) found[i] = join(found[i], extrema_of_piece(job, x + i * PITCH, n));
        }
        for (int64_t i = 0; i < rows; i++) b[i] = make_block(job, r + i, start, found[i], job->kind);
        for (int64_t first = start; first < stop; first += piece) {
            const int64_t n = min_i64(piece, stop - first);
            const float *x = values_of(copy, job, r, rows, first, n);
            for (int64_t i = 0; i < rows; i++) round_piece(job, x + i * PITCH, r + i, first, n, b + i);
        }
    }
}

/* A row that is one block, shared by all threads. */
static void round_long_row(const task *job, int64_t r, int64_t threads) {
    const int64_t piece = width_of_piece(job);
    int32_t low = INT32_MAX, high = INT32_MIN;
#pragma omp parallel for schedule(static) reduction(min : low) reduction(max : high) num_threads(threads)
    for (int64_t k = 0; k < job->C; k += piece) {
        panel copy;
        const int64_t n = min_i64(piece, job->C - k);
        const extrema found = join((extrema){low, high}, extrema_of_piece(job, values_of(copy, job, r, 1, k, n), n));
        low = found.low;
        high = found.high;
    }
    const block b = make_block(job, r, 0, (extrema){low, high}, job->kind);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t k = 0; k < job->C; k += piece) {
        panel copy;
        const int64_t n = min_i64(piece, job->C - k);
        round_piece(job, values_of(copy, job, r, 1, k, n), r, k, n, &b);
    }
}

/* ---- matrices ---- */

/* Whole blocks fill a piece: threads share the pieces of all panels. */
static void round_short_blocks(const task *job, int64_t threads) {
    const int64_t width = width_of_piece(job) / job->group * job->group, height = rows_of_panel(job);
    const int64_t pieces = (job->C + width - 1) / width, panels = (job->R + height - 1) / height;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t number = 0; number < panels * pieces; number++) {
        panel copy;
        const int64_t r = number / pieces * height, rows = min_i64(height, job->R - r);
        const int64_t first = number % pieces * width, n = min_i64(width, job->C - first);
        const float *x = values_of(copy, job, r, rows, first, n);
        for (int64_t i = 0; i < rows; i++) round_piece(job, x + i * PITCH, r + i, first, n, 0);
    }
}

static void round_matrix(const task *job, int64_t threads) {
    const int64_t height = rows_of_panel(job);
    threads = useful_threads(job->R * job->C, threads);
    if (job->group <= width_of_piece(job)) {
        round_short_blocks(job, threads);
        return;
    }
    if (job->R < threads && job->group == job->C) {
        for (int64_t r = 0; r < job->R; r++) round_long_row(job, r, threads);
        return;
    }
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < job->R; r += height) round_long_blocks(job, r, min_i64(height, job->R - r));
}

/* `type` is that of x and y; `kind` is INTEGERS, FLOATS or AFFINE; blocks are of `group` columns. */
EXPORT void qgnn_quantize_grid_values(
    void *y, const void *x, const int64_t *seed, int64_t stream_key, int64_t R, int64_t C, int64_t stride_row,
    int64_t stride_column, int64_t type, int64_t group, int64_t kind, int64_t round_up, int64_t max_exponent,
    int64_t fraction_bits, int64_t mantissa_bits, int64_t min_exponent, float low, float high, int64_t threads
) {
    const task job = {
        .y = y, .x = x, .R = R, .C = C, .stride_row = stride_row, .stride_column = stride_column, .group = group,
        .type = (int)type, .kind = (int)kind, .rule = make_rounding(seed, stream_key, 0),
        .g = {round_up, max_exponent, fraction_bits, mantissa_bits, min_exponent, low, high},
    };
    round_matrix(&job, threads);
}

/* Codes and exponents of a grid of integers. */
EXPORT void qgnn_quantize_grid_codes(
    int8_t *codes, uint8_t *exponent, const void *x, const int64_t *seed, int64_t stream_key, int64_t R, int64_t C,
    int64_t stride_row, int64_t stride_column, int64_t type, int64_t group, int64_t round_up, int64_t max_exponent,
    int64_t fraction_bits, float low, float high, int64_t threads
) {
    const task job = {
        .codes = codes, .exponent = exponent, .x = x, .R = R, .C = C, .stride_row = stride_row,
        .stride_column = stride_column, .group = group, .type = (int)type, .kind = CODES,
        .rule = make_rounding(seed, stream_key, 0), .g = {round_up, max_exponent, fraction_bits, 0, 0, low, high},
    };
    round_matrix(&job, threads);
}
