/* The instructions for products of bytes that matmul_shared.c uses, in C, for processors that do not have them. */
#include <stdint.h>
#include <string.h>

typedef int32_t __m512i __attribute__((vector_size(64)));
typedef float __m512 __attribute__((vector_size(64)));

static inline __m512i _mm512_loadu_si512(const void *from) {
    __m512i x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline void _mm512_storeu_si512(void *to, __m512i x) { memcpy(to, &x, sizeof x); }

static inline __m512i _mm512_setzero_si512(void) { return (__m512i){0}; }

static inline __m512i _mm512_set1_epi32(int32_t value) { return (__m512i){0} + value; }

static inline __m512i _mm512_set1_epi8(char value) { return _mm512_set1_epi32(0x01010101 * (uint8_t)value); }

static inline __m512i _mm512_mullo_epi32(__m512i a, __m512i b) { return a * b; }

static inline __m512 _mm512_cvtepi32_ps(__m512i x) {
    __m512 y;
    for (int i = 0; i < 16; i++) y[i] = (float)x[i];
    return y;
}

/* To each sum four products of bytes, those of `a` without a sign and those of `b` with one. */
static inline __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
    uint8_t left[64];
    int8_t right[64];
    memcpy(left, &a, sizeof left);
    memcpy(right, &b, sizeof right);
    for (int i = 0; i < 64; i++) sum[i / 4] += left[i] * right[i];
    return sum;
}
