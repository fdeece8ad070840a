/* Python bindings of the hash functions. */
#include "bind.h"
#include "kernels.h"

PyMethodDef kv_hash_methods[] = {
    {NULL, NULL, 0, NULL},
};
