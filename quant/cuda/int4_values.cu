// INT4 of values: rotated by signs and a Hadamard, per token. docs/formats/int4.md, sections 3, 5 and 6.
//
// Threads: threadIdx.y is the record inside the thread block. threadIdx.x = group * job.segment + column: channels
// 4 column .. 4 column + 3 of the eight tokens 4 group .. 4 group + 3 and those plus 8, which share bytes. segment is a
// power of two below 32, or a multiple of 32, so that the threads of a Hadamard lie in one warp or in whole warps.
// Butterflies run in registers (h = 1, 2), between lanes (h = 4 .. 64) and through dynamic shared memory (h >= 128).

__constant__ u32 VALUE_SIGNS[32] = {  // bit d % 32 of word d / 32: channel d is negated
    0xc9b229b3u, 0x47ad2ac2u, 0xa7266f29u, 0xe60dc2f4u, 0xd56c601eu, 0xcd221b9eu, 0xdd81d034u, 0xa28ec728u,
    0x35eb3cb8u, 0x5615235du, 0x37ea0df4u, 0x7e5f48e2u, 0xf91fb7fdu, 0x217b9441u, 0x4392481eu, 0x982c0ab8u,
    0x61959fb1u, 0x6924fe76u, 0x07d8d56bu, 0xf855efccu, 0x68e4a1d4u, 0x102e4b58u, 0x9a4dcfb6u, 0xa47d5ea6u,
    0xa17ade68u, 0x774ceb96u, 0x07d9ae7cu, 0x52da47cdu, 0x86194692u, 0x0061196du, 0xb064db57u, 0x02c343e0u,
};

struct ValuePlace {
    u32 group, column;
    bool active;
    u32 size;  // of the Hadamard: the largest power of two that divides dim
};

DEVICE ValuePlace find_values(const RecordJob& job) {
    ValuePlace found;
    found.group = threadIdx.x / job.segment;
    found.column = threadIdx.x - found.group * job.segment;
    found.active = found.group < 2 && 4u * found.column < job.dim;
    found.size = job.dim & (0u - job.dim);
    return found;
}

DEVICE u32 signs_of(u32 channel) { return VALUE_SIGNS[channel >> 5] >> (channel & 31u); }  // channel: a multiple of 4

// ---- butterflies on floats (encoding: each sum is rounded, so the order of stages is the format's) and on integers

DEVICE float plus(float a, float b) { return __fadd_rn(a, b); }
DEVICE float minus(float a, float b) { return __fsub_rn(a, b); }
DEVICE u32 plus(u32 a, u32 b) { return a + b; }
DEVICE u32 minus(u32 a, u32 b) { return a - b; }

DEVICE float4 four_of(const float* v) { return float4{v[0], v[1], v[2], v[3]}; }
DEVICE uint4 four_of(const u32* v) { return uint4{v[0], v[1], v[2], v[3]}; }

template <class T>
DEVICE void butterfly(T& a, T& b) {
    const T sum = plus(a, b);
    b = minus(a, b);
    a = sum;
}

// rows[ROWS][4]: ROWS tokens (or pairs of tokens) of four channels. Every thread of the thread block calls it.
template <class T, class FOUR, int ROWS>
DEVICE void hadamard(T (&rows)[ROWS][4], const ValuePlace& where, u32 segment, FOUR* exchange) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        butterfly(rows[r][0], rows[r][1]);
        butterfly(rows[r][2], rows[r][3]);
        butterfly(rows[r][0], rows[r][2]);
        butterfly(rows[r][1], rows[r][3]);
    }
    const u32 lanes_end = where.size >> 2;
    for (u32 lanes = 1; lanes < lanes_end && lanes < 32; lanes <<= 1) {
        const bool second = where.column & lanes;
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const T other = __shfl_xor_sync(FULL_WARP, rows[r][c], lanes);
                rows[r][c] = second ? minus(other, rows[r][c]) : plus(rows[r][c], other);
            }
    }
    const u32 threads = blockDim.x * blockDim.y;
    const u32 mine = threadIdx.y * blockDim.x + threadIdx.x;
    for (u32 lanes = 32; lanes < lanes_end; lanes <<= 1) {
        const bool second = where.column & lanes;
        const u32 partner = mine - where.column + (where.column ^ lanes);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {  // two buffers in turn: one barrier a row is enough
            FOUR* buffer = exchange + (r & 1) * threads;
            buffer[mine] = four_of(rows[r]);
            __syncthreads();
            const FOUR got = buffer[partner];
            const T others[4] = {got.x, got.y, got.z, got.w};
#pragma unroll
            for (int c = 0; c < 4; c++)
                rows[r][c] = second ? minus(others[c], rows[r][c]) : plus(rows[r][c], others[c]);
        }
    }
}

// ---- encoding

struct TokenScales {  // of one record
    u32 up[RUN_TOKENS], down[RUN_TOKENS];  // bits of max(y, 0) and of max(-y, 0)
    float factor[RUN_TOKENS], zero[RUN_TOKENS];
    u32 weight[RUN_TOKENS];
};

#define MAX_ROWS 4  // records in one thread block

DEVICE u32 positive_bits(float value) {
    const int bits = __float_as_int(value);
    return bits > 0 ? (u32)bits : 0u;
}

DEVICE int token_of(u32 group, int row) { return 4 * (int)group + (row & 3) + 8 * (row >> 2); }

// Largest and smallest rotated value of each token, over the threads of its segment.
DEVICE void find_extremes(const float (&y)[8][4], const ValuePlace& where, u32 segment, TokenScales& scales) {
    const u32 lane = threadIdx.x & 31u;
    const u32 mask = segment >= 32 ? FULL_WARP : ((1u << segment) - 1u) << (lane & ~(segment - 1u));
    const bool leads = where.active && (segment >= 32 ? lane == 0 : where.column == 0);
#pragma unroll
    for (int r = 0; r < 8; r++) {
        const float high = fmaxf(fmaxf(y[r][0], y[r][1]), fmaxf(y[r][2], y[r][3]));
        const float low = fminf(fminf(y[r][0], y[r][1]), fminf(y[r][2], y[r][3]));
        const u32 up = warp_max(mask, positive_bits(high));
        const u32 down = warp_max(mask, positive_bits(-low));
        if (!leads) continue;
        atomicMax(&scales.up[token_of(where.group, r)], up);
        atomicMax(&scales.down[token_of(where.group, r)], down);
    }
}

// Threads 0-15 of a record, a token each; the whole warp takes part. Stores codes, zero points and the base.
template <int BITS>
DEVICE void make_scales(const RecordJob& job, const Place& place, TokenScales& scales) {
    const float top = BITS == 4 ? 15.0f : 7.0f;
    const float per_code = BITS == 4 ? 0x1.111112p-4f : 0x1.24924ap-3f;  // 1/15, 1/7
    const u32 token = threadIdx.x & 15u;
    const float high = __fmul_rn(__uint_as_float(scales.up[token]), job.unit);
    const float depth = __fmul_rn(__uint_as_float(scales.down[token]), job.unit);  // -lo
    const float scale = __fmul_rn(__fadd_rn(high, depth), per_code);
    const float base = scale_base(warp_max(FULL_WARP, __float_as_uint(scale)));
    const u32 code = scale_code(scale, base);
    const float inverse = __frcp_rn(__fmul_rn(e4m3(code), base));
    const float zero = fminf(fmaxf(rounded(__fmul_rn(depth, inverse)), 0.0f), top);
    const u32 zero_bits = __float_as_uint(__fadd_rn(zero, ROUND_TO_INT)) & 15u;
    const u32 upper_zero = __shfl_xor_sync(FULL_WARP, zero_bits, 8);
    if (threadIdx.x >= RUN_TOKENS) return;
    scales.factor[token] = __fmul_rn(inverse, job.unit);
    scales.zero[token] = zero;
    scales.weight[token] = scale_weight(code);
    if (!place.live) return;
    place.record[job.scales + token] = (u8)code;
    if (token < 8) place.record[job.zeros + token] = (u8)(zero_bits | (upper_zero << 4));
    if (token == 0) *(u16*)(place.record + job.base) = (u16)(__float_as_uint(base) >> 16);
}

// codes[8][4]: rows 0-3 tokens of the lower half, 4-7 those plus 8. A word a channel, a byte a token.
DEVICE void store_four_bits(const RecordJob& job, const Place& place, const ValuePlace& where, const u32 (&codes)[8][4]) {
    u32 words[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
        words[c] = 0;
#pragma unroll
        for (int r = 0; r < 4; r++) words[c] |= (codes[r][c] | (codes[r + 4][c] << 4)) << (8 * r);
    }
    u8* line = place.record + job.codes + 4u * job.dim * where.group + 16u * where.column;
    if (where.active && place.live) *(uint4*)line = four_of(words);
}

// Bits 0-1 of four quads of tokens share a byte, so the second group hands its share to the first.
DEVICE void store_three_bits(
    const RecordJob& job, const Place& place, const ValuePlace& where, const u32 (&codes)[8][4], uint4* exchange) {
    const u32 mine = threadIdx.y * blockDim.x + threadIdx.x;
    u32 words[4];
    u32 planes[2] = {0, 0};
#pragma unroll
    for (int c = 0; c < 4; c++) {
        words[c] = 0;
#pragma unroll
        for (int r = 0; r < 4; r++) {
            words[c] |= ((codes[r][c] & 3u) | ((codes[r + 4][c] & 3u) << 4)) << (8 * r);
            planes[0] |= (codes[r][c] >> 2) << (4 * c + r);
            planes[1] |= (codes[r + 4][c] >> 2) << (4 * c + r);
        }
    }
    if (where.active && where.group == 1) exchange[mine] = four_of(words);
    __syncthreads();
    if (!where.active || !place.live) return;
    u8* plane = place.record + job.plane + 2u * where.column + (job.dim >> 1) * where.group;
    *(u16*)plane = (u16)planes[0];
    *(u16*)(plane + job.dim) = (u16)planes[1];
    if (where.group == 1) return;
    const uint4 upper = exchange[mine + job.segment];
    *(uint4*)(place.record + job.codes + 16u * where.column) =
        uint4{words[0] | (upper.x << 2), words[1] | (upper.y << 2), words[2] | (upper.z << 2), words[3] | (upper.w << 2)};
}

template <int KIND, int BITS>
DEVICE void encode_values(const RecordJob& job) {
    __shared__ Tally tally;
    __shared__ TokenScales all_scales[MAX_ROWS];
    DYNAMIC_SHARED(uint4, exchange);
    const float top = BITS == 4 ? 15.0f : 7.0f;
    const Place place = find_place(job);
    const ValuePlace where = find_values(job);
    TokenScales& scales = all_scales[threadIdx.y];
    if (threadIdx.x < RUN_TOKENS) scales.up[threadIdx.x] = scales.down[threadIdx.x] = 0;

    float y[8][4];
    u32 largest = 0;
    const u32 negated = where.active ? signs_of(4u * where.column) : 0u;
#pragma unroll
    for (int r = 0; r < 8; r++) {
        y[r][0] = y[r][1] = y[r][2] = y[r][3] = 0.0f;
        const char* row = place.tensor + (i64)token_of(where.group, r) * job.token_stride;
        if (where.active) load_four<KIND>(row + where.column * (KIND == FP32 ? 16u : 8u), y[r]);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            largest = magnitude_bits(y[r][c]) > largest ? magnitude_bits(y[r][c]) : largest;
            y[r][c] = __uint_as_float(__float_as_uint(y[r][c]) ^ (((negated >> c) & 1u) << 31));
        }
    }
    hadamard<float, float4, 8>(y, where, job.segment, (float4*)exchange);

    __syncthreads();  // scales.up and down are zero
    find_extremes(y, where, job.segment, scales);
    __syncthreads();
    if (threadIdx.x < 32) make_scales<BITS>(job, place, scales);
    __syncthreads();

    u32 codes[8][4];
    u64 errors = 0, offsets = 0;
#pragma unroll
    for (int r = 0; r < 8; r++) {
        const int token = token_of(where.group & 1u, r);
        const float factor = scales.factor[token], zero = scales.zero[token];
        float squares = 0.0f, magnitudes = 0.0f;
#pragma unroll
        for (int c = 0; c < 4; c++)
            codes[r][c] = quantize(__fadd_rn(__fmul_rn(y[r][c], factor), zero), zero, top, squares, magnitudes);
        const u64 weight = where.active ? scales.weight[token] : 0u;
        errors += weight * __float2uint_rn(squares);
        offsets += weight * __float2uint_rn(magnitudes);
    }
    if (BITS == 4) store_four_bits(job, place, where, codes);
    else store_three_bits(job, place, where, codes, exchange);
    decide(job, place, tally, errors, offsets, largest);
}

// ---- decoding

// pairs[4][4]: token 4 group + r in the lower 16 bits, that plus 8 above, of four channels; codes only.
template <int BITS>
DEVICE void load_pairs(const RecordJob& job, const Place& place, const ValuePlace& where, u32 (&pairs)[4][4]) {
    const u32 line = BITS == 4 ? 4u * job.dim * where.group : 0u;
    const uint4 four = *(const uint4*)(place.record + job.codes + line + 16u * where.column);
    const u32 words[4] = {four.x, four.y, four.z, four.w};
    u32 low_plane = 0, high_plane = 0;
    if (BITS == 3) {
        const u8* plane = place.record + job.plane + 2u * where.column + (job.dim >> 1) * where.group;
        low_plane = *(const u16*)plane;
        high_plane = *(const u16*)(plane + job.dim);
    }
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const u32 byte = (words[c] >> (8 * r)) & 255u;
            if (BITS == 4) {
                pairs[r][c] = (byte & 15u) | ((byte & 0xf0u) << 12);
            } else {
                const u32 low = ((byte >> (2u * where.group)) & 3u) | (((low_plane >> (4 * c + r)) & 1u) << 2);
                const u32 high = ((byte >> (2u * where.group + 4u)) & 3u) | (((high_plane >> (4 * c + r)) & 1u) << 2);
                pairs[r][c] = low | (high << 16);
            }
        }
}

// Two tokens ride in one 32-bit integer, lower + 65536 * upper: a butterfly is linear and both stay within +-15360.
template <int KIND, int BITS>
DEVICE void decode_values(const RecordJob& job) {
    DYNAMIC_SHARED(uint4, exchange);
    const Place place = find_place(job);
    const ValuePlace where = find_values(job);
    u32 pairs[4][4] = {};
    u32 low_scales = 0, high_scales = 0, negated = 0;
    float base = 0.0f;
    if (where.active) {
        load_pairs<BITS>(job, place, where, pairs);
        low_scales = *(const u32*)(place.record + job.scales + 4u * where.group);
        high_scales = *(const u32*)(place.record + job.scales + 8u + 4u * where.group);
        const u32 zeros = *(const u32*)(place.record + job.zeros + 4u * where.group);
        base = load_base(place.record + job.base);
        negated = signs_of(4u * where.column);
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const u32 byte = (zeros >> (8 * r)) & 255u;
            const u32 zero = (byte & 15u) + ((byte >> 4) << 16);
#pragma unroll
            for (int c = 0; c < 4; c++) pairs[r][c] -= zero;
        }
    }
    hadamard<u32, uint4, 4>(pairs, where, job.segment, exchange);
    if (!where.active || !place.live) return;
    char* column = place.tensor + where.column * (KIND == FP32 ? 16u : 8u);
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const float low_factor = __fmul_rn(__fmul_rn(any_e4m3((low_scales >> (8 * r)) & 255u), base), job.unit);
        const float high_factor = __fmul_rn(__fmul_rn(any_e4m3((high_scales >> (8 * r)) & 255u), base), job.unit);
        float low[4], high[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const u32 pair = (negated >> c) & 1u ? 0u - pairs[r][c] : pairs[r][c];
            const u32 lifted = pair + 0x8000u;  // the lower half is not negative now and borrows nothing
            low[c] = __fmul_rn(small_int((int)(lifted & 0xffffu) - 0x8000), low_factor);
            high[c] = __fmul_rn(small_int((int)lifted >> 16), high_factor);
        }
        const int token = 4 * (int)where.group + r;
        store_four<KIND>(column + (i64)token * job.token_stride, low);
        store_four<KIND>(column + (i64)(token + 8) * job.token_stride, high);
    }
}
