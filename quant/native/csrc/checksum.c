/* XXH3-128: short inputs, and the state of long ones. The stripes of long ones are checksum.inc's. */
#include "checksum.h"

#include <string.h>

#define PRIME32_2 0x85ebca77u
#define PRIME32_3 0xc2b2ae3du
#define PRIME64_1 0x9e3779b185ebca87u
#define PRIME64_2 0xc2b2ae3d27d4eb4fu
#define PRIME64_3 0x165667b19e3779f9u
#define PRIME64_4 0x85ebca77c2b2ae63u
#define PRIME64_5 0x27d4eb2f165667c5u
#define MIX_1 0x165667919e3779f9u
#define MIX_2 0x9fb21c651e98df25u
#define SHORT_MOST_BYTES 240

const uint8_t kv_xxh_secret[KV_XXH_SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

typedef struct {
    uint64_t low, high;
} pair;

static uint32_t read32(const uint8_t *at) {
    uint32_t word;
    memcpy(&word, at, sizeof word);
    return __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? __builtin_bswap32(word) : word;
}

/* Two words of the secret as one. */
static uint64_t secret64(int at) { return kv_read64(kv_xxh_secret + at) ^ kv_read64(kv_xxh_secret + at + 8); }

static pair product(uint64_t a, uint64_t b) {
    const unsigned __int128 both = (unsigned __int128)a * b;
    return (pair){(uint64_t)both, (uint64_t)(both >> 64)};
}

static uint64_t folded_product(uint64_t a, uint64_t b) {
    const pair both = product(a, b);
    return both.low ^ both.high;
}

static uint64_t mixed(uint64_t word) {
    word = (word ^ (word >> 37)) * MIX_1;
    return word ^ (word >> 32);
}

static uint64_t mixed_well(uint64_t word) {
    word = (word ^ (word >> 33)) * PRIME64_2;
    word = (word ^ (word >> 29)) * PRIME64_3;
    return word ^ (word >> 32);
}

static pair upto_3(const uint8_t *bytes, size_t count) {
    const uint32_t all =
        (uint32_t)bytes[0] << 16 | (uint32_t)bytes[count >> 1] << 24 | bytes[count - 1] | (uint32_t)count << 8;
    const uint32_t swapped = __builtin_bswap32(all), turned = swapped << 13 | swapped >> 19;
    const uint64_t low = read32(kv_xxh_secret) ^ read32(kv_xxh_secret + 4);
    const uint64_t high = read32(kv_xxh_secret + 8) ^ read32(kv_xxh_secret + 12);
    return (pair){mixed_well(all ^ low), mixed_well(turned ^ high)};
}

static pair upto_8(const uint8_t *bytes, size_t count) {
    const uint64_t word = read32(bytes) + ((uint64_t)read32(bytes + count - 4) << 32);
    pair sum = product(word ^ secret64(16), PRIME64_1 + (count << 2));
    sum.high += sum.low << 1;
    sum.low ^= sum.high >> 3;
    sum.low = (sum.low ^ (sum.low >> 35)) * MIX_2;
    sum.low ^= sum.low >> 28;
    sum.high = mixed(sum.high);
    return sum;
}

static pair upto_16(const uint8_t *bytes, size_t count) {
    const uint64_t first = kv_read64(bytes), last = kv_read64(bytes + count - 8);
    pair sum = product(first ^ last ^ secret64(32), PRIME64_1);
    sum.low += (uint64_t)(count - 1) << 54;
    const uint64_t keyed = last ^ secret64(48);
    sum.high += keyed + (keyed & UINT32_MAX) * (uint64_t)(PRIME32_2 - 1);
    sum.low ^= __builtin_bswap64(sum.high);
    pair out = product(sum.low, PRIME64_2);
    out.high += sum.high * PRIME64_2;
    return (pair){mixed(out.low), mixed(out.high)};
}

static uint64_t mix_16(const uint8_t *bytes, const uint8_t *secret) {
    return folded_product(kv_read64(bytes) ^ kv_read64(secret), kv_read64(bytes + 8) ^ kv_read64(secret + 8));
}

static void mix_32(pair *sum, const uint8_t *one, const uint8_t *two, const uint8_t *secret) {
    sum->low += mix_16(one, secret);
    sum->low ^= kv_read64(two) + kv_read64(two + 8);
    sum->high += mix_16(two, secret + 16);
    sum->high ^= kv_read64(one) + kv_read64(one + 8);
}

static pair finished(pair sum, size_t count) {
    const uint64_t high = sum.low * PRIME64_1 + sum.high * PRIME64_4 + count * PRIME64_2;
    return (pair){mixed(sum.low + sum.high), 0 - mixed(high)};
}

static pair upto_128(const uint8_t *bytes, size_t count) {
    pair sum = {count * PRIME64_1, 0};
    for (int at = (int)(count - 1) / 32 * 16; at >= 0; at -= 16)
        mix_32(&sum, bytes + at, bytes + count - 16 - at, kv_xxh_secret + 2 * at);
    return finished(sum, count);
}

static pair upto_240(const uint8_t *bytes, size_t count) {
    pair sum = {count * PRIME64_1, 0};
    for (size_t at = 0; at < 128; at += 32) mix_32(&sum, bytes + at, bytes + at + 16, kv_xxh_secret + at);
    sum = (pair){mixed(sum.low), mixed(sum.high)};
    for (size_t at = 128; at + 32 <= count; at += 32)
        mix_32(&sum, bytes + at, bytes + at + 16, kv_xxh_secret + 3 + at - 128);
    mix_32(&sum, bytes + count - 16, bytes + count - 32, kv_xxh_secret + 136 - 17 - 16);
    return finished(sum, count);
}

static pair of_short(const uint8_t *bytes, size_t count) {
    if (!count) return (pair){mixed_well(secret64(64)), mixed_well(secret64(80))};
    if (count <= 3) return upto_3(bytes, count);
    if (count <= 8) return upto_8(bytes, count);
    if (count <= 16) return upto_16(bytes, count);
    return count <= 128 ? upto_128(bytes, count) : upto_240(bytes, count);
}

static uint64_t merged(const uint64_t sums[8], const uint8_t *secret, uint64_t start) {
    for (int i = 0; i < 8; i += 2)
        start += folded_product(sums[i] ^ kv_read64(secret + 8 * i), sums[i + 1] ^ kv_read64(secret + 8 * i + 8));
    return mixed(start);
}

static pair of_long(const kv_checksum *state) {
    uint64_t sums[8];
    memcpy(sums, state->sums, sizeof sums);
    uint8_t last[KV_STRIPE_BYTES];
    const size_t held = state->held;
    if (held >= sizeof last) {
        kv_active()->checksum->sum(sums, state->stripe, state->kept, (int64_t)(held - 1) / KV_STRIPE_BYTES, NULL, 0);
        memcpy(last, state->kept + held - sizeof last, sizeof last);
    } else {
        memcpy(last, state->kept + KV_KEPT_BYTES - (sizeof last - held), sizeof last - held);
        memcpy(last + sizeof last - held, state->kept, held);
    }
    kv_xxh_stripe(sums, last, kv_xxh_secret + KV_XXH_SECRET_BYTES - KV_STRIPE_BYTES - 7);
    const uint8_t *high = kv_xxh_secret + KV_XXH_SECRET_BYTES - KV_STRIPE_BYTES - 11;
    return (pair){merged(sums, kv_xxh_secret + 11, state->total_bytes * PRIME64_1),
                  merged(sums, high, ~(state->total_bytes * PRIME64_2))};
}

void kv_checksum_begin(kv_checksum *state) {
    static const uint64_t first[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                      PRIME64_4, PRIME32_2, PRIME64_5, KV_PRIME32_1};
    memset(state, 0, sizeof *state);
    memcpy(state->sums, first, sizeof first);
}

/* Into what is kept, and from there to the target: read once. */
static void keep(kv_checksum *state, const uint8_t *source, int64_t bytes, uint8_t *target) {
    memcpy(state->kept + state->held, source, (size_t)bytes);
    if (target) memcpy(target, state->kept + state->held, (size_t)bytes);
    state->held += (uint32_t)bytes;
}

void kv_checksum_update(kv_checksum *state, const uint8_t *source, int64_t bytes, uint8_t *target, int stream) {
    if (bytes <= 0) return;
    const kv_checksum_ops *ops = kv_active()->checksum;
    state->total_bytes += (uint64_t)bytes;
    if (bytes <= KV_KEPT_BYTES - (int64_t)state->held) {
        keep(state, source, bytes, target);
        return;
    }
    if (state->held) {
        const int64_t fill = KV_KEPT_BYTES - (int64_t)state->held;
        keep(state, source, fill, target);
        state->stripe =
            ops->sum(state->sums, state->stripe, state->kept, KV_KEPT_BYTES / KV_STRIPE_BYTES, NULL, 0);
        state->held = 0;
        source += fill, bytes -= fill;
        if (target) target += fill;
    }
    if (bytes > KV_KEPT_BYTES) {
        const int64_t stripes = (bytes - 1) / KV_STRIPE_BYTES, done = stripes * KV_STRIPE_BYTES;
        /* The last one may end the whole: it is read once too, from its copy. */
        state->stripe = ops->sum(state->sums, state->stripe, source, stripes - 1, target, stream);
        source += done, bytes -= done;
        if (target) target += done;
        uint8_t *last = state->kept + KV_KEPT_BYTES - KV_STRIPE_BYTES;
        memcpy(last, source - KV_STRIPE_BYTES, KV_STRIPE_BYTES);
        if (target) memcpy(target - KV_STRIPE_BYTES, last, KV_STRIPE_BYTES);
        state->stripe = ops->sum(state->sums, state->stripe, last, 1, NULL, 0);
    }
    keep(state, source, bytes, target);
}

void kv_checksum_digest(const kv_checksum *state, uint8_t out[KV_CHECKSUM_BYTES]) {
    const pair sum = state->total_bytes <= SHORT_MOST_BYTES ? of_short(state->kept, (size_t)state->total_bytes)
                                                            : of_long(state);
    for (int i = 0; i < 8; i++) {
        out[i] = (uint8_t)(sum.high >> (56 - 8 * i));
        out[8 + i] = (uint8_t)(sum.low >> (56 - 8 * i));
    }
}
