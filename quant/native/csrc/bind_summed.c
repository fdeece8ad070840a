/* A head and rows of bytes to a file and from it, summed while they lie in the processor's cache: what the disk tier
 * does with a frame. The head names sums: XXH3-128 of each of the parts that the rows are cut into, where `sums` says, and
 * at its end that of the head itself up to there. Python's lock is released; the file may be used by others meanwhile. */
#define _GNU_SOURCE
#include "bind.h"
#include "checksum.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#define CHUNK_BYTES (1 << 20) /* fits the last cache; each call costs more than what smaller pieces save */
#define LAST_CHUNK_BYTES (CHUNK_BYTES + (128 << 10)) /* rather one a bit longer than a short one more */
#define HEAD_MOST_BYTES 8192
#define IOV_MOST 64 /* at once; more rows take more calls */
#define SUMS_MOST 64

static const uint8_t zeros[HEAD_MOST_BYTES];

typedef struct {
    int fd;
    int64_t offset;
    uint8_t *head;
    int64_t head_bytes, tail_bytes;
    Py_buffer *rows;
    int64_t row_count, payload_bytes;
    struct {
        int64_t at, bytes; /* in the head; of the rows */
    } sums[SUMS_MOST];
    int64_t sum_count;
    kv_checksum state;
    int64_t sum, left; /* the one that is being taken, its bytes to come */
    int64_t row, at;   /* the next byte of the rows */
} summed_job;

#define ENDED (-2) /* the file is shorter */

/* All of it, in as many calls as it takes: 0, errno or ENDED. */
static int move_all(const summed_job *job, struct iovec *parts, int count, int64_t offset, int writing) {
    while (count) {
        const ssize_t done = writing ? pwritev(job->fd, parts, count, offset) : preadv(job->fd, parts, count, offset);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return errno;
        if (!done) return ENDED;
        offset += done;
        size_t left = (size_t)done;
        while (count && left >= parts->iov_len) left -= parts->iov_len, parts++, count--;
        if (count) {
            parts->iov_base = (uint8_t *)parts->iov_base + left;
            parts->iov_len -= left;
        }
    }
    return 0;
}

/* The next bytes of the rows as parts, at most `bytes` and IOV_MOST - 2 parts; how many bytes they have. */
static int64_t next_parts(summed_job *job, int64_t bytes, struct iovec *parts, int *count) {
    int64_t taken = 0;
    while (taken < bytes && job->row < job->row_count && *count < IOV_MOST - 1) {
        const Py_buffer *row = &job->rows[job->row];
        int64_t size = row->len - job->at;
        if (size > bytes - taken) size = bytes - taken;
        if (size) parts[(*count)++] = (struct iovec){(uint8_t *)row->buf + job->at, (size_t)size};
        taken += size;
        job->at += size;
        if (job->at == row->len) job->row++, job->at = 0;
    }
    return taken;
}

static void begin_sum(summed_job *job) {
    kv_checksum_begin(&job->state);
    job->left = job->sum < job->sum_count ? job->sums[job->sum].bytes : 0;
}

static void sum_parts(summed_job *job, const struct iovec *parts, int from, int count) {
    for (int i = from; i < count; i++) {
        const uint8_t *bytes = parts[i].iov_base;
        for (int64_t rest = (int64_t)parts[i].iov_len, size; rest; rest -= size, bytes += size) {
            size = rest < job->left ? rest : job->left;
            kv_checksum_update(&job->state, bytes, size, NULL, 0);
            if (job->left -= size) continue;
            kv_checksum_digest(&job->state, job->head + job->sums[job->sum++].at);
            begin_sum(job);
        }
    }
}

/* The head's own sum, once those of the rows are in it. */
static void finish_head(summed_job *job) {
    kv_checksum of_head;
    kv_checksum_begin(&of_head);
    const int64_t before = job->head_bytes - KV_CHECKSUM_BYTES;
    kv_checksum_update(&of_head, job->head, before, NULL, 0);
    kv_checksum_digest(&of_head, job->head + before);
}

/* Bytes of the next chunk, whose end lies on a whole page of the file unless it is the last. */
static int64_t chunk_bytes(int64_t done, int64_t left, int64_t head_bytes) {
    const int64_t head = done ? 0 : head_bytes;
    return left + head <= LAST_CHUNK_BYTES ? left : CHUNK_BYTES - head;
}

static int write_rows(summed_job *job) {
    int64_t done = 0, offset = job->offset;
    int whole_head = 0;
    while (done < job->payload_bytes) {
        struct iovec parts[IOV_MOST + 1];
        int count = 0;
        const int64_t wanted = chunk_bytes(done, job->payload_bytes - done, job->head_bytes);
        if (!done) parts[count++] = (struct iovec){NULL, (size_t)job->head_bytes};
        const int from = count;
        const int64_t taken = next_parts(job, wanted, parts, &count);
        sum_parts(job, parts, from, count);
        if (!done) {
            /* As long as the rest is missing there is no head: whatever lay here is no frame from now on. */
            whole_head = taken == job->payload_bytes;
            if (whole_head) finish_head(job);
            parts[0].iov_base = whole_head ? job->head : (uint8_t *)zeros;
        }
        int64_t bytes = taken + (done ? 0 : job->head_bytes);
        done += taken;
        if (done == job->payload_bytes && job->tail_bytes) {
            parts[count++] = (struct iovec){(uint8_t *)zeros, (size_t)job->tail_bytes};
            bytes += job->tail_bytes;
        }
        const int failed = move_all(job, parts, count, offset, 1);
        if (failed) return failed;
        offset += bytes;
    }
    if (whole_head) return 0;
    finish_head(job);
    struct iovec head = {job->head, (size_t)job->head_bytes};
    return move_all(job, &head, 1, job->offset, 1);
}

static int read_rows(summed_job *job, uint8_t *found) {
    int64_t done = 0, offset = job->offset;
    while (done < job->payload_bytes) {
        struct iovec parts[IOV_MOST + 1], summed[IOV_MOST + 1];
        int count = 0;
        const int64_t wanted = chunk_bytes(done, job->payload_bytes - done, job->head_bytes);
        if (!done) parts[count++] = (struct iovec){found, (size_t)job->head_bytes};
        const int from = count;
        const int64_t taken = next_parts(job, wanted, parts, &count);
        memcpy(summed, parts, sizeof parts); /* reading moves the parts on */
        const int failed = move_all(job, parts, count, offset, 0);
        if (failed) return failed;
        sum_parts(job, summed, from, count);
        offset += taken + (done ? 0 : job->head_bytes);
        done += taken;
    }
    finish_head(job);
    return 0;
}

static void release(summed_job *job, Py_buffer *head) {
    for (int64_t i = 0; i < job->row_count; i++) PyBuffer_Release(&job->rows[i]);
    free(job->rows);
    if (head->obj) PyBuffer_Release(head);
}

static int take_rows(summed_job *job, PyObject *rows, int writing) {
    if (!PyList_CheckExact(rows)) return PyErr_SetString(PyExc_TypeError, "rows: expected a list of buffers"), -1;
    const Py_ssize_t count = PyList_Size(rows);
    if (!(job->rows = malloc(((size_t)count + 1) * sizeof *job->rows))) return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < PyList_Size(rows) && i < count; i++) {
        Py_buffer *row = &job->rows[job->row_count];
        if (PyObject_GetBuffer(PyList_GetItem(rows, i), row, writing ? PyBUF_SIMPLE : PyBUF_WRITABLE)) return -1;
        job->row_count++;
        job->payload_bytes += row->len;
    }
    if (job->payload_bytes) return 0;
    return PyErr_SetString(PyExc_ValueError, "rows: got no bytes, expected at least one"), -1;
}

/* Once head and rows are known. */
static int take_sums(summed_job *job, PyObject *sums) {
    if (!PyTuple_Check(sums)) return PyErr_SetString(PyExc_TypeError, "sums: expected a tuple of (at, bytes)"), -1;
    const Py_ssize_t count = PyTuple_Size(sums);
    int64_t rest = job->payload_bytes;
    for (Py_ssize_t i = 0; i < count && i < SUMS_MOST; i++) {
        long long at, bytes;
        PyObject *pair = PyTuple_GetItem(sums, i);
        if (!PyTuple_Check(pair)) return PyErr_SetString(PyExc_TypeError, "sums: expected a tuple of (at, bytes)"), -1;
        if (!PyArg_ParseTuple(pair, "LL", &at, &bytes)) return -1;
        if (at < 0 || at > job->head_bytes - 2 * KV_CHECKSUM_BYTES || bytes < 1 || bytes > rest) break;
        job->sums[job->sum_count].at = at;
        job->sums[job->sum_count++].bytes = bytes;
        rest -= bytes;
    }
    if (rest || job->sum_count != count) {
        PyErr_Format(PyExc_ValueError, "sums: got %zd; expected 1..%d inside the head, of parts that are the rows", count,
                     SUMS_MOST);
        return -1;
    }
    begin_sum(job);
    return 0;
}

static int prepare(summed_job *job, Py_buffer *head, PyObject *const *arguments, int writing) {
    const long fd = PyLong_AsLong(arguments[0]);
    job->offset = PyLong_AsLongLong(arguments[1]);
    if (PyErr_Occurred()) return -1;
    if (PyObject_GetBuffer(arguments[2], head, PyBUF_WRITABLE)) return -1;
    if (fd < 0 || fd > INT32_MAX || job->offset < 0 || head->len > HEAD_MOST_BYTES ||
        head->len < 2 * KV_CHECKSUM_BYTES) {
        PyErr_Format(PyExc_ValueError, "got file %ld, offset %lld and a head of %zd bytes; expected 0 or more, %d..%d bytes",
                     fd, (long long)job->offset, head->len, 2 * KV_CHECKSUM_BYTES, HEAD_MOST_BYTES);
        return -1;
    }
    job->fd = (int)fd;
    job->head = head->buf;
    job->head_bytes = head->len;
    return take_rows(job, arguments[4], writing) || take_sums(job, arguments[3]) ? -1 : 0;
}

static PyObject *segments_write(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    if (count != 6) {
        PyErr_SetString(PyExc_TypeError, "expected segments_write(fd, offset, head, sums, rows, tail_bytes)");
        return NULL;
    }
    summed_job job = {.tail_bytes = PyLong_AsLongLong(arguments[5])};
    Py_buffer head = {.obj = NULL};
    if (PyErr_Occurred()) return NULL;
    int failed = -1;
    if (job.tail_bytes < 0 || job.tail_bytes > HEAD_MOST_BYTES)
        PyErr_Format(PyExc_ValueError, "tail: got %lld bytes, expected 0..%d", (long long)job.tail_bytes,
                     HEAD_MOST_BYTES);
    else if (!prepare(&job, &head, arguments, 1)) {
        Py_BEGIN_ALLOW_THREADS
        failed = write_rows(&job);
        Py_END_ALLOW_THREADS
    }
    release(&job, &head);
    if (failed > 0 || failed == ENDED) {
        errno = failed > 0 ? failed : EIO; /* a write that takes nothing has no cause of its own */
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return failed ? NULL : Py_NewRef(Py_None);
}

/* Many of them, with no step of Python's in between: what it needs would have left the cache each time. */
static PyObject *segments_write_all(PyObject *self, PyObject *writes) {
    if (!PyList_CheckExact(writes)) return PyErr_SetString(PyExc_TypeError, "writes: expected a list of tuples"), NULL;
    for (Py_ssize_t i = 0; i < PyList_Size(writes); i++) {
        PyObject *one = PyList_GetItem(writes, i), *arguments[6] = {NULL};
        const Py_ssize_t count = PyTuple_Check(one) ? PyTuple_Size(one) : 0;
        for (Py_ssize_t at = 0; at < count && at < 6; at++) arguments[at] = PyTuple_GetItem(one, at);
        Py_INCREF(one);
        PyObject *done = segments_write(self, arguments, count);
        Py_DECREF(one);
        if (!done) return NULL;
        Py_DECREF(done);
    }
    return Py_NewRef(Py_None);
}

static PyObject *segments_read(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "expected segments_read(fd, offset, head, sums, rows)");
        return NULL;
    }
    summed_job job = {.fd = -1};
    Py_buffer head = {.obj = NULL};
    uint8_t found[HEAD_MOST_BYTES];
    int failed = -1;
    if (!prepare(&job, &head, arguments, 0)) {
        Py_BEGIN_ALLOW_THREADS
        failed = read_rows(&job, found);
        Py_END_ALLOW_THREADS
    }
    PyObject *result = NULL;
    if (failed > 0) {
        errno = failed;
        PyErr_SetFromErrno(PyExc_OSError);
    } else if (failed == ENDED)
        result = PyBytes_FromStringAndSize(NULL, 0);
    else if (!failed && !memcmp(found, job.head, (size_t)job.head_bytes))
        result = Py_NewRef(Py_None);
    else if (!failed)
        result = PyBytes_FromStringAndSize((const char *)found, job.head_bytes);
    release(&job, &head);
    return result;
}

PyMethodDef kv_summed_methods[] = {
    {"segments_write", (PyCFunction)(void (*)(void))segments_write, METH_FASTCALL,
     "(fd, offset, head bytearray, sums ((at, bytes), ...), rows list of buffers, tail_bytes of zeros): fills in the sums, head last"},
    {"segments_write_all", segments_write_all, METH_O, "(list of tuples of segments_write's arguments), in order"},
    {"segments_read", (PyCFunction)(void (*)(void))segments_read, METH_FASTCALL,
     "(fd, offset, head bytearray, sums ((at, bytes), ...), rows list of buffers) -> None where the file has this head with the sums of "
     "what was read, which are filled in; else the head that it has, b'' where the file ends before the rows do"},
    {NULL, NULL, 0, NULL},
};
