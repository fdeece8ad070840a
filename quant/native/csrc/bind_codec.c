/* Python bindings of the codec functions. */
#include "bind.h"
#include "kernels.h"

PyMethodDef kv_codec_methods[] = {
    {NULL, NULL, 0, NULL},
};
