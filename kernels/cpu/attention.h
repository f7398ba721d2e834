/* What attention of all kinds shares: weights from scores, dropout, the rounded gradient, and the walk over the rows.
 *
 * The edges of a row are taken in chunks. A chunk has `H` scores an edge, side by side, which become weights; then
 * its rows are summed in registers, a block of columns of a head or of several narrow heads at a time. A softmax over
 * several chunks is made online: the sums so far shrink when a larger score is found. Backward, rows of targets come
 * first: each rounds its row of the gradient and leaves a record. A row of sources gathers both. One thread makes a
 * row: results do not depend on their number. */
#ifndef QGNN_ATTENTION_H
#define QGNN_ATTENTION_H

#include "attention_rows.h"
#include "exp.h"

typedef struct {
    int64_t threshold; /* 0: no dropout */
    uint64_t seed;
    float factor;
} dropout;

INLINE dropout make_dropout(int64_t threshold, const int64_t *seed, int64_t stream_key, float factor) {
    return (dropout){threshold, seed ? (uint64_t)*seed ^ (uint64_t)stream_key : 0, factor};
}

/* What all kinds have. A pass walks over the rows of `indptr`: targets, or sources in the transposed graph, whose
 * `order` tells where its edges stand in the other. */
typedef struct {
    const void *indptr, *index, *order;
    int64_t N, E, H, D, wide, chunk; /* edges of a chunk */
    dropout drop;
    const float *edge_x; /* rows [E, H * D] that belong to edges, or null */
    float *out, *lse;    /* forward: results */
    const float *grad;   /* of `out` */
    int64_t stride_grad;
    rounding rule;
    int8_t *codes; /* of the gradient, [N, H * D], or null: it is taken as it is */
    float *record; /* [N, 4, H] of targets: what a kind needs, L, D, scale of the codes */
} walk;

/* Calls a function whose last argument is the number of heads: common ones get code of their own. */
#define WITH_HEADS(number, function, ...) \
    do { \
        if ((number) == 1) function(__VA_ARGS__, 1); \
        else if ((number) == 4) function(__VA_ARGS__, 4); \
        else if ((number) == 8) function(__VA_ARGS__, 8); \
        else function(__VA_ARGS__, number); \
    } while (0)

/* ---- chunks of edges ---- */

typedef struct {
    int64_t *node, *position; /* neighbors, and places in the graph */
    float *score, *weight, *keep, *scale, *t, *product; /* [edges, H] */
    uint32_t *bits;
} chunk;

INLINE chunk make_chunk(const walk *a, float **work) {
    const int64_t n = a->chunk * a->H;
    chunk c;
    c.node = take_wide(work, a->chunk + AHEAD);
    c.position = take_wide(work, a->chunk);
    c.score = take(work, n);
    c.weight = take(work, n);
    c.keep = take(work, n);
    c.scale = take(work, n);
    c.t = take(work, n);
    c.product = take(work, n);
    c.bits = (uint32_t *)(void *)take(work, 3 * (n + a->chunk));
    return c;
}

INLINE void load_nodes_of(
    int64_t *node, const void *index, int64_t first, int64_t wanted, int64_t there, const int wide
) {
    for (int64_t c = 0; c < there; c++) node[c] = load_index(index, first + c, wide);
    for (int64_t c = there; c < wanted; c++) node[c] = node[there - 1];
}

/* The neighbors of `count` edges and of those AHEAD of them, and the places of the edges in the graph. */
INLINE void load_nodes(const chunk *c, const walk *a, int64_t first, int64_t count) {
    const int64_t there = min_i64(count + AHEAD, a->E - first);
    if (a->wide) load_nodes_of(c->node, a->index, first, count + AHEAD, there, 1);
    else load_nodes_of(c->node, a->index, first, count + AHEAD, there, 0);
    if (a->order)
        for (int64_t i = 0; i < count; i++) c->position[i] = load_index(a->order, first + i, (int)a->wide);
    else
        for (int64_t i = 0; i < count; i++) c->position[i] = first + i;
}

/* out[i, h] = the scales of the neighbors' rows. */
void gather_scales(float *out, const rows *x, const int64_t *node, int64_t count, int64_t H);

/* Dropout: the weights of `count` edges times 0 or the factor. */
void drop_weights(float *weight, const chunk *c, const walk *a, int64_t count);

/* ---- softmax ---- */

/* Turns the scores [count, H] of a chunk into exp(score - largest) and counts them in: `largest` and `sum` [H] of the
 * row so far. `shrink` [H] is what earlier sums have to be multiplied by. A row of nothing but -inf has sum 0. */
void weigh(float *score, int64_t count, float *largest, float *sum, float *shrink, float *part, int64_t H);

/* A row's sums of exponentials times values become its result, and L; `inverse` [H] is for its own use. */
INLINE void finish_softmax(
    float *out, float *restrict lse, const float *restrict largest, const float *restrict sum, float *restrict inverse,
    int64_t H, int64_t D
) {
    for (int64_t h = 0; h < H; h++) inverse[h] = 1.0f / sum[h];
    scale_heads(out, inverse, H, D);
    for (int64_t h = 0; h < H; h++) lse[h] = largest[h] + log_fp32(sum[h]);
    for (int64_t h = 0; h < H; h++) lse[h] = sum[h] == 0.0f ? NAN : lse[h];
}

/* Makes the scores of `count` edges of row n from `first` on, and loads their nodes and the scales of their values. */
typedef void (*score_task)(const chunk *c, const void *job, int64_t n, int64_t first, int64_t count, float *own);

/* The edges that are summed up. */
INLINE edges edges_of(const chunk *c, const float *weight, int64_t count, int64_t H) {
    return (edges){c->node, c->node + AHEAD, weight, H, count};
}

/* The same for what is in cache by now. */
INLINE edges near_edges_of(const chunk *c, const float *weight, int64_t count, int64_t H) {
    return (edges){c->node, c->node, weight, H, count};
}

INLINE rows rows_of_edges(const walk *a) { return make_rows(a->edge_x, 0, a->H * a->D, 0); }

/* sum += weight * edge_x over edges, all heads. */
void add_edge_rows(float *sum, const float *weight, const chunk *c, const walk *a, int64_t count);

/* Row n of the result, from scores and the rows of `x` (and those of edges, if they have `values`). */
INLINE void attend_of(
    const walk *a, const void *job, int64_t n, float *work, score_task score, const rows *x,
    const int edges_have_values, const int64_t H
) {
    const int64_t D = a->D, width = H * D;
    const int64_t begin = load_index(a->indptr, n, (int)a->wide), end = load_index(a->indptr, n + 1, (int)a->wide);
    float *out = a->out + n * width;
    if (begin == end) {
        memset(out, 0, (size_t)width * sizeof(float));
        memset(a->lse + n * H, 0, (size_t)H * sizeof(float));
        return;
    }
    const chunk c = make_chunk(a, &work);
    float *largest = take(&work, H), *sum = take(&work, H), *shrink = take(&work, H), *part = take(&work, H);
    memset(out, 0, (size_t)width * sizeof(float));
    memset(sum, 0, (size_t)H * sizeof(float));
    for (int64_t h = 0; h < H; h++) largest[h] = -INFINITY;
    for (int64_t first = begin; first < end; first += a->chunk) {
        const int64_t count = min_i64(a->chunk, end - first);
        score(&c, job, n, first, count, work);
        weigh(c.score, count, largest, sum, shrink, part, H);
        drop_weights(c.score, &c, a, count);
        if (first > begin) scale_heads(out, shrink, H, D);
        if (edges_have_values && a->edge_x) add_edge_rows(out, c.score, &c, a, count);
        for (int64_t i = 0; i < count * H; i++) c.score[i] *= c.scale[i];
        add_heads(out, x, edges_of(&c, c.score, count, H), H, D);
    }
    finish_softmax(out, a->lse + n * H, largest, sum, part, H, D);
}

INLINE void attend(
    const walk *a, const void *job, int64_t n, float *work, score_task score, const rows *x, const int edges_have_values
) {
    WITH_HEADS(a->H, attend_of, a, job, n, work, score, x, edges_have_values);
}

/* ---- backward ---- */

/* p from scores and L of the row. */
INLINE void recompute_weights(float *restrict score, const float *lse, int64_t count, int64_t H) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t h = 0; h < H; h++) score[i * H + h] -= lse[h];
    for (int64_t i = 0; i < count * H; i++) score[i] = exp_fp32(score[i]);
}

/* The gradient's rows as they are gathered. */
INLINE rows gradient_rows(const walk *a) {
    if (a->codes) return make_rows(a->codes, 0, a->H * a->D, 1);
    return make_rows(a->grad, 0, a->stride_grad, 0);
}

/* Rounds the gradient's row n and puts the scales of its heads into the record. */
void round_gradient(const walk *a, int64_t n);

/* The records of targets: what the kind needs in `score`, L in `weight`, D in `product`, the codes' scales. */
void read_records(const chunk *c, const walk *a, int64_t count);

/* Of a target whose D is not known yet: `t`, a product of unscaled rows, becomes w * t. */
INLINE void multiply_products(const chunk *c, const float *grad_scale, int64_t count, int64_t H) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t h = 0; h < H; h++)
            c->t[i * H + h] = c->weight[i * H + h] * (c->t[i * H + h] * grad_scale[h] * c->scale[i * H + h]);
}

/* D += sum of w * t, share += sum of p */
INLINE void sum_products(float *D, float *share, const chunk *c, int64_t count, int64_t H) {
    for (int64_t h = 0; h < H; h++) {
        float sum = 0.0f, shares = 0.0f;
        for (int64_t i = 0; i < count; i++) {
            sum += c->t[i * H + h];
            shares += c->score[i * H + h];
        }
        D[h] += sum;
        share[h] += shares;
    }
}

/* The sum of p is 1 but for the rounding of L, which all p of a row share: D is made relative to it, so that what is
 * left of w * t - p * D does not carry that error. */
INLINE void normalize_products(float *D, const float *share, int64_t H) {
    for (int64_t h = 0; h < H; h++) D[h] /= share[h];
}

/* `t`: w * t - p * D, times a factor. */
INLINE void differentiate_scores(const chunk *c, const float *D, float factor, int64_t count, int64_t H) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t h = 0; h < H; h++)
            c->t[i * H + h] = factor * (c->t[i * H + h] - c->score[i * H + h] * D[h]);
}

/* ---- all rows ---- */

/* What makes one row of a result, in a workspace of the thread; `part` is the number of its part of rows. */
typedef void (*row_task)(const void *job, int64_t row, int64_t part, float *work);

/* Runs a task for every row, in parts with about equally many edges: as many as suit the threads, or a fixed number. */
void for_rows(
    row_task task, const void *job, const walk *a, int64_t fixed_parts, float *work, int64_t work_size, int64_t threads
);

#endif
