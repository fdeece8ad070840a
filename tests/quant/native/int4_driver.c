/* The INT4 kernels of one path without the driver, but as it calls them: heads one after another inside a chunk of
 * pieces. Compiled by the test, once per form; with -DKV_EMULATE_AMX on the tiles of amx.h. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "attention.h"
#include "vector.inc"

#include "int4_attention.inc"

#define GUARD 64
#define GUARD_BYTE 0x5a

typedef struct {
    const float *query; /* [heads][rows][key_dim], in units of log2 (without a softcap) */
    const uint8_t *records;
    const int32_t *table; /* [pieces]: which of the blocks, of `heads` records each */
    const int32_t *first, *last;
    float *maximum, *sum, *acc; /* [heads][rows], and [value_dim] more */
    int64_t heads, rows, key_dim, value_dim, latent, key_bits, value_bits, record_bytes, pieces, chunk, masked;
    double softcap;
} driven;

static uint8_t *guarded(size_t bytes) {
    uint8_t *memory = aligned_alloc(64, (bytes + GUARD + 63) / 64 * 64);
    memset(memory, GUARD_BYTE, bytes + GUARD);
    return memory;
}

static int intact(const uint8_t *memory, size_t bytes) {
    for (int i = 0; i < GUARD; i++)
        if (memory[bytes + i] != GUARD_BYTE) return 0;
    return 1;
}

static int fill(const driven *d, int64_t from, int64_t head, kv_int4_piece *pieces) {
    int count = 0;
    for (int64_t i = from; i < d->pieces && i < from + d->chunk; i++) {
        const uint8_t *record = d->records + (d->table[i] * d->heads + head) * d->record_bytes;
        pieces[count++] = (kv_int4_piece){record, (int32_t)(KV_RUN * i), (int32_t)d->masked};
    }
    return count;
}

static void attend_head(const driven *d, int64_t from, int64_t head, uint8_t *prepared, void *scratch) {
    const int rows = (int)d->rows;
    const kv_rows query = {
        .rows = rows, .key_dim = (int)d->key_dim, .value_dim = (int)d->value_dim, .latent = (int)d->latent,
        .key_bits = (int)d->key_bits, .value_bits = (int)d->value_bits, .query = d->query + head * rows * d->key_dim,
        .first = d->first, .last = d->last, .softcap = (float)d->softcap, .prepared = prepared,
    };
    kv_partial partial = {d->maximum + head * rows, d->sum + head * rows, d->acc + head * rows * d->value_dim};
    for (int row = 0; row < rows && from == 0; row++) {
        partial.maximum[row] = -INFINITY;
        partial.sum[row] = 0;
    }
    kv_int4_piece pieces[KV_CHUNK_PIECES], ahead[KV_CHUNK_PIECES];
    const int last = head + 1 == d->heads;
    const int count = fill(d, from, head, pieces);
    const int ahead_count = fill(d, last ? from + d->chunk : from, last ? 0 : head + 1, ahead);
    int4_prepare(&query, prepared);
    int4_attend(&query, pieces, count, ahead, ahead_count, scratch, &partial);
}

/* 1, or 0 when something was written behind the prepared query or the scratch. */
__attribute__((visibility("default"))) int drive(const driven *d) {
    const size_t prepared_bytes = int4_prepared_bytes((int)d->rows, (int)d->key_dim);
    const size_t scratch_bytes = int4_scratch_bytes((int)d->rows, (int)d->key_dim, (int)d->value_dim);
    uint8_t *prepared = guarded(prepared_bytes), *scratch = guarded(scratch_bytes);
    for (int64_t from = 0; from < d->pieces; from += d->chunk)
        for (int64_t head = 0; head < d->heads; head++) attend_head(d, from, head, prepared, scratch);
    const int result = intact(prepared, prepared_bytes) && intact(scratch, scratch_bytes);
    free(prepared);
    free(scratch);
    return result;
}
