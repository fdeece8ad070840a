// INT4 of keys and latents: per channel over the 16 tokens of a record. docs/formats/int4.md, sections 3, 4 and 6.
//
// Threads: threadIdx.y is the record inside the thread block, threadIdx.x (whole warps) what is said at each kernel.
// Encoding holds both channels of a nibble pair in registers, so each value is read once.

struct KeyScale {
    u32 code;
    float inverse, zero;
};

template <int BITS>
DEVICE float key_true_scale(float low, float high) {
    const float per_code = BITS == 4 ? 0x1.111112p-4f : 0x1.084210p-5f;  // 1/15, 1/31
    const float spread = __fmul_rn(__fsub_rn(high, low), per_code);
    return fmaxf(spread, fmaxf(__fmul_rn(low, -0x1.020408p-7f), __fmul_rn(low, 0x1p-7f)));  // -1/127, 1/128
}

DEVICE KeyScale key_scale(float scale, float low, float base) {
    KeyScale found;
    found.code = scale_code(scale, base);
    found.inverse = __frcp_rn(__fmul_rn(e4m3(found.code), base));
    found.zero = rounded(__fmul_rn(-low, found.inverse));
    if (found.zero < -128.0f || found.zero > 127.0f) {  // e4m3 rounded the scale down: the next code up
        found.code += 1;
        found.inverse = __frcp_rn(__fmul_rn(e4m3(found.code), base));
        found.zero = rounded(__fmul_rn(-low, found.inverse));
    }
    return found;
}

// Four lanes hold 16 bytes each (their channel, token by token); afterwards lane j holds tokens 4j..4j+3, each a word
// of the four lanes' bytes.
DEVICE uint4 lines_of_quad(const u32* own) {
    const bool odd = threadIdx.x & 1u, high = threadIdx.x & 2u;
    u32 a = own[0], b = own[1], c = own[2], d = own[3];
    u32 got = __shfl_xor_sync(FULL_WARP, odd ? a : b, 1);
    if (odd) a = got; else b = got;
    got = __shfl_xor_sync(FULL_WARP, odd ? c : d, 1);
    if (odd) c = got; else d = got;
    got = __shfl_xor_sync(FULL_WARP, high ? a : c, 2);
    if (high) a = got; else c = got;
    got = __shfl_xor_sync(FULL_WARP, high ? b : d, 2);
    if (high) b = got; else d = got;
    const u32 first = __byte_perm(a, b, 0x5140), second = __byte_perm(c, d, 0x5140);
    const u32 third = __byte_perm(a, b, 0x7362), fourth = __byte_perm(c, d, 0x7362);
    return uint4{__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632),
                 __byte_perm(third, fourth, 0x5410), __byte_perm(third, fourth, 0x7632)};
}

// Bit 4 of the codes: a 64-bit mask of 16 tokens x 4 channels for the low channels of a quad and one for the high.
DEVICE void store_key_plane(const RecordJob& job, const Place& place, u32 channel, const u32* masks, bool stores) {
    u32 mine = 0;
    for (u32 word = 0; word < 4; word++) {
        u32 mask = masks[word];
        mask |= __shfl_xor_sync(FULL_WARP, mask, 1);
        mask |= __shfl_xor_sync(FULL_WARP, mask, 2);
        if ((channel & 3u) == word) mine = mask;
    }
    if (!stores) return;
    const u32 line = (channel >> 2) + (channel & 2u ? job.dim >> 3 : 0);
    *(u32*)(place.record + job.plane + 8u * line + 4u * (channel & 1u)) = mine;
}

// threadIdx.x: channel c of the lower half, together with c + dim/2.
template <int KIND, int BITS>
DEVICE void encode_keys(const RecordJob& job) {
    __shared__ Tally tally;
    __shared__ u32 largest_scale[MAX_WARPS];
    const float top = BITS == 4 ? 15.0f : 31.0f;
    const u32 size = KIND == FP32 ? 4 : 2;
    const Place place = find_place(job);
    const u32 half = job.dim >> 1;
    const bool active = threadIdx.x < half;
    const u32 channel = active ? threadIdx.x : threadIdx.x & 3u;  // a quad stays a quad; idle lanes store nothing

    float x[2][RUN_TOKENS], low[2], high[2], scale[2];
    u32 largest = 0;
#pragma unroll
    for (int t = 0; t < RUN_TOKENS; t++) {
        const char* row = place.tensor + t * job.token_stride + channel * size;
        x[0][t] = load_one<KIND>(row);
        x[1][t] = load_one<KIND>(row + half * size);
    }
#pragma unroll
    for (int side = 0; side < 2; side++) {
        low[side] = high[side] = x[side][0];
#pragma unroll
        for (int t = 0; t < RUN_TOKENS; t++) {
            low[side] = fminf(low[side], x[side][t]);
            high[side] = fmaxf(high[side], x[side][t]);
            largest = magnitude_bits(x[side][t]) > largest ? magnitude_bits(x[side][t]) : largest;
        }
        scale[side] = key_true_scale<BITS>(low[side], high[side]);
    }

    const int own = __float_as_int(fmaxf(scale[0], scale[1]));  // as integers: they are not negative
    const u32 in_warp = warp_max(FULL_WARP, own > 0 ? (u32)own : 0u);
    const u32 warps = blockDim.x >> 5, first = threadIdx.y * warps;
    if ((threadIdx.x & 31u) == 0) largest_scale[first + (threadIdx.x >> 5)] = in_warp;
    __syncthreads();
    u32 of_record = 0;
    for (u32 warp = first; warp < first + warps; warp++)
        of_record = largest_scale[warp] > of_record ? largest_scale[warp] : of_record;
    const float base = scale_base(of_record);

    u32 words[4] = {0, 0, 0, 0}, masks[4] = {0, 0, 0, 0};
    u64 errors = 0, offsets = 0;
    const bool stores = active && place.live;
#pragma unroll
    for (int side = 0; side < 2; side++) {
        const KeyScale found = key_scale(scale[side], low[side], base);
        float squares = 0.0f, magnitudes = 0.0f;
#pragma unroll
        for (int t = 0; t < RUN_TOKENS; t++) {
            const float scaled = __fadd_rn(__fmul_rn(x[side][t], found.inverse), found.zero);
            const u32 code = quantize(scaled, found.zero, top, squares, magnitudes);
            words[t >> 2] |= (code & 15u) << (8 * (t & 3) + 4 * side);
            if (BITS == 5) masks[2 * side + (t >> 3)] |= (code >> 4) << (4 * (t & 7) + (channel & 3u));
        }
        const u64 weight = active ? scale_weight(found.code) : 0u;
        errors += weight * __float2uint_rn(squares);
        offsets += weight * __float2uint_rn(magnitudes);
        if (stores) {
            place.record[job.scales + channel + side * half] = (u8)found.code;
            place.record[job.zeros + channel + side * half] = (u8)(__float_as_int(__fadd_rn(found.zero, ROUND_TO_INT)) & 255);
        }
    }

    const uint4 lines = lines_of_quad(words);
    if (stores) *(uint4*)(place.record + 64u * (channel >> 2) + 16u * (channel & 3u)) = lines;
    if (BITS == 5) store_key_plane(job, place, channel, masks, stores);
    if (place.live) {
        if (threadIdx.x == 0) *(u16*)(place.record + job.base) = (u16)(__float_as_uint(base) >> 16);
        for (u32 at = job.padding + threadIdx.x; at < job.record_bytes; at += blockDim.x) place.record[at] = 0;
    }
    decide(job, place, tally, errors, offsets, largest);
}

// threadIdx.x = 4 * line + quad of tokens: four channels of the lower half, four of the upper, four tokens each.
template <int KIND, int BITS>
DEVICE void decode_keys(const RecordJob& job) {
    const u32 size = KIND == FP32 ? 4 : 2;
    const Place place = find_place(job);
    const u32 half = job.dim >> 1;
    if (threadIdx.x >= half || !place.live) return;
    const u32 line = threadIdx.x >> 2, quad = threadIdx.x & 3u;
    const float base = load_base(place.record + job.base);
    const uint4 codes = *(const uint4*)(place.record + 64u * line + 16u * quad);
    const u32 tokens[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (u32 side = 0; side < 2; side++) {
        const u32 channel = 4u * line + side * half;
        const u32 scale_codes = *(const u32*)(place.record + job.scales + channel);
        const u32 zero_bytes = *(const u32*)(place.record + job.zeros + channel);
        u32 plane = 0;
        if (BITS == 5) plane = *(const u16*)(place.record + job.plane + 8u * (line + side * (job.dim >> 3)) + 2u * quad);
        float scales[4], offsets[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            scales[c] = __fmul_rn(any_e4m3((scale_codes >> (8 * c)) & 255u), base);
            offsets[c] = __int_as_float(ROUND_BITS + (int)(signed char)(zero_bytes >> (8 * c)));
        }
        char* row = place.tensor + (i64)(4u * quad) * job.token_stride + channel * size;
#pragma unroll
        for (int t = 0; t < 4; t++) {
            float out[4];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                u32 code = (tokens[t] >> (8 * c + 4 * side)) & 15u;
                if (BITS == 5) code |= ((plane >> (4 * t + c)) & 1u) << 4;
                out[c] = __fmul_rn(__fsub_rn(__uint_as_float(ROUND_BITS | code), offsets[c]), scales[c]);
            }
            store_four<KIND>(row, out);
            row += job.token_stride;
        }
    }
}
