/* One task: some rows, some KV heads, the whole context or one span of it. Runs without Python, on any thread. */
#include <math.h>
#include <string.h>

#include "paged.h"

#define LOG2E 1.4426950408889634
#define FULL 0
#define INT4 1
#define INT4_CHUNK_PIECES 32
#define FULL_CHUNK_BYTES 32768 /* of K and V: they must still be in the first cache, or just outside, when V is read */
#define FULL_CHUNK_LEAST 2

/* What a task keeps of one KV head; partials by kind: of the span at hand, and of all spans so far. */
typedef struct {
    kv_rows rows;
    void *prepared[2];
    kv_partial now[2];
    kv_partial all[2];
} head_state;

typedef struct {
    const kv_job *job;
    const kv_tile *tile;
    int first_head, heads;
    int is_prepared[2];
    int any[2]; /* kinds that some span had */
    int32_t first[KV_ROWS_MAX], last[KV_ROWS_MAX];
    head_state *states;
    kv_int4_piece *cold; /* pieces of the span, of the first head */
    kv_full_piece *full;
    int cold_count, full_count;
    void *scratch;
} task_state;

static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

static size_t partial_bytes(int rows, int dim) { return rounded(8 * (size_t)rows) + rounded(4 * (size_t)rows * dim); }

size_t kv_partials_bytes(int rows, int dim) { return 2 * partial_bytes(rows, dim); }

static uint8_t *carve(uint8_t **at, size_t bytes) {
    uint8_t *found = *at;
    *at += rounded(bytes);
    return found;
}

static kv_partial carve_partial(uint8_t **at, int rows, int dim) {
    kv_partial partial;
    partial.maximum = (float *)carve(at, 8 * (size_t)rows);
    partial.sum = partial.maximum + rows;
    partial.acc = (float *)carve(at, 4 * (size_t)rows * dim);
    return partial;
}

static void clear_partial(kv_partial *partial, int rows, int dim) {
    for (int row = 0; row < rows; row++) partial->maximum[row] = -INFINITY;
    memset(partial->sum, 0, 4 * (size_t)rows);
    memset(partial->acc, 0, 4 * (size_t)rows * dim);
}

static int64_t span_pieces(const kv_job *job) {
    return job->span_blocks * ((job->call->plan->block_tokens + KV_RUN - 1) / KV_RUN);
}

static const kv_cold_head *cold_head(const kv_call *call, int64_t head) {
    return (const kv_cold_head *)(uintptr_t)call->plan->cold_heads_address + call->layer * call->plan->kv_heads + head;
}

/* ---- setting up ---- */

static int set_up(task_state *task) {
    const kv_call *call = task->job->call;
    const kv_plan *plan = call->plan;
    const kv_attention_ops *ops = task->job->ops;
    const int rows = task->tile->tokens * task->tile->heads;
    const int key_dim = (int)plan->key_dim, value_dim = (int)call->value_dim;
    const size_t query = rounded(4 * (size_t)rows * key_dim);
    const size_t prepared[2] = {rounded(ops->full_prepared_bytes(rows, key_dim, (kv_dtype)plan->dtype)),
                                rounded(ops->int4_prepared_bytes(rows, key_dim))};
    const size_t pieces = (size_t)span_pieces(task->job);
    const size_t head = query + prepared[0] + prepared[1] + 2 * kv_partials_bytes(rows, value_dim);
    const size_t lists = rounded(pieces * sizeof *task->cold) + rounded(pieces * sizeof *task->full);
    const size_t scratch = rounded(ops->scratch_bytes(rows, key_dim, value_dim));
    uint8_t *at = kv_thread_scratch(rounded(task->heads * sizeof *task->states) + task->heads * head + lists + scratch);
    if (!at) return -1;
    task->states = (head_state *)carve(&at, task->heads * sizeof *task->states);
    for (int h = 0; h < task->heads; h++) {
        head_state *state = &task->states[h];
        state->rows = (kv_rows){.rows = rows, .key_dim = key_dim, .value_dim = value_dim, .first = task->first};
        state->rows.query = (const float *)carve(&at, query);
        state->rows.last = task->last;
        state->rows.latent = plan->value_dim == 0;
        if (plan->extent_slots) {
            const kv_cold_head *cold = cold_head(call, task->first_head + h);
            state->rows.key_bits = (int)cold->key_bits;
            state->rows.value_bits = (int)cold->value_bits;
        }
        state->rows.softcap = (float)call->softcap;
        state->rows.scale = (float)(call->scaling * (call->softcap > 0 ? 1.0 : LOG2E));
        for (int kind = 0; kind < 2; kind++) {
            state->prepared[kind] = carve(&at, prepared[kind]);
            state->now[kind] = carve_partial(&at, rows, value_dim);
            state->all[kind] = carve_partial(&at, rows, value_dim);
        }
    }
    task->cold = (kv_int4_piece *)carve(&at, pieces * sizeof *task->cold);
    task->full = (kv_full_piece *)carve(&at, pieces * sizeof *task->full);
    task->scratch = at;
    return 0;
}

/* Row token * heads + head. */
static void load_rows(task_state *task) {
    const kv_call *call = task->job->call;
    const kv_tile *tile = task->tile;
    const int64_t group = call->query_heads / call->plan->kv_heads;
    const int64_t item = call->query_dtype == KV_F32 ? 4 : 2;
    const int key_dim = (int)call->plan->key_dim;
    for (int token = 0; token < tile->tokens; token++) {
        const int64_t position = tile->slice->start + tile->first_token + token;
        const int64_t first = call->plan->window_tokens ? position - call->plan->window_tokens + 1 : 0;
        for (int head = 0; head < tile->heads; head++) {
            task->first[token * tile->heads + head] = (int32_t)(first > 0 ? first : 0);
            task->last[token * tile->heads + head] = (int32_t)position;
        }
    }
    for (int h = 0; h < task->heads; h++) {
        float *to = (float *)task->states[h].rows.query;
        for (int token = 0; token < tile->tokens; token++)
            for (int head = 0; head < tile->heads; head++, to += key_dim) {
                const int64_t row = tile->slice->first_row + tile->first_token + token;
                const int64_t from = row * call->query_token_stride +
                                     ((task->first_head + h) * group + tile->first_head + head) * call->query_head_stride;
                task->job->ops->widen((const uint8_t *)call->query + from * item, key_dim, call->query_dtype,
                                      task->states[h].rows.scale, to);
            }
    }
}

/* ---- pieces ---- */

static const uint8_t *cold_block(const kv_call *call, int64_t slot) {
    const kv_plan *plan = call->plan;
    return (const uint8_t *)(uintptr_t)plan->cold_address + slot / plan->extent_slots * plan->extent_bytes +
           slot % plan->extent_slots * plan->cold_slot_bytes;
}

static const uint8_t *full_block(const kv_call *call, int64_t slot) {
    const kv_plan *plan = call->plan;
    return (const uint8_t *)(uintptr_t)plan->full_address + slot * plan->full_slot_bytes +
           call->layer * plan->full_layer_bytes;
}

/* The pieces of one block that some row sees. A full piece is that of the task's first head; an INT4 piece names its
 * slot for now, since heads' records may differ in size. */
static void add_block(task_state *task, int64_t block) {
    const kv_call *call = task->job->call;
    const kv_plan *plan = call->plan;
    const kv_tile *tile = task->tile;
    const int64_t *entries = (const int64_t *)(uintptr_t)plan->entries_address + tile->slice->entry_offset;
    const int64_t entry = entries[block - tile->slice->first_block];
    const int64_t item = plan->dtype == KV_F32 ? 4 : 2;
    const int cold = entry & 1;
    const uint8_t *base = cold ? cold_block(call, entry >> 1)
                               : full_block(call, entry >> 1) + task->first_head * plan->full_head_bytes;
    const uint8_t *values = base + (plan->value_dim ? plan->block_tokens * plan->key_dim * item : 0);
    const int64_t value_row = (plan->value_dim ? plan->value_dim : plan->key_dim) * item;
    for (int64_t inside = 0; inside < plan->block_tokens; inside += KV_RUN) {
        const int64_t position = block * plan->block_tokens + inside;
        if (position > tile->last_high) return;
        int64_t tokens = plan->block_tokens - inside < KV_RUN ? plan->block_tokens - inside : KV_RUN;
        if (position + tokens <= tile->first_low) continue;
        const int masked = position < tile->first_high || position + tokens - 1 > tile->last_low;
        if (cold) {
            task->cold[task->cold_count++] =
                (kv_int4_piece){base, (int32_t)position, masked};
            continue;
        }
        /* Nobody sees a token behind last_high, and it may not be written. */
        if (position + tokens > tile->last_high + 1) tokens = tile->last_high + 1 - position;
        task->full[task->full_count++] = (kv_full_piece){base + inside * plan->key_dim * item, values + inside * value_row,
                                                         (int32_t)position, (int32_t)tokens, masked};
    }
}

static void collect_span(task_state *task, int64_t span) {
    const kv_tile *tile = task->tile;
    int64_t first = span * task->job->span_blocks, last = first + task->job->span_blocks - 1;
    if (first < tile->first_block) first = tile->first_block;
    if (last > tile->last_block) last = tile->last_block;
    task->cold_count = task->full_count = 0;
    for (int64_t block = first; block <= last; block++) add_block(task, block);
}

/* ---- walking ---- */

static void prepare(task_state *task, int kind) {
    if (task->is_prepared[kind]) return;
    task->is_prepared[kind] = 1;
    for (int h = 0; h < task->heads; h++) {
        head_state *state = &task->states[h];
        if (kind == INT4) task->job->ops->prepare_int4(&state->rows, state->prepared[INT4]);
        else task->job->ops->prepare_full(&state->rows, (kv_dtype)task->job->call->plan->dtype, state->prepared[FULL]);
    }
}

static int cold_part(const task_state *task, int at, int head, kv_int4_piece *to) {
    const kv_cold_head *records = cold_head(task->job->call, task->first_head + head);
    const int64_t block_tokens = task->job->call->plan->block_tokens;
    int count = 0;
    for (; count < INT4_CHUNK_PIECES && at + count < task->cold_count; count++) {
        to[count] = task->cold[at + count];
        to[count].record += records->offset_bytes + to[count].position % block_tokens / KV_RUN * records->record_bytes;
    }
    return count;
}

static int full_part(const task_state *task, int at, int limit, int head, kv_full_piece *to) {
    const int64_t shift = head * task->job->call->plan->full_head_bytes;
    int count = 0;
    for (; count < limit && at + count < task->full_count; count++) {
        to[count] = task->full[at + count];
        to[count].keys = (const uint8_t *)to[count].keys + shift;
        to[count].values = (const uint8_t *)to[count].values + shift;
    }
    return count;
}

/* Heads inside the chunk: a block's heads lie one after another in memory. */
static void walk_cold(task_state *task) {
    kv_int4_piece lists[2][KV_CHUNK_PIECES];
    int at = 0, head = 0, turn = 0, count = cold_part(task, 0, 0, lists[0]);
    while (count) {
        const int here = head;
        const int step = count;
        head++;
        if (head == task->heads) {
            head = 0;
            at += step;
        }
        const int next = cold_part(task, at, head, lists[!turn]);
        head_state *state = &task->states[here];
        state->rows.prepared = state->prepared[INT4];
        task->job->ops->int4(&state->rows, lists[turn], count, lists[!turn], next, task->scratch, &state->now[INT4]);
        turn = !turn;
        count = next;
    }
}

static int full_chunk(const kv_call *call) {
    const kv_plan *plan = call->plan;
    const int64_t bytes = (plan->key_dim + plan->value_dim) * KV_RUN * (plan->dtype == KV_F32 ? 4 : 2);
    const int64_t count = FULL_CHUNK_BYTES / bytes;
    return (int)(count < FULL_CHUNK_LEAST ? FULL_CHUNK_LEAST : count > KV_CHUNK_PIECES ? KV_CHUNK_PIECES : count);
}

static void walk_full(task_state *task) {
    kv_full_piece lists[2][KV_CHUNK_PIECES];
    const kv_dtype dtype = (kv_dtype)task->job->call->plan->dtype;
    const int limit = full_chunk(task->job->call);
    int at = 0, head = 0, turn = 0, count = full_part(task, 0, limit, 0, lists[0]);
    while (count) {
        const int here = head;
        head++;
        if (head == task->heads) {
            head = 0;
            at += count;
        }
        const int next = full_part(task, at, limit, head, lists[!turn]);
        head_state *state = &task->states[here];
        state->rows.prepared = state->prepared[FULL];
        task->job->ops->full(&state->rows, dtype, lists[turn], count, lists[!turn], next, task->scratch,
                             &state->now[FULL]);
        turn = !turn;
        count = next;
    }
}

static void walk_span(task_state *task, int64_t span) {
    collect_span(task, span);
    if (task->cold_count) {
        prepare(task, INT4);
        walk_cold(task);
    }
    if (task->full_count) {
        prepare(task, FULL);
        walk_full(task);
    }
}

/* ---- results ---- */

/* Rows of one head from both kinds' partials to the output; the partials are used up. */
static void finish_head(const kv_job *job, const kv_tile *tile, int64_t kv_head, kv_partial *partials) {
    const kv_call *call = job->call;
    const int rows = tile->tokens * tile->heads, dim = (int)call->value_dim;
    const int64_t group = call->query_heads / call->plan->kv_heads, item = call->query_dtype == KV_F32 ? 4 : 2;
    kv_partial *sum = &partials[FULL];
    int cold = 0;
    for (int row = 0; row < rows; row++) cold |= partials[INT4].sum[row] != 0;
    if (cold) {
        if (call->plan->value_dim) job->ops->rotate_back(partials[INT4].acc, rows, dim);
        job->ops->merge(rows, dim, sum, &partials[INT4]);
    }
    for (int row = 0; row < rows; row++) {
        const int64_t head = kv_head * group + tile->first_head + row % tile->heads;
        const int64_t token = tile->slice->first_row + tile->first_token + row / tile->heads;
        float total = sum->sum[row], factor = 1.0f;
        if (call->sinks) {
            const float sink = (float)(call->sinks[head] * LOG2E);
            const float most = sink > sum->maximum[row] ? sink : sum->maximum[row];
            factor = exp2f(sum->maximum[row] - most);
            total = total * factor + exp2f(sink - most);
        }
        factor = total > 0 || total != total ? factor / total : 0.0f;
        float *acc = sum->acc + (int64_t)row * dim;
        for (int d = 0; d < dim; d++) acc[d] *= factor;
        job->ops->narrow(acc, dim, call->query_dtype,
                         (uint8_t *)call->out + (token * call->query_heads + head) * dim * item);
    }
}

static void stored_partials(const kv_job *job, const kv_tile *tile, int64_t span, int64_t head, kv_partial *partials) {
    const int rows = tile->tokens * tile->heads, dim = (int)job->call->value_dim;
    uint8_t *at = job->store + (size_t)(tile->store + span * job->call->plan->kv_heads + head) * job->store_bytes;
    partials[FULL] = carve_partial(&at, rows, dim);
    partials[INT4] = carve_partial(&at, rows, dim);
}

static void attend_span(task_state *task, int64_t span) {
    const int rows = task->tile->tokens * task->tile->heads, dim = (int)task->job->call->value_dim;
    for (int h = 0; h < task->heads; h++) {
        stored_partials(task->job, task->tile, span, task->first_head + h, task->states[h].now);
        for (int kind = 0; kind < 2; kind++) clear_partial(&task->states[h].now[kind], rows, dim);
    }
    walk_span(task, task->tile->first_span + span);
}

static void attend_all(task_state *task) {
    const int rows = task->tile->tokens * task->tile->heads, dim = (int)task->job->call->value_dim;
    for (int64_t span = 0; span < task->tile->spans; span++) {
        for (int h = 0; h < task->heads; h++)
            for (int kind = 0; kind < 2; kind++) clear_partial(&task->states[h].now[kind], rows, dim);
        walk_span(task, task->tile->first_span + span);
        for (int h = 0; h < task->heads; h++)
            for (int kind = 0; kind < 2; kind++) {
                head_state *state = &task->states[h];
                if (span) {
                    task->job->ops->merge(rows, dim, &state->all[kind], &state->now[kind]);
                    continue;
                }
                const kv_partial spare = state->all[kind];
                state->all[kind] = state->now[kind];
                state->now[kind] = spare;
            }
    }
    for (int h = 0; h < task->heads; h++)
        finish_head(task->job, task->tile, task->first_head + h, task->states[h].all);
}

static int64_t tile_of_task(const kv_job *job, int64_t number) {
    int64_t low = 0, high = job->tile_count;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (job->first_task[middle] <= number) low = middle;
        else high = middle;
    }
    return low;
}

void kv_attend_task(void *context, int64_t number) {
    kv_job *job = context;
    const int64_t tile = tile_of_task(job, number), inside = number - job->first_task[tile];
    task_state task = {.job = job, .tile = &job->tiles[tile]};
    task.first_head = (int)(inside % task.tile->head_tasks) * task.tile->heads_per_task;
    const int left = (int)job->call->plan->kv_heads - task.first_head;
    task.heads = left < task.tile->heads_per_task ? left : task.tile->heads_per_task;
    if (set_up(&task)) {
        job->failed = 1;
        return;
    }
    load_rows(&task);
    if (job->split) attend_span(&task, inside / task.tile->head_tasks);
    else attend_all(&task);
}

void kv_attend_merge(void *context, int64_t number) {
    const kv_job *job = context;
    const int64_t heads = job->call->plan->kv_heads;
    const kv_tile *tile = &job->tiles[number / heads];
    const int rows = tile->tokens * tile->heads, dim = (int)job->call->value_dim;
    kv_partial all[2], more[2];
    stored_partials(job, tile, 0, number % heads, all);
    for (int64_t span = 1; span < tile->spans; span++) {
        stored_partials(job, tile, span, number % heads, more);
        for (int kind = 0; kind < 2; kind++) job->ops->merge(rows, dim, &all[kind], &more[kind]);
    }
    finish_head(job, tile, number % heads, all);
}
