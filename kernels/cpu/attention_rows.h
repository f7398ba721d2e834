/* Rows by head for attention: sums and dot products of the rows at the other ends of a chunk of edges. */
#ifndef QGNN_ATTENTION_ROWS_H
#define QGNN_ATTENTION_ROWS_H

#include "narrow.h"
#ifdef _OPENMP
#include <omp.h>
#endif

/* Inlined or cloned, what is specialized already would be compiled several times. */
#define LEAF static __attribute__((noinline))

enum {
    AHEAD = 16,  /* edges between asking for what belongs to a neighbor and using it */
    LINE = 64,   /* bytes of a cache line */
    LANES = 16,  /* partial sums of a dot product */
    PADDING = 16 /* floats by which arrays of the workspace are rounded up */
};

/* ---- one thread's workspace ---- */

INLINE int64_t padded(int64_t n) { return (n + PADDING - 1) / PADDING * PADDING; }

/* The next `n` floats of a workspace. */
INLINE float *take(float **work, int64_t n) {
    float *taken = *work;
    *work += padded(n);
    return taken;
}

INLINE int64_t *take_wide(float **work, int64_t n) { return (int64_t *)(void *)take(work, 2 * n); }

INLINE int64_t thread_number(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

/* ---- rows ---- */

/* Rows [., H * D]: codes or floats, with a scale a head or none. */
typedef struct {
    const char *data;
    const float *scale; /* [., H], or null */
    int64_t stride;     /* in bytes */
    int is_codes;
} rows;

INLINE rows make_rows(const void *data, const float *scale, int64_t stride, int64_t is_codes) {
    return (rows){data, scale, is_codes ? stride : 4 * stride, (int)is_codes};
}

INLINE void fetch_row(const rows *x, int64_t node, int64_t width) {
    const char *row = x->data + node * x->stride;
    for (int64_t b = 0; b < width * (x->is_codes ? 1 : 4); b += LINE) __builtin_prefetch(row + b);
}

/* The values of a row, without scales. */
INLINE void load_values(float *restrict out, const rows *x, int64_t node, int64_t width) {
    const char *row = x->data + node * x->stride;
    if (x->is_codes)
        for (int64_t k = 0; k < width; k++) out[k] = value_at(row, k, 1);
    else memcpy(out, row, (size_t)width * sizeof(float));
}

/* x[k] *= factor[k / D] */
void scale_heads(float *x, const float *factor, int64_t H, int64_t D);

/* The values of a row times its scales. */
INLINE void load_row(float *out, const rows *x, int64_t node, int64_t H, int64_t D) {
    load_values(out, x, node, H * D);
    if (x->scale) scale_heads(out, x->scale + node * H, H, D);
}

/* ---- blocks of narrow heads ---- */

/* `above` where value > 0, else `below` (a NaN by its sign). By bits: gcc makes a branch of a comparison here, and no
 * vectors. */
INLINE float choose(float value, float above, float below) {
    const uint32_t bits = bits_of(value), not_positive = (uint32_t)((int32_t)(bits | (bits - 1)) >> 31);
    return float_of((bits_of(above) & ~not_positive) | (bits_of(below) & not_positive));
}

/* A block of a row as floats, and asks for that of another one. */
INLINE const float *float_block(
    float *buffer, const rows *x, int64_t node, int64_t ahead, int64_t column, const int width
) {
    const int64_t size = x->is_codes ? 1 : 4;
    const char *row = x->data + node * x->stride + column * size, *next = x->data + ahead * x->stride + column * size;
    for (int64_t b = 0; b < width * size; b += LINE) __builtin_prefetch(next + b);
    if (!x->is_codes) return (const float *)(const void *)row;
#pragma GCC unroll 1
    for (int k = 0; k < width; k++) buffer[k] = value_at(row, k, 1);
    return buffer;
}

INLINE void add_pairs(float *restrict out, const float *restrict x, const int count) {
#pragma GCC unroll 1
    for (int i = 0; i < count; i++) out[i] = x[2 * i] + x[2 * i + 1];
}

/* out[h]: the sum of the D columns of a head; D is 4, 8 or 16. */
INLINE void fold_heads(float *out, const float *column, const int heads, const int D) {
    float halves[BLOCK / 2], quarters[BLOCK / 4], eighths[BLOCK / 8];
    add_pairs(halves, column, heads * D / 2);
    if (D == 4) {
        add_pairs(out, halves, heads);
        return;
    }
    add_pairs(quarters, halves, heads * D / 4);
    if (D == 8) {
        add_pairs(out, quarters, heads);
        return;
    }
    add_pairs(eighths, quarters, heads * D / 8);
    add_pairs(out, eighths, heads);
}

/* ---- sums of rows ---- */

/* Edges, in any order, and a weight of each. */
typedef struct {
    const int64_t *node, *ahead; /* neighbors, and those to ask for by now */
    const float *weight;
    int64_t step; /* from a weight to the next one */
    int64_t count;
} edges;

/* sum[k] += weight * row[column + k] over edges, for the D columns of a head. */
void add_head(float *sum, const rows *x, int64_t column, edges of, int64_t D);

/* The same for all heads, whose weights are side by side. */
void add_heads(float *sum, const rows *x, edges of, int64_t H, int64_t D);

/* ---- dot products ---- */

/* A row that is multiplied with many: as int16 with codes of its own kind, which gives exact integers, else as fp32,
 * where the products of the codes of narrow heads are exact, too. */
typedef struct {
    const float *values;  /* without scale */
    const int16_t *codes; /* or null */
} multiplied;

enum { EXACT_COLUMNS = 1 << 16 }; /* 2^16 * 128^2 < 2^31 */

/* Row `node` of `x`, to be multiplied with rows of `other`. */
INLINE multiplied widen(float **work, const rows *x, int64_t node, const rows *other, int64_t H, int64_t D) {
    const int64_t width = H * D;
    if (x->is_codes && other->is_codes && D <= EXACT_COLUMNS && !is_narrow(H, D)) {
        int16_t *codes = (int16_t *)(void *)take(work, width);
        const int8_t *row = (const int8_t *)x->data + node * x->stride;
        for (int64_t k = 0; k < width; k++) codes[k] = row[k];
        return (multiplied){0, codes};
    }
    float *values = take(work, width);
    load_values(values, x, node, width);
    return (multiplied){values, 0};
}

INLINE float fold(float *sum) {
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int l = 0; l < width; l++) sum[l] += sum[l + width];
    return sum[0];
}

INLINE float dot_values(const float *a, const char *row, int64_t D, const int is_codes) {
    float sum[LANES] = {0};
    int64_t k = 0;
    for (; k + LANES <= D; k += LANES)
#pragma GCC unroll 1 /* gcc unrolls a short loop before it has turned it into vectors, and then cannot */
        for (int l = 0; l < LANES; l++) sum[l] = multiply_add(a[k + l], value_at(row, k + l, is_codes), sum[l]);
    for (int l = 0; k + l < D; l++) sum[l] = multiply_add(a[k + l], value_at(row, k + l, is_codes), sum[l]);
    return fold(sum);
}

/* out[c, h]: the dot products of the heads of `own` and of the rows of `count` edges, without the scales of either. */
void dots(float *out, multiplied own, const rows *x, const int64_t *node, int64_t count, int64_t H, int64_t D);

/* out[h]: those of the heads of two rows, the other one of codes or floats. */
void dot_heads(float *out, const float *own, const void *other, int64_t is_codes, int64_t H, int64_t D);

#endif
