/* Softmax over the edges of each row of a CSR graph, and the attention weights of GAT; oracle: qgnn.reference.softmax,
 * attention_scores and their gradients.
 *
 * The H scores of an edge lie side by side, so the scores of a row are one run of memory in which head h is every H-th
 * value. It is walked in steps of `lanes` values, a multiple of H, each lane with a maximum and a sum of its own; in the
 * end the lanes of a head are folded into one. */

#include "common.h"
#include "exp.h"

enum {
    AHEAD = 16,    /* edges between asking for a source's scores and using them */
    LANES = 16,    /* values of a step where H divides it, a constant, so that loops over lanes are vector code */
    MAX_LANES = 32 /* more heads than that are taken in blocks */
};

/* ---- softmax of one row ---- */

/* Lanes l, l + H, l + 2 H, ... get their largest value. A NaN may be lost: it comes back in the sum. */
INLINE void fold_largest(float *value, const int64_t lanes, const int64_t H) {
    for (int64_t l = lanes - 1; l >= H; l--) value[l - H] = value[l] > value[l - H] ? value[l] : value[l - H];
    for (int64_t l = H; l < lanes; l++) value[l] = value[l - H];
}

/* Lanes l, l + H, l + 2 H, ... get their sum. */
INLINE void fold_sum(float *value, const int64_t lanes, const int64_t H) {
    for (int64_t l = lanes - 1; l >= H; l--) value[l - H] += value[l];
    for (int64_t l = H; l < lanes; l++) value[l] = value[l - H];
}

/* `steps` steps of `lanes` values with H heads, `stride` apart, and `rest` values after them. May run in place. */
INLINE void softmax_steps(
    float *out, const float *score, int64_t steps, int64_t rest, int64_t stride, const int64_t lanes, const int64_t H
) {
    float largest[MAX_LANES], sum[MAX_LANES], last[MAX_LANES];
    const float *last_score = score + steps * stride;
    /* exp(-inf) = 0: the lanes that the rest does not fill add nothing. */
    for (int64_t l = 0; l < lanes; l++) last[l] = largest[l] = -INFINITY;
    for (int64_t l = 0; l < rest; l++) last[l] = largest[l] = last_score[l];
    for (int64_t k = 0; k < steps; k++)
        for (int64_t l = 0; l < lanes; l++) {
            const float value = score[k * stride + l];
            largest[l] = value > largest[l] ? value : largest[l];
        }
    fold_largest(largest, lanes, H);
    for (int64_t l = 0; l < lanes; l++) sum[l] = last[l] = exp_fp32(last[l] - largest[l]);
    for (int64_t k = 0; k < steps; k++)
        for (int64_t l = 0; l < lanes; l++) {
            const float value = exp_fp32(score[k * stride + l] - largest[l]);
            out[k * stride + l] = value;
            sum[l] += value;
        }
    fold_sum(sum, lanes, H);
    for (int64_t l = 0; l < lanes; l++) sum[l] = 1.0f / sum[l];
    for (int64_t k = 0; k < steps; k++)
        for (int64_t l = 0; l < lanes; l++) out[k * stride + l] *= sum[l];
    for (int64_t l = 0; l < rest; l++) out[steps * stride + l] = last[l] * sum[l];
}

INLINE void softmax_row(float *out, const float *score, int64_t edges, const int64_t H) {
    const int64_t n = edges * H;
    if (n == 0) return;
    if (H <= MAX_LANES) {
        const int64_t lanes = LANES % H ? MAX_LANES / H * H : LANES;
        softmax_steps(out, score, n / lanes, n % lanes, lanes, lanes, H);
        return;
    }
    for (int64_t h = 0; h < H; h += MAX_LANES) {
        const int64_t heads = min_i64(MAX_LANES, H - h);
        softmax_steps(out + h, score + h, edges, 0, H, heads, heads);
    }
}

/* ---- all rows ---- */

typedef struct {
    float *out;
    const void *indptr;
    const float *score; /* [E, H], or NULL: made from the scores of targets and sources */
    const void *index;
    const float *score_target, *score_source; /* [N, H], [S, H] */
    float slope;
    int64_t N;
} softmax_job;

INLINE float leaky_relu(float x, float slope) { return x > 0.0f ? x : x * slope; }

/* Scores of the edges start .. stop of target n. */
INLINE void score_edges(
    const softmax_job *job, int64_t n, int64_t start, int64_t stop, int64_t last_edge, const int wide, const int64_t H
) {
    const float *target = job->score_target + n * H;
    for (int64_t e = start; e < stop; e++) {
        if (e + AHEAD < last_edge) __builtin_prefetch(job->score_source + load_index(job->index, e + AHEAD, wide) * H);
        const float *source = job->score_source + load_index(job->index, e, wide) * H;
        for (int64_t h = 0; h < H; h++) job->out[e * H + h] = leaky_relu(target[h] + source[h], job->slope);
    }
}

INLINE void softmax_rows(const softmax_job *job, int64_t threads, const int wide, const int64_t H) {
    threads = useful_threads(load_index(job->indptr, job->N, wide) * H, threads);
    const int64_t parts = num_parts(job->N, threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < parts; part++) {
        const int64_t first = part_of_rows(job->indptr, job->N, part, parts, wide);
        const int64_t last = part_of_rows(job->indptr, job->N, part + 1, parts, wide);
        const int64_t last_edge = load_index(job->indptr, last, wide);
        for (int64_t n = first; n < last; n++) {
            const int64_t start = load_index(job->indptr, n, wide), stop = load_index(job->indptr, n + 1, wide);
            float *out = job->out + start * H;
            if (!job->score) score_edges(job, n, start, stop, last_edge, wide, H);
            softmax_row(out, job->score ? job->score + start * H : out, stop - start, H);
        }
    }
}

/* Common numbers of heads get code of their own; with 64-bit indices it is not worth the time of the compiler. */
INLINE void softmax_heads(const softmax_job *job, int64_t H, int64_t threads, const int wide) {
    if (!wide && H == 1) softmax_rows(job, threads, wide, 1);
    else if (!wide && H == 2) softmax_rows(job, threads, wide, 2);
    else if (!wide && H == 4) softmax_rows(job, threads, wide, 4);
    else if (!wide && H == 8) softmax_rows(job, threads, wide, 8);
    else softmax_rows(job, threads, wide, H);
}

/* One function for both exports: it is the bulk of the code of this file. */
static void softmax_all(const softmax_job *job, int64_t H, int64_t wide, int64_t threads) {
    if (wide) softmax_heads(job, H, threads, 1);
    else softmax_heads(job, H, threads, 0);
}

EXPORT void qgnn_softmax_rows(
    float *out, const void *indptr, int64_t wide, const float *score, int64_t N, int64_t H, int64_t threads
) {
    const softmax_job job = {.out = out, .indptr = indptr, .score = score, .N = N};
    softmax_all(&job, H, wide, threads);
}

EXPORT void qgnn_softmax_attention(
    float *out, const void *indptr, const void *index, int64_t wide, const float *score_target,
    const float *score_source, float slope, int64_t N, int64_t H, int64_t threads
) {
    const softmax_job job = {out, indptr, NULL, index, score_target, score_source, slope, N};
    softmax_all(&job, H, wide, threads);
}

/* ---- gradients ---- */

typedef struct {
    float *edge_grad; /* [E, H] */
    float *d_target;  /* [N, H], or NULL: the gradient of the softmax alone */
    const void *indptr, *index;
    const float *out, *grad;                  /* [E, H] */
    const float *score_target, *score_source; /* [N, H], [S, H] */
    float slope;
    int64_t N;
} gradient_job;

/* `heads` heads from the first one on, of the edges start .. stop of target n:
 * out * (grad - sum of out * grad over the row), then through the leaky ReLU, then summed over the row. */
INLINE void gradient_of_row(
    const gradient_job *job, int64_t n, int64_t start, int64_t stop, int64_t first, const int64_t heads,
    const int64_t H, const int wide, const int is_attention
) {
    const float slope = job->slope;
    float mean[MAX_LANES] = {0}, sum[MAX_LANES] = {0};
    for (int64_t e = start; e < stop; e++) {
        const int64_t at = e * H + first;
        for (int64_t h = 0; h < heads; h++) mean[h] += job->out[at + h] * job->grad[at + h];
    }
    for (int64_t e = start; e < stop; e++) {
        const int64_t at = e * H + first;
        float *edge_grad = job->edge_grad + at;
        for (int64_t h = 0; h < heads; h++) edge_grad[h] = job->out[at + h] * (job->grad[at + h] - mean[h]);
        if (!is_attention) continue;
        const float *target = job->score_target + n * H + first;
        const float *source = job->score_source + load_index(job->index, e, wide) * H + first;
        for (int64_t h = 0; h < heads; h++) {
            edge_grad[h] *= target[h] + source[h] > 0.0f ? 1.0f : slope; /* a product: no branch to guess */
            sum[h] += edge_grad[h];
        }
    }
    if (is_attention) memcpy(job->d_target + n * H + first, sum, (size_t)heads * sizeof(float));
}

/* Common numbers of heads, as in softmax_heads; `wide` matters to the attention's gradient only. */
INLINE void gradient_of_heads(
    const gradient_job *job, int64_t n, int64_t start, int64_t stop, int64_t H, int wide, const int is_attention
) {
    if (!wide && H == 1) gradient_of_row(job, n, start, stop, 0, 1, 1, 0, is_attention);
    else if (!wide && H == 4) gradient_of_row(job, n, start, stop, 0, 4, 4, 0, is_attention);
    else if (!wide && H == 8) gradient_of_row(job, n, start, stop, 0, 8, 8, 0, is_attention);
    else
        for (int64_t first = 0; first < H; first += MAX_LANES) {
            const int64_t heads = min_i64(MAX_LANES, H - first);
            gradient_of_row(job, n, start, stop, first, heads, H, wide, is_attention);
        }
}

static void gradient_all(const gradient_job *job, int64_t H, int wide, int64_t threads) {
    threads = useful_threads(load_index(job->indptr, job->N, wide) * H, threads);
    const int64_t parts = num_parts(job->N, threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < parts; part++) {
        const int64_t last = part_of_rows(job->indptr, job->N, part + 1, parts, wide);
        for (int64_t n = part_of_rows(job->indptr, job->N, part, parts, wide); n < last; n++) {
            const int64_t start = load_index(job->indptr, n, wide), stop = load_index(job->indptr, n + 1, wide);
            if (job->d_target) gradient_of_heads(job, n, start, stop, H, wide, 1);
            else gradient_of_heads(job, n, start, stop, H, 0, 0);
        }
    }
}

EXPORT void qgnn_softmax_rows_backward(
    float *dx, const void *indptr, int64_t wide, const float *out, const float *grad, int64_t N, int64_t H,
    int64_t threads
) {
    const gradient_job job = {.edge_grad = dx, .indptr = indptr, .out = out, .grad = grad, .N = N};
    gradient_all(&job, H, (int)wide, threads);
}

/* The gradient of the edges' scores, and of the targets' scores; that of the sources' is qgnn_softmax_edge_sums. */
EXPORT void qgnn_softmax_attention_backward(
    float *edge_grad, float *d_target, const void *indptr, const void *index, int64_t wide, const float *out,
    const float *grad, const float *score_target, const float *score_source, float slope, int64_t N, int64_t H,
    int64_t threads
) {
    const gradient_job job = {edge_grad, d_target, indptr, index, out, grad, score_target, score_source, slope, N};
    gradient_all(&job, H, (int)wide, threads);
}

INLINE void sum_edges(
    float *sum, const void *indptr, const void *order, const float *edge_values, int64_t N, const int64_t H,
    int64_t threads, const int wide
) {
    threads = useful_threads(load_index(indptr, N, wide) * H, threads);
    const int64_t parts = num_parts(N, threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < parts; part++) {
        const int64_t first = part_of_rows(indptr, N, part, parts, wide);
        const int64_t last = part_of_rows(indptr, N, part + 1, parts, wide);
        const int64_t last_edge = load_index(indptr, last, wide);
        for (int64_t n = first; n < last; n++) {
            float *total = sum + n * H;
            for (int64_t h = 0; h < H; h++) total[h] = 0.0f;
            const int64_t stop = load_index(indptr, n + 1, wide);
            for (int64_t e = load_index(indptr, n, wide); e < stop; e++) {
                if (e + AHEAD < last_edge) __builtin_prefetch(edge_values + load_index(order, e + AHEAD, wide) * H);
                const float *value = edge_values + load_index(order, e, wide) * H;
                for (int64_t h = 0; h < H; h++) total[h] += value[h];
            }
        }
    }
}

/* sum[n] = values of the edges order[e], e from indptr[n] to indptr[n + 1], added in this order: [E, H] -> [N, H]. */
EXPORT void qgnn_softmax_edge_sums(
    float *sum, const void *indptr, const void *order, int64_t wide, const float *edge_values, int64_t N,
    int64_t H, int64_t threads
) {
    if (wide) sum_edges(sum, indptr, order, edge_values, N, H, threads, 1);
    else if (H == 1) sum_edges(sum, indptr, order, edge_values, N, 1, threads, 0);
    else if (H == 4) sum_edges(sum, indptr, order, edge_values, N, 4, threads, 0);
    else if (H == 8) sum_edges(sum, indptr, order, edge_values, N, 8, threads, 0);
    else sum_edges(sum, indptr, order, edge_values, N, H, threads, 0);
}
