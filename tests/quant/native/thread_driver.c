/* Drives the pool of threads.c from several threads at once, without Python, so that it runs under a race detector.
 * With -DPLANT_RACE the tasks themselves race: a detector that stays silent then is none. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#define CALLERS 3
#define JOBS 2000
#define TASKS_MAX 97
#define WAIT 300

typedef struct {
    int plain[TASKS_MAX]; /* not atomic: written by the task, read by the caller after the job */
    atomic_int nested;
    int shared;
    pthread_t owner;
    int wait;
} job;

static atomic_int elsewhere; /* tasks that another thread than the caller took */

static void nested_task(void *context, int64_t task) {
    (void)task;
    atomic_fetch_add(&((job *)context)->nested, 1);
}

static void task(void *context, int64_t i) {
    job *j = context;
    j->plain[i]++;
    for (volatile int wait = 0; wait < j->wait; wait++) continue; /* long enough for workers to come */
    if (!pthread_equal(pthread_self(), j->owner)) atomic_fetch_add(&elsewhere, 1);
#ifdef PLANT_RACE
    j->shared++;
#endif
    if (i % 16 == 0) kv_parallel_for(2, nested_task, j, 4);
}

static void *caller(void *seed) {
    unsigned state = (unsigned)(size_t)seed;
    for (int round = 0; round < JOBS; round++) {
        job j;
        memset(&j, 0, sizeof j);
        j.owner = pthread_self();
        j.wait = round % 2 ? WAIT : 0; /* short jobs end before workers come, long ones meanwhile */
        state = state * 1103515245u + 12345u;
        const int tasks = (int)(state >> 16) % (round % 4 ? 5 : TASKS_MAX + 1), threads = 1 + (int)(state >> 8) % 8;
        kv_parallel_for(tasks, task, &j, threads);
        for (int i = 0; i < TASKS_MAX; i++)
            if (j.plain[i] != (i < tasks)) {
                fprintf(stderr, "task %d of %d ran %d times on %d threads\n", i, tasks, j.plain[i], threads);
                exit(2);
            }
        if (j.nested != 2 * ((tasks + 15) / 16)) {
            fprintf(stderr, "%d nested tasks ran of %d tasks\n", j.nested, tasks);
            exit(3);
        }
    }
    return NULL;
}

int main(void) {
    pthread_t threads[CALLERS];
    for (size_t i = 0; i < CALLERS; i++)
        if (pthread_create(&threads[i], NULL, caller, (void *)(i + 1))) return 4;
    for (int i = 0; i < CALLERS; i++) pthread_join(threads[i], NULL);
    puts(elsewhere ? "all tasks ran once" : "no worker took part");
    return 0;
}
