/* The dense product of int8 codes whose blocks of columns share a power of two.
 * Oracle: qgnn.reference.matmul_shared.
 *
 * A tile is 16 outputs, a panel 6 rows. The weight is rearranged once a call, by tile and block; a panel is, once for
 * all tiles. Dot products of blocks are exact: in int32 where the CPU multiplies bytes into such sums (VNNI), and in
 * fp32 elsewhere, so that both give the same bits. With VNNI one operand has no sign: 128 is added to the codes of the
 * weight, and 128 times the sum of the codes of x taken away. */

#include "common.h"

#if defined(__AVX512VNNI__)
#include <immintrin.h>
typedef int8_t x_code;
typedef uint8_t w_code;
enum { PAIR = 2, ALIGN = 4, OFFSET = 128 };
#else
typedef float x_code, w_code;
enum { PAIR = 1, ALIGN = 1, OFFSET = 0 }; /* a pair's sums would take more registers than there are */
#endif

enum { TILE = 16, ROWS = 6, BIAS = 127 };

typedef float lanes __attribute__((vector_size(4 * TILE)));

INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* 2^e for e from -149 to 127: below -126 it is a denormal number, of one bit. */
INLINE float factor_of(int64_t e) { return e < -126 ? float_of(1u << (e + 149)) : power_of_two(e); }

/* Bytes that a rearranged code takes. */
EXPORT void qgnn_matmul_shared_code_bytes(int64_t *bytes, int64_t threads) { *bytes = sizeof(x_code); }

/* ---- rearranged operands ---- */

/* Where the code of column k of output j lies in its block and tile. */
INLINE int64_t place(int64_t k, int64_t j) { return (k / ALIGN * TILE + j) * ALIGN + k % ALIGN; }

/* packed: codes by tile and block, of `width` columns each; factor: 2^(exponent - 127 - fraction_bits) of its outputs,
 * [tiles, blocks, TILE]; last: what is added to the sums, the bias, or NaN if a block is: [tiles, TILE]. */
EXPORT void qgnn_matmul_shared_pack(
    void *packed, float *factor, float *last, const int8_t *w, const uint8_t *exponent, const float *bias, int64_t M,
    int64_t K, int64_t stride_w, int64_t stride_exponent, int64_t block_size, int64_t fraction_bits, int64_t threads
) {
    const int64_t blocks = divide_up(K, block_size), width = divide_up(block_size, ALIGN) * ALIGN;
    threads = useful_threads(M * K, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t tile = 0; tile < divide_up(M, TILE); tile++) {
        const int64_t first = tile * TILE, outputs = min_i64(TILE, M - first);
        for (int64_t j = 0; j < TILE; j++) last[first + j] = bias && j < outputs ? bias[first + j] : 0.0f;
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t n = min_i64(block_size, K - b * block_size);
            w_code *codes = (w_code *)packed + (tile * blocks + b) * width * TILE;
            float *factors = factor + (tile * blocks + b) * TILE;
            for (int64_t i = 0; i < width * TILE; i++) codes[i] = OFFSET;
            for (int64_t j = 0; j < TILE; j++) factors[j] = 0.0f;
            for (int64_t j = 0; j < outputs; j++) {
                const int8_t *from = w + (first + j) * stride_w + b * block_size;
                const int64_t e = exponent[(first + j) * stride_exponent + b];
                for (int64_t k = 0; k < n; k++) codes[place(k, j)] = (w_code)(from[k] + OFFSET);
                if (e == NAN_EXPONENT) last[first + j] = NAN;
                else factors[j] = factor_of(e - BIAS - fraction_bits);
            }
        }
    }
}

typedef struct {
    x_code *codes;   /* [blocks, ROWS, width] */
    float *factor;   /* 2^(exponent - 127): [blocks, ROWS] */
    int32_t *offset; /* what the sums of products start with: [blocks, ROWS] */
    float last[ROWS];
} panel;

/* One block of one row: `used` codes and zeros up to `width`. Returns what the sums of products start with. */
INLINE int32_t pack_block(x_code *codes, const int8_t *from, int64_t used, int64_t width) {
    int32_t sum = 0;
    for (int64_t k = 0; k < used; k++) {
        codes[k] = from[k];
        sum += from[k];
    }
    for (int64_t k = used; k < width; k++) codes[k] = 0;
    return -OFFSET * sum;
}

INLINE void pack_panel(
    panel *p, const int8_t *x, const uint8_t *exponent, int64_t rows, int64_t K, int64_t stride_x,
    int64_t stride_exponent, int64_t block_size, int64_t width
) {
    const int64_t blocks = divide_up(K, block_size);
    for (int64_t r = 0; r < ROWS; r++) {
        const int has_codes = r < rows;
        p->last[r] = 0.0f;
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t i = b * ROWS + r, n = has_codes ? min_i64(block_size, K - b * block_size) : 0;
            const int64_t e = has_codes ? exponent[r * stride_exponent + b] : 0;
            const int8_t *from = has_codes ? x + r * stride_x + b * block_size : x;
            x_code *codes = p->codes + i * width;
            /* The size of a whole block is a constant, as a rule. */
            p->offset[i] = n == block_size ? pack_block(codes, from, block_size, width) : pack_block(codes, from, n, width);
            p->factor[i] = e == NAN_EXPONENT ? 0.0f : factor_of(e - BIAS);
            if (e == NAN_EXPONENT) p->last[r] = NAN;
        }
    }
}

/* ---- products ---- */

/* dot[r * tiles + t] = dot products of one block of a panel with `tiles` tiles, which lie `stride` codes apart. */
INLINE void block_dots(
    lanes *dot, const x_code *x, const int32_t *offset, const w_code *w, int64_t stride, int64_t width, const int tiles
) {
#if defined(__AVX512VNNI__)
    __m512i sum[ROWS * PAIR];
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < tiles; t++) sum[r * tiles + t] = _mm512_set1_epi32(offset[r]);
    for (int64_t k = 0; k < width; k += ALIGN) {
        __m512i four[PAIR];
        for (int t = 0; t < tiles; t++) four[t] = _mm512_loadu_si512(w + t * stride + k * TILE);
        for (int r = 0; r < ROWS; r++) {
            int32_t of_row;
            memcpy(&of_row, x + r * width + k, ALIGN);
            for (int t = 0; t < tiles; t++)
                sum[r * tiles + t] = _mm512_dpbusd_epi32(sum[r * tiles + t], four[t], _mm512_set1_epi32(of_row));
        }
    }
    for (int i = 0; i < ROWS * tiles; i++) dot[i] = (lanes)_mm512_cvtepi32_ps(sum[i]);
#else
    for (int i = 0; i < ROWS * tiles; i++) dot[i] = (lanes){0};
    for (int64_t k = 0; k < width; k++)
        for (int t = 0; t < tiles; t++) {
            lanes of_tile;
            memcpy(&of_tile, w + t * stride + k * TILE, sizeof of_tile);
            for (int r = 0; r < ROWS; r++) dot[r * tiles + t] += x[r * width + k] * of_tile;
        }
#endif
}

/* Sums over the blocks: sum[r * tiles + t]. */
INLINE void sum_blocks(
    lanes *sum, const panel *p, const w_code *w, const float *factor, int64_t blocks, int64_t width, const int tiles
) {
    lanes own[ROWS * PAIR]; /* in registers, which those of the caller are not */
    for (int i = 0; i < ROWS * tiles; i++) own[i] = (lanes){0};
    for (int64_t b = 0; b < blocks; b++) {
        lanes dot[ROWS * PAIR], of_tile;
        block_dots(
            dot, p->codes + b * ROWS * width, p->offset + b * ROWS, w + b * width * TILE, blocks * width * TILE, width,
            tiles
        );
        for (int t = 0; t < tiles; t++) {
            memcpy(&of_tile, factor + (t * blocks + b) * TILE, sizeof of_tile);
            for (int r = 0; r < ROWS; r++)
                own[r * tiles + t] += dot[r * tiles + t] * of_tile * p->factor[b * ROWS + r];
        }
    }
    for (int i = 0; i < ROWS * tiles; i++) sum[i] = own[i];
}

/* out[r, j] = sum[r * stride_sum][j] + last of its column and of its row, for some outputs of a tile. */
INLINE void store_tile(
    float *out, const lanes *sum, int64_t stride_sum, const float *last, const float *last_of_row, int64_t rows, int64_t M,
    int64_t outputs
) {
    lanes of_tile;
    memcpy(&of_tile, last, sizeof of_tile);
    for (int64_t r = 0; r < rows; r++) {
        const lanes y = sum[r * stride_sum] + (of_tile + last_of_row[r]);
        if (outputs == TILE) memcpy(out + r * M, &y, sizeof y);
        else
            for (int64_t j = 0; j < outputs; j++) out[r * M + j] = y[j];
    }
}

/* out = the sums over blocks + last: [N, M]. The scratch of each part is of blocks * ROWS factors, as many offsets, and
 * `width` times as many codes. */
EXPORT void qgnn_matmul_shared(
    float *out, char *scratch, const void *packed, const float *factor, const float *last, const int8_t *x,
    const uint8_t *exponent, int64_t N, int64_t M, int64_t K, int64_t stride_x, int64_t stride_exponent,
    int64_t block_size, int64_t parts, int64_t threads
) {
    const int64_t blocks = divide_up(K, block_size), width = divide_up(block_size, ALIGN) * ALIGN;
    const int64_t tiles = divide_up(M, TILE), panels = divide_up(N, ROWS);
    threads = useful_threads(N * M * blocks, threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < parts; part++) {
        float *own = (float *)(scratch + part * blocks * ROWS * (2 * 4 + width * (int64_t)sizeof(x_code)));
        panel p = {.factor = own, .offset = (int32_t *)own + blocks * ROWS, .codes = (x_code *)(own + 2 * blocks * ROWS)};
        for (int64_t n = panels * part / parts * ROWS; n < min_i64(N, panels * (part + 1) / parts * ROWS); n += ROWS) {
            const int64_t rows = min_i64(ROWS, N - n);
            const int8_t *codes = x + n * stride_x;
            const uint8_t *e = exponent + n * stride_exponent;
            if (block_size == 16) pack_panel(&p, codes, e, rows, K, stride_x, stride_exponent, 16, 16);
            else if (block_size == 32) pack_panel(&p, codes, e, rows, K, stride_x, stride_exponent, 32, 32);
            else pack_panel(&p, codes, e, rows, K, stride_x, stride_exponent, block_size, width);
            for (int64_t tile = 0; tile < tiles; tile += PAIR) {
                const int count = tile + PAIR <= tiles ? PAIR : 1;
                const w_code *w = (const w_code *)packed + tile * blocks * width * TILE;
                const float *factors = factor + tile * blocks * TILE;
                const int64_t m = tile * TILE;
                lanes sum[ROWS * PAIR];
                if (count < PAIR) sum_blocks(sum, &p, w, factors, blocks, width, 1);
                else if (width == 16) sum_blocks(sum, &p, w, factors, blocks, 16, PAIR);
                else if (width == 32) sum_blocks(sum, &p, w, factors, blocks, 32, PAIR);
                else sum_blocks(sum, &p, w, factors, blocks, width, PAIR);
                for (int t = 0; t < count; t++)
                    store_tile(
                        out + n * M + m + t * TILE, sum + t, count, last + m + t * TILE, p.last, rows, M,
                        min_i64(TILE, M - m - t * TILE)
                    );
            }
        }
    }
}
