/* What stands around the dense product of int8 codes: codes as floats before it, scales, bias and rounding after it.
 * Oracle: qgnn.reference.matmul, matmul_requantize and matmul_dw. */

#include "common.h"

/* out[r] = codes[r] * factor[r], or the codes themselves without a factor: [R, K]. */
EXPORT void qgnn_matmul_floats(
    float *out, const int8_t *codes, const float *factor, int64_t R, int64_t K, int64_t stride_codes, int64_t threads
) {
    threads = useful_threads(R * K, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < R; r++) {
        const int8_t *row = codes + r * stride_codes;
        const float f = factor ? factor[r] : 1.0f;
        for (int64_t k = 0; k < K; k++) out[r * K + k] = (float)row[k] * f;
    }
}

INLINE float product_at(const void *product, int64_t i, const int integer) {
    return integer ? (float)((const int32_t *)product)[i] : ((const float *)product)[i];
}

INLINE void scale_rows(
    float *out, const void *product, const int integer, const float *x_scale, int64_t stride_scale,
    const float *w_scale, const float *bias, int64_t R, int64_t M, int64_t threads
) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < R; r++) {
        const float scale = x_scale[r * stride_scale];
        float *y = out + r * M;
        if (bias)
            for (int64_t m = 0; m < M; m++)
                y[m] = product_at(product, r * M + m, integer) * scale * w_scale[m] + bias[m];
        else
            for (int64_t m = 0; m < M; m++) y[m] = product_at(product, r * M + m, integer) * scale * w_scale[m];
    }
}

/* out = product * x_scale[r] * w_scale[m] + bias[m]: [R, M]; `product` is int32 or fp32, and may be `out` itself. */
EXPORT void qgnn_matmul_scale(
    float *out, const void *product, int64_t integer, const float *x_scale, int64_t stride_scale, const float *w_scale,
    const float *bias, int64_t R, int64_t M, int64_t threads
) {
    threads = useful_threads(R * M, threads);
    if (integer) scale_rows(out, product, 1, x_scale, stride_scale, w_scale, bias, R, M, threads);
    else scale_rows(out, product, 0, x_scale, stride_scale, w_scale, bias, R, M, threads);
}

/* Rows of product * w_scale as codes; `row` is the number of the first one, for the random bits. `product` is
 * overwritten, and computed from `integer_product` if there is one. */
EXPORT void qgnn_matmul_requantize(
    int8_t *codes, float *scale, float *product, const int32_t *integer_product, const float *x_scale,
    int64_t stride_scale, const float *w_scale, const int64_t *seed, int64_t stream_key, int64_t qmax, int64_t row,
    int64_t R, int64_t M, int64_t threads
) {
    const rounding rule = make_rounding(seed, stream_key, qmax);
    const int64_t pairs = pairs_per_row(M);
    threads = useful_threads(R * M, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < R; r++) {
        float *y = product + r * M;
        if (integer_product)
            for (int64_t m = 0; m < M; m++) y[m] = (float)integer_product[r * M + m] * w_scale[m];
        else
            for (int64_t m = 0; m < M; m++) y[m] *= w_scale[m];
        scale[r] = quantize_row(codes + r * M, y, row + r, M, pairs, rule) * x_scale[r * stride_scale];
    }
}

/* ---- codes that are mostly zero: bag-of-words features, rows after dropout ---- */

/* Whether at most `limit` codes are not zero in every `step`-th row of codes [R, K]. */
EXPORT void qgnn_matmul_is_sparse(
    int64_t *answer, const int8_t *codes, int64_t R, int64_t K, int64_t stride_codes, int64_t step, int64_t limit,
    int64_t threads
) {
    int64_t count = 0;
    for (int64_t r = 0; r < R && count <= limit; r += step) {
        const int8_t *row = codes + r * stride_codes;
        int32_t of_row = 0;
        for (int64_t k = 0; k < K; k++) of_row += row[k] != 0;
        count += of_row;
    }
    *answer = count <= limit;
}

enum { TERMS = 1024, COLUMNS = 64, WORD = 8 }; /* TERMS * 127 * 127 < 2^24: exact in fp32, in any order */

/* Columns of the nonzero codes of a row; returns how many there are. */
INLINE int64_t find_nonzeros(int32_t *found, const int8_t *row, int64_t K) {
    int64_t count = 0, k = 0;
    for (; k + WORD <= K; k += WORD) {
        uint64_t word;
        memcpy(&word, row + k, WORD);
        if (word == 0) continue;
        for (int64_t i = k; i < k + WORD; i++) {
            found[count] = (int32_t)i;
            count += row[i] != 0;
        }
    }
    for (; k < K; k++)
        if (row[k] != 0) found[count++] = (int32_t)k;
    return count;
}

/* Columns m .. m + width of one row of the product, in registers if `width` is constant. */
INLINE void add_terms(
    float *y, const int8_t *row, const int32_t *found, int64_t count, const float *w_t, int64_t M, const int width
) {
    int32_t total[COLUMNS] = {0};
    for (int64_t start = 0; start < count; start += TERMS) {
        const int64_t end = min_i64(start + TERMS, count);
        float sum[COLUMNS] = {0};
        for (int64_t i = start; i < end; i++) {
            const float code = row[found[i]];
            const float *w = w_t + found[i] * M;
            for (int m = 0; m < width; m++) sum[m] += code * w[m];
        }
        for (int m = 0; m < width; m++) total[m] += (int32_t)sum[m];
    }
    for (int m = 0; m < width; m++) y[m] = (float)total[m];
}

/* product = codes w_t for codes [R, K] and a weight of integers [K, M]; the sums are exact. `found` is [parts, K]. */
EXPORT void qgnn_matmul_nonzeros(
    float *product, int32_t *found, const int8_t *codes, const float *w_t, int64_t R, int64_t K, int64_t M,
    int64_t stride_codes, int64_t parts, int64_t threads
) {
    threads = useful_threads(R * K, threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < parts; part++)
        for (int64_t r = R * part / parts; r < R * (part + 1) / parts; r++) {
            const int8_t *row = codes + r * stride_codes;
            int32_t *columns = found + part * K;
            const int64_t count = find_nonzeros(columns, row, K);
            int64_t m = 0;
            for (; m + COLUMNS <= M; m += COLUMNS)
                add_terms(product + r * M + m, row, columns, count, w_t + m, M, COLUMNS);
            for (; m + 16 <= M; m += 16) add_terms(product + r * M + m, row, columns, count, w_t + m, M, 16);
            if (m < M) add_terms(product + r * M + m, row, columns, count, w_t + m, M, (int)(M - m));
        }
}

/* partial[p] = sum over the rows of part p of x[n]^T (factor[n] * g[n]): [parts, K, M], zeros when called. The parts do
 * not depend on the number of threads, so neither does their sum. `found` is [parts, K], `scaled` [parts, M]. */
EXPORT void qgnn_matmul_dw_nonzeros(
    float *partial, int32_t *found, float *scaled, const int8_t *g, const float *factor, const int8_t *x, int64_t N,
    int64_t M, int64_t K, int64_t stride_g, int64_t stride_x, int64_t parts, int64_t threads
) {
    threads = useful_threads(N * K, threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < parts; part++)
        for (int64_t n = N * part / parts; n < N * (part + 1) / parts; n++) {
            const int8_t *row = x + n * stride_x, *grad = g + n * stride_g;
            int32_t *columns = found + part * K;
            float *values = scaled + part * M;
            const int64_t count = find_nonzeros(columns, row, K);
            if (count == 0) continue;
            for (int64_t m = 0; m < M; m++) values[m] = (float)grad[m] * factor[n];
            for (int64_t i = 0; i < count; i++) {
                const float code = row[columns[i]];
                float *out = partial + (part * K + columns[i]) * M;
                for (int64_t m = 0; m < M; m++) out[m] += code * values[m];
            }
        }
}
