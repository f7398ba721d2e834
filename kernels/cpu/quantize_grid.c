/* Rounding of a matrix [R, C] to a grid whose blocks share a power of two, or to an affine one.
 * Oracle: qgnn.reference.quantize_dequantize, quantize_shared.
 */

#include "grid.h"
#include "transpose.h"

/* Rows are read in pieces of PIECE columns. Those whose columns lie apart are copied in panels of so many rows, in
 * shorter pieces, such that what is adjacent in memory is several lines of the cache. A band is some panels. */
enum { PIECE = ROUND_BLOCK, PANEL = MAX_ROWS, BAND = 8 * PANEL, PANEL_PIECE = 256, PITCH = PANEL_PIECE + 16 };
enum { MOST_BLOCKS = PIECE / 16 };

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

/* Where the exponent of the block lies that begins with column `first`. */
INLINE uint8_t *exponent_at(const task *job, int64_t r, int64_t first) {
    return job->exponent + r * ((job->C + job->group - 1) / job->group) + first / job->group;
}

INLINE block make_block(const task *job, int64_t r, int64_t first, extrema found, const int kind) {
    if (kind == AFFINE) return make_affine(found, &job->g);
    const int32_t shared = shared_exponent((uint32_t)found.high, &job->g);
    if (kind == CODES) *exponent_at(job, r, first) = (uint8_t)shared;
    return make_shared(shared, &job->g);
}

/* ---- pieces of rows ---- */

/* Room for a piece of a row, or of a panel of them, PITCH apart. */
typedef float panel[PANEL * PITCH];

INLINE int is_contiguous(const task *job) { return job->stride_column == 1; }

/* Whether each column's values are adjacent, as in a transposed matrix. */
INLINE int has_lines(const task *job) { return job->stride_row == 1 && !is_contiguous(job); }

INLINE int64_t rows_of_panel(const task *job) { return is_contiguous(job) ? 1 : PANEL; }

INLINE int64_t width_of_piece(const task *job) { return is_contiguous(job) ? PIECE : PANEL_PIECE; }

INLINE void copy_panel(
    float *restrict copy, const task *job, int64_t r, int64_t rows, int64_t first, int64_t n, const int type
) {
    const int64_t down = job->stride_row, right = job->stride_column, start = r * down + first * right;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t k = 0; k < n; k++) copy[i * PITCH + k] = load_float(job->x, start + k * right + i * down, type);
}

/* Columns first .. first + n of the rows of a panel, from r on: a copy, or where they lie. */
static const float *values_of(float *copy, const task *job, int64_t r, int64_t rows, int64_t first, int64_t n) {
    if (is_contiguous(job)) return line_of(copy, job->x, job->type, r * job->stride_row + first, n);
    if (has_lines(job))
        copy_lines(copy, PITCH, job->x, job->type, r + first * job->stride_column, job->stride_column, rows, n);
    else if (job->type == BF16) copy_panel(copy, job, r, rows, first, n, BF16);
    else if (job->type == FP16) copy_panel(copy, job, r, rows, first, n, FP16);
    else copy_panel(copy, job, r, rows, first, n, FP32);
    return copy;
}

/* Whole blocks, of a `group` that is a constant: step by step for all of them, so that each step is made of vectors. */
INLINE void round_whole_blocks(
    const task *job, void *out, const float *x, int64_t r, int64_t first, int64_t n, const int64_t group,
    const random_bits *bits, int64_t at, const int kind
) {
    const grid g = job->g;
    const int64_t count = n / group;
    uint32_t largest[MOST_BLOCKS], worst = 0;
    int32_t shared[MOST_BLOCKS];
    float down0[MOST_BLOCKS], down1[MOST_BLOCKS], up0[MOST_BLOCKS], up1[MOST_BLOCKS];
    for (int64_t j = 0; j < count; j++) largest[j] = absmax_bits(x + j * group, group);
    for (int64_t j = 0; j < count; j++) {
        shared[j] = shared_exponent(largest[j], &g);
        worst = largest[j] > worst ? largest[j] : worst;
        const block b = make_shared(shared[j], &g);
        down0[j] = b.down0, down1[j] = b.down1, up0[j] = b.up0, up1[j] = b.up1;
    }
    if (kind == CODES) {
        uint8_t *exponent = exponent_at(job, r, first);
        for (int64_t j = 0; j < count; j++) exponent[j] = (uint8_t)shared[j];
    }
    for (int64_t j = 0; j < count; j++) {
        const block b = {.down0 = down0[j], .down1 = down1[j], .up0 = up0[j], .up1 = up1[j]};
        round_part(result_at(out, j * group, kind), x + j * group, group, g, b, bits, at + j * group, kind);
    }
    for (int64_t j = 0; j < count && worst >= INFINITY_BITS; j++)
        if (largest[j] >= INFINITY_BITS) poison(result_at(out, j * group, kind), group, kind);
}

/* n columns from `first` on, in blocks of `group` from there on. */
INLINE void round_blocks(
    const task *job, void *out, const float *x, int64_t r, int64_t first, int64_t n, const int64_t group,
    const random_bits *bits, int64_t at, const int kind
) {
    for (int64_t k = 0; k < n; k += group) {
        const int64_t count = min_i64(group, n - k);
        const block b = make_block(job, r, first + k, find_extrema(x + k, count, kind), kind);
        round_block(result_at(out, k, kind), x + k, count, job->g, b, bits, at + k, kind);
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
        round_block(out, x, n, job->g, *given, bits, at, kind);
        return;
    }
    int64_t whole = n / group * group;
    if (kind != AFFINE && group == 16) round_whole_blocks(job, out, x, r, first, whole, 16, bits, at, kind);
    else if (kind != AFFINE && group == 32) round_whole_blocks(job, out, x, r, first, whole, 32, bits, at, kind);
    else whole = 0;
    out = result_at(out, whole, kind);
    round_blocks(job, out, x + whole, r, first + whole, n - whole, group, bits, at + whole, kind);
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

static extrema extrema_of_piece(const task *job, const float *x, int64_t n) {
    return job->kind == AFFINE ? find_extrema(x, n, AFFINE) : find_extrema(x, n, INTEGERS);
}

/* Of values that are adjacent, each its own. */
INLINE void extend(int32_t *restrict low, int32_t *restrict high, const float *restrict x, int64_t n, const int kind) {
    for (int64_t i = 0; i < n; i++) {
        const int32_t bits = (int32_t)bits_of(x[i]), key = kind == AFFINE ? order_key(bits) : bits & INT32_MAX;
        if (kind == AFFINE) low[i] = key < low[i] ? key : low[i];
        high[i] = key > high[i] ? key : high[i];
    }
}

/* Of the blocks start .. stop of the rows of a band. */
static void find_blocks(block *b, const task *job, float *copy, int64_t r, int64_t rows, int64_t start, int64_t stop) {
    int32_t low[BAND], high[BAND];
    for (int64_t i = 0; i < rows; i++) low[i] = INT32_MAX, high[i] = INT32_MIN;
    if (has_lines(job))
        for (int64_t k = start; k < stop; k++) {
            const float *x = line_of(copy, job->x, job->type, r + k * job->stride_column, rows);
            if (job->kind == AFFINE) extend(low, high, x, rows, AFFINE);
            else extend(low, high, x, rows, INTEGERS);
        }
    else
        for (int64_t first = start, n; first < stop; first += n) {
            n = min_i64(width_of_piece(job), stop - first);
            const float *x = values_of(copy, job, r, rows, first, n);
            for (int64_t i = 0; i < rows; i++) {
                const extrema found = join((extrema){low[i], high[i]}, extrema_of_piece(job, x + i * PITCH, n));
                low[i] = found.low, high[i] = found.high;
            }
        }
    for (int64_t i = 0; i < rows; i++) b[i] = make_block(job, r + i, start, (extrema){low[i], high[i]}, job->kind);
}

/* Of all rows of a band: read twice. */
static void round_long_blocks(const task *job, int64_t r, int64_t rows) {
    panel copy;
    for (int64_t start = 0; start < job->C; start += job->group) {
        const int64_t stop = min_i64(start + job->group, job->C);
        block b[BAND];
        find_blocks(b, job, copy, r, rows, start, stop);
        for (int64_t first = start, n; first < stop; first += n) {
            n = min_i64(width_of_piece(job), stop - first);
            for (int64_t top = 0; top < rows; top += rows_of_panel(job)) {
                const int64_t height = min_i64(rows_of_panel(job), rows - top);
                const float *x = values_of(copy, job, r + top, height, first, n);
                for (int64_t i = 0; i < height; i++)
                    round_piece(job, x + i * PITCH, r + top + i, first, n, b + top + i);
            }
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
        const int64_t across = has_lines(job); /* adjacent panels, then, are adjacent in memory */
        const int64_t r = (across ? number % panels : number / pieces) * height, rows = min_i64(height, job->R - r);
        const int64_t first = (across ? number / panels : number % pieces) * width, n = min_i64(width, job->C - first);
        const float *x = values_of(copy, job, r, rows, first, n);
        for (int64_t i = 0; i < rows; i++) round_piece(job, x + i * PITCH, r + i, first, n, 0);
    }
}

static void round_matrix(const task *job, int64_t threads) {
    threads = useful_threads(job->R * job->C, threads);
    if (job->group <= width_of_piece(job)) {
        round_short_blocks(job, threads);
        return;
    }
    if (job->R < threads && job->group == job->C) {
        for (int64_t r = 0; r < job->R; r++) round_long_row(job, r, threads);
        return;
    }
    int64_t height = rows_of_panel(job); /* of lines as much at a time as still gives all threads a part */
    if (has_lines(job)) height = max_i64(height, min_i64(BAND, job->R / threads / PANEL * PANEL));
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
