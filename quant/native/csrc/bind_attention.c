/* Python bindings of the attention functions. */
#include "bind.h"
#include "kernels.h"

PyMethodDef kv_attention_methods[] = {
    {NULL, NULL, 0, NULL},
};
