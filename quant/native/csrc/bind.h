/* Python bindings, an area each. The only files that see Python. */
#ifndef KV_BIND_H
#define KV_BIND_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

extern PyMethodDef kv_codec_methods[];
extern PyMethodDef kv_attention_methods[];
extern PyMethodDef kv_page_methods[];
extern PyMethodDef kv_hash_methods[];
extern PyMethodDef kv_checksum_methods[];
extern PyMethodDef kv_summed_methods[];
extern PyMethodDef kv_thread_methods[];

#endif
