/* The hash chain over a sequence's tokens: SHA-256, a message a block (docs/formats/identity.md).
 *
 * SHA-256 needs its own instructions, not wider vectors, so it does not follow the path of the other kernels: it has
 * *ways* of its own, best first, and the last one runs everywhere. A way is used only after it has computed a known
 * digest. */
#ifndef KV_HASH_H
#define KV_HASH_H
#include "kernels.h"

#define KV_HASH_BYTES 32
#define KV_SHA_BLOCK_BYTES 64

/* Takes `count` runs of 64 bytes into the state: 8 words, in host byte order. */
typedef void (*kv_sha_compress)(uint32_t state[8], const uint8_t *bytes, size_t count);

/* Hashes `count` padded messages of `runs` runs of 64 bytes, one behind the other, each with the hash before it in bytes
 * 1 to 32 (whatever stands there). */
typedef void (*kv_sha_chain)(const uint8_t parent[KV_HASH_BYTES], const uint8_t *messages, size_t runs, size_t count,
                             uint8_t *out);

typedef struct {
    const char *name;
    kv_sha_compress compress;
    kv_sha_chain chain; /* NULL: message by message, with compress */
    uint32_t needs;     /* bits of kv_cpu() */
} kv_sha_way;

/* Ends with a way without a name. */
extern const kv_sha_way kv_sha_ways[];
int kv_sha_way_runs_here(const kv_sha_way *way);
/* The first way that runs here and computes what it should. */
const kv_sha_way *kv_sha_best(void);

extern const uint32_t kv_sha_constants[64];
extern const uint32_t kv_sha_initial[8];
#ifdef KV_HAVE_SHA
void kv_sha_x86(uint32_t state[8], const uint8_t *bytes, size_t count);
void kv_sha_x86_chain(const uint8_t parent[KV_HASH_BYTES], const uint8_t *messages, size_t runs, size_t count,
                      uint8_t *out);
#endif
#if defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ && \
    (defined(__ARM_FEATURE_SHA2) || (defined(__GNUC__) && !defined(__clang__)))
#define KV_HAVE_SHA_ARM
void kv_sha_arm(uint32_t state[8], const uint8_t *bytes, size_t count);
#endif

/* Hashes of `blocks` consecutive blocks without media: out[i] = SHA-256(0x01 || out[i-1] || uint32 n || n tokens ||
 * uint32 0), out[-1] = parent. `tokens` has blocks * block_tokens words, `out` room for blocks * 32 bytes. 0, or -1
 * when there is no memory for one message. */
int kv_hash_chain(const kv_sha_way *way, const uint8_t parent[KV_HASH_BYTES], const uint32_t *tokens, int64_t blocks,
                  int64_t block_tokens, uint8_t *out);

#endif
