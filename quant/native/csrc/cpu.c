/* What this CPU has and what the system lets a process use. Read once. */
#include <pthread.h>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define XCR0_AVX 0x6u
#define XCR0_AVX512 0xe6u
#define XCR0_TILES 0x60000u
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

static uint64_t enabled_states(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static uint32_t detect(void) {
    uint32_t a, b, c, d, found = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    const int os_saves = (c >> 27) & 1, fma = (c >> 12) & 1, f16c = (c >> 29) & 1;
    const int ssse3 = (c >> 9) & 1, sse41 = (c >> 19) & 1;
    uint32_t b7 = 0, c7 = 0, d7 = 0, a71 = 0;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return 0;
    if (a >= 1) {
        uint32_t unused_b, unused_c, unused_d;
        __get_cpuid_count(7, 1, &a71, &unused_b, &unused_c, &unused_d);
    }
    if (((b7 >> 29) & 1) && ssse3 && sse41) found |= KV_CPU_SHA;
    if (!os_saves) return found;
    const uint64_t states = enabled_states();
    if ((states & XCR0_AVX) != XCR0_AVX) return found;
    const int avx2 = (b7 >> 5) & 1, bmi2 = (b7 >> 8) & 1;
    if (!(avx2 && bmi2 && fma && f16c)) return found; /* the wider paths are compiled with these too */
    found |= KV_CPU_AVX2;
    const int f = (b7 >> 16) & 1, dq = (b7 >> 17) & 1, bw = (b7 >> 30) & 1, vl = (b7 >> 31) & 1, vnni = (c7 >> 11) & 1;
    if ((states & XCR0_AVX512) != XCR0_AVX512 || !(f && dq && bw && vl && vnni)) return found;
    found |= KV_CPU_AVX512;
    if (!((a71 >> 5) & 1)) return found;
    found |= KV_CPU_AVX512BF16;
    const int tiles = (d7 >> 24) & 1, int8 = (d7 >> 25) & 1;
    /* Tile registers are large: a process must ask for them, and may be refused. */
    if (tiles && int8 && (states & XCR0_TILES) == XCR0_TILES &&
        syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)
        found |= KV_CPU_AMX;
    return found;
}
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

#define HAS_SHA2 (1ul << 6) /* HWCAP_SHA2 */

static uint32_t detect(void) { return getauxval(AT_HWCAP) & HAS_SHA2 ? KV_CPU_SHA : 0; }
#else
static uint32_t detect(void) { return 0; }
#endif

static uint32_t known;

static void ask(void) { known = detect(); }

uint32_t kv_cpu(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, ask);
    return known;
}
