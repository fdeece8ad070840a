/* Python bindings of the codec functions. Addresses are ints; quant/native/codec.py has checked what they reach. */
#include "bind.h"
#include "codec.h"
#include "kernels.h"

/* From (address, address of block offsets or 0, block, layer, head, run and row bytes). */
static int places_of(PyObject *tuple, kv_places *places) {
    long long at[KV_PLACES_FIELDS];
    if (!PyArg_ParseTuple(tuple, "LLLLLLL", at, at + 1, at + 2, at + 3, at + 4, at + 5, at + 6)) return -1;
    *places = (kv_places){(char *)(intptr_t)at[0], (const int64_t *)(intptr_t)at[1], at[2], at[3], at[4], at[5], at[6]};
    return 0;
}

static int layout_of(PyObject *tuple, kv_record_layout *layout) {
    int field[KV_LAYOUT_FIELDS];
    if (!PyArg_ParseTuple(tuple, "iiiiiiiiiiiiiii", field, field + 1, field + 2, field + 3, field + 4, field + 5,
                          field + 6, field + 7, field + 8, field + 9, field + 10, field + 11, field + 12, field + 13,
                          field + 14))
        return -1;
    *layout = (kv_record_layout){field[0], field[1], field[2],  field[3],  field[4],  field[5],  field[6], field[7],
                                 field[8], field[9], field[10], field[11], field[12], field[13], field[14]};
    if (layout->key_dim < 8 || layout->key_dim > KV_DIM_MAX || layout->key_dim % 8 || layout->value_dim < 0 ||
        layout->value_dim > KV_DIM_MAX || layout->value_dim % 8) {
        PyErr_Format(PyExc_ValueError, "dims %d and %d: expected multiples of 8 up to %d", layout->key_dim,
                     layout->value_dim, KV_DIM_MAX);
        return -1;
    }
    return 0;
}

/* Fills what encode, decode and validate have in common. */
static int job_of(PyObject *layout, int dtype, PyObject *counts, PyObject *const places[3], kv_codec_job *job) {
    long long count[4];
    if (layout_of(layout, &job->layout)) return -1;
    if (dtype < KV_F32 || dtype > KV_F16) {
        PyErr_Format(PyExc_ValueError, "dtype %d: expected 0 to 2", dtype);
        return -1;
    }
    if (!PyArg_ParseTuple(counts, "LLLL", count, count + 1, count + 2, count + 3)) return -1;
    job->dtype = (kv_dtype)dtype;
    job->blocks = count[0], job->layers = count[1], job->heads = count[2], job->runs = count[3];
    kv_places *const targets[] = {&job->keys, &job->values, &job->records};
    for (int i = 0; i < 3; i++)
        if (places_of(places[i], targets[i])) return -1;
    return 0;
}

static PyObject *encode(PyObject *self, PyObject *arguments) {
    (void)self;
    kv_codec_job job = {0};
    PyObject *layout, *counts, *places[3];
    long long accepted;
    int dtype, threads;
    if (!PyArg_ParseTuple(arguments, "OiOOOOddLi", &layout, &dtype, &counts, places, places + 1, places + 2,
                          &job.key_limit, &job.value_limit, &accepted, &threads))
        return NULL;
    if (job_of(layout, dtype, counts, places, &job)) return NULL;
    job.accepted = (uint8_t *)(intptr_t)accepted;
    Py_BEGIN_ALLOW_THREADS;
    kv_encode_blocks(&job, threads);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *decode(PyObject *self, PyObject *arguments) {
    (void)self;
    kv_codec_job job = {0};
    PyObject *layout, *counts, *places[3];
    int dtype, threads;
    if (!PyArg_ParseTuple(arguments, "OiOOOOppi", &layout, &dtype, &counts, places, places + 1, places + 2,
                          &job.rotated, &job.stream, &threads))
        return NULL;
    if (job_of(layout, dtype, counts, places, &job)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    kv_decode_blocks(&job, threads);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *validate(PyObject *self, PyObject *arguments) {
    (void)self;
    kv_codec_job job = {0};
    PyObject *layout, *counts, *records;
    long long valid;
    if (!PyArg_ParseTuple(arguments, "OOOL", &layout, &counts, &records, &valid)) return NULL;
    PyObject *const places[] = {records, records, records};
    if (job_of(layout, KV_F32, counts, places, &job)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    kv_validate_blocks(&job, (uint8_t *)(intptr_t)valid);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *selftest(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    uint64_t digests[2];
    const int passed = kv_codec_selftest(digests);
    return Py_BuildValue("(OKK)", passed ? Py_True : Py_False, (unsigned long long)digests[0],
                         (unsigned long long)digests[1]);
}

PyMethodDef kv_codec_methods[] = {
    {"codec_encode", encode, METH_VARARGS,
     "codec_encode(layout, dtype, counts, keys, values, records, key_limit, value_limit, accepted, threads)"},
    {"codec_decode", decode, METH_VARARGS,
     "codec_decode(layout, dtype, counts, keys, values, records, rotated, stream, threads)"},
    {"codec_validate", validate, METH_VARARGS, "codec_validate(layout, counts, records, valid)"},
    {"codec_selftest", selftest, METH_NOARGS,
     "(whether the active path's codec is bit-equal to the reference on built-in inputs, two digests)"},
    {NULL, NULL, 0, NULL},
};
