/* INT4 codec entry points of a path. */
#ifndef KV_CODEC_H
#define KV_CODEC_H
#include "kernels.h"

struct kv_codec_ops {
    int reserved;
};

#endif
