/* The exponential function and the logarithm, in plain operations that a compiler turns into vector instructions. */
#ifndef QGNN_EXP_H
#define QGNN_EXP_H

#include "common.h"

/* e^r - 1 of x = n ln 2 + r, |r| <= ln 2 / 2, and n: by Cephes' expf, of degree 7. */
INLINE float exp_reduced(float x, int32_t *n) {
    const float rounder = 0x1.8p23f; /* added to a small number, it leaves the nearest integer in the low bits */
    const float shifted = x * 1.44269504088896341f + rounder;
    const float whole = shifted - rounder;
    const float r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f; /* ln 2 in two parts: the first is exact */
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    *n = (int32_t)(bits_of(shifted) - 0x4B400000u);
    return p * (r * r) + r;
}

/* e^x in fp32.
 *
 * At most 1 ulp away, and exact at 0; where the result is denormal, at most one step of denormals away. Like expf,
 * it is inf from 88.7228 on, 0 below -103.98 (and at -inf), and NaN at NaN. */
INLINE float exp_fp32(float x) {
    x = x > 89.0f ? 89.0f : x;
    x = x < -104.0f ? -104.0f : x;
    int32_t exponent;
    const float p = exp_reduced(x, &exponent) + 1.0f;
    /* 2^n in two factors, as neither 2^128 nor 2^-150 is a normal number. */
    const int32_t half = exponent >> 1;
    return p * float_of((uint32_t)(half + 127) << 23) * float_of((uint32_t)(exponent - half + 127) << 23);
}

/* ln x in fp32 of a normal number x, by Cephes' logf: at most 1 ulp away, exact at 1; x itself if it is inf or NaN. */
INLINE float log_fp32(float x) {
    const uint32_t bits = bits_of(x) - 0x3F3504F3u; /* sqrt(1/2): 1 + m is in [sqrt(1/2), sqrt(2)) */
    const float exponent = (float)((int32_t)bits >> 23);
    const float m = float_of((bits & 0x007FFFFFu) + 0x3F3504F3u) - 1.0f, square = m * m;
    float p = 7.0376836292e-2f;
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    const float low = p * m * square + exponent * -2.12194440e-4f - 0.5f * square;
    return x <= 3.402823466e38f ? m + low + exponent * 0.693359375f : x;
}

#endif
