/* SHA-256 in plain C, the choice of a way to compute it, and the chain of block hashes. */
#include "hash.h"

#include <stdlib.h>
#include <string.h>

#define BLOCK_TAG 1u
#define TOKENS_AT (1 + KV_HASH_BYTES + 4) /* tag, parent, number of tokens */
#define LENGTH_BYTES 8                    /* at the end of the padding: the message's bits */

/* Fractional parts of the cube roots of the first 64 primes. */
const uint32_t kv_sha_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

/* Fractional parts of the square roots of the first 8 primes. */
const uint32_t kv_sha_initial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static uint32_t rotated(uint32_t word, int bits) { return word >> bits | word << (32 - bits); }

static uint32_t big_endian(const uint8_t *bytes) {
    return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
}

static void put_big_endian(uint8_t *bytes, uint32_t word) {
    for (int i = 0; i < 4; i++) bytes[i] = (uint8_t)(word >> (24 - 8 * i));
}

static void put_little_endian(uint8_t *bytes, uint32_t word) {
    for (int i = 0; i < 4; i++) bytes[i] = (uint8_t)(word >> (8 * i));
}

static void compress_plain(uint32_t state[8], const uint8_t *bytes, size_t count) {
    for (; count; count--, bytes += KV_SHA_BLOCK_BYTES) {
        uint32_t w[64];
        for (int i = 0; i < 16; i++) w[i] = big_endian(bytes + 4 * i);
        for (int i = 16; i < 64; i++) {
            const uint32_t early = rotated(w[i - 15], 7) ^ rotated(w[i - 15], 18) ^ w[i - 15] >> 3;
            const uint32_t late = rotated(w[i - 2], 17) ^ rotated(w[i - 2], 19) ^ w[i - 2] >> 10;
            w[i] = w[i - 16] + early + w[i - 7] + late;
        }
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
        uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
        for (int i = 0; i < 64; i++) {
            const uint32_t first = h + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + ((e & f) ^ (~e & g)) +
                                   kv_sha_constants[i] + w[i];
            const uint32_t second = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + first;
            d = c, c = b, b = a, a = first + second;
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d;
        state[4] += e, state[5] += f, state[6] += g, state[7] += h;
    }
}

const kv_sha_way kv_sha_ways[] = {
#ifdef KV_HAVE_SHA
    {"sha", kv_sha_x86, kv_sha_x86_chain, KV_CPU_SHA},
#endif
#ifdef KV_HAVE_SHA_ARM
    {"sha", kv_sha_arm, NULL, KV_CPU_SHA},
#endif
    {"plain", compress_plain, NULL, 0},
    {NULL, NULL, NULL, 0},
};

int kv_sha_way_runs_here(const kv_sha_way *way) { return (kv_cpu() & way->needs) == way->needs; }

static void chain_by_compress(kv_sha_compress compress, const uint8_t parent[KV_HASH_BYTES], uint8_t *messages,
                              size_t runs, size_t count, uint8_t *out) {
    for (size_t i = 0; i < count; i++, parent = out, out += KV_HASH_BYTES) {
        uint32_t state[8];
        uint8_t *message = messages + i * runs * KV_SHA_BLOCK_BYTES;
        memcpy(state, kv_sha_initial, sizeof state);
        memcpy(message + 1, parent, KV_HASH_BYTES);
        compress(state, message, runs);
        for (int k = 0; k < 8; k++) put_big_endian(out + 4 * k, state[k]);
    }
}

/* Two runs of bytes 0, 1, 2, ...: does the way end in the state that the standard gives? */
static int computes_right(const kv_sha_way *way) {
    static const uint32_t expected[8] = {0x593253ad, 0xfb4cc018, 0xbe611395, 0x485e47c1,
                                         0x5a5b271d, 0xfb8da14f, 0xe8f77fb4, 0xd05eacbc};
    uint8_t bytes[2 * KV_SHA_BLOCK_BYTES];
    uint32_t state[8];
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (uint8_t)i;
    memcpy(state, kv_sha_initial, sizeof state);
    way->compress(state, bytes, 2);
    if (memcmp(state, expected, sizeof state)) return 0;
    for (size_t runs = 1; way->chain && runs <= 2; runs++) { /* two messages, which chains take by another road */
        uint8_t messages[4 * KV_SHA_BLOCK_BYTES], made[2 * KV_HASH_BYTES], right[2 * KV_HASH_BYTES];
        for (size_t i = 0; i < sizeof messages; i++) messages[i] = (uint8_t)(3 * i);
        way->chain(bytes, messages, runs, 2, made);
        chain_by_compress(way->compress, bytes, messages, runs, 2, right);
        if (memcmp(made, right, sizeof right)) return 0;
    }
    return 1;
}

const kv_sha_way *kv_sha_best(void) {
    static const kv_sha_way *best; /* written with the same value by whoever comes first */
    if (best) return best;
    const kv_sha_way *way = kv_sha_ways;
    while (way[1].name && !(kv_sha_way_runs_here(way) && computes_right(way))) way++;
    return best = way;
}

static void put_tokens(uint8_t *bytes, const uint32_t *tokens, int64_t count) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    memcpy(bytes, tokens, (size_t)count * 4);
#else
    for (int64_t i = 0; i < count; i++) put_little_endian(bytes + 4 * i, tokens[i]);
#endif
}

/* All but parent and tokens, padded as SHA-256 wants it. */
static void put_frame(uint8_t *message, size_t padded_bytes, size_t message_bytes, int64_t block_tokens) {
    const uint64_t bits = 8 * (uint64_t)message_bytes;
    memset(message, 0, padded_bytes);
    message[0] = BLOCK_TAG;
    put_little_endian(message + 1 + KV_HASH_BYTES, (uint32_t)block_tokens);
    message[message_bytes] = 0x80;
    put_big_endian(message + padded_bytes - 8, (uint32_t)(bits >> 32));
    put_big_endian(message + padded_bytes - 4, (uint32_t)bits);
}

int kv_hash_chain(const kv_sha_way *way, const uint8_t parent[KV_HASH_BYTES], const uint32_t *tokens, int64_t blocks,
                  int64_t block_tokens, uint8_t *out) {
    if (!blocks) return 0; /* no message either, however large it would be */
    const size_t message_bytes = TOKENS_AT + 4 * (size_t)block_tokens + 4;
    const size_t runs = (message_bytes + 1 + LENGTH_BYTES + KV_SHA_BLOCK_BYTES - 1) / KV_SHA_BLOCK_BYTES;
    const size_t padded_bytes = runs * KV_SHA_BLOCK_BYTES;
    /* Some messages are made at a time: bytes that were only just written are read more slowly. */
    uint8_t on_stack[2048], *messages = on_stack;
    const size_t most = padded_bytes <= sizeof on_stack ? sizeof on_stack / padded_bytes : 1;
    if (padded_bytes > sizeof on_stack && !(messages = malloc(padded_bytes))) return -1;
    for (size_t i = 0; i < most && i < (size_t)blocks; i++)
        put_frame(messages + i * padded_bytes, padded_bytes, message_bytes, block_tokens);
    for (size_t done = 0, count; done < (size_t)blocks; done += count) {
        count = (size_t)blocks - done < most ? (size_t)blocks - done : most;
        for (size_t i = 0; i < count; i++)
            put_tokens(messages + i * padded_bytes + TOKENS_AT, tokens + (int64_t)(done + i) * block_tokens, block_tokens);
        uint8_t *hashes = out + done * KV_HASH_BYTES;
        const uint8_t *last = done ? hashes - KV_HASH_BYTES : parent;
        if (way->chain)
            way->chain(last, messages, runs, count, hashes);
        else
            chain_by_compress(way->compress, last, messages, runs, count, hashes);
    }
    if (messages != on_stack) free(messages);
    return 0;
}
