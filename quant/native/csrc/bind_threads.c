/* Python binding of a probe of the pool: what a test of threads.c needs to see, and nothing that kernels use. */
#include "bind.h"
#include "kernels.h"

#include <float.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#define SEEN_MAX 64
#define NESTED_TASKS 3
#define NESTED_THREADS 4

typedef struct {
    atomic_int *runs;   /* how often each task ran */
    atomic_int nested;  /* runs of the tasks that tasks started */
    atomic_int flushed; /* tasks that saw a denormal number become zero */
    atomic_int workers; /* distinct threads that ran a task */
    _Atomic(pthread_t) seen[SEEN_MAX];
    int nest;
} probe;

static void nested_task(void *context, int64_t task) {
    (void)task;
    atomic_fetch_add(&((probe *)context)->nested, 1);
}

static void probe_task(void *context, int64_t task) {
    probe *p = context;
    atomic_fetch_add(&p->runs[task], 1);
    volatile float tiny = FLT_MIN, half = 0.5f;
    volatile float denormal = tiny * half;
    if (denormal == 0.0f) atomic_fetch_add(&p->flushed, 1);
    for (int i = 0; i < SEEN_MAX; i++) {
        pthread_t none = 0;
        const pthread_t self = pthread_self();
        if (atomic_load(&p->seen[i]) == self) break;
        if (atomic_compare_exchange_strong(&p->seen[i], &none, self)) {
            atomic_fetch_add(&p->workers, 1);
            break;
        }
    }
    if (p->nest) kv_parallel_for(NESTED_TASKS, nested_task, p, NESTED_THREADS);
}

static PyObject *thread_probe(PyObject *self, PyObject *arguments) {
    (void)self;
    long long tasks;
    int threads, nest = 0;
    if (!PyArg_ParseTuple(arguments, "Li|p", &tasks, &threads, &nest)) return NULL;
    if (tasks < 0 || tasks > 1 << 24) {
        PyErr_SetString(PyExc_ValueError, "thread_probe: expected between 0 and 2**24 tasks");
        return NULL;
    }
    probe p = {.nest = nest};
    p.runs = calloc(tasks ? (size_t)tasks : 1, sizeof *p.runs);
    if (!p.runs) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS;
    kv_parallel_for(tasks, probe_task, &p, threads);
    Py_END_ALLOW_THREADS;
    long long once = 0;
    for (long long i = 0; i < tasks; i++) once += atomic_load(&p.runs[i]) == 1;
    free(p.runs);
    return Py_BuildValue("(Liii)", once, atomic_load(&p.nested), atomic_load(&p.workers), atomic_load(&p.flushed));
}

PyMethodDef kv_thread_methods[] = {
    {"thread_probe", thread_probe, METH_VARARGS,
     "(tasks, threads, nest=False) -> (tasks that ran exactly once, nested runs, threads seen, tasks that flushed)"},
    {NULL, NULL, 0, NULL},
};
