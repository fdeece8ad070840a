/* Python bindings of the page functions. */
#include "bind.h"
#include "kernels.h"

PyMethodDef kv_page_methods[] = {
    {NULL, NULL, 0, NULL},
};
