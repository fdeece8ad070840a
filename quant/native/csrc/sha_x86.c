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

static inline __m128i big_endian(__m128i bytes) {
    return _mm_shuffle_epi8(bytes, _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203));
}

static inline halves halves_of(const uint32_t state[8]) {
    const __m128i dcba = _mm_loadu_si128((const __m128i *)state), hgfe = _mm_loadu_si128((const __m128i *)(state + 4));
    const __m128i cdab = _mm_shuffle_epi32(dcba, 0xb1), efgh = _mm_shuffle_epi32(hgfe, 0x1b);
    return (halves){_mm_alignr_epi8(cdab, efgh, 8), _mm_blend_epi16(efgh, cdab, 0xf0)};
}

/* The eight words in order. */
static inline void words_of(halves s, __m128i *first, __m128i *second) {
    const __m128i feba = _mm_shuffle_epi32(s.abef, 0x1b), dchg = _mm_shuffle_epi32(s.cdgh, 0xb1);
    *first = _mm_blend_epi16(feba, dchg, 0xf0);
    *second = _mm_alignr_epi8(dchg, feba, 8);
}

static inline halves sum_of(halves a, halves b) {
    return (halves){_mm_add_epi32(a.abef, b.abef), _mm_add_epi32(a.cdgh, b.cdgh)};
}

/* All rounds of one run, of which the sixteen words are given. */
static inline halves compressed(halves before, __m128i w0, __m128i w1, __m128i w2, __m128i w3) {
    __m128i w[4] = {w0, w1, w2, w3};
    halves s = before;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) s = four_rounds(s, w[i], i);
#pragma GCC unroll 12
    for (int group = 4; group < 16; group++) {
        const __m128i words = next_words(w[0], w[1], w[2], w[3]);
        w[0] = w[1], w[1] = w[2], w[2] = w[3], w[3] = words;
        s = four_rounds(s, words, group);
    }
    return sum_of(s, before);
}

static inline __m128i loaded(const uint8_t *run, int i) {
    return big_endian(_mm_loadu_si128((const __m128i *)run + i));
}

void kv_sha_x86(uint32_t state[8], const uint8_t *bytes, size_t count) {
    halves s = halves_of(state);
    __m128i first, second;
    for (; count; count--, bytes += KV_SHA_BLOCK_BYTES)
        s = compressed(s, loaded(bytes, 0), loaded(bytes, 1), loaded(bytes, 2), loaded(bytes, 3));
    words_of(s, &first, &second);
    _mm_storeu_si128((__m128i *)state, first);
    _mm_storeu_si128((__m128i *)(state + 4), second);
}

/* ---- chains
 *
 * What is slow is the row of rounds, each of which needs the one before. So nothing else stands in that row: a hash goes
 * into the next message without a way through memory, and the schedule of the runs behind the first, in which no hash
 * stands, is there before their rounds begin. */

typedef struct {
    __m128i sums[16]; /* words of the schedule and their constants */
} schedule;

static inline schedule schedule_of(const uint8_t *run) {
    __m128i w[4];
    schedule made;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        w[i] = loaded(run, i);
        made.sums[i] = _mm_add_epi32(w[i], _mm_loadu_si128((const __m128i *)kv_sha_constants + i));
    }
#pragma GCC unroll 12
    for (int group = 4; group < 16; group++) {
        const __m128i words = next_words(w[0], w[1], w[2], w[3]);
        w[0] = w[1], w[1] = w[2], w[2] = w[3], w[3] = words;
        made.sums[group] = _mm_add_epi32(words, _mm_loadu_si128((const __m128i *)kv_sha_constants + group));
    }
    return made;
}

static inline halves scheduled(halves before, const schedule *made) {
    halves s = before;
#pragma GCC unroll 16
    for (int group = 0; group < 16; group++) {
        const __m128i sum = made->sums[group];
        s.cdgh = _mm_sha256rnds2_epu32(s.cdgh, s.abef, sum);
        s.abef = _mm_sha256rnds2_epu32(s.abef, s.cdgh, _mm_shuffle_epi32(sum, 0x0e));
    }
    return sum_of(s, before);
}

/* Four words of a message in which the words of a hash stand one byte late: `before` has the four before them. */
static inline __m128i one_byte_late(__m128i before, __m128i words) {
    return _mm_or_si128(_mm_srli_epi32(words, 8), _mm_slli_epi32(_mm_alignr_epi8(words, before, 12), 24));
}

void kv_sha_x86_chain(const uint8_t parent[KV_HASH_BYTES], const uint8_t *messages, size_t runs, size_t count,
                      uint8_t *out) {
    const halves start = halves_of(kv_sha_initial);
    const __m128i no_hash = _mm_set_epi32(-1, -1, -1, 0x00ffffff); /* of the words that the hash ends in */
    __m128i first = loaded(parent, 0), second = loaded(parent, 1);
    for (; count; count--, messages += runs * KV_SHA_BLOCK_BYTES, out += KV_HASH_BYTES) {
        schedule made;
        if (runs > 1) made = schedule_of(messages + KV_SHA_BLOCK_BYTES);
        const __m128i tag = _mm_set_epi32(messages[0], 0, 0, 0);
        const __m128i last = _mm_slli_epi32(_mm_srli_si128(second, 12), 24);
        halves s = compressed(start, one_byte_late(tag, first), one_byte_late(first, second),
                              _mm_or_si128(_mm_and_si128(loaded(messages, 2), no_hash), last), loaded(messages, 3));
        for (size_t run = 1; run < runs; run++) {
            if (run > 1) made = schedule_of(messages + run * KV_SHA_BLOCK_BYTES);
            s = scheduled(s, &made);
        }
        words_of(s, &first, &second);
        _mm_storeu_si128((__m128i *)out, big_endian(first));
        _mm_storeu_si128((__m128i *)out + 1, big_endian(second));
    }
}
