/* Copies of many pieces at once. */
#ifndef KV_PAGES_H
#define KV_PAGES_H
#include "kernels.h"

struct kv_page_ops {
    int reserved;
};

#endif
