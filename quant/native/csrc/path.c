/* One path: compiled once per instruction set, with KV_PATH its name and the compiler told what it may use. */
#ifndef KV_PATH
#error "KV_PATH must name the path (baseline, avx2, avx512, avx512bf16, amx)"
#endif
#include "attention.h"
#include "checksum.h"
#include "codec.h"
#include "kernels.h"
#include "pages.h"

#include "codec.inc"
#include "attention.inc"
#include "pages.inc"
#include "checksum.inc"

extern const kv_path KV_NAME(kv_path);
const kv_path KV_NAME(kv_path) = {
    .name = KV_STR(KV_PATH),
    .codec = &KV_NAME(codec),
    .attention = &KV_NAME(attention),
    .pages = &KV_NAME(pages),
    .checksum = &KV_NAME(checksum),
};
