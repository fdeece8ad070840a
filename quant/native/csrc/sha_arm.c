/* SHA-256 with the SHA instructions of 64-bit Arm. Called only where the CPU has them. */
#include "hash.h"

#ifdef KV_HAVE_SHA_ARM
#include <arm_neon.h>

#ifdef __ARM_FEATURE_SHA2
#define WITH_SHA
#else
#define WITH_SHA __attribute__((target("+crypto")))
#endif

WITH_SHA void kv_sha_arm(uint32_t state[8], const uint8_t *bytes, size_t count) {
    uint32x4_t abcd = vld1q_u32(state), efgh = vld1q_u32(state + 4);
    for (; count; count--, bytes += KV_SHA_BLOCK_BYTES) {
        const uint32x4_t abcd_before = abcd, efgh_before = efgh;
        uint32x4_t w[4];
        for (int i = 0; i < 4; i++) w[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(bytes + 16 * i)));
#pragma GCC unroll 16
        for (int group = 0; group < 16; group++) {
            const uint32x4_t sum = vaddq_u32(w[0], vld1q_u32(kv_sha_constants + 4 * group));
            const uint32x4_t abcd_then = abcd;
            abcd = vsha256hq_u32(abcd, efgh, sum);
            efgh = vsha256h2q_u32(efgh, abcd_then, sum);
            /* The last twelve words that this makes are never used. */
            const uint32x4_t next = vsha256su1q_u32(vsha256su0q_u32(w[0], w[1]), w[2], w[3]);
            w[0] = w[1], w[1] = w[2], w[2] = w[3], w[3] = next;
        }
        abcd = vaddq_u32(abcd, abcd_before);
        efgh = vaddq_u32(efgh, efgh_before);
    }
    vst1q_u32(state, abcd);
    vst1q_u32(state + 4, efgh);
}
#endif
