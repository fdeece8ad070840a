/* Paged decode attention in place: what the driver (attention.c) asks of a path.
 *
 * The driver walks the block table of one (sequence, KV head), sorts its pieces by kind and hands them, a chunk at a
 * time, to the path's kernels. Each kind keeps a partial softmax of its own (maximum, sum, weighted sum of V), and the
 * driver merges them at the end: INT4's V is summed in the codec's rotated space and rotated back once.
 * A *piece* is at most KV_RUN consecutive tokens: one INT4 record, or so much of a full block.
 */
#ifndef KV_ATTENTION_H
#define KV_ATTENTION_H
#include "kernels.h"

#define KV_RUN 16          /* tokens of a record */
#define KV_ROWS_MAX 64     /* query rows of one call: query heads of a KV head times tokens of the slice */
#define KV_CHUNK_PIECES 64 /* pieces of one call */
#define KV_DIM_MAX 1024

typedef enum { KV_F32 = 0, KV_BF16 = 1, KV_F16 = 2 } kv_dtype;

/* The query rows of one (sequence, KV head). */
typedef struct {
    int rows;
    int key_dim;
    int value_dim;        /* of a latent group: the leading dims of K that are V */
    int latent;           /* V is the first value_dim channels of K: records and full pieces have no V of their own */
    int key_bits;         /* of the records' codes, 4 or 5; */
    int value_bits;       /* 4 or 3. One (layer, head) has one pair */
    const float *query;   /* [rows][key_dim], times scaling * log2(e); with a softcap times scaling only */
    const int32_t *first; /* [rows] first position that the row sees */
    const int32_t *last;  /* [rows] last position that it sees */
    float scale;          /* what `query` was multiplied with: scaling * log2(e), or scaling with a softcap */
    float softcap;        /* 0: none. Else score = softcap * tanh(score / softcap) * log2(e) */
    void *prepared;       /* what prepare_* of the path made of the query; kv_attention_ops.prepared_bytes large */
} kv_rows;

/* Softmax so far, in units of log2: weights are 2^(score - maximum). A row that has seen nothing has maximum
 * -INFINITY, sum 0. acc is [rows][value_dim], in rotated space for int4 pieces with V. */
typedef struct {
    float *maximum;
    float *sum;
    float *acc;
} kv_partial;

typedef struct {
    const uint8_t *record;
    int32_t position; /* of its first token */
    int32_t masked;   /* some row does not see some token of it: positions must be compared */
} kv_int4_piece;

typedef struct {
    const void *keys;   /* [tokens][key_dim] */
    const void *values; /* [tokens][value_dim]; of a latent group equal to keys, rows key_dim apart */
    int32_t position;
    int32_t tokens; /* 1..KV_RUN. What lies behind them was never written and must not be read into a result */
    int32_t masked;
} kv_full_piece;

struct kv_attention_ops {
    /* Bytes of kv_rows.prepared (64-byte aligned) for INT4 and full pieces, and of the scratch that a call needs. */
    size_t (*int4_prepared_bytes)(int rows, int key_dim);
    size_t (*full_prepared_bytes)(int rows, int key_dim, kv_dtype dtype);
    size_t (*scratch_bytes)(int rows, int key_dim, int value_dim);
    void (*prepare_int4)(const kv_rows *rows, void *prepared);
    void (*prepare_full)(const kv_rows *rows, kv_dtype dtype, void *prepared);
    /* Takes up to KV_CHUNK_PIECES pieces into the partial. `ahead`: pieces that the next call will bring, to prefetch. */
    void (*int4)(const kv_rows *rows, const kv_int4_piece *pieces, int count, const kv_int4_piece *ahead, int ahead_count,
                 void *scratch, kv_partial *partial);
    void (*full)(const kv_rows *rows, kv_dtype dtype, const kv_full_piece *pieces, int count, const kv_full_piece *ahead,
                 int ahead_count, void *scratch, kv_partial *partial);
    /* into = both partials' softmax over what either saw; rows of `dim` values. */
    void (*merge)(int rows, int dim, kv_partial *into, const kv_partial *from);
    /* Rows of V summed in int4's rotated space, back to V's own channels, in place. */
    void (*rotate_back)(float *rows, int count, int dim);
    /* Count floats to the dtype, rounded to nearest even. */
    void (*narrow)(const float *from, int count, kv_dtype dtype, void *to);
    /* And back, times scale. */
    void (*widen)(const void *from, int count, kv_dtype dtype, float scale, float *to);
};

#endif
