// What all int4 kernels share: the job that a launch carries, tensor elements, scales, reductions over a record's threads.
//
// Arithmetic is that of docs/formats/int4.md to the bit: every sum, product and quotient of values is an explicit
// round-to-nearest intrinsic, which a compiler must not fuse. __fmaf_rn stands only where the product is exact.

#define RUN_TOKENS 16
#define ROUND_TO_INT 12582912.0f  // 1.5 * 2^23: adding it rounds |x| < 2^22 to an integer, ties to even
#define ROUND_BITS 0x4b400000     // its bits: the integer is what is above them
#define TOO_LARGE 0x77800000u     // bits of 2^112; magnitudes at or above are refused, NaN and Inf with them
#define FLOAT16_MAX 65504.0f
#define MAX_WARPS 16              // of one thread block: 512 threads

enum Kind { BF16 = 0, FP16 = 1, FP32 = 2 };

// One launch over keys or over values. Mirrored by launches.RECORD_JOB; 8-byte fields first, so there is no padding.
struct RecordJob {
    char* tensor;                // first element: layer, head and token 0 of block 0
    const i64* tensor_offsets;   // bytes from `tensor` to each block; null: block * tensor_stride
    u8* records;                 // first record of block 0
    const i64* record_offsets;   // bytes from `records` to each block's first record; null: block * record_stride
    u8* accepted;                // encoding: a byte a block; only ever set to 0 here
    i64 tensor_stride, layer_stride, head_stride, token_stride, record_stride;  // bytes
    double limit;                // bound * bound * 4096
    u32 record_count;            // in all blocks
    u32 block_records, heads, runs;  // layers * heads * runs of one block
    u32 dim;                     // of this part
    u32 record_bytes;
    u32 codes, plane, scales, zeros, base;  // offsets of this part inside a record
    u32 padding;                 // offset of the zeros at the end of a record
    u32 segment;                 // values: threads that a group of 8 tokens has
    float unit;                  // values: 1 / sqrt(size of the Hadamard)
};

// ---- which record these threads work on

struct Place {
    char* tensor;  // token 0, channel 0 of the record's run
    u8* record;
    u32 block;
    bool live;     // false: beyond the last record; computes on the last one and stores nothing
};

DEVICE Place find_place(const RecordJob& job) {
    const u32 index = blockIdx.x * blockDim.y + threadIdx.y;
    Place place;
    place.live = index < job.record_count;
    const u32 record = place.live ? index : job.record_count - 1;
    place.block = record / job.block_records;
    const u32 inside = record - place.block * job.block_records;
    const u32 head_index = inside / job.runs;
    const u32 run = inside - head_index * job.runs;
    const u32 layer = head_index / job.heads;
    const u32 head = head_index - layer * job.heads;
    const i64 start = job.tensor_offsets ? job.tensor_offsets[place.block] : (i64)place.block * job.tensor_stride;
    place.tensor = job.tensor + start + (i64)layer * job.layer_stride + (i64)head * job.head_stride +
                   (i64)(run * RUN_TOKENS) * job.token_stride;
    const i64 first = job.record_offsets ? job.record_offsets[place.block] : (i64)place.block * job.record_stride;
    place.record = job.records + first + (i64)inside * job.record_bytes;
    return place;
}

// ---- elements of a tensor

DEVICE float from_half(u16 bits) {
#ifdef __CUDACC__
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    return shim_from_half(bits);
#endif
}

DEVICE u32 to_half(float value) {  // to nearest even; the caller has kept it within +-65504
#ifdef __CUDACC__
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    return shim_to_half(value);
#endif
}

DEVICE u32 to_bfloat16(float value) {
    const u32 bits = __float_as_uint(value);
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

DEVICE u32 to_bfloat16_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return to_bfloat16(low) | (to_bfloat16(high) << 16);
#endif
}

template <int KIND>
DEVICE float load_one(const char* place) {
    if (KIND == FP32) return *(const float*)place;
    const u16 bits = *(const u16*)place;
    return KIND == BF16 ? __uint_as_float((u32)bits << 16) : from_half(bits);
}

template <int KIND>
DEVICE void load_four(const char* place, float* out) {
    if (KIND == FP32) {
        const float4 four = *(const float4*)place;
        out[0] = four.x, out[1] = four.y, out[2] = four.z, out[3] = four.w;
        return;
    }
    const uint2 four = *(const uint2*)place;
    if (KIND == BF16) {
        out[0] = __uint_as_float(four.x << 16), out[1] = __uint_as_float(four.x & 0xffff0000u);
        out[2] = __uint_as_float(four.y << 16), out[3] = __uint_as_float(four.y & 0xffff0000u);
    } else {
        out[0] = from_half((u16)four.x), out[1] = from_half((u16)(four.x >> 16));
        out[2] = from_half((u16)four.y), out[3] = from_half((u16)(four.y >> 16));
    }
}

DEVICE float within_half(float value) { return fminf(fmaxf(value, -FLOAT16_MAX), FLOAT16_MAX); }

template <int KIND>
DEVICE void store_four(char* place, const float* four) {
    if (KIND == FP32) {
        *(float4*)place = float4{four[0], four[1], four[2], four[3]};
    } else if (KIND == BF16) {
        *(uint2*)place = uint2{to_bfloat16_pair(four[0], four[1]), to_bfloat16_pair(four[2], four[3])};
    } else {
        u32 bits[4];
        for (int c = 0; c < 4; c++) bits[c] = to_half(within_half(four[c]));
        *(uint2*)place = uint2{bits[0] | (bits[1] << 16), bits[2] | (bits[3] << 16)};
    }
}

// ---- scales: e4m3 codes under one bf16 base

DEVICE float rounded(float value) { return __fsub_rn(__fadd_rn(value, ROUND_TO_INT), ROUND_TO_INT); }

DEVICE float small_int(int value) { return __fsub_rn(__int_as_float(ROUND_BITS + value), ROUND_TO_INT); }

DEVICE u32 magnitude_bits(float value) { return __float_as_uint(value) & 0x7fffffffu; }

DEVICE float scale_base(u32 largest_bits) {  // bits of the largest true scale, which is not negative
    const float base = __fmul_rn(__uint_as_float(largest_bits), 0x1.36202ep-9f);  // 1.06 / 448
    return __uint_as_float(to_bfloat16(fmaxf(base, 0x1p-100f)) << 16);
}

DEVICE u32 scale_code(float scale, float base) {
    const float ratio = fmaxf(__fdiv_rn(scale, base), 0x1p-9f);
    if (ratio < 0x1p-6f) return (u32)(__float_as_int(__fadd_rn(__fmul_rn(ratio, 512.0f), ROUND_TO_INT)) - ROUND_BITS);
    const u32 bits = __float_as_uint(ratio);
    return ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
}

DEVICE float e4m3(u32 code) {  // codes 0x00..0x7e; small ones are subnormal
    return code < 8u ? __fmul_rn((float)(int)code, 0x1p-9f) : __uint_as_float((code << 20) + (120u << 23));
}

// A record may hold any byte when it is decoded: the sign must not run into the exponent. 0x7f and 0xff decode to NaN
// in the reference and to +-480 here; what an invalid record decodes to is unspecified.
DEVICE float any_e4m3(u32 code) {
    const float value = e4m3(code & 0x7fu);
    return code & 0x80u ? -value : value;
}

DEVICE u32 scale_weight(u32 code) {  // rint(value)^2, at most 448^2
    const int whole = __float_as_int(__fadd_rn(e4m3(code), ROUND_TO_INT)) - ROUND_BITS;
    return (u32)(whole * whole);
}

DEVICE float load_base(const u8* place) { return __uint_as_float((u32)(*(const u16*)place) << 16); }

// ---- codes

// The code of one value as bits, from v = x / s + z. Adds the square of its error, in 64ths of a step, and of q - z.
// All of these are integers below 2^24 (or the record is refused by its magnitude), so the sums are exact.
DEVICE u32 quantize(float scaled, float zero, float top, float& errors, float& offsets) {
    const float held = fminf(fmaxf(__fadd_rn(scaled, ROUND_TO_INT), ROUND_TO_INT), ROUND_TO_INT + top);
    const float code = __fsub_rn(held, ROUND_TO_INT);
    const float error = __fmaf_rn(__fsub_rn(scaled, code), 64.0f, ROUND_TO_INT);  // times 64 is exact
    const float steps = __fsub_rn(error, ROUND_TO_INT);
    const float offset = __fsub_rn(code, zero);
    errors = __fmaf_rn(steps, steps, errors);
    offsets = __fmaf_rn(offset, offset, offsets);
    return __float_as_uint(held) & 31u;
}

// ---- reductions over the threads of one record (one threadIdx.y), whole warps

DEVICE u32 warp_max(u32 mask, u32 value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    for (u32 lanes = 16; lanes; lanes >>= 1) {
        const u32 other = __shfl_xor_sync(FULL_WARP, value, lanes);
        if ((mask >> ((threadIdx.x & 31u) ^ lanes)) & 1u) value = other > value ? other : value;
    }
    return value;
#else
    return __reduce_max_sync(mask, value);
#endif
}

DEVICE u64 warp_sum(u64 value) {
    for (u32 lanes = 16; lanes; lanes >>= 1) value += __shfl_xor_sync(FULL_WARP, value, lanes);
    return value;
}

struct Tally {
    u64 errors[MAX_WARPS], offsets[MAX_WARPS];
    u32 largest[MAX_WARPS];
};

// Thread 0 of a record decides, from every thread's sums and largest magnitude, and clears the block's flag.
DEVICE void decide(const RecordJob& job, const Place& place, Tally& tally, u64 errors, u64 offsets, u32 largest) {
    const u32 warps = blockDim.x >> 5;
    const u32 first = threadIdx.y * warps;
    errors = warp_sum(errors);
    offsets = warp_sum(offsets);
    largest = warp_max(FULL_WARP, largest);
    if ((threadIdx.x & 31u) == 0) {
        const u32 warp = first + (threadIdx.x >> 5);
        tally.errors[warp] = errors;
        tally.offsets[warp] = offsets;
        tally.largest[warp] = largest;
    }
    __syncthreads();
    if (threadIdx.x != 0 || !place.live) return;
    for (u32 warp = first + 1; warp < first + warps; warp++) {
        errors += tally.errors[warp];
        offsets += tally.offsets[warp];
        largest = tally.largest[warp] > largest ? tally.largest[warp] : largest;
    }
    const bool within = __ull2double_rn(errors) <= __dmul_rn(__ull2double_rn(offsets), job.limit);
    if (!within || largest >= TOO_LARGE) job.accepted[place.block] = 0;
}
