/* The narrow floating-point types as bits: to fp32 exactly, and from it to nearest, halves to even, as torch does.
 * Only integer steps and one exact sum, so that loops become vectors whatever the processor. */
#ifndef QGNN_HALF_H
#define QGNN_HALF_H

#include "common.h"

enum { FP32, BF16, FP16 }; /* as in library.py */

INLINE float float_of_half(uint16_t half) {
    const uint32_t magnitude = (uint32_t)(half & 0x7FFF) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t normal = magnitude + ((127 - 15) << 23), special = magnitude + ((255 - 31) << 23);
    /* A subnormal number is the mantissa of 2^-14, without its leading one. */
    const float subnormal = float_of(magnitude + ((127 - 14) << 23)) - 0x1p-14f;
    const uint32_t small = magnitude < 1u << 23 ? bits_of(subnormal) : normal;
    return float_of((magnitude < 31u << 23 ? small : special) | sign);
}

INLINE uint16_t half_of(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7FFFFFFF;
    /* The last bits of a sum with 2^-1 count 2^-24, as those of subnormal numbers do. */
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - (126u << 23);
    const uint32_t normal = (magnitude - ((127 - 15) << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
    const uint32_t special = magnitude > 0x7F800000 ? 0x7E00 : 0x7C00;
    const uint32_t finite = magnitude < (uint32_t)(127 - 14) << 23 ? subnormal : normal;
    return (uint16_t)((magnitude < (uint32_t)(127 + 16) << 23 ? finite : special) | (bits >> 16 & 0x8000));
}

INLINE uint16_t bf16_of(float value) {
    const uint32_t bits = bits_of(value), rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

INLINE float load_float(const void *x, int64_t i, const int type) {
    if (type == FP32) return ((const float *)x)[i];
    const uint16_t bits = ((const uint16_t *)x)[i];
    return type == BF16 ? float_of((uint32_t)bits << 16) : float_of_half(bits);
}

INLINE void store_half(void *y, int64_t i, float value, const int type) {
    ((uint16_t *)y)[i] = type == BF16 ? bf16_of(value) : half_of(value);
}

#endif
