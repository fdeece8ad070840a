/* A small pool of workers. Started on first use, never more than asked for, asleep between jobs after a short spin:
 * decode attention of a layer lasts tens of microseconds, less than a sleep and a wake. A forked child starts anew.
 *
 * Who may touch what. The fields of a job (task, context, tasks) belong to whoever holds `busy`, and are written only
 * while nobody has a place. A worker reads them only after it has taken a place out of `wanted`, which is stored after
 * them: that store publishes them. A worker counts itself inside *before* it looks for a place, and the owner takes
 * the places away *before* it waits until nobody is inside; all of these are sequentially consistent, so a worker
 * either finds no place or is waited for. A worker that wakes late, while the next job is being set up, therefore
 * finds no place, or one of the new job and with it all of the new job's fields. */

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "kernels.h"

#define THREADS_MAX 64
#define SPINS 4000     /* some tens of microseconds */
#define LINE_BYTES 128 /* two cache lines: neighbours are fetched in pairs */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t woken;
    pthread_mutex_t busy; /* held by the caller whose job runs */
    int workers;          /* started; under busy */
    pid_t owner;          /* a child of fork has no workers; under busy */
    kv_task task;
    void *context;
    int64_t tasks;
    /* Apart, so that workers that wait for a job do not slow those that take tasks. */
    _Alignas(LINE_BYTES) atomic_llong next;
    _Alignas(LINE_BYTES) atomic_uint_fast64_t job; /* number of the current job: workers wait for it to change */
    _Alignas(LINE_BYTES) atomic_int wanted;        /* workers of the current job that may still join */
    atomic_int inside;                             /* workers that look for a place, or work */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .woken = PTHREAD_COND_INITIALIZER, .busy = PTHREAD_MUTEX_INITIALIZER};

/* Results are normative to the bit, denormal numbers included, whatever the calling thread has set (torch's
 * set_flush_denormal) and whichever thread takes a task. */
#if defined(__x86_64__)
typedef unsigned fp_state;
#define FP_DEFAULT 0x1f80u /* round to nearest, nothing flushed, exceptions masked */
static fp_state fp_enter(void) {
    const fp_state before = _mm_getcsr();
    _mm_setcsr(FP_DEFAULT);
    return before;
}
static void fp_leave(fp_state before) { _mm_setcsr(before); }
#elif defined(__aarch64__)
typedef uint64_t fp_state;
static fp_state fp_enter(void) {
    fp_state before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"((fp_state)0));
    return before;
}
static void fp_leave(fp_state before) { __asm__ volatile("msr fpcr, %0" : : "r"(before)); }
#else
typedef int fp_state;
static fp_state fp_enter(void) { return 0; }
static void fp_leave(fp_state before) { (void)before; }
#endif

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Until no worker is inside. Spins, then gives the core away: the worker that is waited for may need it. */
static void wait_until_empty(void) {
    for (int spins = 0; atomic_load(&pool.inside); spins++) {
        if (spins < SPINS)
            relax();
        else
            sched_yield();
    }
}

static void work(void) {
    const fp_state before = fp_enter();
    for (;;) {
        const int64_t task = atomic_fetch_add(&pool.next, 1);
        if (task >= pool.tasks) break;
        pool.task(pool.context, task);
    }
    fp_leave(before);
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
        atomic_fetch_add(&pool.inside, 1);
        seen = atomic_load(&pool.job);
        if (atomic_fetch_sub(&pool.wanted, 1) > 0) work();
        atomic_fetch_sub(&pool.inside, 1);
    }
    return NULL;
}

static int start_workers(int wanted) {
    if (pool.owner != getpid()) { /* forked without pthread_atfork's handlers */
        pool.workers = 0;
        pool.owner = getpid();
    }
    /* Signals are the interpreter's own threads' business: a worker inherits the mask that blocks them all. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.workers < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, NULL)) break;
        pthread_detach(thread);
        pool.workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return pool.workers < wanted ? pool.workers : wanted;
}

static void alone(int64_t tasks, kv_task task, void *context) {
    const fp_state before = fp_enter();
    for (int64_t i = 0; i < tasks; i++) task(context, i);
    fp_leave(before);
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

static void register_fork(void) { pthread_atfork(NULL, NULL, forget_workers); }

void kv_parallel_for(int64_t tasks, kv_task task, void *context, int threads) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_fork);
    if (threads > THREADS_MAX) threads = THREADS_MAX;
    if (threads > tasks) threads = (int)tasks;
    /* Busy: another caller's job, or this is a task of one. */
    if (threads <= 1 || pthread_mutex_trylock(&pool.busy)) {
        alone(tasks, task, context);
        return;
    }
    const int helpers = start_workers(threads - 1);
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
    wait_until_empty();
    pthread_mutex_unlock(&pool.busy);
}
