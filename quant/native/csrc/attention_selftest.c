/* Does the active path attend as plain arithmetic does? Asked before a path is used on a machine for the first time.
 *
 * A small cache is made here, full and INT4 blocks with arbitrary codes, and attended twice: through the driver and the
 * path's kernels, and one token at a time in double. Some microseconds a case. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codec.h"
#include "paged.h"

#define BLOCKS 5
#define COLD_BLOCKS 2 /* the first ones */
#define HEADS 2
#define SLOT_BYTES 65536
#define TOKENS 72 /* positions 0..71: the last block is open, and NaN behind it */
#define TOLERANCE 2e-3

typedef struct {
    int dim, value_dim; /* of K, and of the output; latent: V is K's first channels */
    int latent, group, tokens;
    int64_t window;
    kv_dtype dtype;
    double softcap;
} kv_case;

static const kv_case cases[] = {
    {64, 64, 0, 4, 1, 0, KV_BF16, 0},  {64, 64, 0, 3, 5, 24, KV_F32, 0}, {40, 40, 0, 1, 1, 0, KV_F16, 3},
    {128, 128, 0, 4, 1, 0, KV_F32, 0}, {96, 64, 1, 16, 1, 0, KV_BF16, 0}, {32, 32, 0, 2, 12, 0, KV_BF16, 0},
};

static uint32_t draw(uint32_t *state) { return (*state = *state * 1664525u + 1013904223u) >> 8; }

/* A float near 1 that every dtype holds exactly. */
static float number(uint32_t *state) { return (float)((int)(draw(state) % 255) - 127) / 64.0f; }

static void put(uint8_t *to, int64_t at, kv_dtype dtype, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (dtype == KV_F32) memcpy(to + 4 * at, &bits, 4);
    else if (dtype == KV_BF16) memcpy(to + 2 * at, (uint8_t *)&bits + 2, 2);
    else {
        const uint16_t half = (uint16_t)(bits >> 16 & 0x8000) |
                              (uint16_t)(x == 0 ? 0 : ((bits >> 13 & 0x3ffff) - (112u << 10)) & 0x7fff);
        memcpy(to + 2 * at, &half, 2);
    }
}

typedef struct {
    double keys[HEADS][TOKENS][KV_DIM_MAX / 8];
    double values[HEADS][TOKENS][KV_DIM_MAX / 8];
    uint8_t slots[BLOCKS][SLOT_BYTES];
    uint8_t query[65536];
    float out[65536 / 4];
} arena;

static double e4m3(int code) {
    return code >> 3 ? ldexp(8 + (code & 7), (code >> 3) - 10) : ldexp(code & 7, -9);
}

/* A record of arbitrary codes, and what docs/formats/int4.md makes of it. */
static void fill_record(arena *a, const kv_case *one, uint8_t *record, int head, int first, uint32_t *state) {
    const int dk = one->dim, dv = one->latent ? 0 : one->value_dim;
    uint8_t *scales = record + 8 * (dk + dv), *zeros = scales + dk, *value_scales = zeros + dk;
    uint8_t *value_zeros = value_scales + 16, *bases = zeros + dk + (dv ? 24 : 0);
    for (int i = 0; i < 8 * (dk + dv); i++) record[i] = (uint8_t)draw(state);
    for (int i = 0; i < dk; i++) {
        scales[i] = (uint8_t)(0x30 + draw(state) % 24);
        zeros[i] = (uint8_t)(draw(state) % 16);
    }
    for (int i = 0; i < 16 && dv; i++) value_scales[i] = (uint8_t)(0x30 + draw(state) % 24);
    for (int i = 0; i < 8 && dv; i++) value_zeros[i] = (uint8_t)draw(state);
    const uint8_t base[4] = {0x00, 0x3d, 0x00, 0x3e}; /* bf16 2^-5 and 2^-3 */
    memcpy(bases, base, dv ? 4 : 2);
    for (int t = 0; t < KV_RUN; t++) {
        for (int c = 0; c < dk; c++) {
            const int half = c >= dk / 2, low = half ? c - dk / 2 : c;
            const int code = record[64 * (low / 4) + 4 * t + low % 4] >> (half ? 4 : 0) & 15;
            a->keys[head][first + t][c] = (code - (int8_t)zeros[c]) * e4m3(scales[c]) / 32;
        }
        double *row = a->values[head][first + t];
        for (int d = 0; d < dv; d++) {
            const int code = record[8 * dk + 4 * dv * (t % 8 / 4) + 4 * d + t % 4] >> (t >= 8 ? 4 : 0) & 15;
            row[d] = (code - (value_zeros[t % 8] >> (t >= 8 ? 4 : 0) & 15)) * e4m3(value_scales[t]) / 8;
        }
    }
}

static void fill_full(arena *a, const kv_case *one, uint8_t *slot, int head, int first, uint32_t *state) {
    const int dk = one->dim, dv = one->latent ? 0 : one->value_dim;
    const int64_t base = (int64_t)head * KV_RUN * (dk + dv);
    for (int t = 0; t < KV_RUN && first + t < TOKENS; t++) {
        for (int c = 0; c < dk; c++) put(slot, base + t * dk + c, one->dtype, (float)(a->keys[head][first + t][c] = number(state)));
        for (int d = 0; d < dv; d++)
            put(slot, base + KV_RUN * dk + t * dv + d, one->dtype, (float)(a->values[head][first + t][d] = number(state)));
    }
}

static kv_plan plan_of(const kv_case *one, arena *a, const kv_slice *slice, const int64_t *entries,
                       const kv_cold_head *heads) {
    const int dv = one->latent ? 0 : one->value_dim, item = one->dtype == KV_F32 ? 4 : 2;
    return (kv_plan){
        .fields = KV_PLAN_FIELDS,
        .slices_address = (int64_t)(uintptr_t)slice,
        .slice_count = 1,
        .entries_address = (int64_t)(uintptr_t)entries,
        .window_tokens = one->window,
        .block_tokens = KV_RUN,
        .kv_heads = one->latent ? 1 : HEADS,
        .key_dim = one->dim,
        .value_dim = dv,
        .dtype = one->dtype,
        .full_address = (int64_t)(uintptr_t)a->slots,
        .full_slot_bytes = SLOT_BYTES,
        .full_head_bytes = (int64_t)KV_RUN * (one->dim + dv) * item,
        .cold_address = (int64_t)(uintptr_t)a->slots,
        .extent_bytes = SLOT_BYTES,
        .extent_slots = 1,
        .cold_slot_bytes = SLOT_BYTES,
        .cold_heads_address = (int64_t)(uintptr_t)heads,
    };
}

/* One row in double: the largest difference from what was found, beside the largest number. */
static double row_error(const arena *a, const kv_case *one, int token, int head, const double *rotation) {
    const int group = one->group, kv_head = head / group, last = TOKENS - one->tokens + token;
    const int first = one->window && last - one->window + 1 > 0 ? (int)(last - one->window + 1) : 0;
    const int64_t row = (int64_t)token * group * (one->latent ? 1 : HEADS) + head;
    const float *query = (const float *)a->query + row * one->dim, *found = a->out + row * one->value_dim;
    double sum[2][KV_DIM_MAX / 8] = {{0}}, total = 0, most = 0, worst = 0;
    for (int t = first; t <= last; t++) {
        double score = 0;
        for (int c = 0; c < one->dim; c++) score += query[c] * a->keys[kv_head][t][c];
        score /= 16;
        if (one->softcap > 0) score = one->softcap * tanh(score / one->softcap);
        const double weight = exp(score);
        const double *values = one->latent ? a->keys[kv_head][t] : a->values[kv_head][t];
        double *to = sum[!one->latent && t < COLD_BLOCKS * KV_RUN];
        for (int d = 0; d < one->value_dim; d++) to[d] += weight * values[d];
        total += weight;
    }
    for (int d = 0; d < one->value_dim; d++) {
        double x = sum[0][d];
        for (int e = 0; e < one->value_dim && !one->latent; e++) x += rotation[d * one->value_dim + e] * sum[1][e];
        const double off = fabs(x / total - found[d]);
        if (!(off <= worst)) worst = off; /* NaN is as wrong as can be */
        most = fabs(x / total) > most ? fabs(x / total) : most;
    }
    return worst / most;
}

/* The matrix that takes a rotated column of V back: signs times the Hadamard matrix of each block of channels. */
static void fill_rotation(double *rotation, int dim) {
    const int size = dim & -dim;
    for (int d = 0; d < dim; d++)
        for (int e = 0; e < dim; e++) {
            const double one = __builtin_parity((unsigned)(d & e & (size - 1))) ? -1 : 1;
            rotation[d * dim + e] = d / size == e / size ? kv_signs_float[d] * one / sqrt(size) : 0;
        }
}

static int run_case(const kv_case *one, arena *a, double *rotation) {
    const int dv = one->latent ? 0 : one->value_dim, heads = one->latent ? 1 : HEADS;
    const int64_t size = (8 * (one->dim + dv) + 2 * one->dim + (dv ? 28 : 2) + 63) / 64 * 64;
    uint32_t state = (uint32_t)one->dim * 31u + one->dtype;
    int64_t entries[BLOCKS];
    kv_cold_head cold[HEADS];
    memset(a->slots, 0xff, sizeof a->slots);
    for (int block = 0; block < BLOCKS; block++) {
        entries[block] = (int64_t)block << 1 | (block < COLD_BLOCKS);
        for (int head = 0; head < heads; head++) {
            cold[head] = (kv_cold_head){head * size, size, 4, 4};
            if (block < COLD_BLOCKS) fill_record(a, one, a->slots[block] + head * size, head, block * KV_RUN, &state);
            else fill_full(a, one, a->slots[block], head, block * KV_RUN, &state);
        }
    }
    const int rows = one->tokens * heads * one->group;
    for (int i = 0; i < rows * one->dim; i++) put(a->query, i, KV_F32, number(&state));
    if (dv) fill_rotation(rotation, dv);
    const kv_slice slice = {0, one->tokens, TOKENS - one->tokens, 0, 0, BLOCKS};
    const kv_plan plan = plan_of(one, a, &slice, entries, cold);
    const kv_call call = {.plan = &plan, .query = a->query, .query_token_stride = (int64_t)heads * one->group * one->dim,
                          .query_head_stride = one->dim, .query_heads = heads * one->group, .out = a->out,
                          .value_dim = one->value_dim, .scaling = 1.0 / 16, .softcap = one->softcap, .threads = 1};
    if (kv_attend(&call)) return -1;
    for (int token = 0; token < one->tokens; token++)
        for (int head = 0; head < heads * one->group; head++)
            if (!(row_error(a, one, token, head, rotation) <= TOLERANCE)) return 0;
    return 1;
}

int kv_attention_selftest(void) {
    arena *a = malloc(sizeof *a);
    double *rotation = malloc(sizeof *rotation * (KV_DIM_MAX / 8) * (KV_DIM_MAX / 8));
    int passed = a && rotation ? 1 : -1;
    for (size_t i = 0; i < sizeof cases / sizeof *cases && passed == 1; i++) passed = run_case(&cases[i], a, rotation);
    free(a);
    free(rotation);
    return passed;
}
