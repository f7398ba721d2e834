/* Rows of narrow groups of columns, as of the heads of GAT: a loop over one group is too short to become vectors, so
 * that several are taken at a time, as a block of columns. */
#ifndef QGNN_NARROW_H
#define QGNN_NARROW_H

#include "common.h"

enum {
    BLOCK = 64, /* columns that are summed in registers */
    PART = 16   /* columns of a smaller block, where there are no BLOCK left */
};

INLINE int is_narrow(int64_t H, int64_t D) { return H > 1 && (D == 4 || D == 8 || D == 16); }

/* What is done with `heads` heads of D columns, from head h on. */
typedef void (*block_task)(const void *job, int64_t h, const int heads, const int D);

INLINE void for_blocks_of(block_task task, const void *job, int64_t H, const int D) {
    int64_t h = 0;
    for (; h + BLOCK / D <= H; h += BLOCK / D) task(job, h, BLOCK / D, D);
    for (; h + PART / D <= H; h += PART / D) task(job, h, PART / D, D);
    for (; h < H && D < PART; h++) task(job, h, 1, D);
}

/* All of H narrow heads, in blocks of columns. The task, inlined, has loops of constant lengths. */
INLINE void for_blocks(block_task task, const void *job, int64_t H, int64_t D) {
    if (D == 4) for_blocks_of(task, job, H, 4);
    else if (D == 8) for_blocks_of(task, job, H, 8);
    else for_blocks_of(task, job, H, 16);
}

/* ---- quantization with a scale a group ---- */

typedef struct {
    int8_t *codes;
    float *scale;
    const float *x;
    uint64_t first; /* counter of the first pair of columns */
    rounding rule;
} narrow_row;

INLINE void larger_of_pairs(uint32_t *restrict out, const uint32_t *restrict x, const int count) {
#pragma GCC unroll 1
    for (int i = 0; i < count; i++) out[i] = x[2 * i] > x[2 * i + 1] ? x[2 * i] : x[2 * i + 1];
}

INLINE void round_block(const void *row, int64_t h, const int heads, const int D) {
    const narrow_row *r = row;
    const int width = heads * D;
    const float *x = r->x + h * D;
    uint32_t largest[BLOCK], halves[BLOCK / 2];
    float steps[BLOCK / 4], scale[BLOCK / 4], scaled[BLOCK];
    random_bits bits;
    for (int k = 0; k < width; k++) largest[k] = bits_of(x[k]) & 0x7FFFFFFFu;
    larger_of_pairs(halves, largest, width / 2);
    larger_of_pairs(largest, halves, width / 4);
    if (D >= 8) {
        larger_of_pairs(halves, largest, width / 8);
        memcpy(largest, halves, sizeof halves);
    }
    if (D == 16) larger_of_pairs(largest, halves, heads);
    for (int i = 0; i < heads; i++) scale[i] = absmax_scale(largest[i], r->rule.qmax, steps + i);
    memcpy(r->scale + h, scale, (size_t)heads * sizeof(float));
    for (int i = 0; i < heads; i++)
#pragma GCC unroll 1 /* gcc unrolls a short loop before it has turned it into vectors, and then cannot */
        for (int k = i * D; k < i * D + D; k++) scaled[k] = steps[i] == 0.0f ? 0.0f : x[k] * steps[i];
    if (r->rule.stochastic) hash_pairs(bits.pair, r->first + (uint64_t)(h * D / 2), width / 2, r->rule.seed);
    else memset(bits.pair, 0, (size_t)width * sizeof(uint16_t));
    const int32_t half = r->rule.stochastic ? 0 : 1 << 15;
    int8_t *codes = r->codes + h * D;
    for (int k = 0; k < width; k++)
        codes[k] = (int8_t)(((int32_t)scaled[k] + (int32_t)bits.column[k] + half) >> 16);
}

/* Codes of a row of H narrow groups of D columns, which get a scale each. No carry goes into the high half of its
 * counters. */
INLINE void quantize_narrow(const narrow_row *row, int64_t H, int64_t D) { for_blocks(round_block, row, H, D); }

#endif
