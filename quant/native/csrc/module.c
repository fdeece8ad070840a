/* The Python module: limited API, so one build serves every Python from 3.11 on.
 *
 * Each area binds its own functions in bind_AREA.c and exports them as a table. Addresses travel as ints: callers
 * in quant.native have checked devices, dtypes, strides and ranges. */
#include "bind.h"
#include "kernels.h"

#include <string.h>

static PyObject *paths(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    PyObject *list = PyList_New(0);
    for (const kv_path *const *path = kv_paths; list && *path; path++) {
        PyObject *pair = Py_BuildValue("(sO)", (*path)->name, kv_path_runs_here(*path) ? Py_True : Py_False);
        if (!pair || PyList_Append(list, pair)) Py_CLEAR(list);
        Py_XDECREF(pair);
    }
    return list;
}

static PyObject *active(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    return PyUnicode_FromString(kv_active()->name);
}

static PyObject *activate(PyObject *self, PyObject *argument) {
    (void)self;
    const char *name = PyUnicode_AsUTF8AndSize(argument, NULL);
    if (!name) return NULL;
    if (kv_activate(name)) {
        PyErr_Format(PyExc_ValueError, "kernel path %R is not compiled in or this CPU cannot run it", argument);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *cpu(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    return PyLong_FromUnsignedLong(kv_cpu());
}

static PyMethodDef own_methods[] = {
    {"paths", paths, METH_NOARGS, "[(name, whether this CPU can run it)], best first"},
    {"active", active, METH_NOARGS, "name of the path in use"},
    {"activate", activate, METH_O, "use the named path; ValueError when it cannot run here"},
    {"cpu", cpu, METH_NOARGS, "feature bits of this CPU, as kernels.h numbers them"},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module) {
    PyMethodDef *const areas[] = {own_methods, kv_codec_methods, kv_attention_methods, kv_page_methods,
                                  kv_hash_methods, kv_checksum_methods, kv_summed_methods, kv_thread_methods};
    for (size_t i = 0; i < sizeof areas / sizeof *areas; i++)
        if (PyModule_AddFunctions(module, areas[i])) return -1;
    return PyModule_AddIntConstant(module, "ABI", KV_ABI);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "quant.native._kernels",
    .m_doc = "C kernels: see quant.native",
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&definition); }
