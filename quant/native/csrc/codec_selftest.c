/* Does the active path code as the reference does? Asked before a path is used on a machine for the first time.
 *
 * Inputs are made here, from a small generator; what the torch reference makes of the same inputs was digested once
 * (tests/quant/native/test_selftest.py makes the inputs and the digests anew and compares them with these). */
#include <string.h>

#include "codec.h"
#include "codec_numbers.h"

#define ENCODED_DIGEST 8499349204151606185u
#define DECODED_DIGEST 12503626380263945784u
#define ROW_BYTES_MAX (KV_RUN * 576 * 4)
#define LIMIT (0.15 * 0.15 * 4096.0)

static const struct {
    int key_dim, value_dim;
    kv_dtype dtype;
} cases[] = {
    {64, 64, KV_BF16}, {128, 128, KV_BF16}, {128, 128, KV_F32}, {96, 80, KV_F16}, {576, 0, KV_BF16}, {8, 256, KV_F32},
};

static kv_record_layout layout_of(int key_dim, int value_dim) {
    kv_record_layout at = {.key_dim = key_dim, .value_dim = value_dim, .key_bits = 4, .value_bits = 4};
    at.value_codes = 8 * key_dim;
    at.key_plane = at.value_plane = at.key_scales = at.value_codes + 8 * value_dim;
    at.key_zeros = at.key_scales + key_dim;
    at.value_scales = at.key_zeros + key_dim;
    at.value_zeros = at.value_scales + (value_dim ? 16 : 0);
    at.key_base = at.value_zeros + (value_dim ? 8 : 0);
    at.value_base = at.key_base + 2;
    at.used_bytes = at.value_base + (value_dim ? 2 : 0);
    at.record_bytes = (at.used_bytes + 63) / 64 * 64;
    return at;
}

/* Whole numbers of 8 bits, times a power of two that goes with the channel, off centre in every third: exact in every
 * type. */
static void fill(char *rows, int dim, kv_dtype dtype, uint32_t *state) {
    for (int t = 0; t < KV_RUN; t++)
        for (int c = 0; c < dim; c++) {
            *state = *state * 1664525u + 1013904223u;
            const int whole = (int)(*state >> 24) - (c % 3 ? 128 : 40);
            const float x = (float)whole * kv_float((uint32_t)(127 - 7 + c % 5) << 23);
            const uint16_t word = dtype == KV_BF16 ? kv_to_bf16(x) : kv_to_half(x);
            if (dtype == KV_F32)
                memcpy(rows + (t * dim + c) * 4, &x, 4);
            else
                memcpy(rows + (t * dim + c) * 2, &word, 2);
        }
}

static uint64_t digest(uint64_t before, const void *bytes, size_t count) {
    for (size_t i = 0; i < count; i += 8) {
        uint64_t word = 0;
        memcpy(&word, (const char *)bytes + i, count - i < 8 ? count - i : 8);
        before = (before ^ word) * 0x100000001b3u;
    }
    return before;
}

int kv_codec_selftest(uint64_t digests[2]) {
    static const uint64_t start = 0xcbf29ce484222325u;
    char keys[ROW_BYTES_MAX], values[ROW_BYTES_MAX];
    uint8_t record[8192], accepted[1];
    uint32_t state = 1;
    digests[0] = digests[1] = start;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int key_dim = cases[i].key_dim, value_dim = cases[i].value_dim, item = cases[i].dtype == KV_F32 ? 4 : 2;
        kv_codec_job job = {.layout = layout_of(key_dim, value_dim), .dtype = cases[i].dtype, .accepted = accepted};
        job.blocks = job.layers = job.heads = job.runs = 1;
        job.key_limit = job.value_limit = LIMIT;
        job.keys = (kv_places){.base = keys, .row_bytes = key_dim * item};
        if (value_dim) job.values = (kv_places){.base = values, .row_bytes = value_dim * item};
        job.records = (kv_places){.base = (char *)record};
        fill(keys, key_dim, job.dtype, &state);
        fill(values, value_dim, job.dtype, &state);
        kv_encode_blocks(&job, 1);
        digests[0] = digest(digest(digests[0], accepted, 1), record, (size_t)job.layout.record_bytes);
        for (kv_dtype dtype = KV_F32; dtype <= KV_F16; dtype++) {
            job.dtype = dtype;
            job.keys.row_bytes = key_dim * (dtype == KV_F32 ? 4 : 2);
            job.values.row_bytes = value_dim * (dtype == KV_F32 ? 4 : 2);
            kv_decode_blocks(&job, 1);
            digests[1] = digest(digests[1], keys, (size_t)(KV_RUN * job.keys.row_bytes));
            if (value_dim) digests[1] = digest(digests[1], values, (size_t)(KV_RUN * job.values.row_bytes));
        }
    }
    return digests[0] == ENCODED_DIGEST && digests[1] == DECODED_DIGEST;
}
