/* What the passes of GATv2 make of the hidden rows of edges, leaky(target + source + edge): scores, and sums. */
#ifndef QGNN_ATTENTION_GATV2_H
#define QGNN_ATTENTION_GATV2_H

#include "attention.h"

enum { HALF_BLOCK = 32 /* columns of two sums in registers */ };

typedef struct {
    walk walk;
    rows target, source; /* [N, H * D], [S, H * D] */
    const float *att;    /* [H, D] */
    float slope;
    float *d_target, *d_source, *d_edge; /* [N, H * D], [S, H * D], [E, H * D] or null */
    float *d_att;                        /* [parts, H * D] */
} job;

/* ---- scores ---- */

/* h of a column: the same additions in the same order from both ends, so that passes see the same sign. */
INLINE float hidden(
    float own, const char *row, int64_t k, float scale, const float *edge, const int is_codes, const int has_edge
) {
    const float h = value_at(row, k, is_codes) * scale + own;
    return has_edge ? h + edge[k] : h;
}

INLINE float score_of_head(
    const float *own, const char *row, float scale, const float *edge, const float *att, float slope, int64_t D,
    const int is_codes, const int has_edge
) {
    float sum[LANES] = {0};
    int64_t k = 0;
    for (; k + LANES <= D; k += LANES)
#pragma GCC unroll 1 /* as in attention_rows.h */
        for (int l = 0; l < LANES; l++) {
            const float h = hidden(own[k + l], row, k + l, scale, edge, is_codes, has_edge);
            sum[l] = multiply_add(h > 0.0f ? h : h * slope, att[k + l], sum[l]);
        }
    for (int l = 0; k + l < D; l++) {
        const float h = hidden(own[k + l], row, k + l, scale, edge, is_codes, has_edge);
        sum[l] = multiply_add(h > 0.0f ? h : h * slope, att[k + l], sum[l]);
    }
    return fold(sum);
}

INLINE void add_scores(
    const chunk *c, const job *a, const float *own, const rows *x, int64_t count, const int is_codes, const int has_edge
) {
    const int64_t H = a->walk.H, D = a->walk.D, size = is_codes ? 1 : 4;
    for (int64_t i = 0; i < count; i++) {
        const char *row = x->data + c->node[i] * x->stride;
        const float *edge = has_edge ? a->walk.edge_x + c->position[i] * H * D : 0;
        fetch_row(x, c->node[i + AHEAD], H * D);
        for (int64_t h = 0; h < H; h++) {
            const int64_t at = h * D;
            c->score[i * H + h] = score_of_head(
                own + at, row + at * size, c->scale[i * H + h], has_edge ? edge + at : 0, a->att + at, a->slope, D,
                is_codes, has_edge
            );
        }
    }
}

typedef struct {
    const chunk *c;
    const job *a;
    const float *own;
    const rows *x;
    int64_t count;
    float *slopes, *products; /* results of add_hidden */
} block_job;

/* h of edge i in a block of narrow heads, and asks for the row of edge i + ahead. */
INLINE void hidden_block(
    float *out, const block_job *b, int64_t i, int64_t ahead, int64_t h, const int heads, const int D
) {
    const walk *w = &b->a->walk;
    const int64_t H = w->H, column = h * D;
    float buffer[BLOCK];
    const float *value = float_block(buffer, b->x, b->c->node[i], b->c->node[i + ahead], column, heads * D);
    const float *own = b->own + column, *scale = b->c->scale + i * H + h;
    for (int j = 0; j < heads; j++)
#pragma GCC unroll 1 /* as in attention_rows.h */
        for (int k = j * D; k < j * D + D; k++) out[k] = value[k] * scale[j] + own[k];
    if (!w->edge_x) return;
    const float *edge = w->edge_x + b->c->position[i] * H * D + column;
    for (int k = 0; k < heads * D; k++) out[k] += edge[k];
}

INLINE void score_narrow(const void *job_, int64_t h, const int heads, const int D) {
    const block_job *b = job_;
    const int64_t H = b->a->walk.H;
    const float *att = b->a->att + h * D, slope = b->a->slope;
    float product[BLOCK];
    for (int64_t i = 0; i < b->count; i++) {
        hidden_block(product, b, i, AHEAD, h, heads, D);
#pragma GCC unroll 1
        for (int k = 0; k < heads * D; k++) product[k] = (product[k] > 0.0f ? product[k] : product[k] * slope) * att[k];
        fold_heads(b->c->score + i * H + h, product, heads, D);
    }
}

/* Scores of the edges of a row whose values are `own`; `scale` holds those of the neighbors' rows. */
LEAF void score_edges(const chunk *c, const job *a, const float *own, const rows *x, int64_t count) {
    const block_job narrow = {.c = c, .a = a, .own = own, .x = x, .count = count};
    if (is_narrow(a->walk.H, a->walk.D)) for_blocks(score_narrow, &narrow, a->walk.H, a->walk.D);
    else if (x->is_codes && a->walk.edge_x) add_scores(c, a, own, x, count, 1, 1);
    else if (x->is_codes) add_scores(c, a, own, x, count, 1, 0);
    else if (a->walk.edge_x) add_scores(c, a, own, x, count, 0, 1);
    else add_scores(c, a, own, x, count, 0, 0);
}

/* ---- sums ---- */

/* Sums over edges of de * leaky'(h) and, if wanted, of de * leaky(h), for `width` columns of a head. */
INLINE void add_hidden_block(
    float *restrict slopes, float *restrict products, const float *restrict own, const chunk *c, const job *a,
    const rows *x, int64_t h, int64_t column, int64_t count, const int width, const int is_codes, const int has_edge,
    const int has_products
) {
    const int64_t H = a->walk.H;
    float total[HALF_BLOCK], total_product[HALF_BLOCK];
    for (int k = 0; k < width; k++) total[k] = total_product[k] = 0.0f;
    const char *data = x->data + column * (is_codes ? 1 : 4);
    for (int64_t i = 0; i < count; i++) {
        const char *row = data + c->node[i] * x->stride;
        const float *edge = has_edge ? a->walk.edge_x + c->position[i] * H * a->walk.D + column : 0;
        const float scale = c->scale[i * H + h], above = c->t[i * H + h], below = above * a->slope;
        __builtin_prefetch(data + c->node[i + 2] * x->stride); /* and gcc does not interleave edges, in scalar code */
#pragma GCC unroll 1 /* as in attention_rows.h */
        for (int k = 0; k < width; k++) {
            const float value = hidden(own[column + k], row, k, scale, edge, is_codes, has_edge);
            const float slope = choose(value, above, below);
            total[k] += slope;
            if (has_products) total_product[k] = multiply_add(slope, value, total_product[k]);
        }
    }
    for (int k = 0; k < width; k++) slopes[column + k] += total[k];
    for (int k = 0; k < width && has_products; k++) products[column + k] += total_product[k];
}

INLINE void add_hidden_of(
    float *slopes, float *products, const float *own, const chunk *c, const job *a, const rows *x, int64_t count,
    const int is_codes, const int has_edge, const int has_products
) {
    const int64_t D = a->walk.D;
    for (int64_t h = 0; h < a->walk.H; h++) {
        int64_t at = h * D;
        const int64_t end = at + D;
        if (!has_edge)
            for (; at + HALF_BLOCK <= end; at += HALF_BLOCK)
                add_hidden_block(slopes, products, own, c, a, x, h, at, count, HALF_BLOCK, is_codes, 0, has_products);
        for (; at < end; at += HALF_BLOCK) {
            const int width = (int)min_i64(HALF_BLOCK, end - at);
            add_hidden_block(slopes, products, own, c, a, x, h, at, count, width, is_codes, has_edge, has_products);
        }
    }
}

INLINE void add_hidden_narrow(
    const block_job *b, int64_t h, const int heads, const int D, const int has_products
) {
    const int64_t H = b->a->walk.H, column = h * D;
    const int width = heads * D;
    float value[BLOCK], slope[BLOCK], total[BLOCK], total_product[BLOCK];
    for (int k = 0; k < width; k++) total[k] = total_product[k] = 0.0f;
    for (int64_t i = 0; i < b->count; i++) {
        hidden_block(value, b, i, 2, h, heads, D);
        const float *above = b->c->t + i * H + h;
        for (int j = 0; j < heads; j++) {
            const float below = above[j] * b->a->slope;
#pragma GCC unroll 1
            for (int k = j * D; k < j * D + D; k++) slope[k] = choose(value[k], above[j], below);
        }
#pragma GCC unroll 1
        for (int k = 0; k < width; k++) total[k] += slope[k];
        if (has_products)
#pragma GCC unroll 1
            for (int k = 0; k < width; k++) total_product[k] = multiply_add(slope[k], value[k], total_product[k]);
    }
    for (int k = 0; k < width; k++) b->slopes[column + k] += total[k];
    for (int k = 0; k < width && has_products; k++) b->products[column + k] += total_product[k];
}

INLINE void add_slopes(const void *job, int64_t h, const int heads, const int D) {
    add_hidden_narrow(job, h, heads, D, 0);
}

INLINE void add_slopes_and_products(const void *job, int64_t h, const int heads, const int D) {
    add_hidden_narrow(job, h, heads, D, 1);
}

/* The same for all heads; `t` holds de, `products` may be null. Rows of edges need not be fast: they are many bytes. */
LEAF void add_hidden(
    float *slopes, float *products, const float *own, const chunk *c, const job *a, const rows *x, int64_t count
) {
    if (is_narrow(a->walk.H, a->walk.D)) {
        const block_job narrow = {c, a, own, x, count, slopes, products};
        const int64_t H = a->walk.H, D = a->walk.D;
        if (products) for_blocks(add_slopes_and_products, &narrow, H, D);
        else for_blocks(add_slopes, &narrow, H, D);
    } else if (a->walk.edge_x) add_hidden_of(slopes, products, own, c, a, x, count, x->is_codes, 1, products != 0);
    else if (x->is_codes && products) add_hidden_of(slopes, products, own, c, a, x, count, 1, 0, 1);
    else if (products) add_hidden_of(slopes, products, own, c, a, x, count, 0, 0, 1);
    else if (x->is_codes) add_hidden_of(slopes, products, own, c, a, x, count, 1, 0, 0);
    else add_hidden_of(slopes, products, own, c, a, x, count, 0, 0, 0);
}

#endif
