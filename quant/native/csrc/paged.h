/* Attention of a step over block tables, and writing a step's KV: what Python hands over and what the driver makes of
 * it. A *plan* describes one cache group and one step and is good for all layers of the group; a *call* is one layer. */
#ifndef KV_PAGED_H
#define KV_PAGED_H
#include "attention.h"

/* Rows of one sequence that are attended in this step, and the blocks that they may see. */
typedef struct {
    int64_t first_row; /* of the step's tokens */
    int64_t tokens;
    int64_t start;       /* position of the first */
    int64_t first_block; /* number of the block that entries[entry_offset] is */
    int64_t entry_offset;
    int64_t blocks;
} kv_slice;

/* The records of one (layer, head) in an INT4 slot, run after run. Bits, and so sizes, may differ. */
typedef struct {
    int64_t offset_bytes;
    int64_t record_bytes;
    int64_t key_bits;
    int64_t value_bits;
} kv_cold_head;

/* Every field is 64 bits: engine_adapter/attention/native_paged.py fills an int64 array in this order. Addresses and
 * bytes; slots, heads and extents count. Strides of a full block: slot, layer, head, then K and V of all tokens. */
typedef struct {
    int64_t fields; /* of this struct, so that the two sides cannot disagree unseen */
    int64_t slices_address;
    int64_t slice_count;
    int64_t entries_address; /* int64[]: slot << 1 | form */
    int64_t window_tokens;   /* 0: none */
    int64_t block_tokens;
    int64_t kv_heads;
    int64_t key_dim;
    int64_t value_dim; /* stored; 0 for a latent group */
    int64_t dtype;     /* kv_dtype of full blocks */
    int64_t full_address;
    int64_t full_slot_bytes;
    int64_t full_layer_bytes;
    int64_t full_head_bytes;
    int64_t cold_address;
    int64_t extent_bytes;
    int64_t extent_slots;
    int64_t cold_slot_bytes;
    int64_t cold_heads_address; /* kv_cold_head[layers][kv_heads] */
} kv_plan;
#define KV_PLAN_FIELDS ((int64_t)(sizeof(kv_plan) / sizeof(int64_t)))

typedef struct {
    const kv_plan *plan;
    int64_t layer; /* position inside the group */
    const void *query;
    int64_t query_token_stride; /* elements */
    int64_t query_head_stride;
    int64_t query_heads;
    kv_dtype query_dtype;
    void *out; /* [tokens][query_heads][value_dim] of query's dtype */
    int64_t value_dim;
    double scaling;
    double softcap;     /* 0: none */
    const float *sinks; /* [query_heads] or NULL */
    int threads;
} kv_call;

/* Rows that are attended together: some tokens of a slice, some of a KV head's query heads. */
typedef struct {
    const kv_slice *slice;
    int64_t first_token;
    int tokens;
    int first_head; /* among the query heads of a KV head */
    int heads;
    int32_t first_low, first_high; /* least and greatest first position that a row sees; and last one */
    int32_t last_low, last_high;
    int64_t first_block, last_block;
    int64_t first_span, spans;
    int heads_per_task, head_tasks; /* KV heads that a task takes together, and how many such tasks cover all */
    int64_t store;                  /* number of its first partial, when spans are tasks of their own */
} kv_tile;

/* Contexts are cut at multiples of so many tokens, and the cuts' sums merged in order, whoever computed them: results
 * depend neither on threads nor on neighbours. */
#define KV_SPAN_TOKENS 4096

typedef struct {
    const kv_call *call;
    const kv_attention_ops *ops;
    kv_tile *tiles;
    int64_t tile_count;
    int64_t span_blocks;
    int split;           /* spans are tasks of their own */
    int64_t *first_task; /* [tile_count + 1] of each tile */
    int64_t task_count;
    uint8_t *store; /* partials of split tasks */
    size_t store_bytes;
    _Atomic int failed; /* a thread had no memory */
} kv_job;

int kv_attend(const kv_call *call);               /* attention.c; 0, or -1 without memory */
void kv_attend_task(void *job, int64_t task);     /* attention_task.c */
void kv_attend_merge(void *job, int64_t task);    /* the second round of split tasks: one a tile and KV head */
size_t kv_partials_bytes(int rows, int dim);      /* both kinds' partials, 64-byte multiple */
void *kv_thread_scratch(size_t bytes);            /* scratch.c: 64-byte aligned, kept by the thread; NULL without memory */

/* Copies the step's K and V into their slots: slot_mapping[i] = slot * block_tokens + offset. write.c */
typedef struct {
    const kv_plan *plan;
    int64_t layer;
    const int64_t *slot_mapping;
    int64_t tokens;
    const uint8_t *keys, *values; /* values NULL for a latent group */
    int64_t key_token_bytes, key_head_bytes, value_token_bytes, value_head_bytes;
} kv_write;
void kv_write_tokens(const kv_write *write);

/* 1 when the active path attends as plain arithmetic does, 0 when not, -1 without memory. attention_selftest.c */
int kv_attention_selftest(void);

#endif
