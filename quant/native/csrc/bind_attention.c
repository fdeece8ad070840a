/* Python bindings of the attention functions. */
#include "bind.h"
#include "paged.h"

/* Reads int64 arguments from `first` on into `to`. Returns 0, or -1 with an exception. */
static int read_integers(PyObject *const *arguments, Py_ssize_t first, Py_ssize_t count, int64_t *to) {
    for (Py_ssize_t i = 0; i < count; i++) {
        to[i] = PyLong_AsLongLong(arguments[first + i]);
        if (to[i] == -1 && PyErr_Occurred()) return -1;
    }
    return 0;
}

static int read_floats(PyObject *const *arguments, Py_ssize_t first, Py_ssize_t count, double *to) {
    for (Py_ssize_t i = 0; i < count; i++) {
        to[i] = PyFloat_AsDouble(arguments[first + i]);
        if (to[i] == -1.0 && PyErr_Occurred()) return -1;
    }
    return 0;
}

static int wrong_count(const char *name, Py_ssize_t got, Py_ssize_t expected) {
    if (got == expected) return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, expected, got);
    return 1;
}

static const kv_plan *plan_at(int64_t address) {
    const kv_plan *plan = (const kv_plan *)(uintptr_t)address;
    if (plan && plan->fields == KV_PLAN_FIELDS) return plan;
    PyErr_SetString(PyExc_ValueError, "not an attention plan of this build");
    return NULL;
}

#define ATTEND_INTEGERS 11
#define ATTEND_FLOATS 2

static PyObject *attend(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    int64_t n[ATTEND_INTEGERS];
    double f[ATTEND_FLOATS];
    if (wrong_count("attend", count, ATTEND_INTEGERS + ATTEND_FLOATS) ||
        read_integers(arguments, 0, ATTEND_INTEGERS, n) || read_floats(arguments, ATTEND_INTEGERS, ATTEND_FLOATS, f))
        return NULL;
    kv_call call = {
        .plan = plan_at(n[0]),
        .layer = n[1],
        .query = (const void *)(uintptr_t)n[2],
        .query_token_stride = n[3],
        .query_head_stride = n[4],
        .query_heads = n[5],
        .query_dtype = (kv_dtype)n[6],
        .out = (void *)(uintptr_t)n[7],
        .value_dim = n[8],
        .sinks = (const float *)(uintptr_t)n[9],
        .threads = (int)n[10],
        .scaling = f[0],
        .softcap = f[1],
    };
    if (!call.plan) return NULL;
    int result;
    Py_BEGIN_ALLOW_THREADS result = kv_attend(&call);
    Py_END_ALLOW_THREADS if (result) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

#define WRITE_INTEGERS 10

static PyObject *write_tokens(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    int64_t n[WRITE_INTEGERS];
    if (wrong_count("write_tokens", count, WRITE_INTEGERS) || read_integers(arguments, 0, WRITE_INTEGERS, n)) return NULL;
    const kv_write write = {
        .plan = plan_at(n[0]),
        .layer = n[1],
        .slot_mapping = (const int64_t *)(uintptr_t)n[2],
        .tokens = n[3],
        .keys = (const uint8_t *)(uintptr_t)n[4],
        .key_token_bytes = n[5],
        .key_head_bytes = n[6],
        .values = (const uint8_t *)(uintptr_t)n[7],
        .value_token_bytes = n[8],
        .value_head_bytes = n[9],
    };
    if (!write.plan) return NULL;
    Py_BEGIN_ALLOW_THREADS kv_write_tokens(&write);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyObject *plan_fields(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    return PyLong_FromLongLong(KV_PLAN_FIELDS);
}

static PyObject *selftest(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    const int passed = kv_attention_selftest();
    if (passed < 0) return PyErr_NoMemory();
    return PyBool_FromLong(passed);
}

PyMethodDef kv_attention_methods[] = {
    {"attend", (PyCFunction)(void (*)(void))attend, METH_FASTCALL,
     "attend(plan, layer, query, token stride, head stride, query heads, dtype, out, value dim, sinks, threads, "
     "scaling, softcap): one layer of a step; addresses as ints"},
    {"write_tokens", (PyCFunction)(void (*)(void))write_tokens, METH_FASTCALL,
     "write_tokens(plan, layer, slot mapping, tokens, keys, token bytes, head bytes, values, token bytes, head bytes): "
     "KV of a step into its slots"},
    {"attention_selftest", selftest, METH_NOARGS, "whether the active path attends as plain arithmetic does"},
    {"plan_fields", plan_fields, METH_NOARGS, "fields of an attention plan"},
    {NULL, NULL, 0, NULL},
};
