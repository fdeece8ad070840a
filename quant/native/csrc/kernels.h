/* What every part of the native library shares: paths, threads, errors.
 *
 * A *path* is one set of kernels compiled for one set of instructions. path.c is compiled once per path with KV_PATH
 * naming it; the dispatcher picks a path once, by what the CPU has, and everything goes through its tables. The
 * tables of an area (codec, attention, pages) are declared in that area's header.
 *
 * Kernels take raw addresses whose ranges the caller has checked, never touch Python, and run without its lock.
 */
#ifndef KV_KERNELS_H
#define KV_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Raised whenever a signature or a layout that Python relies on changes; quant/native/__init__.py has the same one. */
#ifndef KV_ABI /* a test builds one with a wrong number */
#define KV_ABI 3
#endif

#define KV_CAT_(a, b) a##b
#define KV_CAT(a, b) KV_CAT_(a, b)
#define KV_STR_(a) #a
#define KV_STR(a) KV_STR_(a)
/* A name of its own for every path: KV_NAME(encode) is encode_avx2, encode_avx512, ... */
#define KV_NAME(name) KV_CAT(KV_CAT(name, _), KV_PATH)

typedef struct kv_codec_ops kv_codec_ops;
typedef struct kv_attention_ops kv_attention_ops;
typedef struct kv_page_ops kv_page_ops;
typedef struct kv_checksum_ops kv_checksum_ops;

typedef struct {
    const char *name;
    const kv_codec_ops *codec;
    const kv_attention_ops *attention;
    const kv_page_ops *pages;
    const kv_checksum_ops *checksum;
} kv_path;

/* cpu.c: what this CPU and this system allow. */
typedef enum {
    KV_CPU_AVX2 = 1 << 0,       /* AVX2, FMA, F16C, BMI2 */
    KV_CPU_AVX512 = 1 << 1,     /* F, BW, DQ, VL, VNNI */
    KV_CPU_AVX512BF16 = 1 << 2, /* the same and BF16 */
    KV_CPU_AMX = 1 << 3,        /* tiles, int8; granted by the system */
    KV_CPU_SHA = 1 << 4,        /* SHA extensions */
} kv_cpu_features;
uint32_t kv_cpu(void);

/* dispatch.c */
/* Best first; ends with NULL. Holds the paths that were compiled in, whether or not this CPU can run them. */
extern const kv_path *const kv_paths[];
int kv_path_runs_here(const kv_path *path);
/* The path in use. Never NULL after import: the baseline runs everywhere. */
const kv_path *kv_active(void);
/* 0, or -1 when no compiled path has the name or this CPU cannot run it. */
int kv_activate(const char *name);

/* threads.c: a small pool. The calling thread works too; `threads` is how many work in all. */
typedef void (*kv_task)(void *context, int64_t task);
/* Runs task(context, i) for i in [0, tasks), each once, and returns when all are done. Tasks are taken in order by
 * whoever is free. One job at a time: a second caller, and a task that calls this, runs its own job alone. Tasks run
 * with the default floating-point state (nothing flushed to zero), which the caller's thread has back afterwards. */
void kv_parallel_for(int64_t tasks, kv_task task, void *context, int threads);

#endif
