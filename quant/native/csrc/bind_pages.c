/* Python bindings of the page copies. Every range is checked here, against the sizes that the buffers themselves
 * state, on copies of the offsets that nobody can change meanwhile: no offset reaches a kernel on trust. */
#include "bind.h"
#include "pages.h"

#include <stdlib.h>
#include <string.h>

#define STREAM_BYTES (4 << 20)  /* a contiguous target from this size on does not stay in the cache for long */
#define TASK_BYTES (256 << 10)  /* what a thread takes at a time */
#define WITH_LOCK_BYTES 16384   /* shorter than giving Python's lock away and asking for it again */
#define THREADS_MOST 1024

enum { AUTO = 0, CACHED = 1, STREAM = 2 };

typedef struct {
    kv_pages_job job;
    Py_buffer source, target;
    int64_t *source_offsets, *target_offsets, *sizes; /* our own copies */
    int64_t total_bytes;
} page_call;

/* One number, for a single piece. */
static int64_t *single(PyObject *given, const char *name, int64_t *count) {
    const int64_t number = PyLong_AsLongLong(given);
    if (number == -1 && PyErr_Occurred()) return NULL;
    if (*count >= 0 && *count != 1) {
        PyErr_Format(PyExc_ValueError, "%s: got 1 for %lld pieces, expected one each", name, (long long)*count);
        return NULL;
    }
    int64_t *own = malloc(sizeof *own);
    if (!own) return (int64_t *)PyErr_NoMemory();
    *own = number;
    *count = 1;
    return own;
}

/* An own copy of an int64 array, or of one int; NULL for None and, with an error set, for what is neither. */
static int64_t *copied(PyObject *given, const char *name, int64_t *count) {
    if (given == Py_None) return NULL;
    if (PyLong_Check(given)) return single(given, name, count);
    Py_buffer buffer;
    if (PyObject_GetBuffer(given, &buffer, PyBUF_SIMPLE)) return NULL;
    const int64_t items = buffer.len / 8;
    int64_t *own = NULL;
    if (buffer.itemsize != 8)
        PyErr_Format(PyExc_ValueError, "%s: got items of %zd bytes, expected int64", name, buffer.itemsize);
    else if (*count >= 0 && *count != items)
        PyErr_Format(PyExc_ValueError, "%s: got %lld for %lld pieces, expected one each", name, (long long)items,
                     (long long)*count);
    else if (!(own = malloc((size_t)buffer.len + 8)))
        PyErr_NoMemory();
    else {
        memcpy(own, buffer.buf, (size_t)buffer.len);
        *count = items;
    }
    PyBuffer_Release(&buffer);
    return own;
}

static int64_t piece_bytes(const kv_pages_job *job, int64_t piece) {
    return job->sizes ? job->sizes[piece] : job->piece_bytes;
}

/* Bytes of all pieces, INT64_MAX when that is more; -1 with an error set when one is negative. */
static int64_t checked_total(const kv_pages_job *job) {
    int64_t total = 0;
    for (int64_t i = 0; i < job->count; i++) {
        const int64_t bytes = piece_bytes(job, i);
        if (bytes < 0) {
            PyErr_Format(PyExc_ValueError, "piece %lld: got %lld bytes, expected 0 or more", (long long)i,
                         (long long)bytes);
            return -1;
        }
        if (__builtin_add_overflow(total, bytes, &total)) total = INT64_MAX;
    }
    return total;
}

static int check_side(const kv_pages_job *job, const int64_t *offsets, int64_t buffer_bytes, const char *name) {
    for (int64_t i = 0; i < job->count; i++) {
        const int64_t bytes = piece_bytes(job, i), offset = offsets[i];
        if (offset >= 0 && offset <= buffer_bytes && bytes <= buffer_bytes - offset) continue;
        PyErr_Format(PyExc_ValueError, "%s: piece %lld has %lld bytes from %lld on, expected it inside 0..%lld", name,
                     (long long)i, (long long)bytes, (long long)offset, (long long)buffer_bytes);
        return -1;
    }
    return 0;
}

/* Without offsets: pieces one behind the other. Those of different sizes get offsets here. */
static int pack_side(page_call *call, int64_t **offsets, int64_t buffer_bytes, const char *name) {
    if (call->total_bytes > buffer_bytes) {
        PyErr_Format(PyExc_ValueError, "%s: %lld pieces have %lld bytes in all, expected at most its %lld", name,
                     (long long)call->job.count, (long long)call->total_bytes, (long long)buffer_bytes);
        return -1;
    }
    if (!call->sizes) return 0;
    if (!(*offsets = malloc((size_t)(call->job.count + 1) * sizeof **offsets))) return PyErr_NoMemory(), -1;
    int64_t at = 0;
    for (int64_t i = 0; i < call->job.count; at += call->sizes[i++]) (*offsets)[i] = at;
    return 0;
}

static int prepare(page_call *call, PyObject *const *arguments) {
    kv_pages_job *job = &call->job;
    job->count = -1;
    if (PyLong_Check(arguments[4]))
        job->piece_bytes = PyLong_AsLongLong(arguments[4]);
    else
        job->sizes = call->sizes = copied(arguments[4], "piece bytes", &job->count);
    if (PyErr_Occurred()) return -1;
    call->source_offsets = copied(arguments[1], "source offsets", &job->count);
    if (PyErr_Occurred()) return -1;
    call->target_offsets = copied(arguments[3], "target offsets", &job->count);
    if (PyErr_Occurred()) return -1;
    if (job->count < 0 || (!job->sizes && arguments[4] == Py_None)) {
        PyErr_SetString(PyExc_ValueError, "expected piece bytes, and offsets for the source, the target or both");
        return -1;
    }
    if (PyObject_GetBuffer(arguments[0], &call->source, PyBUF_SIMPLE)) return -1;
    if (PyObject_GetBuffer(arguments[2], &call->target, PyBUF_WRITABLE)) return -1;
    if ((call->total_bytes = checked_total(job)) < 0) return -1;
    /* Scattered targets are a pool's slots: too many to be in the cache, and rarely read soon. */
    job->stream = call->target_offsets || call->total_bytes >= STREAM_BYTES;
    if (call->source_offsets ? check_side(job, call->source_offsets, call->source.len, "source")
                             : pack_side(call, &call->source_offsets, call->source.len, "source"))
        return -1;
    if (call->target_offsets ? check_side(job, call->target_offsets, call->target.len, "target")
                             : pack_side(call, &call->target_offsets, call->target.len, "target"))
        return -1;
    job->source = (kv_pages_side){call->source.buf, call->source_offsets};
    job->target = (kv_pages_side){call->target.buf, call->target_offsets};
    return 0;
}

static void run(page_call *call, int stores, int threads) {
    kv_pages_job *job = &call->job;
    if (!call->total_bytes) return;
    if (stores != AUTO) job->stream = stores == STREAM;
    const int64_t mean = call->total_bytes / job->count + 1;
    job->pieces_per_task = threads > 1 ? TASK_BYTES / mean + 1 : job->count;
    const int64_t tasks = (job->count + job->pieces_per_task - 1) / job->pieces_per_task;
    const kv_task copy = kv_active()->pages->copy;
    if (call->total_bytes < WITH_LOCK_BYTES)
        kv_parallel_for(tasks, copy, job, 1);
    else {
        Py_BEGIN_ALLOW_THREADS
        kv_parallel_for(tasks, copy, job, threads);
        Py_END_ALLOW_THREADS
    }
}

static PyObject *page_copy(PyObject *self, PyObject *const *arguments, Py_ssize_t argument_count) {
    (void)self;
    if (argument_count != 7) {
        PyErr_SetString(PyExc_TypeError, "expected page_copy(source, source_offsets, target, target_offsets, "
                                         "piece_bytes, stores, threads)");
        return NULL;
    }
    const long stores = PyLong_AsLong(arguments[5]), threads = PyLong_AsLong(arguments[6]);
    if (PyErr_Occurred()) return NULL;
    if (stores < AUTO || stores > STREAM || threads < 1) {
        PyErr_Format(PyExc_ValueError, "got stores %ld and %ld threads, expected 0..2 and at least 1", stores, threads);
        return NULL;
    }
    page_call call;
    memset(&call, 0, sizeof call);
    const int wrong = prepare(&call, arguments);
    if (!wrong) run(&call, (int)stores, (int)(threads < THREADS_MOST ? threads : THREADS_MOST));
    if (call.source.obj) PyBuffer_Release(&call.source);
    if (call.target.obj) PyBuffer_Release(&call.target);
    free(call.source_offsets);
    free(call.target_offsets);
    free(call.sizes);
    if (wrong) return NULL;
    Py_RETURN_NONE;
}

PyMethodDef kv_page_methods[] = {
    {"page_copy", (PyCFunction)(void (*)(void))page_copy, METH_FASTCALL,
     "(source, source_offsets, target, target_offsets, piece_bytes int or int64[n], stores 0 by size 1 cached 2 "
     "streaming, threads), offsets int64[n], an int for one piece or None for packed pieces: copies n pieces; ValueError, with nothing copied, for one outside its buffer"},
    {NULL, NULL, 0, NULL},
};
