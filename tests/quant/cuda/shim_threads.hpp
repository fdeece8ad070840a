// CUDA's per-thread model on one CPU thread, enough for the kernels of quant/cuda: put before a kernel module's text.
//
// A thread block's threads are fibers, run one at a time until they reach a barrier or a warp intrinsic, in an order
// that the caller chooses (forward, backward, shuffled): a kernel that lacks a barrier gives different bytes in
// different orders. Shared memory is filled with rubbish before each thread block. A barrier that some thread never
// reaches is reported, not waited for. Arithmetic is binary32 and binary64 in SSE, unfused (-ffp-contract=off).
// What it cannot find: races that need two threads between the same two barriers to interleave within a statement.

#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __constant__ static const
#define __shared__ static __attribute__((section("shim_shared")))
#define __launch_bounds__(...)
#define DYNAMIC_SHARED(type, name) type* name = (type*)shim::dynamic_shared

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 { unsigned x, y, z; };

static dim3 threadIdx, blockIdx, blockDim, gridDim;

extern "C" char __start_shim_shared[] __attribute__((weak));
extern "C" char __stop_shim_shared[] __attribute__((weak));

namespace shim {

const size_t STACK_BYTES = 64 << 10;
const int WARP = 32;
const int RUBBISH = 0xa5;

struct Barrier { unsigned arrived = 0, generation = 0; };

struct Fiber {
    ucontext_t context;
    jmp_buf place;
    dim3 index;
    bool started, finished;
};

struct Warp {
    Barrier barriers[WARP][WARP + 1];  // by lowest lane and number of lanes of the mask
    uint64_t values[WARP];
};

static std::vector<Fiber> fibers;
static std::vector<char> stacks;
static std::vector<Warp> warps;
static Barrier block_barrier;
static jmp_buf scheduler;
static Fiber* running;
static unsigned long long progress;
alignas(16) static char dynamic_shared[64 << 10];
static void (*body)();

static void wait() {
    if (!_setjmp(running->place)) _longjmp(scheduler, 1);
}

static void arrive(Barrier& barrier, unsigned expected) {
    const unsigned generation = barrier.generation;
    if (++barrier.arrived == expected) {
        barrier.arrived = 0;
        barrier.generation++;
        progress++;
        return;
    }
    while (barrier.generation == generation) wait();
}

static void enter() {
    body();
    running->finished = true;
    progress++;
    _longjmp(scheduler, 1);
}

static void resume(Fiber& fiber) {
    running = &fiber;
    threadIdx = fiber.index;
    if (_setjmp(scheduler)) return;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}

static unsigned lane() { return (threadIdx.y * blockDim.x + threadIdx.x) % WARP; }

static Warp& warp() { return warps[(threadIdx.y * blockDim.x + threadIdx.x) / WARP]; }

static void arrive_lanes(unsigned mask) {
    if (!(mask >> lane() & 1)) {
        fprintf(stderr, "shim: lane %u is not in its own mask %08x\n", lane(), mask);
        abort();
    }
    arrive(warp().barriers[__builtin_ctz(mask)][__builtin_popcount(mask)], __builtin_popcount(mask));
}

template <class T>
static T exchange(unsigned mask, T value, unsigned from) {
    Warp& own = warp();
    memcpy(&own.values[lane()], &value, sizeof value);
    arrive_lanes(mask);
    memcpy(&value, &own.values[from], sizeof value);
    arrive_lanes(mask);  // nobody writes the next value before all have read this one
    return value;
}

// Runs one thread block; false when it hangs. order: 0 forward, 1 backward, else a shuffle's seed.
static bool run_block(unsigned order) {
    const unsigned count = blockDim.x * blockDim.y;
    memset(__start_shim_shared, RUBBISH, __stop_shim_shared - __start_shim_shared);
    memset(dynamic_shared, RUBBISH, sizeof dynamic_shared);
    block_barrier = Barrier();
    warps.assign((count + WARP - 1) / WARP, Warp());
    fibers.resize(count);
    stacks.resize(count * STACK_BYTES);
    for (unsigned i = 0; i < count; i++) {
        Fiber& fiber = fibers[i];
        fiber.started = fiber.finished = false;
        fiber.index = dim3{i % blockDim.x, i / blockDim.x, 0};
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = &stacks[i * STACK_BYTES];
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
    }
    static unsigned finished, step, seed;  // static: they live across longjmp
    static unsigned long long before;
    for (seed = order, finished = 0; finished < count;) {
        before = progress;
        for (finished = 0, step = 0; step < count; step++) {
            unsigned at = order == 1 ? count - 1 - step : step;
            if (order > 1) at = (step * (2 * (seed % 1021) + 1) + seed) & (count - 1);  // a permutation where count is 2^k
            if (order > 1 && (count & (count - 1))) at = (step + seed) % count;
            if (!fibers[at].finished) resume(fibers[at]);
            finished += fibers[at].finished;
        }
        seed = seed * 1664525u + 1013904223u;
        if (before == progress && finished < count) return false;
    }
    return true;
}

}  // namespace shim

static void __syncthreads() { shim::arrive(shim::block_barrier, blockDim.x * blockDim.y); }

template <class T>
static T __shfl_xor_sync(unsigned mask, T value, unsigned lanes) {
    return shim::exchange(mask, value, shim::lane() ^ lanes);
}

static unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    shim::Warp& own = shim::warp();
    own.values[shim::lane()] = value;
    shim::arrive_lanes(mask);
    for (unsigned lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) value = own.values[lane] > value ? (unsigned)own.values[lane] : value;
    shim::arrive_lanes(mask);
    return value;
}

static void atomicMax(unsigned* place, unsigned value) { *place = value > *place ? value : *place; }

template <class To, class From>
static To shim_bits(From from) {
    To to;
    static_assert(sizeof to == sizeof from, "same size");
    memcpy(&to, &from, sizeof to);
    return to;
}

static float __uint_as_float(unsigned bits) { return shim_bits<float>(bits); }
static float __int_as_float(int bits) { return shim_bits<float>(bits); }
static unsigned __float_as_uint(float value) { return shim_bits<unsigned>(value); }
static int __float_as_int(float value) { return shim_bits<int>(value); }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __frcp_rn(float a) { return 1.0f / a; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static double __dmul_rn(double a, double b) { return a * b; }
static double __ull2double_rn(unsigned long long a) { return (double)a; }
static unsigned __float2uint_rn(float a) { return a > 0 ? (a < 4294967040.0f ? (unsigned)rintf(a) : 0xffffffffu) : 0u; }
static float shim_from_half(unsigned short bits) { return (float)shim_bits<_Float16>(bits); }
static unsigned shim_to_half(float value) { return shim_bits<unsigned short>((_Float16)value); }

static unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t both = (uint64_t)high << 32 | low;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= (unsigned)(both >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
    return out;
}
