/* Which path runs. Chosen at import; changed only by tests and by the user's setting. */
#include <stdatomic.h>
#include <string.h>

#include "kernels.h"

extern const kv_path kv_path_baseline;
#ifdef KV_HAVE_avx2
extern const kv_path kv_path_avx2;
#endif
#ifdef KV_HAVE_avx512
extern const kv_path kv_path_avx512;
#endif
#ifdef KV_HAVE_avx512bf16
extern const kv_path kv_path_avx512bf16;
#endif
#ifdef KV_HAVE_amx
extern const kv_path kv_path_amx;
#endif

const kv_path *const kv_paths[] = {
#ifdef KV_HAVE_amx
    &kv_path_amx,
#endif
#ifdef KV_HAVE_avx512bf16
    &kv_path_avx512bf16,
#endif
#ifdef KV_HAVE_avx512
    &kv_path_avx512,
#endif
#ifdef KV_HAVE_avx2
    &kv_path_avx2,
#endif
    &kv_path_baseline,
    NULL,
};

static const struct {
    const char *name;
    uint32_t needs;
} needs[] = {
    {"amx", KV_CPU_AMX | KV_CPU_AVX512BF16}, {"avx512bf16", KV_CPU_AVX512BF16}, {"avx512", KV_CPU_AVX512},
    {"avx2", KV_CPU_AVX2},                   {"baseline", 0},
};

int kv_path_runs_here(const kv_path *path) {
    for (size_t i = 0; i < sizeof needs / sizeof *needs; i++)
        if (!strcmp(needs[i].name, path->name)) return (kv_cpu() & needs[i].needs) == needs[i].needs;
    return 0;
}

/* A kernel that runs while a test changes it goes on with the tables it began with. */
static const kv_path *_Atomic active = &kv_path_baseline;

const kv_path *kv_active(void) { return atomic_load_explicit(&active, memory_order_acquire); }

int kv_activate(const char *name) {
    for (const kv_path *const *path = kv_paths; *path; path++)
        if (!strcmp((*path)->name, name) && kv_path_runs_here(*path)) {
            atomic_store_explicit(&active, *path, memory_order_release);
            return 0;
        }
    return -1;
}
