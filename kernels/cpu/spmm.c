/* Sums and extrema of neighbor rows over a CSR graph.
 * Oracle: qgnn.reference.spmm, spmm_requantize and spmm_extremum.
 *
 * A row of the result is gathered as a whole, so that each source row is fetched once, some edges ahead of its use. It
 * grows in the first-level cache while edges are taken four at a time, which spares three of four passes over it. One
 * thread makes an element, edge after edge: results do not depend on the number of threads. */

#include "epilogue.h"

enum {
    GROUP = 4,        /* edges taken at a time */
    BLOCK = 64,       /* columns between two requests for rows ahead: a cache line of codes, four of floats */
    AHEAD = 8,        /* edges between the request for a row and its use; 4 to 48 measure alike */
    FOLD = 512,       /* edges whose factors are made at a time */
    SLICE = 1024,     /* columns gathered at a time: value and edge of each lie on the stack */
    HUB_EDGES = 8192, /* a row with more edges is worth the waking of all threads */
    LANES = 16,       /* columns that results are padded with */
    LINE = 64         /* bytes */
};

typedef struct {
    const void *indptr, *index, *x;
    const float *weight, *x_scale, *row_factor, *bias; /* each may be null */
    int64_t N, S, E, F, stride_x, wide, is_codes, one_scale, largest;
    float *out, *scale; /* results; which ones, the task knows */
    void *arg;
    int8_t *codes;
    rounding rule;
    const activation *last; /* null: none */
} job;

/* ---- a block of columns of one row or of GROUP rows ---- */

INLINE void add_one(float *restrict sum, const char *restrict row, float factor, const int width, const int is_codes) {
    for (int k = 0; k < width; k++) sum[k] = multiply_add(factor, value_at(row, k, is_codes), sum[k]);
}

INLINE void add_group(
    float *restrict sum, const char *restrict row0, const char *restrict row1, const char *restrict row2,
    const char *restrict row3, const float *restrict factor, const int width, const int is_codes
) {
    const float f0 = factor[0], f1 = factor[1], f2 = factor[2], f3 = factor[3];
    for (int k = 0; k < width; k++) {
        const float sum1 = multiply_add(f0, value_at(row0, k, is_codes), sum[k]);
        const float sum2 = multiply_add(f1, value_at(row1, k, is_codes), sum1);
        const float sum3 = multiply_add(f2, value_at(row2, k, is_codes), sum2);
        sum[k] = multiply_add(f3, value_at(row3, k, is_codes), sum3);
    }
}

/* Keep the larger value and its edge. The first of equal ones stays; a NaN beats all but an earlier NaN. */
INLINE void keep_larger(
    float *restrict best, int32_t *restrict best_edge, const char *restrict row, float factor, int32_t edge,
    const int width, const int is_codes
) {
#pragma GCC unroll 1 /* gcc unrolls a short loop before it has turned it into vectors, and then cannot */
    for (int k = 0; k < width; k++) {
        const float value = factor * value_at(row, k, is_codes), old = best[k];
        const int take = !(value <= old) & (old == old);
        best[k] = take ? value : old;
        best_edge[k] = take ? edge : best_edge[k];
    }
}

/* ---- edges of one row ---- */

/* weight * x_scale of `count` edges, with the sign that makes every extremum a maximum. */
static void fold_factors(float *restrict factor, const job *a, int64_t first, int64_t count) {
    const float sign = a->largest ? 1.0f : -1.0f;
    for (int64_t e = 0; e < count; e++) factor[e] = a->weight ? sign * a->weight[first + e] : sign;
    if (!a->x_scale) return;
    for (int64_t e = 0; e < count; e++)
        factor[e] *= a->x_scale[a->one_scale ? 0 : load_index(a->index, first + e, (int)a->wide)];
}

typedef struct {
    float *value;  /* sums or extrema, up to whole lanes */
    int32_t *edge; /* for extrema: the edge, counted from the first of the row, which has fewer than 2^31; else null */
} gathered;

/* `width` columns, which start at byte `at` of each row of the group. */
INLINE void take_block(
    gathered to, int64_t column, const char *const *row, int64_t at, const float *factor, int32_t edge,
    const int group, const int width, const int is_codes, const int extremum
) {
    float *value = to.value + column;
    if (extremum)
        for (int j = 0; j < group; j++)
            keep_larger(value, to.edge + column, row[j] + at, factor[j], edge + j, width, is_codes);
    else if (group == GROUP)
        add_group(value, row[0] + at, row[1] + at, row[2] + at, row[3] + at, factor, width, is_codes);
    else add_one(value, row[0] + at, factor[0], width, is_codes);
}

/* Columns first .. first + width of `group` edges from `e` on; `begin` is the first edge of the row. */
INLINE void take_edges(
    gathered to, const job *a, int64_t e, int64_t begin, int64_t first, int64_t width, const float *factor,
    const int group, const int is_codes, const int extremum
) {
    const int64_t size = is_codes ? 1 : 4, stride = a->stride_x * size;
    const int lanes = is_codes ? LANES : LANES / 2; /* columns of the narrowest block */
    const char *const x = (const char *)a->x + first * size, *row[GROUP], *ahead[GROUP];
    const int32_t edge = (int32_t)(e - begin);
    for (int j = 0; j < group; j++) {
        row[j] = x + load_index(a->index, e + j, (int)a->wide) * stride;
        ahead[j] = x + load_index(a->index, min_i64(e + j + AHEAD, a->E - 1), (int)a->wide) * stride;
    }
    int64_t c = 0;
    for (; c + BLOCK <= width; c += BLOCK) {
        for (int j = 0; j < group; j++)
            for (int64_t b = 0; b < BLOCK * size; b += LINE) __builtin_prefetch(ahead[j] + c * size + b);
        take_block(to, c, row, c * size, factor, edge, group, BLOCK, is_codes, extremum);
    }
    if (c == width) return;
    for (int j = 0; j < group; j++) {
        for (int64_t b = c * size; b < width * size; b += LINE) __builtin_prefetch(ahead[j] + b);
        __builtin_prefetch(ahead[j] + width * size - 1);
    }
    if (c + 32 <= width) {
        take_block(to, c, row, c * size, factor, edge, group, 32, is_codes, extremum);
        c += 32;
    }
    if (c + 16 <= width) {
        take_block(to, c, row, c * size, factor, edge, group, 16, is_codes, extremum);
        c += 16;
    }
    if (c == width) return;
    if (!is_codes && c + 8 <= width) {
        take_block(to, c, row, c * size, factor, edge, group, 8, is_codes, extremum);
        c += 8;
        if (c == width) return;
    }
    /* The last columns: whole lanes all the same. What lies behind a row fills lanes that nobody reads; behind the last
     * row of all lies nothing, so its columns are copied. */
    const char *const end = (const char *)a->x + ((a->S - 1) * a->stride_x + a->F) * size;
    const char *last[GROUP];
    char copy[GROUP][LINE];
    for (int j = 0; j < group; j++) {
        last[j] = row[j] + c * size;
        if (end - last[j] >= lanes * size) continue;
        memset(copy[j], 0, LINE);
        last[j] = memcpy(copy[j], last[j], (size_t)((width - c) * size));
    }
    take_block(to, c, last, 0, factor, edge, group, lanes, is_codes, extremum);
}

INLINE void gather(
    gathered to, const job *a, int64_t n, int64_t first, int64_t width, const int is_codes, const int extremum
) {
    const int64_t begin = load_index(a->indptr, n, (int)a->wide), end = load_index(a->indptr, n + 1, (int)a->wide);
    for (int64_t k = 0; k < width + LANES; k++) to.value[k] = extremum ? -INFINITY : 0.0f;
    if (extremum) memset(to.edge, 0, (size_t)(width + LANES) * sizeof(int32_t));
    float factor[FOLD];
    for (int64_t start = begin; start < end; start += FOLD) {
        const int64_t count = min_i64(FOLD, end - start);
        int64_t e = 0;
        fold_factors(factor, a, start, count);
        for (; e + GROUP <= count; e += GROUP)
            take_edges(to, a, start + e, begin, first, width, factor + e, GROUP, is_codes, extremum);
        for (; e < count; e++) take_edges(to, a, start + e, begin, first, width, factor + e, 1, is_codes, extremum);
    }
}

static void sum_codes(gathered to, const job *a, int64_t n, int64_t first, int64_t width) {
    gather(to, a, n, first, width, 1, 0);
}

static void sum_floats(gathered to, const job *a, int64_t n, int64_t first, int64_t width) {
    gather(to, a, n, first, width, 0, 0);
}

static void extremum_of_codes(gathered to, const job *a, int64_t n, int64_t first, int64_t width) {
    gather(to, a, n, first, width, 1, 1);
}

static void extremum_of_floats(gathered to, const job *a, int64_t n, int64_t first, int64_t width) {
    gather(to, a, n, first, width, 0, 1);
}

static void finish_sums(float *out, const float *sum, const job *a, int64_t n, int64_t first, int64_t width) {
    const float factor = a->row_factor ? a->row_factor[n] : 1.0f;
    if (a->bias)
        for (int64_t k = 0; k < width; k++) out[k] = sum[k] * factor + a->bias[first + k];
    else
        for (int64_t k = 0; k < width; k++) out[k] = sum[k] * factor;
}

/* ---- tasks: columns first .. first + width of row n ---- */

static void sum_task(const job *a, int64_t n, int64_t first, int64_t width) {
    float sum[SLICE + LANES];
    (a->is_codes ? sum_codes : sum_floats)((gathered){sum, 0}, a, n, first, width);
    float *out = a->out + n * a->F + first;
    finish_sums(out, sum, a, n, first, width);
    if (a->last) activate_columns(out, *a->last, n, first, width, a->F);
}

static void requantize_task(const job *a, int64_t n, int64_t first, int64_t width) {
    float sum[SLICE + LANES];
    (a->is_codes ? sum_codes : sum_floats)((gathered){sum, 0}, a, n, first, width);
    finish_sums(sum, sum, a, n, first, width);
    a->scale[n] = quantize_row(a->codes + n * a->F, sum, n, a->F, pairs_per_row(a->F), a->rule);
}

static void extremum_task(const job *a, int64_t n, int64_t first, int64_t width) {
    float best[SLICE + LANES];
    int32_t edge[SLICE + LANES];
    const int64_t begin = load_index(a->indptr, n, (int)a->wide), at = n * a->F + first;
    const int is_empty = begin == load_index(a->indptr, n + 1, (int)a->wide);
    const float sign = a->largest ? 1.0f : -1.0f;
    (a->is_codes ? extremum_of_codes : extremum_of_floats)((gathered){best, edge}, a, n, first, width);
    for (int64_t k = 0; k < width; k++) a->out[at + k] = is_empty ? 0.0f : sign * best[k];
    if (a->wide)
        for (int64_t k = 0; k < width; k++) ((int64_t *)a->arg)[at + k] = is_empty ? -1 : begin + edge[k];
    else
        for (int64_t k = 0; k < width; k++) ((int32_t *)a->arg)[at + k] = is_empty ? -1 : (int32_t)begin + edge[k];
}

typedef void (*task)(const job *, int64_t, int64_t, int64_t);

static int is_hub(const job *a, int64_t n) {
    return load_index(a->indptr, n + 1, (int)a->wide) - load_index(a->indptr, n, (int)a->wide) >= HUB_EDGES;
}

/* Run a task for every row: parts of rows with about equally many edges, and before them, column by column, the rows
 * that are too long for one thread (`whole_rows`: the task takes no less than a row). */
static void run(const job *a, task work, int whole_rows, int64_t threads) {
    const int64_t slices = (a->F + BLOCK - 1) / BLOCK;
    threads = useful_threads((a->E + a->N) * a->F, threads);
    const int split_hubs = threads > 1 && slices > 1 && !whole_rows;
    for (int64_t n = 0; split_hubs && n < a->N; n++) {
        if (!is_hub(a, n)) continue;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
        for (int64_t slice = 0; slice < slices; slice++)
            work(a, n, slice * BLOCK, min_i64(BLOCK, a->F - slice * BLOCK));
    }
    const int64_t parts = num_parts(a->N, threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < parts; part++) {
        const int64_t end = part_of_rows(a->indptr, a->N, part + 1, parts, (int)a->wide);
        for (int64_t n = part_of_rows(a->indptr, a->N, part, parts, (int)a->wide); n < end; n++) {
            if (split_hubs && is_hub(a, n)) continue;
            for (int64_t first = 0; first < a->F; first += SLICE) work(a, n, first, min_i64(SLICE, a->F - first));
        }
    }
}

EXPORT void qgnn_spmm(
    float *out, const void *indptr, const void *index, const void *x, const float *weight, const float *x_scale,
    const float *row_factor, const float *bias, uint8_t *mask, int64_t relu, int64_t threshold, const int64_t *seed,
    int64_t stream_key, float factor, int64_t N, int64_t S, int64_t E, int64_t F, int64_t stride_x, int64_t wide,
    int64_t is_codes, int64_t one_scale, int64_t threads
) {
    const activation last = make_activation(mask, relu, threshold, seed, stream_key, factor);
    const job a = {
        .indptr = indptr, .index = index, .x = x, .weight = weight, .x_scale = x_scale, .row_factor = row_factor,
        .bias = bias, .N = N, .S = S, .E = E, .F = F, .stride_x = stride_x, .wide = wide, .is_codes = is_codes,
        .one_scale = one_scale, .largest = 1, .out = out, .last = relu || threshold ? &last : 0,
    };
    run(&a, sum_task, 0, threads);
}

/* Rows of at most SLICE columns. */
EXPORT void qgnn_spmm_requantize(
    int8_t *codes, float *scale, const void *indptr, const void *index, const void *x, const float *weight,
    const float *x_scale, const float *row_factor, const int64_t *seed, int64_t stream_key, int64_t qmax, int64_t N,
    int64_t S, int64_t E, int64_t F, int64_t stride_x, int64_t wide, int64_t is_codes, int64_t one_scale,
    int64_t threads
) {
    const job a = {
        .indptr = indptr, .index = index, .x = x, .weight = weight, .x_scale = x_scale, .row_factor = row_factor,
        .N = N, .S = S, .E = E, .F = F, .stride_x = stride_x, .wide = wide, .is_codes = is_codes,
        .one_scale = one_scale, .largest = 1, .codes = codes, .scale = scale,
        .rule = make_rounding(seed, stream_key, qmax),
    };
    run(&a, requantize_task, 1, threads);
}

/* `arg` has the type of `index`. */
EXPORT void qgnn_spmm_extremum(
    float *out, void *arg, const void *indptr, const void *index, const void *x, const float *weight,
    const float *x_scale, int64_t largest, int64_t N, int64_t S, int64_t E, int64_t F, int64_t stride_x, int64_t wide,
    int64_t is_codes, int64_t one_scale, int64_t threads
) {
    const job a = {
        .indptr = indptr, .index = index, .x = x, .weight = weight, .x_scale = x_scale, .N = N, .S = S, .E = E,
        .F = F, .stride_x = stride_x, .wide = wide, .is_codes = is_codes, .one_scale = one_scale, .largest = largest,
        .out = out, .arg = arg,
    };
    run(&a, extremum_task, 0, threads);
}

/* dx[index[arg[n, f]], f] += grad[n, f] * weight[arg[n, f]], row after row; `dx` holds zeros before. */
EXPORT void qgnn_spmm_extremum_dx(
    float *dx, const void *index, const float *grad, const void *arg, const float *weight, int64_t N, int64_t F,
    int64_t wide, int64_t threads
) {
    const int64_t slices = (F + BLOCK - 1) / BLOCK;
    threads = useful_threads(N * F, threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t slice = 0; slice < slices; slice++) {
        const int64_t end = min_i64(F, (slice + 1) * BLOCK);
        for (int64_t n = 0; n < N; n++)
            for (int64_t f = slice * BLOCK; f < end; f++) {
                const int64_t edge = load_index(arg, n * F + f, (int)wide);
                if (edge < 0) continue; /* a row without edges */
                const float value = weight ? grad[n * F + f] * weight[edge] : grad[n * F + f];
                dx[load_index(index, edge, (int)wide) * F + f] += value;
            }
    }
}
