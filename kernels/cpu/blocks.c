/* Block-wise packed codes of 1, 2, 4 or 8 bits, in bins of one width or of given edges, and random projections;
 * oracle: qgnn.reference.blocks_pack and blocks_unpack.
 *
 * A block of G values takes r = G * bits / 8 bytes; byte k holds the codes of the values k, k + r, k + 2 r, ...: a run
 * of r neighboring values shares a shift and goes to neighboring bytes, so vectors are packed without shuffles. Values
 * are coded to a byte each in the first-level cache and folded from there.
 */

#include "half.h"

enum { MAX_BLOCK = 1 << 16 };

/* ---- offset and step of a block ---- */

/* The largest number of the type that is not above `value`, or -INFINITY. */
INLINE float round_down(float value, int64_t type) {
    if (type == FP32 || !isfinite(value)) return value;
    /* Below the smallest normal number of fp16 its numbers are the multiples of 2^-24. */
    if (type == FP16 && fabsf(value) < 0x1p-14f) return floorf(value * 0x1p24f) * 0x1p-24f;
    const uint32_t dropped = type == BF16 ? (1u << 16) - 1 : (1u << 13) - 1;
    const float rounded = float_of((bits_of(value) + (value < 0 ? dropped : 0)) & ~dropped);
    if (type == BF16) return rounded;
    return rounded < -65504.0f ? -INFINITY : fminf(rounded, 65504.0f);
}

typedef struct {
    float low, step;
    float steps; /* inverse step times 65536, or 0 if every code of the block is 0 */
} block_scale;

/* Offset down and step up, so that the codes span the block whatever the rounding. */
INLINE block_scale make_block_scale(float low, float high, float qmax, int64_t type) {
    block_scale scale;
    scale.low = round_down(low, type) + 0.0f; /* -0 becomes 0 */
    scale.step = absmax_scale(bits_of(fabsf(high - scale.low)), qmax, &scale.steps);
    if (type != FP32) {
        scale.step = -round_down(-scale.step, type);
        absmax_scale(bits_of(scale.step * qmax), qmax, &scale.steps); /* an exact product: at most 11 + 8 bits */
    }
    if (!isfinite(scale.step)) scale.low = scale.step = NAN;
    return scale;
}

INLINE block_scale scale_of_block(const float *x, int64_t n, float qmax, int64_t type) {
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (int64_t i = 0; i < n; i++) {
        const int32_t key = order_key((int32_t)bits_of(x[i]));
        low = key < low ? key : low;
        high = key > high ? key : high;
    }
    return make_block_scale(float_of((uint32_t)order_key(low)), float_of((uint32_t)order_key(high)), qmax, type);
}

/* ---- bytes of a block ---- */

INLINE void fold(uint8_t *restrict packed, const uint8_t *restrict codes, int64_t run, const int bits) {
    for (int64_t k = 0; k < run; k++) {
        uint8_t byte = 0;
        for (int part = 0; part < 8 / bits; part++) byte |= (uint8_t)(codes[part * run + k] << (bits * part));
        packed[k] = byte;
    }
}

INLINE void unfold(uint8_t *restrict codes, const uint8_t *restrict packed, int64_t run, const int bits) {
    for (int part = 0; part < 8 / bits; part++)
        for (int64_t k = 0; k < run; k++)
            codes[part * run + k] = (packed[k] >> (bits * part)) & ((1 << bits) - 1);
}

/* The two with `bits` a constant. */
static void fold_any(uint8_t *packed, const uint8_t *codes, int64_t run, int64_t bits) {
    if (bits == 1) fold(packed, codes, run, 1);
    else if (bits == 2) fold(packed, codes, run, 2);
    else if (bits == 4) fold(packed, codes, run, 4);
    else fold(packed, codes, run, 8);
}

static void unfold_any(uint8_t *codes, const uint8_t *packed, int64_t run, int64_t bits) {
    if (bits == 1) unfold(codes, packed, run, 1);
    else if (bits == 2) unfold(codes, packed, run, 2);
    else if (bits == 4) unfold(codes, packed, run, 4);
    else unfold(codes, packed, run, 8);
}

/* ---- bins of given edges ---- */

enum { MAX_EDGES = 16 };

typedef struct {
    int64_t bits;              /* 0: bins of one width, with no edges */
    int32_t edge[MAX_EDGES];   /* in units of 2^-16 of a step */
    uint32_t width[MAX_EDGES]; /* of the bin above the edge */
} bin_edges;

INLINE bin_edges make_edges(const float *edges, int64_t bits) {
    bin_edges bins = {0};
    if (!edges) return bins;
    bins.bits = bits;
    const int64_t last = (1 << bits) - 1;
    for (int64_t c = 0; c <= last; c++) bins.edge[c] = (int32_t)(edges[c] * 65536.0f + 0.5f);
    for (int64_t c = 0; c < last; c++) bins.width[c] = (uint32_t)(bins.edge[c + 1] - bins.edge[c]);
    return bins;
}

/* Code of a position of so many 2^-16 steps. */
INLINE uint8_t code_between(int32_t steps, uint32_t random, bin_edges bins, const int bits) {
    uint32_t code = 0, width = bins.width[0];
    int32_t upper = bins.edge[1];
    for (int c = 1; c < (1 << bits) - 1; c++) {
        const int above = steps >= bins.edge[c];
        code += (uint32_t)above;
        width = above ? bins.width[c] : width;
        upper = above ? bins.edge[c + 1] : upper;
    }
    /* random * width >> 16 in 32 bits: random has 16. */
    const uint32_t part = random * (width >> 16) + (random * (width & 0xFFFF) >> 16);
    return (uint8_t)(code + (uint32_t)(steps + (int32_t)part >= upper));
}

/* ---- codes of a block ---- */

/* Codes of n values: round_columns of common.h with the offset taken off in the same loop. `edge_bits` is a constant: 0
 * for bins of one width. */
INLINE void round_values(
    uint8_t *codes, const float *x, int64_t n, const random_bits *bits, block_scale scale, bin_edges bins,
    const int edge_bits
) {
    for (int64_t i = 0; i < n; i++) {
        const int32_t steps = (int32_t)((x[i] - scale.low) * scale.steps);
        if (edge_bits) codes[i] = code_between(steps, bits->column[i], bins, edge_bits);
        else codes[i] = (uint8_t)((steps + (int32_t)bits->column[i]) >> 16);
    }
}

/* The same for any bins. */
static void round_any(
    uint8_t *codes, const float *x, int64_t n, const random_bits *bits, block_scale scale, const bin_edges *bins
) {
    if (bins->bits == 0) round_values(codes, x, n, bits, scale, *bins, 0);
    else if (bins->bits == 1) round_values(codes, x, n, bits, scale, *bins, 1);
    else if (bins->bits == 2) round_values(codes, x, n, bits, scale, *bins, 2);
    else round_values(codes, x, n, bits, scale, *bins, 4);
}

INLINE void round_block(
    uint8_t *codes, const float *x, int64_t block, int64_t n, int64_t pairs, block_scale scale, rounding rule,
    const bin_edges *bins
) {
    if (scale.steps == 0.0f) {
        memset(codes, 0, (size_t)n);
        return;
    }
    random_bits bits;
    if (!rule.stochastic)
        for (int64_t i = 0; i < min_i64(ROUND_BLOCK, n); i++) bits.column[i] = 1 << 15;
    for (int64_t first = 0; first < n; first += ROUND_BLOCK) {
        const int64_t count = min_i64(ROUND_BLOCK, n - first);
        if (rule.stochastic) hash_pairs(bits.pair, (uint64_t)(block * pairs + first / 2), (count + 1) / 2, rule.seed);
        round_any(codes + first, x + first, count, &bits, scale, bins);
    }
}

/* ---- blocks ---- */

/* `x` holds n values, of which the first belongs to the block `first_block`; `edges` may be null: bins of one width. */
EXPORT void qgnn_blocks_pack(
    uint8_t *packed, float *low, float *step, const float *x, const int64_t *seed, const float *edges,
    int64_t stream_key, int64_t bits, int64_t metadata, int64_t first_block, int64_t n, int64_t G, int64_t threads
) {
    const rounding rule = make_rounding(seed, stream_key, (1 << bits) - 1);
    const bin_edges bins = make_edges(edges, bits);
    const int64_t pairs = pairs_per_row(G), blocks = (n + G - 1) / G, run = G * bits / 8;
    threads = useful_threads(n, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t b = 0; b < blocks; b++) {
        uint8_t codes[MAX_BLOCK];
        const int64_t count = min_i64(G, n - b * G);
        const block_scale scale = scale_of_block(x + b * G, count, rule.qmax, metadata);
        low[b] = scale.low;
        step[b] = scale.step;
        round_block(codes, x + b * G, first_block + b, count, pairs, scale, rule, &bins);
        memset(codes + count, 0, (size_t)(G - count));
        fold_any(packed + b * run, codes, run, bits);
    }
}

EXPORT void qgnn_blocks_unpack(
    float *x, const uint8_t *packed, const float *low, const float *step, const float *edges, int64_t bits, int64_t n,
    int64_t G, int64_t threads
) {
    const int64_t blocks = (n + G - 1) / G, run = G * bits / 8;
    threads = useful_threads(n, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t b = 0; b < blocks; b++) {
        uint8_t codes[MAX_BLOCK];
        float *restrict values = x + b * G;
        const int64_t count = min_i64(G, n - b * G);
        const float offset = low[b], width = step[b];
        unfold_any(codes, packed + b * run, run, bits);
        if (edges) {
            float value[MAX_EDGES];
            for (int c = 0; c < 1 << bits; c++) value[c] = offset + width * edges[c];
            for (int64_t i = 0; i < count; i++) values[i] = value[codes[i]];
        } else {
            for (int64_t i = 0; i < count; i++) values[i] = offset + width * (float)codes[i];
        }
    }
}

/* ---- random projection ---- */

enum { ROWS = 8, COLUMNS = 16, TERMS = 4 }; /* of a tile of sums, and terms added to it at a time */
enum { WORD = 32 };                         /* signs of a hash */

/* What a row's own signs follow from. */
typedef struct {
    uint64_t key;
    uint64_t first;  /* counter of the first word of row 0 */
    int64_t words;   /* from a row to the next */
} row_signs;

INLINE row_signs make_row_signs(const int64_t *seed, int64_t stream_key, int64_t first_row, int64_t F) {
    row_signs own = {(uint64_t)*seed ^ (uint64_t)stream_key, (uint64_t)1 << 40, max_i64(1, 2 * pairs_per_row(F) / WORD)};
    own.first += (uint64_t)(first_row * own.words);
    return own;
}

/* n values of a row from column `f` on with the row's own signs; they lie within a word. */
INLINE void flip(float *to, const float *from, row_signs own, int64_t row, int64_t f, int64_t n) {
    uint32_t bits;
    hash_pairs(&bits, own.first + (uint64_t)(row * own.words + f / WORD), 1, own.key);
    bits >>= f % WORD;
    for (int64_t j = 0; j < n; j++) to[j] = float_of(bits_of(from[j]) ^ (bits >> j << 31));
}

/* Signs +1 and -1 [F, R] of a projection to R columns; transposed, [R, F], if `transposed`. */
EXPORT void qgnn_blocks_signs(
    float *signs, const int64_t *seed, int64_t stream_key, int64_t F, int64_t R, int64_t transposed, int64_t threads
) {
    const uint64_t key = (uint64_t)*seed ^ (uint64_t)stream_key;
    const int64_t words = (R + 31) / 32;
    (void)threads; /* a small table */
    for (int64_t f = 0; f < F; f++)
        for (int64_t word = 0; word < words; word++) {
            uint32_t bits;
            hash_pairs(&bits, (uint64_t)(f * words + word), 1, key);
            for (int64_t r = 32 * word; r < min_i64(R, 32 * word + 32); r++)
                signs[transposed ? r * F + f : f * R + r] = bits >> (r & 31) & 1 ? -1.0f : 1.0f;
        }
}

/* sum += x * signs, for `terms` columns of x and `columns` of the signs, which are constants where it counts. A product
 * by a sign is exact, so that fused additions would give the same bits. */
INLINE void add_terms(
    float *restrict sum, const float *restrict x, const float *restrict signs, int64_t M, const int terms,
    const int columns
) {
    for (int m = 0; m < columns; m++) {
        float total = sum[m];
        for (int k = 0; k < terms; k++) total += x[k] * signs[k * M + m];
        sum[m] = total;
    }
}

/* Terms of columns [k, k + n) of all rows: n is a constant but for the last ones. */
INLINE void add_word(
    float (*sum)[COLUMNS], float (*x)[WORD], const float *signs, int64_t M, int64_t rows, int64_t n, const int columns
) {
    int64_t k = 0;
    for (; k + TERMS <= n; k += TERMS)
        for (int64_t i = 0; i < rows; i++) add_terms(sum[i], x[i] + k, signs + k * M, M, TERMS, columns);
    for (; k < n; k++)
        for (int64_t i = 0; i < rows; i++) add_terms(sum[i], x[i] + k, signs + k * M, M, 1, columns);
}

/* A tile of the product from row `first` and column `m` on, with a row's own signs on x, or on the result. */
INLINE void project_tile(
    float *out, const float *x, const float *signs, float scale, row_signs own, int64_t restores, int64_t first,
    int64_t rows, int64_t K, int64_t M, int64_t m, const int columns
) {
    float sum[ROWS][COLUMNS] = {{0}}, terms[ROWS][WORD];
    for (int64_t k = 0; k < K; k += WORD) {
        const int64_t n = min_i64(WORD, K - k);
        for (int64_t i = 0; i < rows; i++) {
            const float *from = x + (first + i) * K + k;
            if (restores) memcpy(terms[i], from, (size_t)n * sizeof(float));
            else flip(terms[i], from, own, first + i, k, n);
        }
        add_word(sum, terms, signs + k * M + m, M, rows, n, columns);
    }
    for (int64_t i = 0; i < rows; i++) {
        float *to = out + (first + i) * M + m;
        for (int c = 0; c < columns; c++) to[c] = sum[i][c] * scale;
        if (restores) flip(to, to, own, first + i, m, columns);
    }
}

/* out = (x S) @ signs * scale: [N, K] x [K, M] -> [N, M], with each row's own signs S; or, if it `restores`,
 * (x @ signs * scale) S. The terms of a sum are added in the order of k. */
EXPORT void qgnn_blocks_project(
    float *out, const float *x, const float *signs, const int64_t *seed, int64_t stream_key, float scale,
    int64_t restores, int64_t first_row, int64_t N, int64_t K, int64_t M, int64_t threads
) {
    const row_signs own = make_row_signs(seed, stream_key, first_row, restores ? M : K);
    const int64_t tiles = (N + ROWS - 1) / ROWS;
    threads = useful_threads(N * max_i64(K, M), threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t first = tile * ROWS, rows = min_i64(ROWS, N - first);
        for (int64_t m = 0; m < M; m += COLUMNS) {
            const int64_t columns = min_i64(COLUMNS, M - m);
            if (columns == COLUMNS)
                project_tile(out, x, signs, scale, own, restores, first, rows, K, M, m, COLUMNS);
            else project_tile(out, x, signs, scale, own, restores, first, rows, K, M, m, (int)columns);
        }
    }
}
