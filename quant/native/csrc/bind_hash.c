/* Python bindings of the hash functions. */
#include "bind.h"
#include "hash.h"

#include <stdlib.h>
#include <string.h>

#define WITHOUT_LOCK_BLOCKS 64 /* a run this long takes longer than giving the lock away and asking for it again */

static PyObject *sha_ways(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    PyObject *list = PyList_New(0);
    for (const kv_sha_way *way = kv_sha_ways; list && way->name; way++) {
        PyObject *pair = Py_BuildValue("(sO)", way->name, kv_sha_way_runs_here(way) ? Py_True : Py_False);
        if (!pair || PyList_Append(list, pair)) Py_CLEAR(list);
        Py_XDECREF(pair);
    }
    return list;
}

static PyObject *sha_best(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    return PyUnicode_FromString(kv_sha_best()->name);
}

static const kv_sha_way *way_named(PyObject *name) {
    const char *wanted = PyUnicode_AsUTF8AndSize(name, NULL);
    if (!wanted) return NULL;
    for (const kv_sha_way *way = kv_sha_ways; way->name; way++)
        if (!strcmp(way->name, wanted) && kv_sha_way_runs_here(way)) return way;
    PyErr_Format(PyExc_ValueError, "way to compute SHA-256 %R is not compiled in or this CPU cannot run it", name);
    return NULL;
}

static PyObject *hashes_of(const kv_sha_way *way, const uint8_t *parent, const Py_buffer *tokens, Py_ssize_t blocks,
                           Py_ssize_t block_tokens) {
    uint8_t on_stack[4 * KV_HASH_BYTES], *hashes = on_stack;
    if (blocks > 4 && !(hashes = malloc((size_t)blocks * KV_HASH_BYTES))) return PyErr_NoMemory();
    int failed;
    if (blocks < WITHOUT_LOCK_BLOCKS)
        failed = kv_hash_chain(way, parent, tokens->buf, blocks, block_tokens, hashes);
    else {
        Py_BEGIN_ALLOW_THREADS
        failed = kv_hash_chain(way, parent, tokens->buf, blocks, block_tokens, hashes);
        Py_END_ALLOW_THREADS
    }
    PyObject *list = failed ? PyErr_NoMemory() : PyList_New(blocks);
    for (Py_ssize_t i = 0; list && i < blocks; i++) {
        PyObject *hash = PyBytes_FromStringAndSize((const char *)hashes + i * KV_HASH_BYTES, KV_HASH_BYTES);
        if (!hash || PyList_SetItem(list, i, hash)) Py_CLEAR(list);
    }
    if (hashes != on_stack) free(hashes);
    return list;
}

static PyObject *hash_chain(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    (void)self;
    if (count < 3 || count > 4) {
        PyErr_SetString(PyExc_TypeError, "expected hash_chain(parent, tokens, block_tokens[, way])");
        return NULL;
    }
    const kv_sha_way *way = count == 4 ? way_named(arguments[3]) : kv_sha_best();
    if (!way) return NULL;
    char *parent;
    Py_ssize_t parent_bytes;
    if (PyBytes_AsStringAndSize(arguments[0], &parent, &parent_bytes)) return NULL;
    const Py_ssize_t block_tokens = PyLong_AsSsize_t(arguments[2]);
    if (block_tokens == -1 && PyErr_Occurred()) return NULL;
    Py_buffer tokens;
    if (PyObject_GetBuffer(arguments[1], &tokens, PyBUF_SIMPLE)) return NULL;
    PyObject *list = NULL;
    if (parent_bytes != KV_HASH_BYTES)
        PyErr_Format(PyExc_ValueError, "parent: got %zd bytes, expected %d", parent_bytes, KV_HASH_BYTES);
    else if (block_tokens < 1 || block_tokens > PY_SSIZE_T_MAX / 8 || (uint64_t)block_tokens > UINT32_MAX)
        PyErr_Format(PyExc_ValueError, "block_tokens: got %zd, expected 1..2**32-1", block_tokens);
    else if (tokens.itemsize != 4 || tokens.len % (4 * block_tokens) || (tokens.len && (uintptr_t)tokens.buf % 4))
        PyErr_Format(PyExc_ValueError, "tokens: got %zd bytes in items of %zd, expected uint32 in blocks of %zd",
                     tokens.len, tokens.itemsize, block_tokens);
    else
        list = hashes_of(way, (const uint8_t *)parent, &tokens, tokens.len / (4 * block_tokens), block_tokens);
    PyBuffer_Release(&tokens);
    return list;
}

/* One token id of exact type int (no bool, no numpy integer), or -1. */
static int64_t exact_token(PyObject *value) {
    if (!Py_IS_TYPE(value, &PyLong_Type)) return -1;
    const unsigned long token = PyLong_AsUnsignedLong(value);
    if (token <= UINT32_MAX) return (int64_t)token;
    PyErr_Clear(); /* an error, if there is one, comes with the largest value */
    return -1;
}

static PyObject *token_bytes(PyObject *self, PyObject *ids) {
    (void)self;
    const int is_list = PyList_CheckExact(ids);
    if (!is_list && !PyTuple_CheckExact(ids)) Py_RETURN_NONE;
    const Py_ssize_t count = is_list ? PyList_Size(ids) : PyTuple_Size(ids);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, count * 4);
    if (!bytes) return NULL;
    uint32_t *out = (uint32_t *)(void *)PyBytes_AsString(bytes);
    for (Py_ssize_t i = 0; i < count; i++) {
        /* Nothing here runs Python code, so the list keeps its length. */
        const int64_t token = exact_token(is_list ? PyList_GetItem(ids, i) : PyTuple_GetItem(ids, i));
        if (token < 0) {
            Py_DECREF(bytes);
            Py_RETURN_NONE;
        }
        out[i] = (uint32_t)token;
    }
    return bytes;
}

PyMethodDef kv_hash_methods[] = {
    {"sha_ways", sha_ways, METH_NOARGS, "[(name, whether this CPU can run it)] to compute SHA-256, best first"},
    {"sha_best", sha_best, METH_NOARGS, "name of the way in use"},
    {"hash_chain", (PyCFunction)(void (*)(void))hash_chain, METH_FASTCALL,
     "(parent bytes[32], tokens buffer uint32[blocks * block_tokens], block_tokens[, way]) -> list of bytes[32]"},
    {"token_bytes", token_bytes, METH_O,
     "uint32 of each id in a list or tuple, as bytes; None unless all are of exact type int and in [0, 2**32)"},
    {NULL, NULL, 0, NULL},
};
