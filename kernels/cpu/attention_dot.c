/* Attention with scaled dot products as scores over a CSR graph, and its gradients; oracle:
 * qgnn.reference.attention_dot and attention_dot_backward. The passes are those of attention_gatv2.c. */

#include "attention.h"

typedef struct {
    walk walk;
    rows query, key, value; /* [N, H * D], [S, H * D], [S, H * D] */
    float factor;           /* 1 / sqrt(D) */
    float *d_query, *d_key, *d_value, *d_edge; /* [N, H * D], [S, H * D] twice, [E, H * D] or null */
} job;

INLINE float scale_at(const rows *x, int64_t n, int64_t h, int64_t H) { return x->scale ? x->scale[n * H + h] : 1.0f; }

/* out[i, h] += <own[h], edge_x[i][h]>, the rows of edges */
LEAF void add_edge_dots(float *out, const float *own, const chunk *c, const walk *a, int64_t count) {
    const int64_t H = a->H, D = a->D;
    for (int64_t i = 0; i < count; i++) {
        const float *row = a->edge_x + c->position[i] * H * D;
        for (int64_t h = 0; h < H; h++) out[i * H + h] += dot_values(own + h * D, (const char *)(row + h * D), D, 0);
    }
}

/* A row as it is multiplied with others, and with its scales, for rows of edges. */
typedef struct {
    multiplied row;
    const float *scaled; /* or null, if there are neither rows of edges nor gradients of them */
} doubled;

INLINE doubled load_doubled(
    float **work, const rows *x, int64_t n, const float *scale, const rows *other, const job *a
) {
    const int64_t H = a->walk.H, D = a->walk.D;
    const multiplied row = widen(work, x, n, other, H, D);
    if (!a->walk.edge_x && !a->d_edge) return (doubled){row, 0};
    float *scaled = take(work, H * D);
    load_values(scaled, x, n, H * D);
    if (scale) scale_heads(scaled, scale, H, D);
    return (doubled){row, scaled};
}

/* out[i, h]: the dot products of a row and of the rows of a target's edges, plus rows of edges, times `factor`;
 * `scale` [H] belongs to the row, `scales` [count, H] to the others. */
LEAF void scaled_dots(
    float *out, const doubled *own, const float *scale, const rows *x, const float *scales, const chunk *c,
    const walk *a, float factor, int64_t count
) {
    const int64_t H = a->H;
    dots(out, own->row, x, c->node, count, H, a->D);
    if (scales)
        for (int64_t i = 0; i < count * H; i++) out[i] *= scales[i];
    if (scale)
        for (int64_t i = 0; i < count; i++)
            for (int64_t h = 0; h < H; h++) out[i * H + h] *= scale[h];
    if (a->edge_x) add_edge_dots(out, own->scaled, c, a, count);
    for (int64_t i = 0; i < count * H; i++) out[i] *= factor;
}

/* ---- forward ---- */

static void score_forward(const chunk *c, const void *job_, int64_t n, int64_t first, int64_t count, float *work) {
    const job *a = job_;
    const walk *w = &a->walk;
    const float *scale = a->query.scale ? a->query.scale + n * w->H : 0;
    const doubled own = load_doubled(&work, &a->query, n, scale, &a->key, a);
    load_nodes(c, w, first, count);
    for (int64_t i = 0; i < count; i++) fetch_row(&a->value, c->node[i], w->H * w->D);
    gather_scales(c->scale, &a->key, c->node, count, w->H);
    scaled_dots(c->score, &own, scale, &a->key, c->scale, c, w, a->factor, count);
    gather_scales(c->scale, &a->value, c->node, count, w->H);
}

static void forward_row(const void *job_, int64_t n, int64_t part, float *work) {
    const job *a = job_;
    attend(&a->walk, a, n, work, score_forward, &a->value, 1);
}

EXPORT void qgnn_attention_dot(
    float *out, float *lse, const void *indptr, const void *index, int64_t wide, const void *query,
    const float *query_scale, int64_t stride_query, int64_t is_codes_query, const void *key, const float *key_scale,
    int64_t stride_key, int64_t is_codes_key, const void *value, const float *value_scale, int64_t stride_value,
    int64_t is_codes_value, const float *edge_x, float score_factor, int64_t threshold, const int64_t *seed,
    int64_t stream_key, float factor, int64_t N, int64_t E, int64_t H, int64_t D, float *work, int64_t work_size,
    int64_t chunk_edges, int64_t threads
) {
    const job a = {
        .walk = {
            .indptr = indptr, .index = index, .N = N, .E = E, .H = H, .D = D, .wide = wide, .chunk = chunk_edges,
            .drop = make_dropout(threshold, seed, stream_key, factor), .edge_x = edge_x, .out = out, .lse = lse,
        },
        .query = make_rows(query, query_scale, stride_query, is_codes_query),
        .key = make_rows(key, key_scale, stride_key, is_codes_key),
        .value = make_rows(value, value_scale, stride_value, is_codes_value), .factor = score_factor,
    };
    for_rows(forward_row, &a, &a.walk, 0, work, work_size, threads);
}

/* ---- backward: the rows of targets ---- */

typedef struct {
    const job *a;
    const float *query_scale, *grad_scale; /* of the row */
    doubled query, grad;
    float *key_scale; /* of a chunk */
} target_state;

/* Of a chunk of edges: p in `score`, w in `weight`, w * t in `t`, the scales of keys in `key_scale`. */
LEAF void weigh_edges(const chunk *c, const target_state *s, int64_t n, int64_t first, int64_t count) {
    const job *a = s->a;
    const walk *w = &a->walk;
    const int64_t H = w->H;
    load_nodes(c, w, first, count);
    gather_scales(s->key_scale, &a->key, c->node, count, H);
    gather_scales(c->scale, &a->value, c->node, count, H);
    scaled_dots(c->score, &s->query, s->query_scale, &a->key, s->key_scale, c, w, a->factor, count);
    recompute_weights(c->score, w->lse + n * H, count, H);
    scaled_dots(c->t, &s->grad, s->grad_scale, &a->value, c->scale, c, w, 1.0f, count);
    memcpy(c->weight, c->score, (size_t)(count * H) * sizeof(float));
    drop_weights(c->weight, c, w, count);
    for (int64_t i = 0; i < count * H; i++) c->t[i] *= c->weight[i];
}

/* The gradients of the rows of `count` edges from `first` on: ds * query + w * gradient. */
static void write_edges(const chunk *c, const target_state *s, int64_t first, int64_t count) {
    const job *a = s->a;
    const int64_t H = a->walk.H, D = a->walk.D;
    for (int64_t i = 0; i < count * H; i++) {
        float *d_edge = a->d_edge + first * H * D + i * D;
        const float *query = s->query.scaled + i % H * D, *grad = s->grad.scaled + i % H * D;
        for (int64_t k = 0; k < D; k++) d_edge[k] = c->t[i] * query[k] + c->weight[i] * grad[k];
    }
}

static void target_row(const void *job_, int64_t n, int64_t part, float *work) {
    const job *a = job_;
    const walk *w = &a->walk;
    const int64_t H = w->H, D = w->D, width = H * D;
    const int64_t begin = load_index(w->indptr, n, (int)w->wide), end = load_index(w->indptr, n + 1, (int)w->wide);
    float *record = w->record + n * 4 * H, *d_query = a->d_query + n * width, *products = record + 2 * H;
    const chunk c = make_chunk(w, &work);
    round_gradient(w, n);
    for (int64_t h = 0; h < H; h++) record[h] = scale_at(&a->query, n, h, H);
    memcpy(record + H, w->lse + n * H, (size_t)H * sizeof(float));
    memset(products, 0, (size_t)H * sizeof(float));
    memset(d_query, 0, (size_t)width * sizeof(float));
    if (begin == end) return;
    const rows grad = gradient_rows(w);
    float *share = take(&work, H);
    memset(share, 0, (size_t)H * sizeof(float));
    target_state s = {.a = a, .query_scale = record, .grad_scale = record + 3 * H};
    s.query = load_doubled(&work, &a->query, n, s.query_scale, &a->key, a);
    s.grad = load_doubled(&work, &grad, n, s.grad_scale, &a->value, a);
    s.key_scale = take(&work, w->chunk * H);
    for (int64_t first = begin; first < end; first += w->chunk) {
        const int64_t count = min_i64(w->chunk, end - first);
        weigh_edges(&c, &s, n, first, count);
        sum_products(products, share, &c, count, H);
    }
    normalize_products(products, share, H);
    for (int64_t first = begin; first < end; first += w->chunk) {
        const int64_t count = min_i64(w->chunk, end - first);
        if (end - begin > w->chunk) weigh_edges(&c, &s, n, first, count);
        differentiate_scores(&c, products, a->factor, count, H);
        if (w->edge_x) add_edge_rows(d_query, c.t, &c, w, count);
        if (a->d_edge) write_edges(&c, &s, first, count);
        for (int64_t i = 0; i < count * H; i++) c.t[i] *= s.key_scale[i];
        add_heads(d_query, &a->key, near_edges_of(&c, c.t, count, H), H, D);
    }
}

/* What the rows of sources need of the targets, `record` [N, 4, H] and, unless it is null, `codes` [N, H * D]; and the
 * gradients of the queries and, unless `d_edge` is null, of the edges' rows. */
EXPORT void qgnn_attention_dot_targets(
    float *d_query, float *d_edge, float *record, int8_t *codes, const void *indptr, const void *index, int64_t wide,
    const void *query, const float *query_scale, int64_t stride_query, int64_t is_codes_query, const void *key,
    const float *key_scale, int64_t stride_key, int64_t is_codes_key, const void *value, const float *value_scale,
    int64_t stride_value, int64_t is_codes_value, const float *edge_x, float *lse, const float *grad,
    int64_t stride_grad, float score_factor, int64_t threshold, const int64_t *drop_seed, int64_t drop_key,
    float factor, const int64_t *seed, int64_t stream_key, int64_t qmax, int64_t N, int64_t E, int64_t H, int64_t D,
    float *work, int64_t work_size, int64_t chunk_edges, int64_t threads
) {
    const job a = {
        .walk = {
            .indptr = indptr, .index = index, .N = N, .E = E, .H = H, .D = D, .wide = wide, .chunk = chunk_edges,
            .drop = make_dropout(threshold, drop_seed, drop_key, factor), .edge_x = edge_x, .lse = lse, .grad = grad,
            .stride_grad = stride_grad, .rule = make_rounding(seed, stream_key, qmax), .codes = codes, .record = record,
        },
        .query = make_rows(query, query_scale, stride_query, is_codes_query),
        .key = make_rows(key, key_scale, stride_key, is_codes_key),
        .value = make_rows(value, value_scale, stride_value, is_codes_value), .factor = score_factor,
        .d_query = d_query, .d_edge = d_edge,
    };
    for_rows(target_row, &a, &a.walk, 0, work, work_size, threads);
}

/* ---- backward: the rows of sources ---- */

/* out[i, h]: the dot products of a source's row, plus rows of edges, and of the rows of its edges, times `factor`. */
LEAF void source_dots(
    float *out, multiplied own, const float *scale, const rows *x, const float *scales, const chunk *c, const walk *a,
    float factor, int64_t count
) {
    const int64_t H = a->H, D = a->D, size = x->is_codes ? 1 : 4;
    dots(out, own, x, c->node, count, H, D);
    for (int64_t i = 0; i < count && scale; i++)
        for (int64_t h = 0; h < H; h++) out[i * H + h] *= scale[h];
    for (int64_t i = 0; i < count && a->edge_x; i++)
        for (int64_t h = 0; h < H; h++) {
            const float *edge = a->edge_x + (c->position[i] * H + h) * D;
            const char *row = x->data + c->node[i] * x->stride + h * D * size;
            out[i * H + h] += x->is_codes ? dot_values(edge, row, D, 1) : dot_values(edge, row, D, 0);
        }
    for (int64_t i = 0; i < count * H; i++) out[i] *= factor * scales[i];
}

static void source_row(const void *job_, int64_t n, int64_t part, float *work) {
    const job *a = job_;
    const walk *w = &a->walk;
    const int64_t H = w->H, D = w->D, width = H * D;
    const int64_t begin = load_index(w->indptr, n, (int)w->wide), end = load_index(w->indptr, n + 1, (int)w->wide);
    float *d_key = a->d_key + n * width, *d_value = a->d_value + n * width;
    memset(d_key, 0, (size_t)width * sizeof(float));
    memset(d_value, 0, (size_t)width * sizeof(float));
    if (begin == end) return;
    const chunk c = make_chunk(w, &work);
    const rows grad = gradient_rows(w);
    const float *key_scale = a->key.scale ? a->key.scale + n * H : 0;
    const float *value_scale = a->value.scale ? a->value.scale + n * H : 0;
    float *query_scale = take(&work, w->chunk * H);
    const multiplied key = widen(&work, &a->key, n, &a->query, H, D), value = widen(&work, &a->value, n, &grad, H, D);
    for (int64_t first = begin; first < end; first += w->chunk) {
        const int64_t count = min_i64(w->chunk, end - first), values = count * H;
        load_nodes(&c, w, first, count);
        read_records(&c, w, count);
        memcpy(query_scale, c.score, (size_t)values * sizeof(float));
        source_dots(c.score, key, key_scale, &a->query, query_scale, &c, w, a->factor, count);
        source_dots(c.t, value, value_scale, &grad, c.scale, &c, w, 1.0f, count);
        for (int64_t i = 0; i < values; i++) c.score[i] = exp_fp32(c.score[i] - c.weight[i]);
        memcpy(c.weight, c.score, (size_t)values * sizeof(float));
        drop_weights(c.weight, &c, w, count);
        for (int64_t i = 0; i < values; i++) {
            const float ds = a->factor * (c.weight[i] * c.t[i] - c.score[i] * c.product[i]);
            c.t[i] = ds * query_scale[i];
            c.weight[i] *= c.scale[i];
        }
        add_heads(d_key, &a->query, near_edges_of(&c, c.t, count, H), H, D);
        add_heads(d_value, &grad, near_edges_of(&c, c.weight, count, H), H, D);
    }
}

/* The gradients of keys and values. The graph is the transposed one. */
EXPORT void qgnn_attention_dot_sources(
    float *d_key, float *d_value, const void *indptr, const void *index, const void *order, int64_t wide,
    const void *query, const float *query_scale, int64_t stride_query, int64_t is_codes_query, const void *key,
    const float *key_scale, int64_t stride_key, int64_t is_codes_key, const void *value, const float *value_scale,
    int64_t stride_value, int64_t is_codes_value, const float *edge_x, float *record, int8_t *codes, const float *grad,
    int64_t stride_grad, float score_factor, int64_t threshold, const int64_t *drop_seed, int64_t drop_key,
    float factor, int64_t S, int64_t E, int64_t H, int64_t D, float *work, int64_t work_size, int64_t chunk_edges,
    int64_t threads
) {
    const job a = {
        .walk = {
            .indptr = indptr, .index = index, .order = threshold || edge_x ? order : 0, .N = S, .E = E, .H = H, .D = D,
            .wide = wide, .chunk = chunk_edges, .drop = make_dropout(threshold, drop_seed, drop_key, factor),
            .edge_x = edge_x, .grad = grad, .stride_grad = stride_grad, .codes = codes, .record = record,
        },
        .query = make_rows(query, query_scale, stride_query, is_codes_query),
        .key = make_rows(key, key_scale, stride_key, is_codes_key),
        .value = make_rows(value, value_scale, stride_value, is_codes_value), .factor = score_factor,
        .d_key = d_key, .d_value = d_value,
    };
    for_rows(source_row, &a, &a.walk, 0, work, work_size, threads);
}
