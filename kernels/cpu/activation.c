/* A function of each element of a matrix [N, F], dropout behind it, and what is kept of them.
 * Oracle: qgnn.reference.activation, activation_backward. */

#include "epilogue.h"
#include "exp.h"

enum { LEAKY_RELU = 2, ELU = 3 };

/* ELU in place, and its derivative. */
INLINE void elu_columns(float *restrict y, float *restrict derivative, float alpha, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float x = y[i] < 0.0f ? y[i] : 0.0f; /* a NaN is not negative */
        x = x < -88.0f ? -88.0f : x;
        int32_t exponent;
        const float q = exp_reduced(x, &exponent), power = float_of((uint32_t)(exponent + 127) << 23);
        const float less_one = q * power + (power - 1.0f), grown = (q + 1.0f) * power;
        derivative[i] = y[i] <= 0.0f ? grown * alpha : 1.0f;
        y[i] = y[i] <= 0.0f ? less_one * alpha : y[i];
    }
}

/* Codes of a derivative: columns first .. first + n of the row `row`, n <= ROUND_BLOCK. */
INLINE void round_derivative(
    uint8_t *codes, const float *derivative, int64_t row, int64_t first, int64_t n, int64_t F, float steps,
    rounding rule
) {
    const float most = 255 * 65536.0f;
    random_bits bits;
    if (rule.stochastic)
        hash_pairs(bits.pair, (uint64_t)(row * pairs_per_row(F) + first / 2), (n + 1) / 2, rule.seed);
    else for (int64_t i = 0; i < n; i++) bits.column[i] = 1 << 15;
    for (int64_t i = 0; i < n; i++) {
        const float scaled = derivative[i] * steps;
        codes[i] = (uint8_t)(((int32_t)(scaled > most ? most : scaled) + (int32_t)bits.column[i]) >> 16);
    }
}

/* The bits of what is positive, and leaky ReLU in place. */
INLINE void leaky_columns(float *y, uint8_t *mask, float slope, int64_t n) {
    uint8_t positive[ROUND_BLOCK + 8];
    for (int64_t i = 0; i < n; i++) positive[i] = y[i] > 0.0f;
    for (int64_t i = 0; i < n; i++) y[i] = y[i] > 0.0f ? y[i] : y[i] * slope;
    if (!mask) return;
    memset(positive + n, 0, 8);
    for (int64_t i = 0; i < n; i += 8) mask[i / 8] = pack8(positive + i);
}

/* `bias`, `residual`, and what is kept may be null: `mask` [N, ceil(F / 8)], and of ELU's derivative [N, F] `codes` or
 * `values`. A row is dealt with in blocks of columns, all steps of one while it lies in the first-level cache. */
EXPORT void qgnn_activation_forward(
    float *y, uint8_t *mask, uint8_t *codes, float *values, const float *x, const float *bias, const float *residual,
    int64_t kind, float slope, int64_t relu, int64_t threshold, const int64_t *dropout_seed, int64_t dropout_key,
    float factor, float steps, const int64_t *seed, int64_t stream_key, int64_t N, int64_t F, int64_t stride_x,
    int64_t stride_residual, int64_t threads
) {
    const activation last =
        make_activation(kind == LEAKY_RELU ? 0 : mask, relu, threshold, dropout_seed, dropout_key, factor);
    const rounding rule = make_rounding(seed, stream_key, 0);
    const int does_nothing = !relu && !threshold && !last.mask;
    activation unscaled = last;
    unscaled.factor = 1.0f;
    threads = useful_threads(N * F, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++)
        for (int64_t first = 0; first < F; first += ROUND_BLOCK) {
            const int64_t count = min_i64(ROUND_BLOCK, F - first);
            const float *in = x + n * stride_x + first;
            float *out = y + n * F + first, derivative[ROUND_BLOCK];
            for (int64_t i = 0; i < count; i++) out[i] = in[i];
            if (bias)
                for (int64_t i = 0; i < count; i++) out[i] += bias[first + i];
            if (residual)
                for (int64_t i = 0; i < count; i++) out[i] += residual[n * stride_residual + first + i];
            if (kind == LEAKY_RELU) leaky_columns(out, mask ? mask + n * mask_width(F) + first / 8 : 0, slope, count);
            if (kind == ELU) {
                elu_columns(out, derivative, slope, count);
                if (codes) {
                    activate_columns(derivative, unscaled, n, first, count, F);
                    round_derivative(codes + n * F + first, derivative, n, first, count, F, steps, rule);
                } else if (values) {
                    activate_columns(derivative, last, n, first, count, F);
                    memcpy(values + n * F + first, derivative, (size_t)count * sizeof(float));
                }
            }
            if (!does_nothing) activate_columns(out, last, n, first, count, F);
        }
}

/* Eight values where their bit is set, and `slope` times them elsewhere, in place: like mask8, by masks of bits. */
INLINE void leaky8(float *y, uint32_t byte, float slope) {
    uint32_t high[8], low[8];
    float scaled[8];
    for (int b = 0; b < 8; b++) scaled[b] = y[b] * slope;
    memcpy(high, y, sizeof high);
    memcpy(low, scaled, sizeof low);
    for (uint32_t b = 0; b < 8; b++) {
        const uint32_t set = byte & (1u << b) ? 0xFFFFFFFFu : 0u;
        high[b] = (high[b] & set) | (low[b] & ~set);
    }
    memcpy(y, high, sizeof high);
}

/* The gradient of a row where its bits are set, and `slope` times it elsewhere. */
INLINE void leaky_row(float *y, const uint8_t *mask, float slope, int64_t F) {
    for (int64_t f = 0; f + 8 <= F; f += 8) leaky8(y + f, mask[f / 8], slope);
    for (int64_t f = F / 8 * 8; f < F; f++) y[f] = mask[f / 8] >> f % 8 & 1 ? y[f] : y[f] * slope;
}

/* `mask`, `codes`, `values` and `sums` may be null; sums of columns go to `sums` [parts, F], one row a part of the rows,
 * whatever the number of threads. */
EXPORT void qgnn_activation_backward(
    float *dx, float *sums, const float *grad, const uint8_t *mask, const uint8_t *codes, const float *values,
    float slope, float factor, int64_t threshold, const int64_t *dropout_seed, int64_t dropout_key, int64_t N,
    int64_t F, int64_t stride_grad, int64_t parts, int64_t threads
) {
    const activation dropout = make_activation(0, 0, threshold, dropout_seed, dropout_key, 1.0f);
    threads = useful_threads(N * F, threads);
    if (!sums) parts = num_parts(N, threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < parts; part++) {
        float *sum = sums ? sums + part * F : 0;
        if (sum) memset(sum, 0, (size_t)F * sizeof(float));
        for (int64_t n = N * part / parts; n < N * (part + 1) / parts; n++) {
            const float *in = grad + n * stride_grad;
            float *out = dx + n * F;
            if (codes)
                for (int64_t f = 0; f < F; f++) out[f] = in[f] * ((float)codes[n * F + f] * factor);
            else if (values)
                for (int64_t f = 0; f < F; f++) out[f] = in[f] * (values[n * F + f] * factor);
            else if (mask && slope == 0.0f) mask_row(out, in, mask + n * mask_width(F), factor, F);
            else
                for (int64_t f = 0; f < F; f++) out[f] = in[f] * factor;
            if (mask && slope != 0.0f) leaky_row(out, mask + n * mask_width(F), slope, F);
            if (threshold) activate_columns(out, dropout, n, 0, F, F);
            if (sum)
                for (int64_t f = 0; f < F; f++) sum[f] += out[f];
        }
    }
}
