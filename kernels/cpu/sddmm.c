/* Results of the edges of a CSR graph from the two rows at their ends; oracle: qgnn.reference.sddmm.
 *
 * A target row stays in the first-level cache while its edges are walked; the source rows come from anywhere, so they
 * are asked for some edges ahead, across the ends of rows. */

#include "common.h"

enum {
    AHEAD = 12,            /* edges between asking for a source row and using it */
    LINE = 64,             /* bytes of a cache line */
    LANES = 8,             /* partial sums of a dot product of floats: independent, so that they fill registers */
    INT32_TERMS = 1 << 16, /* products of codes that an int32 surely holds: 2^16 * 128^2 < 2^31 */
    SHORT_ROW = 4096       /* columns of a row of codes that is widened to int16 before its edges are walked */
};

/* What rows hold: codes of short rows are multiplied in pairs of int16 (pmaddwd), which takes one widened operand. */
enum { FLOATS, CODES, SHORT_CODES };

/* Scales of rows: one for all, one a row or one a head of a row, by their strides. */
typedef struct {
    const float *values; /* NULL: all ones */
    int64_t stride_row, stride_head;
} scales;

INLINE float scale_at(scales s, int64_t row, int64_t head) {
    return s.values ? s.values[row * s.stride_row + head * s.stride_head] : 1.0f;
}

typedef struct {
    const void *indptr, *index;
    const char *target, *source;
    scales target_scale, source_scale;
    int64_t N, H, D, stride_target, stride_source; /* H heads of D columns; strides in bytes */
} operands;

INLINE void fetch_source(const operands *p, int64_t e, int64_t last_edge, int64_t bytes, const int wide) {
    if (e >= last_edge) return;
    const int64_t s = load_index(p->index, e, wide);
    const char *row = p->source + s * p->stride_source;
    for (int64_t b = 0; b < bytes; b += LINE) __builtin_prefetch(row + b);
    if (p->source_scale.values) __builtin_prefetch(p->source_scale.values + s * p->source_scale.stride_row);
}

INLINE float dot_short_codes(const int16_t *a, const int8_t *b, int64_t D) {
    int32_t sum = 0;
    for (int64_t d = 0; d < D; d++) sum += (int32_t)a[d] * (int32_t)b[d];
    return (float)sum;
}

INLINE float dot_codes(const int8_t *a, const int8_t *b, int64_t D) {
    int64_t total = 0;
    for (int64_t first = 0; first < D; first += INT32_TERMS) {
        const int64_t last = min_i64(D, first + INT32_TERMS);
        int32_t sum = 0;
        for (int64_t d = first; d < last; d++) sum += (int32_t)a[d] * (int32_t)b[d];
        total += sum;
    }
    return (float)total;
}

INLINE float dot_floats(const float *a, const float *b, int64_t D) {
    float sum[LANES] = {0};
    int64_t d = 0;
    for (; d + LANES <= D; d += LANES)
        for (int l = 0; l < LANES; l++) sum[l] += a[d + l] * b[d + l];
    for (int l = 0; d + l < D; l++) sum[l] += a[d + l] * b[d + l];
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int l = 0; l < width; l++) sum[l] += sum[l + width];
    return sum[0];
}

/* Dot products of all edges of the rows first .. last: out [E, H]. A constant D, the width of a head, unrolls loops. */
INLINE void dot_rows_of_width(
    float *out, const operands *p, int64_t first, int64_t last, const int wide, const int kind, const int64_t D
) {
    const int64_t H = p->H, size = kind == FLOATS ? 4 : 1, last_edge = load_index(p->indptr, last, wide);
    int16_t widened[SHORT_ROW];
    for (int64_t n = first; n < last; n++) {
        const char *target = p->target + n * p->stride_target;
        const int64_t start = load_index(p->indptr, n, wide), stop = load_index(p->indptr, n + 1, wide);
        if (kind == SHORT_CODES && start < stop)
            for (int64_t d = 0; d < H * D; d++) widened[d] = ((const int8_t *)target)[d];
        for (int64_t e = start; e < stop; e++) {
            fetch_source(p, e + AHEAD, last_edge, H * D * size, wide);
            const int64_t s = load_index(p->index, e, wide);
            for (int64_t h = 0; h < H; h++) {
                const int64_t column = h * D;
                const char *a = target + column * size, *b = p->source + s * p->stride_source + column * size;
                float dot;
                if (kind == FLOATS) dot = dot_floats((const float *)a, (const float *)b, D);
                else if (kind == CODES) dot = dot_codes((const int8_t *)a, (const int8_t *)b, D);
                else dot = dot_short_codes(widened + column, (const int8_t *)b, D);
                out[e * H + h] = dot * scale_at(p->target_scale, n, h) * scale_at(p->source_scale, s, h);
            }
        }
    }
}

INLINE void dot_rows(float *out, const operands *p, int64_t first, int64_t last, const int wide, const int kind) {
    const int is_common = !wide && kind != CODES; /* the rest is not worth the time of the compiler */
    if (is_common && p->D == 8) dot_rows_of_width(out, p, first, last, wide, kind, 8);
    else if (is_common && p->D == 16) dot_rows_of_width(out, p, first, last, wide, kind, 16);
    else if (is_common && p->D == 32) dot_rows_of_width(out, p, first, last, wide, kind, 32);
    else if (is_common && p->D == 64) dot_rows_of_width(out, p, first, last, wide, kind, 64);
    else if (is_common && p->D == 128) dot_rows_of_width(out, p, first, last, wide, kind, 128);
    else dot_rows_of_width(out, p, first, last, wide, kind, p->D);
}

/* Sums of the two rows of all edges of the rows first .. last: out [E, H * D]. */
INLINE void add_rows(float *out, const operands *p, int64_t first, int64_t last, const int wide, const int kind) {
    const int64_t H = p->H, D = p->D, size = kind == FLOATS ? 4 : 1, last_edge = load_index(p->indptr, last, wide);
    for (int64_t n = first; n < last; n++) {
        const char *target = p->target + n * p->stride_target;
        const int64_t stop = load_index(p->indptr, n + 1, wide);
        for (int64_t e = load_index(p->indptr, n, wide); e < stop; e++) {
            fetch_source(p, e + AHEAD, last_edge, H * D * size, wide);
            const int64_t s = load_index(p->index, e, wide);
            const char *source = p->source + s * p->stride_source;
            for (int64_t h = 0; h < H; h++) {
                const char *a = target + h * D * size, *b = source + h * D * size;
                const float a_scale = scale_at(p->target_scale, n, h), b_scale = scale_at(p->source_scale, s, h);
                float *y = out + (e * H + h) * D;
                if (kind == FLOATS)
                    for (int64_t d = 0; d < D; d++)
                        y[d] = ((const float *)a)[d] * a_scale + ((const float *)b)[d] * b_scale;
                else
                    for (int64_t d = 0; d < D; d++)
                        y[d] = (float)((const int8_t *)a)[d] * a_scale + (float)((const int8_t *)b)[d] * b_scale;
            }
        }
    }
}

INLINE void all_rows(float *out, const operands *p, int64_t threads, const int wide, const int kind, const int is_dot) {
    const int64_t E = load_index(p->indptr, p->N, wide);
    threads = useful_threads(E * p->H * p->D, threads);
    const int64_t parts = num_parts(p->N, threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < parts; part++) {
        const int64_t first = part_of_rows(p->indptr, p->N, part, parts, wide);
        const int64_t last = part_of_rows(p->indptr, p->N, part + 1, parts, wide);
        if (is_dot) dot_rows(out, p, first, last, wide, kind);
        else add_rows(out, p, first, last, wide, kind);
    }
}

INLINE void all_kinds(float *out, const operands *p, int64_t threads, const int wide, int is_codes, int is_dot) {
    if (!is_dot && is_codes) all_rows(out, p, threads, wide, CODES, 0);
    else if (!is_dot) all_rows(out, p, threads, wide, FLOATS, 0);
    else if (!is_codes) all_rows(out, p, threads, wide, FLOATS, 1);
    else if (p->H * p->D <= SHORT_ROW) all_rows(out, p, threads, wide, SHORT_CODES, 1);
    else all_rows(out, p, threads, wide, CODES, 1);
}

/* Dot products [E, H] or sums [E, H * D]. Strides of rows are in bytes; scales have a stride by row and one by head. */
EXPORT void qgnn_sddmm(
    float *out, const void *indptr, const void *index, const char *target, const char *source,
    const float *target_scale, int64_t target_scale_row, int64_t target_scale_head, const float *source_scale,
    int64_t source_scale_row, int64_t source_scale_head, int64_t N, int64_t H, int64_t D, int64_t stride_target,
    int64_t stride_source, int64_t wide, int64_t is_codes, int64_t is_dot, int64_t threads
) {
    const operands p = {
        indptr, index, target, source,
        {target_scale, target_scale_row, target_scale_head},
        {source_scale, source_scale_row, source_scale_head},
        N, H, D, stride_target, stride_source,
    };
    if (wide) all_kinds(out, &p, threads, 1, (int)is_codes, (int)is_dot);
    else all_kinds(out, &p, threads, 0, (int)is_codes, (int)is_dot);
}
