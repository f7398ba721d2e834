/* The dense product of int8 codes whose blocks of columns share a power of two.
 * Oracle: qgnn.reference.matmul_shared.
 *
 * A tile is 16 outputs, a panel 6 rows. The weight is rearranged once a call, by tile and block; a panel is copied, once
 * for all tiles. Dot products of blocks are exact, in what the CPU is quick at: products of bytes added to int32 (VNNI),
 * of pairs of int16 (AVX2), or of fp32. All give the same bits. With VNNI one operand has no sign: 128 is added to the
 * codes of x, and 128 times the sums of the codes of the weight are taken away. */

#include "common.h"

#if defined(__AVX512VNNI__)
#include <immintrin.h>
typedef uint8_t x_code;
typedef int8_t w_code;
enum { PAIR = 2, ALIGN = 4, OFFSET = 128 };
#elif defined(__AVX2__)
#include <immintrin.h>
typedef int16_t x_code, w_code;
enum { PAIR = 1, ALIGN = 2, OFFSET = 0 }; /* a pair's sums would take more registers than there are */
#else
typedef float x_code, w_code;
enum { PAIR = 1, ALIGN = 1, OFFSET = 0 };
#endif

enum { TILE = 16, ROWS = 6, BIAS = 127 };

typedef float lanes __attribute__((vector_size(4 * TILE)));

INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* 2^e for e from -149 to 127: below -126 it is a denormal number, of one bit. */
INLINE float factor_of(int64_t e) { return e < -126 ? float_of(1u << (e + 149)) : power_of_two(e); }

/* Bytes that a rearranged code takes. */
EXPORT void qgnn_matmul_shared_code_bytes(int64_t *bytes, int64_t threads) { *bytes = sizeof(x_code); }

/* ---- rearranged operands ---- */

/* n codes of a block of up to TILE outputs, as many side by side as the CPU multiplies at once. */
INLINE void pack_block(
    w_code *codes, int32_t *offset, const int8_t *w, int64_t stride, int64_t outputs, int64_t n, int64_t width
) {
    memset(codes, 0, (size_t)(width * TILE) * sizeof(w_code));
    for (int64_t k = 0; k < n; k += ALIGN)
        for (int64_t j = 0; j < outputs; j++) {
            w_code *to = codes + k * TILE + j * ALIGN;
            const int8_t *from = w + j * stride + k;
            if (k + ALIGN <= n)
                for (int64_t i = 0; i < ALIGN; i++) to[i] = from[i];
            else
                for (int64_t i = 0; i < n - k; i++) to[i] = from[i];
        }
#if defined(__AVX512VNNI__)
    const __m512i ones = _mm512_set1_epi8(1);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t k = 0; k < width; k += ALIGN)
        sum = _mm512_dpbusd_epi32(sum, ones, _mm512_loadu_si512(codes + k * TILE));
    _mm512_storeu_si512(offset, _mm512_mullo_epi32(sum, _mm512_set1_epi32(-OFFSET)));
#else
    memset(offset, 0, TILE * sizeof(int32_t));
#endif
}

/* Of the weight by tile and block: codes, `width` of each output; offset, what the sums of products start with, [tiles,
 * blocks, TILE]; factor, 2^(exponent - 127 - fraction_bits), [tiles, blocks, TILE]. last: what is added to the sums over
 * blocks, the bias, or NaN if a block is: [tiles, TILE]. */
EXPORT void qgnn_matmul_shared_pack(
    void *packed, int32_t *offset, float *factor, float *last, const int8_t *w, const uint8_t *exponent,
    const float *bias, int64_t M, int64_t K, int64_t stride_w, int64_t stride_exponent, int64_t block_size,
    int64_t fraction_bits, int64_t threads
) {
    const int64_t blocks = divide_up(K, block_size), width = divide_up(block_size, ALIGN) * ALIGN;
    threads = useful_threads(M * K, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t tile = 0; tile < divide_up(M, TILE); tile++) {
        const int64_t first = tile * TILE, outputs = min_i64(TILE, M - first);
        for (int64_t j = 0; j < TILE; j++) last[first + j] = bias && j < outputs ? bias[first + j] : 0.0f;
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t at = (tile * blocks + b) * TILE, n = min_i64(block_size, K - b * block_size);
            const int8_t *from = w + first * stride_w + b * block_size;
            w_code *codes = (w_code *)packed + at * width;
            /* The sizes of a whole block are constants, as a rule. */
            if (width == 16 && n == 16) pack_block(codes, offset + at, from, stride_w, outputs, 16, 16);
            else if (width == 32 && n == 32) pack_block(codes, offset + at, from, stride_w, outputs, 32, 32);
            else pack_block(codes, offset + at, from, stride_w, outputs, n, width);
            for (int64_t j = 0; j < TILE; j++) {
                const int64_t e = j < outputs ? exponent[(first + j) * stride_exponent + b] : NAN_EXPONENT;
                factor[at + j] = e == NAN_EXPONENT ? 0.0f : factor_of(e - BIAS - fraction_bits);
                if (e == NAN_EXPONENT) last[first + j] = NAN;
            }
        }
    }
}

typedef struct {
    x_code *codes; /* [ROWS, blocks, width] */
    float *factor; /* 2^(exponent - 127): [ROWS, blocks] */
    float last[ROWS];
} panel;

/* n codes, and zeros up to `width`: so has the weight, but what lies in scratch may be a NaN. */
INLINE void copy_codes(x_code *restrict to, const int8_t *restrict from, int64_t n, int64_t width) {
    for (int64_t k = 0; k < n; k++) to[k] = (x_code)(from[k] + OFFSET);
    for (int64_t k = n; k < width; k++) to[k] = 0;
}

INLINE void pack_panel(
    panel *p, const int8_t *x, const uint8_t *exponent, int64_t rows, int64_t K, int64_t stride_x,
    int64_t stride_exponent, int64_t block_size, int64_t width
) {
    const int64_t blocks = divide_up(K, block_size);
    for (int64_t r = 0; r < ROWS; r++) {
        const int64_t row = min_i64(r, rows - 1); /* rows that there are not are copies: they are not stored */
        const int8_t *from = x + row * stride_x;
        const uint8_t *of_row = exponent + row * stride_exponent;
        x_code *codes = p->codes + r * blocks * width;
        float *factor = p->factor + r * blocks;
        if (width == block_size) copy_codes(codes, from, K, blocks * width);
        else
            for (int64_t b = 0; b < blocks; b++)
                copy_codes(codes + b * width, from + b * block_size, min_i64(block_size, K - b * block_size), width);
        int is_nan = 0;
        for (int64_t b = 0; b < blocks; b++) {
            const uint32_t e = of_row[b];
            factor[b] = float_of(e == NAN_EXPONENT ? 0 : e ? e << 23 : 1u << 22); /* 2^-127 is a denormal number */
            is_nan |= e == NAN_EXPONENT;
        }
        p->last[r] = is_nan ? NAN : 0.0f;
    }
}

/* ---- products ---- */

/* dot[r * tiles + t] = dot products of one block of a panel, whose rows lie `pitch` codes apart, with `tiles` tiles, which
 * lie `stride` outputs apart. */
INLINE void block_dots(
    lanes *dot, const x_code *x, int64_t pitch, const w_code *w, const int32_t *offset, int64_t stride, int64_t width,
    const int tiles
) {
#if defined(__AVX512VNNI__)
    __m512i sum[ROWS * PAIR];
    for (int t = 0; t < tiles; t++)
        for (int r = 0; r < ROWS; r++) sum[r * tiles + t] = _mm512_loadu_si512(offset + t * stride);
    for (int64_t k = 0; k < width; k += ALIGN) {
        __m512i four[PAIR];
        for (int t = 0; t < tiles; t++) four[t] = _mm512_loadu_si512(w + t * stride * width + k * TILE);
        for (int r = 0; r < ROWS; r++) {
            int32_t of_row;
            memcpy(&of_row, x + r * pitch + k, ALIGN);
            for (int t = 0; t < tiles; t++)
                sum[r * tiles + t] = _mm512_dpbusd_epi32(sum[r * tiles + t], _mm512_set1_epi32(of_row), four[t]);
        }
    }
    for (int i = 0; i < ROWS * tiles; i++) dot[i] = (lanes)_mm512_cvtepi32_ps(sum[i]);
#elif defined(__AVX2__)
    __m256i sum[ROWS][2];
    for (int r = 0; r < ROWS; r++)
        for (int half = 0; half < 2; half++) sum[r][half] = _mm256_setzero_si256();
    for (int64_t k = 0; k < width; k += ALIGN) {
        __m256i two[2];
        for (int half = 0; half < 2; half++)
            two[half] = _mm256_loadu_si256((const __m256i *)(w + k * TILE + half * TILE / 2 * ALIGN));
        for (int r = 0; r < ROWS; r++) {
            int32_t of_row;
            memcpy(&of_row, x + r * pitch + k, sizeof of_row);
            for (int half = 0; half < 2; half++) {
                const __m256i products = _mm256_madd_epi16(_mm256_set1_epi32(of_row), two[half]);
                sum[r][half] = _mm256_add_epi32(sum[r][half], products);
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int half = 0; half < 2; half++) {
            const __m256 of_half = _mm256_cvtepi32_ps(sum[r][half]);
            memcpy((float *)(dot + r) + half * TILE / 2, &of_half, sizeof of_half);
        }
#else
    for (int i = 0; i < ROWS * tiles; i++) dot[i] = (lanes){0};
    for (int64_t k = 0; k < width; k++)
        for (int t = 0; t < tiles; t++) {
            lanes of_tile;
            memcpy(&of_tile, w + t * stride * width + k * TILE, sizeof of_tile);
            for (int r = 0; r < ROWS; r++) dot[r * tiles + t] += x[r * pitch + k] * of_tile;
        }
#endif
}

/* Sums over the blocks: sum[r * tiles + t]. */
INLINE void sum_blocks(
    lanes *sum, const panel *p, const w_code *w, const int32_t *offset, const float *factor, int64_t blocks,
    int64_t width, const int tiles
) {
    lanes own[ROWS * PAIR]; /* in registers, which those of the caller are not */
    for (int i = 0; i < ROWS * tiles; i++) own[i] = (lanes){0};
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t at = b * TILE, stride = blocks * TILE;
        lanes dot[ROWS * PAIR], of_tile;
        block_dots(dot, p->codes + b * width, blocks * width, w + at * width, offset + at, stride, width, tiles);
        for (int t = 0; t < tiles; t++) {
            memcpy(&of_tile, factor + t * stride + at, sizeof of_tile);
            for (int r = 0; r < ROWS; r++)
                own[r * tiles + t] += dot[r * tiles + t] * of_tile * p->factor[r * blocks + b];
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

/* out = the sums over blocks + last: [N, M]. The scratch of each part is of blocks * ROWS factors, and `width` times as
 * many codes. */
EXPORT void qgnn_matmul_shared(
    float *out, char *scratch, const void *packed, const int32_t *offset, const float *factor, const float *last,
    const int8_t *x, const uint8_t *exponent, int64_t N, int64_t M, int64_t K, int64_t stride_x, int64_t stride_exponent,
    int64_t block_size, int64_t parts, int64_t threads
) {
    const int64_t blocks = divide_up(K, block_size), width = divide_up(block_size, ALIGN) * ALIGN;
    const int64_t tiles = divide_up(M, TILE), panels = divide_up(N, ROWS);
    threads = useful_threads(N * M * blocks, threads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < parts; part++) {
        float *own = (float *)(scratch + part * blocks * ROWS * (4 + width * (int64_t)sizeof(x_code)));
        panel p = {.factor = own, .codes = (x_code *)(own + blocks * ROWS)};
        for (int64_t n = panels * part / parts * ROWS; n < min_i64(N, panels * (part + 1) / parts * ROWS); n += ROWS) {
            const int64_t rows = min_i64(ROWS, N - n);
            const uint8_t *e = exponent + n * stride_exponent;
            pack_panel(&p, x + n * stride_x, e, rows, K, stride_x, stride_exponent, block_size, width);
            for (int64_t tile = 0; tile < tiles; tile += PAIR) {
                const int count = tile + PAIR <= tiles ? PAIR : 1;
                const int64_t at = tile * blocks * TILE, m = tile * TILE;
                const w_code *w = (const w_code *)packed + at * width;
                lanes sum[ROWS * PAIR];
                if (count < PAIR && width == 16) sum_blocks(sum, &p, w, offset + at, factor + at, blocks, 16, 1);
                else if (count < PAIR && width == 32) sum_blocks(sum, &p, w, offset + at, factor + at, blocks, 32, 1);
                else if (count < PAIR) sum_blocks(sum, &p, w, offset + at, factor + at, blocks, width, 1);
                else if (width == 16) sum_blocks(sum, &p, w, offset + at, factor + at, blocks, 16, PAIR);
                else if (width == 32) sum_blocks(sum, &p, w, offset + at, factor + at, blocks, 32, PAIR);
                else sum_blocks(sum, &p, w, offset + at, factor + at, blocks, width, PAIR);
                for (int t = 0; t < count; t++)
                    store_tile(
                        out + n * M + m + t * TILE, sum + t, count, last + m + t * TILE, p.last, rows, M,
                        min_i64(TILE, M - m - t * TILE)
                    );
            }
        }
    }
}
