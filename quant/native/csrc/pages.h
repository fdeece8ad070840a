/* Copies of many pieces at once: pages gathered, scattered, or moved from places to places. */
#ifndef KV_PAGES_H
#define KV_PAGES_H
#include "kernels.h"

/* Where pieces lie: at base + offsets[i], or, without offsets, at base + i * piece_bytes. */
typedef struct {
    uint8_t *base;
    const int64_t *offsets;
} kv_pages_side;

typedef struct {
    kv_pages_side source, target;
    const int64_t *sizes; /* bytes of each piece, then both sides have offsets; NULL: all have piece_bytes */
    int64_t piece_bytes;
    int64_t count;
    int64_t pieces_per_task;
    int stream; /* stores go past the cache */
} kv_pages_job;

struct kv_page_ops {
    /* Copies the pieces of one task: [task * pieces_per_task, ...). A kv_task over the job: threads may share one.
     * Ranges were checked; no target overlaps another target or a source. */
    void (*copy)(void *job, int64_t task);
};

#endif
