/* A small pool of workers. Started on first use, never more than asked for, asleep between jobs after a short spin:
 * decode attention of a layer lasts tens of microseconds, less than a sleep and a wake. A forked child starts anew. */

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "kernels.h"

#define THREADS_MAX 64
#define SPINS 4000 /* some tens of microseconds */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t woken;
    pthread_mutex_t busy; /* held by the caller whose job runs */
    int workers;          /* started */
    pid_t owner;          /* a child of fork has no workers */
    kv_task task;
    void *context;
    int64_t tasks;
    atomic_llong next;
    atomic_uint_fast64_t job; /* number of the current job: workers wait for it to change */
    atomic_int wanted;        /* workers of the current job that may still join */
    atomic_int inside;        /* workers at work */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .woken = PTHREAD_COND_INITIALIZER, .busy = PTHREAD_MUTEX_INITIALIZER};

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void work(void) {
    for (;;) {
        const int64_t task = atomic_fetch_add(&pool.next, 1);
        if (task >= pool.tasks) return;
        pool.task(pool.context, task);
    }
}

static void *worker(void *unused) {
    (void)unused;
    uint_fast64_t seen = 0;
    for (;;) {
        int spins = 0;
        while (atomic_load(&pool.job) == seen && spins++ < SPINS) relax();
        if (atomic_load(&pool.job) == seen) {
            pthread_mutex_lock(&pool.lock);
            while (atomic_load(&pool.job) == seen) pthread_cond_wait(&pool.woken, &pool.lock);
            pthread_mutex_unlock(&pool.lock);
        }
        /* Joining is registered before the job is looked at, so that the owner never changes it under a worker. */
        atomic_fetch_add(&pool.inside, 1);
        seen = atomic_load(&pool.job);
        if (atomic_fetch_sub(&pool.wanted, 1) > 0) work();
        atomic_fetch_sub(&pool.inside, 1);
    }
    return NULL;
}

static int start_workers(int wanted) {
    if (pool.owner != getpid()) {
        pool.workers = 0;
        pool.owner = getpid();
    }
    while (pool.workers < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, NULL)) break;
        pthread_detach(thread);
        pool.workers++;
    }
    return pool.workers < wanted ? pool.workers : wanted;
}

static void alone(int64_t tasks, kv_task task, void *context) {
    for (int64_t i = 0; i < tasks; i++) task(context, i);
}

static void forget_workers(void) {
    /* In the child of a fork: locks may be held by threads that do not exist here. */
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.woken, NULL);
    pthread_mutex_init(&pool.busy, NULL);
    pool.workers = 0;
    atomic_store(&pool.wanted, 0);
    atomic_store(&pool.inside, 0);
}

void kv_parallel_for(int64_t tasks, kv_task task, void *context, int threads) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    extern void kv_register_fork(void);
    pthread_once(&once, kv_register_fork);
    if (threads > THREADS_MAX) threads = THREADS_MAX;
    if (threads > tasks) threads = (int)tasks;
    if (threads <= 1 || pthread_mutex_trylock(&pool.busy)) {
        alone(tasks, task, context);
        return;
    }
    const int helpers = start_workers(threads - 1);
    /* A worker that came late to the last job may still be reading it. */
    while (atomic_load(&pool.inside)) relax();
    pool.task = task;
    pool.context = context;
    pool.tasks = tasks;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.wanted, helpers);
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.job, 1);
    pthread_cond_broadcast(&pool.woken);
    pthread_mutex_unlock(&pool.lock);
    work();
    atomic_store(&pool.wanted, 0); /* who has not joined by now has nothing left to do */
    while (atomic_load(&pool.inside)) relax();
    pthread_mutex_unlock(&pool.busy);
}

void kv_register_fork(void) { pthread_atfork(NULL, NULL, forget_workers); }
