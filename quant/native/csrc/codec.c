/* Walks over blocks of INT4 records with the active path's codec, shares the work among threads, checks records. */
#include <string.h>

#include "codec.h"
#include "codec_numbers.h"

#define CHUNK_BYTES (64 * 1024) /* of rows, that a thread takes at a time */
#define LINE_BYTES 64
#define AHEAD_BYTES (16 * 1024) /* of rows between what is coded and what is prefetched */

float kv_signs_float[KV_DIM_MAX] __attribute__((aligned(64)));
int16_t kv_signs_int16[KV_DIM_MAX] __attribute__((aligned(64)));
uint16_t kv_sign_bits16[KV_DIM_MAX] __attribute__((aligned(64)));
uint8_t kv_sign_mask[KV_DIM_MAX / 8] __attribute__((aligned(64)));
int32_t kv_sign_pairs[KV_DIM_MAX / 32][64] __attribute__((aligned(64)));

static uint64_t splitmix64(uint64_t index) {
    uint64_t u = 0x6b76696e7434u + (index + 1) * 0x9e3779b97f4a7c15u;
    u = (u ^ u >> 30) * 0xbf58476d1ce4e5b9u;
    u = (u ^ u >> 27) * 0x94d049bb133111ebu;
    return u ^ u >> 31;
}

static __attribute__((constructor)) void fill_signs(void) {
    for (int d = 0; d < KV_DIM_MAX; d++) {
        const int negative = (int)(splitmix64((uint64_t)d) >> 63);
        kv_signs_float[d] = negative ? -1.0f : 1.0f;
        kv_signs_int16[d] = negative ? -1 : 1;
        kv_sign_bits16[d] = negative ? 0x8000 : 0;
        int32_t *pairs = kv_sign_pairs[d / 32] + 16 * (d % 2) + d % 32 / 2;
        pairs[0] = (uint16_t)kv_signs_int16[d];
        pairs[32] = (int32_t)((uint32_t)pairs[0] << 16);
        kv_sign_mask[d / 8] |= (uint8_t)(negative << d % 8);
    }
}

/* ---- walking */

typedef struct {
    int64_t block, layer, head, run;
} position;

static position position_of(const kv_codec_job *job, int64_t index) {
    position at;
    at.run = index % job->runs, index /= job->runs;
    at.head = index % job->heads, index /= job->heads;
    at.layer = index % job->layers;
    at.block = index / job->layers;
    return at;
}

static void advance(const kv_codec_job *job, position *at) {
    if (++at->run < job->runs) return;
    at->run = 0;
    if (++at->head < job->heads) return;
    at->head = 0;
    if (++at->layer < job->layers) return;
    at->layer = 0;
    at->block++;
}

static char *place(const kv_places *places, const position *at) {
    const int64_t block =
        places->block_offsets ? places->block_offsets[at->block] : at->block * places->block_bytes;
    return places->base + block + at->layer * places->layer_bytes + at->head * places->head_bytes +
           at->run * places->run_bytes;
}

/* Inlined by force: a function that only prefetches looks free of effects to gcc, which drops calls of it. */
KV_INLINE void prefetch(const char *at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += LINE_BYTES) __builtin_prefetch(at + i);
}

/* Rows come in while something else is computed: the hardware's own prefetch ends at every page. */
KV_INLINE void prefetch_rows(const char *first, int64_t row_bytes, int64_t used_bytes) {
    if (row_bytes == used_bytes) {
        prefetch(first, KV_RUN * used_bytes);
        return;
    }
    for (int t = 0; t < KV_RUN; t++) prefetch(first + t * row_bytes, used_bytes);
}

typedef struct {
    const kv_codec_job *job;
    const kv_codec_ops *ops;
    int64_t records, chunk, ahead; /* records in all, of a task, and between work and prefetch */
} shared_work;

static int64_t last_of(const shared_work *work, int64_t first) {
    return first + work->chunk < work->records ? first + work->chunk : work->records;
}

static int64_t item_bytes(const kv_codec_job *job) { return job->dtype == KV_F32 ? 4 : 2; }

static kv_token_rows rows_at(const kv_codec_job *job, const kv_places *places, const position *at) {
    return (kv_token_rows){
        .first = place(places, at), .row_bytes = places->row_bytes, .dtype = job->dtype, .stream = job->stream};
}

/* Rows that follow without gaps are left for the kernel to prefetch, others are prefetched here. */
KV_INLINE void announce(kv_token_rows *rows, const char *next, int64_t row_bytes, int64_t used_bytes) {
    if (row_bytes == used_bytes)
        rows->ahead = next, rows->ahead_bytes = (int)(KV_RUN * used_bytes);
    else
        prefetch_rows(next, row_bytes, used_bytes);
}

static void encode_one(const shared_work *work, const position *at, const position *later) {
    const kv_codec_job *job = work->job;
    const kv_record_layout *layout = &job->layout;
    uint8_t *record = (uint8_t *)place(&job->records, at);
    kv_token_rows keys = rows_at(job, &job->keys, at), values = {0};
    if (job->values.base) values = rows_at(job, &job->values, at);
    if (later) {
        announce(&keys, place(&job->keys, later), keys.row_bytes, layout->key_dim * item_bytes(job));
        if (job->values.base)
            announce(&values, place(&job->values, later), values.row_bytes, layout->value_dim * item_bytes(job));
        prefetch(place(&job->records, later), layout->record_bytes);
    }
    int accepted = work->ops->encode_keys(&keys, layout, job->key_limit, record);
    if (job->values.base) accepted &= work->ops->encode_values(&values, layout, job->value_limit, record);
    memset(record + layout->used_bytes, 0, (size_t)(layout->record_bytes - layout->used_bytes));
    if (!accepted) __atomic_store_n(job->accepted + at->block, 0, __ATOMIC_RELAXED);
}

static void encode_chunk(void *context, int64_t task) {
    const shared_work *work = context;
    const int64_t first = task * work->chunk, end = last_of(work, first);
    position at = position_of(work->job, first), later = position_of(work->job, first + work->ahead);
    for (int64_t i = first; i < end; i++, advance(work->job, &at), advance(work->job, &later))
        encode_one(work, &at, i + work->ahead < end ? &later : NULL);
}

/* Stores around the caches are ordered with nothing: whoever is told that the rows are ready must see them. */
static void finish_streams(void) {
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#endif
}

static void decode_one(const shared_work *work, const position *at, const position *later) {
    const kv_codec_job *job = work->job;
    const uint8_t *record = (const uint8_t *)place(&job->records, at);
    if (later) prefetch(place(&job->records, later), job->layout.used_bytes);
    const kv_token_rows keys = rows_at(job, &job->keys, at);
    work->ops->decode_keys(record, &job->layout, &keys);
    if (!job->values.base) return;
    const kv_token_rows values = rows_at(job, &job->values, at);
    (job->rotated ? work->ops->decode_rotated : work->ops->decode_values)(record, &job->layout, &values);
}

static void decode_chunk(void *context, int64_t task) {
    const shared_work *work = context;
    const int64_t first = task * work->chunk, end = last_of(work, first);
    position at = position_of(work->job, first), later = position_of(work->job, first + work->ahead);
    for (int64_t i = first; i < end; i++, advance(work->job, &at), advance(work->job, &later))
        decode_one(work, &at, i + work->ahead < end ? &later : NULL);
    if (work->job->stream) finish_streams();
}

static void share(const kv_codec_job *job, kv_task task, int threads) {
    const int64_t rows = KV_RUN * item_bytes(job) * (job->layout.key_dim + job->layout.value_dim);
    const int64_t records = job->blocks * job->layers * job->heads * job->runs;
    shared_work work = {job, kv_active()->codec, records, CHUNK_BYTES / rows + 1, AHEAD_BYTES / rows};
    if (work.ahead < 1) work.ahead = 1;
    if (!work.records) return;
    const int64_t tasks = (work.records + work.chunk - 1) / work.chunk;
    if (threads <= 1) work.chunk = work.records; /* one walk: no prefetch is cut short */
    kv_parallel_for(threads <= 1 ? 1 : tasks, task, &work, threads);
}

void kv_encode_blocks(const kv_codec_job *job, int threads) {
    if (job->blocks) memset(job->accepted, 1, (size_t)job->blocks); /* an empty batch may have no address */
    share(job, encode_chunk, threads);
}

void kv_decode_blocks(const kv_codec_job *job, int threads) { share(job, decode_chunk, threads); }

/* ---- checking */

static int good_base(const uint8_t *at) {
    const float base = kv_load_base(at);
    return base >= KV_BASE_FLOOR && base <= KV_BASE_CEILING; /* 0 for NaN */
}

static int good_record(const uint8_t *record, const kv_record_layout *layout) {
    int bad = 0;
    for (int c = 0; c < layout->key_dim; c++) bad |= (uint8_t)(record[layout->key_scales + c] - 1) > 0x7d;
    bad |= !good_base(record + layout->key_base);
    if (layout->value_dim) {
        for (int t = 0; t < KV_RUN; t++) bad |= (uint8_t)(record[layout->value_scales + t] - 1) > 0x7d;
        if (layout->value_bits == 3)
            for (int t = 0; t < KV_RUN / 2; t++) bad |= record[layout->value_zeros + t] & 0x88;
        bad |= !good_base(record + layout->value_base);
    }
    for (int i = layout->used_bytes; i < layout->record_bytes; i++) bad |= record[i];
    return !bad;
}

void kv_validate_blocks(const kv_codec_job *job, uint8_t *valid) {
    if (job->blocks == 0) return; /* `valid` may be no memory at all */
    memset(valid, 1, (size_t)job->blocks);
    const int64_t records = job->blocks * job->layers * job->heads * job->runs;
    position at = {0};
    for (int64_t i = 0; i < records; i++, advance(job, &at))
        if (!good_record((const uint8_t *)place(&job->records, &at), &job->layout)) valid[at.block] = 0;
}
