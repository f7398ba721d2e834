/* What the native kernels share: exports, index types, the split of rows over threads, and the rounding rule.
 *
 * Every exported function returns nothing, takes pointers, int64_t and float only, and ends with the number of threads:
 * library.py passes arguments by these rules. The rounding rule and its random bits are those of qgnn/rounding.py and
 * qgnn/rng.py, bit for bit; the file must be compiled without contraction and without -ffast-math.
 */
#ifndef QGNN_COMMON_H
#define QGNN_COMMON_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

INLINE int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---- indices: int32 or int64, decided once by the caller so that loops see a constant ---- */

INLINE int64_t load_index(const void *index, int64_t i, const int wide) {
    return wide ? ((const int64_t *)index)[i] : ((const int32_t *)index)[i];
}

/* ---- the bits of a float ---- */

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* 2^exponent, from -126 to 127. */
INLINE float power_of_two(int64_t exponent) { return float_of((uint32_t)(exponent + 127) << 23); }

/* In place of the exponent, biased by 127, of a block that is not finite. */
enum { NAN_EXPONENT = 255 };

/* The bits of a float as an integer that orders like it, and back. NaNs lie beyond the infinities. */
INLINE int32_t order_key(int32_t bits) { return bits ^ ((bits >> 31) & INT32_MAX); }

/* ---- elements of rows: int8 codes or floats ---- */

/* One multiply-add: fused in hardware, or none; a fused one in software would be far slower than its two roundings. */
INLINE float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__FP_FAST_FMAF)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

INLINE float value_at(const char *row, int64_t k, const int is_codes) {
    return is_codes ? (float)((const int8_t *)row)[k] : ((const float *)row)[k];
}

/* ---- threads ---- */

enum { WORK_PER_THREAD = 1 << 14, PARTS_PER_THREAD = 16 };

/* Threads worth waking for so many elements. */
INLINE int64_t useful_threads(int64_t elements, int64_t threads) {
    return max_i64(1, min_i64(threads, elements / WORK_PER_THREAD));
}

/* Parts to split N rows into: several a thread, so that an uneven one does not hold up the others. */
INLINE int64_t num_parts(int64_t N, int64_t threads) {
    return threads == 1 ? 1 : max_i64(1, min_i64(N, threads * PARTS_PER_THREAD));
}

/* First row of a part of a CSR graph, such that rows + edges of all parts are about equal; N for part == parts. A
 * test of `part` here would make GCC split the loop over the parts, and compile its body twice. */
INLINE int64_t part_of_rows(const void *indptr, int64_t N, int64_t part, int64_t parts, const int wide) {
    const int64_t total = load_index(indptr, N, wide) + N;
    const int64_t goal = total / parts * part + total % parts * part / parts; /* exact, and without overflow */
    int64_t low = 0, high = N;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (load_index(indptr, middle, wide) + middle < goal) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* ---- random bits ---- */

enum { ROUND_BLOCK = 512 }; /* columns that are rounded at a time */

/* 16 random bits a column: a hash serves the even column with its low half and the odd one with its high half. */
typedef union {
    uint32_t pair[ROUND_BLOCK / 2 + 1];
    uint16_t column[ROUND_BLOCK + 2];
} random_bits;

/* Column pairs of a row of F columns: half the next power of two. */
INLINE int64_t pairs_per_row(int64_t F) {
    int64_t pairs = 1;
    while (2 * pairs < F) pairs *= 2;
    return pairs;
}

/* Hashes of `count` counters from `first` on, all of one row. */
INLINE void hash_pairs(uint32_t *bits, uint64_t first, int64_t count, uint64_t seed) {
    const uint32_t low = (uint32_t)first, high = (uint32_t)(first >> 32);
    const uint32_t k0 = (uint32_t)seed + high * 0x9E3779B9u, k1 = (uint32_t)(seed >> 32) ^ (high * 0x85EBCA6Bu);
    uint32_t step = low * 0x9E3779B9u + k0;
    for (int64_t i = 0; i < count; i++, step += 0x9E3779B9u) {
        uint32_t h = step;
        h = (h ^ (h >> 16)) * 0x7FEB352Du;
        h = (h ^ (h >> 15) ^ k1) * 0x846CA68Bu;
        bits[i] = h ^ (h >> 16);
    }
}

/* ---- the rounding rule ---- */

typedef struct {
    uint64_t seed;
    int stochastic; /* 0: to nearest */
    float qmax;
} rounding;

INLINE rounding make_rounding(const int64_t *seed, int64_t stream_key, int64_t qmax) {
    return (rounding){seed ? (uint64_t)*seed ^ (uint64_t)stream_key : 0, seed != 0, (float)qmax};
}

/* max|x| as the bits of a float, which order like the values; a NaN is above infinity. */
INLINE uint32_t absmax_bits(const float *x, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = bits_of(x[i]) & 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* Scale of a group; `steps` becomes the inverse scale times 65536, or 0 if every code of the group is 0. */
INLINE float absmax_scale(uint32_t largest, float qmax, float *steps) {
    const float absmax = float_of(largest);
    const int is_finite = largest < 0x7F800000u, is_zero = !(absmax > 1e-30f);
    const float inverse = (float)(qmax * (1 - 0x1p-22)) / absmax * 65536.0f, scale = absmax * (float)(1.0 / qmax);
    *steps = is_zero || !is_finite ? 0.0f : inverse;
    return !is_finite ? NAN : is_zero ? 0.0f : scale;
}

/* Codes of columns first .. first + n of the row `row`, which has pairs_per_row(F) = `pairs`. */
INLINE void round_columns(
    int8_t *codes, const float *x, int64_t row, int64_t first, int64_t n, int64_t pairs, float steps, rounding rule
) {
    if (steps == 0.0f) {
        memset(codes, 0, (size_t)n);
        return;
    }
    random_bits bits;
    if (!rule.stochastic) {
        for (int64_t i = 0; i < n; i++) codes[i] = (int8_t)(((int32_t)(x[i] * steps) + (1 << 15)) >> 16);
        return;
    }
    for (int64_t start = 0; start < n; start += ROUND_BLOCK) {
        const int64_t count = min_i64(ROUND_BLOCK, n - start), column = first + start, odd = column & 1;
        hash_pairs(bits.pair, (uint64_t)(row * pairs + (column >> 1)), (odd + count + 1) / 2, rule.seed);
        for (int64_t i = 0; i < count; i++) /* read as part of the union: a pointer to `column` may not see `pair` */
            codes[start + i] = (int8_t)(((int32_t)(x[start + i] * steps) + (int32_t)bits.column[odd + i]) >> 16);
    }
}

/* Codes of a whole row, which gets one scale. */
INLINE float quantize_row(int8_t *codes, const float *x, int64_t row, int64_t F, int64_t pairs, rounding rule) {
    float steps;
    const float scale = absmax_scale(absmax_bits(x, F), rule.qmax, &steps);
    round_columns(codes, x, row, 0, F, pairs, steps, rule);
    return scale;
}

#endif
