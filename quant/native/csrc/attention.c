/* Attention of one layer: cuts a step into tiles of rows and tasks, runs them on the pool, merges what was split. */
#include <stdlib.h>

#include "paged.h"

#define TASKS_PER_THREAD 3       /* so that threads end at about the same time */
#define STATE_BYTES (128 * 1024) /* sums of V that a task keeps: must stay in a core's second cache */

static const kv_slice *slice_of(const kv_plan *plan, int64_t number) {
    return (const kv_slice *)(uintptr_t)plan->slices_address + number;
}

static int group_heads(const kv_call *call) { return (int)(call->query_heads / call->plan->kv_heads); }

static int tile_heads(const kv_call *call) {
    const int group = group_heads(call);
    return group < KV_ROWS_MAX ? group : KV_ROWS_MAX;
}

static int64_t tiles_of(const kv_call *call, const kv_slice *slice) {
    const int heads = tile_heads(call), tokens = KV_ROWS_MAX / heads;
    return (slice->tokens + tokens - 1) / tokens * ((group_heads(call) + heads - 1) / heads);
}

static int32_t first_visible(const kv_plan *plan, int64_t position) {
    const int64_t first = plan->window_tokens ? position - plan->window_tokens + 1 : 0;
    return (int32_t)(first > 0 ? first : 0);
}

static void fill_tile(const kv_job *job, kv_tile *tile) {
    const kv_plan *plan = job->call->plan;
    const int64_t position = tile->slice->start + tile->first_token;
    tile->first_low = first_visible(plan, position);
    tile->first_high = first_visible(plan, position + tile->tokens - 1);
    tile->last_low = (int32_t)position;
    tile->last_high = (int32_t)(position + tile->tokens - 1);
    tile->first_block = tile->first_low / plan->block_tokens;
    tile->last_block = tile->last_high / plan->block_tokens;
    tile->first_span = tile->first_block / job->span_blocks;
    tile->spans = tile->last_block / job->span_blocks - tile->first_span + 1;
}

static int make_tiles(kv_job *job) {
    const kv_call *call = job->call;
    for (int64_t i = 0; i < call->plan->slice_count; i++) job->tile_count += tiles_of(call, slice_of(call->plan, i));
    job->tiles = malloc((size_t)job->tile_count * sizeof *job->tiles);
    job->first_task = malloc((size_t)(job->tile_count + 1) * sizeof *job->first_task);
    if (!job->tiles || !job->first_task) return -1;
    const int group = group_heads(call), heads = tile_heads(call), tokens = KV_ROWS_MAX / heads;
    kv_tile *tile = job->tiles;
    for (int64_t i = 0; i < call->plan->slice_count; i++) {
        const kv_slice *slice = slice_of(call->plan, i);
        for (int64_t token = 0; token < slice->tokens; token += tokens)
            for (int head = 0; head < group; head += heads, tile++) {
                const int64_t left = slice->tokens - token;
                *tile = (kv_tile){.slice = slice, .first_token = token, .first_head = head};
                tile->tokens = (int)(left < tokens ? left : tokens);
                tile->heads = group - head < heads ? group - head : heads;
                fill_tile(job, tile);
            }
    }
    return 0;
}

/* Tasks: heads of a tile together as long as there are tasks enough for the threads, since a block's heads lie one
 * after another; with fewer (tile, head) pairs than threads, spans of the context apart. */
static int make_tasks(kv_job *job) {
    const kv_call *call = job->call;
    const int heads = (int)call->plan->kv_heads;
    const int64_t wanted = call->threads > 1 ? (int64_t)call->threads * TASKS_PER_THREAD : 1;
    const int64_t parts = (wanted + job->tile_count - 1) / job->tile_count;
    job->split = call->threads > 1 && job->tile_count * heads < wanted;
    int64_t stored = 0;
    for (int64_t i = 0; i < job->tile_count; i++) {
        kv_tile *tile = &job->tiles[i];
        const int64_t fit = STATE_BYTES / ((int64_t)tile->tokens * tile->heads * call->value_dim * 4);
        int64_t together = parts > heads ? 1 : heads / parts;
        if (together > fit) together = fit;
        tile->heads_per_task = (int)(together > 0 ? together : 1);
        tile->head_tasks = (heads + tile->heads_per_task - 1) / tile->heads_per_task;
        tile->store = stored * heads;
        stored += tile->spans;
        job->first_task[i] = job->task_count;
        job->task_count += tile->head_tasks * (job->split ? tile->spans : 1);
    }
    job->first_task[job->tile_count] = job->task_count;
    if (!job->split) return 0;
    job->store_bytes = kv_partials_bytes(KV_ROWS_MAX, (int)call->value_dim);
    return posix_memalign((void **)&job->store, 64, (size_t)(stored * heads) * job->store_bytes) ? -1 : 0;
}

int kv_attend(const kv_call *call) {
    const int64_t blocks = KV_SPAN_TOKENS / call->plan->block_tokens;
    kv_job job = {.call = call, .ops = kv_active()->attention, .span_blocks = blocks > 0 ? blocks : 1};
    int result = 0;
    if (call->plan->slice_count == 0) return 0;
    if (make_tiles(&job) || make_tasks(&job)) result = -1;
    if (!result) kv_parallel_for(job.task_count, kv_attend_task, &job, call->threads);
    if (!result && job.split && !job.failed)
        kv_parallel_for(job.tile_count * call->plan->kv_heads, kv_attend_merge, &job, call->threads);
    if (job.failed) result = -1;
    free(job.store);
    free(job.tiles);
    free(job.first_task);
    return result;
}
