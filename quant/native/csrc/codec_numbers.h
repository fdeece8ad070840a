/* Number formats of the INT4 records, one number at a time, written so that compilers vectorise loops over them.
 *
 * Nothing here depends on subnormals of binary32, so a process that flushes them gets the same bytes. All constants are
 * the nearest binary32 of what docs/formats/int4.md writes. Included by every path: everything is static inline.
 */
#ifndef KV_CODEC_NUMBERS_H
#define KV_CODEC_NUMBERS_H
#include <stdint.h>
#include <string.h>

#define KV_INLINE static inline __attribute__((always_inline))

#define KV_BASE_FACTOR 0x1.36202ep-9f /* 1.06 / 448 = 0x3b1b1017 */
#define KV_BASE_FLOOR 0x1p-100f
#define KV_BASE_CEILING 0x1p106f
#define KV_SCALE_FLOOR 0x1p-9f
#define KV_NEGATED_127TH (-0x1.020408p-7f)
#define KV_128TH 0x1p-7f
#define KV_MAGNITUDE_BITS 0x77800000 /* 2^112: inputs from here on are refused */
#define KV_HALF_MAX 65504.0f
#define KV_ERROR_STEPS 64.0f

KV_INLINE uint32_t kv_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

KV_INLINE float kv_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* To the nearest integer, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves no bits for a fraction. */
KV_INLINE float kv_rint(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

KV_INLINE float kv_min(float a, float b) { return a < b ? a : b; }
KV_INLINE float kv_max(float a, float b) { return a > b ? a : b; }

KV_INLINE uint16_t kv_to_bf16(float x) {
    const uint32_t bits = kv_bits(x);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

KV_INLINE float kv_from_bf16(uint16_t x) { return kv_float((uint32_t)x << 16); }

KV_INLINE float kv_from_half(uint16_t x) {
    const uint32_t magnitude = (uint32_t)(x & 0x7fff) << 13, sign = (uint32_t)(x & 0x8000) << 16;
    const uint32_t normal = magnitude + (112u << 23) + (magnitude >= 0x0f800000u ? 112u << 23 : 0); /* Inf, NaN */
    const uint32_t small = kv_bits(kv_float(magnitude + (113u << 23)) - kv_float(113u << 23));
    return kv_float(sign | (magnitude < 0x00800000u ? small : normal));
}

/* Saturates at the largest finite number. */
KV_INLINE uint16_t kv_to_half(float x) {
    const uint32_t sign = kv_bits(x) >> 16 & 0x8000;
    const float size = kv_min(kv_float(kv_bits(x) & 0x7fffffffu), KV_HALF_MAX);
    const uint32_t bits = kv_bits(size);
    const uint32_t small = kv_bits(size + 0.5f) - kv_bits(0.5f); /* the last bit of 0.5 is 2^-24 */
    const uint32_t normal = ((bits + 0xfffu + (bits >> 13 & 1)) >> 13) - (112u << 10);
    return (uint16_t)(sign | (size < 0x1p-14f ? small : normal));
}

/* Of r >= 2^-9. */
KV_INLINE uint32_t kv_to_e4m3(float r) {
    const uint32_t bits = kv_bits(r);
    const uint32_t normal = ((bits + 0x7ffffu + (bits >> 20 & 1)) >> 20) - (120u << 3);
    const uint32_t small = kv_bits(r * 512.0f + 0x1p23f) - kv_bits(0x1p23f);
    return r < 0x1p-6f ? small : normal;
}

/* Of any byte; 0x7f and 0xff are NaN, negative ones stay negative. */
KV_INLINE float kv_from_e4m3(uint32_t code) {
    const uint32_t magnitude = code & 0x7f;
    const uint32_t normal = (magnitude << 20) + (magnitude == 0x7f ? 0x7f800000u : 120u << 23);
    const uint32_t small = kv_bits((float)(int32_t)magnitude * KV_SCALE_FLOOR);
    return kv_float((magnitude < 8 ? small : normal) | (code & 0x80) << 24);
}

KV_INLINE float kv_load_base(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
    return kv_from_bf16(bits);
}

/* The base S of scales whose largest is `largest`, stored at `at`. */
KV_INLINE float kv_store_base(float largest, uint8_t *at) {
    const uint16_t bits = kv_to_bf16(kv_max(largest * KV_BASE_FACTOR, KV_BASE_FLOOR));
    memcpy(at, &bits, 2);
    return kv_from_bf16(bits);
}

/* 1 / (2^bits - 1) */
KV_INLINE float kv_step_factor(int bits) {
    return bits == 4 ? 0x1.111112p-4f : bits == 5 ? 0x1.084210p-5f : 0x1.24924ap-3f;
}

/* 1 / sqrt(largest power of two that divides dim) */
KV_INLINE float kv_unit(int dim) {
    const int log2 = __builtin_ctz((unsigned)dim);
    const float even = kv_float((uint32_t)(127 - log2 / 2) << 23);
    return log2 % 2 ? even * 0x1.6a09e6p-1f : even; /* 1/sqrt(2) times a power of two */
}

#endif
