/* ReLU and dropout as the last step of a row, and the bits that remember them; oracle: qgnn.reference.activation. */
#ifndef QGNN_EPILOGUE_H
#define QGNN_EPILOGUE_H

#include "common.h"

typedef struct {
    uint8_t *mask; /* [N, ceil(F / 8)], or null */
    int relu;
    int64_t threshold; /* 0: no dropout */
    uint64_t seed;
    float factor;
} activation;

INLINE activation make_activation(
    uint8_t *mask, int64_t relu, int64_t threshold, const int64_t *seed, int64_t stream_key, float factor
) {
    const uint64_t effective = seed ? (uint64_t)*seed ^ (uint64_t)stream_key : 0;
    return (activation){mask, (int)relu, threshold, effective, factor};
}

INLINE int64_t mask_width(int64_t F) { return (F + 7) / 8; }

/* Eight bytes of 0 or 1 as the bits of one. */
INLINE uint8_t pack8(const uint8_t *passes) {
    uint64_t word;
    memcpy(&word, passes, 8);
    return (uint8_t)((word * 0x0102040810204080u) >> 56);
}

/* Columns first .. first + n of the row `row` of F columns, in place; `first` is a multiple of 8. */
INLINE void activate_columns(float *y, activation a, int64_t row, int64_t first, int64_t n, int64_t F) {
    const int64_t pairs = pairs_per_row(F);
    random_bits bits;
    uint8_t passes[ROUND_BLOCK + 8];
    for (int64_t start = 0; start < n; start += ROUND_BLOCK) {
        const int64_t count = min_i64(ROUND_BLOCK, n - start), column = first + start;
        float *block = y + start;
        if (a.threshold) {
            hash_pairs(bits.pair, (uint64_t)(row * pairs + column / 2), (count + 1) / 2, a.seed);
            for (int64_t i = 0; i < count; i++) passes[i] = (int64_t)bits.column[i] >= a.threshold;
        } else memset(passes, 1, (size_t)count);
        if (a.relu)
            for (int64_t i = 0; i < count; i++) passes[i] &= !(block[i] <= 0.0f); /* a NaN passes */
        for (int64_t i = 0; i < count; i++) block[i] = passes[i] ? block[i] * a.factor : 0.0f;
        if (!a.mask) continue;
        memset(passes + count, 0, 8);
        uint8_t *byte = a.mask + row * mask_width(F) + column / 8;
        for (int64_t i = 0; i < count; i += 8) byte[i / 8] = pack8(passes + i);
    }
}

/* Eight values where their bit is set, times `factor`, and 0 elsewhere: by masks of bits, which become vectors. */
INLINE void mask8(float *restrict out, const float *restrict grad, uint32_t byte, float factor) {
    uint32_t bits[8];
    float value[8];
    for (int b = 0; b < 8; b++) value[b] = grad[b] * factor;
    memcpy(bits, value, sizeof bits);
    for (uint32_t b = 0; b < 8; b++) bits[b] &= byte & (1u << b) ? 0xFFFFFFFFu : 0u;
    memcpy(out, bits, sizeof bits);
}

/* The gradient before an activation of a whole row: `grad` where its bit is set, times `factor`, and 0 elsewhere. */
INLINE void mask_row(float *restrict out, const float *restrict grad, const uint8_t *mask, float factor, int64_t F) {
    for (int64_t f = 0; f + 8 <= F; f += 8) mask8(out + f, grad + f, mask[f / 8], factor);
    for (int64_t f = F / 8 * 8; f < F; f++) out[f] = mask[f / 8] >> f % 8 & 1 ? grad[f] * factor : 0.0f;
}

#endif
