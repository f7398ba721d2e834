/* Columns of a matrix whose values are adjacent in memory become rows, in fp32: tiles of 4 by 4, in vectors of 16
 * bytes, which all processors have. */
#ifndef QGNN_TRANSPOSE_H
#define QGNN_TRANSPOSE_H

#include "half.h"

enum { MAX_ROWS = 64, LINES_AHEAD = 8, CACHE_LINE = 64 };

typedef float four __attribute__((vector_size(16)));
typedef int32_t four_indices __attribute__((vector_size(16)));

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (four_indices){__VA_ARGS__})
#endif

/* n adjacent values: where they lie, or a copy in fp32. */
INLINE const float *line_of(float *restrict copy, const void *x, int type, int64_t start, int64_t n) {
    if (type == FP32) return (const float *)x + start;
    if (type == BF16)
        for (int64_t i = 0; i < n; i++) copy[i] = load_float(x, start + i, BF16);
    else
        for (int64_t i = 0; i < n; i++) copy[i] = load_float(x, start + i, FP16);
    return copy;
}

/* Values i .. i + 4 of four lines, as four rows `pitch` apart. */
INLINE void transpose(float *out, int64_t pitch, const float *const line[4], int64_t i) {
    four in[4];
    for (int j = 0; j < 4; j++) memcpy(in + j, line[j] + i, sizeof(four));
    const four low01 = SHUFFLE(in[0], in[1], 0, 4, 1, 5), high01 = SHUFFLE(in[0], in[1], 2, 6, 3, 7);
    const four low23 = SHUFFLE(in[2], in[3], 0, 4, 1, 5), high23 = SHUFFLE(in[2], in[3], 2, 6, 3, 7);
    const four row[4] = {
        SHUFFLE(low01, low23, 0, 1, 4, 5), SHUFFLE(low01, low23, 2, 3, 6, 7),
        SHUFFLE(high01, high23, 0, 1, 4, 5), SHUFFLE(high01, high23, 2, 3, 6, 7),
    };
    for (int j = 0; j < 4; j++) memcpy(out + j * pitch, row + j, sizeof(four));
}

/* The first values of n lines that lie `stride` values apart, as `rows` rows, MAX_ROWS at most, `pitch` apart. Columns
 * behind the last one, up to a multiple of 4, are copies of it. */
INLINE void copy_lines(
    float *restrict copy, int64_t pitch, const void *x, int type, int64_t start, int64_t stride, int64_t rows, int64_t n
) {
    float lines[4][MAX_ROWS];
    const float *line[4];
    for (int64_t k = 0; k < n; k += 4) {
        for (int64_t j = 0; j < 4; j++)
            line[j] = line_of(lines[j], x, type, start + min_i64(k + j, n - 1) * stride, rows);
        for (int64_t j = 0; j < 4; j++) { /* lines may lie pages apart, where no processor looks by itself */
            const int64_t size = type == FP32 ? 4 : 2, ahead = min_i64(k + j + LINES_AHEAD, n - 1);
            const char *next = (const char *)x + (start + ahead * stride) * size;
            for (int64_t at = 0; at < rows * size; at += CACHE_LINE) __builtin_prefetch(next + at);
        }
        int64_t i = 0;
        for (; i + 4 <= rows; i += 4) transpose(copy + i * pitch + k, pitch, line, i);
        for (; i < rows; i++)
            for (int64_t j = 0; j < 4; j++) copy[i * pitch + k + j] = line[j][i];
    }
}

#endif
