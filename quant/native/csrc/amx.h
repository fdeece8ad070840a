/* AMX tiles, or C in their place: what int4_attention_amx.inc asks of them.
 *
 * Eight tile registers of up to 16 rows of 64 bytes. KV_EMULATE_AMX replaces them by C functions with the same
 * semantics, configuration and refusals included, so that the kernels are tested on machines without tiles. The tile
 * numbers of the intrinsics must be literals. */
#ifndef KV_AMX_H
#define KV_AMX_H
#include <stdint.h>
#include <string.h>

/* Operand of ldtilecfg, palette 1. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} kv_tile_config;

#ifndef KV_EMULATE_AMX
#include <immintrin.h>

/* GCC 12's intrinsics do not say that they read memory: without a barrier a store before a load may come after it. */
#define KV_TILE_BARRIER(address) __asm__ volatile("" ::"r"(address) : "memory")
#define KV_TILE_CONFIGURE(config)    \
    do {                             \
        KV_TILE_BARRIER(config);     \
        _tile_loadconfig(config);    \
    } while (0)
#define KV_TILE_RELEASE() _tile_release()
#define KV_TILE_ZERO(tile) _tile_zero(tile)
#define KV_TILE_LOAD(tile, from, stride)   \
    do {                                   \
        KV_TILE_BARRIER(from);             \
        _tile_loadd(tile, from, stride);   \
    } while (0)
#define KV_TILE_STORE(tile, to, stride)    \
    do {                                   \
        _tile_stored(tile, to, stride);    \
        KV_TILE_BARRIER(to);               \
    } while (0)
/* sums += a (signed bytes) times b (unsigned bytes), four at a time */
#define KV_TILE_DOT(sums, a, b) _tile_dpbsud(sums, a, b)

#else

#define KV_TILE_FUNCTION static __attribute__((noinline))

static _Thread_local struct {
    kv_tile_config config;
    union {
        uint8_t bytes[64];
        int8_t signed_bytes[64];
        int32_t words[16];
    } row[8][16];
} kv_tiles;

/* What raises #UD or #GP on the real thing. */
KV_TILE_FUNCTION void kv_tile_check(int ok) {
    if (!ok) __builtin_trap();
}

KV_TILE_FUNCTION void kv_tile_configure(const void *config) {
    memcpy(&kv_tiles.config, config, sizeof kv_tiles.config);
    kv_tile_check(kv_tiles.config.palette == 1 && kv_tiles.config.start_row == 0);
    for (int i = 0; i < 16; i++) {
        const int rows = kv_tiles.config.rows[i], bytes = kv_tiles.config.row_bytes[i];
        kv_tile_check(i < 8 ? rows <= 16 && bytes <= 64 && !rows == !bytes : !rows && !bytes);
    }
    memset(kv_tiles.row, 0, sizeof kv_tiles.row);
}

KV_TILE_FUNCTION void kv_tile_release(void) { memset(&kv_tiles, 0, sizeof kv_tiles); }

KV_TILE_FUNCTION void kv_tile_zero(int tile) {
    kv_tile_check(kv_tiles.config.rows[tile]);
    memset(kv_tiles.row[tile], 0, sizeof kv_tiles.row[tile]);
}

KV_TILE_FUNCTION void kv_tile_load(int tile, const void *from, int64_t stride) {
    kv_tile_zero(tile);
    for (int i = 0; i < kv_tiles.config.rows[tile]; i++)
        memcpy(kv_tiles.row[tile][i].bytes, (const uint8_t *)from + i * stride, kv_tiles.config.row_bytes[tile]);
}

KV_TILE_FUNCTION void kv_tile_store(int tile, void *to, int64_t stride) {
    kv_tile_check(kv_tiles.config.rows[tile]);
    for (int i = 0; i < kv_tiles.config.rows[tile]; i++)
        memcpy((uint8_t *)to + i * stride, kv_tiles.row[tile][i].bytes, kv_tiles.config.row_bytes[tile]);
}

KV_TILE_FUNCTION void kv_tile_dot(int sums, int a, int b) {
    const kv_tile_config *config = &kv_tiles.config;
    kv_tile_check(sums != a && sums != b && a != b && config->rows[sums] && config->rows[sums] == config->rows[a]);
    kv_tile_check(config->row_bytes[a] == 4 * config->rows[b] && config->row_bytes[sums] == config->row_bytes[b]);
    for (int m = 0; m < config->rows[sums]; m++)
        for (int k = 0; k < config->rows[b]; k++)
            for (int n = 0; n < config->row_bytes[sums] / 4; n++)
                for (int i = 0; i < 4; i++)
                    kv_tiles.row[sums][m].words[n] +=
                        kv_tiles.row[a][m].signed_bytes[4 * k + i] * kv_tiles.row[b][k].bytes[4 * n + i];
}

#define KV_TILE_CONFIGURE(config) kv_tile_configure(config)
#define KV_TILE_RELEASE() kv_tile_release()
#define KV_TILE_ZERO(tile) kv_tile_zero(tile)
#define KV_TILE_LOAD(tile, from, stride) kv_tile_load(tile, from, stride)
#define KV_TILE_STORE(tile, to, stride) kv_tile_store(tile, to, stride)
#define KV_TILE_DOT(sums, a, b) kv_tile_dot(sums, a, b)
#endif
#endif
