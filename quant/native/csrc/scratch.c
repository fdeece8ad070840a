/* A buffer a thread, grown as asked, freed when the thread ends. */
#include <pthread.h>
#include <stdlib.h>

#include "paged.h"

#define ALIGNMENT 64
#define GRAIN 65536

typedef struct {
    size_t bytes;
    void *memory;
} buffer;

static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int usable;

static void release(void *held) {
    free(((buffer *)held)->memory);
    free(held);
}

static void make_key(void) { usable = pthread_key_create(&key, release) == 0; }

void *kv_thread_scratch(size_t bytes) {
    pthread_once(&once, make_key);
    if (!usable) return NULL;
    buffer *own = pthread_getspecific(key);
    if (!own) {
        own = calloc(1, sizeof *own);
        if (!own || pthread_setspecific(key, own)) {
            free(own);
            return NULL;
        }
    }
    if (own->bytes >= bytes) return own->memory;
    free(own->memory);
    own->bytes = 0;
    own->memory = NULL;
    const size_t grown = (bytes + GRAIN - 1) / GRAIN * GRAIN;
    if (posix_memalign(&own->memory, ALIGNMENT, grown)) {
        own->memory = NULL;
        return NULL;
    }
    own->bytes = grown;
    return own->memory;
}
