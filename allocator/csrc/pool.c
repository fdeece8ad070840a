/* allocator._pool: the inner loops of small allocations and releases, for allocator.block_references alone.
 *
 * Each function does what a loop there does in plain Python, which is the reference, over the same memory: life words
 * (int32), classes (int16) and the stack of free ids (intp) come as buffers. Python's lock is held throughout, and the
 * pool's caller holds the pool's. Every id is checked against its buffer before it is used, so that a broken invariant
 * raises and never writes elsewhere. Limited API: one build serves every Python from 3.11 on.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* Raised whenever a signature below changes; allocator/pool_core.py has the same one. */
#ifndef KV_POOL_ABI /* a test builds one with a wrong number */
#define KV_POOL_ABI 1
#endif

/* Life words, as allocator/block_state.py composes them; compared when the module is loaded. */
enum { FREE = 0, IDLE = 4, OPEN_ONCE = 2 | 64, SEALED_ONCE = 3 | 64 };
enum { BATCH_MAX = 64 }; /* more than block_life.SMALL_BATCH; ids of a release lie on the stack */

static int has_arguments(Py_ssize_t count, Py_ssize_t expected) {
    if (count == expected) return 1;
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count);
    return 0;
}

/* A contiguous buffer of elements of one size. 0, or -1 with an exception. */
static int open_buffer(PyObject *object, Py_ssize_t itemsize, int flags, Py_buffer *buffer) {
    if (PyObject_GetBuffer(object, buffer, flags)) return -1;
    if (buffer->itemsize == itemsize) return 0;
    PyErr_Format(PyExc_TypeError, "expected elements of %zd bytes, got %zd", itemsize, buffer->itemsize);
    PyBuffer_Release(buffer);
    return -1;
}

static Py_ssize_t length(const Py_buffer *buffer) { return buffer->len / buffer->itemsize; }

static int is_inside(Py_ssize_t block_id, const Py_buffer *buffer) {
    return block_id >= 0 && block_id < length(buffer);
}

static int refuse_block(Py_ssize_t block_id) {
    PyErr_Format(PyExc_IndexError, "block %zd does not exist", block_id);
    return -1;
}

static int take_from(const Py_buffer *words, const Py_buffer *stack, Py_ssize_t start, Py_ssize_t count,
                     const Py_buffer *ids) {
    if (start < 0 || count < 0 || count > length(ids) || start > length(stack) - count) {
        PyErr_SetString(PyExc_IndexError, "expected a stack and a result that hold the ids to take");
        return -1;
    }
    const Py_ssize_t *source = (const Py_ssize_t *)stack->buf + start;
    for (Py_ssize_t i = 0; i < count; i++) /* all of them first, so that a refusal has changed nothing */
        if (!is_inside(source[i], words)) return refuse_block(source[i]);
    for (Py_ssize_t i = 0; i < count; i++) {
        ((int32_t *)words->buf)[source[i]] = OPEN_ONCE;
        ((int32_t *)ids->buf)[i] = (int32_t)source[i];
    }
    return 0;
}

static PyObject *take(PyObject *self, PyObject *const *arguments, Py_ssize_t argument_count) {
    (void)self;
    Py_buffer words, stack, ids;
    int status = -1;
    if (!has_arguments(argument_count, 5)) return NULL;
    Py_ssize_t start = PyLong_AsSsize_t(arguments[2]), count = PyLong_AsSsize_t(arguments[3]);
    if (PyErr_Occurred()) return NULL;
    if (open_buffer(arguments[0], sizeof(int32_t), PyBUF_WRITABLE, &words)) return NULL;
    if (!open_buffer(arguments[1], sizeof(Py_ssize_t), PyBUF_SIMPLE, &stack)) {
        if (!open_buffer(arguments[4], sizeof(int32_t), PyBUF_WRITABLE, &ids)) {
            status = take_from(&words, &stack, start, count, &ids);
            PyBuffer_Release(&ids);
        }
        PyBuffer_Release(&stack);
    }
    PyBuffer_Release(&words);
    return status ? NULL : Py_NewRef(Py_None);
}

static int evict_each(const Py_buffer *words, PyObject *victims, PyObject *names, PyObject *hashes,
                      const Py_buffer *ids) {
    Py_ssize_t count = PyList_Size(victims);
    if (count < 0 || !PyList_Check(hashes) || !PyDict_CheckExact(names) || count > length(ids)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "expected (buffer, list, dict, list, large buffer)");
        return -1;
    }
    int32_t *result = (int32_t *)ids->buf + length(ids) - count;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *victim = PyList_GetItem(victims, i); /* borrowed; checked, since a hash may run Python code */
        Py_ssize_t block_id = victim ? PyLong_AsSsize_t(victim) : -1;
        if (block_id == -1 && PyErr_Occurred()) return -1;
        if (!is_inside(block_id, words)) return refuse_block(block_id);
        PyObject *hash = PyList_GetItem(hashes, block_id);
        if (!hash) return -1;
        Py_INCREF(hash);
        int is_missing = PyDict_DelItem(names, hash);
        Py_DECREF(hash);
        if (is_missing) return -1;
        ((int32_t *)words->buf)[block_id] = OPEN_ONCE;
        result[i] = (int32_t)block_id;
    }
    return 0;
}

static PyObject *evict(PyObject *self, PyObject *const *arguments, Py_ssize_t argument_count) {
    (void)self;
    Py_buffer words, ids;
    int status = -1;
    if (!has_arguments(argument_count, 5)) return NULL;
    if (open_buffer(arguments[0], sizeof(int32_t), PyBUF_WRITABLE, &words)) return NULL;
    if (!open_buffer(arguments[4], sizeof(int32_t), PyBUF_WRITABLE, &ids)) {
        status = evict_each(&words, arguments[1], arguments[2], arguments[3], &ids);
        PyBuffer_Release(&ids);
    }
    PyBuffer_Release(&words);
    return status ? NULL : Py_NewRef(Py_None);
}

/* The ids of a list of ints or of a flat int32 buffer, however strided. How many, or -1 without an exception: anything
 * else, which plain Python has to look at. */
static Py_ssize_t read_batch(PyObject *batch, Py_ssize_t *ids) {
    if (PyList_Check(batch)) {
        Py_ssize_t count = PyList_Size(batch);
        if (count > BATCH_MAX) return -1;
        for (Py_ssize_t i = 0; i < count; i++) {
            PyObject *item = PyList_GetItem(batch, i);
            if (!item || !PyLong_CheckExact(item)) return PyErr_Clear(), -1;
            ids[i] = PyLong_AsSsize_t(item);
            if (ids[i] == -1 && PyErr_Occurred()) return PyErr_Clear(), -1;
        }
        return count;
    }
    Py_buffer buffer;
    if (!PyObject_CheckBuffer(batch)) return -1;
    if (PyObject_GetBuffer(batch, &buffer, PyBUF_STRIDES | PyBUF_FORMAT)) return PyErr_Clear(), -1;
    Py_ssize_t count = -1;
    if (buffer.ndim == 1 && buffer.itemsize == sizeof(int32_t) && buffer.format && !strcmp(buffer.format, "i") &&
        buffer.shape[0] <= BATCH_MAX) {
        count = buffer.shape[0];
        for (Py_ssize_t i = 0; i < count; i++) {
            int32_t block_id; /* copied, since a buffer may be unaligned */
            memcpy(&block_id, (const char *)buffer.buf + i * buffer.strides[0], sizeof block_id);
            ids[i] = block_id;
        }
    }
    PyBuffer_Release(&buffer);
    return count;
}

/* Words change while the batch is read, so that a block given twice is found by its second word. How many ids were
 * dealt with: all, or those before the first that is anything but plain. */
static Py_ssize_t drop_plain(const Py_buffer *words, const Py_buffer *classes, Py_ssize_t class_index,
                             const Py_buffer *stack, Py_ssize_t top, const Py_ssize_t *ids, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t block_id = ids[i];
        if (!is_inside(block_id, words)) return i;
        if (classes && (!is_inside(block_id, classes) || ((int16_t *)classes->buf)[block_id] != class_index)) return i;
        int32_t *word = (int32_t *)words->buf + block_id;
        if (*word == SEALED_ONCE) {
            *word = IDLE;
        } else if (*word == OPEN_ONCE && is_inside(top, stack)) {
            *word = FREE;
            ((Py_ssize_t *)stack->buf)[top++] = block_id;
        } else {
            return i;
        }
    }
    return count;
}

/* List of those that are IDLE now, in order. */
static PyObject *idle_of(const Py_buffer *words, const Py_ssize_t *ids, Py_ssize_t count) {
    Py_ssize_t idle_count = 0, place = 0;
    for (Py_ssize_t i = 0; i < count; i++) idle_count += ((int32_t *)words->buf)[ids[i]] == IDLE;
    PyObject *idle = PyList_New(idle_count);
    for (Py_ssize_t i = 0; idle && i < count; i++) {
        if (((int32_t *)words->buf)[ids[i]] != IDLE) continue;
        PyObject *block_id = PyLong_FromSsize_t(ids[i]);
        if (!block_id || PyList_SetItem(idle, place++, block_id)) Py_CLEAR(idle);
    }
    return idle;
}

static PyObject *release_from(const Py_buffer *words, const Py_buffer *classes, Py_ssize_t class_index,
                              const Py_buffer *stack, Py_ssize_t top, PyObject *batch) {
    Py_ssize_t ids[BATCH_MAX];
    Py_ssize_t count = read_batch(batch, ids);
    if (count < 0) return Py_NewRef(Py_None);
    Py_ssize_t done = drop_plain(words, classes, class_index, stack, top, ids, count);
    PyObject *result = done == count ? idle_of(words, ids, count) : Py_NewRef(Py_None);
    if (done == count && result) return result;
    for (Py_ssize_t i = 0; i < done; i++) {
        int32_t *word = (int32_t *)words->buf + ids[i];
        *word = *word == IDLE ? SEALED_ONCE : OPEN_ONCE;
    }
    return result;
}

static PyObject *release(PyObject *self, PyObject *const *arguments, Py_ssize_t argument_count) {
    (void)self;
    Py_buffer words, classes, stack;
    PyObject *result = NULL;
    if (!has_arguments(argument_count, 6)) return NULL;
    Py_ssize_t class_index = PyLong_AsSsize_t(arguments[2]), top = PyLong_AsSsize_t(arguments[4]);
    if (PyErr_Occurred()) return NULL;
    int has_classes = arguments[1] != Py_None;
    if (open_buffer(arguments[0], sizeof(int32_t), PyBUF_WRITABLE, &words)) return NULL;
    if (!has_classes || !open_buffer(arguments[1], sizeof(int16_t), PyBUF_SIMPLE, &classes)) {
        if (!open_buffer(arguments[3], sizeof(Py_ssize_t), PyBUF_WRITABLE, &stack)) {
            result = release_from(&words, has_classes ? &classes : NULL, class_index, &stack, top, arguments[5]);
            PyBuffer_Release(&stack);
        }
        if (has_classes) PyBuffer_Release(&classes);
    }
    PyBuffer_Release(&words);
    return result;
}

#define METHOD(name, doc) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, doc}

static PyMethodDef methods[] = {
    METHOD(take, "take(words, stack, start, count, ids): stack[start:start + count] go to ids and are open"),
    METHOD(evict, "evict(words, victims, names, hashes, ids): victims lose their names, end ids and are open"),
    METHOD(release, "release(words, classes or None, class, stack, top, batch): the idle ones; None when not plain"),
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module) {
    const struct { const char *name; long value; } constants[] = {
        {"ABI", KV_POOL_ABI}, {"FREE", FREE}, {"IDLE", IDLE}, {"OPEN_ONCE", OPEN_ONCE}, {"SEALED_ONCE", SEALED_ONCE},
        {"BATCH_MAX", BATCH_MAX},
    };
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value)) return -1;
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "allocator._pool", .m_doc = "Small batches: see allocator.pool_core",
    .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC PyInit__pool(void) { return PyModuleDef_Init(&definition); }
