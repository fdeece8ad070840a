/* Copies of many pieces at once: pages gathered, scattered, or moved from places to places. */
#ifndef KV_PAGES_H
#define KV_PAGES_H
#include "kernels.h"

/* Where pieces lie: at base + offsets[i], or one behind the other from base on when there are no offsets. */
typedef struct {
    uint8_t *base;
    const int64_t *offsets;
} kv_pages_side;

/* Stores past the cache pay for much that is not read again soon. */
typedef enum { KV_PAGES_AUTO = 0, KV_PAGES_CACHED = 1, KV_PAGES_STREAM = 2 } kv_pages_stores;

typedef struct {
    kv_pages_side source, target;
    const int64_t *sizes; /* bytes of each piece; NULL: all have piece_bytes */
    int64_t piece_bytes;
    int64_t count;
    int64_t total_bytes;
    kv_pages_stores stores;
    int threads;
} kv_pages_job;

struct kv_page_ops {
    /* Copies every piece. Sources and targets do not overlap, nor do targets; ranges were checked. */
    void (*copy)(const kv_pages_job *job);
};

#endif
