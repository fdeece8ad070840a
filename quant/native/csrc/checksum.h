/* XXH3-128 (seed 0, default secret) as in the public specification, docs/formats/frame.md: a checksum, no signature.
 *
 * Bit-equal to the xxhash package. What is long goes through the stripes of the path in use, at the speed of memory;
 * a copy can be made on the way, so that bytes are read once. */
#ifndef KV_CHECKSUM_H
#define KV_CHECKSUM_H
#include "kernels.h"

#define KV_CHECKSUM_BYTES 16
#define KV_STRIPE_BYTES 64
#define KV_BLOCK_STRIPES 16 /* stripes from one scramble to the next */
#define KV_KEPT_BYTES 256
#define KV_XXH_SECRET_BYTES 192

extern const uint8_t kv_xxh_secret[KV_XXH_SECRET_BYTES];

#define KV_PRIME32_1 0x9e3779b1u

/* How bytes come to the target of a fused copy. */
typedef enum { KV_STORE_NONE = 0, KV_STORE_CACHED = 1, KV_STORE_STREAM = 2 } kv_store;

/* A checksum under way. Its bytes may be copied to keep it where it is. */
typedef struct {
    uint64_t sums[8];
    uint64_t total_bytes;
    uint32_t stripe; /* of the block, summed so far: 0..15 */
    uint32_t held;   /* bytes at the start of `kept` that have not been summed: at most all of it */
    uint8_t kept[KV_KEPT_BYTES]; /* behind them, at the end: the last stripe that has been */
} kv_checksum;

static inline uint64_t kv_read64(const uint8_t *at) {
    uint64_t word;
    __builtin_memcpy(&word, at, sizeof word);
    return __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? __builtin_bswap64(word) : word;
}

/* The plain form: a stripe into the sums; each lane also gets its neighbour's plain bytes. */
static inline void kv_xxh_stripe(uint64_t sums[8], const uint8_t *source, const uint8_t *secret) {
    for (int i = 0; i < 8; i++) {
        const uint64_t word = kv_read64(source + 8 * i), keyed = word ^ kv_read64(secret + 8 * i);
        sums[i ^ 1] += word;
        sums[i] += (keyed & UINT32_MAX) * (keyed >> 32);
    }
}

static inline void kv_xxh_scramble(uint64_t sums[8]) {
    for (int i = 0; i < 8; i++) {
        const uint64_t folded = sums[i] ^ (sums[i] >> 47);
        sums[i] = (folded ^ kv_read64(kv_xxh_secret + KV_XXH_SECRET_BYTES - KV_STRIPE_BYTES + 8 * i)) * KV_PRIME32_1;
    }
}

struct kv_checksum_ops {
    /* Sums whole stripes, of which at least one more byte follows. target: gets the same bytes, unless NULL; the two
     * do not overlap. stream: stores go past the cache. Returns the next stripe of the block. */
    uint32_t (*sum)(uint64_t sums[8], uint32_t stripe, const uint8_t *source, int64_t stripes, uint8_t *target,
                    int stream);
};

void kv_checksum_begin(kv_checksum *state);
/* Takes bytes in; target (NULL: none) gets exactly the bytes that were summed, even while another thread writes to
 * the source. */
void kv_checksum_update(kv_checksum *state, const uint8_t *source, int64_t bytes, uint8_t *target, int stream);
/* In canonical form, big-endian. The state may go on. */
void kv_checksum_digest(const kv_checksum *state, uint8_t out[KV_CHECKSUM_BYTES]);

#endif
