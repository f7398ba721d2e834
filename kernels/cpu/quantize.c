/* Absmax quantization of a matrix [N, F] to int8 codes.
 * Oracle: qgnn.reference.quantize, quantize_grad. */

#include "epilogue.h"
#include "narrow.h"

/* One scale for each `group` columns of a row. */
EXPORT void qgnn_quantize_groups(
    int8_t *codes, float *scale, const float *x, const int64_t *seed, int64_t stream_key, int64_t qmax, int64_t N,
    int64_t F, int64_t stride_x, int64_t group, int64_t threads
) {
    const rounding rule = make_rounding(seed, stream_key, qmax);
    const int64_t pairs = pairs_per_row(F), groups = (F + group - 1) / group;
    threads = useful_threads(N * F, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++) {
        if (is_narrow(groups, group) && F % group == 0) {
            const narrow_row row = {codes + n * F, scale + n * groups, x + n * stride_x, (uint64_t)(n * pairs), rule};
            quantize_narrow(&row, groups, group);
            continue;
        }
        for (int64_t g = 0; g < groups; g++) {
            const int64_t first = g * group, width = min_i64(group, F - first);
            const float *values = x + n * stride_x + first;
            float steps;
            scale[n * groups + g] = absmax_scale(absmax_bits(values, width), rule.qmax, &steps);
            round_columns(codes + n * F + first, values, n, first, width, pairs, steps, rule);
        }
    }
}

/* One scale for the matrix. */
EXPORT void qgnn_quantize_tensor(
    int8_t *codes, float *scale, const float *x, const int64_t *seed, int64_t stream_key, int64_t qmax, int64_t N,
    int64_t F, int64_t stride_x, int64_t threads
) {
    const rounding rule = make_rounding(seed, stream_key, qmax);
    const int64_t pairs = pairs_per_row(F);
    threads = useful_threads(N * F, threads);
    uint32_t largest = 0;
#pragma omp parallel for schedule(static) reduction(max : largest) num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++) {
        const uint32_t row_largest = absmax_bits(x + n * stride_x, F);
        largest = row_largest > largest ? row_largest : largest;
    }
    float steps;
    *scale = absmax_scale(largest, rule.qmax, &steps);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++)
        round_columns(codes + n * F, x + n * stride_x, n, 0, F, pairs, steps, rule);
}

/* Codes of the gradient before an activation, a scale a row. `mask` and `sums` may be null; sums of columns go to
 * `sums` [parts, F], one row a part of the rows, whatever the number of threads. `rows` [parts, F] is work space. */
EXPORT void qgnn_quantize_grad(
    int8_t *codes, float *scale, float *sums, float *rows, const float *grad, const uint8_t *mask, float factor,
    const int64_t *seed, int64_t stream_key, int64_t qmax, int64_t N, int64_t F, int64_t stride_grad, int64_t parts,
    int64_t threads
) {
    const rounding rule = make_rounding(seed, stream_key, qmax);
    const int64_t pairs = pairs_per_row(F);
    threads = useful_threads(N * F, threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < parts; part++) {
        float *masked = rows + part * F, *sum = sums ? sums + part * F : 0;
        if (sum) memset(sum, 0, (size_t)F * sizeof(float));
        for (int64_t n = N * part / parts; n < N * (part + 1) / parts; n++) {
            const float *row = grad + n * stride_grad;
            if (mask) {
                mask_row(masked, row, mask + n * mask_width(F), factor, F);
                row = masked;
            }
            if (sum)
                for (int64_t f = 0; f < F; f++) sum[f] += row[f];
            scale[n] = quantize_row(codes + n * F, row, n, F, pairs, rule);
        }
    }
}
