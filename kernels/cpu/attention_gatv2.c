/* Attention with the scores of GATv2 over a CSR graph, and its gradients; oracle: qgnn.reference.attention_gatv2 and
 * attention_gatv2_backward.
 *
 * Scores are made anew in each pass. Backward, the edges of a target are visited to make D, and again to add up
 * gradients, which costs a row of one chunk no second fetch. */

#include "attention_gatv2.h"

/* ---- forward ---- */

static void score_forward(const chunk *c, const void *job_, int64_t n, int64_t first, int64_t count, float *work) {
    const job *a = job_;
    const walk *w = &a->walk;
    float *own = take(&work, w->H * w->D);
    if (first == load_index(w->indptr, n, (int)w->wide)) load_row(own, &a->target, n, w->H, w->D);
    load_nodes(c, w, first, count);
    gather_scales(c->scale, &a->source, c->node, count, w->H);
    score_edges(c, a, own, &a->source, count);
}

static void forward_row(const void *job_, int64_t n, int64_t part, float *work) {
    const job *a = job_;
    attend(&a->walk, a, n, work, score_forward, &a->source, 0);
}

EXPORT void qgnn_attention_gatv2(
    float *out, float *lse, const void *indptr, const void *index, int64_t wide, const void *target,
    const float *target_scale, int64_t stride_target, int64_t is_codes_target, const void *source,
    const float *source_scale, int64_t stride_source, int64_t is_codes_source, const float *att, const float *edge_x,
    float slope, int64_t threshold, const int64_t *seed, int64_t stream_key, float factor, int64_t N, int64_t E,
    int64_t H, int64_t D, float *work, int64_t work_size, int64_t chunk_edges, int64_t threads
) {
    const job a = {
        .walk = {
            .indptr = indptr, .index = index, .N = N, .E = E, .H = H, .D = D, .wide = wide, .chunk = chunk_edges,
            .drop = make_dropout(threshold, seed, stream_key, factor), .edge_x = edge_x, .out = out, .lse = lse,
        },
        .target = make_rows(target, target_scale, stride_target, is_codes_target),
        .source = make_rows(source, source_scale, stride_source, is_codes_source), .att = att, .slope = slope,
    };
    for_rows(forward_row, &a, &a.walk, 0, work, work_size, threads);
}

/* ---- backward ---- */

/* The gradient of h of `count` edges from `first` on. */
static void write_edges(const float *own, const chunk *c, const job *a, int64_t first, int64_t count) {
    const int64_t H = a->walk.H, D = a->walk.D;
    for (int64_t i = 0; i < count; i++) {
        const char *row = a->source.data + c->node[i] * a->source.stride;
        const float *edge = a->walk.edge_x ? a->walk.edge_x + (first + i) * H * D : 0;
        float *d_edge = a->d_edge + (first + i) * H * D;
        for (int64_t k = 0; k < H * D; k++) {
            const int64_t h = i * H + k / D;
            float value = value_at(row, k, a->source.is_codes) * c->scale[h] + own[k];
            if (edge) value += edge[k];
            d_edge[k] = a->att[k] * (value > 0.0f ? c->t[h] : c->t[h] * a->slope);
        }
    }
}

/* ---- backward: the rows of targets ---- */

typedef struct {
    const job *a;
    const float *own, *record;
    rows grad;
    multiplied grad_row;
} target_state;

/* Of a chunk of edges: p in `score`, w in `weight`, w * t in `t`. */
LEAF void weigh_edges(const chunk *c, const target_state *s, int64_t n, int64_t first, int64_t count) {
    const job *a = s->a;
    const walk *w = &a->walk;
    const int64_t H = w->H;
    load_nodes(c, w, first, count);
    gather_scales(c->scale, &a->source, c->node, count, H);
    score_edges(c, a, s->own, &a->source, count);
    recompute_weights(c->score, w->lse + n * H, count, H);
    dots(c->t, s->grad_row, &a->source, c->node, count, H, w->D);
    memcpy(c->weight, c->score, (size_t)(count * H) * sizeof(float));
    drop_weights(c->weight, c, w, count);
    multiply_products(c, s->record + 3 * H, count, H);
}

static void target_row(const void *job_, int64_t n, int64_t part, float *work) {
    const job *a = job_;
    const walk *w = &a->walk;
    const int64_t H = w->H, D = w->D, width = H * D;
    const int64_t begin = load_index(w->indptr, n, (int)w->wide), end = load_index(w->indptr, n + 1, (int)w->wide);
    float *record = w->record + n * 4 * H, *d_target = a->d_target + n * width, *products = record + 2 * H;
    const chunk c = make_chunk(w, &work);
    float *own = take(&work, width);
    round_gradient(w, n);
    for (int64_t h = 0; h < H; h++) record[h] = a->target.scale ? a->target.scale[n * H + h] : 1.0f;
    memcpy(record + H, w->lse + n * H, (size_t)H * sizeof(float));
    memset(products, 0, (size_t)H * sizeof(float));
    memset(d_target, 0, (size_t)width * sizeof(float));
    if (begin == end) return;
    float *share = take(&work, H);
    memset(share, 0, (size_t)H * sizeof(float));
    load_row(own, &a->target, n, H, D);
    const rows grad = gradient_rows(w);
    const target_state s = {a, own, record, grad, widen(&work, &grad, n, &a->source, H, D)};
    for (int64_t first = begin; first < end; first += w->chunk) {
        const int64_t count = min_i64(w->chunk, end - first);
        weigh_edges(&c, &s, n, first, count);
        sum_products(products, share, &c, count, H);
    }
    normalize_products(products, share, H);
    for (int64_t first = begin; first < end; first += w->chunk) {
        const int64_t count = min_i64(w->chunk, end - first);
        if (end - begin > w->chunk) weigh_edges(&c, &s, n, first, count);
        differentiate_scores(&c, products, 1.0f, count, H);
        add_hidden(d_target, a->d_att + part * width, own, &c, a, &a->source, count);
        if (a->d_edge) write_edges(own, &c, a, first, count);
    }
    for (int64_t k = 0; k < width; k++) d_target[k] *= a->att[k];
}

/* What the rows of sources need of the targets, `record` [N, 4, H] and, unless it is null, `codes` [N, H * D]; and the
 * gradients of the targets' rows, of `att` by parts of rows, [parts, H * D] and zeros before, and unless `d_edge` is
 * null of the edges' rows. */
EXPORT void qgnn_attention_gatv2_targets(
    float *d_target, float *d_att, float *d_edge, float *record, int8_t *codes, const void *indptr, const void *index,
    int64_t wide, const void *target, const float *target_scale, int64_t stride_target, int64_t is_codes_target,
    const void *source, const float *source_scale, int64_t stride_source, int64_t is_codes_source, const float *att,
    const float *edge_x, float *lse, const float *grad, int64_t stride_grad, float slope, int64_t threshold,
    const int64_t *drop_seed, int64_t drop_key, float factor, const int64_t *seed, int64_t stream_key, int64_t qmax,
    int64_t parts, int64_t N, int64_t E, int64_t H, int64_t D, float *work, int64_t work_size, int64_t chunk_edges,
    int64_t threads
) {
    const job a = {
        .walk = {
            .indptr = indptr, .index = index, .N = N, .E = E, .H = H, .D = D, .wide = wide, .chunk = chunk_edges,
            .drop = make_dropout(threshold, drop_seed, drop_key, factor), .edge_x = edge_x, .lse = lse, .grad = grad,
            .stride_grad = stride_grad, .rule = make_rounding(seed, stream_key, qmax), .codes = codes, .record = record,
        },
        .target = make_rows(target, target_scale, stride_target, is_codes_target),
        .source = make_rows(source, source_scale, stride_source, is_codes_source), .att = att, .slope = slope,
        .d_target = d_target, .d_edge = d_edge, .d_att = d_att,
    };
    for_rows(target_row, &a, &a.walk, parts, work, work_size, threads);
}

/* ---- backward: the rows of sources ---- */

static void source_row(const void *job_, int64_t n, int64_t part, float *work) {
    const job *a = job_;
    const walk *w = &a->walk;
    const int64_t H = w->H, D = w->D, width = H * D;
    const int64_t begin = load_index(w->indptr, n, (int)w->wide), end = load_index(w->indptr, n + 1, (int)w->wide);
    float *d_source = a->d_source + n * width;
    const chunk c = make_chunk(w, &work);
    float *own = take(&work, width), *slopes = take(&work, width), *scale = take(&work, w->chunk * H);
    memset(slopes, 0, (size_t)width * sizeof(float));
    memset(d_source, 0, (size_t)width * sizeof(float));
    if (begin == end) return;
    load_row(own, &a->source, n, H, D);
    const rows grad = gradient_rows(w);
    const multiplied own_row = widen(&work, &a->source, n, &grad, H, D);
    for (int64_t first = begin; first < end; first += w->chunk) {
        const int64_t count = min_i64(w->chunk, end - first), values = count * H;
        load_nodes(&c, w, first, count);
        read_records(&c, w, count);
        memcpy(scale, c.scale, (size_t)values * sizeof(float));
        memcpy(c.scale, c.score, (size_t)values * sizeof(float));
        score_edges(&c, a, own, &a->target, count);
        for (int64_t i = 0; i < values; i++) c.score[i] = exp_fp32(c.score[i] - c.weight[i]);
        dots(c.t, own_row, &grad, c.node, count, H, D);
        for (int64_t i = 0; i < count && a->source.scale; i++)
            for (int64_t h = 0; h < H; h++) c.t[i * H + h] *= a->source.scale[n * H + h];
        drop_weights(scale, &c, w, count);
        for (int64_t i = 0; i < values; i++) {
            c.weight[i] = c.score[i] * scale[i];
            c.t[i] = c.score[i] * (scale[i] * c.t[i] - c.product[i]);
        }
        add_heads(d_source, &grad, near_edges_of(&c, c.weight, count, H), H, D);
        add_hidden(slopes, 0, own, &c, a, &a->target, count);
    }
    for (int64_t k = 0; k < width; k++) d_source[k] = multiply_add(a->att[k], slopes[k], d_source[k]);
}

/* The gradient of the sources' rows. The graph is the transposed one. */
EXPORT void qgnn_attention_gatv2_sources(
    float *d_source, const void *indptr, const void *index, const void *order, int64_t wide, const void *target,
    const float *target_scale, int64_t stride_target, int64_t is_codes_target, const void *source,
    const float *source_scale, int64_t stride_source, int64_t is_codes_source, const float *att, const float *edge_x,
    float *record, int8_t *codes, const float *grad, int64_t stride_grad, float slope, int64_t threshold,
    const int64_t *drop_seed, int64_t drop_key, float factor, int64_t S, int64_t E, int64_t H, int64_t D, float *work,
    int64_t work_size, int64_t chunk_edges, int64_t threads
) {
    const job a = {
        .walk = {
            .indptr = indptr, .index = index, .order = threshold || edge_x ? order : 0, .N = S, .E = E, .H = H, .D = D,
            .wide = wide, .chunk = chunk_edges, .drop = make_dropout(threshold, drop_seed, drop_key, factor),
            .edge_x = edge_x, .grad = grad, .stride_grad = stride_grad, .codes = codes, .record = record,
        },
        .target = make_rows(target, target_scale, stride_target, is_codes_target),
        .source = make_rows(source, source_scale, stride_source, is_codes_source), .att = att, .slope = slope,
        .d_source = d_source,
    };
    for_rows(source_row, &a, &a.walk, 0, work, work_size, threads);
}
