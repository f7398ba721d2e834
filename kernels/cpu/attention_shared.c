/* What attention of all kinds calls, compiled once: see attention.h and attention_rows.h, where it is declared. */

#include "attention.h"

/* ---- sums and products of rows ---- */

INLINE void add_block(
    float *restrict sum, const char *data, int64_t stride, edges of, const int width, const int is_codes
) {
    float total[BLOCK];
    for (int k = 0; k < width; k++) total[k] = 0.0f;
    for (int64_t c = 0; c < of.count; c++) {
        const char *row = data + of.node[c] * stride, *next = data + of.ahead[c] * stride;
        for (int b = 0; b < width * (is_codes ? 1 : 4); b += LINE) __builtin_prefetch(next + b);
        const float weight = of.weight[c * of.step];
        for (int k = 0; k < width; k++) total[k] = multiply_add(weight, value_at(row, k, is_codes), total[k]);
    }
    for (int k = 0; k < width; k++) sum[k] += total[k];
}

INLINE void add_columns(
    float *restrict sum, const char *data, int64_t stride, edges of, int64_t D, const int is_codes
) {
    const int size = is_codes ? 1 : 4;
    int64_t k = 0;
    for (; k + BLOCK <= D; k += BLOCK) add_block(sum + k, data + k * size, stride, of, BLOCK, is_codes);
    if (k + 32 <= D) {
        add_block(sum + k, data + k * size, stride, of, 32, is_codes);
        k += 32;
    }
    if (k + 16 <= D) {
        add_block(sum + k, data + k * size, stride, of, 16, is_codes);
        k += 16;
    }
    if (k + 8 <= D) {
        add_block(sum + k, data + k * size, stride, of, 8, is_codes);
        k += 8;
    }
    if (k < D) add_block(sum + k, data + k * size, stride, of, (int)(D - k), is_codes);
}

void add_head(float *sum, const rows *x, int64_t column, edges of, int64_t D) {
    if (x->is_codes) add_columns(sum, x->data + column, x->stride, of, D, 1);
    else add_columns(sum, x->data + 4 * column, x->stride, of, D, 0);
}

typedef struct {
    float *out;
    const rows *x;
    edges of;
} sum_job;

INLINE void add_narrow(const void *job, int64_t h, const int heads, const int D) {
    const sum_job *a = job;
    const edges of = a->of;
    const int width = heads * D;
    float *out = a->out + h * D, total[BLOCK], buffer[BLOCK];
    for (int k = 0; k < width; k++) total[k] = 0.0f;
    for (int64_t c = 0; c < of.count; c++) {
        const float *value = float_block(buffer, a->x, of.node[c], of.ahead[c], h * D, width);
        const float *weights = of.weight + c * of.step + h;
        for (int i = 0; i < heads; i++) {
            const float weight = weights[i];
#pragma GCC unroll 1 /* as in attention_rows.h */
            for (int k = i * D; k < i * D + D; k++) total[k] = multiply_add(weight, value[k], total[k]);
        }
    }
    for (int k = 0; k < width; k++) out[k] += total[k];
}

void add_heads(float *sum, const rows *x, edges of, int64_t H, int64_t D) {
    const sum_job job = {sum, x, of};
    if (is_narrow(H, D)) for_blocks(add_narrow, &job, H, D);
    else
        for (int64_t h = 0; h < H; h++, of.weight++) add_head(sum + h * D, x, h * D, of, D);
}

typedef struct {
    float *x;
    const float *factor;
} scale_job;

INLINE void scale_block(const void *job, int64_t h, const int heads, const int D) {
    const scale_job *a = job;
    float *x = a->x + h * D;
    const float *factor = a->factor + h;
    for (int i = 0; i < heads; i++) {
        const float f = factor[i];
#pragma GCC unroll 1
        for (int k = 0; k < D; k++) x[i * D + k] *= f;
    }
}

void scale_heads(float *x, const float *factor, int64_t H, int64_t D) {
    const scale_job job = {x, factor};
    if (is_narrow(H, D)) for_blocks(scale_block, &job, H, D);
    else
        for (int64_t h = 0; h < H; h++) {
            const float f = factor[h];
            for (int64_t k = h * D; k < (h + 1) * D; k++) x[k] *= f;
        }
}

typedef struct {
    float *out;
    const float *own;
    const rows *x;
    const int64_t *node;
    int64_t count, H;
} product_job;

INLINE void multiply_narrow(const void *job, int64_t h, const int heads, const int D) {
    const product_job *a = job;
    const float *own = a->own + h * D;
    float product[BLOCK], buffer[BLOCK];
    for (int64_t c = 0; c < a->count; c++) {
        const float *value = float_block(buffer, a->x, a->node[c], a->node[c + AHEAD], h * D, heads * D);
#pragma GCC unroll 1
        for (int k = 0; k < heads * D; k++) product[k] = own[k] * value[k];
        fold_heads(a->out + c * a->H + h, product, heads, D);
    }
}

INLINE float dot_integers(const int16_t *a, const char *row, const int64_t D) {
    int32_t sum = 0;
    for (int64_t k = 0; k < D; k++) sum += (int32_t)a[k] * (int32_t)((const int8_t *)row)[k];
    return (float)sum;
}

INLINE void dots_of_width(
    float *out, multiplied own, const rows *x, const int64_t *node, int64_t count, int64_t H, const int64_t D,
    const int is_codes, const int is_exact
) {
    for (int64_t c = 0; c < count; c++) {
        const char *row = x->data + node[c] * x->stride, *next = x->data + node[c + AHEAD] * x->stride;
        for (int64_t b = 0; b < H * D * (is_codes ? 1 : 4); b += LINE) __builtin_prefetch(next + b);
        for (int64_t h = 0; h < H; h++) {
            const int64_t at = h * D;
            out[c * H + h] = is_exact ? dot_integers(own.codes + at, row + at, D)
                                      : dot_values(own.values + at, row + at * (is_codes ? 1 : 4), D, is_codes);
        }
    }
}

void dots(float *out, multiplied own, const rows *x, const int64_t *node, int64_t count, int64_t H, int64_t D) {
    if (is_narrow(H, D)) {
        const product_job job = {.out = out, .own = own.values, .x = x, .node = node, .count = count, .H = H};
        for_blocks(multiply_narrow, &job, H, D);
    } else if (!own.codes && x->is_codes) dots_of_width(out, own, x, node, count, H, D, 1, 0);
    else if (!own.codes) dots_of_width(out, own, x, node, count, H, D, 0, 0);
    else if (D == 8) dots_of_width(out, own, x, node, count, H, 8, 1, 1);
    else if (D == 16) dots_of_width(out, own, x, node, count, H, 16, 1, 1);
    else if (D == 32) dots_of_width(out, own, x, node, count, H, 32, 1, 1);
    else if (D == 64) dots_of_width(out, own, x, node, count, H, 64, 1, 1);
    else if (D == 128) dots_of_width(out, own, x, node, count, H, 128, 1, 1);
    else dots_of_width(out, own, x, node, count, H, D, 1, 1);
}

void dot_heads(float *out, const float *own, const void *other, int64_t is_codes, int64_t H, int64_t D) {
    const int64_t node[1 + AHEAD] = {0};
    const rows x = make_rows(other, 0, 0, is_codes);
    dots(out, (multiplied){own, 0}, &x, node, 1, H, D);
}

/* ---- chunks of edges ---- */

INLINE void gather_scales_of(
    float *restrict out, const float *scale, const int64_t *node, int64_t count, const int64_t H
) {
    for (int64_t i = 0; i < count; i++) {
        __builtin_prefetch(scale + node[i + AHEAD] * H);
        for (int64_t h = 0; h < H; h++) out[i * H + h] = scale[node[i] * H + h];
    }
}

void gather_scales(float *out, const rows *x, const int64_t *node, int64_t count, int64_t H) {
    if (!x->scale)
        for (int64_t i = 0; i < count * H; i++) out[i] = 1.0f;
    else WITH_HEADS(H, gather_scales_of, out, x->scale, node, count);
}

/* 0 or the factor for each weight; `bits` has room for hashes and both halves of their counters. */
static void keep_factors(
    float *restrict keep, uint32_t *restrict bits, const dropout *drop, const int64_t *position, int64_t count,
    int64_t H
) {
    const int64_t pairs = pairs_per_row(H), used = (H + 1) / 2, n = count * used;
    uint32_t *restrict low = bits + n, *restrict high = low + n;
    const uint32_t seed0 = (uint32_t)drop->seed, seed1 = (uint32_t)(drop->seed >> 32);
    for (int64_t c = 0; c < count; c++)
        for (int64_t j = 0; j < used; j++) {
            const uint64_t counter = (uint64_t)(position[c] * pairs + j);
            low[c * used + j] = (uint32_t)counter;
            high[c * used + j] = (uint32_t)(counter >> 32);
        }
    for (int64_t i = 0; i < n; i++) { /* the hash of hash_pairs */
        uint32_t h = low[i] * 0x9E3779B9u + (seed0 + high[i] * 0x9E3779B9u);
        h = (h ^ (h >> 16)) * 0x7FEB352Du;
        h = (h ^ (h >> 15) ^ seed1 ^ (high[i] * 0x85EBCA6Bu)) * 0x846CA68Bu;
        bits[i] = h ^ (h >> 16);
    }
    const uint32_t least = (uint32_t)drop->threshold; /* at most 2^16 */
    const float factor = drop->factor;
    if (H % 2 == 0) {
        for (int64_t i = 0; i < n; i++) {
            keep[2 * i] = (bits[i] & 0xFFFFu) >= least ? factor : 0.0f;
            keep[2 * i + 1] = bits[i] >> 16 >= least ? factor : 0.0f;
        }
        return;
    }
    for (int64_t c = 0; c < count; c++)
        for (int64_t h = 0; h < H; h++)
            keep[c * H + h] = (bits[c * used + h / 2] >> (h % 2 ? 16 : 0) & 0xFFFFu) >= least ? factor : 0.0f;
}

void drop_weights(float *weight, const chunk *c, const walk *a, int64_t count) {
    if (!a->drop.threshold) return;
    keep_factors(c->keep, c->bits, &a->drop, c->position, count, a->H);
    for (int64_t i = 0; i < count * a->H; i++) weight[i] *= c->keep[i];
}

INLINE void weigh_heads(
    float *restrict score, int64_t count, float *restrict largest, float *restrict sum, float *restrict shrink,
    float *restrict part, const int64_t H
) {
    for (int64_t h = 0; h < H; h++) part[h] = largest[h];
    for (int64_t c = 0; c < count; c++) /* a NaN is lost here, and comes back in the sum */
        for (int64_t h = 0; h < H; h++) part[h] = score[c * H + h] > part[h] ? score[c * H + h] : part[h];
    for (int64_t h = 0; h < H; h++) {
        shrink[h] = part[h] == largest[h] ? 1.0f : exp_fp32(largest[h] - part[h]);
        largest[h] = part[h];
        part[h] = part[h] == -INFINITY ? 0.0f : part[h];
    }
    for (int64_t c = 0; c < count; c++)
        for (int64_t h = 0; h < H; h++) score[c * H + h] -= part[h];
    for (int64_t i = 0; i < count * H; i++) score[i] = exp_fp32(score[i]);
    for (int64_t h = 0; h < H; h++) part[h] = 0.0f;
    for (int64_t c = 0; c < count; c++)
        for (int64_t h = 0; h < H; h++) part[h] += score[c * H + h];
    for (int64_t h = 0; h < H; h++) sum[h] = sum[h] * shrink[h] + part[h];
}

void weigh(float *score, int64_t count, float *largest, float *sum, float *shrink, float *part, int64_t H) {
    WITH_HEADS(H, weigh_heads, score, count, largest, sum, shrink, part);
}

void add_edge_rows(float *sum, const float *weight, const chunk *c, const walk *a, int64_t count) {
    const rows x = rows_of_edges(a);
    add_heads(sum, &x, (edges){c->position, c->position, weight, a->H, count}, a->H, a->D);
}

void round_gradient(const walk *a, int64_t n) {
    const int64_t H = a->H, D = a->D;
    const uint64_t first = (uint64_t)(n * H * D / 2), last = first + (uint64_t)(H * D / 2);
    if (a->codes && is_narrow(H, D) && first >> 32 == last >> 32) {
        float *scales = a->record + n * 4 * H + 3 * H;
        const narrow_row row = {a->codes + n * H * D, scales, a->grad + n * a->stride_grad, first, a->rule};
        quantize_narrow(&row, H, D);
        return;
    }
    for (int64_t h = 0; h < H; h++) {
        const int64_t row = n * H + h;
        const float *grad = a->grad + n * a->stride_grad + h * D;
        float *scale = a->record + n * 4 * H + 3 * H + h;
        *scale = a->codes ? quantize_row(a->codes + row * D, grad, row, D, pairs_per_row(D), a->rule) : 1.0f;
    }
}

INLINE void read_records_of(const chunk *c, const walk *a, int64_t count, const int64_t H) {
    for (int64_t i = 0; i < count; i++) {
        const float *record = a->record + c->node[i] * 4 * H, *next = a->record + c->node[i + AHEAD] * 4 * H;
        for (int64_t b = 0; b < 4 * H; b += LINE / 4) __builtin_prefetch(next + b);
        for (int64_t h = 0; h < H; h++) c->score[i * H + h] = record[h];
        for (int64_t h = 0; h < H; h++) c->weight[i * H + h] = record[H + h];
        for (int64_t h = 0; h < H; h++) c->product[i * H + h] = record[2 * H + h];
        for (int64_t h = 0; h < H; h++) c->scale[i * H + h] = record[3 * H + h];
    }
}

void read_records(const chunk *c, const walk *a, int64_t count) {
    WITH_HEADS(a->H, read_records_of, c, a, count);
}

void for_rows(
    row_task task, const void *job, const walk *a, int64_t fixed_parts, float *work, int64_t work_size, int64_t threads
) {
    threads = useful_threads((a->E + a->N) * a->H * a->D, threads);
    const int64_t parts = fixed_parts ? fixed_parts : num_parts(a->N, threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < parts; part++) {
        const int64_t first = part_of_rows(a->indptr, a->N, part, parts, (int)a->wide);
        const int64_t end = part_of_rows(a->indptr, a->N, part + 1, parts, (int)a->wide);
        float *own = work + thread_number() * work_size;
        for (int64_t n = first; n < end; n++) task(job, n, part, own);
    }
}
