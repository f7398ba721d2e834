/* Attention with additive scores over a CSR graph, and its gradients; oracle: qgnn.reference.attention and
 * attention_backward.
 *
 * Backward, a row of targets is gathered as in the forward pass, in two sums by the sign of its scores: their products
 * with the gradient's row give D and the gradient of the target's score, without a product for each edge. A row of
 * sources gathers the gradient's rows, and has a product and a multiple of each. */

#include "attention.h"

typedef struct {
    walk walk;
    const float *score_target, *score_source, *edge_score; /* [N, H], [S, H], [E, H] or null */
    rows x;                                                /* [S, H * D] */
    float slope;
    float *d_target, *d_source, *dx, *d_edge; /* [N, H], [S, H], [S, H * D], [E, H] or null */
} job;

INLINE float leaky_relu(float x, float slope) { return x > 0.0f ? x : x * slope; }

INLINE void add_scores(
    float *restrict score, const float *target, const float *source, const int64_t *node, int64_t count, const int64_t H
) {
    for (int64_t i = 0; i < count; i++) {
        __builtin_prefetch(source + node[i + AHEAD] * H);
        for (int64_t h = 0; h < H; h++) score[i * H + h] = target[h] + source[node[i] * H + h];
    }
}

/* Scores of a target's edges before the leaky ReLU. */
LEAF void score_edges(const chunk *c, const job *a, int64_t n, int64_t first, int64_t count) {
    const int64_t H = a->walk.H;
    const float *target = a->score_target + n * H;
    load_nodes(c, &a->walk, first, count);
    WITH_HEADS(H, add_scores, c->score, target, a->score_source, c->node, count);
    if (a->edge_score)
        for (int64_t i = 0; i < count * H; i++) c->score[i] += a->edge_score[first * H + i];
    gather_scales(c->scale, &a->x, c->node, count, H);
}

/* ---- forward ---- */

static void score_forward(const chunk *c, const void *job_, int64_t n, int64_t first, int64_t count, float *work) {
    const job *a = job_;
    score_edges(c, a, n, first, count);
    for (int64_t i = 0; i < count * a->walk.H; i++) c->score[i] = leaky_relu(c->score[i], a->slope);
}

static void forward_row(const void *job_, int64_t n, int64_t part, float *work) {
    const job *a = job_;
    attend(&a->walk, a, n, work, score_forward, &a->x, 0);
}

EXPORT void qgnn_attention(
    float *out, float *lse, const void *indptr, const void *index, int64_t wide, const float *score_target,
    const float *score_source, const float *edge_score, const void *x, const float *x_scale, int64_t stride_x,
    int64_t is_codes, float slope, int64_t threshold, const int64_t *seed, int64_t stream_key, float factor, int64_t N,
    int64_t E, int64_t H, int64_t D, float *work, int64_t work_size, int64_t chunk_edges, int64_t threads
) {
    const job a = {
        .walk = {
            .indptr = indptr, .index = index, .N = N, .E = E, .H = H, .D = D, .wide = wide, .chunk = chunk_edges,
            .drop = make_dropout(threshold, seed, stream_key, factor), .out = out, .lse = lse,
        },
        .score_target = score_target, .score_source = score_source, .edge_score = edge_score,
        .x = make_rows(x, x_scale, stride_x, is_codes), .slope = slope,
    };
    for_rows(forward_row, &a, &a.walk, 0, work, work_size, threads);
}

/* ---- backward: the rows of targets ---- */

typedef struct {
    int64_t *node, *ahead;
    float *weight;
} split;

/* One head's edges, those with a positive score from the front on, the rest from the back: how many the former are. */
LEAF int64_t split_by_sign(split to, const chunk *c, int64_t h, int64_t count, int64_t H) {
    int64_t front = 0, back = count - 1;
    for (int64_t i = 0; i < count; i++) {
        const int64_t positive = c->score[i * H + h] > 0.0f, at = positive ? front : back;
        to.node[at] = c->node[i];
        to.ahead[at] = c->node[i + AHEAD];
        to.weight[at] = c->weight[i * H + h];
        front += positive;
        back -= 1 - positive;
    }
    return front;
}

/* Sums of p of the edges of a row by the sign of their scores. */
INLINE void add_shares(
    float *restrict positive, float *restrict negative, const float *score, const float *p, int64_t count, int64_t H
) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t h = 0; h < H; h++) {
            positive[h] += choose(score[i * H + h], p[i * H + h], 0.0f);
            negative[h] += choose(score[i * H + h], 0.0f, p[i * H + h]);
        }
}

/* Weights by the sign of scores, with zeros where it is the other one. */
LEAF void part_by_sign(
    float *restrict positive, float *restrict negative, const float *score, const float *weight, int64_t n
) {
    for (int64_t i = 0; i < n; i++) positive[i] = choose(score[i], weight[i], 0.0f);
    for (int64_t i = 0; i < n; i++) negative[i] = choose(score[i], 0.0f, weight[i]);
}

static void target_row(const void *job_, int64_t n, int64_t part, float *work) {
    const job *a = job_;
    const walk *w = &a->walk;
    const int64_t H = w->H, D = w->D, width = H * D;
    const int64_t begin = load_index(w->indptr, n, (int)w->wide), end = load_index(w->indptr, n + 1, (int)w->wide);
    const float *grad = w->grad + n * w->stride_grad, *lse = w->lse + n * H;
    const chunk c = make_chunk(w, &work);
    const split to = {take_wide(&work, w->chunk), take_wide(&work, w->chunk), take(&work, w->chunk)};
    float *positive = take(&work, width), *negative = take(&work, width); /* sums of weighted rows */
    float *share_positive = take(&work, H), *share_negative = take(&work, H);
    memset(positive, 0, (size_t)width * sizeof(float));
    memset(negative, 0, (size_t)width * sizeof(float));
    memset(share_positive, 0, (size_t)H * sizeof(float));
    memset(share_negative, 0, (size_t)H * sizeof(float));
    for (int64_t first = begin; first < end; first += w->chunk) {
        const int64_t count = min_i64(w->chunk, end - first);
        score_edges(&c, a, n, first, count);
        for (int64_t i = 0; i < count * H; i++) c.weight[i] = leaky_relu(c.score[i], a->slope);
        recompute_weights(c.weight, lse, count, H);
        add_shares(share_positive, share_negative, c.score, c.weight, count, H);
        drop_weights(c.weight, &c, w, count);
        for (int64_t i = 0; i < count * H; i++) c.weight[i] *= c.scale[i];
        if (is_narrow(H, D)) {
            part_by_sign(c.t, c.product, c.score, c.weight, count * H);
            add_heads(positive, &a->x, edges_of(&c, c.t, count, H), H, D);
            add_heads(negative, &a->x, near_edges_of(&c, c.product, count, H), H, D);
            continue;
        }
        for (int64_t h = 0; h < H; h++) {
            const int64_t front = split_by_sign(to, &c, h, count, H);
            const edges above = {to.node, to.ahead, to.weight, 1, front};
            const edges below = {to.node + front, to.ahead + front, to.weight + front, 1, count - front};
            add_head(positive + h * D, &a->x, h * D, above, D);
            add_head(negative + h * D, &a->x, h * D, below, D);
        }
    }
    float *record = w->record + n * 4 * H;
    round_gradient(w, n);
    float *above = take(&work, H), *below = take(&work, H), *products = record + 2 * H;
    dot_heads(above, grad, positive, 0, H, D);
    dot_heads(below, grad, negative, 0, H, D);
    for (int64_t h = 0; h < H; h++) {
        const float d_target = (1.0f - a->slope) * (share_negative[h] * above[h] - share_positive[h] * below[h]);
        a->d_target[n * H + h] = begin == end ? 0.0f : d_target; /* whatever the gradient is */
    }
    if (w->codes) {
        for (int64_t k = 0; k < width; k++) positive[k] += negative[k];
        dot_heads(products, positive, w->codes + n * width, 1, H, D);
        for (int64_t h = 0; h < H; h++) products[h] *= record[3 * H + h];
    } else
        for (int64_t h = 0; h < H; h++) products[h] = above[h] + below[h];
    for (int64_t h = 0; h < H; h++) share_positive[h] = begin == end ? 1.0f : share_positive[h] + share_negative[h];
    normalize_products(products, share_positive, H);
    memcpy(record, a->score_target + n * H, (size_t)H * sizeof(float));
    memcpy(record + H, lse, (size_t)H * sizeof(float));
}

/* What the rows of sources need of the targets, `record` [N, 4, H] and, unless it is null, `codes` [N, H * D]; and the
 * gradients of the targets' scores. */
EXPORT void qgnn_attention_targets(
    float *d_target, float *record, int8_t *codes, const void *indptr, const void *index, int64_t wide,
    const float *score_target, const float *score_source, const float *edge_score, const void *x, const float *x_scale,
    int64_t stride_x, int64_t is_codes, float *lse, const float *grad, int64_t stride_grad, float slope,
    int64_t threshold, const int64_t *drop_seed, int64_t drop_key, float factor, const int64_t *seed,
    int64_t stream_key, int64_t qmax, int64_t N, int64_t E, int64_t H, int64_t D, float *work, int64_t work_size,
    int64_t chunk_edges, int64_t threads
) {
    const job a = {
        .walk = {
            .indptr = indptr, .index = index, .N = N, .E = E, .H = H, .D = D, .wide = wide, .chunk = chunk_edges,
            .drop = make_dropout(threshold, drop_seed, drop_key, factor), .lse = lse, .grad = grad,
            .stride_grad = stride_grad, .rule = make_rounding(seed, stream_key, qmax), .codes = codes, .record = record,
        },
        .score_target = score_target, .score_source = score_source, .edge_score = edge_score,
        .x = make_rows(x, x_scale, stride_x, is_codes), .slope = slope, .d_target = d_target,
    };
    for_rows(target_row, &a, &a.walk, 0, work, work_size, threads);
}

/* ---- backward: the rows of sources ---- */

static void source_row(const void *job_, int64_t n, int64_t part, float *work) {
    const job *a = job_;
    const walk *w = &a->walk;
    const int64_t H = w->H, D = w->D, width = H * D;
    const int64_t begin = load_index(w->indptr, n, (int)w->wide), end = load_index(w->indptr, n + 1, (int)w->wide);
    const rows grad = gradient_rows(w);
    const chunk c = make_chunk(w, &work);
    const multiplied own = widen(&work, &a->x, n, &grad, H, D);
    float *d_source = a->d_source + n * H, *dx = a->dx + n * width;
    memset(d_source, 0, (size_t)H * sizeof(float));
    memset(dx, 0, (size_t)width * sizeof(float));
    for (int64_t first = begin; first < end; first += w->chunk) {
        const int64_t count = min_i64(w->chunk, end - first), values = count * H;
        load_nodes(&c, w, first, count);
        read_records(&c, w, count);
        for (int64_t i = 0; i < count; i++)
            for (int64_t h = 0; h < H; h++) c.score[i * H + h] += a->score_source[n * H + h];
        for (int64_t i = 0; i < count && a->edge_score; i++)
            for (int64_t h = 0; h < H; h++) c.score[i * H + h] += a->edge_score[c.position[i] * H + h];
        for (int64_t i = 0; i < values; i++)
            c.weight[i] = exp_fp32(leaky_relu(c.score[i], a->slope) - c.weight[i]);
        dots(c.t, own, &grad, c.node, count, H, D);
        for (int64_t i = 0; i < count && a->x.scale; i++)
            for (int64_t h = 0; h < H; h++) c.t[i * H + h] *= a->x.scale[n * H + h];
        drop_weights(c.scale, &c, w, count);
        for (int64_t i = 0; i < values; i++)
            c.t[i] = c.weight[i] * (c.scale[i] * c.t[i] - c.product[i]) * choose(c.score[i], 1.0f, a->slope);
        for (int64_t i = 0; i < values; i++) c.weight[i] *= c.scale[i];
        for (int64_t i = 0; i < count; i++)
            for (int64_t h = 0; h < H; h++) d_source[h] += c.t[i * H + h];
        for (int64_t i = 0; i < count && a->d_edge; i++)
            for (int64_t h = 0; h < H; h++) a->d_edge[c.position[i] * H + h] = c.t[i * H + h];
        add_heads(dx, &grad, near_edges_of(&c, c.weight, count, H), H, D);
    }
}

/* The gradients of the sources' scores and rows, and of the edges' scores unless `d_edge` is null. The graph is the
 * transposed one. */
EXPORT void qgnn_attention_sources(
    float *d_source, float *dx, float *d_edge, const void *indptr, const void *index, const void *order, int64_t wide,
    const float *score_source, const float *edge_score, const void *x, const float *x_scale, int64_t stride_x,
    int64_t is_codes, float *record, int8_t *codes, const float *grad, int64_t stride_grad, float slope,
    int64_t threshold, const int64_t *drop_seed, int64_t drop_key, float factor, int64_t S, int64_t E, int64_t H,
    int64_t D, float *work, int64_t work_size, int64_t chunk_edges, int64_t threads
) {
    const job a = {
        .walk = {
            .indptr = indptr, .index = index, .N = S, .E = E, .H = H, .D = D, .wide = wide, .chunk = chunk_edges,
            .order = threshold || d_edge || edge_score ? order : 0,
            .drop = make_dropout(threshold, drop_seed, drop_key, factor), .grad = grad, .stride_grad = stride_grad,
            .codes = codes, .record = record,
        },
        .score_source = score_source, .edge_score = edge_score, .x = make_rows(x, x_scale, stride_x, is_codes),
        .slope = slope, .d_source = d_source, .dx = dx, .d_edge = d_edge,
    };
    for_rows(source_row, &a, &a.walk, 0, work, work_size, threads);
}
