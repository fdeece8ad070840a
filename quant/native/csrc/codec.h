/* The INT4 codec, as docs/formats/int4.md has it: records of 16 tokens of one KV head of one layer.
 *
 * A path codes one record at a time (kv_codec_ops); codec.c walks over blocks and shares the work among threads.
 * Records and rows must not overlap. Nothing here allocates; work buffers lie on the stack (a few hundred KiB at most).
 */
#ifndef KV_CODEC_H
#define KV_CODEC_H
#include "attention.h" /* kv_dtype, KV_RUN, KV_DIM_MAX */
#include "kernels.h"

/* Byte offsets of a record's parts; the fields and their order are those of quant.record_layout.RecordLayout. */
typedef struct {
    int key_dim, value_dim, key_bits, value_bits;
    int value_codes, key_plane, value_plane, key_scales, key_zeros, value_scales, value_zeros, key_base, value_base;
    int used_bytes, record_bytes;
} kv_record_layout;
#define KV_LAYOUT_FIELDS 15

/* Sixteen rows of `dim` consecutive numbers each; the dim is the layout's. */
typedef struct {
    char *first;
    int64_t row_bytes; /* from one row to the next */
    kv_dtype dtype;
    int stream; /* decoding: write around the caches, for targets larger than they are. Rows are then 64-byte aligned */
    /* Encoding: bytes that the caller will read next. A path may prefetch them while it works, a few at a time. */
    const char *ahead;
    int ahead_bytes;
} kv_token_rows;

struct kv_codec_ops {
    /* Writes codes, scales, zeros and base of the part into the record; 1 if the part is accepted. What a refused part
     * leaves there is unspecified. limit: bound * bound * 4096 (section 7 of the format). */
    int (*encode_keys)(const kv_token_rows *rows, const kv_record_layout *layout, double limit, uint8_t *record);
    int (*encode_values)(const kv_token_rows *rows, const kv_record_layout *layout, double limit, uint8_t *record);
    void (*decode_keys)(const uint8_t *record, const kv_record_layout *layout, const kv_token_rows *rows);
    void (*decode_values)(const uint8_t *record, const kv_record_layout *layout, const kv_token_rows *rows);
    /* Values as they were coded: still rotated. */
    void (*decode_rotated)(const uint8_t *record, const kv_record_layout *layout, const kv_token_rows *rows);
};

/* Where the parts of many blocks lie. A part of head h, layer l, run r, block b is at
 *   base + (block_offsets ? block_offsets[b] : b * block_bytes) + l * layer_bytes + h * head_bytes + r * run_bytes. */
typedef struct {
    char *base; /* NULL: no such part */
    const int64_t *block_offsets;
    int64_t block_bytes, layer_bytes, head_bytes, run_bytes, row_bytes;
} kv_places;
#define KV_PLACES_FIELDS 7

typedef struct {
    kv_record_layout layout;
    kv_dtype dtype;
    int64_t blocks, layers, heads, runs;
    kv_places keys, values, records;
    double key_limit, value_limit;
    int rotated; /* decoding: leave values rotated */
    int stream;
    uint8_t *accepted; /* encoding: [blocks], written */
} kv_codec_job;

void kv_encode_blocks(const kv_codec_job *job, int threads);
void kv_decode_blocks(const kv_codec_job *job, int threads);
/* 1 where every record of a block is one that an encoder may write (section 9): valid[blocks]. */
void kv_validate_blocks(const kv_codec_job *job, uint8_t *valid);
/* 1 if the active path codes the built-in inputs as the reference does. About half a millisecond. */
int kv_codec_selftest(uint64_t digests[2]);

/* The published signs (section 5) in the forms that paths read; filled when the library is loaded. */
extern float kv_signs_float[KV_DIM_MAX];        /* +1, -1 */
extern int16_t kv_signs_int16[KV_DIM_MAX];      /* +1, -1 */
extern uint16_t kv_sign_bits16[KV_DIM_MAX];     /* 0, 0x8000: the sign bit of bf16 and fp16 */
extern uint8_t kv_sign_mask[KV_DIM_MAX / 8];    /* a bit a channel */
/* Of 32 channels: [even, low][odd, low][even, high][odd, high], 16 words of 32 bits each, +1 or -1 in that half. */
extern int32_t kv_sign_pairs[KV_DIM_MAX / 32][64];

#endif
