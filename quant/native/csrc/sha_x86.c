/* SHA-256 with the SHA extensions of x86. Compiled with them; called only where the CPU has them. */
#include "hash.h"

#include <immintrin.h>

/* Four rounds need two instructions, each of which takes two words and their constants. The instructions want the
 * state as (a, b, e, f) and (c, d, g, h). */
typedef struct {
    __m128i abef, cdgh;
} halves;

static inline halves four_rounds(halves s, __m128i words, int group) {
    const __m128i sum = _mm_add_epi32(words, _mm_loadu_si128((const __m128i *)(kv_sha_constants + 4 * group)));
    s.cdgh = _mm_sha256rnds2_epu32(s.cdgh, s.abef, sum);
    s.abef = _mm_sha256rnds2_epu32(s.abef, s.cdgh, _mm_shuffle_epi32(sum, 0x0e));
    return s;
}

/* The next four words of the schedule from the sixteen before them. */
static inline __m128i next_words(__m128i w0, __m128i w1, __m128i w2, __m128i w3) {
    const __m128i middle = _mm_add_epi32(_mm_sha256msg1_epu32(w0, w1), _mm_alignr_epi8(w3, w2, 4));
    return _mm_sha256msg2_epu32(middle, w3);
}

void kv_sha_x86(uint32_t state[8], const uint8_t *bytes, size_t count) {
    const __m128i to_big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    const __m128i dcba = _mm_loadu_si128((const __m128i *)state), hgfe = _mm_loadu_si128((const __m128i *)(state + 4));
    const __m128i cdab = _mm_shuffle_epi32(dcba, 0xb1), efgh = _mm_shuffle_epi32(hgfe, 0x1b);
    halves s = {_mm_alignr_epi8(cdab, efgh, 8), _mm_blend_epi16(efgh, cdab, 0xf0)};
    for (; count; count--, bytes += KV_SHA_BLOCK_BYTES) {
        const halves before = s;
        __m128i w[4];
        for (int i = 0; i < 4; i++) {
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)bytes + i), to_big_endian);
            s = four_rounds(s, w[i], i);
        }
#pragma GCC unroll 12
        for (int group = 4; group < 16; group++) {
            const __m128i words = next_words(w[0], w[1], w[2], w[3]);
            w[0] = w[1], w[1] = w[2], w[2] = w[3], w[3] = words;
            s = four_rounds(s, words, group);
        }
        s.abef = _mm_add_epi32(s.abef, before.abef);
        s.cdgh = _mm_add_epi32(s.cdgh, before.cdgh);
    }
    const __m128i feba = _mm_shuffle_epi32(s.abef, 0x1b), dchg = _mm_shuffle_epi32(s.cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}
