/* Attention with the scores of GATv2 over a CSR graph, and its gradients; oracle: qgnn.reference.attention_gatv2 and
 * attention_gatv2_backward.
 *
 * Scores are made anew in each pass. Backward, the edges of a target are visited to make D, and again to add up
 * gradients, which costs a row of one chunk no second fetch. */

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

INLINE void score_block(const block_job *b, int64_t h, const int heads, const int D, const int is_codes) {
    const job *a = b->a;
    const chunk *c = b->c;
    const int64_t H = a->walk.H, column = h * D;
    const float *own = b->own + column, *att = a->att + column, slope = a->slope;
    const char *data = b->x->data + column * (is_codes ? 1 : 4);
    float buffer[BLOCK], product[BLOCK];
    for (int64_t i = 0; i < b->count; i++) {
        const char *next = data + c->node[i + AHEAD] * b->x->stride;
        for (int k = 0; k < heads * D * (is_codes ? 1 : 4); k += LINE) __builtin_prefetch(next + k);
        const float *value = float_block(buffer, data + c->node[i] * b->x->stride, heads * D, is_codes);
        const float *scale = c->scale + i * H + h;
        const float *edge = a->walk.edge_x ? a->walk.edge_x + c->position[i] * H * D + column : 0;
        for (int j = 0; j < heads; j++)
#pragma GCC unroll 1 /* as in attention_rows.h */
            for (int k = j * D; k < j * D + D; k++) product[k] = value[k] * scale[j] + own[k];
        if (edge)
            for (int k = 0; k < heads * D; k++) product[k] += edge[k];
#pragma GCC unroll 1
        for (int k = 0; k < heads * D; k++) product[k] = (product[k] > 0.0f ? product[k] : product[k] * slope) * att[k];
        fold_heads(c->score + i * H + h, product, heads, D);
    }
}

INLINE void score_codes(const void *job, int64_t h, const int heads, const int D) { score_block(job, h, heads, D, 1); }

INLINE void score_floats(const void *job, int64_t h, const int heads, const int D) { score_block(job, h, heads, D, 0); }

/* Scores of the edges of a row whose values are `own`; `scale` holds those of the neighbors' rows. */
LEAF void score_edges(const chunk *c, const job *a, const float *own, const rows *x, int64_t count) {
    const block_job narrow = {.c = c, .a = a, .own = own, .x = x, .count = count};
    if (is_narrow(a->walk.D) && x->is_codes) for_blocks(score_codes, &narrow, a->walk.H, a->walk.D);
    else if (is_narrow(a->walk.D)) for_blocks(score_floats, &narrow, a->walk.H, a->walk.D);
    else if (x->is_codes && a->walk.edge_x) add_scores(c, a, own, x, count, 1, 1);
    else if (x->is_codes) add_scores(c, a, own, x, count, 1, 0);
    else if (a->walk.edge_x) add_scores(c, a, own, x, count, 0, 1);
    else add_scores(c, a, own, x, count, 0, 0);
}

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

INLINE void hidden_block(
    const block_job *b, int64_t h, const int heads, const int D, const int is_codes, const int has_products
) {
    const job *a = b->a;
    const chunk *c = b->c;
    const int64_t H = a->walk.H, column = h * D;
    const float *own = b->own + column;
    const char *data = b->x->data + column * (is_codes ? 1 : 4);
    const int width = heads * D;
    float buffer[BLOCK], hidden[BLOCK], slope[BLOCK], total[BLOCK], total_product[BLOCK];
    for (int k = 0; k < width; k++) total[k] = total_product[k] = 0.0f;
    for (int64_t i = 0; i < b->count; i++) {
        const float *value = float_block(buffer, data + c->node[i] * b->x->stride, width, is_codes);
        const float *scale = c->scale + i * H + h, *above = c->t + i * H + h;
        const float *edge = a->walk.edge_x ? a->walk.edge_x + c->position[i] * H * D + column : 0;
        for (int j = 0; j < heads; j++)
#pragma GCC unroll 1 /* as in attention_rows.h */
            for (int k = j * D; k < j * D + D; k++) hidden[k] = value[k] * scale[j] + own[k];
        if (edge)
            for (int k = 0; k < width; k++) hidden[k] += edge[k];
        for (int j = 0; j < heads; j++) {
            const float below = above[j] * a->slope;
#pragma GCC unroll 1
            for (int k = j * D; k < j * D + D; k++) slope[k] = choose(hidden[k], above[j], below);
        }
#pragma GCC unroll 1
        for (int k = 0; k < width; k++) total[k] += slope[k];
        if (has_products)
#pragma GCC unroll 1
            for (int k = 0; k < width; k++) total_product[k] = multiply_add(slope[k], hidden[k], total_product[k]);
    }
    for (int k = 0; k < width; k++) b->slopes[column + k] += total[k];
    for (int k = 0; k < width && has_products; k++) b->products[column + k] += total_product[k];
}

INLINE void hide_codes(const void *job, int64_t h, const int heads, const int D) {
    hidden_block(job, h, heads, D, 1, 0);
}

INLINE void hide_floats(const void *job, int64_t h, const int heads, const int D) {
    hidden_block(job, h, heads, D, 0, 0);
}

INLINE void hide_and_multiply_codes(const void *job, int64_t h, const int heads, const int D) {
    hidden_block(job, h, heads, D, 1, 1);
}

INLINE void hide_and_multiply_floats(const void *job, int64_t h, const int heads, const int D) {
    hidden_block(job, h, heads, D, 0, 1);
}

/* The same for all heads; `t` holds de, `products` may be null. Rows of edges need not be fast: they are many bytes. */
LEAF void add_hidden(
    float *slopes, float *products, const float *own, const chunk *c, const job *a, const rows *x, int64_t count
) {
    if (is_narrow(a->walk.D)) {
        const block_job narrow = {c, a, own, x, count, slopes, products};
        const int64_t H = a->walk.H, D = a->walk.D;
        if (x->is_codes && products) for_blocks(hide_and_multiply_codes, &narrow, H, D);
        else if (x->is_codes) for_blocks(hide_codes, &narrow, H, D);
        else if (products) for_blocks(hide_and_multiply_floats, &narrow, H, D);
        else for_blocks(hide_floats, &narrow, H, D);
    } else if (a->walk.edge_x) add_hidden_of(slopes, products, own, c, a, x, count, x->is_codes, 1, products != 0);
    else if (x->is_codes && products) add_hidden_of(slopes, products, own, c, a, x, count, 1, 0, 1);
    else if (products) add_hidden_of(slopes, products, own, c, a, x, count, 0, 0, 1);
    else if (x->is_codes) add_hidden_of(slopes, products, own, c, a, x, count, 1, 0, 0);
    else add_hidden_of(slopes, products, own, c, a, x, count, 0, 0, 0);
}

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
