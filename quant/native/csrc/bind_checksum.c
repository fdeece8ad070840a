/* Python bindings of the checksum. A state travels as a buffer of the caller's: it is worked on in a copy and its
 * fields are checked, so that no bytes and no second thread in it lead outside. */
#include "bind.h"
#include "checksum.h"

#include <stdlib.h>
#include <string.h>

#define WITH_LOCK_BYTES 16384  /* shorter than giving Python's lock away and asking for it again */
#define STREAM_BYTES (4 << 20) /* copies from this size on go past the cache, as those of pages do */

static int state_from(PyObject *given, Py_buffer *buffer, kv_checksum *state) {
    if (PyObject_GetBuffer(given, buffer, PyBUF_WRITABLE)) return -1;
    const int fits = buffer->len == (Py_ssize_t)sizeof *state;
    if (fits) memcpy(state, buffer->buf, sizeof *state);
    if (fits && state->held <= KV_KEPT_BYTES && state->stripe < KV_BLOCK_STRIPES) return 0;
    PyErr_Format(PyExc_ValueError, "state: got %zd bytes, expected the %zu of checksum_begin()", buffer->len,
                 sizeof *state);
    PyBuffer_Release(buffer);
    return -1;
}

static PyObject *digest_of(const kv_checksum *state) {
    uint8_t out[KV_CHECKSUM_BYTES];
    kv_checksum_digest(state, out);
    return PyBytes_FromStringAndSize((const char *)out, sizeof out);
}

static void update(kv_checksum *state, const Py_buffer *source, const Py_buffer *target) {
    uint8_t *to = target ? target->buf : NULL;
    if (source->len < WITH_LOCK_BYTES)
        kv_checksum_update(state, source->buf, source->len, to, 0);
    else {
        Py_BEGIN_ALLOW_THREADS
        kv_checksum_update(state, source->buf, source->len, to, source->len >= STREAM_BYTES);
        Py_END_ALLOW_THREADS
    }
}

static PyObject *checksum_begin(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    kv_checksum state;
    kv_checksum_begin(&state);
    return PyByteArray_FromStringAndSize((const char *)&state, sizeof state);
}

static PyObject *checksum(PyObject *self, PyObject *given) {
    (void)self;
    Py_buffer source;
    if (PyObject_GetBuffer(given, &source, PyBUF_SIMPLE)) return NULL;
    kv_checksum state;
    kv_checksum_begin(&state);
    update(&state, &source, NULL);
    PyBuffer_Release(&source);
    return digest_of(&state);
}

/* One update of the state in arguments[0]: of what lies in `source`, with a copy to `target` unless that is NULL. */
static PyObject *updated(PyObject *given_state, PyObject *given_source, PyObject *given_target) {
    kv_checksum state;
    Py_buffer kept, source, target;
    if (state_from(given_state, &kept, &state)) return NULL;
    PyObject *result = NULL;
    if (PyObject_GetBuffer(given_source, &source, PyBUF_SIMPLE)) goto release_state;
    if (given_target && PyObject_GetBuffer(given_target, &target, PyBUF_WRITABLE)) goto release_source;
    if (given_target && target.len != source.len)
        PyErr_Format(PyExc_ValueError, "target: got %zd bytes for a source of %zd, expected as many", target.len,
                     source.len);
    else {
        update(&state, &source, given_target ? &target : NULL);
        memcpy(kept.buf, &state, sizeof state);
        result = Py_NewRef(Py_None);
    }
    if (given_target) PyBuffer_Release(&target);
release_source:
    PyBuffer_Release(&source);
release_state:
    PyBuffer_Release(&kept);
    return result;
}

static PyObject *checksum_update(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    if (count == 2) return updated(arguments[0], arguments[1], NULL);
    PyErr_SetString(PyExc_TypeError, "expected checksum_update(state, source)");
    return NULL;
}

static PyObject *checksum_copy(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    if (count == 3) return updated(arguments[0], arguments[1], arguments[2]);
    PyErr_SetString(PyExc_TypeError, "expected checksum_copy(state, source, target)");
    return NULL;
}

static PyObject *checksum_digest(PyObject *self, PyObject *given) {
    (void)self;
    kv_checksum state;
    Py_buffer kept;
    if (state_from(given, &kept, &state)) return NULL;
    PyBuffer_Release(&kept);
    return digest_of(&state);
}

PyMethodDef kv_checksum_methods[] = {
    {"checksum", checksum, METH_O, "(buffer) -> its XXH3-128, bytes[16] as the xxhash package gives them"},
    {"checksum_begin", checksum_begin, METH_NOARGS, "state of a checksum over nothing yet, for the functions below"},
    {"checksum_update", (PyCFunction)(void (*)(void))checksum_update, METH_FASTCALL,
     "(state, buffer): go on over these bytes"},
    {"checksum_copy", (PyCFunction)(void (*)(void))checksum_copy, METH_FASTCALL,
     "(state, source, target): the same, and copy them; the two have one length and do not overlap"},
    {"checksum_digest", checksum_digest, METH_O, "(state) -> bytes[16]; the state may go on"},
    {NULL, NULL, 0, NULL},
};
